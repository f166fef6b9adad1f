"""The environment for `verifiers`: real base classes, and a player of ours. Skipped without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs the extra `verifiers`")

import verifiers.v1 as vf

import rookworld_env
from rookworld.env.verifiers import RookWorldConfig, RookWorldEnvConfig
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import legal_moves


class Trace:
    """What `run` writes to."""

    def __init__(self) -> None:
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.info: dict[str, Any] = {}

    def record_reward(self, name: str, value: float, weight: float) -> None:
        self.rewards[name] = value * weight

    def record_metrics(self, values: dict[str, float]) -> None:
        self.metrics |= values


class Player:
    """Answers prompts by the rules, and plays its first legal moves; stops after some turns."""

    def __init__(self, turns: int) -> None:
        self.left = turns
        self.trace = Trace()
        self.prompts: list[str] = []

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Player]:
        self.prompts.append(task.data.prompt)
        yield self

    async def turn(self, message: str | None = None) -> vf.agent.Segment:
        if message is not None:
            self.prompts.append(message)
        if not self.left:
            return vf.agent.Segment([], terminated=True)
        self.left -= 1
        return vf.agent.Segment([], root_reply=true_answer(self.prompts[-1]))


def true_answer(prompt: str) -> str:
    """A legal analysis, or the truth about a move."""
    if prompt.startswith("A: "):
        fen, move, history = prompt.removeprefix("A: ").split("+")[:3]
        row = transition(fen, move, history.split()[:-1])
        return ENVIRONMENT.answer(row, "compact")
    fen = prompt.removeprefix("P: ").partition(" M:")[0].strip()
    legal = sorted(legal_moves(fen))[:5]
    return f"{' '.join(legal)} E: {' '.join(['0.1'] * len(legal))} B: {legal[0]}"


def environment(**config: Any) -> Any:
    taskset = RookWorldConfig(id="rookworld-env", **config)
    return rookworld_env.RookWorldEnv(RookWorldEnvConfig(taskset=taskset))


def test_verifiers_finds_the_environment_by_its_name() -> None:
    env = environment()
    assert type(env.taskset) is rookworld_env.RookWorldTaskset
    tasks = list(env.taskset)
    assert len(tasks) == 64
    assert tasks[0].data.prompt.startswith("P: ")
    assert POLICY.prompt(tasks[5].start.row, "compact") == tasks[5].data.prompt


@pytest.mark.parametrize(("turns", "most", "end"), [(9, 4, "max_turns"), (3, 40, "agent_stopped")])
def test_an_episode_pays_the_mean_of_each_task(turns: int, most: int, end: str) -> None:
    env = environment(max_turns=most)
    player = Player(turns)
    asyncio.run(env.run(next(iter(env.taskset)), SimpleNamespace(player=player)))
    assert player.trace.rewards == {"analysis": 1.0, "environment": 1.0}
    assert player.trace.metrics["turns"] == min(turns, most)
    assert player.trace.info["end"] == end
    assert [prompt[0] for prompt in player.prompts[:4]] == ["P", "A", "P", "A"]
