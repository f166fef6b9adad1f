"""Targets for a list of moves that is written one by one, from how often a teacher lists each.

The target of the next move is proportional to a power of its frequency, less what this list has
named already; of the first move, to how often it stands first. Laws: the target is that by
enumeration; no gradient reaches the lists; where nothing is left to name, the target is the list's
end. Left out: targets that lean towards rewards, which were no better (docs/experiments.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ListTargets:
    """Rows of a pass at which a list begins, goes on or ends, and what should stand there."""

    rows: Tensor
    """[n] which of the pass's rows."""
    lines: Tensor
    """[n] the line of `logits` a row belongs to."""
    named: Tensor
    """[n, names] what the row's list held before, filled up with `end`."""
    logits: Tensor
    """[lines, vocabulary] of each id's target before anything is named; -inf: it must not be."""
    weights: Tensor
    """[n] how much a row counts."""
    ends: Tensor
    """[n] whether the list should have ended here."""
    end: int
    """The id that ends a list."""

    def logp(self) -> Tensor:
        """[n, vocabulary] how each row should go on; log-probabilities."""
        logits = self.logits[self.lines].scatter(1, self.named, -torch.inf)
        over = torch.full_like(logits[:1], -torch.inf)
        over[:, self.end] = 0.0
        return torch.where(self.ends[:, None], over, logits).log_softmax(-1)


def power_logits(frequencies: Tensor, power: float) -> Tensor:
    """Logits of a distribution proportional to `frequencies` to that power."""
    return torch.where(frequencies > 0, power * frequencies.log(), -torch.inf)


def sample_without_replacement(logits: Tensor, waits: Tensor, count: int) -> Tensor:
    """[n, count] different places of `logits` [n, things], drawn in turn by their exponentials.

    `waits` [n, things] are Exp(1) noise; whatever is -inf comes behind all others.
    """
    return (waits.log() - logits).topk(count, largest=False).indices


def draw_lists(
    moves: Tensor,
    frequencies: Tensor,
    waits: Tensor,
    powers: tuple[float, float],
    length: int,
    end: int,
) -> Tensor:
    """[n, length] a list of each position, drawn from its targets; filled up with `end`.

    `moves` and `frequencies` are [n, 2, kept] (first in a list; anywhere), `waits` [n, 2 * kept].
    """
    kept = moves.shape[2]
    first = power_logits(frequencies[:, 0], powers[0])
    best = moves[:, 0].gather(1, sample_without_replacement(first, waits[:, :kept], 1))
    later = power_logits(frequencies[:, 1], powers[1])
    later = torch.where(moves[:, 1] == best, -torch.inf, later)
    places = sample_without_replacement(later, waits[:, kept:], length - 1)
    lists = torch.cat((best, moves[:, 1].gather(1, places)), 1)
    count = (frequencies[:, 1] > 0).sum(1, keepdim=True)
    return torch.where(torch.arange(length, device=moves.device) < count, lists, end)


def continuation_rows(
    tokens: Tensor,
    sequences: Tensor,
    places: Tensor,
    is_move: Tensor,
    counts: Tensor,
    end: int,
    since: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a list from place `since` on, what it holds before them, and where it should end.

    Of `tokens` [answers, places] the first ones are a list as far as `is_move` [vocabulary] says;
    `counts` [answers] is how many a list should hold, 0 where there should be none. Rows are given
    by their answers (`sequences`) and `places`; `end` fills up what is held.
    """
    longest = tokens.shape[1]
    whole = is_move[tokens].cumprod(1).bool()
    inside = (places >= since) & (places < longest)
    goes_on = (places == 0) | whole[sequences, (places - 1).clamp(0, longest - 1)]
    rows = (inside & goes_on & (counts[sequences] > 0)).nonzero().squeeze(1)
    held, before = tokens[sequences[rows]], places[rows]
    earlier = torch.arange(longest, device=tokens.device) < before[:, None]
    return rows, torch.where(earlier, held, end), before >= counts[sequences[rows]]


def distillation_kl(hidden: Tensor, head: Tensor, targets: ListTargets) -> Tensor:
    """[n] KL(target || policy) at each row of a list, in nats, weighted."""
    logp = F.linear(hidden[targets.rows], head).float().log_softmax(-1)
    target = targets.logp()
    p = target.exp()
    return targets.weights * (p * (torch.where(p > 0, target, 0.0) - logp)).sum(-1)
