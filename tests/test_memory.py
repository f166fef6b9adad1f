"""How a run is cut to a GPU's memory; the GPU itself is asked only where there is one."""

from __future__ import annotations

import pytest
import torch

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.rl import memory
from rookworld.rl.memory import MemoryPlan, bytes_of, parameters_of, plan_memory
from rookworld.rl.presets import TRAIN_PRESETS
from rookworld.rl.settings import MICRO_TOKENS, TrainSettings
from rookworld.runtime.errors import ConfigError

ROOKWORLD = GPT2Config(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
GPU, CPU = torch.device("cuda"), torch.device("cpu")
CARD = 24 * 2**30


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of", lambda device: CARD)


def _plan(**flat: object) -> MemoryPlan:
    return plan_memory(ROOKWORLD, TrainSettings.of(**flat), GPU)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4.8GB", 4_800_000_000), ("20gb", 20 * 10**9), ("512 MiB", 2**29), ("1e3", 0), ("", 0)],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    if size:
        assert bytes_of(text) == size
    else:
        with pytest.raises(ConfigError, match="such as"):
            bytes_of(text)


def test_parameters_are_counted_as_the_model_has_them() -> None:
    config = GPT2Config(vocab_size=61, n_positions=56, n_embd=32, n_layer=2, n_head=2)
    assert parameters_of(config) == sum(p.numel() for p in GPT2(config).parameters())
    assert parameters_of(ROOKWORLD) == 124_439_808


def test_a_small_card_recomputes_and_a_large_one_does_not() -> None:
    mini = _plan(**TRAIN_PRESETS["mini"])
    assert mini.recompute and mini.micro_tokens >= memory.SMALLEST
    whole = _plan(batch_size=64, k_samples=16)
    assert not whole.recompute and whole.micro_tokens > memory.FEW
    assert whole.cache_bytes == memory.request_bytes(
        ROOKWORLD, TrainSettings.of(batch_size=64, k_samples=16), GPU
    )
    tight = _plan(batch_size=64, k_samples=16, memory="8GB")
    assert tight.recompute
    assert tight.cache_bytes is not None and tight.cache_bytes < 2 * 10**9


def test_what_the_user_sets_stays() -> None:
    assert _plan(micro_tokens=2048).micro_tokens == 2048
    assert _plan(recompute=True).recompute


def test_memory_that_is_too_small_says_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"124M parameters need about \d\.\d GB"):
        _plan(memory="3GB")


def test_a_cpu_is_not_planned() -> None:
    settings = TrainSettings.of(memory="3GB")
    assert plan_memory(ROOKWORLD, settings, CPU) == MemoryPlan(MICRO_TOKENS, recompute=False)
