"""Products by oneDNN are torch's; a reference that is packed for them says what it said before."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.kernels import cpu
from rookworld.rl import forward
from rookworld.rl.batch import SharedPrefixBatch, padded_batch
from rookworld.rl.forward import reference_pass
from rookworld.rl.models import Learner
from rookworld.rl.settings import TrainSettings

CPU = torch.device("cpu")
here = pytest.mark.skipif(not cpu.multiplies(CPU, torch.float32), reason="needs oneDNN's products")
in_bf16 = pytest.mark.skipif(not cpu.multiplies(CPU, torch.bfloat16), reason="needs bf16 products")


@here
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("gelu", [False, True])
def test_a_product_is_torchs(rows: int, gelu: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40)
    expected = F.linear(x, weight, bias)
    expected = F.gelu(expected, approximate="tanh") if gelu else expected
    transposed = weight.t().contiguous().t()
    for way in (cpu.pack(weight), weight, transposed):
        torch.testing.assert_close(cpu.linear(x, way, bias, gelu), expected)


GROWS = """
import random, torch
from rookworld.model.kernels import cpu

def held():
    with open("/proc/self/status") as told:
        return next(int(line.split()[1]) for line in told if line.startswith("VmRSS")) / 1024

x, weight = torch.randn(1200, 64), cpu.pack(torch.randn(64, 64))
sizes = list(range(1, 1200))
random.Random(0).shuffle(sizes)
for size in sizes[:400]:
    cpu.linear(x[:size], weight, None)
before = held()
for size in sizes[400:]:
    cpu.linear(x[:size], weight, None)
print(held() - before)
"""


@here
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_programs_for_ever_new_sizes_do_not_pile_up() -> None:
    set_here = set(cpu.CAPACITIES)
    environment = {name: value for name, value in os.environ.items() if name not in set_here}
    told = subprocess.run(
        [sys.executable, "-c", GROWS], env=environment, capture_output=True, text=True, check=True
    )
    assert float(told.stdout) < 60


# --- the reference ------------------------------------------------------------------------------


def moved(model: GPT2, seed: int) -> GPT2:
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture
def learner() -> Learner:
    config = GPT2Config(vocab_size=29, n_positions=40, n_embd=32, n_layer=3, n_head=4)
    model = GPT2(config).init_weights(0)
    return Learner(model, moved(model, 1).requires_grad_(False))


@pytest.fixture
def line() -> SharedPrefixBatch:
    torch.manual_seed(0)
    prompts, answers = torch.randint(29, (3, 9)), torch.randint(29, (3, 4, 6))
    lengths = torch.randint(1, 7, (3, 4))
    return padded_batch(prompts, torch.tensor([9, 4, 7]), answers, lengths)


def settings_in(dtype: str) -> TrainSettings:
    return TrainSettings.of(dtype=dtype, device="cpu")


def unpacked(line: SharedPrefixBatch, learner: Learner, dtype: str) -> Tensor:
    """What the module itself says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "packed_reference", lambda *_: None)
        return reference_pass(line, learner, settings_in(dtype))


@here
@pytest.mark.parametrize(
    ("dtype", "close"), [("float32", 1e-5), pytest.param("bfloat16", 2e-2, marks=in_bf16)]
)
def test_a_packed_reference_says_the_same(
    learner: Learner, line: SharedPrefixBatch, dtype: str, close: float
) -> None:
    found = reference_pass(line, learner, settings_in(dtype))
    assert learner.packed is not None
    expected = unpacked(line, learner, dtype)
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


@here
def test_a_reference_that_has_moved_is_packed_anew(
    learner: Learner, line: SharedPrefixBatch
) -> None:
    before = reference_pass(line, learner, settings_in("float32"))
    first = learner.packed
    reference_pass(line, learner, settings_in("float32"))
    assert learner.packed is first is not None
    with torch.no_grad():
        for mine, its in zip(
            learner.reference.parameters(), moved(learner.model, 2).parameters(), strict=True
        ):
            mine.copy_(its)
    found = reference_pass(line, learner, settings_in("float32"))
    torch.testing.assert_close(found, unpacked(line, learner, "float32"), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)


def test_a_reference_that_is_the_policy_makes_its_pass(
    learner: Learner, line: SharedPrefixBatch
) -> None:
    same = Learner(learner.model, copy.deepcopy(learner.model).requires_grad_(False))
    with torch.no_grad():
        expected = forward.states(line, same.model)
    assert torch.equal(reference_pass(line, same, settings_in("float32")), expected)
    assert same.packed is None
