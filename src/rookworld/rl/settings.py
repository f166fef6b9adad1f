"""What `rookworld train` can be told: frozen dataclasses, their docstrings the `--help`.

Every field is read by something, and every number has bounds in a table (tests look).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Literal

from rookworld.runtime.config import (
    COUNT,
    FROM_ZERO,
    POSITIVE,
    SEED,
    SHARE,
    SHARE_NOT_ZERO,
    Bounds,
    bounds_of,
    check_bounds,
    require,
)

TOKEN_LOSSES = ("token", "cispo", "tv")
"""Losses that are a mean over all tokens of a step."""
KLType = Literal["forward", "reverse", "symmetric", "k2", "k3", "k1_reward"]


@dataclass(frozen=True, kw_only=True)
class RewardWeights:
    """What a reward is made of; what is not set keeps the default of docs/rewards.md.

    Relative weights of its parts, and how strict the part for the best move is.
    """

    p_format: float | None = None
    """P: the answer can be read (0.10 if not given)."""
    p_legal: float | None = None
    """P: listed moves that are legal (0.06 if not given)."""
    p_best: float | None = None
    """P: quality of the best move (0.24 if not given)."""
    p_candidates: float | None = None
    """P: true best moves listed (0.06 if not given)."""
    p_evaluations: float | None = None
    """P: accuracy of the evaluations (0.10 if not given)."""
    p_whole: float | None = None
    """P: best × evaluations (0.44 if not given)."""
    p_best_scale: float | None = None
    """P: how much win probability B may lose until its quality is 1/e (0.1 if not given)."""
    a_format: float | None = None
    """A: the answer can be read (0.08 if not given)."""
    a_board: float | None = None
    """A: similarity of the new position (0.42 if not given)."""
    a_flags: float | None = None
    """A: terminated and truncated (0.04 if not given)."""
    a_reward: float | None = None
    """A: the reward value (0.03 if not given)."""
    a_whole: float | None = None
    """A: everything right at once (0.43 if not given)."""

    def chosen(self) -> dict[str, float]:
        """What was set, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(RewardWeights)}
        return {name: value for name, value in named.items() if value is not None}


TRAIN_BOUNDS = bounds_of(
    {
        COUNT: "steps batch_size k_samples updates_per_rollout max_new_tokens nodes "
        "agreement_prompts agreement_lists max_consecutive_nans micro_tokens save_every keep",
        FROM_ZERO: "p_format p_legal p_best p_candidates p_evaluations p_whole "
        "a_format a_board a_flags a_reward a_whole lr lr_warmup_steps weight_decay "
        "kl_coef kl_coef_min kl_coef_max kl_warmup_steps kl_warmup_factor kl_divergence_threshold "
        "kl_collect_cap ref_sync_every ref_reset_kl advantage_std_floor advantage_clip value_coef "
        "agreement_coef agreement_first entropy_coef flat_tries top_k "
        "reward_warmup_steps score_workers max_recoveries entropy_floor eval_every "
        "eval_policy_rows eval_environment_rows eval_mates sample_every",
        # no end above: a ratio may be let go as far as one likes
        POSITIVE: "adam_eps agreement_power agreement_first_power clip_norm clip_range "
        "clip_range_high target_kl",
        SHARE: "lr_final mix_env_ratio gamma gae_lambda",
        SHARE_NOT_ZERO: "p_best_scale tv_delta top_p p_top_p a_top_p recovery_lr_factor",
        SEED: "seed",
        # the worst answer that can be read earns 0: what cannot be must not earn more
        Bounds(-inf, 0): "p_malformed a_malformed",
        Bounds(2, said="a P and an A phase need at least 2"): "trl_phase_steps",
        Bounds(
            0, lowest_allowed=False, said="greedy answers are all alike; above 0"
        ): "temperature p_temperature a_temperature",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(RewardWeights):
    """GRPO on analysis (P:) and environment (A:) prompts; see docs/training.md."""

    backend: Literal["native", "trl"] = "native"
    """Who trains: `native`, or Hugging Face's GRPOTrainer (extra `trl`; see docs/trl.md)."""
    trl_phase_steps: int = 20
    """Steps of a P phase and the A phase after it (--backend trl); --mix-env-ratio of them A."""
    model: str = "nano"
    """`nano` (embedded), a model folder, or a hub id such as jrahn/RookWorld-LM-124M."""
    data: tuple[str, ...] = ("embedded:train",)
    """Rows to take prompts from: `embedded:train`, files (Parquet, JSONL, text), or hub ids."""
    held_out: str = "embedded:validation"
    """Rows for evaluation, which should not be among --data: positions that are get a warning."""
    out: Path = Path("runs/train")
    """Run folder."""
    steps: int = 150
    """Updates."""
    batch_size: int = 8
    """Prompts a step, over all processes."""
    k_samples: int = 8
    """Answers sampled per prompt (the group)."""
    mix_env_ratio: float = 0.25
    """Share of environment prompts that are drawn; 0: analysis alone, 1: environment alone."""
    lr: float = 2e-5
    """Peak learning rate (float32 masters)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the matrices of blocks, whose steps are as large."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """What the rate does after its warm-up."""
    lr_final: float = 0.1
    """Share of the peak that linear and cosine end at."""
    lr_warmup_steps: int = 10
    """Steps over which the rate rises."""
    trained: Literal["all", "blocks", "vectors"] = "all"
    """Weights that learn: all, all but the embeddings, or gains and biases alone, whose gradient is
    least noisy: what a short run on few prompts can afford (give them a larger --lr)."""
    weight_decay: float = 0.0
    """What weights lose of themselves a step, times the rate."""
    adam_eps: float = 1e-6
    """AdamW: gradients well below it hardly move their weight. They are mostly rounding, which
    steps of full size would follow wherever it points."""
    clip_norm: float = 1.0
    """Largest gradient norm."""
    updates_per_rollout: int = 1
    """Passes over each batch of samples; the clip range matters from the second on."""
    loss: Literal["token", "grpo", "dr_grpo", "gspo", "cispo", "tv"] = "token"
    """Policy loss; see docs/training.md."""
    clip_range: float = 0.2
    """Trust region of the ratio, below 1 and, without --clip-range-high, above."""
    clip_range_high: float | None = None
    """Trust region above 1; default: --clip-range, or 0.28 where that is left at 0.2 (DAPO)."""
    tv_delta: float = 0.2
    """How far a probability may move under --loss tv."""
    kl_coef: float = 0.02
    """Weight of the KL to the reference (where it starts, with --adaptive-kl)."""
    kl_type: KLType = "forward"
    """forward: Σ π (log π − log ref), reverse: Σ ref (log ref − log π), symmetric: their mean, all
    exact; k2: ½x² of the sampled token; k3: for comparison; k1_reward: x taken off the reward."""
    adaptive_kl: bool = False
    """Raise the weight ×1.5 above 1.5·target; lower it below target/1.5, once that was reached."""
    target_kl: float = 0.05
    """KL that --adaptive-kl aims at, nats per token."""
    kl_coef_min: float | None = None
    """Least adaptive weight; default: a tenth of --kl-coef."""
    kl_coef_max: float = 1.0
    """Greatest adaptive weight."""
    kl_warmup_steps: int = 0
    """Steps during which the weight is multiplied by --kl-warmup-factor."""
    kl_warmup_factor: float = 0.0
    """That factor; 0: no penalty during the warm-up."""
    kl_divergence_threshold: float = 1.0
    """KL, nats per token, at 90 % of which the guard restores the last good state; 0: never."""
    adaptive_threshold: bool = False
    """Let that threshold follow training (3 × running median, at most 4 × the set value)."""
    kl_collect_cap: float = 0.0
    """Leave out samples whose mean KL to the reference is above this; 0: none."""
    ref_sync_every: int = 0
    """Steps after which the reference becomes the policy; 0: it stays frozen."""
    ref_reset_kl: float = 0.0
    """Reset the reference when KL stays above this for 20 steps; 0: never."""
    ref_device: str | None = None
    """Where the reference lives (cuda:1, cpu); default: with the policy."""
    baseline_type: Literal["group_mean", "rloo", "ema", "adaptive"] = "group_mean"
    """What is subtracted from a reward."""
    advantage_scale: Literal["none", "group", "batch"] = "batch"
    """What the difference is divided by: nothing, the group's or the step's deviation."""
    advantage_std_floor: float = 0.02
    """Least deviation to divide by: noise must not become gradient."""
    advantage_clip: float = 5.0
    """Advantages are clipped to ± this; 0: not."""
    credit: Literal["auto", "answer", "fields", "outlook", "choices"] = "fields"
    """What a token is paid for: the whole answer; `fields`, what comes after the move or field
    before it (the same mean gradient, less noise); `outlook`, what it changes itself; `choices`,
    the same, and where a move is listed every move is paid, not only the one that was drawn;
    `auto`, by choices where tokenizer, loss and KL allow it, else by fields."""
    agreement_coef: float = 0.0
    """Also learn lists of moves that the reference's lists agree on, which are better than each of
    them and need no label (chess tokenizer only); 0: not."""
    agreement_data: tuple[str, ...] = ()
    """Positions that it is learnt from, any sources with a column `fen`: they need no labels, so
    there may be many; default: those of the analysis rows of --data."""
    agreement_prompts: int = 256
    """Analysis prompts a step that learn it, beside --batch-size: they need no answers and no
    rewards, so they may be many; on a GPU thousands."""
    agreement_lists: int = 4
    """Lists that the reference writes for each side of a position: two sides, and where nobody may
    castle four."""
    agreement_power: float = 3.0
    """How sharp that target is: shares of the lists to this power."""
    agreement_first: float = 1.0
    """How much the first move counts in it, whose target is what stands first in the reference's
    lists, on average over the sides (the others count 1); 0: it is left to the rewards."""
    agreement_first_power: float = 1.0
    """How sharp that target is."""
    agreement_schedule: Literal["constant", "late"] = "late"
    """late: --agreement-coef falls to 0 over the run's last third: rewards have the last word."""
    gae: bool = False
    """Token-level advantages by a value head, in place of the baseline."""
    gamma: float = 1.0
    """Discount along tokens (--gae)."""
    gae_lambda: float = 0.95
    """GAE's λ."""
    value_coef: float = 0.5
    """Weight of the value loss (--gae)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    flat_tries: int = 1
    """How often prompts whose answers all score alike are replaced within a step, by the next ones
    of either task."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the smallest set with this probability."""
    p_temperature: float | None = None
    """Temperature for analysis prompts; default: --temperature."""
    a_temperature: float | None = None
    """Temperature for environment prompts."""
    p_top_p: float | None = None
    """Top-p for analysis prompts; default: --top-p."""
    a_top_p: float | None = None
    """Top-p for environment prompts."""
    max_new_tokens: int | None = None
    """Longest answer; default: what the task needs with the model's tokenizer."""
    reward_shaping: Literal["continuous", "graduated", "linear", "binary"] = "continuous"
    """How the parts of an answer become a reward; see docs/rewards.md."""
    reward_warmup_steps: int = 0
    """Steps over which content counts more and more; structure counts from the start."""
    reward_norm: bool = False
    """Put rewards on a running scale."""
    p_malformed: float = -0.3
    """Reward of an analysis that cannot be read."""
    a_malformed: float = -0.3
    """Reward of an environment answer that cannot be read."""
    judge: Literal["labels", "stockfish"] = "labels"
    """Who judges moves: the rows' labels, or Stockfish."""
    engine: str | None = None
    """Stockfish binary; default: STOCKFISH_PATH, PATH, /usr/games."""
    nodes: int = 20_000
    """Stockfish's nodes a position."""
    score_workers: int | None = None
    """Processes that score answers while the next are sampled; default: on CUDA half of the cores a
    rank has, at most 8, on the CPU none. An engine as --judge is asked by the trainer itself."""
    recovery_lr_factor: float = 0.5
    """Learning-rate factor of every recovery."""
    max_consecutive_nans: int = 5
    """Non-finite steps in a row that lead to a recovery."""
    max_recoveries: int = 3
    """Recoveries before the run is given up with exit code 3."""
    entropy_floor: float = 0.01
    """Mean entropy, nats per token, under which the guard sees a collapse; 0: off."""
    micro_tokens: int = 16_384
    """Tokens a forward pass may hold; a step is cut into as many passes as that takes."""
    eval_every: int = 50
    """Steps between evaluations; 0: only before and after."""
    eval_policy_rows: int = 400
    """Held-out analysis rows."""
    eval_environment_rows: int = 200
    """Held-out environment rows."""
    eval_mates: int = 0
    """Held-out mate-in-one positions."""
    save_every: int = 50
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints kept beside the best."""
    sample_every: int = 25
    """Steps between sample answers shown and written to rollouts.jsonl."""
    log_dir: Path | None = None
    """TensorBoard's folder; default: tensorboard/ in the run."""
    wandb: bool = False
    """Log to Weights & Biases too (needs the extra `wandb`)."""
    seed: int = 0
    """Seed of data order and sampling."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "fastest"] = "auto"
    """Arithmetic of the passes; weights stay float32. `auto`: bfloat16 on CUDA; `fastest`: also on
    processors that multiply it by themselves (AVX512-BF16, AMX)."""
    recompute: bool = False
    """Compute blocks a second time in the backward pass rather than keep what they found: one more
    forward pass, and larger packs in the same memory."""
    graphs: bool = True
    """On a GPU, record small passes of policy and reference (CUDA graphs) and replay them, which
    spares the host launching each kernel; what they use stays reserved between steps."""
    compile: bool = False
    """Compile the block for the update. On an H200 it lost to the kernels that it replaces:
    docs/performance-log.md."""
    shard: bool = False
    """Cut weights, gradients, moments and the reference into shares, one a process (FSDP2), for
    models that do not fit; with one process nothing changes. See docs/scaling.md."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --out, if there is one."""
    dry_run: bool = False
    """Check settings, data and model (--backend trl: no model), print the plan, and stop."""

    def __post_init__(self) -> None:
        check_bounds(self, TRAIN_BOUNDS)
        self._can_be_paid()
        self._can_be_stepped()
        if self.agreement_coef > 0:
            self._can_agree()
        else:
            require(
                not self.agreement_data,
                "--agreement-data without --agreement-coef: nothing would be learnt from them",
            )

    def _can_be_paid(self) -> None:
        """Rewards, credit and KL go together."""
        require(
            self.k_samples >= 2 or self.gae,
            f"--k-samples {self.k_samples}: a group needs at least 2 answers to compare",
        )
        whole = self.top_k == 0 and all(
            p is None or p == 1 for p in (self.top_p, self.p_top_p, self.a_top_p)
        )
        require(
            whole or (self.kl_type != "k1_reward" and self.kl_collect_cap == 0),
            "--kl-type k1_reward and --kl-collect-cap compare whole distributions; "
            "leave --top-k at 0 and --top-p at 1",
        )
        require(
            self.credit in ("auto", "answer", "fields") or self.kl_type != "k1_reward" or self.gae,
            f"--credit {self.credit} with --kl-type k1_reward: promises know nothing of a KL taken "
            "off the reward, so the last tokens would pay for all; take --credit fields",
        )
        require(
            self.credit != "choices" or self.loss in TOKEN_LOSSES or self.gae,
            f"--credit choices with --loss {self.loss}: choices are averaged over all tokens of a "
            "step; take --loss token, cispo or tv",
        )
        require(
            not self.adaptive_kl or self.kl_coef > 0 or bool(self.kl_coef_min),
            "--adaptive-kl with --kl-coef 0: nothing times 1.5 is nothing; give it a --kl-coef",
        )
        require(
            self.kl_coef_min is None or self.kl_coef_min <= self.kl_coef_max,
            f"--kl-coef-min {self.kl_coef_min} is above --kl-coef-max {self.kl_coef_max}",
        )

    def _can_be_stepped(self) -> None:
        """Weights that learn, their optimizer and where they lie go together."""
        require(
            not self.shard or self.ref_device is None,
            f"--ref-device {self.ref_device}: with --shard the reference is shared out like the "
            "policy; leave one of them out",
        )
        require(
            self.optimizer == "adamw" or self.trained != "vectors",
            "--optimizer muon with --trained vectors: Muon steps matrices, and none would learn",
        )
        require(
            self.optimizer == "adamw" or not self.shard,
            "--optimizer muon steps whole matrices, which no process has with --shard",
        )

    def _can_agree(self) -> None:
        """There are lists, and a reference that can write them."""
        following = self.ref_sync_every > 0 or self.ref_reset_kl > 0
        require(
            not following,
            "--agreement-coef needs a reference that stays as it is: what lists agree on would "
            "become what they agree on; leave out --ref-sync-every and --ref-reset-kl",
        )
        require(
            not self.shard,
            "--agreement-coef has the reference write lists, which it cannot with --shard",
        )
        require(
            self.mix_env_ratio < 1 or len(self.agreement_data) > 0,
            "--agreement-coef with --mix-env-ratio 1: without analysis prompts there are no lists; "
            "give positions by --agreement-data",
        )

    @property
    def clip_high(self) -> float:
        if self.clip_range_high is not None:
            return self.clip_range_high
        return 0.28 if self.clip_range == TrainSettings.clip_range else self.clip_range
