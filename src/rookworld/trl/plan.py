"""What a run with `--backend trl` will do: its phases, its rows, and the flags TRL cannot honour.

Laws: a plan is made without torch, model, judge or TRL; a flag that would be ignored is refused by
name; no position is both trained on and held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rookworld.data.rows import task_name
from rookworld.evaluation.evaluate import HeldOut
from rookworld.rl.leakage import trained_on
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import value_of
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import TASKS
from rookworld.tasks.task import Row

INSTALL = 'pip install "rookworld[trl]"'
FIXED = (
    *("trained", "optimizer"),
    *("updates_per_rollout", "baseline_type", "advantage_std_floor", "reward_norm"),
    *("gae", "gamma", "gae_lambda", "kl_collect_cap", "ref_reset_kl", "ref_device"),
    *("recovery_lr_factor", "max_recoveries", "recompute", "shard", "score_workers"),
    *("graphs", "distill_coef", "distill_data", "distill_prompts"),
    *("distill_first", "distill_first_power", "distill_schedule"),
)
"""Settings that GRPOTrainer has nothing for; they must keep their defaults."""
KL_TYPES = ("forward", "k3")
"""TRL estimates KL from the sampled tokens: unbiased (forward), or plain k3."""


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of one task."""

    letter: str
    first: int
    """Counted from 0."""
    steps: int


def phases(steps: int, cycle: int, ratio: float) -> list[Phase]:
    """P and A in turns; of every `cycle` steps a share of `ratio` is A, the rest P.

    Both get at least one step of a cycle unless the ratio leaves one of them out.
    """
    environment = round(cycle * ratio)
    if 0 < ratio < 1:
        environment = min(max(environment, 1), cycle - 1)
    lengths = {POLICY.letter: cycle - environment, ENVIRONMENT.letter: environment}
    made: list[Phase] = []
    done = 0
    while done < steps:
        for letter, length in lengths.items():
            length = min(length, steps - done)
            if length:
                made.append(Phase(letter, done, length))
                done += length
    return made


def letters(settings: TrainSettings) -> str:
    """The task of every step, as one text of P and A."""
    turns = phases(settings.steps, settings.trl_phase_steps, settings.mix_env_ratio)
    return "".join(phase.letter * phase.steps for phase in turns)


def check_flags(settings: TrainSettings) -> None:
    """Refuse, by name, what TRL would ignore."""
    default = TrainSettings()
    refused = [name for name in FIXED if value_of(settings, name) != value_of(default, name)]
    if settings.kl.kl_type not in KL_TYPES:
        refused.append("kl_type")
    # `fields`, the default, is nobody's wish
    if settings.advantages.credit in ("outlook", "choices"):
        refused.append("credit")
    if settings.sampling.flat_tries > default.sampling.flat_tries:
        refused.append("flat_tries")
    if settings.sampling.guide > 0:
        refused.append("guide")
    of_tasks = ("p_temperature", "a_temperature")
    warmer = [
        name
        for name in of_tasks
        if value_of(settings, name) not in (None, settings.sampling.temperature)
    ]
    refused += warmer
    if settings.compute.device not in ("auto", "cpu", "cuda"):
        refused.append("device")
    if refused:
        flags = ", ".join(as_flag(name, value_of(settings, name)) for name in refused)
        why = "TRL's log-probabilities are of the one temperature it was built with; "
        raise ConfigError(
            f"--backend trl cannot honour {flags}: {why if warmer else ''}leave it out or use "
            "--backend native (docs/trl.md says why)"
        )


def as_flag(name: str, value: object) -> str:
    """A setting as one would have typed it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def installed() -> str | None:
    """TRL's version, None without it."""
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


def require_trl() -> None:
    if installed() is None:
        raise ConfigError(f"--backend trl needs TRL: {INSTALL}")


def check_rows(settings: TrainSettings, rows: Sequence[Row], held: HeldOut) -> Counter[str]:
    """How many rows each task has; both must have some, and held-out positions be none of them."""
    counts = Counter(task_name(row) for row in rows)
    for letter in sorted(set(letters(settings))):
        if not counts[letter]:
            raise DataError(
                f"no {letter}: rows in --data {' '.join(settings.data)}, but --mix-env-ratio "
                f"{settings.mix_env_ratio} asks for them"
            )
    if seen := trained_on(settings, rows, held):
        raise DataError(seen)
    return counts


def numbered(counts: Mapping[str, int], joint: str = ", ") -> str:
    """How many there are of each task."""
    return joint.join(f"{counts.get(letter, 0):,} {letter}" for letter in TASKS)


def plan(settings: TrainSettings, rows: Sequence[Row], held: HeldOut) -> list[str]:
    """The lines that `--dry-run` prints; raises what would stop the run."""
    check_flags(settings)
    counts = check_rows(settings, rows, held)
    turns = phases(settings.steps, settings.trl_phase_steps, settings.mix_env_ratio)
    spans = [f"{one.letter} {one.first + 1}–{one.first + one.steps}" for one in turns]
    shown = spans if len(spans) <= 8 else [*spans[:6], "…", spans[-1]]
    of_steps = Counter(letters(settings))
    found = installed()
    return [
        f"backend: TRL {found}" if found else f"backend: TRL is not installed; {INSTALL}",
        f"rows: {numbered(counts)}; held out: {numbered(Counter(map(task_name, held.rows)))}, "
        "no position in common",
        f"phases: {', '.join(shown)} ({numbered(of_steps, ' and ')} steps)",
        settings.outline(),
    ]
