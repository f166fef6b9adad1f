"""Sampled positions as pictures: what the model said beside what is true, drawn by python-chess.

Laws: a record of `rollouts.jsonl` becomes one card or nothing, never an error; text of the model
stays text (only SVG made here is markup); pieces are defined once for a page (`PIECES`), not once a
board. What there is to draw of a row and of an answer, its task says (`Drawing`).
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
from rookworld.tasks.notation import MATE
from rookworld.tasks.registry import TASKS
from rookworld.tasks.task import AnyTask, Drawing

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
def _drawn(text: str, film: bool = False) -> Record | None:
    """A card by its record: a page that follows a run draws each position once."""
    return card(json.loads(text), film)


def films(probes: Sequence[Record]) -> list[Record]:
    """A card for each fixed row, its answers in the order of the evaluations that they are of."""
    rows: dict[str, list[Record]] = {}
    for record in probes:
        rows.setdefault(json.dumps([record.get("task"), record.get("truth")]), []).append(record)
    found = (_drawn(json.dumps(_joined(same)), film=True) for same in rows.values())
    return [one for one in found if one is not None]


def _joined(records: Sequence[Record]) -> Record:
    """The records of a row as one, each answer with its step."""
    steps = ((int(record["step"]), _answers(record)) for record in records)
    answers = [one | {"step": step} for step, found in steps for one in found]
    return {**records[0], "answers": answers}


def parts_over_training(rollouts: Sequence[Record]) -> Record:
    """Task → {"title", "steps", "parts": {part: mean over the sampled answers of each step}}."""
    found: Record = {}
    for task in TASKS:
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
            found[task] = {"title": TASKS[task].title, "steps": steps, "parts": parts}
    return found


def card(record: Mapping[str, Any], film: bool = False) -> Record | None:
    """One prompt with its answers, ready to be shown; None if its position cannot be drawn.

    Answers of one step go by reward; those of a film are all there, in its order.
    """
    truth, task = record.get("truth"), TASKS.get(str(record.get("task")))
    if not isinstance(truth, Mapping) or task is None or not isinstance(truth.get("fen"), str):
        return None
    try:
        board = chess.Board(truth["fen"])
    except ValueError:
        return None
    true = task.draw_truth(truth)
    boards = [board_svg(_placed(true.board) or board, board.turn, _move(true.played))]
    answers = _answers(record)
    if not film:
        answers = _spread(sorted(answers, key=lambda one: -number(one.get("reward"))), MOST_ANSWERS)
    return {
        "step": int(record["step"]),
        "task": task.letter,
        "title": task.title,
        "truth_title": task.truth_title,
        "caption": true.caption,
        "fen": true.board,
        "boards": boards,
        "truth": _shown(board, true, 0, ENGINE),
        "answers": [_answer(board, task, truth, one, boards) for one in answers],
    }


def _answer(
    board: chess.Board,
    task: AnyTask,
    truth: Mapping[str, Any],
    answer: Mapping[str, Any],
    boards: list[str],
) -> Record:
    """What an answer says, drawn, and what it earned."""
    true, said = task.draw_truth(truth), task.draw_answer(truth, str(answer.get("text", "")))
    shown = _shown(board, said, _board_place(said.board, true.board, board.turn, boards), MODEL)
    for line, (move, _) in zip(shown["lines"], said.scored, strict=True):
        line["known"] = move in true.moves
        line["chosen"] = move == said.best
    return shown | _verdict(answer)


def _shown(board: chess.Board, drawing: Drawing, place: int | None, colour: str) -> Record:
    return {
        "board": place,
        "arrows": arrows_svg(board, drawing.moves, colour),
        "lines": [_line(board, move, int(number(cp))) for move, cp in drawing.scored],
    }


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
    piles: dict[str, list[Record]] = {letter: [] for letter in TASKS}
    for record in records:
        piles.setdefault(str(record.get("task")), []).append(record)
    turns = [
        (order, pile[place])
        for place in range(len(records))
        for order, pile in enumerate(piles.values())
        if place < len(pile)
    ]
    return [record for _, record in sorted(turns[:most], key=lambda turn: turn[0])]


def _verdict(answer: Mapping[str, Any]) -> Record:
    return {
        "text": str(answer.get("text", "")),
        "reward": round(number(answer.get("reward")), 4),
        "parts": {name: round(value, 3) for name, value in _parts(answer).items()},
        "reason": str(answer.get("reason", "")),
        "step": answer.get("step"),
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


def _board_place(
    fen: str, true_fen: str, orientation: chess.Color, boards: list[str]
) -> int | None:
    """The place in `boards` of a board, its wrong squares marked; new ones are added."""
    said, truth = _placed(fen), _placed(true_fen)
    if said is None or truth is None:
        return None
    wrong = [s for s in chess.SQUARES if said.piece_at(s) != truth.piece_at(s)]
    if not wrong:
        return 0
    drawn = board_svg(said, orientation, fill=dict.fromkeys(wrong, f"{WRONG}99"))
    if drawn not in boards:
        boards.append(drawn)
    return boards.index(drawn)


def _placed(fen: str) -> chess.BaseBoard | None:
    try:
        return chess.BaseBoard(fen.split(" ")[0]) if fen else None
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
