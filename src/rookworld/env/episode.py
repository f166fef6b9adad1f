"""One episode: the model analyses (P:), its move is played, it says what that does (A:), and so on.

Laws: python-chess alone moves the game on, whatever the model says of it; any text is an answer and
none raises; the reward of a turn is the verdict of the task that was asked, so an answer is worth
here what it is worth to `rookworld train` and `rookworld score`. A position with labels is judged
by them, any other by the judge, and where there is none by the rules (`tasks.structure`):
`Turn.judged_by` says by whom.

The end: the rules end the game, the move was illegal (the model is still asked what it does), an
analysis cannot be read (there is no move to play), or so many turns are over.
Left out on purpose: chat prompts, an opponent (both sides are the model's) and draws by claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, cast

import chess

from rookworld.data.openings import openings
from rookworld.data.sources import load_rows
from rookworld.runtime.bounds import Count, Seed
from rookworld.runtime.config import Section
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.engine import find_engine
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.judge import StockfishJudge
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.structure import verdict_by_rules
from rookworld.tasks.task import EnvironmentRow, Judge, PolicyRow, Row, Style, Verdict

JudgedBy = Literal["labels", "judge", "rules"]
BOOK = 64
"""Openings that episodes start from where no data are given."""


@dataclass(frozen=True, kw_only=True)
class EnvSettings(Section):
    """What an environment can be told."""

    data: tuple[str, ...] = ()
    """Sources of analysis rows: episodes start from their positions, which have labels; default:
    openings, which have none."""
    max_turns: Count = 200
    """Turns (answers of the model) after which an episode is cut off."""
    style: Style = "compact"
    """How prompts are written: `compact` for the chess tokenizer, `padded` for GPT-2's."""
    judge: Literal["rules", "stockfish"] = "rules"
    """Who judges analyses that have no labels: the rules, which see structure alone, or Stockfish,
    which then judges those with labels too."""
    engine: str | None = None
    """Stockfish binary; default: STOCKFISH_PATH, PATH, /usr/games."""
    nodes: Count = 20_000
    """Stockfish's nodes a position."""
    seed: Seed = 0
    """Seed of the openings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {"style": ("compact", "padded"), "judge": ("rules", "stockfish")}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r}: choose one of {', '.join(values)}"
                )

    def open_judge(self) -> AbstractContextManager[Judge | None]:
        """The judge, to be closed by whoever opened it; None is the rules."""
        if self.judge == "rules":
            return nullcontext()
        return StockfishJudge(find_engine(self.engine), nodes=self.nodes)


@dataclass(frozen=True, slots=True)
class Start:
    """Where an episode begins: a position, perhaps with labels, and the plies that led to it."""

    row: PolicyRow
    history: tuple[str, ...] = ()


def starts_from(settings: EnvSettings) -> list[Start]:
    """The starts that the settings name: rows with labels, or openings without."""
    if not settings.data:
        return [opened(moves) for moves in openings(BOOK, settings.seed)]
    rows = [row for source in settings.data for row in POLICY.select(load_rows(source))]
    if not rows:
        raise ConfigError(f"{' '.join(settings.data)}: no analysis row to start from")
    return [Start(row) for row in rows]


def opened(moves: Sequence[str]) -> Start:
    """The position after the moves of an opening."""
    board = chess.Board()
    for move in moves:
        board.push_uci(move)
    return Start(PolicyRow(board.fen(), (), ()), tuple(moves))


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of an episode, and what it is worth."""

    row: Row
    """What was asked."""
    prompt: str
    text: str
    verdict: Verdict
    judged_by: JudgedBy

    @property
    def reward(self) -> float:
        return self.verdict.total


@dataclass(eq=False)
class Episode:
    """A walk from a start, in progress or over; `end` says how it ended, empty while it goes on."""

    start: Start
    settings: EnvSettings = field(default_factory=EnvSettings)
    judge: Judge | None = None
    labels: Mapping[str, PolicyRow] = field(default_factory=dict)
    """Rows with labels by the key of their position, for positions that are met on the way."""
    rules: RewardRules = field(default_factory=RewardRules)
    turns: list[Turn] = field(default_factory=list)
    end: str = ""

    def __post_init__(self) -> None:
        self.row: PolicyRow | EnvironmentRow = self.start.row
        self.history = self.start.history

    @property
    def prompt(self) -> str:
        """What is asked now, or was asked last."""
        return task_of(self.row).prompt(self.row, self.settings.style)

    @property
    def cut_off(self) -> bool:
        """Whether the turns were over before anything else was."""
        return self.end == "max_turns"

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    def answer(self, text: str, *, finished: bool = True) -> Turn:
        """Take the model's answer; `finished` false if it was cut off before its end token."""
        if self.end:
            raise ValueError(f"the episode is over ({self.end}): begin another")
        row = self.row
        if task_of(row) is POLICY:
            asked = cast(PolicyRow, row)
            verdict, judged_by = self._judge_analysis(asked, text, finished)
            turn = Turn(row, self.prompt, text, verdict, judged_by)
            self._play(asked, text, finished)
        else:
            verdict = ENVIRONMENT.verify(
                cast(EnvironmentRow, row), text, self.rules, finished=finished
            )
            turn = Turn(row, self.prompt, text, verdict, "rules")
            self._go_on(cast(EnvironmentRow, row))
        self.turns.append(turn)
        if not self.end and len(self.turns) >= self.settings.max_turns:
            self.end = "max_turns"
        return turn

    def _judge_analysis(
        self, row: PolicyRow, text: str, finished: bool
    ) -> tuple[Verdict, JudgedBy]:
        if self.judge is None and not row.moves:
            return verdict_by_rules(row, text, self.rules, finished=finished), "rules"
        judged_by: JudgedBy = "labels" if self.judge is None else "judge"
        return POLICY.verify(row, text, self.rules, self.judge, finished=finished), judged_by

    def _play(self, row: PolicyRow, text: str, finished: bool) -> None:
        """Ask next what the chosen move does; without one that can be read there is no next."""
        said = POLICY.parse(text)
        if said.fault is not None or not finished:
            self.end = "malformed"
            return
        self.row = transition(row.fen, said.best, self.history)

    def _go_on(self, row: EnvironmentRow) -> None:
        """Ask for an analysis of the true next position, unless the truth is an end."""
        if row.truncated or row.terminated:
            self.end = row.kind if row.kind in ("illegal", "mate", "draw") else "game_over"
            return
        self.history = row.history
        known = self.labels.get(position_key(row.next_fen))
        # the counters of the FEN are the game's own, whatever row the labels come from
        moves, cp = (known.moves, known.cp) if known is not None else ((), ())
        self.row = PolicyRow(row.next_fen, moves, cp)
