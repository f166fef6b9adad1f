"""The forward passes of a step: micro-batches, and the log-probabilities of policy and reference.

Laws: every prompt is computed once (shared prefix); logits exist only where a token was sampled;
what a pass finds does not depend on how the step was cut into batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rookworld.grpo.expected_value import ChoiceValues, expected_value
from rookworld.grpo.kl import EXACT, Draw, TokenStats, k3, token_stats
from rookworld.model import inference, sharding
from rookworld.model.activation_reuse import ActivationStore, BlockOutputs
from rookworld.model.attention import shared_prefix_attention
from rookworld.model.gpt2 import GPT2
from rookworld.model.kernels.cuda_graphs import PassGraphs
from rookworld.model.precision import autocast_for, matrix_dtype
from rookworld.rl.batch import (
    Answered,
    SharedPrefixBatch,
    pad_multiple,
    pad_stack,
    shared_prefix_batch,
    split_to_budget,
    to_device,
)
from rookworld.rl.models import Learner
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rollout.types import Completions, Group
from rookworld.tasks.registry import TASKS


@dataclass
class MicroBatch:
    """One batch with everything the loss needs beside the policy's own pass."""

    batch: SharedPrefixBatch
    groups: list[Group]
    draw: Draw
    old_logp: Tensor
    """[rows] recorded while sampling."""
    ref_parts: Sequence[Tensor]
    """The reference's states [rows, width] in parts, one behind the other, on its device."""
    kept: Tensor | None = None
    """[answers] false for samples beyond the KL cap; None: all are kept."""
    advantages: Tensor | None = None
    """[answers] or [answers, tokens]."""
    returns: Tensor | None = None
    choices: ChoiceValues | None = None
    """Rows that learn from everything they could have chosen; their advantages are 0."""
    anchor: bool = False
    """Whether its tokens are held to the reference and learn nothing else."""
    guide: bool = False
    """Whether its answers are true ones, which nobody sampled; `old_logp` is then the policy's own
    at its first update."""
    passed: bool = False
    """Whether a guide's first update has been."""
    activations: ActivationStore | None = None
    """What the sampler computed of this batch, until the first update of the policy."""

    @property
    def ref_hidden(self) -> Tensor:
        """[rows, width] the reference's states; put together when asked for, a batch at a time."""
        return torch.cat(list(self.ref_parts)) if len(self.ref_parts) > 1 else self.ref_parts[0]

    def known_outputs(self) -> list[BlockOutputs] | None:
        """What the sampler computed, in the order of the pass; made when asked for."""
        if self.activations is None or self.batch.tail == 0:
            return None
        line = (self.batch.head, self.batch.tail, self.batch.sources)
        return self.activations.line(prompt_keys(self.groups), *line)

    def mask(self) -> Tensor:
        """[answers, tokens] true on the sampled tokens that count."""
        sampled = self.batch.grid(torch.ones_like(self.old_logp)).bool()
        return sampled if self.kept is None else sampled & self.kept[:, None]

    def counts(self) -> tuple[int, int]:
        """Tokens and answers that count; asks the device only under a KL cap."""
        if self.kept is None:
            return len(self.batch.targets), self.batch.count
        return int(self.mask().sum()), int(self.kept.sum())


def prepare(
    groups: Sequence[Group],
    learner: Learner,
    settings: TrainSettings,
    eos: int,
    scratch: StepScratch | None = None,
) -> list[MicroBatch]:
    """Batches of this rank's groups, with the reference's states; takes all out of `scratch`."""
    scratch = scratch or StepScratch()
    micros = []
    multiple = pad_multiple(learner.model.device)
    batches = split_to_budget(groups, learner.memory.micro_tokens, multiple)
    missing = sharding.missing_passes(learner.reference, len(batches))
    for chosen in batches:
        batch = scratch.batches.get(prompt_keys(chosen)) or shared_prefix_batch(
            chosen, eos, multiple
        )
        recorded = pad_stack([group.logp for group in chosen], batch.width, 0.0).flatten(0, 1)
        old = recorded[batch.sequences, batch.places]
        seen = reference_states(chosen, batch, learner, settings, scratch)
        micro = MicroBatch(batch, chosen, sampling_draw(batch, chosen, settings), old, seen)
        if settings.kl.kl_collect_cap > 0:
            micro.kept = within_cap(micro, learner, settings)
        micro.activations = scratch.activations
        micros.append(micro)
    scratch.drop_rollouts()
    sharding.idle_passes(learner.reference, missing)
    return micros


def prepare_guides(
    guides: Sequence[Group], learner: Learner, settings: TrainSettings, eos: int
) -> list[MicroBatch]:
    """Batches of true answers: neither temperature nor cap say anything about them."""
    return [
        replace(micro, guide=True, draw=Draw(), kept=None)
        for micro in prepare(guides, learner, settings, eos)
    ]


def reference_states(
    groups: Sequence[Group],
    batch: SharedPrefixBatch,
    learner: Learner,
    settings: TrainSettings,
    scratch: StepScratch,
) -> list[Tensor]:
    """The reference's states: computed while answers were scored, or else now."""
    if all(key in scratch.ref_hidden for key in prompt_keys(groups)):
        return [scratch.ref_hidden.pop(key) for key in prompt_keys(groups)]
    return [reference_pass(batch, learner, settings)]


def reference_ahead(
    learner: Learner,
    settings: TrainSettings,
    eos: int,
    scratch: StepScratch,
    answers: Sequence[Completions],
) -> None:
    """Compute the reference's states of answers before they are scored."""
    multiple = pad_multiple(learner.model.device)
    chosen = split_to_budget(answers, learner.memory.micro_tokens, multiple)
    # all batches first: making one waits for the device
    batches = [shared_prefix_batch(part, eos, multiple) for part in chosen]
    for part, batch in zip(chosen, batches, strict=True):
        states = reference_pass(batch, learner, settings)
        found = torch.split(states, [sum(one.counts) for one in part])
        scratch.batches[prompt_keys(part)] = batch
        scratch.ref_hidden |= dict(zip(prompt_keys(part), found, strict=True))


def prompt_keys(groups: Sequence[Answered]) -> tuple[int, ...]:
    return tuple(group.prompt.key for group in groups)


def sampling_draw(
    batch: SharedPrefixBatch, groups: Sequence[Group], settings: TrainSettings
) -> Draw:
    """The distribution each row was sampled from; plain numbers where all tasks share them."""
    by_task = [settings.sampling.of_task(letter) for letter in TASKS]
    rules = [by_task[group.prompt.task] for group in groups]

    def each(values: Sequence[float]) -> Tensor | float:
        if len(set(values)) == 1:
            return values[0]
        answer = batch.sequences // len(groups[0].lengths)
        return to_device(torch.tensor(values), batch.ids.device)[answer]

    temperature, top_p = (each(values) for values in zip(*rules, strict=True))
    return Draw(temperature=temperature, top_k=settings.sampling.top_k, top_p=top_p)


def states(
    batch: SharedPrefixBatch,
    model: GPT2,
    graphs: PassGraphs | None = None,
    known: Sequence[BlockOutputs] | None = None,
) -> Tensor:
    """[rows, width] the hidden state that predicts each sampled token."""
    if graphs is None or not graphs.suit(batch.ids.shape[1]):
        hidden: Tensor = model(batch.ids, batch.positions, batch.attend, batch.sources, known)
        return hidden
    size = (batch.head, batch.answers, batch.tail)

    def run(model: GPT2, x: Tensor, heads: Tensor, sources: Tensor) -> Tensor:
        return model.through_blocks(x, shared_prefix_attention(heads, *size), sources)

    x = model.embed(batch.ids, batch.positions)
    # a size must not depend on where answers ended
    most = batch.count * batch.width
    return graphs(size, run, x, batch.heads, batch.sources, most)


@torch.no_grad()
def reference_pass(batch: SharedPrefixBatch, learner: Learner, settings: TrainSettings) -> Tensor:
    """The reference's states for each sampled token, wherever the reference lives."""
    reference = learner.reference
    batch = batch.to(reference.device)
    ready = learner.packed_reference(matrix_dtype(settings.compute.dtype, reference.device))
    if ready is not None:
        return inference.hidden_states(
            ready, batch.ids, batch.positions, batch.attend, batch.sources
        )
    with autocast_for(settings.compute.dtype, reference.device):
        return states(batch, reference, learner.ref_graphs)


def policy_stats(
    micro: MicroBatch, hidden: Tensor, learner: Learner, settings: TrainSettings
) -> TokenStats:
    kind = settings.kl.kl_type if settings.kl.kl_type in EXACT else "forward"
    return token_stats(
        hidden,
        learner.model.lm_head.weight,
        micro.batch.targets,
        draw=micro.draw,
        ref_hidden=micro.ref_hidden,
        ref_head=learner.reference.lm_head.weight,
        kind=kind,
        chunk=learner.chunk,
    )


def expected_values(micro: MicroBatch, hidden: Tensor, learner: Learner) -> Tensor | None:
    """[rows] what a row's choice is worth on average, 0 where a row learns from what it drew."""
    choices = micro.choices
    if choices is None:
        return None
    found = expected_value(hidden, learner.model.lm_head.weight, micro.draw, choices)
    return torch.zeros_like(micro.old_logp).index_put((choices.rows,), found)


@torch.no_grad()
def reference_logp(micro: MicroBatch, learner: Learner, settings: TrainSettings) -> Tensor:
    """[rows] the reference's log-probability of each sampled token, on the policy's device."""
    there = learner.reference.device
    temperature = micro.draw.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(there)
    with autocast_for(settings.compute.dtype, there):
        stats = token_stats(
            micro.ref_hidden,
            learner.reference.lm_head.weight,
            micro.batch.targets.to(there),
            draw=Draw(temperature=temperature),
            chunk=learner.chunk,
        )
    return stats.logp.to(micro.old_logp.device)


def within_cap(micro: MicroBatch, learner: Learner, settings: TrainSettings) -> Tensor:
    """[answers] whether the sampler stayed near the reference, by the mean of e^-x - 1 + x."""
    distance = k3(micro.old_logp, reference_logp(micro, learner, settings))
    grid = micro.batch.grid(distance)
    count = micro.batch.grid(torch.ones_like(distance)).sum(-1)
    return grid.sum(-1) / count <= settings.kl.kl_collect_cap
