"""The episode in Gymnasium's API: texts in, texts out (extra `env`).

    gymnasium.make("RookWorld-v0", data=["embedded:train"], max_turns=40)

Law: an observation is a prompt, an action the text that follows it; nothing else decides a reward.
`info` says what stands behind it: the parts of the verdict, its reason, who judged, and how the
episode ended. Left out on purpose: rendering but as text, and vectors of environments of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import chess
import gymnasium
from gymnasium.spaces import Text

from rookworld.env.episode import EnvSettings, Episode, Start, Turn, starts_from
from rookworld.tasks.notation import position_key
from rookworld.tasks.registry import task_of
from rookworld.tasks.task import Judge

LONGEST = 512
"""Characters of a prompt or an answer; the longest that a task writes has 250."""
PRINTABLE = frozenset(map(chr, range(32, 127)))


class RookWorldEnv(gymnasium.Env[str, str]):
    """P → A → P on real positions; the keywords are those of `EnvSettings`."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self, render_mode: str | None = None, data: Sequence[str] = (), **settings: Any
    ) -> None:
        self.render_mode = render_mode
        self.settings = EnvSettings(data=tuple(data), **settings)
        self.observation_space = Text(LONGEST, charset=PRINTABLE)
        self.action_space = Text(LONGEST, min_length=0, charset=PRINTABLE)
        self._starts = starts_from(self.settings)
        self._labels = {
            position_key(start.row.fen): start.row for start in self._starts if start.row.moves
        }
        self._open = ExitStack()
        self._judge: Judge | None = self._open.enter_context(self.settings.open_judge())
        self.episode = self._begin(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode at a start drawn at random, or at number `options["start"]`."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(len(self._starts)))
        number = int((options or {}).get("start", number)) % len(self._starts)
        self.episode = self._begin(number)
        return self.episode.prompt, {**self._asked(), "start": number}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer the prompt; the next prompt, the reward of the answer, and whether it is over."""
        episode = self.episode
        turn = episode.answer(action)
        over = bool(episode.end) and not episode.cut_off
        return episode.prompt, turn.reward, over, episode.cut_off, self._told(turn)

    def render(self) -> str | None:
        """The board as text, and what is asked."""
        if self.render_mode != "ansi":
            return None
        return f"{chess.Board(self.episode.row.fen)}\n{self.episode.prompt}"

    def close(self) -> None:
        """End the engine, if there is one."""
        self._open.close()

    def _begin(self, number: int) -> Episode:
        start: Start = self._starts[number]
        return Episode(start, self.settings, self._judge, self._labels)

    def _asked(self) -> dict[str, Any]:
        return {"task": task_of(self.episode.row).letter, "fen": self.episode.row.fen}

    def _told(self, turn: Turn) -> dict[str, Any]:
        return self._asked() | {
            "answered": task_of(turn.row).letter,
            "parts": dict(turn.verdict.parts),
            "reason": turn.verdict.reason,
            "judged_by": turn.judged_by,
            "end": self.episode.end,
        }
