"""LOOP: our tasks, rewards and data in Hugging Face's `GRPOTrainer` (`--backend trl`).

Laws: one trainer, one optimizer and one schedule for all phases, P and A in turns; no dropout;
before the first update KL is 0, or nothing is trained; what is logged is measured by our own
functions and means what it means for the native loop; a checkpoint is a model folder both read.
TRL gives GPT-2 no positions, so the tokens behind a left-padded prompt would be scored one or more
places too far along: the positions are put right here.
Left out on purpose: several processes, restoring a state (the guard skips, slows down and stops),
and bit-exact resumption: weights, moments, reference and coefficient go on, samples are drawn anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch import Tensor, nn
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from rookworld.model.checkpoint import (
    Checkpoint,
    restore_optimizers,
)
from rookworld.model.optim import build_optimizers
from rookworld.model.precision import resolve_dtype
from rookworld.model.run_checkpoints import held
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder
from rookworld.rl.run_log import Evaluate, Hooks
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import (
    fits,
)
from rookworld.rollout.prompts import Prompts, prompt_text
from rookworld.rollout.types import Prompt
from rookworld.runtime import distributed
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.processes import Interrupted, interruptible
from rookworld.runtime.run_folder import Run
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.task import Judge, Row
from rookworld.trl import plan
from rookworld.trl.callback import MOMENTS, REFERENCE, Session, exchange

LOSSES = {
    "token": ("dapo", "token"),
    "grpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "gspo": ("grpo", "sequence"),
    "cispo": ("cispo", "token"),
}
"""Our losses as TRL's `loss_type` and `importance_sampling_level`."""


def train(
    settings: TrainSettings,
    rows: Sequence[Row],
    evaluate: Evaluate,
    judge: Judge | None = None,
    hooks: Hooks | None = None,
) -> Path:
    """Train with TRL, writing a run folder; returns the folder of the final model."""
    plan.check_flags(settings)
    device = one_device(settings)
    chatter: Any = transformers.utils.logging
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    folder = resolve_folder(settings.model)
    tokenizer = Tokenizer.load(folder)
    session = Session(
        settings=settings,
        run=Run(settings.out),
        hooks=hooks or Hooks(),
        evaluate=evaluate,
        judge=judge,
        tokenizer=tokenizer,
        twin=load_model(folder, device),
        stream=prompt_stream(rows, tokenizer, settings),
    )
    fits(session.twin.config, settings, tokenizer)
    with held(session.run):
        checkpoint = session.begin()
        if session.step < settings.steps:
            trainer = new_trainer(folder, session, checkpoint)
            with interruptible() as asked_to_stop:
                session.asked_to_stop = asked_to_stop
                trainer.train()
            if session.step < settings.steps:
                raise Interrupted(f"stopped after step {session.step}; --resume goes on from there")
        return session.finish()


def one_device(settings: TrainSettings) -> torch.device:
    """The device of this process, which must be alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--backend trl runs in one process; use --backend native with torchrun")
    device = torch.device(distributed.pick_device(settings.compute.device))
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        raise ConfigError(
            f"--backend trl sees {torch.cuda.device_count()} GPUs and takes one: set "
            "CUDA_VISIBLE_DEVICES=0"
        )
    return device


def prompt_stream(
    rows: Sequence[Row], tokenizer: Tokenizer, settings: TrainSettings
) -> list[Prompt]:
    """The prompts of every step: a batch of one task each, phase by phase."""
    turns = plan.letters(settings)
    piles = {
        letter: Prompts(rows, tokenizer, float(letter == ENVIRONMENT.letter), settings.seed)
        for letter in sorted(set(turns))
    }
    return [prompt for letter in turns for prompt in piles[letter].take(settings.batch_size)]


# --- the trainer --------------------------------------------------------------------------------


class PhaseTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with our optimizer, schedule and advantage clip; a session sees its steps."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, session: Session, moments: dict[str, Tensor], **options: Any) -> None:
        self.session = session
        self.moments = moments
        super().__init__(**options)
        # progress bars and printed dictionaries are not for this terminal
        self.remove_callback(PrinterCallback)
        for model in (self.model, self.ref_model):
            model.transformer.register_forward_pre_hook(true_positions, with_kwargs=True)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        settings = self.session.settings
        if self.optimizer is None:
            made = build_optimizers(
                (),
                [{"params": list(self.model.parameters())}],
                muon=False,
                lr=settings.optimizer.lr,
                weight_decay=settings.optimizer.weight_decay,
                eps=settings.optimizer.adam_eps,
                fused=self.session.device.type == "cuda",
            )
            restore_optimizers(made, self.moments, MOMENTS)
            (self.optimizer,) = made
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            # the session's own count, which goes on after a resume
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda done: self.session.rate_factor(done)
            )
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        clip = self.session.settings.advantages.advantage_clip
        if clip > 0:
            inputs = {**inputs, "advantages": inputs["advantages"].clamp(-clip, clip)}
        loss = super().compute_loss(model, inputs, *args, **options)
        self.session.measure(model, self.ref_model, inputs, float(loss.detach()))
        return loss


def true_positions(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Count positions from the first real token, where nobody has said otherwise."""
    mask = options.get("attention_mask")
    if options.get("position_ids") is None and mask is not None:
        options = {**options, "position_ids": (mask.long().cumsum(-1) - 1).clamp_min(0)}
    return args, options


def new_trainer(folder: Path, session: Session, checkpoint: Checkpoint | None) -> PhaseTrainer:
    """The one trainer of a run; with a checkpoint its weights, moments and reference."""
    settings = session.settings
    todo = session.stream[session.step * settings.batch_size :]
    texts = [prompt_text(prompt.row, session.tokenizer) for prompt in todo]
    places = range(len(session.stream) - len(todo), len(session.stream))
    trainer = PhaseTrainer(
        session,
        checkpoint.tensors if checkpoint else {},
        # by name: TRL loads the reference a second time from where the policy came from
        model=str(folder),
        reward_funcs=session.score,
        args=trainer_config(session),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts, "place": list(places)}),
        callbacks=[session],
    )
    session.trainer = trainer
    if checkpoint:
        exchange(session.twin, trainer.model, back=False)
        synced = dict(trainer.ref_model.named_parameters())
        for name, values in checkpoint.tensors.items():
            if name.startswith(f"{REFERENCE}."):
                synced[name.removeprefix(f"{REFERENCE}.")].data.copy_(values)
    return trainer


def trainer_config(session: Session) -> Any:
    """Our settings in TRL's words."""
    settings = session.settings
    bf16 = resolve_dtype(settings.compute.dtype, session.device) == "bfloat16"
    loss, level = LOSSES[settings.loss.loss]
    rows = settings.batch_size * settings.sampling.k_samples
    drawn = session.sampling[session.turns[session.step]]
    return GRPOConfig(
        output_dir=str(session.run.folder),
        max_steps=settings.steps - session.step,
        per_device_train_batch_size=rows // session.passes(),
        gradient_accumulation_steps=session.passes(),
        num_generations=settings.sampling.k_samples,
        max_completion_length=drawn.max_new_tokens,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=settings.sampling.top_k,
        # any positive number: with 0 there would be no reference; the callback sets the real one
        beta=1.0,
        use_bias_correction_kl=settings.kl.kl_type == "forward",
        loss_type=loss,
        importance_sampling_level=level,
        epsilon=settings.loss.clip_range,
        epsilon_high=settings.loss.clip_high + (loss == "cispo"),
        scale_rewards=settings.advantages.advantage_scale,
        entropy_coef=settings.loss.entropy_coef,
        disable_dropout=True,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=bf16,
        use_cpu=session.device.type == "cpu",
        dataloader_pin_memory=session.device.type == "cuda",
        # the callback clips, having shown the norm to the guard
        max_grad_norm=0.0,
        learning_rate=settings.optimizer.lr,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        # a resumed run must not draw the first answers again
        seed=(settings.seed + 1_000_003 * session.step) % 2**32,
    )
