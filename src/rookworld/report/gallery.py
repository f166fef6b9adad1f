"""Sampled positions as pictures: what the model said beside what is true, drawn by python-chess.

Laws: a record of `rollouts.jsonl` becomes one card or nothing, never an error; text of the model
stays text (only SVG made here is markup); pieces are defined once for a page (`PIECES`), not once a
board. An analysis is drawn as arrows on one board, a transition as the board that the answer
describes with its wrong squares marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import chess
import chess.svg

from rookworld.report.run_reader import Record, number
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.notation import MATE
from rookworld.tasks.policy import POLICY

MOST_CARDS = 24
MOST_ANSWERS = 8
MODEL, ENGINE, WRONG = "#2f6bd8", "#2b9a5b", "#d64550"
_ALPHA = ("e6", "99", "73", "59", "4d")
"""Opacity of the first, second … move of a list."""
_COLORS = {
    "square light": "#eef1f5",
    "square dark": "#b9c6d4",
    "square light lastmove": "#dbe8c4",
    "square dark lastmove": "#b4cd93",
    "margin": "#00000000",
    "coord": "#8b95a1",
}
PIECES = "".join(chess.svg.PIECES.values())
"""SVG definitions that the boards of a page refer to."""

_DEFINITIONS = re.compile(r"<(defs|desc)>.*?</\1>|<defs ?/>", re.DOTALL)
_ARROWS = re.compile(r'<(?:line|polygon|circle) [^>]*class="(?:arrow|circle)"[^>]*?/>')
_LONG = re.compile(r"(\d+\.\d)\d+")


def gallery(rollouts: Sequence[Record], most: int = MOST_CARDS) -> list[Record]:
    """Cards in the order of training, spread over its steps, first and last included."""
    by_step: dict[int, list[Record]] = {}
    for record in rollouts:
        by_step.setdefault(int(record["step"]), []).append(record)
    steps = _spread(sorted(by_step), max(2, most // 3))
    each = max(1, most // max(1, len(steps)))
    chosen = (record for step in steps for record in _mixed(by_step[step], each))
    cards = (_drawn(json.dumps(record)) for record in chosen)
    return [one for one in cards if one is not None]


@lru_cache(maxsize=512)
def _drawn(text: str) -> Record | None:
    """A card by its record: a page that follows a run draws each position once."""
    return card(json.loads(text))


def parts_over_training(rollouts: Sequence[Record]) -> Record:
    """Task → {"steps", "parts": {part: mean over the sampled answers of each step}}."""
    found: Record = {}
    for task in ("P", "A"):
        mine = [record for record in rollouts if record.get("task") == task]
        steps = sorted({int(record["step"]) for record in mine})
        sums: dict[str, dict[int, list[float]]] = {}
        for record in mine:
            for answer in _answers(record):
                for part, value in _parts(answer).items():
                    sums.setdefault(part, {}).setdefault(int(record["step"]), []).append(value)
        parts = {
            part: [_mean(values.get(step, [])) for step in steps] for part, values in sums.items()
        }
        if parts:
            found[task] = {"steps": steps, "parts": parts}
    return found


def card(record: Mapping[str, Any]) -> Record | None:
    """One prompt with its answers, ready to be shown; None if its position cannot be drawn."""
    truth = record.get("truth")
    if not isinstance(truth, Mapping) or not isinstance(truth.get("fen"), str):
        return None
    try:
        board = chess.Board(truth["fen"])
    except ValueError:
        return None
    answers = sorted(_answers(record), key=lambda one: -number(one.get("reward")))
    chosen = _spread(answers, MOST_ANSWERS)
    if record.get("task") == "A":
        return _environment_card(record, truth, board, chosen)
    return _policy_card(record, truth, board, chosen)


def _answers(record: Mapping[str, Any]) -> list[Record]:
    found = record.get("answers")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _parts(answer: Mapping[str, Any]) -> dict[str, float]:
    found = answer.get("parts")
    return {k: number(v) for k, v in found.items()} if isinstance(found, Mapping) else {}


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, first and last among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(place * last / (most - 1))] for place in range(most)]


def _mixed(records: Sequence[Record], most: int) -> list[Record]:
    """Up to `most` records, of each task in turn, so that a rare task is not left out."""
    piles = [[r for r in records if (r.get("task") == "A") == env] for env in (False, True)]
    turns = [pile[place] for place in range(len(records)) for pile in piles if place < len(pile)]
    return sorted(turns[:most], key=lambda r: r.get("task") == "A")


# --- analysis -----------------------------------------------------------------------------------


def _policy_card(
    record: Mapping[str, Any],
    truth: Mapping[str, Any],
    board: chess.Board,
    answers: Sequence[Mapping[str, Any]],
) -> Record:
    moves = [str(move) for move in truth.get("moves") or ()]
    scores = [int(number(cp)) for cp in truth.get("cp") or ()]
    lines = [_line(board, *pair) for pair in zip(moves, scores, strict=False)]
    colour = "White" if board.turn else "Black"
    return {
        "step": int(record["step"]),
        "task": "P",
        "caption": f"{colour} to move",
        "fen": board.fen(),
        "boards": [board_svg(board)],
        "truth": {
            "board": 0,
            "arrows": arrows_svg(board, moves, ENGINE),
            "lines": lines,
        },
        "answers": [_policy_answer(board, moves, one) for one in answers],
    }


def _policy_answer(board: chess.Board, known: Sequence[str], answer: Mapping[str, Any]) -> Record:
    said = POLICY.parse(str(answer.get("text", "")))
    lines = [_line(board, *pair) for pair in zip(said.moves, said.cp, strict=True)]
    for line, move in zip(lines, said.moves, strict=True):
        line["known"] = move in known
        line["chosen"] = move == said.best
    ranked = [said.best, *(move for move in said.moves if move != said.best)] if said.best else []
    shown = {"board": 0, "arrows": arrows_svg(board, ranked, MODEL), "lines": lines}
    return shown | _verdict(answer)


def _verdict(answer: Mapping[str, Any]) -> Record:
    return {
        "text": str(answer.get("text", "")),
        "reward": round(number(answer.get("reward")), 4),
        "parts": {name: round(value, 3) for name, value in _parts(answer).items()},
        "reason": str(answer.get("reason", "")),
    }


def _line(board: chess.Board, text: str, cp: int) -> Record:
    """A move as a player writes it, with its evaluation."""
    move = _move(text)
    legal = move is not None and move in board.legal_moves
    san = board.san(move) if move is not None and legal else text
    return {"move": san, "legal": legal, "score": score_text(cp)}


def score_text(cp: int) -> str:
    """Pawns with a sign, or `#n` for a mate in n."""
    if abs(cp) >= MATE - 1000:
        return f"{'−' if cp < 0 else ''}#{MATE - abs(cp)}"
    return f"{cp / 100:+.2f}".replace("-", "−")


def _move(text: str) -> chess.Move | None:
    try:
        return chess.Move.from_uci(text)
    except ValueError:
        return None


# --- environment --------------------------------------------------------------------------------


def _environment_card(
    record: Mapping[str, Any],
    truth: Mapping[str, Any],
    board: chess.Board,
    answers: Sequence[Mapping[str, Any]],
) -> Record:
    text = str(truth.get("move", ""))
    move = _move(text)
    after = _placed(str(truth.get("next_fen", board.fen()))) or board
    san = board.san(move) if move is not None and move in board.legal_moves else text
    boards = [board_svg(after, board.turn, move)]
    shown: list[Record] = []
    for answer in answers:
        place = _answered_board(str(answer.get("text", "")), after, board.turn, boards)
        shown.append({"board": place, "arrows": "", "lines": []} | _verdict(answer))
    kind = str(truth.get("kind", "")).replace("_", " ")
    return {
        "step": int(record["step"]),
        "task": "A",
        "caption": f"after {san}" + (f" ({kind})" if kind else ""),
        "fen": str(truth.get("next_fen", "")),
        "boards": boards,
        "truth": {"board": 0, "arrows": "", "lines": []},
        "answers": shown,
    }


def _answered_board(
    text: str, truth: chess.BaseBoard, orientation: chess.Color, boards: list[str]
) -> int | None:
    """The place in `boards` of the board that an answer describes; new ones are added."""
    said = ENVIRONMENT.parse(text)
    placed = _placed(said.fen) if said.fault is None else None
    if placed is None:
        return None
    wrong = [s for s in chess.SQUARES if placed.piece_at(s) != truth.piece_at(s)]
    if not wrong:
        return 0
    drawn = board_svg(placed, orientation, fill=dict.fromkeys(wrong, f"{WRONG}99"))
    if drawn not in boards:
        boards.append(drawn)
    return boards.index(drawn)


def _placed(fen: str) -> chess.BaseBoard | None:
    try:
        return chess.BaseBoard(fen.split(" ")[0])
    except ValueError:
        return None


# --- drawing ------------------------------------------------------------------------------------


def board_svg(
    board: chess.BaseBoard,
    orientation: chess.Color | None = None,
    move: chess.Move | None = None,
    fill: Mapping[chess.Square, str] | None = None,
) -> str:
    """A board seen by the side to move, without the definitions of its pieces."""
    if orientation is None:
        orientation = board.turn if isinstance(board, chess.Board) else chess.WHITE
    drawn = chess.svg.board(
        board, orientation=orientation, lastmove=move, fill=dict(fill or {}), colors=_COLORS
    )
    return _DEFINITIONS.sub("", drawn)


def arrows_svg(board: chess.Board, moves: Sequence[str], colour: str) -> str:
    """Arrows for moves, the first the strongest; illegal ones in red."""
    arrows = []
    for rank, text in enumerate(moves[: len(_ALPHA)]):
        move = _move(text)
        if move is not None and move:
            shade = colour if move in board.legal_moves else WRONG
            arrows.append((move.from_square, move.to_square, shade + _ALPHA[rank]))
    return _arrows_svg(tuple(reversed(arrows)), board.turn)


@lru_cache(maxsize=4096)
def _arrows_svg(arrows: tuple[tuple[int, int, str], ...], orientation: chess.Color) -> str:
    if not arrows:
        return ""
    drawn = chess.svg.board(
        None,
        orientation=orientation,
        arrows=[chess.svg.Arrow(tail, head, color=shade) for tail, head, shade in arrows],
    )
    return _LONG.sub(r"\1", "".join(_ARROWS.findall(drawn)))
