"""Rewards to advantages: a baseline, a scale, a clip; and token-level GAE.

Laws: the advantages of a group sum to zero under the group mean; a group is flat by its spread and
never by its mean, so a lone winner stays; a reward that is not a finite number drops its group and
never reaches a gradient; what spans the whole step (batch scale, running means) is built from sums
that add up over ranks. Left out: GAE over anything but tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rookworld.grpo.settings import AdvantageSettings

Baseline = Callable[[Tensor, Tensor], Tensor]
"""(rewards [groups, K], running mean of each group's task [groups]) -> baseline [groups, K]."""

Scale = Callable[[Tensor, float, float], Tensor]
"""(centred [groups, K], std over the step, floor) -> what to divide by, [groups, 1]."""


# --- the boundary: what comes back from scoring -------------------------------------------------


def reward_tensor(groups: Sequence[Sequence[float | None]]) -> Tensor:
    """Rewards [groups, K] in float64; a missing reward (None) becomes NaN for `valid_groups`."""
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise ValueError(f"groups differ in size: {sorted(sizes)}; every group needs K rewards")
    rows = [[math.nan if reward is None else reward for reward in group] for group in groups]
    return torch.tensor(rows, dtype=torch.float64)


def valid_groups(rewards: Tensor) -> Tensor:
    """True [groups] where every reward of the group is a finite number."""
    return rewards.isfinite().all(dim=-1)


def flat_groups(rewards: Tensor, tolerance: float = 1e-6) -> Tensor:
    """True [groups] where max - min is within `tolerance`: float noise, not signal."""
    return rewards.amax(dim=-1) - rewards.amin(dim=-1) <= tolerance


def _refuse_non_finite(rewards: Tensor) -> None:
    bad = (~valid_groups(rewards)).nonzero().flatten().tolist()
    if bad:
        first = bad[0]
        raise ValueError(
            f"group {first} has a reward that is not a finite number: {rewards[first].tolist()} "
            f"({len(bad)} of {len(rewards)} groups); drop such groups with valid_groups()"
        )


# --- baselines ----------------------------------------------------------------------------------


def group_mean(rewards: Tensor, running: Tensor) -> Tensor:
    """The group's own mean."""
    return rewards.mean(dim=-1, keepdim=True).expand_as(rewards)


def rloo(rewards: Tensor, running: Tensor) -> Tensor:
    """For each sample the mean of the others; independent of the sample, hence unbiased."""
    k = rewards.shape[-1]
    if k < 2:
        raise ValueError(f"baseline rloo needs at least 2 samples a group, got {k}")
    return (rewards.sum(dim=-1, keepdim=True) - rewards) / (k - 1)


def ema(rewards: Tensor, running: Tensor) -> Tensor:
    """The running mean of the group's task."""
    return running.unsqueeze(-1).expand_as(rewards)


def adaptive(rewards: Tensor, running: Tensor) -> Tensor:
    """Group mean pulled towards the running mean by w = s² / (s² + (mean - running)²).

    s² = variance / K is how uncertain the group mean is: a group that agrees with itself, or lies
    clearly away from the running mean, keeps its own mean; a scattered one borrows.
    """
    mean = rewards.mean(dim=-1, keepdim=True)
    uncertainty = rewards.var(dim=-1, keepdim=True, correction=0) / rewards.shape[-1]
    away = (mean - running.unsqueeze(-1)).square()
    total = uncertainty + away
    weight = torch.where(total > 0, uncertainty / total.clamp_min(1e-30), 0.0)
    return (mean + weight * (running.unsqueeze(-1) - mean)).expand_as(rewards)


BASELINES: Mapping[str, Baseline] = {
    "group_mean": group_mean,
    "rloo": rloo,
    "ema": ema,
    "adaptive": adaptive,
}


def task_sums(rewards: Tensor, tasks: Tensor, n_tasks: int) -> Tensor:
    """[n_tasks, 2] float64: sum and count of the rewards of each task; adds up over ranks."""
    per_group = torch.stack(
        [rewards.double().sum(dim=-1), torch.full_like(tasks, rewards.shape[-1]).double()], dim=-1
    )
    sums = torch.zeros(n_tasks, 2, dtype=torch.float64, device=rewards.device)
    return sums.index_add(0, tasks, per_group)


class RunningMeans:
    """Exponential moving mean of the reward, one per task; a task starts at its first mean."""

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum
        self.means: dict[int, float] = {}

    def at(self, tasks: Tensor, sums: Tensor) -> Tensor:
        """Running mean [groups] of each group's task; a task never seen uses this step's mean."""
        known = [
            self.means.get(task, total / count if count else 0.0)
            for task, (total, count) in enumerate(sums.tolist())
        ]
        return torch.tensor(known, dtype=sums.dtype, device=sums.device)[tasks]

    def update(self, sums: Tensor) -> None:
        """Take in a step's `task_sums` (of all ranks), after the step's advantages were made."""
        for task, (total, count) in enumerate(sums.tolist()):
            if count:
                mean = total / count
                kept = self.means.get(task, mean)
                self.means[task] = self.momentum * kept + (1 - self.momentum) * mean

    def state_dict(self) -> dict[str, float]:
        return {str(task): mean for task, mean in sorted(self.means.items())}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.means = {int(task): float(mean) for task, mean in state.items()}


# --- scale and clip -----------------------------------------------------------------------------


def moments(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """[3] float64: sum, sum of squares, count of `values` (where `mask`); adds up over ranks."""
    kept = values.double() if mask is None else values.double()[mask.bool()]
    count = torch.tensor(float(kept.numel()), dtype=torch.float64, device=kept.device)
    return torch.stack([kept.sum(), kept.square().sum(), count])


def batch_std(total: float, total_sq: float, n: float) -> float:
    """Standard deviation from the three `moments`; 0 for nothing."""
    if n <= 0:
        return 0.0
    mean = total / n
    return math.sqrt(max(0.0, total_sq / n - mean * mean))


def no_deviation(centred: Tensor, step_std: float, floor: float) -> Tensor:
    """1: advantages stay as they are."""
    return torch.ones_like(centred[..., :1])


def group_deviation(centred: Tensor, step_std: float, floor: float) -> Tensor:
    """The group's own standard deviation, at least `floor`."""
    return centred.std(dim=-1, keepdim=True, correction=0).clamp_min(_positive(floor))


def step_deviation(centred: Tensor, step_std: float, floor: float) -> Tensor:
    """The standard deviation over the step, at least `floor`."""
    return torch.full_like(centred[..., :1], max(step_std, _positive(floor)))


def _positive(floor: float) -> float:
    # A floor of 0 still must not turn an all-equal group into 0 / 0.
    return max(floor, 1e-8)


SCALES: Mapping[str, Scale] = {
    "none": no_deviation,
    "group": group_deviation,
    "batch": step_deviation,
}


def group_advantages(rewards: Tensor, running: Tensor, settings: AdvantageSettings) -> Tensor:
    """Rewards minus baseline [groups, K], not yet scaled; refuses a reward that is not finite."""
    _refuse_non_finite(rewards)
    return rewards - BASELINES[settings.baseline_type](rewards, running)


def scaled_advantages(centred: Tensor, step_std: float, settings: AdvantageSettings) -> Tensor:
    """Scaled, then clipped; `step_std` is `batch_std` of the centred advantages of all ranks.

    Token-level advantages pass as [sequences, tokens]; for them scale `group` means a sequence.
    """
    divisor = SCALES[settings.advantage_scale](centred, step_std, settings.advantage_std_floor)
    return clipped(centred / divisor, settings)


def guide_advantages(gains: Tensor, step_std: float, settings: AdvantageSettings) -> Tensor:
    """Advantages of true answers [answers] from their rewards less the mean of what was sampled.

    Never in a group's own deviation, which is nothing where all samples are equally wrong.
    """
    whole = settings.advantage_scale != "none"
    divisor = max(step_std, _positive(settings.advantage_std_floor)) if whole else 1.0
    return clipped(gains / divisor, settings)


def clipped(advantages: Tensor, settings: AdvantageSettings) -> Tensor:
    most = settings.advantage_clip
    return advantages.clamp(-most, most) if most > 0 else advantages


# --- token level --------------------------------------------------------------------------------


def field_advantages(
    rewards: Tensor,
    centred: Tensor,
    worths: Tensor,
    stages: Tensor,
    step_std: float,
    settings: AdvantageSettings,
    *,
    paid_by: str = "fields",
) -> Tensor:
    """Advantages of tokens [groups, K, T] that are not paid for what stands before them.

    `worths` [groups, K, S] is what an answer promised at each stage after the first (NaN where it
    never came so far), `stages` [groups, K, T] the stage of each token, 0 for the whole answer. A
    promise is known before the token is drawn, so subtracting it leaves the gradient's mean as it
    is and takes away the noise of everything before. All stages share the divisor of stage 0.
    `fields` pays a stage all that follows; `outlook` what it promised anew, which takes away the
    noise of everything behind it too.
    """
    ends = rewards[..., None].expand_as(worths)
    divisor = SCALES[settings.advantage_scale](centred, step_std, settings.advantage_std_floor)
    if paid_by == "outlook":
        begun, ends = next_worths(rewards, worths)
        centred = centred + above_others(begun - rewards, settings)
    later = above_others(ends - worths, settings)
    by_stage = torch.cat([centred[..., None], later.nan_to_num(0.0)], dim=-1)
    return clipped(by_stage.gather(-1, stages) / divisor[..., None], settings)


def above_others(values: Tensor, settings: AdvantageSettings) -> Tensor:
    """Values [groups, K, ...] less their group's mean; with rloo less the mean of the others.

    NaN neither counts nor is counted; who is alone is above nobody.
    """
    away = values - values.nanmean(dim=1, keepdim=True)
    if settings.baseline_type != "rloo":
        return away
    count = (~values.isnan()).sum(dim=1, keepdim=True)
    return away * count / (count - 1).clamp_min(1)


def next_worths(rewards: Tensor, worths: Tensor) -> tuple[Tensor, Tensor]:
    """What comes after stage 0 [groups, K] and after each later one [groups, K, S].

    The next promise that was made, or the reward where there was none.
    """
    coming, ends = rewards, torch.empty_like(worths)
    for stage in range(worths.shape[-1] - 1, -1, -1):
        ends[..., stage] = coming
        coming = torch.where(worths[..., stage].isnan(), coming, worths[..., stage])
    return coming, ends


@torch.no_grad()
def gae(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation along tokens: (advantages, returns), both [N, T].

    `values` [N, T] are predicted before each sampled token, `rewards` [N] arrive with the last
    one, `mask` [N, T] marks the sampled tokens (one run of them per row). Zero outside the mask.
    """
    _refuse_non_finite(rewards.unsqueeze(-1))
    live = mask.to(values.dtype)
    values = values.masked_fill(~mask.bool(), 0.0)
    advantages = torch.zeros_like(values)
    carried = values.new_zeros(len(values))
    next_value = torch.zeros_like(carried)
    next_live = torch.zeros_like(carried)
    for t in range(values.shape[1] - 1, -1, -1):
        reward = rewards.to(values.dtype) * (1 - next_live)
        delta = reward + gamma * next_value - values[:, t]
        carried = (delta + gamma * lam * carried) * live[:, t]
        advantages[:, t] = carried
        next_value, next_live = values[:, t], live[:, t]
    return advantages, advantages + values
