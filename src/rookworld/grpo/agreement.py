"""Learning what a frozen model's own lists agree on.

A list is written thing by thing, and each is what suits its place; what many lists of one model
hold between them is better than any of them. Where a list goes on, its target is how often each
thing stands in the frozen model's lists, sharpened, less what this list has named already.
Laws: the target is that by enumeration; no gradient reaches the lists; where nothing is left to
name the target is the end of the list. Left out: the first thing of a list, which is not what is
safe to name but what is best (docs/experiments.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Agreed:
    """Rows of a pass at which a list went on or ended, and how it should have gone on."""

    rows: Tensor
    """[n] which of the pass's rows."""
    lists: Tensor
    """[n] the line of `shares` a row belongs to."""
    named: Tensor
    """[n, names] what the row's list held before; one id may stand there twice."""
    shares: Tensor
    """[lists, vocabulary] how often each id is in a list of the frozen model's; 0: must not be."""
    ends: Tensor
    """[n] whether the list should have ended here."""
    end: int
    """The id that ends a list."""
    power: float
    """What shares are raised to: above 1 the target is sharper than they are."""

    def target(self) -> Tensor:
        """[n, vocabulary] how each row should go on; log-probabilities."""
        # not 0, whose logarithm is no number to multiply; so small a share is never the target
        scores = self.power * self.shares.clamp_min(1e-30).log()[self.lists]
        scores = scores.scatter(1, self.named, -torch.inf)
        over = torch.full_like(scores[:1], -torch.inf)
        over[:, self.end] = 0.0
        return torch.where(self.ends[:, None], over, scores).log_softmax(-1)


def continued(
    tokens: Tensor, sequences: Tensor, places: Tensor, listable: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows behind the beginning of a list, what it holds before them, and where it should end.

    Of `tokens` [answers, places] the first ones are a list as far as they are `listable`
    [vocabulary]; `counts` [answers] is how many a list should hold, 0 where there should be none.
    Rows are given by their answers (`sequences`) and `places`.
    """
    longest = tokens.shape[1]
    whole = listable[tokens].cumprod(1).bool()
    inside = (places > 0) & (places < longest)
    begun = whole[sequences, (places - 1).clamp(0, longest - 1)]
    rows = (inside & begun & (counts[sequences] > 0)).nonzero().squeeze(1)
    held, before = tokens[sequences[rows]], places[rows]
    earlier = torch.arange(longest, device=tokens.device) < before[:, None]
    return rows, torch.where(earlier, held, held[:, :1]), before >= counts[sequences[rows]]


def agreement_kl(hidden: Tensor, head: Tensor, agreed: Agreed) -> Tensor:
    """[n] how far what the rows would go on with is from what they should, in nats."""
    logp = F.linear(hidden[agreed.rows], head).float().log_softmax(-1)
    target = agreed.target()
    share = target.exp()
    return (share * (torch.where(share > 0, target, 0.0) - logp)).sum(-1)
