"""The run folder: whole files, crash-safe lines, cut back on resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rookworld.runtime.atomic_files import write_json, write_text
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_folder import Run, origin, read_json, read_lines


def test_lines_come_back_and_a_half_written_last_one_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.append("metrics.jsonl", {"step": 1, "x": 0.5})
    run.append("metrics.jsonl", {"step": 2, "x": float("nan")})
    path = run.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "x')
    assert list(read_lines(path)) == [{"step": 1, "x": 0.5}, {"step": 2, "x": "nan"}]


def test_cutting_back_leaves_no_line_of_a_later_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for step in (1, 2, 3):
        run.append("metrics.jsonl", {"step": step})
        run.append("events.jsonl", {"step": step, "kind": "warning"})
        run.note(f"Step {step} reward 0.1")
    run.cut_back(2, keep=("events.jsonl",))
    assert [line["step"] for line in read_lines(run.folder / "metrics.jsonl")] == [1, 2]
    assert len(list(read_lines(run.folder / "events.jsonl"))) == 3
    assert (run.folder / "train.log").read_text().splitlines()[-1].startswith("Step 2")


def test_a_new_run_clears_what_an_earlier_one_left(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    write_json(run.folder / "config.json", {"steps": 1})
    run.append("metrics.jsonl", {"step": 1})
    (run.folder / "checkpoints" / "step-000001").mkdir()
    run.finish()
    assert run.done
    said: list[str] = []
    run.clear(said.append)
    run.clear(said.append)  # nothing is left to speak of
    assert said == [f"{run.folder}: replaces an earlier run, saved after step 1"]
    assert not run.done
    assert not list((run.folder / "checkpoints").iterdir())
    assert not list(read_lines(run.folder / "metrics.jsonl"))


@pytest.mark.parametrize("config", [None, {"model_type": "gpt2"}])
@pytest.mark.parametrize("name", ["final/thesis.tex", "checkpoints/mine", "tensorboard/events"])
def test_what_no_run_has_left_is_kept(
    tmp_path: Path, name: str, config: dict[str, str] | None
) -> None:
    run = Run(tmp_path)
    run.clear()  # an empty folder is any run's
    write_text(tmp_path / name, "dear reader")
    if config is not None:
        write_json(tmp_path / "config.json", config)
    with pytest.raises(ConfigError, match=f"holds {name}, which training there would delete"):
        run.clear()
    assert (tmp_path / name).exists()


def test_a_file_is_replaced_whole_or_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_cannot_be_written_or_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RookworldError, match="cannot be made"):
        Run(tmp_path / "file" / "run")
    with pytest.raises(RookworldError, match="no such file"):
        read_json(tmp_path / "absent.json")
    write_text(tmp_path / "bad.json", "{")
    with pytest.raises(RookworldError, match="cannot be read"):
        read_json(tmp_path / "bad.json")


def test_origin_says_what_is_needed_to_repeat_a_run() -> None:
    found = origin(seed=3, engine="stockfish")
    assert found["seed"] == 3
    assert {"version", "commit", "argv", "machine", "engine", "torch"} <= found.keys()
    json.dumps(found)
