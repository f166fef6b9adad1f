"""Prompts in, texts out: who answers in an evaluation, a game or a self-made world.

The law: an answer depends on its prompt, the model, the temperature and the seed alone. Prompts are
put in an order of their own before they are cut into batches, equal prompts are answered once, and
the random numbers of a prompt come from a hash of its text; so neither the order of the rows nor
the batch size changes what is drawn.

torch is loaded only when a model answers: settings and `--help` import this module too.
An evaluation measures what the model says unaided; only who plays may set a `constraint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rookworld.tasks.policy import POLICY, PolicyAnswer
from rookworld.tasks.registry import task_of_text
from rookworld.tasks.task import PolicyRow, Style

if TYPE_CHECKING:
    import torch

    from rookworld.model.gpt2 import GPT2
    from rookworld.model.sampling.sampler import Constraint, Sampler
    from rookworld.model.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion without its end token, and whether the model ended it itself."""

    text: str
    finished: bool = True


class Answerer(Protocol):
    """Whoever completes prompts: a model, or a table in a test."""

    @property
    def style(self) -> Style:
        """How rows are written for it."""
        ...

    @property
    def samples(self) -> int:
        """Answers per prompt."""
        ...

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        """`samples` answers for each prompt, those of a prompt next to each other.

        Equal prompts are answered alike, unless each prompt comes with a number of its own.
        """
        ...


def analyses(
    answerer: Answerer, fens: Iterable[str], salts: Sequence[int] = ()
) -> list[PolicyAnswer]:
    """What a model says of positions without labels; an answer that does not end says nothing."""
    prompts = [POLICY.prompt(PolicyRow(fen, (), ()), answerer.style) for fen in fens]
    answers = answerer.answer(prompts, salts)
    return [POLICY.parse(answer.text if answer.finished else "") for answer in answers]


class ModelAnswerer:
    """A model that completes prompts in batches; greedy unless a temperature is given."""

    def __init__(
        self,
        model: GPT2,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        samples: int = 1,
        seed: int = 0,
        progress: Progress | None = None,
        share_sampler: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.share_sampler = share_sampler
        """Answer by the sampler that training uses, whose matrices are of this type."""
        self.batch_size = batch_size
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.samples = samples
        self.seed = seed
        self.progress = progress
        self.constraint: Callable[[Sequence[str]], Constraint] | None = None
        """Prompts -> what may be written; for whoever plays, never for an evaluation."""
        self._sampler: Sampler | None = None
        self._versions: list[int] = []

    def sampling(
        self, temperature: float, *, top_k: int = 0, top_p: float = 1.0, samples: int = 1
    ) -> ModelAnswerer:
        """The same model, drawing its answers in another way."""
        return ModelAnswerer(
            self.model,
            self.tokenizer,
            batch_size=self.batch_size,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            samples=samples,
            seed=self.seed,
            progress=self.progress,
            share_sampler=self.share_sampler,
        )

    @property
    def style(self) -> Style:
        """The style of the model's tokenizer."""
        return self.tokenizer.style

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        """`samples` answers for each prompt, those of a prompt next to each other.

        Where chance plays a part, equal prompts with different `salts` are answered differently.
        """
        if not salts or self.temperature == 0:
            salts = [0] * len(prompts)
        asked = list(zip(prompts, salts, strict=True))
        distinct = sorted(set(asked))
        ids = self.tokenizer.encode_batch([prompt for prompt, _ in distinct])
        # One task and similar lengths to a batch: little padding, few idle rows.
        order = sorted(
            zip(distinct, ids, strict=True), key=lambda one: (one[0][0][:1], len(one[1]))
        )
        sampler = self._current_sampler()
        answers: dict[tuple[str, int], list[Answer]] = {}
        for start in range(0, len(order), self.batch_size):
            answers.update(self._complete(sampler, order[start : start + self.batch_size]))
            if self.progress:
                task = task_of_text(order[len(answers) - 1][0][0])
                self.progress(f"{task.title.lower()} answers", len(answers), len(order))
        return [answer for one in asked for answer in answers[one]]

    def _current_sampler(self) -> Sampler:
        """A sampler that sees the model's present weights; packing them anew takes a while."""
        from rookworld.model.sampling.sampler import Sampler, sampler_for

        if self.share_sampler is not None:
            return sampler_for(self.model, self.share_sampler)
        # A captured optimizer step changes weights on CUDA without counting a version.
        versions = [parameter._version for parameter in self.model.parameters()]
        changed = versions != self._versions or self.model.device.type == "cuda"
        if self._sampler is None or not self._sampler.reads(self.model):
            self._sampler = Sampler(self.model)
        elif changed:
            self._sampler.refresh()
        self._versions = versions
        return self._sampler

    def _complete(
        self, sampler: Sampler, batch: Sequence[tuple[tuple[str, int], Sequence[int]]]
    ) -> dict[tuple[str, int], list[Answer]]:
        from rookworld.model.sampling.sampler import Sampling

        asked, ids = [one for one, _ in batch], [ids for _, ids in batch]
        settings = [
            Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                max_new_tokens=task_of_text(prompt).new_tokens[self.style],
            )
            for prompt, _ in asked
        ]
        drawn = sampler.sample(
            ids,
            k=self.samples,
            settings=settings,
            eos=self.tokenizer.eos,
            seed=self.seed,
            keys=[prompt_key(f"{salt} {prompt}" if salt else prompt) for prompt, salt in asked],
            constraint=self.constraint([prompt for prompt, _ in asked])
            if self.constraint
            else None,
        )
        tokens, lengths = drawn.tokens.tolist(), drawn.lengths.tolist()
        texts = self.tokenizer.decode_batch(
            row[:length] for row, length in zip(tokens, lengths, strict=True)
        )
        answers = [Answer(*pair) for pair in zip(texts, drawn.finished.tolist(), strict=True)]
        k = self.samples
        return {one: answers[i * k : (i + 1) * k] for i, one in enumerate(asked)}


def load_answerer(
    source: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    batch_size: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> ModelAnswerer:
    """The greedy answerer of an embedded model, a model folder or a hub id."""
    import torch

    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import load_model, resolve_folder
    from rookworld.runtime.distributed import pick_device

    folder = resolve_folder(source)
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, pick_device(device), getattr(torch, dtype))
    return ModelAnswerer(model, tokenizer, batch_size=batch_size, seed=seed, progress=progress)


def prompt_key(prompt: str) -> int:
    """A number below 2^62 that stays the same for a text on every machine."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
