"""The environment for other trainers: episodes by the true rules, rewards by the tasks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import chess
import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from legal_engine import install_legal
from rookworld.data.sources import load_rows
from rookworld.env import EnvSettings, Episode, starts_from, verdict_by_rules
from rookworld.env.episode import Start, opened
from rookworld.env.gym import LONGEST, RookWorldEnv
from rookworld.model.weights import load_model
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Style
from tiny_training import save_tiny, save_warm, tiny_rows, write_jsonl

ROOT = Path(__file__).parents[1]
FOOLS_MATE = ("f2f3", "e7e5", "g2g4")
RULES = RewardRules()
STYLES: tuple[Style, ...] = ("compact", "padded")


def analysis(fen: str, best: str = "", cp: int = 10) -> str:
    """A legal, complete analysis of a position that chooses `best`."""
    legal = sorted(move.uci() for move in chess.Board(fen).legal_moves)
    best = best or legal[0]
    moves = [best, *[move for move in legal if move != best][:4]]
    return f" {' '.join(moves)} E: {' '.join([str(cp / 100)] * len(moves))} B: {best}"


def gold(episode: Episode, best: str = "") -> str:
    """The true answer to what is asked, or a legal analysis where nobody knows it."""
    row = episode.row
    if isinstance(row, EnvironmentRow):
        return ENVIRONMENT.answer(row, "compact")
    if row.moves and not best:
        return POLICY.answer(row, "compact")
    return analysis(row.fen, best)


def test_an_episode_goes_from_analysis_to_environment_and_back_on_true_positions() -> None:
    episode = Episode(opened(()))
    assert episode.prompt.startswith("P: ")
    assert episode.answer(gold(episode, "e2e4")).reward == 1.0
    assert episode.prompt == f"A: {chess.STARTING_FEN}+e2e4+e2e4+"
    assert (
        episode.answer("nonsense").reward == RULES.a_malformed
    )  # and the game goes on all the same
    after = transition(chess.STARTING_FEN, "e2e4").next_fen
    assert episode.prompt == POLICY.prompt(PolicyRow(after, (), ()), "compact")
    episode.answer(gold(episode, "e7e5"))
    assert isinstance(episode.row, EnvironmentRow)
    assert episode.row.history == ("e2e4", "e7e5")
    assert not episode.end


def test_mate_ends_an_episode_after_the_environment_was_asked() -> None:
    episode = Episode(opened(FOOLS_MATE))
    episode.answer(gold(episode, "d8h4"))
    assert episode.answer(gold(episode)).verdict.reason == "exact"
    assert episode.end == "mate"
    assert episode.reward == 2.0
    with pytest.raises(ValueError, match="over"):
        episode.answer("")


def test_an_illegal_move_is_asked_about_and_ends_it() -> None:
    episode = Episode(opened(()))
    turn = episode.answer(analysis(chess.STARTING_FEN).replace("a2a3", "a2a5"))
    assert turn.verdict.reason == "illegal move a2a5"
    assert 0 < turn.reward < 1
    assert episode.answer(gold(episode)).reward == 1.0
    assert episode.end == "illegal"


def test_what_cannot_be_read_ends_it_and_costs_what_it_costs_elsewhere() -> None:
    for text, finished in (("", True), ("e2e4", True), (analysis(chess.STARTING_FEN), False)):
        episode = Episode(opened(()))
        assert episode.answer(text, finished=finished).reward == RULES.p_malformed
        assert episode.end == "malformed"


def test_turns_are_counted() -> None:
    episode = Episode(opened(()), EnvSettings(max_turns=3))
    while not episode.end:
        episode.answer(gold(episode))
    assert episode.cut_off
    assert len(episode.turns) == 3


def test_labels_judge_where_there_are_some_also_on_the_way() -> None:
    first, second = tiny_rows(2, 0)
    assert isinstance(first, PolicyRow)
    assert isinstance(second, PolicyRow)
    episode = Episode(Start(first), labels={position_key(second.fen): second})
    turn = episode.answer(gold(episode))
    assert (turn.reward, turn.judged_by) == (1.0, "labels")
    episode.answer(gold(episode))
    worse = POLICY.answer(PolicyRow(second.fen, second.moves[::-1], second.cp[::-1]), "compact")
    assert episode.answer(worse).reward < 1.0
    assert episode.turns[-1].judged_by == "labels"


def test_the_rules_pay_structure_alone_and_see_mates_that_are_none() -> None:
    row = opened(FOOLS_MATE).row
    perfect = verdict_by_rules(row, analysis(row.fen, "d8h4", 99_999), RULES)
    assert "no mate in one" in perfect.reason  # the other four do not mate
    fine = verdict_by_rules(row, analysis(row.fen, "d8h4"), RULES)
    assert fine.total == 1.0
    assert fine.parts == {**dict.fromkeys(POLICY.parts, 0.0), "format": 1.0, "legal": 1.0}
    short = verdict_by_rules(row, " d8h4 E: 0.1 B: d8h4", RULES)
    stray = verdict_by_rules(row, analysis(row.fen).replace("B: a7a5", "B: g7g5"), RULES)
    for verdict in (perfect, short, stray):
        assert verdict.total < fine.total


def test_gymnasium_finds_nothing_wrong(tmp_path: Path) -> None:
    rows = str(write_jsonl(tmp_path / "rows.jsonl", tiny_rows()))
    check_env(gymnasium.make("RookWorld-v0", data=[rows]).unwrapped)
    env = gymnasium.make("RookWorld-v0", max_turns=2, render_mode="ansi")
    check_env(env.unwrapped)
    prompt, info = env.reset(seed=3)
    assert prompt == env.reset(seed=3)[0]
    assert info["task"] == "P"
    _, reward, terminated, truncated, told = env.step(analysis(info["fen"]))
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert (told["answered"], told["task"], told["judged_by"]) == ("P", "A", "rules")
    *_, terminated, truncated, told = env.step("")
    assert (terminated, truncated, told["end"]) == (False, True, "max_turns")
    assert "P: " in str(env.render())
    env.close()


def test_every_prompt_and_gold_answer_is_in_the_spaces() -> None:
    env = RookWorldEnv()
    for row in load_rows("embedded:test", 400):
        for style in STYLES:
            task = task_of(row)
            assert env.observation_space.contains(task.prompt(row, style))
            assert env.action_space.contains(task.answer(row, style))
            assert len(task.answer(row, style)) < LONGEST / 2
    env.close()


def test_stockfish_judges_what_has_no_labels(tmp_path: Path) -> None:
    env = RookWorldEnv(judge="stockfish", engine=str(install_legal(tmp_path)), nodes=10)
    env.reset(seed=0)
    row = env.episode.row
    assert isinstance(row, PolicyRow)
    assert env.episode.judge is not None
    best = env.episode.judge.analyse(row)
    _, reward, *_, told = env.step(POLICY.answer(PolicyRow(row.fen, best.moves, best.cp), "padded"))
    assert (reward, told["judged_by"]) == (1.0, "judge")
    env.close()


@pytest.mark.parametrize("wrong", [{"style": "wide"}, {"judge": "labels"}, {"max_turns": 0}])
def test_a_wrong_setting_is_the_users_to_know(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RookWorldEnv(**wrong)


def test_starts_are_rows_or_openings(tmp_path: Path) -> None:
    rows = tiny_rows(3, 2)
    source = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [start.row for start in starts_from(EnvSettings(data=(source,)))] == rows[:3]
    assert len({start.row.fen for start in starts_from(EnvSettings())}) > 60


def test_neither_the_core_nor_an_episode_loads_gymnasium_or_torch() -> None:
    code = (
        "import sys\nimport rookworld.cli, rookworld.tasks.registry, rookworld.env.episode\n"
        "sys.exit('torch' in sys.modules or 'rookworld.env.gym' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for path in (ROOT / "src").rglob("*.py"):
        if path.parent.name != "env":
            assert "gymnasium" not in path.read_text(encoding="utf-8"), path


def test_the_scripts_of_the_documentation_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/env.md").read_text(encoding="utf-8")
    asked, trained = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(asked, {})
    assert "P: " in capsys.readouterr().out
    save_tiny(tmp_path / "cold")
    save_warm(tmp_path / "model", tmp_path / "cold")
    left: dict[str, Any] = {}
    assert '"nano"' in trained
    before = load_model(tmp_path / "model").wte.weight
    small = trained.replace('"nano"', repr(str(tmp_path / "model"))).replace("range(8)", "range(4)")
    exec(small, left)
    assert capsys.readouterr().out.count("step ") == 2
    assert not left["model"].wte.weight.equal(before)
