"""JOINT: rows x tokenizer -> arrays a supervised loop can train on.

Laws: prompt ids + completion ids are the ids of the row; a token's field says what it is (first
move, other move, evaluation, ...), so that fields can be weighed. Packed arrays live in one
`.npz`, so that training needs neither Parquet nor tokenising. Left out: shuffling (the loop's
business).
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rookworld.model.tokenizer import Tokenizer
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import MOST_MOVES, POLICY
from rookworld.tasks.reward import win_percent
from rookworld.tasks.task import EnvironmentRow, PolicyRow, legal_moves

PROMPT, FIRST_MOVE, OTHER_MOVE, EVALUATION, BEST_MOVE, MARKER, STATE, OUTCOME = range(8)
"""What a token is, as a training target. PROMPT is never one."""

CHOICES = 5
"""Moves over which the target of the first move may be spread."""

CHUNK = 20_000
Row = TypeVar("Row")


@dataclass(frozen=True)
class TokenizedRows:
    """Rows as arrays. All have one line a row; what lies beyond `lengths` is the end token."""

    tokens: NDArray[np.uint16]
    """[rows, width] prompt, completion, end token."""
    fields: NDArray[np.uint8]
    """[rows, width] what each token is as a target."""
    prompts: NDArray[np.int16]
    """[rows] tokens of the prompt."""
    lengths: NDArray[np.int16]
    """[rows] tokens in all, end token included."""
    choices: NDArray[np.uint16]
    """[rows, 5] first-move candidates; 0 where there is none."""
    shares: NDArray[np.uint8]
    """[rows, 5] each candidate's share of the first move's target, in 255ths; all 0: none has."""

    def __len__(self) -> int:
        return len(self.tokens)


def pack_policy(
    rows: Sequence[PolicyRow], tokenizer: Tokenizer, softness: float = 0.03, hard: float = 0.5
) -> TokenizedRows:
    """Analysis rows; the first move's target is `hard` the best move, the rest spread by win %."""

    def pack(chunk: Sequence[PolicyRow]) -> TokenizedRows:
        prompts = [POLICY.prompt(row, tokenizer.style) for row in chunk]
        answers = [POLICY.answer(row, tokenizer.style) for row in chunk]
        spans = [_policy_fields(a, _is_whole(row)) for a, row in zip(answers, chunk, strict=True)]
        packed = _assemble(tokenizer, prompts, answers, spans)
        choices, shares = _soft_targets(
            tokenizer,
            [row.moves for row in chunk],
            [_win_shares(row, softness, hard) for row in chunk],
        )
        return TokenizedRows(packed[0], packed[1], packed[2], packed[3], choices, shares)

    return _in_chunks(rows, pack)


def pack_mates(rows: Sequence[tuple[str, tuple[str, ...]]], tokenizer: Tokenizer) -> TokenizedRows:
    """Positions with their mating moves: only the first move is a target, any mate is right."""

    def pack(chunk: Sequence[tuple[str, tuple[str, ...]]]) -> TokenizedRows:
        prompts = [
            POLICY.prompt(PolicyRow(fen, mates, ()), tokenizer.style) for fen, mates in chunk
        ]
        answers = [" " + mates[0] for _, mates in chunk]
        spans = [[(len(answer), FIRST_MOVE)] for answer in answers]
        packed = _assemble(tokenizer, prompts, answers, spans)
        even = [[1.0 / min(len(mates), CHOICES)] * min(len(mates), CHOICES) for _, mates in chunk]
        choices, shares = _soft_targets(tokenizer, [mates for _, mates in chunk], even)
        fields = np.where(packed[1] == FIRST_MOVE, packed[1], PROMPT).astype(np.uint8)
        return TokenizedRows(packed[0], fields, packed[2], packed[3], choices, shares)

    return _in_chunks(rows, pack)


def pack_environment(rows: Sequence[EnvironmentRow], tokenizer: Tokenizer) -> TokenizedRows:
    """State-transition rows: the new position, then its outcome (reward and the two flags)."""

    def pack(chunk: Sequence[EnvironmentRow]) -> TokenizedRows:
        prompts = [ENVIRONMENT.prompt(row, tokenizer.style) for row in chunk]
        answers = [ENVIRONMENT.answer(row, tokenizer.style) for row in chunk]
        spans = [[(a.index("+"), STATE), (len(a), OUTCOME)] for a in answers]
        packed = _assemble(tokenizer, prompts, answers, spans)
        none = np.zeros((len(chunk), CHOICES))
        empty = (none.astype(np.uint16), none.astype(np.uint8))
        return TokenizedRows(packed[0], packed[1], packed[2], packed[3], *empty)

    return _in_chunks(rows, pack)


def _in_chunks(
    rows: Sequence[Row], pack: Callable[[Sequence[Row]], TokenizedRows]
) -> TokenizedRows:
    """Pack a few thousand rows at a time: encodings are large while they are Python objects."""
    if not rows:
        raise DataError("no rows to train on")
    return join([pack(rows[i : i + CHUNK]) for i in range(0, len(rows), CHUNK)])


def _is_whole(row: PolicyRow) -> bool:
    """Whether a row lists as many moves as an answer should: engines name a move twice at times."""
    return len(row.moves) >= MOST_MOVES or len(row.moves) == len(legal_moves(row.fen))


def _policy_fields(answer: str, whole: bool = True) -> list[tuple[int, int]]:
    """(end character, field) of each part of an analysis; padding belongs to what follows it.

    Of a list with moves missing only the moves are targets: it must not teach where a list ends.
    """
    spans: list[tuple[int, int]] = []
    section, seen = OTHER_MOVE, 0
    for end, word in _words(answer):
        if word in ("E:", "B:"):
            if not whole:
                return [*spans, (len(answer), PROMPT)]
            section = EVALUATION if word == "E:" else BEST_MOVE
            spans.append((end, MARKER))
        else:
            spans.append((end, FIRST_MOVE if seen == 0 else section))
            seen += 1
    return spans


def _words(text: str) -> Iterator[tuple[int, str]]:
    end = 0
    for word in text.split():
        end = text.index(word, end) + len(word)
        yield end, word


def _assemble(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    answers: Sequence[str],
    spans: Sequence[list[tuple[int, int]]],
) -> tuple[NDArray[np.uint16], NDArray[np.uint8], NDArray[np.int16], NDArray[np.int16]]:
    """Tokens, fields, prompt lengths and lengths of rows given as text."""
    heads = tokenizer.encode_batch(prompts)
    tails = tokenizer.encode_with_ends(answers)
    lengths = [len(head) + len(ids) + 1 for head, (ids, _) in zip(heads, tails, strict=True)]
    tokens = np.full((len(heads), max(lengths)), tokenizer.eos, dtype=np.uint16)
    fields = np.full(tokens.shape, PROMPT, dtype=np.uint8)
    for place, (head, (ids, ends), parts) in enumerate(zip(heads, tails, spans, strict=True)):
        start, stop = len(head), len(head) + len(ids)
        tokens[place, :start] = head
        tokens[place, start:stop] = ids
        fields[place, start:stop] = _token_fields(ends, parts)
        fields[place, stop] = MARKER if fields[place, stop - 1] != PROMPT else PROMPT
    heads_long = np.array([len(head) for head in heads], dtype=np.int16)
    return tokens, fields, heads_long, np.array(lengths, dtype=np.int16)


def _token_fields(ends: Sequence[int], spans: list[tuple[int, int]]) -> list[int]:
    """The field of each token, by the part in which its last character lies."""
    found: list[int] = []
    part = 0
    for end in ends:
        while part < len(spans) - 1 and end > spans[part][0]:
            part += 1
        found.append(spans[part][1])
    return found


def _win_shares(row: PolicyRow, softness: float, hard: float) -> list[float]:
    wins = [win_percent(cp) / 100 for cp in row.cp[:CHOICES]]
    weights = [math.exp((win - wins[0]) / softness) for win in wins]
    total = sum(weights)
    return [
        (1 - hard) * weight / total + hard * (place == 0) for place, weight in enumerate(weights)
    ]


def _soft_targets(
    tokenizer: Tokenizer, moves: Sequence[Sequence[str]], shares: Sequence[Sequence[float]]
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Candidate tokens and their shares; nothing where a move is more than one token."""
    choices = np.zeros((len(moves), CHOICES), dtype=np.uint16)
    weights = np.zeros((len(moves), CHOICES), dtype=np.uint8)
    if tokenizer.style != "compact":
        return choices, weights
    for place, (listed, parts) in enumerate(zip(moves, shares, strict=True)):
        for column, (move, part) in enumerate(zip(listed[:CHOICES], parts, strict=False)):
            choices[place, column] = tokenizer.token(" " + move)
            weights[place, column] = round(255 * part)
    return choices, weights


def join(parts: Sequence[TokenizedRows]) -> TokenizedRows:
    """Several packed arrays as one, as wide as the widest."""
    width = max(part.tokens.shape[1] for part in parts)
    eos = int(parts[0].tokens[0, -1])

    def widened(array: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)

    return TokenizedRows(
        np.concatenate([widened(part.tokens, eos) for part in parts]).astype(np.uint16),
        np.concatenate([widened(part.fields, PROMPT) for part in parts]).astype(np.uint8),
        np.concatenate([part.prompts for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.choices for part in parts]),
        np.concatenate([part.shares for part in parts]),
    )


def select_rows(packed: TokenizedRows, rows: NDArray[np.int64]) -> TokenizedRows:
    """Some rows, as wide as the longest of them."""
    width = int(packed.lengths[rows].max(initial=1))
    return TokenizedRows(
        packed.tokens[rows, :width],
        packed.fields[rows, :width],
        packed.prompts[rows],
        packed.lengths[rows],
        packed.choices[rows],
        packed.shares[rows],
    )


NAMES = ("tokens", "fields", "prompts", "lengths", "choices", "shares")


def save_packed(packed: TokenizedRows, path: Path) -> None:
    """One `.npz` any numpy reads; LZMA, since boards of one game repeat each other."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name in NAMES:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(getattr(packed, name)))


def load_packed(path: Path) -> TokenizedRows:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return TokenizedRows(**{name: archive[name] for name in NAMES})
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a file of packed rows ({error})") from None


def summary(packed: TokenizedRows) -> str:
    """One line about packed rows for a log."""
    widths = [int(np.percentile(packed.lengths, q)) for q in (0, 50, 100)]
    return f"{len(packed):,} rows of {widths[0]}–{widths[1]}–{widths[2]} tokens"
