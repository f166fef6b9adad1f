"""Law: every command that a page shows can be typed. Its flags exist and their values are valid.

Commands stand in ``` blocks, in indented blocks and in `code`. They are read by the real command
line up to where work would begin; words in capitals and with `…` are the reader's to fill in. What
the commands do is tested elsewhere: tests/test_tutorials.py runs those of the tutorials.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rookworld.cli.dispatch import COMMANDS, main
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import flat_fields

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "train.sh")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "configs").rglob("*.toml")),
]
BREAKS = {"|", "||", "&&", "&", ";", "done", ">", "<"}
"""Where the shell ends a command."""


class Understood(BaseException):
    """The command line has been read to its end."""


def code_lines(text: str) -> Iterator[str]:
    """Lines of ``` and indented blocks, joined at their backslashes, and pieces of `code`."""
    fenced = False
    block: list[str] = []
    prose: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("```"):
            fenced = not fenced
        elif fenced or re.match(r"(?: {4}|\t|#  )", line):
            block.append(line.removeprefix("#").strip())
        else:
            prose.append(line)
    yield from re.sub(r"\\\n", " ", "\n".join(block)).splitlines()
    for span in re.findall(r"`([^`]+)`", "\n".join(prose)):
        line = " ".join(span.split())
        yield line if " --" in line else f"{line} --help"  # a mention, which need not be whole


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `rookworld …` in a page."""
    for line in code_lines(text):
        if loop := re.search(r"for (\w+) in (\S+)", line):
            line = line.replace(f"${loop[1]}", loop[2])
        for found in re.finditer(r"(?:^|[\s/;&(])rookworld ", line):
            lexer = shlex.shlex(line[found.end() :], posix=True, punctuation_chars="|&;<>()")
            lexer.whitespace_split = True
            lexer.commenters = "#"
            try:
                words = list(lexer)
            except ValueError:  # the quote began before the command: ssh HOST "…"
                words = line[found.end() :].replace('"', " ").split()
            end = next((i for i, word in enumerate(words) if word in BREAKS), len(words))
            if is_typed(words[:end]):
                yield [word for word in words[:end] if "…" not in word]


def is_typed(words: list[str]) -> bool:
    """Whether it is one command and no list of several, such as `eval · score`."""
    return bool(words) and "·" not in words and re.fullmatch(r"-?-?[a-z]+", words[0]) is not None


def filled(words: list[str]) -> list[str]:
    """Something where a variable of the shell or the reader would put it."""
    return [re.sub(r"\$\(?[\w]+\)?", "1", word).strip("[]") for word in words]


@cache
def settings_modules() -> tuple[Any, ...]:
    names = {where.split(":")[0] for where, _ in COMMANDS.values()}
    return tuple(import_module(f"rookworld.cli.{name}") for name in sorted(names))


def refusal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command line says against a command; empty if it would begin."""
    with monkeypatch.context() as patch:
        for module in settings_modules():
            if hasattr(module, "parse"):
                patch.setattr(module, "parse", stop_behind(module.parse))
        try:
            code = main(words)
        except Understood:
            return ""
        except SystemExit as stop:
            code = int(stop.code or 0)
    return "" if code == 0 else capsys.readouterr().err


def stop_behind(parse: Any) -> Any:
    def read(*args: Any, **options: Any) -> Any:
        parse(*args, **options)
        raise Understood

    return read


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_can_be_typed(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    refused = []
    for words in commands(page.read_text(encoding="utf-8")):
        said = refusal(filled(words), monkeypatch, capsys)
        if said:
            refused.append(f"rookworld {' '.join(words)}\n    {said.strip()}")
    assert refused == []


def test_a_command_with_a_wrong_flag_or_value_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (
        "Prose and `rookworld train --step 3`.\n\n    rookworld train --steps \\\n        many\n\n"
        "```sh\nSTEPS=1 rookworld eval nano --json | head && rookworld swep\n```\n"
        "    torchrun -m rookworld data generate --task P --rows 10  # --flag\n"
    )
    found = list(commands(page))
    assert found == [
        ["train", "--steps", "many"],
        ["eval", "nano", "--json"],
        ["swep"],
        ["data", "generate", "--task", "P", "--rows", "10"],
        ["train", "--step", "3"],
    ]
    said = [refusal(words, monkeypatch, capsys) for words in found]
    assert [bool(one) for one in said] == [True, False, True, True, True]


def test_the_pages_do_show_commands() -> None:
    shown = [words[0] for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert {"train", "check", "pretrain", "eval", "data", "sweep", "report"} <= set(shown)
    assert len(shown) > 80


def test_the_guide_to_options_has_every_one_of_them() -> None:
    """And none that is gone; under each a word on when it pays."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    guide = page.split("## Every option")[1]
    rows = [line.split("|") for line in guide.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"--([a-z-]+)", row[1])}
    known = {name.replace("_", "-") for name in flat_fields(TrainSettings)}
    assert named == known
