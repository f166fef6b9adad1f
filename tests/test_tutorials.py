"""Law: a tutorial is run, block by block, as its reader would; only sizes are smaller.

```sh blocks are run in order in a new folder, ```python blocks with a title are files. What is made
smaller stands in `SMALLER`, and must stand in the tutorial. ```sh gpu blocks are only read
(tests/test_doc_commands.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
STEPS = "--steps 2 --batch-size 2 --k-samples 2 --eval-policy-rows 4 --eval-environment-rows 4"
FEW = "--n-policy 4 --n-environment 4 --n-mates 4"
SMALLER: dict[str, dict[str, str]] = {
    "from-scratch": {
        "--n-layer 4 --n-embd 192 --n-head 6": "--n-layer 2 --n-embd 32 --n-head 2 --eval-rows 4",
        "--minutes 12": "--steps 4",
        "--steps 200 --batch-size 16": STEPS,
        "small/final --device cpu\n```\n\nRead": f"small/final --device cpu {FEW}\n```\n\nRead",
        "better/final --device cpu\n": f"better/final --device cpu {FEW}\n",
        # after four steps a law may fail, which the exit code says
        "small/final --device cpu\n```\n\nEvery": "small/final --device cpu || test $? = 1\n```\n",
    },
    "reward": {"--steps 100": STEPS, "--batch-size 4": "--batch-size 2 --k-samples 2"},
    "task": {"--minutes 3": "--steps 2 --batch-size 2", "--steps 50": STEPS},
    "report": {"--steps 60 --eval-every 20": f"{STEPS} --eval-every 1"},
    "several-gpus": {"--steps 20": f"{STEPS} --save-every 2"},
}
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def smaller(text: str, changes: dict[str, str]) -> str:
    for said, instead in changes.items():
        assert said in text, f"{said!r} is not in the tutorial any more"
        text = text.replace(said, instead)
    return text


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `rookworld`, `torchrun` and `python` are those of this checkout."""
    commands = {"rookworld": "-m rookworld", "torchrun": "-m torch.distributed.run", "python": ""}
    (tmp_path / "bin").mkdir()
    for name, module in commands.items():
        file = tmp_path / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        file.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_a_tutorial_can_be_followed(name: str, tmp_path: Path, shell: dict[str, str]) -> None:
    text = smaller((TUTORIALS / f"{name}.md").read_text(encoding="utf-8"), SMALLER[name])
    folder = tmp_path / "followed"
    folder.mkdir()
    for kind, options, code in BLOCK.findall(text):
        if title := re.search(r'title="([^"]+)"', options):
            (folder / title[1]).write_text(code, encoding="utf-8")
        elif kind == "sh" and not options.strip():
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", code],
                cwd=folder,
                env=shell,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_every_tutorial_is_followed() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == set(SMALLER)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, shell: dict[str, str]) -> None:
    """Its code cells in their order, without the one that installs."""
    cells = json.loads((TUTORIALS / "first-run.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    kept = "\n".join(one for one in code if not one.lstrip().startswith("%"))
    kept = smaller(kept, {"STEPS, PROMPTS, ROWS = 60, 16, 200": "STEPS, PROMPTS, ROWS = 2, 2, 8"})
    (tmp_path / "cells.py").write_text(kept, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=shell,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs" / "first" / "report.html").exists()


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads((TUTORIALS / "first-run.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
