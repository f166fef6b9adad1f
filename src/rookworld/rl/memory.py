"""What a run may take of a GPU's memory, and how its passes and its sampler are cut to fit.

Laws: a cut changes speed and memory and nothing else; what `--memory` allows is never exceeded.
The sizes are estimates of a float32 model trained in bfloat16, measured on a 124M one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from rookworld.model.gpt2 import GPT2Config
from rookworld.model.kernels.cuda_graphs import HELD_BYTES, memory_of
from rookworld.model.precision import matrix_dtype
from rookworld.model.sampling.decode_batch import round_up
from rookworld.model.sampling.decode_graphs import round_groups
from rookworld.rl.settings import MICRO_TOKENS, TrainSettings
from rookworld.runtime.errors import ConfigError

USABLE = 0.9
"""Of a card without --memory: others use it too, and blocks do not fit without gaps."""
TIGHT = 0.97
"""Of --memory: its allocator hands unused blocks back before it asks for more."""
WORKSPACE = 150_000_000
SCORES = 2**28
"""Bytes of scores that live at once (`kernels.triton_scores`)."""
KEPT_BYTES = 4
"""Of each number in the streams, with --recompute: a block's input."""
FEW = 8_192
"""Tokens of a pass below which a GPU waits for its host: then blocks are rather recomputed."""
ENOUGH = 2e12
"""Tokens times parameters in a pass from which a larger one is no faster."""
SMALLEST, LARGEST = 1_024, 131_072
"""Tokens of a pass."""
USUAL_PROMPT = 128
CACHE_SHARE = 0.4
"""Largest share of what weights leave over that keys and values may take."""
UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class MemoryPlan:
    """How a run's passes and its sampler are cut."""

    micro_tokens: int = MICRO_TOKENS
    """Tokens in a pass, at most."""
    recompute: bool = False
    cache_bytes: int | None = None
    """What the sampler's keys and values may take; None: as much as they need."""


def bytes_of(size: str) -> int:
    """`4.8GB` as bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f"--memory {size}: give a size such as 4.8GB or 20GB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def claim_memory(settings: TrainSettings, device: torch.device) -> None:
    """Hold this process to --memory, before anything is on the device."""
    if device.type != "cuda":
        return
    # of blocks that can grow there is one size; of others one stays free for each that was met
    set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_allocator is not None:
        set_allocator("expandable_segments:True")
    # cuDNN plans its attention anew, for a tenth of a second, whenever a shape is new
    torch.backends.cuda.enable_cudnn_sdp(False)
    if settings.compute.memory is not None:
        share = bytes_of(settings.compute.memory) / memory_of(device)
        which = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), which)


def plan_memory(
    config: GPT2Config, settings: TrainSettings, device: torch.device, ranks: int = 1
) -> MemoryPlan:
    """Passes and cache that fit; what the user has set stays.

    `ranks` is how many share out the weights.
    """
    given = settings.compute
    if device.type != "cuda":
        return MemoryPlan(given.micro_tokens or MICRO_TOKENS, given.recompute)
    total = memory_of(device) * USABLE
    if given.memory is not None:
        total = min(total, bytes_of(given.memory) * TIGHT)
    left = total - weight_bytes(config, settings, device, ranks) - score_bytes(config, settings)
    cache = min(request_bytes(config, settings, device), int(CACHE_SHARE * max(0.0, left)))
    width = config.n_embd * (1 if matrix_dtype(given.dtype, device) is torch.bfloat16 else 2)
    # recorded passes keep memory of their own beside that of the others
    room = (left - cache) / (2 if given.graphs else 1)
    whole = int(room / (HELD_BYTES * width * config.n_layer))
    lean = int(room / (width * (KEPT_BYTES * config.n_layer + HELD_BYTES)))
    enough = min(LARGEST, max(MICRO_TOKENS, int(ENOUGH / parameters_of(config))))
    recompute = given.recompute or whole < min(FEW, step_tokens(settings))
    fits = lean if recompute else whole
    if fits < SMALLEST and given.micro_tokens is None:
        short = (SMALLEST - lean) * width * (KEPT_BYTES * config.n_layer + HELD_BYTES) * 2
        raise ConfigError(
            f"--model {settings.model}: {parameters_of(config) / 1e6:.0f}M parameters need about "
            f"{(total + max(0, short)) / 1e9:.1f} GB to train, and {total / 1e9:.1f} GB are there; "
            "take fewer --k-samples or --batch-size, --recompute, or --ref-device cpu"
        )
    return MemoryPlan(given.micro_tokens or min(enough, fits), recompute, cache)


def parameters_of(config: GPT2Config) -> int:
    width, tables = config.n_embd, config.vocab_size + config.n_positions
    block = 4 * width * width + 2 * width * config.inner + 9 * width + config.inner
    return tables * width + config.n_layer * block + 2 * width


def weight_bytes(
    config: GPT2Config, settings: TrainSettings, device: torch.device, ranks: int
) -> float:
    """Weights, gradients and moments; the reference; copies in bfloat16 to sample and multiply."""
    reference = 4 if settings.reference.ref_device in (None, str(device)) else 0
    copies = 4 if matrix_dtype(settings.compute.dtype, device) is torch.bfloat16 else 0
    whole = copies + (4 if ranks > 1 else 0)
    return parameters_of(config) * ((4 + 4 + 8 + reference) / ranks + whole)


def score_bytes(config: GPT2Config, settings: TrainSettings) -> int:
    """What scores over the vocabulary take: in a decode, and in a loss with its gradient."""
    answers = settings.batch_size * settings.sampling.k_samples
    drawn = 6 * config.vocab_size * min(1024, answers)
    head = 8 * config.vocab_size * config.n_embd
    return WORKSPACE + drawn + SCORES + head


def request_bytes(config: GPT2Config, settings: TrainSettings, device: torch.device) -> int:
    """Keys and values of all of a step's answers."""
    new = round_up(settings.sampling.max_new_tokens or MOST_NEW, 16)
    slots = USUAL_PROMPT + settings.sampling.k_samples * new
    size = matrix_dtype(settings.compute.dtype, device).itemsize
    groups = round_groups(settings.batch_size)
    return 2 * groups * slots * config.n_layer * config.n_embd * size


MOST_NEW = 144
"""Tokens of the longest answer that a task allows."""


def step_tokens(settings: TrainSettings) -> int:
    """Tokens in a step's passes, about."""
    each = USUAL_PROMPT + settings.sampling.k_samples * MOST_NEW // 2
    return settings.batch_size * each
