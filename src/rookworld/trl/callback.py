"""A run with TRL, step by step: what `GRPOTrainer` calls back, measured, judged and written down.

Laws: numbers are measured by the functions of the native loop and bear its names; an update is
applied only if the guard agrees; the KL weight in force is set on the trainer before each step, as
TRL copies its own when it is built. Left out on purpose: what TRL does not tell, such as the
sampler's log-probabilities, is not logged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from rookworld.grpo.advantages import flat_groups, reward_tensor, valid_groups
from rookworld.grpo.decisions import Ruling, Skip, StepHealth, Stop
from rookworld.grpo.guard import Guard
from rookworld.grpo.kl import Draw, KLControl, k3, token_stats
from rookworld.grpo.schedule import ramp
from rookworld.model.checkpoint import Checkpoint, optimizer_tensors
from rookworld.model.gpt2 import GPT2
from rookworld.model.precision import autocast_for
from rookworld.model.run_checkpoints import (
    begin_run,
    due,
    finish_run,
    resumable,
    resume_run,
    save_run,
)
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rl.metrics import (
    Metrics,
    peak_memory_mb,
    reward_metrics,
    token_metrics,
    warmup_metrics,
)
from rookworld.rl.models import CHUNK_ROWS, CHUNK_VOCABULARY
from rookworld.rl.run_log import Evaluate, Hooks, evaluated, is_best, log_events, log_step
from rookworld.rl.settings import MICRO_TOKENS, TrainSettings
from rookworld.rl.state import sampling
from rookworld.rl.step import KL_AT_START, lr_factor, stop_if_told
from rookworld.rollout.collector import Collected
from rookworld.rollout.types import Group, Prompt
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_folder import Run, origin
from rookworld.tasks.registry import TASKS
from rookworld.tasks.scorer import judge_answer, prefetch
from rookworld.tasks.task import Judge
from rookworld.trl import plan

MOMENTS, REFERENCE = ("trl.optimizer",), "trl.reference"
"""Names in a checkpoint; the native loop has others, so neither resumes from the other's."""


def paired(ours: nn.Module, theirs: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of our parameters and the same one of a Hugging Face GPT-2, as a view in our shape."""
    named = dict(theirs.named_parameters())
    for name, mine in ours.named_parameters():
        other = named.get(f"transformer.{name}", named.get(name))
        assert other is not None, name
        # Hugging Face keeps GPT-2's projections as [in, out]
        yield mine, other.t() if ".c_" in name and other.dim() == 2 else other


@torch.no_grad()
def exchange(ours: nn.Module, theirs: nn.Module, *, back: bool) -> None:
    """Weights of a Hugging Face GPT-2 into ours (`back`), or ours into it."""
    for mine, other in paired(ours, theirs):
        target, source = (mine, other) if back else (other, mine)
        target.copy_(source)


@dataclass
class Tally:
    """Sums over the micro-batches of one step."""

    loss: float = 0.0
    tokens: int = 0
    kl: float = 0.0
    kl_loss: float = 0.0
    entropy: float = 0.0
    norm: float = math.nan
    rate: float = math.nan

    def mean(self, total: float) -> float:
        return total / self.tokens if self.tokens else math.nan


@dataclass(eq=False)
class Session(TrainerCallback):
    """What a run knows beside TRL's trainer; called back at every step, it judges and writes."""

    settings: TrainSettings
    run: Run
    hooks: Hooks
    evaluate: Evaluate
    judge: Judge | None
    tokenizer: Tokenizer
    twin: GPT2
    """Our model, given the trainer's weights when it is evaluated or saved."""
    stream: list[Prompt]
    step: int = 0
    best: float | None = None
    best_by: str = ""
    trainer: Any = None
    asked_to_stop: Callable[[], bool] = lambda: False
    tally: Tally = field(default_factory=Tally)
    groups: list[Group] = field(default_factory=list)
    ruling: Ruling | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.settings
        self.turns = plan.letters(settings)
        self.sampling = sampling(settings.sampling, self.tokenizer)
        self.control = KLControl(settings.kl)
        # nothing is restored here, so where the native loop would restore, this one stops
        self.guard = Guard(replace(settings.guard, max_recoveries=0))
        self.began = self.mark = time.perf_counter()
        longest = max(self.longest(letter) for letter in set(self.turns))
        if longest > self.twin.config.n_positions:
            raise ConfigError(
                f"a prompt and its answer take up to {longest} tokens, the model has only "
                f"{self.twin.config.n_positions} positions; lower --max-new-tokens"
            )

    @property
    def device(self) -> torch.device:
        return self.twin.device

    def longest(self, letter: str) -> int:
        """Tokens of the longest prompt of a task with the longest answer."""
        prompts = (len(prompt.ids) for prompt in self.stream if prompt.letter == letter)
        return max(prompts) + self.sampling[letter].max_new_tokens

    def passes(self) -> int:
        """Into how many equal passes a step is cut to hold at most --micro-tokens tokens each."""
        rows = self.settings.batch_size * self.settings.sampling.k_samples
        longest = max(self.longest(letter) for letter in set(self.turns))
        whole = [n for n in range(1, rows + 1) if rows % n == 0]
        most = self.settings.compute.micro_tokens or MICRO_TOKENS
        fit = (n for n in whole if rows // n * longest <= most)
        return next(fit, rows)

    def rate_factor(self, done: int) -> float:
        """The schedule `done` steps after this process began, times the guard's cuts."""
        step = len(self.turns) - self.trainer.args.max_steps + done
        return self.guard.lr_scale * lr_factor(step, self.settings)

    # --- before and after ---

    def begin(self) -> Checkpoint | None:
        """A new run with its first evaluation, or the checkpoint to go on from."""
        settings, say = self.settings, self.hooks.say
        found = (
            resumable(self.run, "train --backend trl", self.twin, say) if settings.resume else None
        )
        if found is None:
            about = origin(settings.seed, settings.engine) | {"trl": plan.installed()}
            begin_run(self.run, settings, about, say)
            self.save(best=self.assess())
            return None
        self.twin = load_model(found.folder, self.device)
        self.step, self.best = found.step, found.state["best"]
        self.best_by = found.state.get("best_by", "reward/sampled")
        self.control.load_state_dict(found.state["control"])
        self.guard.load_state_dict(found.state["guard"])
        resume_run(self.run, settings, found, settings.steps, say)
        return found

    def finish(self) -> Path:
        return finish_run(self.run, self.twin, self.tokenizer, self.step)

    def assess(self) -> bool:
        """Held-out evaluation; whether it is the best yet."""
        health = evaluated(
            self.run,
            self.step,
            self.twin,
            self.tokenizer,
            self.settings,
            self.evaluate,
            self.hooks,
        )
        ruling = self.guard.check_eval(health)
        log_events(self.run, ruling, self.hooks)
        stop_if_told(ruling)
        improved = is_best(health, self.best, self.best_by)
        if improved:
            self.best, self.best_by = health.reward, health.metric
        return improved

    def save(self, *, best: bool = False) -> None:
        """A checkpoint: the model folder, and beside it what a resumed run needs."""
        tensors: dict[str, Tensor] = {}
        if self.trainer is not None:
            tensors = optimizer_tensors([self.trainer.optimizer], MOMENTS)
            if self.settings.reference.ref_sync_every:
                named = self.trainer.ref_model.named_parameters()
                tensors |= {f"{REFERENCE}.{name}": values for name, values in named}
        state = {
            "backend": "trl",
            "step": self.step,
            "best": self.best,
            "best_by": self.best_by,
            "control": self.control.state_dict(),
            "guard": self.guard.state_dict(),
        }
        keep = self.settings.keep
        save_run(self.run, self.twin, self.tokenizer, tensors, state, keep=keep, best=best)

    # --- one step, in the order in which TRL calls ---

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The phase's generation settings, the step's KL weight."""
        self.began = self.mark = time.perf_counter()
        self.seconds, self.tally = {}, Tally()
        drawn, trainer = self.sampling[self.turns[self.step]], self.trainer
        # TRL keeps each of these twice or thrice, all copied when it was built
        for name, value in (("max_new_tokens", drawn.max_new_tokens), ("top_p", drawn.top_p)):
            setattr(trainer.generation_config, name, value)
            trainer.generation_kwargs[name] = value
        trainer.max_completion_length, trainer.top_p = drawn.max_new_tokens, drawn.top_p
        trainer.beta = self.control.coef_at(self.step)

    def clock(self, name: str) -> None:
        """Bill the time since the last mark to `name`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[f"time/{name}_s"] = now - self.mark
        self.mark = now

    def score(
        self, prompts: Any, completions: Any, completion_ids: Any, place: Any, **_: Any
    ) -> list[float]:
        """The reward function: TRL's samples as groups of ours, judged by our tasks."""
        self.clock("sample")
        k, rules = self.settings.sampling.k_samples, self.settings.rewards
        progress = ramp(self.step, self.settings.rewards.reward_warmup_steps)
        asked = [self.stream[number] for number in place[::k]]
        prefetch(self.judge, [prompt.row for prompt in asked])
        self.groups = []
        for number, prompt in enumerate(asked):
            ids = completion_ids[number * k : (number + 1) * k]
            texts = self.tokenizer.decode_batch(ids)
            finished = tuple(self.tokenizer.eos in one for one in ids)
            verdicts = tuple(
                judge_answer(prompt.row, text, done, rules, self.judge, progress)
                for text, done in zip(texts, finished, strict=True)
            )
            lengths = torch.tensor([len(one) for one in ids])
            unknown = torch.zeros(k, int(lengths.max()))
            tokens = unknown.long()
            self.groups.append(
                Group(prompt, tokens, lengths, unknown, unknown, finished, tuple(texts), verdicts)
            )
        self.clock("score")
        return [reward for group in self.groups for reward in group.rewards]

    @torch.no_grad()
    def measure(self, model: Any, reference: Any, inputs: dict[str, Any], loss: float) -> None:
        """Exact KL and entropy of a micro-batch, by the passes TRL has just made without them."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        sampled, width = inputs["completion_mask"].bool(), inputs["completion_ids"].shape[1]

        def states(one: Any) -> Tensor:
            with autocast_for(self.settings.compute.dtype, self.device):
                found = one.transformer(input_ids=ids, attention_mask=mask, use_cache=False)
            hidden: Tensor = found.last_hidden_state[:, -width - 1 : -1][sampled]
            return hidden

        drawn = self.sampling[self.turns[self.step]]
        large = self.twin.config.vocab_size >= CHUNK_VOCABULARY
        with autocast_for(self.settings.compute.dtype, self.device):
            stats = token_stats(
                states(model),
                model.lm_head.weight,
                inputs["completion_ids"][sampled],
                draw=Draw(temperature=drawn.temperature, top_k=drawn.top_k, top_p=drawn.top_p),
                ref_hidden=states(reference),
                ref_head=reference.lm_head.weight,
                chunk=CHUNK_ROWS if large else 0,
            )
        assert stats.kl is not None and stats.ref_logp is not None
        self.tally.loss += loss
        self.tally.tokens += len(stats.logp)
        self.tally.kl += float(stats.kl.sum())
        self.tally.kl_loss += float(k3(stats.logp, stats.ref_logp).sum())
        self.tally.entropy += float(stats.entropy.sum())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradient is known: look at it, clip it, and apply it only if the guard agrees."""
        tally, parameters = self.tally, list(self.trainer.model.parameters())
        tally.norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.clip_norm))
        tally.rate = float(self.trainer.optimizer.param_groups[0]["lr"])
        kl = tally.mean(tally.kl)
        if self.step == 0 and not kl <= KL_AT_START:
            raise RookworldError(
                f"before the first update KL to the reference is {kl:.3g}, not 0: policy and "
                "reference differ; nothing was trained"
            )
        rewards = [reward for group in self.groups for reward in group.rewards]
        health = StepHealth(
            step=self.step + 1,
            loss=tally.loss,
            grad_norm=tally.norm,
            kl=kl,
            entropy=tally.mean(tally.entropy),
            reward_mean=sum(rewards) / len(rewards),
            all_rewards_negative=max(rewards) < 0,
            open_ended=TASKS[self.turns[self.step]].open_ended,
        )
        self.ruling = self.guard.check_step(health)
        if isinstance(self.ruling.decision, Skip | Stop):
            for parameter in parameters:
                parameter.grad = None  # without a gradient AdamW leaves a parameter alone

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step down, and do what is due after it."""
        settings, kl = self.settings, self.tally.mean(self.tally.kl)
        self.clock("update")
        metrics = self.metrics()
        self.control.observe(self.step, kl)
        self.step += 1
        if settings.reference.ref_sync_every and self.step % settings.reference.ref_sync_every == 0:
            self.trainer.ref_model.load_state_dict(self.trainer.model.state_dict())
        assert self.ruling is not None
        log_step(self.run, self.step, self.groups, metrics, self.ruling, settings, self.hooks)
        stop_if_told(self.ruling)
        stopping = self.asked_to_stop()
        evaluating = due(self.step, settings.evaluation.eval_every, settings.steps)
        saving = stopping or due(self.step, settings.save_every, settings.steps)
        if evaluating or saving:
            exchange(self.twin, self.trainer.model, back=True)
        improved = self.assess() if evaluating else False
        if improved or saving:
            self.save(best=improved)
        control.should_training_stop = control.should_training_stop or stopping

    def metrics(self) -> Metrics:
        """The step in our names; what TRL does not tell (the sampler's log-probs) is left out."""
        tally, coef = self.tally, float(self.trainer.beta)
        rewards = reward_tensor([group.rewards for group in self.groups])
        collected = Collected(
            self.groups,
            int(flat_groups(rewards).sum()),
            int((~valid_groups(rewards)).sum()),
            len(self.groups),
        )
        kl_loss, entropy = tally.mean(tally.kl_loss), tally.mean(tally.entropy)
        bonus = self.settings.loss.entropy_coef * entropy
        return {
            **reward_metrics(collected),
            **warmup_metrics(collected, self.step, self.settings.rewards.reward_warmup_steps),
            "kl/exact": tally.mean(tally.kl),
            "kl/coef": coef,
            # one update a rollout: TRL's ratio is the policy over itself
            "policy/ratio_max": 1.0,
            "policy/clipped": 0.0,
            "policy/entropy": entropy,
            "loss/total": tally.loss,
            "loss/policy": tally.loss - coef * kl_loss + bonus,
            "loss/kl": kl_loss,
            "grad/norm": tally.norm,
            "lr": tally.rate,
            **token_metrics(collected, ()),
            **self.seconds,
            "time/step_s": time.perf_counter() - self.began,
            "mem/peak_mb": peak_memory_mb(self.device),
            "guard/skipped": float(self.guard.skipped),
            "guard/recoveries": 0.0,
        }
