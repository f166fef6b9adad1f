"""Where the library `verifiers` finds the environment: it looks for a module of this name."""

from rookworld.env.verifiers import RookWorldEnv, RookWorldTaskset

__all__ = ["RookWorldEnv", "RookWorldTaskset"]
