"""RookWorld as an environment for other trainers: a multi-turn P → A → P episode of verified text.

    import rookworld.env
    env = gymnasium.make("RookWorld-v0")

Importing this registers the environment with Gymnasium (extra `env`) where that is installed; the
episode itself needs neither Gymnasium nor torch. `rookworld.env.verifiers` is the same episode for
the library `verifiers` (extra `verifiers`).
"""

from importlib.util import find_spec

from rookworld.env.episode import EnvSettings, Episode, Turn, starts_from
from rookworld.tasks.structure import verdict_by_rules

__all__ = ["EnvSettings", "Episode", "Turn", "starts_from", "verdict_by_rules"]

ID = "RookWorld-v0"

if find_spec("gymnasium") is not None:
    import gymnasium

    if ID not in gymnasium.registry:
        gymnasium.register(ID, entry_point="rookworld.env.gym:RookWorldEnv")
