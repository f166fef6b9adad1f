"""A model cut into shares, one a rank, for models that do not fit beside their moments (FSDP2).

Laws: a sharded step computes what a whole one does; a checkpoint is the same files either way, so a
run may be sharded or not, by any number of ranks, each time it is resumed. A block is gathered when
a pass reaches it and given back behind it. What samples reads whole weights at every token, so each
rank keeps one whole copy of the policy beside its share, brought up to date after every update.
Left out: sharding the sampler, offloading to the CPU, sending less than float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rookworld.model.gpt2 import GPT2
from rookworld.runtime import distributed


def shard(model: GPT2, device: torch.device) -> GPT2:
    """Leave this rank its share of `model`, on `device`; passes go through it as before.

    From the CPU it goes to the device block by block, which never holds all of it.
    """
    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    for part in (*model.h, model):
        shares = fully_shard(part, mesh=mesh)
        # our losses are divided by global counts: gradients are summed, not averaged
        shares.set_gradient_divide_factor(1.0)
        shares.set_force_sum_reduction_for_comms(True)
    return model


def missing_passes(model: GPT2, own: int) -> int:
    """By how many passes the busiest rank exceeds this one's `own`; to be asked before them.

    Gathering a block takes all ranks, but they hold different numbers of packs, or none.
    """
    if not isinstance(model, FSDPModule):
        return 0
    return int(distributed.max_over_ranks(torch.tensor(own))) - own


def idle_passes(model: GPT2, count: int) -> None:
    """Passes that change nothing, for the sake of the ranks that have more to do."""
    for _ in range(count):
        hidden = model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
        nothing = 0.0 * model.logits(hidden).sum()
        if nothing.requires_grad:
            nothing.backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def gather(model: GPT2, whole: GPT2) -> None:
    """Bring `whole` up to date with the shares of `model`, a block at a time."""
    twins = dict(whole.named_parameters())
    for prefix, part in model.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        part.unshard()
        assert isinstance(part, nn.Module)
        for name, parameter in part.named_parameters(prefix):
            if not isinstance(parameter, DTensor):  # others belong to a part inside this one
                twins[name].copy_(parameter)
        part.reshard()


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Every weight of `source` into `target`, be they whole or both shared out alike."""
    give_back(source)
    give_back(target)
    for theirs, mine in zip(source.parameters(), target.parameters(), strict=True):
        assign(mine, theirs)


def give_back(module: nn.Module) -> None:
    """Release what the last pass has gathered: it would hide a change of the shares."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Let `target` hold `value`, or the share of it that is this rank's."""
    local(target).copy_(local(share_like(value, target)))


def share_like(value: Tensor, model: Tensor) -> Tensor:
    """The share of a whole `value` that this rank has of `model`; itself if that is whole."""
    if not isinstance(model, DTensor) or isinstance(value, DTensor) or value.shape != model.shape:
        return value
    there = value.detach().to(model.device)
    return distribute_tensor(there, model.device_mesh, model.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """What this rank holds of rows `start` to `stop`, as a view."""
    if not isinstance(tensor, DTensor):
        return tensor[start:stop]
    size = -(-len(tensor) // distributed.world_size())
    first = distributed.rank() * size
    return tensor.to_local()[max(0, start - first) : max(0, stop - first)]


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On rank 0 every tensor whole, those that were shared out on the CPU; elsewhere nothing.

    All ranks must call it.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        if distributed.rank() == 0:
            found[name] = whole
    return found


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector; shares of all ranks count once."""
    shares = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    if not shares:
        return torch.nn.utils.get_total_norm(whole)
    square = torch.nn.utils.get_total_norm(shares).double().square()
    distributed.sum_over_ranks(square)
    return (square + torch.nn.utils.get_total_norm(whole).double().square().to(square)).sqrt()
