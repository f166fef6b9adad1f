"""The forward passes of a step: groups packed, and what policy and reference say of them.

Laws: every prompt is computed once (shared prefix); logits exist only where a token was sampled;
what a pass finds does not depend on how the step was cut into packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rookworld.grpo.expected_value import KnownWorths, expected_worth
from rookworld.grpo.kl import EXACT, Draw, TokenStats, k3, token_stats
from rookworld.model import sharding
from rookworld.model.activation_reuse import Tape
from rookworld.model.gpt2 import GPT2
from rookworld.model.kernels.cuda_graphs import PassGraphs
from rookworld.model.precision import matrices_in, passes_in
from rookworld.model.products import Products
from rookworld.model.sampling import decoder
from rookworld.rl.batch import (
    Answered,
    Pack,
    laid,
    micro_packs,
    pack,
    sent,
    shared_prefix,
    together_on,
)
from rookworld.rl.models import Learner
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rollout.types import Completions, Group
from rookworld.tasks.registry import TASKS


@dataclass
class Micro:
    """One pack with everything the loss needs beside the policy's own pass."""

    pack: Pack
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
    choices: KnownWorths | None = None
    """Rows that learn from everything they could have chosen; their advantages are 0."""
    tape: Tape | None = None
    """What the policy's blocks will find, as long as it is what it was when it answered."""

    @property
    def ref_hidden(self) -> Tensor:
        """[rows, width] the reference's states; put together when asked for, a pack at a time."""
        return torch.cat(list(self.ref_parts)) if len(self.ref_parts) > 1 else self.ref_parts[0]

    def products(self) -> list[Products] | None:
        """The tape in the order of the pass; made when asked for, a pack at a time."""
        if self.tape is None or self.pack.tail == 0:
            return None
        line = (self.pack.head, self.pack.tail, self.pack.sources)
        return self.tape.play(keys_of(self.groups), *line)

    def mask(self) -> Tensor:
        """[answers, tokens] true on the sampled tokens that count."""
        sampled = self.pack.grid(torch.ones_like(self.old_logp)).bool()
        return sampled if self.kept is None else sampled & self.kept[:, None]

    def counts(self) -> tuple[int, int]:
        """Tokens and answers that count; asks the device only under a KL cap."""
        if self.kept is None:
            return len(self.pack.targets), self.pack.count
        return int(self.mask().sum()), int(self.kept.sum())


def prepare(
    groups: Sequence[Group],
    learner: Learner,
    settings: TrainSettings,
    eos: int,
    scratch: StepScratch | None = None,
) -> list[Micro]:
    """Packs of this rank's groups, with the reference's states; takes all out of `scratch`."""
    scratch = scratch or StepScratch()
    micros = []
    multiple = together_on(learner.model.device)
    packs = micro_packs(groups, settings.compute.micro_tokens, multiple)
    missing = sharding.missing_passes(learner.reference, len(packs))
    for chosen in packs:
        packed = scratch.batches.get(keys_of(chosen)) or pack(chosen, eos, multiple)
        recorded = laid([group.logp for group in chosen], packed.width, 0.0).flatten(0, 1)
        old = recorded[packed.sequences, packed.places]
        seen = reference_states(chosen, packed, learner, settings, scratch)
        micro = Micro(packed, chosen, draw_of(packed, chosen, settings), old, seen)
        if settings.kl.kl_collect_cap > 0:
            micro.kept = within_cap(micro, learner, settings)
        micro.tape = scratch.tape
        micros.append(micro)
    scratch.drop_rollouts()
    sharding.idle_passes(learner.reference, missing)
    return micros


def reference_states(
    groups: Sequence[Group],
    packed: Pack,
    learner: Learner,
    settings: TrainSettings,
    scratch: StepScratch,
) -> list[Tensor]:
    """The reference's states: computed while answers were scored, or else now."""
    if all(key in scratch.ref_hidden for key in keys_of(groups)):
        return [scratch.ref_hidden.pop(key) for key in keys_of(groups)]
    return [reference_pass(packed, learner, settings)]


def reference_ahead(
    learner: Learner,
    settings: TrainSettings,
    eos: int,
    scratch: StepScratch,
    answers: Sequence[Completions],
) -> None:
    """Compute the reference's states of answers before they are scored."""
    multiple = together_on(learner.model.device)
    chosen = micro_packs(answers, settings.compute.micro_tokens, multiple)
    # all packs first: making one waits for the device
    packs = [pack(part, eos, multiple) for part in chosen]
    for part, packed in zip(chosen, packs, strict=True):
        states = reference_pass(packed, learner, settings)
        found = torch.split(states, [sum(one.counts) for one in part])
        scratch.batches[keys_of(part)] = packed
        scratch.ref_hidden |= dict(zip(keys_of(part), found, strict=True))


def keys_of(groups: Sequence[Answered]) -> tuple[int, ...]:
    return tuple(group.prompt.key for group in groups)


def draw_of(packed: Pack, groups: Sequence[Group], settings: TrainSettings) -> Draw:
    """The distribution each row was sampled from; plain numbers where all tasks share them."""
    by_task = [settings.sampling.of_task(letter) for letter in TASKS]
    used = {by_task[group.prompt.task] for group in groups}
    if len(used) == 1:
        temperature, top_p = used.pop()
        return Draw(temperature=temperature, top_k=settings.sampling.top_k, top_p=top_p)
    k = len(groups[0].lengths)
    rules = torch.tensor([by_task[group.prompt.task] for group in groups])
    table = sent(rules, packed.ids.device)[packed.sequences // k]
    return Draw(temperature=table[:, 0], top_k=settings.sampling.top_k, top_p=table[:, 1])


def states(
    packed: Pack,
    model: GPT2,
    graphs: PassGraphs | None = None,
    known: Sequence[Products] | None = None,
) -> Tensor:
    """[rows, width] the hidden state that predicts each sampled token."""
    if graphs is None or not graphs.suit(packed.ids.shape[1]):
        hidden: Tensor = model(packed.ids, packed.positions, packed.attend, packed.sources, known)
        return hidden
    size = (packed.head, packed.answers, packed.tail)

    def run(model: GPT2, x: Tensor, heads: Tensor, sources: Tensor) -> Tensor:
        return model.through_blocks(x, shared_prefix(heads, *size), sources)

    x = model.embed(packed.ids, packed.positions)
    # a size must not depend on where answers ended
    most = packed.count * packed.width
    return graphs(size, run, x, packed.heads, packed.sources, most)


@torch.no_grad()
def reference_pass(packed: Pack, learner: Learner, settings: TrainSettings) -> Tensor:
    """The reference's states for each sampled token, wherever the reference lives."""
    reference = learner.reference
    packed = packed.to(reference.device)
    ready = learner.packed_reference(matrices_in(settings.compute.dtype, reference.device))
    if ready is not None:
        return decoder.states(ready, packed.ids, packed.positions, packed.attend, packed.sources)
    with passes_in(settings.compute.dtype, reference.device):
        return states(packed, reference, learner.ref_graphs)


def stats_of(micro: Micro, hidden: Tensor, learner: Learner, settings: TrainSettings) -> TokenStats:
    kind = settings.kl.kl_type if settings.kl.kl_type in EXACT else "forward"
    return token_stats(
        hidden,
        learner.model.lm_head.weight,
        micro.pack.targets,
        draw=micro.draw,
        ref_hidden=micro.ref_hidden,
        ref_head=learner.reference.lm_head.weight,
        kind=kind,
        chunk=learner.chunk,
    )


def chosen_worths(micro: Micro, hidden: Tensor, learner: Learner) -> Tensor | None:
    """[rows] what a row's choice is worth on average, 0 where a row learns from what it drew."""
    choices = micro.choices
    if choices is None:
        return None
    found = expected_worth(hidden, learner.model.lm_head.weight, micro.draw, choices)
    return torch.zeros_like(micro.old_logp).index_put((choices.rows,), found)


@torch.no_grad()
def reference_logp(micro: Micro, learner: Learner, settings: TrainSettings) -> Tensor:
    """[rows] the reference's log-probability of each sampled token, on the policy's device."""
    there = learner.reference.device
    temperature = micro.draw.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(there)
    with passes_in(settings.compute.dtype, there):
        stats = token_stats(
            micro.ref_hidden,
            learner.reference.lm_head.weight,
            micro.pack.targets.to(there),
            draw=Draw(temperature=temperature),
            chunk=learner.chunk,
        )
    return stats.logp.to(micro.old_logp.device)


def within_cap(micro: Micro, learner: Learner, settings: TrainSettings) -> Tensor:
    """[answers] whether the sampler stayed near the reference, by the mean of e^-x - 1 + x."""
    distance = k3(micro.old_logp, reference_logp(micro, learner, settings))
    grid = micro.pack.grid(distance)
    count = micro.pack.grid(torch.ones_like(distance)).sum(-1)
    return grid.sum(-1) / count <= settings.kl.kl_collect_cap
