"""The models of a run: the policy, the reference it is held to, and perhaps a value head.

Law: before the first update policy and reference are the same numbers.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rookworld.model import sharding
from rookworld.model.gpt2 import GPT2
from rookworld.model.inference import InferenceWeights
from rookworld.model.kernels import cpu
from rookworld.model.kernels.cuda_graphs import PassGraphs
from rookworld.model.optim import build_optimizers
from rookworld.model.weights import load_model, read_config
from rookworld.rl.memory import MemoryPlan, plan_memory
from rookworld.rl.settings import TrainSettings
from rookworld.runtime import distributed
from rookworld.runtime.errors import ConfigError

log = logging.getLogger(__name__)

CHUNK_VOCABULARY = 8_192
"""Vocabularies from this size on have their scores computed in chunks of rows."""
CHUNK_ROWS = 512
"""Six tensors of so many rows live at once: 0.6 GB with GPT-2's vocabulary."""
VALUE_LR = 1e-3
"""Rate of the value head."""


class ValueHead(nn.Linear):
    """Predicts rewards from states of length 1, so that one learning rate suits every model.

    It predicts 0 at first.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, width] -> [rows], without a gradient for the states."""
        return super().forward(F.normalize(hidden.detach().float(), dim=-1)).squeeze(-1)


class _Packed(NamedTuple):
    """Weights, what they were packed in, and how often each had been changed before."""

    state: tuple[torch.dtype, list[int]]
    weights: InferenceWeights


@dataclass
class Learner:
    """The models a gradient is computed with."""

    model: GPT2
    reference: GPT2
    value_head: ValueHead | None = None
    gathered: GPT2 | None = None
    """The policy's whole weights, where `model` has only this rank's share of them."""
    graphs: PassGraphs | None = None
    """The policy's recorded passes, where they may be recorded."""
    ref_graphs: PassGraphs | None = None
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    """How passes and the sampler's cache are cut."""
    packed: _Packed | None = None
    """The reference as `packed_reference` made it last."""

    @property
    def whole(self) -> GPT2:
        """The policy to sample from, to evaluate and to save."""
        return self.model if self.gathered is None else self.gathered

    def refresh(self) -> None:
        """Let `whole` follow an update."""
        if self.gathered is not None:
            sharding.gather(self.model, self.gathered)

    @property
    def one_model(self) -> bool:
        """Whether policy and reference are still the same; says no at the first difference."""
        pairs = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        return all(torch.equal(mine, its.to(mine.device)) for mine, its in pairs)

    def packed_reference(self, dtype: torch.dtype) -> InferenceWeights | None:
        """The reference as a CPU multiplies it fastest, packed anew whenever it has changed.

        None elsewhere, and while it is the policy: both must make the same pass for KL to be 0.
        """
        reference = self.reference
        plain = self.gathered is None and self.ref_graphs is None
        plain = plain and reference.wte.weight.dtype is torch.float32
        if not (plain and cpu.multiplies(reference.device, dtype)) or self.one_model:
            return None
        state = dtype, [parameter._version for parameter in reference.parameters()]
        if self.packed is None or self.packed.state != state:
            self.packed = _Packed(state, InferenceWeights(reference, dtype))
            # in bf16 it must round between a product and its gelu, as the policy's pass does
            self.packed.weights.record(False, separate_gelu=dtype is not torch.float32)
        return self.packed.weights

    def parameters(self) -> list[nn.Parameter]:
        own = [p for p in self.model.parameters() if p.requires_grad]
        return own if self.value_head is None else [*own, *self.value_head.parameters()]

    @property
    def chunk(self) -> int:
        return CHUNK_ROWS if self.model.config.vocab_size >= CHUNK_VOCABULARY else 0


def new_learner(folder: Path, settings: TrainSettings, device: torch.device) -> Learner:
    """Policy and reference, whole on every rank or shared out over them."""
    ranks = distributed.world_size() if settings.compute.shard else 1
    plan = plan_memory(read_config(folder), settings, device, ranks)
    model = load_model(folder, device)
    value_head = None
    if settings.advantages.gae:
        value_head = ValueHead(model.config.n_embd).to(device)
    if not settings.compute.shard or distributed.world_size() == 1:
        there = reference_device(settings, device)
        reference = copy.deepcopy(model).to(there).requires_grad_(False)
        return Learner(model, reference, value_head, memory=plan)
    reference = sharding.shard(load_model(folder).requires_grad_(False), device)
    shares = sharding.shard(load_model(folder), device)
    whole = model.requires_grad_(False)
    return Learner(shares, reference, value_head, gathered=whole, memory=plan)


def make_optimizers(learner: Learner, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for block matrices if it is asked for."""
    groups: list[dict[str, Any]] = [{"params": list(learner.model.parameters())}]
    if learner.value_head is not None:
        # a rate of its own: at a policy's 1e-5 the head would not learn within a run
        groups.append({"params": list(learner.value_head.parameters()), "own_lr": VALUE_LR})
    return build_optimizers(
        learner.model.named_parameters(),
        groups,
        muon=settings.optimizer.optimizer == "muon",
        lr=settings.optimizer.lr,
        weight_decay=settings.optimizer.weight_decay,
        eps=settings.optimizer.adam_eps,
        fused=learner.model.device.type == "cuda" or not settings.compute.shard,
    )


def record_passes(learner: Learner) -> None:
    """Have small passes recorded; all share one pool of memory, since no two run at once."""
    pool = torch.cuda.graph_pool_handle()
    learner.graphs = PassGraphs(learner.model, pool)
    if learner.reference.device == learner.model.device:
        learner.ref_graphs = PassGraphs(learner.reference, pool)


def hold_still(model: GPT2, trained: str) -> None:
    """Weights that do not learn get no gradient, which also spares computing it."""
    for name, parameter in model.named_parameters():
        in_block = name.startswith(("h.", "ln_f."))
        parameter.requires_grad_(trained == "all" or in_block)


def reference_device(settings: TrainSettings, device: torch.device) -> torch.device:
    """Where the reference lives; a device that is not there falls back to the policy's."""
    if settings.reference.ref_device is None:
        return device
    wanted = settings.reference.ref_device
    kind, _, number = wanted.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdigit() or not number):
        raise ConfigError(f"--ref-device {wanted}: expected cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        log.warning("--ref-device %s is not here; the reference stays on %s", wanted, device)
        return device
    return torch.device(wanted)
