"""The episode as an environment of the library `verifiers` (extra `verifiers`), by its API `v1`.

    vf-eval rookworld-env --env.taskset.max-turns 20       # its own command line

Law: turns, ends and rewards are those of `Episode`; a trace gets the mean verdict of its analyses
(`analysis`) and of its answers as the environment (`environment`), weighed alike.
The conversation is a chat: each prompt is a user's message, the answer the assistant's, and what
was said before stays in the context. A model that knows the tasks as plain completions needs a chat
template that writes messages as they are. Left out on purpose: `verifiers`' API of before `v1`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import verifiers.v1 as vf

from rookworld.env.episode import EnvSettings, Episode, Start, starts_from
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import TASKS, task_of
from rookworld.tasks.task import Judge, PolicyRow

NAMES = {letter: task.title.lower() for letter, task in TASKS.items()}
"""What the reward of a task is called."""


class RookWorldConfig(vf.TasksetConfig):  # type: ignore[misc]
    """What the environment can be told: see `EnvSettings`."""

    data: list[str] = []  # noqa: RUF012
    max_turns: int = EnvSettings.max_turns
    style: str = EnvSettings.style
    judge: str = EnvSettings.judge
    engine: str | None = None
    nodes: int = EnvSettings.nodes
    seed: int = EnvSettings.seed


def settings_of(config: Any) -> EnvSettings:
    """The settings in a config."""
    named = {field.name: getattr(config, field.name) for field in fields(EnvSettings)}
    return EnvSettings(**named | {"data": tuple(named["data"])})


class RookWorldData(vf.TaskData):  # type: ignore[misc]
    """A start: a position, its labels if it has some, and the plies that led to it."""

    fen: str
    moves: list[str] = []  # noqa: RUF012
    cp: list[int] = []  # noqa: RUF012
    history: list[str] = []  # noqa: RUF012


class RookWorldTask(vf.Task[RookWorldData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """An episode from a start."""

    @property
    def start(self) -> Start:
        data = self.data
        row = PolicyRow(data.fen, tuple(data.moves), tuple(data.cp))
        return Start(row, tuple(data.history))


class RookWorldTaskset(vf.Taskset[RookWorldTask, RookWorldConfig]):  # type: ignore[misc]
    """One task a start."""

    def load(self) -> Iterator[RookWorldTask]:
        """The starts that the config names."""
        settings = settings_of(self.config)
        for number, start in enumerate(starts_from(settings)):
            row = start.row
            data = RookWorldData(
                name=f"start-{number}",
                prompt=POLICY.prompt(row, settings.style),
                fen=row.fen,
                moves=list(row.moves),
                cp=list(row.cp),
                history=list(start.history),
            )
            yield RookWorldTask(data, self.config.task)


class RookWorldEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """One player, without tools."""

    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class RookWorldEnv(vf.Env[RookWorldEnvConfig]):  # type: ignore[misc]
    """The rules of chess at the other end of the conversation."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = settings_of(self.taskset.config)
        self.judge: Judge | None = None
        self.opened = ExitStack()
        labelled = starts_from(self.settings) if self.settings.data else []
        self.labels = {position_key(start.row.fen): start.row for start in labelled}

    async def start(self) -> None:
        """Start the engine, if one judges."""
        self.judge = self.opened.enter_context(self.settings.open_judge())

    async def stop(self) -> None:
        """End it."""
        self.opened.close()

    async def run(self, task: Any, agents: Any) -> None:
        """One episode: the player speaks first, since the task is its prompt."""
        episode = Episode(task.start, self.settings, self.judge, self.labels)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                # an engine may take its time, and other episodes should not wait for it
                await asyncio.to_thread(episode.answer, segment.last_reply)
                if episode.end:
                    break
                segment = await interaction.turn(episode.prompt)
        trace = interaction.trace
        for name, value in rewards(episode).items():
            trace.record_reward(name, value, 1.0)
        trace.record_metrics({"turns": len(episode.turns), "return": episode.reward})
        trace.info["end"] = episode.end or "agent_stopped"


def rewards(episode: Episode) -> dict[str, float]:
    """The mean verdict of each task; 0 for one that was never asked."""
    found: dict[str, Sequence[float]] = {
        name: [turn.reward for turn in episode.turns if task_of(turn.row).letter == letter]
        for letter, name in NAMES.items()
    }
    return {name: sum(each) / max(len(each), 1) for name, each in found.items()}
