"""Small run folders as training would leave them, written without a model."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rookworld.rl.settings import TrainSettings
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.config import resolved
from rookworld.runtime.run_folder import Run
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Verdict

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
ANALYSIS = PolicyRow(START, ("e2e4", "d2d4", "g1f3", "c2c4", "b1c3"), (40, 30, 30, 20, 10))
MOVE = transition(START, "e2e4")
GOOD = " e2e4 d2d4 g1f3 c2c4 b1c3 E: 0.4 0.3 0.3 0.2 0.1 B: e2e4"
ILLEGAL = " e2e5 d2d4 g1f3 c2c4 b1c3 E: 0.4 0.3 0.3 0.2 0.1 B: e2e5"
JUNK = " <script>alert(1)</script> {{data}}"


def made_run(folder: Path, steps: int = 40, *, lr: float = 2e-5, done: bool = True) -> Path:
    """A run that learns: reward rises from 0.4 to 0.6, KL to 0.1, with one restore at step 20."""
    run = Run(folder)
    settings = TrainSettings.of(out=folder, steps=steps, lr=lr)
    write_json(folder / "config.json", resolved(settings))
    write_json(folder / "origin.json", {"version": version("rookworld"), "seed": 0})
    for step in range(1, steps + 1):
        run.append("metrics.jsonl", step_metrics(step, step / steps, lr))
    for step, skill in ((0, 0.0), (steps // 2, 0.5), (steps, 1.0)):
        run.append("eval.jsonl", {"step": step, **evaluation(skill)})
        write_probes(run, step, skill)
    for step in (1, steps):
        write_rollouts(run, step)
    message = "KL to the reference is 0.95 nats per token: last good state restored"
    restored = {"step": 20, "kind": "restore", "cause": "diverged_kl", "message": message}
    run.append("events.jsonl", restored)
    if done:
        run.finish()
    return folder


def step_metrics(step: int, skill: float, lr: float = 2e-5) -> dict[str, Any]:
    wobble = 0.01 * math.sin(7.0 * step)
    reward = 0.4 + 0.2 * skill + wobble
    parts = {"format": 0.99, "legal": 0.95, "best": reward, "candidates": 0.4}
    return {
        "step": step,
        "reward/mean": reward,
        "reward/P": reward - 0.1,
        "reward/A": reward + 0.1,
        **{f"reward/P/{part}": value for part, value in parts.items()},
        "reward/A/format": 1.0,
        "reward/std": 0.2,
        "reward/max": 1.0,
        "reward/flat_groups": 0.1,
        "kl/exact": 0.1 * skill,
        "kl/coef": 0.02,
        "policy/entropy": 0.9 - 0.2 * skill,
        "policy/clipped": 0.01,
        "policy/ratio_max": 1.5,
        "loss/total": 0.01 * wobble,
        "loss/policy": 0.01,
        "loss/kl": 0.1 * skill,
        "grad/norm": 0.5,
        "lr": lr,
        "tokens/mean_length": 20.0,
        "tokens/truncated": 0.0,
        "time/sample_s": 0.5,
        "time/score_s": 0.1,
        "time/update_s": 0.4,
        "time/step_s": 1.0,
        "mem/peak_mb": 800.0 + step,
        "guard/skipped": 0.0,
        "guard/recoveries": float(step >= 20),
        "novel/number": 1.0,
    }


def evaluation(skill: float) -> dict[str, Any]:
    def around(value: float, half: float, n: int = 400) -> dict[str, float]:
        return {"value": value, "n": n, "low": value - half, "high": value + half}

    return {
        "reward/greedy": around(0.5 + 0.1 * skill, 0.02),
        "reward/sampled": around(0.4 + 0.2 * skill, 0.02),
        "P/best": around(0.3 + 0.01 * skill, 0.04),
        "P/win_loss": around(0.1 - 0.06 * skill, 0.01),
        "A/by_kind/castle": around(0.9, 0.05, 20),
    }


def write_rollouts(run: Run, step: int) -> None:
    gold = ENVIRONMENT.answer(MOVE, "compact")
    wrong = gold.replace("4P3", "3P4")
    _write(run, "rollouts.jsonl", step, (GOOD, ILLEGAL, JUNK), (gold, wrong, JUNK))


def write_probes(run: Run, step: int, skill: float) -> None:
    """Greedy answers to fixed rows, which get better as rewards do."""
    gold = ENVIRONMENT.answer(MOVE, "compact")
    wrong = gold.replace("4P3", "3P4")
    _write(run, "probes.jsonl", step, (GOOD if skill else ILLEGAL,), (gold if skill else wrong,))


def _write(
    run: Run, stream: str, step: int, analyses: tuple[str, ...], moves: tuple[str, ...]
) -> None:
    rules = RewardRules()
    analysis = {"fen": ANALYSIS.fen, "moves": list(ANALYSIS.moves), "cp": list(ANALYSIS.cp)}
    after = {"fen": MOVE.fen, "move": MOVE.move, "next_fen": MOVE.next_fen, "kind": MOVE.kind}
    for task, row, truth, texts in (("P", ANALYSIS, analysis, analyses), ("A", MOVE, after, moves)):
        answers = [{"text": text, **_judged(row, text, rules)} for text in texts]
        run.append(stream, {"step": step, "task": task, "truth": truth, "answers": answers})


def _judged(row: PolicyRow | EnvironmentRow, text: str, rules: RewardRules) -> dict[str, Any]:
    if isinstance(row, PolicyRow):
        verdict: Verdict = POLICY.verify(row, text, rules)
    else:
        verdict = ENVIRONMENT.verify(row, text, rules)
    return {"reward": verdict.total, "parts": verdict.parts, "reason": verdict.reason}


def made_evolution(folder: Path, **config: Any) -> Path:
    """Four rounds of six: kept, refused as unclear, refused as worse, and one that gave no row."""
    changes = {1: (0.08, 0.03, 0.13), 2: (0.01, -0.02, 0.04), 3: (-0.06, -0.11, -0.01)}
    whys = ("better beyond the interval", "no clear difference", "worse beyond the interval")
    write_json(folder / "config.json", {"rounds": 6, "games": 8, **config})
    lines = []
    for number in (1, 2, 3, 4):
        before = {"value": 0.40 if number == 1 else 0.48, "low": 0.3, "high": 0.6}
        model = "nano" if number == 1 else str(folder / "rounds/round-001/final")
        rows = {"environment": 120 + number, "policy": 34} if number in changes else {}
        record: dict[str, Any] = {
            "round": number,
            "before_model": model,
            "kept": number == 1,
            "played": {"games": 8, "won": 3, "plies": 300, "rows": rows},
            "select_by": "reward/greedy",
            "before": before,
            "why": "no game gave a row to learn from",
        }
        if number in changes:
            names = ("difference", "low", "high")
            change = dict(zip(names, changes[number], strict=True))
            record |= {
                "after": before | {"value": before["value"] + change["difference"]},
                "paired": {"reward/greedy": change},
                "why": whys[number - 1],
            }
            made_run(folder / f"rounds/round-{number:03d}", steps=4)
        lines.append(json.dumps(record) + "\n")
    (folder / "rounds.jsonl").write_text("".join(lines))
    return folder
