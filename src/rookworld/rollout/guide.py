"""JOINT: prompts that no sampled answer solves -> their true answers, to learn from.

Laws: which prompts are guided depends neither on ranks nor on their number; what was sampled stays
as it was. Classes that the fewest answers solve come first, so that what is never sampled is learnt
before what is only rare. A prompt that is answered rightly once is not guided, so guiding ends by
itself. Elsewhere: truths that are worth no more than what was sampled, or too long, are left out by
`rollout/collector.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from rookworld.model.tokenizer import Tokenizer
from rookworld.rollout.types import Group, Prompt
from rookworld.tasks.registry import task_of
from rookworld.tasks.task import Verdict


class Asked(NamedTuple):
    """A prompt that all ranks know of, and its answers if they are this rank's."""

    prompt: Prompt
    solved: bool
    """Whether one of its answers is right."""
    group: Group | None

    @property
    def kind(self) -> str:
        """Its class."""
        return f"{self.prompt.letter}/{task_of(self.prompt.row).row_class(self.prompt.row)}"


def solves(group: Group) -> bool:
    """Whether one of its answers is right."""
    return any(task_of(group.prompt.row).is_right(verdict) for verdict in group.verdicts)


def solved_by_class(asked: Sequence[Asked]) -> dict[str, tuple[int, int]]:
    """Of each class how many prompts were solved, and how many there were."""
    seen = Counter(one.kind for one in asked)
    solved = Counter(one.kind for one in asked if one.solved)
    return {kind: (solved[kind], count) for kind, count in sorted(seen.items())}


def to_guide(asked: Sequence[Asked], most: int) -> list[Asked]:
    """The prompts to guide: unsolved ones, first those of the classes that are solved least."""
    classes = solved_by_class(asked)
    share = {kind: solved / count for kind, (solved, count) in classes.items()}
    unsolved = [one for one in asked if not one.solved]
    return sorted(unsolved, key=lambda one: share[one.kind])[:most]


def guided(group: Group, text: str, verdict: Verdict, tokenizer: Tokenizer) -> Group:
    """A group of one answer, the true one; log-probabilities come with the policy's first pass."""
    ids = [*tokenizer.encode(text), tokenizer.eos]
    tokens = torch.tensor([ids], device=group.tokens.device)
    unknown = torch.zeros(tokens.shape, device=group.tokens.device)
    return Group(
        group.prompt,
        tokens,
        torch.tensor([len(ids)], device=group.tokens.device),
        unknown,
        unknown,
        (True,),
        (text,),
        (verdict,),
        baseline=fmean(group.rewards),
    )
