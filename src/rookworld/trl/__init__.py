"""Our rewards as reward functions of TRL, and its GRPOTrainer as a backend (`--backend trl`)."""

from rookworld.trl.rewards import (
    environment_reward,
    policy_reward,
    records,
    reward_function,
)

__all__ = ["environment_reward", "policy_reward", "records", "reward_function"]
