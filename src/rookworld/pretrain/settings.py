"""What `rookworld pretrain` can be told: a frozen dataclass, its docstrings the `--help`.

Every field is read by something, and every number has bounds in a table (tests look).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from rookworld.runtime.bounds import (
    Bounds,
    Count,
    Few,
    FromZero,
    Many,
    Positive,
    Seed,
    Share,
    Whole,
)
from rookworld.runtime.config import Composed, require
from rookworld.runtime.machine import MachineSettings


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(Composed):
    """Supervised training from rows; see docs/pretraining.md."""

    data: tuple[str, ...] = ("embedded:train",)
    """Sources as PATH or PATH=SHARE (Parquet, JSONL, text, packed .npz, `embedded:train`, hub id).
    SHARE is a source's weight in every batch; without it a source counts by its rows."""
    out: Path = Path("runs/pretrain")
    """Run folder."""
    model: str | None = None
    """Start from this model folder or hub id instead of from scratch."""
    tokenizer: str = "chess"
    """`chess` for the chess-native tokenizer, `gpt2` for GPT-2's byte pairs (extra `gpt2`), or a
    folder or hub id that has a tokenizer."""
    documents: bool = False
    """Train on texts as they are, end to end in windows of --n-positions tokens with the end token
    before each text and the loss on every token; not on the answers of rows alone."""
    prompt_weight: Share = 1.0
    """With --documents: weight of a prompt's tokens in the loss. Lower it for a small model, which
    would spend itself on guessing positions; 1 is how public models were trained."""
    apart: bool = False
    """With --documents: each text alone from position 0, padded to the longest beside it, instead
    of end to end. A small model learns a board sooner when its squares keep their places."""
    n_layer: Annotated[int, Bounds(1, 4096)] = 6
    """Layers; fewer than --model has: its first ones and its last are kept."""
    n_embd: Few = 320
    """Width."""
    n_head: Few = 10
    """Attention heads."""
    n_inner: Many | None = None
    """Width of the inner layers, four times --n-embd by default; narrower than --model's: the units
    with the largest weights are kept."""
    n_positions: Many = 192
    """Longest row, in tokens."""
    steps: Count = 12_000
    """Updates."""
    minutes: Positive | None = None
    """Train for as long instead of --steps, the rate falling by the clock; evaluations,
    checkpoints and the first step, which compiles, are not counted."""
    batch_size: Many | None = None
    """Rows (or windows) a step, over all processes; by default 1,728 on CUDA and 32 on the CPU."""
    micro_tokens: Count = 262_144
    """Tokens a forward pass may hold; a step is cut into as many passes as that takes."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for the block matrices and AdamW for the rest, or AdamW for all."""
    lr: FromZero = 3.5e-3
    """Peak rate of the block matrices."""
    lr_other: FromZero = 1.5e-3
    """Peak rate of everything else (AdamW)."""
    lr_warmup_steps: Whole = 200
    """Steps over which both rates rise from zero."""
    lr_final: Share = 0.02
    """Where the cosine ends, as a share of the peak."""
    weight_decay: FromZero = 0.1
    """Decay of matrices; vectors are not decayed."""
    clip_norm: Positive = 1.0
    """Largest gradient norm."""
    flip: bool = True
    """Swap the colours of half of the analysis rows (chess tokenizer only)."""
    mirror: bool = True
    """Mirror half of the analysis rows without castling rights left to right (likewise)."""
    hard_share: Share = 0.5
    """Share of the first move's target that goes to the best move; the rest is spread."""
    softness: Positive = 0.03
    """Win probability by which a move's share of the spread falls to 1/e."""
    first_move_weight: FromZero = 1.0
    """Weight of the first candidate move in the loss."""
    other_move_weight: FromZero = 0.3
    """Weight of each further candidate."""
    repeat_weight: FromZero = 0.0
    """Weight of not naming a listed move again, beside each further move (chess tokenizer only)."""
    evaluation_weight: FromZero = 0.15
    """Weight of each evaluation."""
    marker_weight: FromZero = 0.1
    """Weight of field names, the repeated best move and the end token."""
    state_weight: FromZero = 0.1
    """Weight of each token of an environment answer's new position."""
    outcome_weight: FromZero = 1.0
    """Weight of each token of its reward and flags: few, and as hard as chess."""
    eval_every: Whole = 1_000
    """Steps between evaluations on held-out rows; 0 for none but the last."""
    eval_rows: Whole = 200
    """Held-out rows of each task for those evaluations; 0 for no evaluation at all."""
    save_every: Count = 1_000
    """Steps between checkpoints."""
    keep: Count = 2
    """Checkpoints kept."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl (each the mean since the last)."""
    seed: Seed = 0
    """Seed of weights and data order."""
    compile: bool | None = None
    """Compile the block; by default on CUDA only."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --out, or begin where there is no run yet."""
    overwrite: bool = False
    """Delete the run in --out and start over; with --resume, only where it cannot go on."""
    machine: MachineSettings = field(default_factory=MachineSettings)

    ALIASES: ClassVar = {
        **dict.fromkeys(("max_steps", "num_steps", "max_iters"), "steps"),
        **dict.fromkeys(("output_dir", "out_dir"), "out"),
        **dict.fromkeys(("model_name_or_path", "model_name"), "model"),
        **dict.fromkeys(("warmup_steps", "warmup_iters"), "lr_warmup_steps"),
        **dict.fromkeys(("max_grad_norm", "grad_clip"), "clip_norm"),
        **dict.fromkeys(("block_size", "context_length", "max_length"), "n_positions"),
        **dict.fromkeys(("eval_steps", "eval_interval"), "eval_every"),
        **dict.fromkeys(("save_steps", "save_interval"), "save_every"),
    }
    ADVICE: ClassVar = {
        **dict.fromkeys(
            ("epochs", "num_train_epochs", "num_epochs"),
            "--steps counts updates, --minutes the clock",
        ),
        "learning_rate": "--lr for the matrices of blocks, --lr-other for everything else",
        "per_device_train_batch_size": "--batch-size counts the rows of a step, over all processes",
        "gradient_accumulation_steps": "a step is cut into passes of --micro-tokens",
    }
    OWN: ClassVar = "n_layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.n_embd % self.n_head == 0,
            f"--n-embd {self.n_embd} is not a multiple of --n-head {self.n_head}",
        )
        require(
            self.documents or self.prompt_weight == 1,
            f"--prompt-weight {self.prompt_weight} without --documents: of rows only the answers "
            "are learnt anyway",
        )

        require(self.documents or not self.apart, "--apart without --documents: rows stand apart")

    def rows_on(self, device: str) -> int:
        """Rows a step on this kind of device."""
        if self.batch_size is not None:
            return self.batch_size
        return 1_728 if device == "cuda" else 32
