"""Answers scored beside the sampler are the answers scored by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from label_judge import LabelJudge
from rookworld.model.sampling.sampler import Sampling
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rollout import collector
from rookworld.rollout.collector import Collector
from rookworld.rollout.prompts import Prompts
from rookworld.rollout.types import Group
from rookworld.tasks.policy import POLICY
from rookworld.tasks.prefix_value import move_values
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.scorer import Question, Scorer, Workers
from rookworld.tasks.task import Analysis, PolicyRow
from tiny_training import tiny_rows

ROWS = tiny_rows()


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.pool.shutdown()


def questions() -> list[Question]:
    rows = [row for row in ROWS if isinstance(row, PolicyRow)]
    gold = [POLICY.answer(row, "compact") for row in rows]
    return [
        Question(row, (text, "junk"), (True, True)) for row, text in zip(rows, gold, strict=True)
    ]


def test_workers_score_as_we_do(pool: Workers) -> None:
    scorer, asked = Scorer(RewardRules(p_malformed=-0.7), 0.5, by_field=True), questions()
    found = pool.begin(scorer.all, asked)()
    assert found == scorer.all(asked)
    assert {one.verdicts[1].total for one in found} == {-0.7}


def test_choices_are_scored_by_the_rules_the_ramp_and_the_judge_of_the_rest(pool: Workers) -> None:
    rules, asked = RewardRules(p_malformed=-0.7), questions()
    judge = MildJudge()
    scorer = Scorer(rules, 0.5, by_field=True, judge=judge, by_choice=True)
    found = scorer.all(asked)
    for question, scores in zip(asked, found, strict=True):
        assert isinstance(question.row, PolicyRow)
        expected = move_values(question.row, question.texts, rules, judge, 0.5)
        assert scores.move_values == expected
        assert expected != move_values(question.row, question.texts, rules, None, 0.5)
        assert expected != move_values(question.row, question.texts, rules, judge)
    without = replace(scorer, judge=None)
    assert pool.begin(without.all, asked)() == without.all(asked)


class MildJudge(LabelJudge):
    """To whom all labelled moves are alike."""

    def analyse(self, row: PolicyRow) -> Analysis:
        return Analysis(row.moves, (0,) * len(row.moves))


LOSES_A_WORKER = """
import os, signal, sys, time, warnings
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.scorer import Scorer, Workers
from test_scoring import questions

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    workers, scorer, asked = Workers(2), Scorer(RewardRules()), questions() * 8
    assert workers.begin(scorer.all, asked)() == scorer.all(asked)
    numbers = sorted(workers.pool._processes)
    os.kill(numbers[int(sys.argv[1])], getattr(signal, sys.argv[2]))
    before, patience = time.monotonic(), 40
    while set(numbers) & set(workers.pool._processes):  # a busy machine takes its time to tell
        assert workers.begin(scorer.all, asked)() == scorer.all(asked)
        assert time.monotonic() < before + patience, "the others were not replaced"
    assert workers.begin(scorer.all, asked)() == scorer.all(asked)
    print("ended")
"""


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("killer", ["SIGKILL", "SIGTERM"])
def test_a_lost_worker_costs_time_and_nothing_else(
    tmp_path: Path, number: int, killer: str
) -> None:
    script = tmp_path / "lose.py"
    script.write_text(LOSES_A_WORKER)
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, str(script), str(number), killer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=there)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_workers_survive_the_interrupt_of_their_parent(pool: Workers) -> None:
    scorer, asked = Scorer(RewardRules()), questions()
    pool.begin(scorer.all, asked)()
    before = list(pool.pool._processes)
    for number in before:
        os.kill(number, signal.SIGINT)
    assert pool.begin(scorer.all, asked)() == scorer.all(asked)
    assert list(pool.pool._processes) == before
    assert all(process.is_alive() for process in pool.pool._processes.values())


UNGUARDED = """
from pathlib import Path
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.processes import refuse_unguarded_scripts
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.scorer import Scorer, Workers
from test_scoring import questions

refuse_unguarded_scripts()
print("trains", flush=True)
Workers(1).begin(Scorer(RewardRules()).all, questions())()
"""


def test_a_script_without_a_guard_trains_once(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=there)
    assert done.stdout == "trains\n"
    assert "if __name__ == '__main__'" in done.stderr


def test_groups_do_not_depend_on_who_scores_them(
    pool: Workers, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(tiny_folder), Tokenizer.load(tiny_folder)
    drawn = {"P": Sampling(max_new_tokens=6), "A": Sampling(max_new_tokens=9)}
    alone = Collector(model, tokenizer, drawn, 3, 0, RewardRules(), by_field=True)
    prompts = Prompts(ROWS, tokenizer, 0.5, seed=0).take(7)
    monkeypatch.setattr(collector, "ROWS_AT_ONCE", 6)  # two prompts a part
    here = alone.groups(prompts, 1, 1.0)
    there = replace(alone, workers=pool).groups(prompts, 1, 1.0)
    assert [group.prompt for group in here] == prompts
    for one, other in zip(here, there, strict=True):
        assert same(one, other)


def same(one: Group, other: Group) -> bool:
    mine, its = one.token_values, other.token_values
    assert mine is not None and its is not None
    worths = torch.equal(mine.values.nan_to_num(9), its.values.nan_to_num(9))
    return (
        (one.prompt, one.texts, one.verdicts) == (other.prompt, other.texts, other.verdicts)
        and torch.equal(one.tokens, other.tokens)
        and torch.equal(mine.stages, its.stages)
        and worths
    )
