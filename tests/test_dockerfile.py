"""The Dockerfile, as far as it can be checked without a Docker engine.

Laws: what is copied exists, is let in by .dockerignore, and is enough to build the wheel; images
are pinned; package lists are not kept; nothing runs as root. Left out: fetching of any kind.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """Every instruction and what follows it, comments left out and lines joined."""
    plain = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", plain)
    lines = [line for line in joined.splitlines() if line.strip()]
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            current = rest.split(" AS ")[1]
            found[current] = []
        found[current].append((name, rest))
    return found


def copied() -> list[str]:
    return [one for name, rest in instructions() if name == "COPY" for one in rest.split()[:-1]]


def test_what_is_copied_exists_and_is_let_in() -> None:
    let_in = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert let_in[0] == "*"
    for source in copied():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in let_in, source


def test_what_is_copied_is_enough_to_build_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for source in copied():
        target = tmp_path / "source" / source
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=ignored)
        else:
            shutil.copy(ROOT / source, target)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=tmp_path / "source", check=True, capture_output=True)
    assert len(list(tmp_path.glob("*.whl"))) == 1


def test_both_targets_are_there_and_run_as_a_user() -> None:
    found = stages()
    assert list(found) == ["base", "cpu", "cuda"]
    for name in ("cpu", "cuda"):
        last = dict(found[name])
        assert last["USER"] == "rookworld" and last["ENTRYPOINT"] == '["rookworld"]', name


def test_images_are_pinned_and_layers_hold_no_package_lists() -> None:
    for name, rest in instructions():
        assert name in {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
        image = rest.split()[0]
        if name == "FROM" and image != "base":
            assert re.fullmatch(r"python:3\.\d+-slim-\w+", image), image
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "apt-get update &&" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if name == "RUN" and "pip install" in rest:
            assert "-c constraints.txt" in rest


def test_the_extras_that_it_installs_are_there() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    asked = re.findall(r'"\.\[([\w,]+)\]"', TEXT)
    assert len(asked) == 2
    assert {name for names in asked for name in names.split(",")} <= set(extras)
