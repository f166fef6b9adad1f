"""What `rookworld train` can be told: sections, their docstrings the `--help`.

Each section is handed as it is to what reads it; flags, TOML files and `config.json` show all
fields side by side. Every field is read by something, and every number has bounds (tests look).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rookworld.grpo.settings import (
    TOKEN_LOSSES,
    AdvantageSettings,
    GuardSettings,
    KLSettings,
    LossSettings,
)
from rookworld.rl import aliases
from rookworld.runtime.bounds import (
    LARGE,
    Bounds,
    Count,
    Few,
    FromZero,
    Many,
    Positive,
    PositiveShare,
    Seed,
    Share,
    Whole,
)
from rookworld.runtime.config import Composed, Section, require
from rookworld.runtime.machine import MachineSettings
from rookworld.runtime.wording import noun
from rookworld.tasks.registry import metric_info
from rookworld.tasks.reward import P_WEIGHTS, RewardRules

Temperature = Annotated[
    float, Bounds(0, LARGE, lowest_allowed=False, said="greedy answers are all alike; above 0")
]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Section):
    """How answers are sampled."""

    k_samples: Few = 8
    """Answers sampled per prompt (the group). More give a better baseline and cost as much more."""
    temperature: Temperature = 1.0
    """Sampling temperature; lower it when answers are mostly noise, at the price of variety."""
    top_k: Whole = 0
    """Sample from the k likeliest tokens; 0: all."""
    top_p: PositiveShare = 1.0
    """Sample from the smallest set with this probability; below 1 where rare tokens spoil many
    answers."""
    p_temperature: Temperature | None = None
    """Temperature for analysis prompts; default: --temperature."""
    a_temperature: Temperature | None = None
    """Temperature for environment prompts; default: --temperature."""
    p_top_p: PositiveShare | None = None
    """Top-p for analysis prompts; default: --top-p."""
    a_top_p: PositiveShare | None = None
    """Top-p for environment prompts; default: --top-p."""
    max_new_tokens: Count | None = None
    """Longest answer; default: what the task needs with the model's tokenizer."""
    flat_tries: Whole = 1
    """How often prompts whose answers all score alike are replaced within a step, by the next ones
    of either task; 0 where --credit learns from them too."""
    guide: Share = 0.0
    """Up to this share of a step's groups, of those without a right answer, learn from the true one
    too. 0.25 where a class of held-out rows stands at 0: what is never sampled is never rewarded.
    """

    def of_task(self, letter: str) -> tuple[float, float]:
        """(temperature, top-p) of a task."""
        temperature = getattr(self, f"{letter.lower()}_temperature", None)
        top_p = getattr(self, f"{letter.lower()}_top_p", None)
        return (
            self.temperature if temperature is None else temperature,
            self.top_p if top_p is None else top_p,
        )

    @property
    def whole(self) -> bool:
        """Every token can be drawn."""
        tops = (self.top_p, self.p_top_p, self.a_top_p)
        return self.top_k == 0 and all(top is None or top == 1 for top in tops)


@dataclass(frozen=True, kw_only=True)
class RewardSettings(RewardRules):
    """What an answer is worth, and how rewards begin."""

    reward_warmup_steps: Whole = 0
    """Steps over which content counts more and more; structure counts from the start. For a model
    that does not know the format yet."""
    reward_norm: bool = False
    """Put rewards on a running scale."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(Section):
    """The model that the KL is measured to."""

    ref_sync_every: Whole = 0
    """Steps after which the reference becomes the policy; 0: it stays frozen. For runs that are to
    go far from where they began."""
    ref_reset_kl: FromZero = 0.0
    """Reset the reference when KL stays above this for 20 steps; 0: never."""
    ref_device: str | None = None
    """Where the reference lives (cuda:1, cpu), when it does not fit beside the policy."""

    @property
    def frozen(self) -> bool:
        return self.ref_sync_every == 0 and self.ref_reset_kl == 0


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Section):
    """How a gradient becomes a step."""

    lr: FromZero = 2e-5
    """Peak learning rate (float32 masters). Lower it tenfold when KL or gradients explode."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the matrices of blocks: for large batches, with a rate
    about 20 times as large."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """What the rate does after its warm-up; `constant` where a run may be lengthened."""
    lr_final: Share = 0.1
    """Share of the peak that linear and cosine end at."""
    lr_warmup_steps: Whole = 10
    """Steps over which the rate rises; more for a large rate."""
    trained: Literal["all", "blocks"] = "all"
    """Weights that learn: all, or all but the embeddings, which a short run can only spoil."""
    weight_decay: FromZero = 0.0
    """What weights lose of themselves a step, times the rate."""
    adam_eps: Positive = 1e-6
    """AdamW: gradients well below it hardly move their weight. They are mostly rounding, which
    steps of full size would follow wherever it points."""
    clip_norm: Positive = 1.0
    """Largest gradient norm."""
    updates_per_rollout: Few = 1
    """Passes over each batch of samples; the clip range matters from the second on. More where
    sampling is what costs."""


@dataclass(frozen=True, kw_only=True)
class DistillSettings(Section):
    """Self-distillation: lists of moves that the reference's lists agree on, beside GRPO."""

    distill_coef: FromZero = 0.0
    """Also learn lists that are better than each of the reference's own and need no label (chess
    tokenizer only); 0: not. For a strong model, whose lists GRPO alone moves slowly."""
    distill_data: tuple[str, ...] = ()
    """Positions that it is learnt from, any sources with a column `fen`: they need no labels, so
    there may be many; default: those of the analysis rows of --data."""
    distill_prompts: Count = 256
    """Positions a step that learn it, beside --batch-size: they need no answers and no rewards, so
    they may be many; on a GPU thousands."""
    distill_first: FromZero = 1.0
    """How much the first move counts in it, whose target is what stands first in the reference's
    lists, on average over the sides (the others count 1); 0: it is left to the rewards."""
    distill_first_power: Positive = 1.0
    """How sharp that target is."""
    distill_schedule: Literal["constant", "late"] = "late"
    """late: --distill-coef falls to 0 over the run's last third: rewards have the last word."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Section):
    """Evaluation on held-out rows."""

    held_out: str = "embedded:validation"
    """Rows for evaluation, which should not be among --data: positions that are get a warning."""
    eval_every: Whole = 50
    """Steps between evaluations; 0: only before and after, where evaluating costs too much."""
    eval_policy_rows: Whole = 400
    """Held-out analysis rows; more for narrower intervals."""
    eval_environment_rows: Whole = 200
    """Held-out environment rows."""
    eval_mates: Whole = 0
    """Held-out mate-in-one positions."""
    select_by: str = "reward/greedy"
    """Held-out metric by which `best`, the guard and reports go; more of it must be better. A gain
    of sampled reward may be mere sharpness: sampling at 0.7 makes one without any training."""


MICRO_TOKENS = 16_384
"""Tokens of a pass where memory does not decide."""


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(MachineSettings):
    """Where and how passes run."""

    memory: str | None = None
    """What the run may take of a GPU's memory, such as 20GB; default: what is there. Passes, blocks
    computed twice and the sampler's cache are cut to fit."""
    micro_tokens: Count | None = None
    """Tokens a forward pass may hold, padding included; a step is cut into as many as that takes.
    Default: what fits in the memory; on the CPU 16,384."""
    recompute: bool = False
    """Compute blocks a second time in the backward pass rather than keep what they found: one more
    forward pass, a sixth of the memory. Also done where else a step would be cut too small."""
    graphs: bool = True
    """On a GPU, record small passes of policy and reference (CUDA graphs) and replay them, which
    spares the host launching each kernel; what they use stays reserved between steps."""
    shard: bool = False
    """Cut weights, gradients, moments and the reference into shares, one a process (FSDP2), for
    models that do not fit; with one process nothing changes. See docs/scaling.md."""
    score_workers: Annotated[int, Bounds(0, 1024)] | None = None
    """Processes that score answers while the next are sampled; default: on CUDA half of the cores a
    rank has, at most 8, on the CPU none. An engine as --judge is asked by the trainer itself."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Composed):
    """GRPO on analysis (P:) and environment (A:) prompts; see docs/training.md."""

    model: str = "nano"
    """`nano` or `apprentice` (embedded), a folder, or a hub id: jrahn/RookWorld-LM-124M."""
    data: tuple[str, ...] = ("embedded:train",)
    """Rows to take prompts from: `embedded:train`, files (Parquet, JSONL, text), or hub ids."""
    out: Path = Path("runs/train")
    """Run folder; another one for each run that you want to keep."""
    steps: Count = 150
    """Updates; first see with 20 that rewards rise."""
    batch_size: Many = 8
    """Prompts a step, over all processes. Raise it when the gradient is mostly noise."""
    mix_env_ratio: Share = 0.25
    """Share of environment prompts that are drawn; 0: analysis alone, 1: environment alone. Further
    tasks share the rest with analysis, by how many rows they have."""
    judge: Literal["labels", "stockfish"] = "labels"
    """Who judges moves: the rows' labels, or Stockfish, which knows the moves that have none."""
    engine: str | None = None
    """Stockfish binary; default: STOCKFISH_PATH, PATH, /usr/games."""
    nodes: Count = 20_000
    """Stockfish's nodes a position; fewer are faster and less certain."""
    backend: Literal["native", "trl"] = "native"
    """Who trains: `native`, or Hugging Face's GRPOTrainer (extra `trl`; see docs/trl.md)."""
    trl_phase_steps: Annotated[int, Bounds(2, said="a P and an A phase need at least 2")] = 20
    """Steps of a P phase and the A phase after it (--backend trl); --mix-env-ratio of them A."""
    save_every: Count = 50
    """Steps between checkpoints: what an interruption may cost."""
    keep: Count = 3
    """Checkpoints kept beside the best; fewer where the disk is small."""
    sample_every: Whole = 25
    """Steps between sample answers shown and written to rollouts.jsonl."""
    log_dir: Path | None = None
    """TensorBoard's folder; default: tensorboard/ in the run. Without TensorBoard it gets
    curves.jsonl, an object a step."""
    wandb: bool = False
    """Log to Weights & Biases too (needs the extra `wandb`)."""
    seed: Seed = 0
    """Seed of data order and sampling; change it to see what is chance."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --out, or begin where there is no run yet."""
    overwrite: bool = False
    """Delete the run in --out and start over; with --resume, only where it cannot go on."""
    dry_run: bool = False
    """Check settings, data and model (--backend trl: no model), print the plan, and stop."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)

    FIRST: ClassVar = (
        *("model", "data", "out", "steps", "batch_size", "k_samples", "lr", "kl_coef"),
        *("temperature", "resume"),
    )
    ALIASES: ClassVar = aliases.ALIASES | {  # names of before, for one release
        f"agreement_{rest}": f"distill_{rest}"
        for rest in ("coef", "data", "prompts", "first", "first_power", "schedule")
    }
    IGNORED: ClassVar = aliases.IGNORED
    ADVICE: ClassVar = aliases.ADVICE
    OWN: ClassVar = "k_samples"

    @classmethod
    def upgrade(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Weights of the parts of an analysis were a setting each; None was their default."""
        new = {key.replace("-", "_"): value for key, value in values.items()}
        weights = {part: new.pop(f"p_{part}", None) for part in P_WEIGHTS}
        given = {part: weight for part, weight in weights.items() if weight is not None}
        return new | ({"p_weights": given} if given else {})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._can_be_paid()
        self._can_be_stepped()
        self._can_be_selected()
        require(
            self.sampling.guide == 0 or self.kl.kl_type != "k1_reward",
            "--guide with --kl-type k1_reward: true answers were not sampled, so nothing would "
            "hold them to the reference; take --kl-type forward",
        )
        if self.distill.distill_coef > 0:
            self._can_distill()
        else:
            require(
                not self.distill.distill_data,
                "--distill-data without --distill-coef: nothing would be learnt from them",
            )

    @property
    def choices_allowed(self) -> bool:
        """Loss and KL are such that --credit choices has a meaning."""
        return (
            self.loss.loss in TOKEN_LOSSES
            and self.kl.kl_type != "k1_reward"
            and not self.advantages.gae
        )

    def outline(self) -> str:
        """What a run will do, in a line."""
        every, batch, k = self.evaluation.eval_every, self.batch_size, self.sampling.k_samples
        return (
            f"plan: {self.steps} {noun(self.steps, 'step')} of {batch} {noun(batch, 'prompt')} × "
            f"{k} {noun(k, 'answer')}, "
            f"{f'evaluation every {every}' if every else 'no evaluation between'}, "
            f"checkpoint every {self.save_every}"
        )

    def _can_be_paid(self) -> None:
        """Rewards, credit and KL go together."""
        k, credit, gae = self.sampling.k_samples, self.advantages.credit, self.advantages.gae
        loss, reward_kl = self.loss.loss, self.kl.kl_type == "k1_reward"
        compared = self.advantages.baseline_type != "ema" or not gae
        require(
            k >= 2 or not compared, f"--k-samples {k}: a group needs at least 2 answers to compare"
        )
        require(
            self.sampling.whole or not (reward_kl or self.kl.kl_collect_cap > 0),
            "--kl-type k1_reward and --kl-collect-cap compare whole distributions; "
            "leave --top-k at 0 and --top-p at 1",
        )
        require(
            credit in ("auto", "answer", "fields") or not reward_kl or gae,
            f"--credit {credit} with --kl-type k1_reward: promises know nothing of a KL taken "
            "off the reward, so the last tokens would pay for all; take --credit fields",
        )
        require(
            credit != "choices" or loss in TOKEN_LOSSES or gae,
            f"--credit choices with --loss {loss}: choices are averaged over all tokens of a "
            "step; take --loss token or cispo",
        )

    def _can_be_selected(self) -> None:
        metric = self.evaluation.select_by
        require(
            metric_info(metric).better != "down",
            f"--select-by {metric}: less of it is better; take one of which more is, such as "
            "reward/greedy or P/best",
        )

    def _can_be_stepped(self) -> None:
        """Weights that learn, their optimizer and where they lie go together."""
        shard, ref_device = self.compute.shard, self.reference.ref_device
        require(
            not shard or ref_device is None,
            f"--ref-device {ref_device}: with --shard the reference is shared out like the "
            "policy; leave one of them out",
        )
        require(
            self.optimizer.optimizer == "adamw" or not shard,
            "--optimizer muon steps whole matrices, which no process has with --shard",
        )

    def _can_distill(self) -> None:
        """There are lists, and a reference that can write them."""
        require(
            self.reference.frozen,
            "--distill-coef needs a reference that stays as it is: what lists agree on would "
            "become what they agree on; leave out --ref-sync-every and --ref-reset-kl",
        )
        require(
            not self.compute.shard,
            "--distill-coef has the reference write lists, which it cannot with --shard",
        )
        require(
            self.mix_env_ratio < 1 or len(self.distill.distill_data) > 0,
            "--distill-coef with --mix-env-ratio 1: without analysis prompts there are no lists; "
            "give positions by --distill-data",
        )
