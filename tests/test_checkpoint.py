"""Checkpoints: whole or not used, kept or pruned, and what comes back is what went in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from rookworld.model.checkpoint import (
    drop_after,
    fault_of,
    last_sound,
    load_checkpoint,
    mark_best,
    mark_sound,
    newest_checkpoint,
    optimizer_tensors,
    prune,
    restore_optimizers,
    save_checkpoint,
    saved_checkpoints,
)
from rookworld.model.gpt2 import GPT2
from rookworld.model.weights import load_model
from rookworld.report.model_card import evaluation, step_of
from rookworld.runtime.errors import RookworldError
from rookworld.runtime.run_folder import Run
from tiny_training import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GPT2:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", width=4)


def save_steps(run: Path, model: GPT2, steps: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:06d}"
        save_checkpoint(folder, model, tokenizer, {"t": torch.arange(step)}, {"step": step})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_comes_back_is_what_went_in(model: GPT2, tmp_path: Path) -> None:
    tensors = {"a.b": torch.randn(3, 2), "count": torch.tensor(7.0)}
    state = {"step": 3, "nested": {"x": [0.1, None]}}
    save_checkpoint(tmp_path / "c", model, tiny_tokenizer(), tensors, state)
    found = load_checkpoint(tmp_path / "c")
    assert found.step == 3
    assert found.state == state
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    loaded = load_model(tmp_path / "c")
    for mine, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    held = {path.name for path in (tmp_path / "c").iterdir()}
    model_files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert held >= model_files | {"generation_config.json", "manifest.json"}
    assert not [name for name in held if name.endswith((".pt", ".bin", ".pkl"))]
    assert json.loads((tmp_path / "c" / "config.json").read_text())["resid_pdrop"] == 0


def test_an_optimizer_goes_on_as_if_nothing_had_happened() -> None:
    def stepped(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, seed: int) -> None:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    weight = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for seed in range(3):
        stepped(weight, optimizer, seed)
    copy = torch.nn.Parameter(weight.detach().clone())
    other = torch.optim.AdamW([copy], lr=0.1)
    restore_optimizers([other], optimizer_tensors([optimizer], ["x"]), ["x"])
    for one, its in ((weight, optimizer), (copy, other)):
        stepped(one, its, 3)
    assert torch.equal(weight, copy)


def test_every_kind_of_damage_is_seen(model: GPT2, tmp_path: Path) -> None:
    save_steps(tmp_path, model, [1, 2, 3, 4])
    first, second, third, fourth = saved_checkpoints(tmp_path)
    assert fault_of(first) is None
    (fourth / "trainer.json").write_text("{}")
    assert fault_of(fourth) == "trainer.json has changed since it was written"
    (third / "model.safetensors").unlink()
    assert fault_of(third) == "model.safetensors is missing"
    (second / "manifest.json").write_text('{"config.json": ')
    assert fault_of(second) == "manifest.json is cut off"
    warnings: list[str] = []
    assert newest_checkpoint(tmp_path, warnings.append) == first
    assert [line.split(":")[0] for line in warnings] == [str(fourth), str(third), str(second)]
    with pytest.raises(RookworldError, match="not a whole checkpoint"):
        load_checkpoint(third)
    assert newest_checkpoint(tmp_path / "empty", warnings.append) is None


@pytest.mark.parametrize("content", ["{}", "[]", "null", "5", '{"config.json": 5}', "[" * 100_000])
def test_an_odd_manifest_is_a_fault(model: GPT2, tmp_path: Path, content: str) -> None:
    save_steps(tmp_path, model, [1, 2])
    first, second = saved_checkpoints(tmp_path)
    (second / "manifest.json").write_text(content)
    assert newest_checkpoint(tmp_path, lambda line: None) == first


@pytest.mark.parametrize("content", ["[]", "{}", '{"step": "x"}', '{"step": ', "\0"])
def test_an_odd_state_is_a_fault_although_its_checksum_is_right(
    model: GPT2, tmp_path: Path, content: str
) -> None:
    save_steps(tmp_path, model, [1, 2])
    first, second = saved_checkpoints(tmp_path)
    (second / "trainer.json").write_text(content)
    sums = json.loads((second / "manifest.json").read_text())
    sums["trainer.json"] = hashlib.sha256(content.encode()).hexdigest()
    (second / "manifest.json").write_text(json.dumps(sums))
    assert newest_checkpoint(tmp_path, lambda line: None) == first


def test_a_disk_that_cannot_be_read_just_now_is_no_fault(model: GPT2, tmp_path: Path) -> None:
    """Going on from an older checkpoint would delete the one that cannot be read."""
    save_steps(tmp_path, model, [1, 2])
    weights = saved_checkpoints(tmp_path)[-1] / "model.safetensors"
    weights.unlink()
    weights.symlink_to(weights.name)  # too many levels of links: an error, and not a missing file
    with pytest.raises(RookworldError, match=r"cannot be read .* nothing was changed, try again"):
        newest_checkpoint(tmp_path, lambda line: None)


def test_folders_with_other_names_are_no_checkpoints(model: GPT2, tmp_path: Path) -> None:
    save_steps(tmp_path, model, [1, 999_999, 1_000_000])
    for name in ("step-abc", "step-5", "step-000007 (copy)", "step-\u0661\u0662\u0663456", "step-"):
        (tmp_path / "checkpoints" / name).mkdir()
    steps = [int(path.name[5:]) for path in saved_checkpoints(tmp_path)]
    assert steps == [1, 999_999, 1_000_000]
    drop_after(tmp_path, 1)
    prune(tmp_path, keep=1)
    assert (tmp_path / "checkpoints" / "step-abc").is_dir()


def test_pruning_keeps_the_newest_the_best_and_the_last_sound(model: GPT2, tmp_path: Path) -> None:
    save_steps(tmp_path, model, [0, 1, 2, 3, 4, 5])
    checkpoints = tmp_path / "checkpoints"
    mark_best(checkpoints / "step-000001")
    mark_sound(checkpoints / "step-000000")
    mark_sound(checkpoints / "step-000002")
    mark_sound(checkpoints / "step-000099")
    (checkpoints / ".step-000006.1.new").mkdir()
    prune(tmp_path, keep=2)
    assert names(tmp_path) == [
        "best",
        *(f"step-{step:06d}" for step in (1, 2, 4, 5)),
    ]
    assert last_sound(tmp_path) == checkpoints / "step-000002"


def test_without_a_sound_one_a_run_returns_to_its_first(model: GPT2, tmp_path: Path) -> None:
    save_steps(tmp_path, model, [0, 1])
    assert last_sound(tmp_path).name == "step-000000"


def test_leaving_a_course_keeps_its_best_under_another_name(model: GPT2, tmp_path: Path) -> None:
    save_steps(tmp_path, model, [0, 2, 4, 6])
    checkpoints = tmp_path / "checkpoints"
    mark_best(checkpoints / "step-000004")
    drop_after(tmp_path, 2)
    assert names(tmp_path) == ["best", "best-000004", "step-000000", "step-000002"]
    assert load_checkpoint(checkpoints / "best").step == 4
    assert newest_checkpoint(tmp_path, lambda line: None) == checkpoints / "step-000002"
    prune(tmp_path, keep=1)
    assert "best-000004" in names(tmp_path)
    save_steps(tmp_path, model, [4])
    mark_best(checkpoints / "step-000004")
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["best", "step-000000", "step-000002", "step-000004"]


def test_a_best_that_is_broken_is_not_kept(model: GPT2, tmp_path: Path) -> None:
    save_steps(tmp_path, model, [0, 2])
    mark_best(tmp_path / "checkpoints" / "step-000002")
    (tmp_path / "checkpoints" / "step-000002" / "trainer.json").unlink()
    drop_after(tmp_path, 0)
    assert [path.name for path in saved_checkpoints(tmp_path)] == ["step-000000"]


def test_what_cannot_be_written_is_one_line(model: GPT2, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(RookworldError, match=r"the checkpoint cannot be written .* --resume"):
        save_steps(tmp_path, model, [1])


def test_a_card_tells_the_evaluation_of_its_own_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step, value in ((0, 0.1), (4, 0.4), (8, 0.8)):
        estimate = {"value": value, "n": 9, "low": value, "high": value}
        run.append("eval.jsonl", {"step": step, "P/best": estimate})
    saved = tmp_path / "checkpoints" / "step-000004"
    saved.mkdir()
    mark_best(saved)
    for folder in (saved, saved.with_name("best")):
        assert "| 0.400 [" in evaluation(tmp_path, step_of(folder))
    assert evaluation(tmp_path, step_of(saved.with_name("step-000003"))) == ""
    assert "| 0.800 [" in evaluation(tmp_path, step_of(tmp_path / "final"))
