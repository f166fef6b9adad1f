"""The laws before training, and whether one batch can be learnt: what `check` and `overfit` say.

Each law is one line: a name, whether it holds, and the numbers. They are the causes of failure
that cost earlier systems weeks: rewards that pay for junk, a sampler that is not the trainer, a
reference that is not the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from rookworld.evaluation.evaluate import Evaluation, HeldOut, evaluate
from rookworld.evaluation.generator import ModelAnswerer
from rookworld.evaluation.statistics import moving_mean, slope
from rookworld.model.gpt2 import GPT2
from rookworld.model.tokenizer import Tokenizer
from rookworld.rl.run_log import Evaluate, Hooks
from rookworld.rl.settings import TrainSettings
from rookworld.rl.trainer import train
from rookworld.runtime.errors import RookworldError
from rookworld.runtime.run_folder import read_lines
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.hacks import hacks
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import FORMAT_ONLY, ONE_WRONG, RewardRules
from rookworld.tasks.task import Row, Style

Rows = Sequence[Row]
WINDOW = 20
"""Steps averaged before a slope is taken."""
KNOWN = 0.99
"""Mean reward from which a batch is known by heart, and can only waver."""
KL_SHARE = 0.7
"""Share of the loss above which KL, not reward, drives training."""


@dataclass(frozen=True)
class Law:
    """One law, whether it holds, and what was measured."""

    name: str
    holds: bool
    detail: str


def gold_scores_one(rows: Rows, rules: RewardRules) -> Law:
    """The gold answer of every row earns exactly 1."""
    styles: tuple[Style, ...] = ("compact", "padded")
    low = [row for row in rows for style in styles if _gold(row, style, rules) != 1]
    detail = f"{len(rows)} rows in both styles" if not low else f"not for {low[0].fen}"
    return Law("gold answers score 1.0", not low, detail)


def _gold(row: Row, style: Style, rules: RewardRules) -> float:
    return _reward(row, task_of(row).answer(row, style), rules)


def hacks_score_low(rows: Rows, rules: RewardRules) -> Law:
    """No answer without chess, and no spoilt one, earns more than its limit."""
    # graduated counts right fields: one that is wrong is one level down, whatever it is
    most = FORMAT_ONLY if rules.reward_shaping == "graduated" else ONE_WRONG
    tried = [(row, hack) for row in rows for hack in hacks(row) if hack.limit <= most]
    earned = [(_reward(row, hack.text, rules), hack) for row, hack in tried]
    if not earned:
        return Law("hacks score low", True, "no rows")
    reward, worst = max(earned, key=lambda one: one[0] - one[1].limit)
    detail = f"nearest to its limit: {worst.name}, {reward:.3f} of {worst.limit}"
    return Law("hacks score low", reward <= worst.limit, detail)


def _reward(row: Row, text: str, rules: RewardRules) -> float:
    return task_of(row).verify(row, text, rules).total


def check(settings: TrainSettings, rows: Rows, on_law: Callable[[Law], None]) -> list[Law]:
    """Every law on these rows and this model; two steps and a short overfit are really run."""
    rules = settings.rewards
    laws: list[Law] = []

    def found(law: Law) -> None:
        laws.append(law)
        on_law(law)

    found(gold_scores_one(rows, rules))
    found(hacks_score_low(rows, rules))
    found(sampler_is_trainer(settings, rows))
    found(learns_one_batch(settings, rows))
    return laws


def sampler_is_trainer(settings: TrainSettings, rows: Rows) -> Law:
    """Before the first update KL is 0, ratios are 1, and sampler and trainer agree."""
    name = "step 0: KL 0, ratio 1, sampler = trainer"
    short = settings.but(steps=1, eval_every=0, save_every=1, out=settings.out / "start")
    try:
        train(short, rows, _no_evaluation)
    except RookworldError as error:
        return Law(name, False, str(error))
    first = next(iter(read_lines(short.out / "metrics.jsonl")))
    ratio = float(first["policy/ratio_max"])
    detail = (
        f"KL {first['kl/exact']:.1e}, largest ratio {ratio:.4f}, "
        f"log-prob gap {first['sampler/logp_gap']:.1e}"
    )
    return Law(name, True, detail)


def _no_evaluation(model: GPT2, tokenizer: Tokenizer) -> Evaluation:
    return Evaluation({}, {})


def learns_one_batch(settings: TrainSettings, rows: Rows, steps: int = 30) -> Law:
    """The reward of one fixed batch rises when nothing else is asked for."""
    # a rate and a K that show a rise within a minute, whatever the run's own are
    short = settings.but(lr=1e-4, k_samples=8, kl_coef=0.0, lr_schedule="constant")
    short = short.but(lr_warmup_steps=0, steps=steps, flat_tries=0)
    short = short.but(batch_size=4, eval_every=0, save_every=steps, reward_warmup_steps=0)
    short = short.but(out=settings.out / "overfit")
    # A rows have the least to learn; a run of them alone may have no others
    environment, others = environment_and_others(rows)
    alone = settings.mix_env_ratio == 1
    short = short.but(mix_env_ratio=float(alone))
    fixed = (environment if alone else others)[:4]
    try:
        train(short, fixed, _no_evaluation)
    except RookworldError as error:
        return Law("one batch can be learnt", False, str(error))
    rewards = [float(line["reward/mean"]) for line in read_lines(short.out / "metrics.jsonl")]
    early, late = fmean(rewards[: steps // 3]), fmean(rewards[-steps // 3 :])
    detail = f"sampled reward {early:.3f} -> {late:.3f} in {steps} steps"
    return Law("one batch can be learnt", late > early or late >= KNOWN, detail)


def environment_and_others(rows: Rows) -> tuple[list[Row], list[Row]]:
    """The rows of which --mix-env-ratio is the share, and those of all other tasks."""
    found: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        found[task_of(row) is not ENVIRONMENT].append(row)
    return found


def fixed_batch(rows: Rows, settings: TrainSettings) -> list[Row]:
    """One batch of rows in the run's mix, at least one of each task that the mix asks for."""
    size, ratio = settings.batch_size, settings.mix_env_ratio
    count = round(size * ratio)
    if 0 < ratio < 1:
        count = max(1, min(count, size - 1))
    environment, others = environment_and_others(rows)
    # a batch of one asks the tasks in turn
    return [*others[: max(size - count, int(ratio < 1))], *environment[:count]]


def greedy_on(batch: Rows, rules: RewardRules) -> Evaluate:
    """Greedy reward on the batch itself: here memorising is the point."""
    held = HeldOut(batch)
    return lambda model, tokenizer: evaluate(ModelAnswerer(model, tokenizer), held, rules)


def overfit(settings: TrainSettings, rows: Rows, hooks: Hooks) -> list[Law]:
    """Train on one fixed batch and judge the run by three criteria."""
    batch = fixed_batch(rows, settings)
    train(settings, batch, greedy_on(batch, settings.rewards), hooks=hooks)
    return overfit_criteria(settings.out)


def overfit_criteria(folder: Path) -> list[Law]:
    """What a run on one batch shows: a rising greedy reward, KL in bounds, steady gradients."""
    rewards = [float(line["reward/greedy"]["value"]) for line in read_lines(folder / "eval.jsonl")]
    metrics = list(read_lines(folder / "metrics.jsonl"))
    window = min(WINDOW, max(1, len(rewards) // 2))
    smooth = moving_mean(np.array(rewards), window)[window - 1 :]
    rise = slope(np.arange(len(smooth), dtype=np.float64), smooth)
    shares = [_kl_share(line) for line in metrics]
    high = longest_run(share > KL_SHARE for share in shares)
    norms = [float(line["grad/norm"]) for line in metrics]
    steady = all(norm == norm and norm < float("inf") for norm in norms)
    worst = max(norms) / max(sorted(norms)[len(norms) // 2], 1e-12)
    return [
        Law(
            f"greedy reward rises ({window}-step mean)",
            rise > 0 or (min(rewards) == max(rewards) == 1.0),
            f"slope {rise:+.2e} a step, {rewards[0]:.3f} -> {rewards[-1]:.3f}",
        ),
        Law(
            "KL is not persistently over 70 % of the loss",
            high < WINDOW,
            f"longest run {high} steps, mean share {fmean(shares):.0%}",
        ),
        Law(
            "gradient norms are finite and steady",
            steady and worst < 20,
            f"largest {max(norms):.2f}, {worst:.1f} times the median",
        ),
    ]


def _kl_share(line: dict[str, float]) -> float:
    kl = abs(float(line["kl/coef"]) * float(line["loss/kl"]))
    rest = abs(float(line["loss/policy"]))
    return kl / (kl + rest) if kl + rest > 0 else 0.0


def longest_run(flags: Iterable[bool]) -> int:
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest
