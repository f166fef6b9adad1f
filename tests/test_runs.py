"""The run folder: whole files, crash-safe lines, cut back on resume."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rookworld.runtime.atomic_files import write_json, write_text
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_folder import Run, origin, read_json, read_lines
from rookworld.runtime.run_lock import Lock, holder


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
    run.clear(said.append, overwrite=True)
    run.clear(said.append)  # nothing is left to speak of
    assert said == [f"{run.folder}: replaces an earlier run"]
    assert not run.done
    assert not list((run.folder / "checkpoints").iterdir())
    assert not list(read_lines(run.folder / "metrics.jsonl"))


@pytest.mark.parametrize(
    "work", ["metrics.jsonl", "DONE", "checkpoints/step-000002/x", "checkpoints/best-000004/x"]
)
@pytest.mark.parametrize("resume", [False, True])
def test_the_work_of_a_run_is_deleted_only_to_overwrite_it(
    tmp_path: Path, work: str, resume: bool
) -> None:
    run = Run(tmp_path)
    write_json(tmp_path / "config.json", {"steps": 1})
    write_text(tmp_path / work, "work")
    with pytest.raises(ConfigError, match=r"resume.*--overwrite deletes it and starts over"):
        run.clear(resume=resume)
    assert (tmp_path / work).exists()
    run.clear(overwrite=True, resume=resume)
    assert not (tmp_path / work).exists()


def test_a_run_that_saved_its_beginning_alone_is_begun_again(tmp_path: Path) -> None:
    run, said = Run(tmp_path), list[str]()
    write_json(tmp_path / "config.json", {"steps": 1})
    (tmp_path / "checkpoints" / "step-000000").mkdir()
    (tmp_path / "checkpoints" / "best").symlink_to("step-000000")
    run.append("eval.jsonl", {"step": 0})
    run.clear(said.append, resume=True)
    assert said == [f"{tmp_path}: no run to resume; a new one begins"]
    assert not (tmp_path / "eval.jsonl").exists()


def test_a_folder_is_trained_in_by_one_at_a_time(tmp_path: Path) -> None:
    first, second = Run(tmp_path), Run(tmp_path)
    name = f"process {os.getpid()} on {platform.node()}"
    taken = pytest.raises(RookworldError, match=f"{name} is training here")
    with first.in_use(), taken, second.in_use():
        pass
    with second.in_use():
        assert (tmp_path / ".lock").read_text() == name + "\n"


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, time; from rookworld.runtime.run_lock import Lock;"
        "held = Lock.take(pathlib.Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    )
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert Lock.take(path) is None
        assert holder(path) == f"process {child.pid} on {platform.node()}"
        child.kill()
        child.wait()
    mine = Lock.take(path)
    assert mine is not None
    mine.release()


@pytest.mark.parametrize(
    "line",
    ['{"step": "x"}', '{"step": null}', '{"step": 1e999}', "[" * 100_000, "5", '{"step": []}'],
)
def test_cutting_back_survives_odd_lines(tmp_path: Path, line: str) -> None:
    run = Run(tmp_path)
    run.append("metrics.jsonl", {"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    run.note("Step ² of a stranger")
    run.cut_back(1)
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"step": 1}]


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
