"""What `rookworld evolve` can be told: a frozen dataclass, its docstrings the `--help`.

Few on purpose: what a training can be told besides is for `rookworld train` and `pretrain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from rookworld.runtime.bounds import Bounds, Count, FromZero, PositiveShare, Seed, Whole
from rookworld.runtime.config import Composed, require
from rookworld.tasks.registry import metric_info


@dataclass(frozen=True, kw_only=True)
class EvolveSettings(Composed):
    """Rounds of self-play and training from a model's own games; see docs/evolve.md.

    A round plays, verifies what was played, trains on it, and is kept only if the model is better
    than the one before on held-out rows, beyond the interval of the difference.
    """

    model: str = "nano"
    """Where it begins: `nano`, a model folder, or a hub id."""
    out: Path = Path("runs/evolve")
    """Folder of the rounds, each of which is a run folder."""
    rounds: Count = 3
    """Rounds in all, those of an earlier call among them."""
    games: Annotated[int, Bounds(2)] = 64
    """Games a round, each from an opening of its own."""
    world: bool = False
    """Play inside the model's own world: it says itself what moves do; a game is over where it
    departs from the rules."""
    max_plies: Count = 200
    """Plies after which a game is given up."""
    play_temperature: FromZero = 0.6
    """Temperature of self-play."""
    play_top_k: Whole = 5
    """Most probable tokens that self-play draws from; 0 for all."""
    judge: Literal["rules", "stockfish"] = "rules"
    """Who verifies the winners' analyses: the rules keep those without a fault, as they are;
    Stockfish labels the positions anew."""
    engine: str | None = None
    """Stockfish binary; default: STOCKFISH_PATH, PATH, /usr/games."""
    nodes: Count = 20_000
    """Stockfish's nodes a position."""
    method: Literal["pretrain", "grpo"] = "pretrain"
    """How a round learns: supervised, or by GRPO with the rewards of `train`."""
    data: tuple[str, ...] = ("embedded:train",)
    """Sources that are trained on too, so that what games do not show is not forgotten."""
    share: PositiveShare = 0.5
    """Share of a round's own rows in what it trains on; 1: nothing else."""
    steps: Count = 200
    """Updates a round."""
    batch_size: Count | None = None
    """Rows (GRPO: prompts) a step; default: that of `pretrain` or `train`."""
    lr: FromZero = 2e-5
    """Peak learning rate (AdamW)."""
    save_every: Count = 50
    """Steps between checkpoints: what an interruption may cost."""
    held_out: str = "embedded:validation"
    """Rows that models are compared on; their positions are never trained on from games."""
    eval_policy_rows: Whole = 400
    """Held-out analysis rows; more for narrower intervals."""
    eval_environment_rows: Whole = 200
    """Held-out environment rows."""
    select_by: str = "reward/greedy"
    """Held-out metric that decides whether a round is kept; more of it must be better."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    seed: Seed = 0
    """Seed of the games and of training."""
    resume: bool = False
    """Go on with the rounds in --out, also in the middle of one, or begin where there are none."""
    overwrite: bool = False
    """Delete the rounds in --out and start over."""
    dry_run: bool = False
    """Check settings, data and model, print the plan, and stop."""

    OWN: ClassVar = "rounds"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            metric_info(self.select_by).better != "down",
            f"--select-by {self.select_by}: less of it is better; take one of which more is, such "
            "as reward/greedy or P/best",
        )
        require(
            self.eval_policy_rows + self.eval_environment_rows > 0,
            "--eval-policy-rows 0 --eval-environment-rows 0: nothing to compare models on; raise "
            "one of them",
        )
        require(
            bool(self.data) or self.share == 1,
            f"--share {self.share} without --data: nothing to fill the rest; give --share 1",
        )
