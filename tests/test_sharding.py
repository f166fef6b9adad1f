"""A model in shares learns what a whole one does, and leaves the same files behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import child_process
from rookworld.model import sharding
from rookworld.model.checkpoint import Checkpoint
from rookworld.rl.collect import collect_groups
from rookworld.rl.metrics import Clock
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import load_named, new_state
from rookworld.rl.step import learn
from rookworld.runtime import distributed
from rookworld.runtime.errors import ConfigError
from test_distributed import assert_same_trajectory, command, furthest, run_ranks
from tiny_training import tiny_rows, tiny_settings, write_jsonl

EVERYTHING = "--gae --updates-per-rollout 2 --ref-sync-every 7 --kl-collect-cap 5 --clip-norm 0.5"
MANY_PACKS = "--micro-tokens 200"


def steps(folder: Path, model: Path, plan: list[tuple[int, int, str]], more: str = "") -> Path:
    """A run in stretches of (up to step, ranks, flags); the rows lie beside it."""
    rows = write_jsonl(folder / "rows.jsonl", tiny_rows())
    for until, ranks, flags in plan:
        args = command(model, rows, folder / "run", f"--steps {until} --lr 1e-4 {flags} {more}")
        run_ranks(args, folder / "log", ranks)
    return folder / "run"


@pytest.fixture(scope="module")
def whole(warm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps of one process."""
    return steps(tmp_path_factory.mktemp("whole"), warm_folder, [(20, 1, "")])


def test_shares_go_the_way_of_the_whole(warm_folder: Path, whole: Path, tmp_path: Path) -> None:
    run = steps(tmp_path, warm_folder, [(20, 2, f"--shard {MANY_PACKS}")])
    assert_same_trajectory(run, whole, 20)
    assert furthest(whole / "final", warm_folder) > 1e-4
    saved, expected = (
        load_file(one / "checkpoints" / "step-000020" / "trainer.safetensors")
        for one in (run, whole)
    )
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        [(6, 2, "--shard"), (13, 1, ""), (20, 3, "--shard")],
        [(6, 1, "--shard"), (13, 4, "--shard"), (20, 2, "")],
    ],
    ids=["2s-1-3s", "1s-4s-2"],
)
def test_a_run_may_be_shared_out_otherwise_on_resume(
    warm_folder: Path, whole: Path, tmp_path: Path, plan: list[tuple[int, int, str]]
) -> None:
    assert_same_trajectory(steps(tmp_path, warm_folder, plan), whole, 20)


@pytest.mark.slow
def test_everything_a_step_can_do_goes_the_way_of_the_whole(
    warm_folder: Path, tmp_path: Path
) -> None:
    for name, plan in (
        ("whole", [(20, 1, "")]),
        ("shares", [(9, 3, "--shard"), (20, 2, f"--shard {MANY_PACKS}")]),
    ):
        (tmp_path / name).mkdir()
        steps(tmp_path / name, warm_folder, plan, EVERYTHING)
    assert_same_trajectory(tmp_path / "shares" / "run", tmp_path / "whole" / "run", 20)


def two_steps_in_shares(model: str, folder: str) -> None:
    """One prompt for two ranks, so that one of them idles; each writes what it holds."""
    settings = tiny_settings(Path(model), Path(folder) / "run", batch_size=1, shard=True)
    device = distributed.start("cpu")
    state = new_state(settings, tiny_rows(), device)
    for _ in range(2):
        scratch = StepScratch()
        collected = collect_groups(state, settings, None, Clock(device), scratch)
        learn(state, collected, scratch, settings, Clock(device))
        state.step += 1
    reference = state.learner.reference
    made = {f"reference.{n}": torch.full(p.shape, 0.5) for n, p in reference.named_parameters()}
    load_named(reference, Checkpoint(Path(), made, {}), "reference")
    sharding.give_back(reference)
    own = list(state.learner.model.parameters())
    held = {
        "all": sum(p.numel() for p in own),
        "weights": sum(sharding.local(p).numel() for p in own),
        "moments": sum(
            sharding.local(state.optimizers[0].state[p]["exp_avg"]).numel() for p in own
        ),
        "reference": sum(sharding.local(p).numel() for p in reference.parameters()),
        "loaded": min(float(sharding.local(p).min()) for p in reference.parameters()),
        "shares": sharding.whole_tensors({str(number): p for number, p in enumerate(own)}),
        "gathered": list(state.learner.whole.parameters()),
    }
    torch.save(held, Path(folder) / f"rank-{distributed.rank()}.pt")
    distributed.stop()


def test_a_rank_holds_its_share_and_one_copy_to_sample_from(
    warm_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    children = [
        child_process.call(
            two_steps_in_shares,
            (str(warm_folder), str(tmp_path)),
            log,
            child_process.rank_of(2, rank, log),
        )
        for rank in range(2)
    ]
    assert [child_process.ended(child) for child in children] == [0, 0], log.read_text()
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    for name in ("weights", "moments", "reference"):
        assert first[name] + second[name] == first["all"]
        assert abs(first[name] - second[name]) < 0.01 * first["all"]
    assert second["shares"] == {}
    for held in (first, second):
        assert held["loaded"] == 0.5
        pairs = zip(first["shares"].values(), held["gathered"], strict=True)
        assert all(torch.equal(shares, gathered) for shares, gathered in pairs)


def test_one_process_has_nothing_to_share(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path, shard=True)
    learner = new_state(settings, tiny_rows(), torch.device("cpu")).learner
    assert learner.whole is learner.model
    assert sharding.missing_passes(learner.model, 3) == 0
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    assert sharding.total_norm(gradients).item() == pytest.approx(5)
    assert sharding.local_rows(torch.arange(6), 2, 4).tolist() == [2, 3]


def test_a_reference_elsewhere_cannot_be_shared_out() -> None:
    with pytest.raises(ConfigError, match="--ref-device cpu: with --shard"):
        TrainSettings.of(shard=True, ref_device="cpu")
