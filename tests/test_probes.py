"""Fixed held-out rows that are answered at every evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from rookworld.data.sources import load_rows
from rookworld.evaluation.evaluate import held_out_from
from rookworld.evaluation.generator import Answer
from rookworld.evaluation.probes import PROBES, answer_probes, choose_probes
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import Style


class Gold:
    """Knows the answers."""

    style: Style = "compact"
    samples = 1

    def __init__(self) -> None:
        rows = POLICY.select(load_rows("embedded:validation"))
        self.known = {POLICY.prompt(row, "compact"): POLICY.answer(row, "compact") for row in rows}

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        return [Answer(self.known.get(prompt, "no idea")) for prompt in prompts]


def test_probes_are_of_both_sides_and_many_kinds_and_the_same_every_time() -> None:
    held = held_out_from("embedded:validation", {"P": 100, "A": 60}, n_mates=0)
    chosen = choose_probes(held.rows)
    assert chosen == choose_probes(held.rows)
    positions, transitions = chosen[:PROBES], chosen[PROBES:]
    assert [row.fen.split()[1] for row in positions].count("w") == PROBES // 2
    assert len({row.kind for row in transitions}) == len(transitions) == PROBES  # type: ignore[attr-defined]


def test_an_answer_is_kept_with_its_verdict() -> None:
    held = held_out_from("embedded:validation", {"P": 4, "A": 2}, n_mates=0)
    records = answer_probes(Gold(), choose_probes(held.rows, 2), RewardRules())
    assert [record["task"] for record in records] == ["P", "P", "A", "A"]
    assert [record["answers"][0]["reward"] for record in records[:2]] == [1.0, 1.0]
    assert records[2]["answers"][0]["reason"].startswith("malformed")
    assert records[0]["truth"]["fen"] == held.rows[0].fen
