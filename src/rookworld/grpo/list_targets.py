"""Learning what a frozen model's own lists agree on.

A list is written thing by thing, and each is what suits its place; what many lists of one model
hold between them is better than any of them. Where a list goes on, its target is how often each
thing stands in the frozen model's lists, sharpened, less what this list has named already.
The first thing of a list is not what is safe to name but what is best, so its target is how often
each stands first. Laws: the target is that by enumeration; no gradient reaches the lists; where
nothing is left to name the target is the end of the list. Left out: targets that lean towards what
rewards know, which were no better in short runs (docs/experiments.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Agreed:
    """Rows of a pass at which a list began, went on or ended, and what should have been there."""

    rows: Tensor
    """[n] which of the pass's rows."""
    lines: Tensor
    """[n] the line of `scores` a row belongs to."""
    named: Tensor
    """[n, names] what the row's list held before, filled up with `end`."""
    scores: Tensor
    """[lines, vocabulary] logarithms of how often each id may be there in the frozen model's lists,
    times how sharp the target is to be; -inf: it must not be."""
    weights: Tensor
    """[n] how much a row counts."""
    ends: Tensor
    """[n] whether the list should have ended here."""
    end: int
    """The id that ends a list."""

    def target(self) -> Tensor:
        """[n, vocabulary] how each row should go on; log-probabilities."""
        scores = self.scores[self.lines].scatter(1, self.named, -torch.inf)
        over = torch.full_like(scores[:1], -torch.inf)
        over[:, self.end] = 0.0
        return torch.where(self.ends[:, None], over, scores).log_softmax(-1)


def sharpened(shares: Tensor, power: float) -> Tensor:
    """Scores of a target that is proportional to `shares` to that power."""
    return torch.where(shares > 0, power * shares.log(), -torch.inf)


def raced(scores: Tensor, waits: Tensor, count: int) -> Tensor:
    """[n, count] different places of `scores` [n, things], drawn in turn by their exponentials.

    `waits` [n, things] are Exp(1) noise; whatever is -inf comes behind all others.
    """
    return (waits.log() - scores).topk(count, largest=False).indices


def continued(
    tokens: Tensor,
    sequences: Tensor,
    places: Tensor,
    listable: Tensor,
    counts: Tensor,
    end: int,
    since: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a list from place `since` on, what it holds before them, and where it should end.

    Of `tokens` [answers, places] the first ones are a list as far as they are `listable`
    [vocabulary]; `counts` [answers] is how many a list should hold, 0 where there should be none.
    Rows are given by their answers (`sequences`) and `places`; `end` fills up what is held.
    """
    longest = tokens.shape[1]
    whole = listable[tokens].cumprod(1).bool()
    inside = (places >= since) & (places < longest)
    begun = (places == 0) | whole[sequences, (places - 1).clamp(0, longest - 1)]
    rows = (inside & begun & (counts[sequences] > 0)).nonzero().squeeze(1)
    held, before = tokens[sequences[rows]], places[rows]
    earlier = torch.arange(longest, device=tokens.device) < before[:, None]
    return rows, torch.where(earlier, held, end), before >= counts[sequences[rows]]


def agreement_kl(hidden: Tensor, head: Tensor, agreed: Agreed) -> Tensor:
    """[n] how far what the rows would go on with is from what they should, in nats, weighted."""
    logp = F.linear(hidden[agreed.rows], head).float().log_softmax(-1)
    target = agreed.target()
    share = target.exp()
    apart = (share * (torch.where(share > 0, target, 0.0) - logp)).sum(-1)
    return agreed.weights * apart
