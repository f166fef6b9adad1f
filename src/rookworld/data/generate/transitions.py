"""A rows: a move in a position of a half-random or given game, and what the rules make of it.

Rows are asked for by class, since chance alone hardly ever meets a stalemate or an en passant
capture: for each row still missing a walk is chosen that is likely to meet its class.

The law: what happened is decided by `transition` alone; a class here only says what to look for,
and a row that turns out to be something else is thrown away.

Left out on purpose: draws by repetition, which a position and ten plies cannot show.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import chess

from rookworld.data.generate.mates import is_mating
from rookworld.data.generate.playouts import (
    DEVELOP,
    ENDING,
    ENDING_SHUFFLE,
    HUNT,
    PAWNS,
    RANDOM,
    SHUFFLE,
    Walk,
    recent,
    replay,
    walk,
)
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.environment import transition
from rookworld.tasks.notation import MOVES

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Proportions:
    """Weights of the classes of A rows, relative to their sum."""

    quiet: float = 22.0
    """Moves that are none of the following."""
    first: float = 8.0
    """Any legal move among the first eight plies of a game."""
    capture: float = 15.0
    """Captures."""
    castle: float = 9.0
    """Castling, to either side."""
    en_passant: float = 9.0
    """Captures en passant."""
    promotion: float = 9.0
    """Promotions."""
    mate: float = 9.0
    """Moves that give mate."""
    stalemate: float = 3.0
    """Draws by stalemate."""
    insufficient: float = 3.0
    """Draws by insufficient material."""
    seventy_five: float = 3.0
    """Draws by 75 moves without capture or pawn move."""
    illegal: float = 8.0
    """Moves that the rules forbid."""
    unparsable: float = 2.0
    """Texts that are no move at all."""

    def __post_init__(self) -> None:
        """Refuse weights that are no weights."""
        weights = asdict(self)
        for name, weight in weights.items():
            if not 0.0 <= weight < float("inf"):
                raise ConfigError(f"--{name}: {weight} is not a weight of 0 or more")
        if not sum(weights.values()):
            raise ConfigError("the weights of all classes are 0: at least one must be more")


WALKS: dict[str, tuple[Walk, ...]] = {
    "quiet": (RANDOM, DEVELOP, PAWNS, HUNT, SHUFFLE, SHUFFLE, ENDING, ENDING_SHUFFLE),
    "first": (RANDOM, DEVELOP),
    "capture": (RANDOM, RANDOM, PAWNS, SHUFFLE, ENDING),
    "castle": (DEVELOP, DEVELOP, RANDOM),
    "en_passant": (PAWNS,),
    "promotion": (RANDOM, HUNT, ENDING),
    "mate": (RANDOM, RANDOM, PAWNS, HUNT, ENDING),
    "stalemate": (ENDING,),
    "insufficient": (ENDING,),
    "seventy_five": (SHUFFLE, ENDING_SHUFFLE),
    "illegal": (RANDOM, RANDOM, DEVELOP, HUNT, SHUFFLE, ENDING),
    "unparsable": (RANDOM, DEVELOP, SHUFFLE, ENDING),
}
"""Where a class is likely to be met."""

COMMON = ("quiet", "capture", "illegal", "unparsable")
"""Classes met at almost every ply: the ply is drawn first, so that all stages of a game occur."""

DRAWS = ("stalemate", "insufficient", "seventy_five")
FIRST_PLIES = 8
LASTING = ("castle", "promotion")
"""Classes whose chance often stays for several plies; not always the first of them is taken."""

PER_GAME = 3
"""Most rows of one class from one game."""


def transition_records(
    rng: random.Random, proportions: Proportions, count: int, given: Sequence[Sequence[str]]
) -> list[Record]:
    """`count` rows in these proportions, from the given games where they have the class."""
    missing = quotas(proportions, count)
    records: list[Record] = []
    for moves in given:
        names = [name for name in missing if name not in DRAWS]
        starts = start_plies(rng, rng.sample(names, min(4, len(names))), len(moves))
        records += rows_of_game(rng, replay(moves), starts, missing)
    while missing:
        name = rng.choices(list(missing), list(missing.values()))[0]
        style = rng.choice(WALKS[name])
        beside = [other for other in COMMON if missing[other] and other != name]
        starts = start_plies(rng, [name, *beside], style.max_plies)
        records += rows_of_game(rng, walk(rng, style), starts, missing, lead=name)
    rng.shuffle(records)
    return records


def quotas(proportions: Proportions, count: int) -> Counter[str]:
    """How many rows of each class, by largest remainder; classes without any are left out."""
    weights = asdict(proportions)
    exact = {name: weight * count / sum(weights.values()) for name, weight in weights.items()}
    found = Counter({name: int(share) for name, share in exact.items()})
    by_remainder = sorted(exact, key=lambda name: exact[name] - int(exact[name]), reverse=True)
    found.update(by_remainder[: count - found.total()])
    return +found


def start_plies(rng: random.Random, names: Sequence[str], plies: int) -> dict[str, int]:
    """From which ply on to look for each class in a game of so many plies, rather early."""
    starts = dict.fromkeys(names, 0)
    for name in names:
        if name in COMMON:
            starts[name] = int(plies * rng.random() ** 1.5)
        elif name == "first":
            starts[name] = rng.randrange(FIRST_PLIES)
    return starts


def rows_of_game(
    rng: random.Random,
    boards: Iterable[chess.Board],
    starts: dict[str, int],
    missing: Counter[str],
    lead: str | None = None,
) -> list[Record]:
    """Rows of the classes in `starts` from one game; what is found is taken off `missing`.

    The game is left when nothing more is wanted of it, or nothing more of the class `lead`.
    """
    records: list[Record] = []
    left = Counter({name: 1 if name in COMMON else min(PER_GAME, missing[name]) for name in starts})
    for board in boards:
        ply = len(board.move_stack)
        left = Counter({name: left[name] for name in +left if not _is_past(board, name)})
        now = [name for name in left if ply >= starts[name]]
        for name in rng.sample(now, len(now)):
            record = record_of(board, name, rng)
            if record is not None:
                records.append(record)
                left[name] -= 1
                missing[name] -= 1
                if not missing[name]:
                    del missing[name]
                break
        if not +left or (lead and not left[lead]):
            break
    return records


def _is_past(board: chess.Board, name: str) -> bool:
    """Whether the class cannot come any more in this game."""
    if name == "first":
        return len(board.move_stack) >= FIRST_PLIES
    return name == "castle" and not board.castling_rights


def record_of(board: chess.Board, name: str, rng: random.Random) -> Record | None:
    """A row of the class from this position, None if it has none."""
    moves = candidates(board, name, rng)
    if not moves or (name in LASTING and rng.random() < 0.5):
        return None
    move = rng.choice(moves)
    row = transition(board.fen(), move, recent(board))
    if not _fits(row.kind, name):
        return None
    return {**asdict(row), "history": list(row.history)}


def _fits(kind: str, name: str) -> bool:
    if name == "first":
        return True
    if name in DRAWS:
        return kind == "draw"
    return kind == ("illegal" if name == "unparsable" else name)


def candidates(board: chess.Board, name: str, rng: random.Random) -> list[str]:
    """Moves of this position that may belong to the class."""
    if name == "illegal":
        return illegal_moves(board, rng)
    if name == "unparsable":
        return [unparsable_move(board, rng)]
    if _is_hopeless(board, name):
        return []
    return [move.uci() for move in list(board.legal_moves) if _belongs(board, move, name)]


def _is_hopeless(board: chess.Board, name: str) -> bool:
    """Cheap reasons to look no further."""
    match name:
        case "en_passant":
            return board.ep_square is None
        case "stalemate":
            return chess.popcount(board.occupied) > 9
        case "insufficient":
            return chess.popcount(board.occupied) > 4
        case "seventy_five":
            return board.halfmove_clock != 149
    return False


def _belongs(board: chess.Board, move: chess.Move, name: str) -> bool:
    match name:
        case "castle":
            return board.is_castling(move)
        case "en_passant":
            return board.is_en_passant(move)
        case "promotion":
            return move.promotion is not None
        case "capture":
            return board.is_capture(move) and not board.is_en_passant(move)
        case "mate":
            return is_mating(board, move)
        case "stalemate" | "insufficient":
            after = board.is_stalemate if name == "stalemate" else board.is_insufficient_material
            board.push(move)
            found = after()
            board.pop()
            return found
        case "seventy_five":
            return not board.is_zeroing(move)
    return True


def illegal_moves(board: chess.Board, rng: random.Random) -> list[str]:
    """Illegal moves of one sort that a careless player might make; the sort is drawn at random."""
    legal = {move.uci() for move in board.legal_moves}
    match rng.choices(range(5), (3, 2, 3, 1, 2))[0]:
        case 0:
            found = [move.uci() for move in board.pseudo_legal_moves]
        case 1:
            other = board.copy(stack=False)
            other.turn = not board.turn
            found = [move.uci() for move in other.pseudo_legal_moves]
        case 2:
            own = board.occupied_co[board.turn]
            sources = {chess.square_name(square) for square in chess.scan_forward(own)}
            return [move for move in MOVES if move[:2] in sources and move not in legal]
        case 3:
            found = ["e1g1", "e1c1"] if board.turn else ["e8g8", "e8c8"]
            found += [move[:4] for move in legal if len(move) == 5]
            found += [move + "q" for move in legal if len(move) == 4 and move + "q" in MOVES]
        case _:
            return [move for move in MOVES if move not in legal]
    return sorted(set(found) - legal)


def unparsable_move(board: chess.Board, rng: random.Random) -> str:
    """A text that is not UCI: algebraic notation, a slip of the keyboard, a move off the board."""
    move = rng.choice(list(board.legal_moves))
    text = move.uci()
    at = rng.randrange(4)
    wrong = rng.choice("90ixz" if at % 2 == 0 else "90ax")
    return rng.choice(
        (
            board.san(move).rstrip("+#"),
            text[:at] + wrong + text[at + 1 :],
            text[:at] + text[at + 1 :],
            text[:2] + "-" + text[2:],
            text[:4] + rng.choice("kpx"),
            text.upper(),
        )
    )
