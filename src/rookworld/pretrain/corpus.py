"""What a step of supervised training is made of: passes over rows, or over documents.

Laws: a pass's loss is a sum, and what it is to be divided by is counted beside it, so that neither
passes nor ranks change a step; which rows or windows a step takes is a function of (seed, step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rookworld.model.gpt2 import GPT2
from rookworld.model.precision import autocast_for
from rookworld.model.tokenizer import Tokenizer
from rookworld.pretrain.batches import (
    rows_of_step,
    sources_on_device,
    step_batches,
    symmetry_tables,
    to_device,
)
from rookworld.pretrain.dataset import TokenizedRows
from rookworld.pretrain.documents import Documents
from rookworld.pretrain.loss import field_weights, micro_loss
from rookworld.pretrain.settings import PretrainSettings
from rookworld.runtime import distributed
from rookworld.runtime.errors import ConfigError

ALIGNED = 64
"""Scores are computed for a multiple of as many tokens: tensor cores want even widths."""


class Corpus(Protocol):
    """What is trained on."""

    tokens_per_step: int
    """Of windows, over all processes; 0: rows differ in length."""

    def losses(self, step: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Each pass of this rank: its summed loss; (weight, first moves right, first moves)."""
        ...

    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        """What the sums of loss and counts over a step say beside the loss."""
        ...


def place(
    data: Sequence[tuple[TokenizedRows, float]] | Documents,
    model: GPT2,
    tokenizer: Tokenizer,
    settings: PretrainSettings,
    device: torch.device,
) -> Corpus:
    """Rows with their shares, or documents, on the device."""
    if isinstance(data, Documents):
        kind = Apart if settings.apart else Windows
        return kind(data, model, settings, device)
    return Answers(data, model, tokenizer, settings, device)


class Answers:
    """Rows of tasks: the loss is on the answers, weighed by field."""

    tokens_per_step = 0

    def __init__(
        self,
        sources: Sequence[tuple[TokenizedRows, float]],
        model: GPT2,
        tokenizer: Tokenizer,
        settings: PretrainSettings,
        device: torch.device,
    ) -> None:
        self.sources = sources_on_device(sources, settings, device)
        self.symmetries = symmetry_tables(tokenizer, settings, device)
        if settings.repeat_weight and tokenizer.style != "compact":
            raise ConfigError("--repeat-weight needs the chess tokenizer; use --repeat-weight 0")
        if compiles(settings, device):
            # layers share the code, and only the last computes less
            for block in model.h:
                block.compile(dynamic=False)
        self.table = field_weights(settings, device)
        self.model, self.tokenizer = model, tokenizer
        self.settings, self.device = settings, device

    def losses(self, step: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        for micro in step_batches(
            step, self.tokenizer, self.sources, self.symmetries, self.settings, self.device
        ):
            with autocast_for(self.settings.machine.dtype, self.device):
                found = micro_loss(self.model, micro, self.table, self.settings.repeat_weight)
            yield found

    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        return {"accuracy/first_move": sums[2] / sums[3].clamp(min=1)}


class Windows:
    """Documents end to end, cut every `n_positions` tokens: the loss is on every token."""

    def __init__(
        self, documents: Documents, model: GPT2, settings: PretrainSettings, device: torch.device
    ) -> None:
        self.length = settings.n_positions
        self.count = (len(documents.tokens) - 1) // self.length
        if not self.count:
            raise ConfigError(
                f"{len(documents.tokens)} tokens do not fill one window of --n-positions "
                f"{self.length}: give more --data"
            )
        # torch can hardly index uint16: the same bits as int16 are gathered, then read as they are
        self.tokens = torch.from_numpy(documents.tokens.view(np.int16)).to(device)
        self.answers: Tensor | None = None
        if documents.answers is not None:
            self.answers = torch.from_numpy(documents.answers).to(device)
        self.model, self.settings, self.device = model, settings, device
        self.per_step = settings.rows_on(device.type)
        self.tokens_per_step = self.per_step * self.length
        self.loss: Callable[[GPT2, Tensor, Tensor | None], Tensor] = window_loss
        if compiles(settings, device):
            self.loss = torch.compile(window_loss, dynamic=False)

    def losses(self, step: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        windows = rows_of_step(self.count, self.per_step, step, self.settings.seed)
        mine = windows[distributed.rank() :: distributed.world_size()]
        most = max(1, self.settings.micro_tokens // self.length)
        none = torch.zeros((), device=self.device)
        for start in range(0, len(mine), most):
            some = to_device(mine[start : start + most], self.device)
            tokens, weights = self.at(some), self.weights(some)
            with autocast_for(self.settings.machine.dtype, self.device):
                loss = self.loss(self.model, tokens, weights)
            count = tokens[:, 1:].numel() if weights is None else weights.sum()
            yield loss, [none + count, none, none]

    def at(self, windows: Tensor) -> Tensor:
        """[windows, length + 1] the tokens of each, and the first of the next."""
        return self.tokens[self.places(windows)].long() & 0xFFFF

    def weights(self, windows: Tensor) -> Tensor | None:
        """[windows, length] what the loss on each token but the first counts; None: all alike."""
        if self.answers is None:
            return None
        return torch.where(
            self.answers[self.places(windows)[:, 1:]], 1.0, self.settings.prompt_weight
        )

    def places(self, windows: Tensor) -> Tensor:
        inside = torch.arange(self.length + 1, device=self.device)
        return windows[:, None] * self.length + inside

    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        return {}


class Apart:
    """Documents one by one, each from position 0, as a prompt will stand when it is asked."""

    tokens_per_step = 0

    def __init__(
        self, documents: Documents, model: GPT2, settings: PretrainSettings, device: torch.device
    ) -> None:
        ends = np.append(np.flatnonzero(documents.starts), len(documents.tokens))
        # the end token before a document is left out; the one behind it is its last target
        self.first, self.lengths = ends[:-1] + 1, np.diff(ends)
        longest = int(self.lengths.max())
        if longest > model.config.n_positions:
            raise ConfigError(
                f"a document of {longest} tokens does not fit --n-positions "
                f"{model.config.n_positions}"
            )
        self.documents, self.model, self.settings, self.device = documents, model, settings, device

    def losses(self, step: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        per_step = self.settings.rows_on(self.device.type)
        picked = rows_of_step(len(self.first), per_step, step, self.settings.seed)
        mine = picked[distributed.rank() :: distributed.world_size()]
        mine = mine[np.argsort(self.lengths[mine], kind="stable")]
        none = torch.zeros((), device=self.device)
        for some in cut_by_tokens(mine, self.lengths, self.settings.micro_tokens):
            tokens, weights = (to_device(array, self.device) for array in self.padded(some))
            with autocast_for(self.settings.machine.dtype, self.device):
                loss = window_loss(self.model, tokens, weights)
            yield loss, [none + weights.sum(), none, none]

    def padded(self, some: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[documents, longest] their tokens, then end tokens; what each but the first counts."""
        inside = np.arange(self.lengths[some].max())
        places = np.minimum(self.first[some, None] + inside, len(self.documents.tokens) - 1)
        behind = inside >= self.lengths[some, None] - 1
        tokens = self.documents.tokens[places].astype(np.int64)
        tokens[behind] = self.documents.tokens[0]
        weights = np.ones(tokens.shape, dtype=np.float32)
        if self.documents.answers is not None:
            asked = ~self.documents.answers[places] & ~behind
            weights[asked] = self.settings.prompt_weight
        weights[inside >= self.lengths[some, None]] = 0.0
        return tokens, weights[:, 1:]

    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        return {}


def cut_by_tokens(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], most: int
) -> Iterator[NDArray[np.int64]]:
    """Rows sorted by length in passes of at most so many tokens, padding counted."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * lengths[rows[end]] > most:
            yield rows[start:end]
            start = end


def compiles(settings: PretrainSettings, device: torch.device) -> bool:
    return device.type == "cuda" if settings.compile is None else settings.compile


def window_loss(model: GPT2, tokens: Tensor, weights: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of every token of the windows [windows, length + 1] but the first.

    `weights` [windows, length] says what each counts.
    """
    hidden, targets = model(tokens[:, :-1]), tokens[:, 1:]
    vocabulary = model.config.vocab_size
    weight = F.pad(model.lm_head.weight, (0, 0, 0, -vocabulary % ALIGNED))
    scores = F.linear(hidden, weight).float()
    unused = torch.arange(len(weight), device=scores.device) >= vocabulary
    scores = scores.masked_fill(unused, -torch.inf)
    if weights is None:
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    each = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum()
