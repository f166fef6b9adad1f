"""The one sampler, for training, evaluation and play.

Laws: batched = single and K samples = K prompts, token by token; a sample is a function of (seed,
step, prompt key, sample index) and not of its neighbours; log-prob and entropy are those of the
distribution the token was drawn from. Each prompt is prefilled once and shared by its samples; rows
stop at their own end token or maximum and are compacted away. The model's mode is not touched.
Left out: beam search, repetition penalties, streaming.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rookworld.model.activation_reuse import ActivationStore
from rookworld.model.gpt2 import GPT2
from rookworld.model.inference import InferenceWeights
from rookworld.model.kernels.dispatch import have_triton
from rookworld.model.sampling.counter_rng import row_keys, wrap_int64
from rookworld.model.sampling.decode_batch import DecodeBatch, Mask, Shape
from rookworld.model.sampling.decode_graphs import (
    ArenaDecoder,
    Decoder,
    EagerDecoder,
    GraphDecoder,
)
from rookworld.model.sampling.kv_cache import Room
from rookworld.model.sampling.token_choice import Rows
from rookworld.runtime.errors import ConfigError, ModelError

ROWS_AT_ONCE = 1024
"""Larger requests are sampled in parts: nothing is gained by more rows, and the cache grows.

Answers of few tokens are another matter on a GPU, which then waits for the host between parts."""

Constraint = Callable[[Tensor, Tensor], Tensor]
"""(rows [n] of the result, their tokens so far [n, t]) -> bool [n, vocabulary]: what may follow."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw the answers to a prompt."""

    temperature: float = 1.0
    """divides the logits; 0 is greedy"""
    top_k: int = 0
    """only the k most probable tokens; 0 keeps all"""
    top_p: float = 1.0
    """only the most probable tokens that reach this mass; 1 keeps all"""
    max_new_tokens: int = 128
    """an answer ends here, or at the model's last position, if no end token came before"""

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature {self.temperature}: give 0 (greedy) or more")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k}: give 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p}: give more than 0 and at most 1 (all tokens)")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {self.max_new_tokens}: give 1 or more")


@dataclass(frozen=True)
class Samples:
    """N = prompts × k answers, those of a prompt next to each other, on the model's device."""

    tokens: Tensor
    """[N, T] int64, the end token included, padded with end tokens"""
    lengths: Tensor
    """[N] int64, the end token included"""
    logp: Tensor
    """[N, T] float32, of each token under the distribution it was drawn from; 0 on padding"""
    entropy: Tensor
    """[N, T] float32, of that distribution, in nats; 0 on padding"""
    finished: Tensor
    """[N] bool, ended by the end token and not by the maximum"""


Ids = Sequence[int] | NDArray[np.int64]


class _Prompt(NamedTuple):
    ids: NDArray[np.int64]
    settings: Sampling
    key: int
    first_sample: int
    place: int


_samplers: WeakKeyDictionary[GPT2, dict[torch.dtype, Sampler]] = WeakKeyDictionary()


def sampler_for(model: GPT2, dtype: torch.dtype | None = None) -> Sampler:
    """A sampler that sees the model's present weights, kept with its buffers and graphs.

    `dtype` is the matrices' (default: the model's). Whoever samples often from weights that do not
    change saves their copy with a `Sampler` of their own.
    """
    dtype = dtype or model.wte.weight.dtype
    kept = _samplers.setdefault(model, {})
    if dtype in kept and kept[dtype].reads(model):
        kept[dtype].refresh()
    else:
        kept[dtype] = Sampler(model, dtype=dtype)
    return kept[dtype]


class Sampler:
    """A model made ready for sampling: packed weights on the CPU, buffers and graphs on CUDA.

    After a change of the model call `refresh`. On CUDA a step is a graph of Triton kernels, unless
    `graph` is false or Triton is missing; that changes the speed and nothing else.
    """

    def __init__(
        self, model: GPT2, *, dtype: torch.dtype | None = None, graph: bool = True
    ) -> None:
        self.weights = InferenceWeights(model, dtype)
        self.sources = [parameter.data_ptr() for parameter in model.parameters()]
        self.eager = EagerDecoder(self.weights)
        self.decoder: Decoder = self.eager
        if graph and self.weights.device.type == "cuda" and have_triton():
            with torch.no_grad(), _current_device(self.weights.device):
                self.decoder = GraphDecoder(self.weights)

    def limit_cache(self, most_bytes: int | None) -> None:
        """Sample larger requests in parts, where keys and values are kept in one block."""
        if isinstance(self.decoder, ArenaDecoder):
            self.decoder.most_bytes = most_bytes

    def reads(self, model: GPT2) -> bool:
        """Whether this sampler's parameters are still those of `model`."""
        return self.sources == [parameter.data_ptr() for parameter in model.parameters()]

    @torch.no_grad()
    def refresh(self) -> None:
        """See the model's present weights; copies are written in place."""
        self.weights.refresh()

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Ids],
        *,
        k: int = 1,
        settings: Sampling | Sequence[Sampling],
        eos: int,
        seed: int,
        step: int = 0,
        keys: Sequence[int] | None = None,
        first_sample: int | Sequence[int] = 0,
        constraint: Constraint | None = None,
        rows_at_once: int = ROWS_AT_ONCE,
        activations: ActivationStore | None = None,
    ) -> Samples:
        """Draw `k` answers to each of `prompts`, from the weights at the last `refresh`.

        `settings` is one for all or one per prompt; `keys` (default: the prompt's index) and the
        samples' indices, counted from `first_sample`, name the randomness. With `eos` -1 only the
        maximum ends an answer. `activations` keeps what was computed.
        """
        count = len(prompts)
        each = [settings] * count if isinstance(settings, Sampling) else settings
        firsts = [first_sample] * count if isinstance(first_sample, int) else first_sample
        names = range(count) if keys is None else keys
        places = range(0, count * k, k)
        all_of_them = zip(self._check_prompts(prompts), each, names, firsts, places, strict=True)
        queue = [self._limit_to_context(_Prompt(*one)) for one in all_of_them]
        limits = [prompt.settings.max_new_tokens for prompt in queue]
        result = _Result(np.repeat(limits, k), eos, self.weights.device)
        queue.sort(key=lambda prompt: len(prompt.ids))
        per_part = max(1, min(rows_at_once // k, self._groups_at_once(queue, k)))
        recording: AbstractContextManager[None] = nullcontext()
        if activations is not None:
            activations.begin_request(names, k)
            recording = activations.recording(self.weights)
        with _current_device(self.weights.device), recording:
            for start in range(0, count, per_part):
                part = _Part(queue[start : start + per_part], k, eos, seed, step, constraint)
                self._sample_part(part, result, activations)
        return result.samples()

    def _groups_at_once(self, queue: Sequence[_Prompt], k: int) -> int:
        """How many prompts there is memory for."""
        longest = max((len(one.ids) for one in queue), default=1)
        new = max((one.settings.max_new_tokens for one in queue), default=1)
        return self.decoder.groups_at_once(Room(max(1, len(queue)), k, longest, new))

    def _check_prompts(self, prompts: Sequence[Ids]) -> list[NDArray[np.int64]]:
        """Refuse what the model has no embedding for, before a device assertion does."""
        found, config = [np.asarray(ids, dtype=np.int64) for ids in prompts], self.weights.config
        lengths = [len(ids) for ids in found]
        if 0 in lengths:
            raise ModelError("a prompt has no tokens: it needs at least one to be continued")
        if max(lengths, default=0) >= config.n_positions:
            raise ModelError(
                f"a prompt of {max(lengths)} tokens leaves no room for an answer: "
                f"the model has {config.n_positions} positions"
            )
        every = np.concatenate(found or [np.zeros(1, dtype=np.int64)])
        if not 0 <= every.min() <= every.max() < config.vocab_size:
            raise ModelError(
                f"prompts have token ids {every.min()} to {every.max()}, the model "
                f"{config.vocab_size} tokens: is the tokenizer another model's?"
            )
        return found

    def _limit_to_context(self, prompt: _Prompt) -> _Prompt:
        """Let an answer end where the model does."""
        room = self.weights.config.n_positions - len(prompt.ids)
        if prompt.settings.max_new_tokens <= room:
            return prompt
        return prompt._replace(settings=replace(prompt.settings, max_new_tokens=room))

    def _sample_part(
        self, part: _Part, result: _Result, activations: ActivationStore | None
    ) -> None:
        decoder = self.decoder if part.constraint is None and activations is None else self.eager
        shape = part.shape
        batch = decoder.batch(shape)
        lengths = torch.tensor([len(prompt.ids) for prompt in part.prompts])
        batch.begin(lengths, part.rows(), part.eos)
        batch.padded = bool((lengths != batch.shape.prefix).any())
        places = part.places(self.weights.device)
        decoder.start(batch, [prompt.ids for prompt in part.prompts], part.mask(places))
        if activations is not None:
            activations.add_prompts(
                self.weights, [one.place // part.k for one in part.prompts], lengths
            )
        used, limit = 1, shape.new
        while used < limit:
            looked = min(limit, used + decoder.check_every)
            busy = min(limit, looked + decoder.steps_ahead)
            for slot in range(used - 1, looked - 1):
                decoder.step(batch, slot, part.mask(places))
                if activations is not None:
                    activations.add_tokens(self.weights, slot, places)
            look = _DoneFlags(batch)
            for slot in range(looked - 1, busy - 1):
                decoder.step(batch, slot, part.mask(places))
            used = busy
            groups, columns = _unfinished(look.done())
            if not len(groups):
                break
            if used < limit and columns.numel() <= decoder.compact_at * batch.shape.rows:
                result.write(batch, places)
                groups, columns = groups.to(places.device), columns.to(places.device)
                places = places[(groups[:, None] * batch.shape.width + columns).flatten()]
                batch = decoder.compact(batch, groups, columns)
        result.write(batch, places)


@dataclass(frozen=True)
class _Part:
    """The prompts of a request that are sampled together, shortest first."""

    prompts: Sequence[_Prompt]
    k: int
    eos: int
    seed: int
    step: int
    constraint: Constraint | None

    @property
    def shape(self) -> Shape:
        each = [prompt.settings for prompt in self.prompts]
        drawn = [settings for settings in each if settings.temperature > 0]
        return Shape(
            len(self.prompts),
            self.k,
            prefix=len(self.prompts[-1].ids),
            new=max(settings.max_new_tokens for settings in each),
            truncated=any(settings.top_k > 0 or settings.top_p < 1 for settings in drawn),
            random=bool(drawn),
        )

    def places(self, device: torch.device) -> Tensor:
        """Where each row goes in the result."""
        first = np.array([prompt.place for prompt in self.prompts])
        return torch.from_numpy(self._each(first)).to(device)

    def _each(self, first: NDArray[np.int64]) -> NDArray[np.int64]:
        """A number for each row: its prompt's, and one more from row to row."""
        return (first[:, None] + np.arange(self.k)).reshape(-1)

    def mask(self, places: Tensor) -> Mask | None:
        constraint = self.constraint
        return None if constraint is None else lambda tokens: constraint(places, tokens)

    def rows(self) -> Rows:
        """On the host: the batch that takes them in has its own place for each tensor.

        Greedy rows are neither tempered nor truncated: their log-probs are the plain softmax's.
        """
        each = [prompt.settings for prompt in self.prompts]
        free = [Sampling() if one.temperature == 0 else one for one in each]
        firsts = np.array([prompt.first_sample for prompt in self.prompts])
        names = np.repeat(wrap_int64([prompt.key for prompt in self.prompts]), self.k)

        def repeated(values: list[Any]) -> Tensor:
            return torch.tensor(values).repeat_interleave(self.k)

        return Rows(
            keys=row_keys(self.seed, self.step, names, self._each(firsts)),
            limits=repeated([one.max_new_tokens for one in each]),
            done=repeated([False] * len(each)),
            temperature=repeated([one.temperature for one in free]),
            top_k=repeated([one.top_k for one in free]),
            top_p=repeated([one.top_p for one in free]),
            greedy=repeated([one.temperature == 0 for one in each]),
        )


class _DoneFlags:
    """Which rows are done at this point, for a host that goes on before it asks."""

    def __init__(self, batch: DecodeBatch) -> None:
        done = batch.done()
        self.event: torch.cuda.Event | None = None
        if done.device.type == "cuda":
            self.seen = torch.empty(done.shape, dtype=done.dtype, pin_memory=True)
            self.seen.copy_(done, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()
        else:
            self.seen = done.to("cpu", copy=True)

    def done(self) -> Tensor:
        """[groups, width]; waits for the device, but not for what it was given since."""
        if self.event is not None:
            self.event.synchronize()
        return self.seen


def _unfinished(done: Tensor) -> tuple[Tensor, Tensor]:
    """Groups [n] with a row not done, and the columns [n, width] that hold all such rows."""
    left = (~done).sum(1)
    groups = left.nonzero()[:, 0]
    most = max(1, int(left.max()))
    # A power of two, so that groups thinning out row by row meet few different shapes.
    width = min(done.shape[1], 1 << (most - 1).bit_length())
    columns = done.byte().argsort(stable=True, dim=1)[groups, :width]
    return groups, columns


class _Result:
    """The answers in the order of the request, filled as rows are done."""

    def __init__(self, limits: NDArray[np.int64], eos: int, device: torch.device) -> None:
        self.limits, self.eos = torch.from_numpy(limits).long().to(device), eos
        shape = (len(limits), int(limits.max(initial=0)))
        self.tokens = torch.full(shape, eos, dtype=torch.int64, device=device)
        self.logp = torch.zeros(shape, device=device)
        self.entropy = torch.zeros(shape, device=device)

    def write(self, batch: DecodeBatch, places: Tensor) -> None:
        for mine, theirs in zip(
            (self.tokens, self.logp, self.entropy), batch.outputs(), strict=True
        ):
            new = min(mine.shape[1], theirs.shape[0])
            mine[places, :new] = theirs[:new, : len(places)].T

    def samples(self) -> Samples:
        ended = torch.nn.functional.pad(self.tokens == self.eos, (0, 1), value=True)
        lengths = torch.minimum(ended.byte().argmax(1) + 1, self.limits)
        last = (lengths - 1).clamp_min(0)[:, None]
        finished = ended.gather(1, last)[:, 0]
        longest = int(lengths.max()) if len(lengths) else 0
        return Samples(
            tokens=self.tokens[:, :longest].contiguous(),
            lengths=lengths,
            logp=self.logp[:, :longest].contiguous(),
            entropy=self.entropy[:, :longest].contiguous(),
            finished=finished,
        )


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels and captures go to the current device, which must be the model's.

    Where the host launches every operation, it is spared a sixth of that work.
    """
    return torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode()
