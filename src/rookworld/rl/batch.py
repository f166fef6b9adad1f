"""Groups of answers as forward passes in which every prompt is computed once.

Laws: what a pass finds for a token is what it would find were each answer computed behind its own
prompt; batches hold whole groups of like size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rookworld.grpo.list_targets import ListTargets
from rookworld.model.attention import Attend, shared_prefix_attention
from rookworld.model.sampling.decode_batch import round_up
from rookworld.rollout.types import Prompt

PAD_MULTIPLE = 16
"""On a GPU prompts and answers are padded to a multiple of this: its kernels take such sizes as
they are, and passes of few sizes can be recorded (`model.graphs`)."""


class Answered(Protocol):
    """A prompt with its answers, judged (`Group`) or not yet (`Completions`)."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...


Sampled = TypeVar("Sampled", bound=Answered)


@dataclass(frozen=True)
class SharedPrefixBatch:
    """Groups as one forward pass in which every prompt is computed once.

    One line holds all prompts and behind them all answers, K a prompt; an answer sees its prompt
    and itself.
    """

    ids: Tensor
    """[1, tokens]."""
    positions: Tensor
    """[1, tokens]: each answer's positions go on from its prompt's."""
    heads: Tensor
    """[groups] each prompt's tokens."""
    head: int
    """Tokens of the longest prompt, with its padding."""
    sources: Tensor
    """[rows] for each sampled token, the flat place of the token that predicts it."""
    targets: Tensor
    """[rows] the sampled ids."""
    sequences: Tensor
    """[rows] which of the batch's groups x K answers a row belongs to."""
    places: Tensor
    """[rows] which token of its answer a row is."""
    count: int
    """Answers in the batch (groups x K)."""
    width: int
    """Tokens of the longest answer, with its padding."""
    tail: int
    """Tokens of each answer that stand behind all prompts; 0: they stand behind their own."""

    @cached_property
    def attend(self) -> Attend:
        """Who may look where; made where the batch is."""
        return shared_prefix_attention(self.heads, self.head, self.answers, self.tail)

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return self.count // len(self.heads)

    def to(self, device: torch.device) -> SharedPrefixBatch:
        """The batch on another device; itself on its own."""
        if self.ids.device == device:
            return self
        moved: dict[str, Any] = {
            field.name: value.to(device) if isinstance(value, Tensor) else value
            for field in fields(self)
            for value in (getattr(self, field.name),)
        }
        return SharedPrefixBatch(**moved)

    def grid(self, rows: Tensor) -> Tensor:
        """Values per row as [answers, width], zero where nothing was sampled."""
        out = rows.new_zeros(self.count, self.width)
        return out.index_put((self.sequences, self.places), rows)


@dataclass(frozen=True)
class DistillBatch:
    """Lists of moves as one pass, and what should stand in them (`rl.self_distill`)."""

    batch: SharedPrefixBatch
    targets: ListTargets


def pad_multiple(device: torch.device) -> int:
    """The multiple of tokens that prompts and answers are padded to on a device."""
    return 1 if device.type == "cpu" else PAD_MULTIPLE


def shared_prefix_batch(
    groups: Sequence[Answered], eos: int, multiple: int = 1
) -> SharedPrefixBatch:
    """Groups of one K side by side, prompts and answers padded to a multiple."""
    device = groups[0].tokens.device
    head = round_up(max(len(group.prompt.ids) for group in groups), multiple)
    # the last sampled token predicts nothing
    tail = round_up(max(group.tokens.shape[1] for group in groups) - 1, multiple)
    asked = [group.prompt.ids for group in groups]
    # each prompt behind the number of its tokens, so that one copy brings both
    table = torch.tensor([[len(ids), *ids, *[eos] * (head - len(ids))] for ids in asked])
    table = to_device(table, device)
    answers = pad_stack([group.tokens for group in groups], tail + 1, eos)
    lengths = torch.stack([group.lengths for group in groups])
    return padded_batch(table[:, 1:], table[:, 0].contiguous(), answers, lengths)


def padded_batch(
    prompts: Tensor, heads: Tensor, answers: Tensor, lengths: Tensor
) -> SharedPrefixBatch:
    """Padded prompts [groups, head] and answers [groups, K, width], the first tokens of each real.

    `heads` [groups] and `lengths` [groups, K] say how many.
    """
    device = prompts.device
    count, k, width = answers.shape
    head, tail = prompts.shape[1], width - 1
    ids = torch.cat([prompts.flatten(), answers[:, :, :tail].flatten()])[None]
    first, place = torch.arange(head, device=device), torch.arange(tail, device=device)
    # padding stays at 0: behind a long prompt it could stand beyond the model's last position
    within = torch.where(first < heads[:, None], first, 0)
    after = torch.where(place < lengths[:, :, None], heads[:, None, None] + place, 0)
    positions = torch.cat([within.flatten(), after.flatten()])
    line, answer, step = (torch.arange(width, device=device) < lengths[:, :, None]).nonzero(
        as_tuple=True
    )
    sequence = line * k + answer
    inner = count * head + sequence * tail + step - 1
    before = torch.where(step == 0, line * head + heads[line] - 1, inner)
    return SharedPrefixBatch(
        ids=ids,
        positions=positions[None],
        heads=heads,
        head=head,
        sources=before,
        targets=answers[line, answer, step],
        sequences=sequence,
        places=step,
        count=count * k,
        width=width,
        tail=tail,
    )


def causal_batch(prompts: Tensor, heads: Tensor, answers: Tensor, tokens: int) -> SharedPrefixBatch:
    """Padded prompts [groups, head], each with its one answer [groups, width] behind it.

    Nothing is shared, so a plain causal line of `tokens` does. All tokens of the answers are real;
    `heads` [groups] says how many of each prompt are.
    """
    (count, width), device = answers.shape, prompts.device
    place, step = (torch.arange(size, device=device) for size in (tokens, width))
    ids = F.pad(prompts, (0, tokens - prompts.shape[1]))
    # the last one is never fed
    ids = ids.scatter(1, heads[:, None] + step[:-1], answers[:, :-1])
    there = place < heads[:, None] + width - 1
    before = torch.arange(count, device=device)[:, None] * tokens + heads[:, None] - 1 + step
    return SharedPrefixBatch(
        ids=ids.view(1, -1),
        positions=torch.where(there, place, 0).view(1, -1),
        heads=heads,
        head=tokens,
        sources=before.flatten(),
        targets=answers.flatten(),
        sequences=torch.arange(count, device=device).repeat_interleave(width),
        places=step.repeat(count),
        count=count,
        width=width,
        tail=0,
    )


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """The host's numbers on a device, without waiting for what a GPU is still doing.

    CUDA has read them when this returns, so they may change or go afterwards.
    """
    return numbers.to(device, non_blocking=device.type == "cuda")


def pad_stack(tables: Sequence[Tensor], width: int, fill: float) -> Tensor:
    """Tables [k, t] of one k and various t as one [tables, k, width], filled up at the right.

    A copy for every table would keep a GPU waiting for the host.
    """
    k, device = len(tables[0]), tables[0].device
    out = torch.full((len(tables), k, width), fill, dtype=tables[0].dtype, device=device)
    widths = [table.shape[1] for table in tables]
    if len(set(widths)) == 1:
        out[:, :, : widths[0]] = torch.stack(list(tables))
        return out
    there = to_device(torch.arange(width) < torch.tensor(widths)[:, None], device)
    there = there[:, None].expand(-1, k, -1)
    return out.masked_scatter_(there, torch.cat([table.flatten() for table in tables]))


def split_to_budget(
    groups: Sequence[Sampled], budget: int, multiple: int = 1
) -> list[list[Sampled]]:
    """Groups of like size together, each list within a budget of tokens (at least one group).

    Tokens are counted as `shared_prefix_batch` pads them.
    """

    def size(group: Sampled) -> tuple[int, int, int]:
        return (group.tokens.shape[1], len(group.prompt.ids), group.prompt.key)

    batches: list[list[Sampled]] = []
    narrowest = longest = 0
    for group in sorted(groups, key=size):
        width, prompt, _ = size(group)
        head = round_up(max(longest, prompt), multiple)
        # an answer's last token is never fed
        line = head + len(group.lengths) * round_up(width - 1, multiple)
        if batches and width <= 2 * narrowest and (len(batches[-1]) + 1) * line <= budget:
            batches[-1].append(group)
            longest = max(longest, prompt)
        else:
            batches.append([group])
            narrowest, longest = width, prompt
    return batches
