"""The wheel: whole outside a clone, with metadata that are true."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml

import rookworld

ROOT = Path(__file__).parents[1]
PACKAGE = Path(str(rookworld.__path__[0]))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder / "unpacked")
    return folder / "unpacked"


def outside(wheel: Path, folder: Path, *args: str) -> str:
    """What a command prints, run from the wheel in a folder that is no clone."""
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-m", "rookworld", *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    ours = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    theirs = {str(p.relative_to(wheel / "rookworld")) for p in (wheel / "rookworld").rglob("*")}
    assert ours <= theirs
    sweeps = {
        f"assets/configs/{p.relative_to(ROOT / 'configs')}" for p in ROOT.glob("configs/**/*.toml")
    }
    assert sweeps <= theirs


def test_the_built_in_sweeps_are_there_by_name_outside_a_clone(wheel: Path, tmp_path: Path) -> None:
    assert len(outside(wheel, tmp_path, "sweep", "r4", "--dry-run").splitlines()) == 12


def test_embedded_rows_and_model_are_there_outside_a_clone(wheel: Path, tmp_path: Path) -> None:
    shown = outside(wheel, tmp_path, "train", "--dry-run", "--preset", "plain")
    assert "rows: 3,974 P, 4,000 A" in shown and "compact tokenizer" in shown


def metadata(wheel: Path) -> Message:
    (file,) = wheel.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text(encoding="utf-8"))


def test_the_metadata_agree_with_the_citation_and_the_versions_tested(wheel: Path) -> None:
    found = metadata(wheel)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert found["Author"] in re.findall(r"name: (.+)", citation)
    assert f"version: {found['Version']}" in citation
    assert found["License-Expression"] == "GPL-3.0-or-later"
    said = set(found.get_all("Classifier", []))
    assert {f"Programming Language :: Python :: 3.{n}" for n in (11, 12, 13)} <= said
    names = {url.split(",")[0] for url in found.get_all("Project-URL", [])}
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= names


def test_the_version_is_released_in_the_changelog(wheel: Path) -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (\S+)", changes, flags=re.MULTILINE)
    assert heads[:2] == ["Unreleased", metadata(wheel)["Version"]]


def test_extras_are_pinned_where_tests_need_them() -> None:
    """What the tests install is what constraints.txt pins."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["optional-dependencies"]["dev"]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    names = [re.split(r"[<>=\[]", one)[0].lower() for one in needed]
    assert [name for name in names if f"{name}==" not in pinned] == []


def test_issue_templates_ask_for_something() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for path in sorted(folder.glob("[!c]*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path
        fields = [one for one in form["body"] if one["type"] != "markdown"]
        assert all(one["attributes"]["label"] for one in fields), path
        assert len({one["id"] for one in fields}) == len(fields), path
        assert any(one.get("validations", {}).get("required") for one in fields), path
