"""Supervised training: the loss falls, however a step is cut, and a resumed run is bit-exact."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rookworld.cli.dispatch import main
from rookworld.data.sources import load_rows
from rookworld.model import run_checkpoints
from rookworld.model.checkpoint import newest_checkpoint, save_checkpoint
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.pretrain import batches, dataset, loss, trainer
from rookworld.pretrain.dataset import TokenizedRows
from rookworld.pretrain.presets import PRETRAIN_PRESETS
from rookworld.pretrain.settings import PretrainSettings
from rookworld.pretrain.sources import load_sources, pick_tokenizer, split_share
from rookworld.runtime.errors import ConfigError, Diverged, RookworldError
from rookworld.runtime.processes import Interrupted
from rookworld.runtime.run_folder import Run, read_json, read_lines
from rookworld.tasks.task import EnvironmentRow, PolicyRow

TINY = PretrainSettings.of(
    n_layer=2, n_embd=32, n_head=2, steps=6, batch_size=12, log_every=1, lr_warmup_steps=2,
    save_every=2, eval_every=0, device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pick_tokenizer("chess")


@pytest.fixture(scope="module")
def sources(tokenizer: Tokenizer) -> list[tuple[TokenizedRows, float]]:
    rows = load_rows("embedded:train")
    policy = [row for row in rows if isinstance(row, PolicyRow)][:40]
    environment = [row for row in rows if isinstance(row, EnvironmentRow)][:20]
    return [
        (dataset.pack_policy(policy, tokenizer), 3.0),
        (dataset.pack_environment(environment, tokenizer), 1.0),
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder).named_parameters())


def test_the_loss_falls_and_the_run_folder_is_readable(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    settings = replace(TINY, steps=30, out=tmp_path, save_every=30)
    final = trainer.pretrain(settings, sources, tokenizer)
    losses = [line["loss/total"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "DONE").exists()
    assert Tokenizer.load(final).vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_is_bit_exact(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]], stop: int
) -> None:
    whole = trainer.pretrain(replace(TINY, out=tmp_path / "whole"), sources, tokenizer)

    class Killed(Exception):
        pass

    def kill(step: int, metrics: dict[str, float]) -> None:
        if step == stop:
            raise Killed

    settings = replace(TINY, out=tmp_path / "cut")
    with pytest.raises(Killed):
        trainer.pretrain(settings, sources, tokenizer, on_step=kill)
    resumed = trainer.pretrain(replace(settings, resume=True), sources, tokenizer)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    steps = [line["step"] for line in read_lines(tmp_path / "cut" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", range(1, 11))
def test_a_run_killed_between_two_writes_ends_as_if_it_had_not(
    tmp_path: Path,
    tokenizer: Tokenizer,
    sources: list[tuple[TokenizedRows, float]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    class Killed(Exception):
        pass

    left = [number]

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: Any, **options: Any) -> None:
            write(*args, **options)
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        return wrapped

    def run(name: str) -> list[list[dict[str, Any]]]:
        settings = replace(TINY, out=tmp_path / name, log_every=4, eval_every=2, resume=True)
        trainer.pretrain(settings, sources, tokenizer, evaluate=lambda model, _: {"x": "y"})
        names = ("metrics.jsonl", "eval.jsonl")
        found = [list(read_lines(tmp_path / name / stream)) for stream in names]
        for line in found[0]:
            line.pop("time/step_s")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Run, "append", dying(Run.append))
        patch.setattr(run_checkpoints, "save_checkpoint", dying(save_checkpoint))
        with suppress(Killed):
            run("cut")
    assert run("cut") == run("whole")


def test_a_run_is_not_destroyed_unasked(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    settings = replace(TINY, out=tmp_path, steps=1)
    trainer.pretrain(settings, sources, tokenizer)
    with pytest.raises(ConfigError, match="--resume goes on with it, --overwrite deletes it"):
        trainer.pretrain(settings, sources, tokenizer)
    with Run(tmp_path).in_use(), pytest.raises(RookworldError, match="is training here"):
        trainer.pretrain(replace(settings, overwrite=True), sources, tokenizer)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]
    trainer.pretrain(replace(settings, overwrite=True), sources, tokenizer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_run_goes_on(
    tmp_path: Path,
    tokenizer: Tokenizer,
    sources: list[tuple[TokenizedRows, float]],
    number: signal.Signals,
) -> None:
    def interrupt(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            os.kill(os.getpid(), number)

    settings = replace(TINY, out=tmp_path / "cut", save_every=6, resume=True)
    with pytest.raises(Interrupted, match="stopped after step 2; --resume goes on"):
        trainer.pretrain(settings, sources, tokenizer, on_step=interrupt)
    newest = newest_checkpoint(tmp_path / "cut", pytest.fail)
    assert newest is not None and newest.name == "step-000002"
    resumed = trainer.pretrain(settings, sources, tokenizer)
    whole = trainer.pretrain(replace(TINY, out=tmp_path / "whole"), sources, tokenizer)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_the_command_exits_130_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stopped(*args: object, **options: object) -> None:
        raise Interrupted("stopped after step 3; --resume goes on from there")

    monkeypatch.setattr(trainer, "pretrain", stopped)
    args = ["pretrain", "--data", "embedded:validation", "--eval-rows", "1", "--out", str(tmp_path)]
    assert main(args) == 130
    assert "stopped after step 3" in capfd.readouterr().err


def test_resuming_as_another_kind_of_run_is_one_line(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    settings = replace(TINY, steps=1, out=tmp_path, resume=True)
    trainer.pretrain(settings, sources, tokenizer)
    with pytest.raises(ConfigError, match="n_embd is 32, not 40; resume with the run's own"):
        trainer.pretrain(replace(settings, n_embd=40), sources, tokenizer)
    with pytest.raises(ConfigError, match="--optimizer"):
        trainer.pretrain(replace(settings, optimizer="adamw"), sources, tokenizer)
    saved, state = load_model(tmp_path / "final"), {"step": 2, "guard": {}}
    save_checkpoint(tmp_path / "checkpoints" / "step-000002", saved, tokenizer, {}, state)
    with pytest.raises(ConfigError, match="saved by train --backend native, not by pretrain"):
        trainer.pretrain(settings, sources, tokenizer)


def test_a_model_to_start_from_brings_its_shape_and_tokenizer(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    model = str(trainer.pretrain(replace(TINY, steps=1, out=tmp_path / "a"), sources, tokenizer))
    default = PretrainSettings()
    shape = {name: getattr(default, name) for name in trainer.SHAPE}
    settings = replace(TINY, steps=1, out=tmp_path / "b", model=model, **shape)
    trainer.pretrain(settings, sources, tokenizer)
    told = read_json(tmp_path / "b" / "config.json")
    assert (told["n_layer"], told["n_embd"], told["tokenizer"]) == (2, 32, model)
    with pytest.raises(ConfigError, match=r"--n-layer 3: --model .* has 2; leave it out"):
        trainer.pretrain(replace(settings, n_layer=3), sources, tokenizer)
    with pytest.raises(ConfigError, match="has its own tokenizer; leave it out"):
        trainer.pretrain(replace(settings, tokenizer="gpt2"), sources, tokenizer)


def test_a_run_made_longer_is_not_done(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    settings = replace(TINY, steps=1, out=tmp_path, resume=True)
    trainer.pretrain(settings, sources, tokenizer)

    def look(step: int, metrics: dict[str, float]) -> None:
        assert not (tmp_path / "DONE").exists()

    trainer.pretrain(replace(settings, steps=2), sources, tokenizer, on_step=look)
    assert (tmp_path / "DONE").exists()


def test_a_resumed_run_tells_the_settings_it_goes_on_with(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    settings = replace(TINY, steps=1, out=tmp_path, resume=True)
    trainer.pretrain(settings, sources, tokenizer)
    trainer.pretrain(replace(settings, steps=2, lr=1e-4), sources, tokenizer)
    told = read_json(tmp_path / "config.json")
    assert (told["steps"], told["lr"]) == (2, 1e-4)


def test_a_gradient_is_the_same_however_a_step_is_cut(
    tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    device = torch.device("cpu")
    state = trainer.new_state(TINY, tokenizer, device)
    found = []
    for budget in (200, 100_000):
        settings = replace(TINY, micro_tokens=budget)
        placed = batches.sources_on_device(sources, settings, device)
        symmetries = batches.symmetry_tables(tokenizer, settings, device)
        passes = list(
            batches.step_batches(state.step, tokenizer, placed, symmetries, settings, device)
        )
        for micro in passes:
            total, _ = loss.micro_loss(state.model, micro, loss.field_weights(settings, device))
            total.backward()  # type: ignore[no-untyped-call]
        found.append(
            (len(passes), [p.grad.clone() for p in state.model.parameters() if p.grad is not None])
        )
        state.model.zero_grad()
    (many, first), (few, second) = found
    assert many > few
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_every_row_comes_once_an_epoch_in_a_new_order() -> None:
    steps = [batches.rows_of_step(10, 4, step, seed=1) for step in range(5)]
    rows = np.concatenate(steps)
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()


def test_rows_of_like_length_share_a_pass() -> None:
    lengths = np.array([85, 160, 73, 85, 151], dtype=np.int16)
    cuts = [part.tolist() for part in batches.cut(lengths, np.arange(5), 10_000)]
    assert cuts == [[2, 0, 3], [4, 1]]
    small = [part.tolist() for part in batches.cut(lengths, np.arange(5), 170)]
    assert small == [[2, 0], [3], [4], [1]]


def test_passes_of_a_run_have_few_shapes() -> None:
    assert {batches.even_width(width, 166) for width in range(145, 167)} == {160, 166}
    assert batches.even_width(85, 85) == 85


def test_prompts_are_no_targets(
    tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    """Changing a prompt's tokens as targets must not change the loss: their weight is zero."""
    packed = sources[0][0]
    table = loss.field_weights(TINY, torch.device("cpu"))
    assert float(table[dataset.PROMPT]) == 0
    for row in range(len(packed)):
        assert (packed.fields[row, : packed.prompts[row]] == dataset.PROMPT).all()


def test_naming_a_listed_move_again_costs_its_probability() -> None:
    first, other, mark = dataset.FIRST_MOVE, dataset.OTHER_MOVE, dataset.MARKER
    targets = torch.tensor([[3, 1, 2, 0, 0, 0, 0], [4, 3, 2, 1, 0, 0, 0]])
    fields = torch.tensor([[first, other, mark, 0, 0, 0, 0], [0, first, other, other, mark, 0, 0]])
    p = torch.full((2, 7, 6), 0.1)
    p[0, 1, 3], p[1, 2, 3], p[1, 3, 3], p[1, 3, 2] = 0.5, 0.25, 0.2, 0.3
    found = loss.repetition(p.log(), targets, fields, torch.tensor([0, 1]))
    wanted = -math.log(0.5) - math.log(0.75) - math.log(0.5)
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_the_rate_rises_then_falls_to_its_share() -> None:
    settings = replace(TINY, steps=100, lr_warmup_steps=10, lr_final=0.1)
    factors = [trainer.rate_factor(step, settings) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.1, abs=0.001)
    assert factors[55] == pytest.approx(0.55, abs=0.01)


def test_muon_has_the_matrices_of_blocks_and_adam_the_rest(tokenizer: Tokenizer) -> None:
    state = trainer.new_state(TINY, tokenizer, torch.device("cpu"))
    adam, muon = (
        {weight for group in optimizer.param_groups for weight in group["params"]}
        for optimizer in state.optimizers
    )
    assert muon == {w for w in state.model.h.parameters() if w.ndim == 2}
    assert adam == set(state.model.parameters()) - muon


def test_a_loss_that_is_not_a_number_stops_with_a_reason() -> None:
    with pytest.raises(Diverged, match="lower --lr"):
        trainer.check_finite({"loss/total": math.nan, "guard/skipped": 0.0, "lr": 1.0})


def test_gradients_that_are_not_finite_do_not_move_weights() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, math.nan, 2.0])
    trainer.scale_gradients([weight], torch.tensor(2.0), clip_norm=1.0)
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


def test_a_corrupt_checkpoint_is_passed_over(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    trainer.pretrain(replace(TINY, out=tmp_path, save_every=3), sources, tokenizer)
    newest = tmp_path / "checkpoints" / "step-000006" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    said: list[str] = []
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None and found.name == "step-000003"
    assert "step-000006" in said[0] and "\n" not in said[0]


def test_presets_are_settings() -> None:
    for values in PRETRAIN_PRESETS.values():
        replace(TINY, **values)


def test_shares_of_sources(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert split_share("rows.parquet=2.5") == ("rows.parquet", 2.5)
    assert split_share("rows.parquet") == ("rows.parquet", None)
    with pytest.raises(ConfigError, match="positive number"):
        split_share("rows.parquet=much")
    with pytest.raises(ConfigError, match="every source"):
        load_sources(["embedded:test=1", "embedded:validation"], tokenizer, hard=0.5, softness=0.03)


def test_what_does_not_fit_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[tuple[TokenizedRows, float]]
) -> None:
    with pytest.raises(ConfigError, match="does not fit --n-positions 100"):
        trainer.pretrain(replace(TINY, n_positions=100, out=tmp_path), sources, tokenizer)
    with pytest.raises(ConfigError, match="too small"):
        trainer.pretrain(replace(TINY, batch_size=1, out=tmp_path), sources, tokenizer)
    bytes_only = copy(tokenizer)
    bytes_only.style = "padded"
    plain = replace(TINY, flip=False, mirror=False, out=tmp_path)
    with pytest.raises(ConfigError, match="--flip"):
        trainer.pretrain(replace(plain, flip=True), sources, bytes_only)
    with pytest.raises(ConfigError, match="--repeat-weight 0"):
        trainer.pretrain(replace(plain, repeat_weight=1.0), sources, bytes_only)
