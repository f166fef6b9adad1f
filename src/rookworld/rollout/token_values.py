"""JOINT: what answers were worth while they were written -> the tokens that wrote it.

Laws: a promise belongs to the token that begins what is promised, wherever a tokenizer puts it; a
vocabulary that spells moves in pieces has no choices between moves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from rookworld.model.tokenizer import Tokenizer
from rookworld.rollout.types import Completions, ListedMoveValues, TokenValues
from rookworld.tasks.notation import MOVES
from rookworld.tasks.prefix_value import END_OF_LIST, SIGNS, STAGES, MoveValues, PrefixValue


def token_values(
    answers: Sequence[Completions],
    found: Sequence[Sequence[Sequence[PrefixValue]]],
    tokenizer: Tokenizer,
) -> list[TokenValues]:
    """Outlooks of the answers to each prompt, and the tokens from which they hold."""
    ids = np.concatenate([one.ids for one in answers])
    of_each = [answer for group in found for answer in group]
    values, stages = stage_values(ids, of_each, tokenizer)
    found_values = []
    for number, one in enumerate(answers):
        k = len(one.counts)
        mine = slice(number * k, (number + 1) * k)
        reach = stages[mine, : one.tokens.shape[1]]
        found_values.append(TokenValues(torch.from_numpy(values[mine]), torch.from_numpy(reach)))
    return found_values


def stage_values(
    ids: NDArray[np.int64], found: Sequence[Sequence[PrefixValue]], tokenizer: Tokenizer
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What each answer was worth at each stage, and to which stage each of its tokens belongs.

    All answers at once: a call for each took longer than judging them.
    """
    values = np.full((len(ids), STAGES - 1), np.nan)
    stages = np.zeros(ids.shape, dtype=np.int64)
    listed = [value for answer in found for value in answer]
    if not listed:
        return values, stages
    number = np.repeat(np.arange(len(ids)), [len(answer) for answer in found])
    stage = np.array([value.stage for value in listed])
    # a model may have more ids than the tokenizer has tokens: they hold nothing
    known = np.minimum(ids, tokenizer.vocab_size)
    seen = np.stack([holding(tokenizer, sign)[known].cumsum(1) for sign in SIGNS])
    sign = [SIGNS.index(value.sign) for value in listed]
    nth = np.array([value.nth for value in listed])
    place = (seen[sign, number] < nth[:, None]).sum(1)
    came = place < ids.shape[1]
    number, stage, place = number[came], stage[came], place[came]
    values[number, stage - 1] = np.array([value.value for value in listed])[came]
    np.maximum.at(stages, (number, place), stage)
    return values, np.maximum.accumulate(stages, axis=1)


def listed_move_values(
    one: Completions, found: Sequence[MoveValues], tokenizer: Tokenizer
) -> ListedMoveValues | None:
    """Values of moves where answers to an analysis listed some, by token; None without any."""
    tokens, named = move_tokens(tokenizer)
    ids = [tokens[word] for word in found[0].words]
    answers, places, values = list[int](), list[int](), array("d")
    for number, chosen in enumerate(found):
        there = min(chosen.places, one.counts[number] - chosen.echoed)
        where = range(chosen.echoed, chosen.echoed + there)
        # none may be spelled out in characters; the last one may be anything
        if there > 0 and named.issuperset(one.ids[number, where.start : where.stop - 1].tolist()):
            answers += [number] * there
            places += where
            values += chosen.values[: there * len(ids)]
    return ListedMoveValues(ids, answers, places, values) if places else None


@lru_cache(maxsize=8)
def move_tokens(tokenizer: Tokenizer) -> tuple[dict[str, int], frozenset[int]]:
    """The tokens that are a move or the end of a list, and which of them are a move.

    None in a vocabulary that spells one of them in pieces.
    """
    vocabulary = tokenizer.vocabulary()
    spelled = {word: vocabulary.get(f" {word}") for word in (*MOVES, END_OF_LIST)}
    tokens = {word: number for word, number in spelled.items() if number is not None}
    if len(tokens) < len(spelled):
        return {}, frozenset()
    return tokens, frozenset(tokens[move] for move in MOVES)


@lru_cache(maxsize=8)
def holding(tokenizer: Tokenizer, sign: str) -> NDArray[np.bool_]:
    """[vocabulary + 1] which tokens have a character in them; the last stands for all others."""
    return np.array([*tokenizer.tokens_with(sign), False])
