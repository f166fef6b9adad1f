"""A run as it trains: its curves and sampled answers, sent whenever its files have changed.

Laws: the folder is only read; what its files hold is data; readers are few, and one that has gone
is forgotten. The curves are those of the report, drawn by the same script.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

from rookworld import __version__
from rookworld.report.page import fingerprint, script_json
from rookworld.report.page_data import metric_texts, panels_for, run_data
from rookworld.report.run_reader import RunRecord, read_run
from rookworld.tasks.registry import TASKS
from rookworld.web.subject import Subject

LOOK_S = 0.5
BEAT_S = 15.0
"""A line is sent at least so often: a reader that has gone is noticed by it."""
MOST_EFFORT = 0.1
"""Share of the time that may go into reading: a long run trains on the same machine."""
MOST_READERS = 8
MOST_SAMPLES = 12
LONGEST_TEXT = 2_000


def run_record(run: Path, subject: Subject) -> dict[str, Any]:
    """What the live view draws; the shape is that of the report's data."""
    found = read_run(run)
    return {
        "version": __version__,
        "live": True,
        "metrics": metric_texts([found]),
        "panels": panels_for([found]),
        "runs": [run_data(found, cards=0)],
        "samples": samples(found),
        "checkpoints": checkpoint_records(subject),
    }


def checkpoint_records(subject: Subject) -> list[dict[str, Any]]:
    return [{"name": one.name, "step": one.step} for one in subject.checkpoints()]


def samples(run: RunRecord) -> list[dict[str, Any]]:
    """The newest sampled answers, of each prompt the best."""
    found = []
    for record in reversed(run.rollouts):
        truth, answers, task = record.get("truth"), record.get("answers"), record.get("task")
        if not isinstance(truth, dict) or not isinstance(answers, list):
            continue
        if not isinstance(task, str) or task not in TASKS:
            continue
        best = max(filter(_is_scored, answers), key=lambda one: float(one["reward"]), default=None)
        if best is None or not isinstance(truth.get("fen"), str):
            continue
        found.append(
            {
                "step": int(record["step"]),
                "task": task,
                "fen": truth["fen"],
                "move": str(truth.get("move", "")),
                "text": str(best.get("text", "")).strip()[:LONGEST_TEXT],
                "reason": str(best.get("reason", ""))[:LONGEST_TEXT],
                "reward": float(best["reward"]),
                "of": len(answers),
            }
        )
        if len(found) == MOST_SAMPLES:
            break
    return found


def _is_scored(answer: object) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get("reward"), int | float)


class Followers:
    """Whoever watches a run."""

    def __init__(self, run: Path, subject: Subject) -> None:
        self.run = run
        self.subject = subject
        self.count = 0
        self._kept = ("", "")

    @property
    def full(self) -> bool:
        return self.count >= MOST_READERS

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: the data at once, and again whenever there is news."""
        self.count += 1
        tag, quiet_s = "", 0.0
        try:
            while True:
                begun = monotonic()
                fresh, text = await asyncio.to_thread(self._news, tag)
                if fresh != tag:
                    tag, quiet_s = fresh, 0.0
                    yield f"data: {text}\n\n"
                elif quiet_s >= BEAT_S:
                    quiet_s = 0.0
                    yield ": nothing new\n\n"
                pause_s = max(LOOK_S, (monotonic() - begun) / MOST_EFFORT)
                await asyncio.sleep(pause_s)
                quiet_s += pause_s
        finally:
            self.count -= 1

    def _news(self, tag: str) -> tuple[str, str]:
        """What the files are like now, and the data if they are not as `tag` says."""
        fresh = fingerprint([self.run]) + str(len(self.subject.checkpoints()))
        if fresh not in (tag, self._kept[0]):
            self._kept = fresh, script_json(run_record(self.run, self.subject))
        return self._kept if fresh != tag else (tag, "")
