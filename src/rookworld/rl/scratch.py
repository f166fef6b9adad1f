"""What a step works out before it is needed: from collecting to the forward passes and the update.

Law: each step makes one of its own and no checkpoint holds it, so nothing in it can outlive a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rookworld.model.activation_reuse import ActivationStore
from rookworld.rl.batch import DistillBatch, SharedPrefixBatch


@dataclass
class StepScratch:
    """Empty at the start of a step."""

    batches: dict[tuple[int, ...], SharedPrefixBatch] = field(default_factory=dict)
    """By their prompts' keys."""
    ref_hidden: dict[int, Tensor] = field(default_factory=dict)
    """The reference's hidden states [tokens of all completions, width] by a prompt's key."""
    activations: ActivationStore | None = None
    """Of the policy while it sampled."""
    distill_batches: list[DistillBatch] | None = None
    """What self-distillation trains on; None: not made yet."""
    distill_loss: Tensor | None = None
    """This rank's share, once its gradient is on the parameters."""

    def drop_rollouts(self) -> None:
        """Free what belongs to groups that were left out."""
        self.batches.clear()
        self.ref_hidden.clear()
        self.activations = None
