"""docs/play.md is true: its commands run, its snippets parse, its table lists every option."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rookworld.cli.dispatch import main
from rookworld.cli.flags import leading, parse
from rookworld.cli.play import UciSettings
from rookworld.cli.terminal import PlaySettings
from rookworld.evaluation.matches import MatchSettings, SelfplaySettings
from rookworld.uci import OPTIONS

PAGE = (Path(__file__).parents[1] / "docs" / "play.md").read_text(encoding="utf-8")
KINDS = {
    "play": PlaySettings,
    "uci": UciSettings,
    "match": MatchSettings,
    "selfplay": SelfplaySettings,
}


def commands() -> list[list[str]]:
    lines = re.findall(r"^    rookworld (.*)$", PAGE, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def snippet(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_every_command_is_shown() -> None:
    assert {command for command, *_ in commands()} == set(KINDS)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_flag_that_is_shown_exists(words: list[str]) -> None:
    command, *args = words
    parse(KINDS[command], leading(args)[1], command=command, default=KINDS[command]())


def runnable() -> list[Any]:
    """Commands, those that need Stockfish marked so."""
    marks = [[pytest.mark.engine] if "stockfish" in words else [] for words in commands()]
    pairs = zip(commands(), marks, strict=True)
    return [pytest.param(words, marks=mark, id=" ".join(words)) for words, mark in pairs]


@pytest.mark.parametrize("words", runnable())
def test_every_command_runs(
    words: list[str],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it is written; games are fewer and shorter."""
    shutil.copytree(tiny_folder, tmp_path / "runs" / "a" / "checkpoints" / "step-000100")
    monkeypatch.chdir(tmp_path)
    if words[0] in ("match", "selfplay"):
        words = [*words, "--games", "2", "--max-plies", "6"]
    Path("typed").write_text("uci\ngo\nquit\n" if words[0] == "uci" else "e5\ne4\nquit\n")
    with Path("typed").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(words) == 0
    shown = capsys.readouterr().out
    expected = {"uci": "bestmove ", "play": ": 1", "match": "match/elo", "selfplay": "legal_plies"}
    assert expected[words[0]] in shown
    assert Path("games.pgn").exists() == ("--pgn" in words)


def test_the_engines_file_of_cute_chess_parses() -> None:
    (engine,) = json.loads(snippet("json"))
    assert engine["protocol"] == "uci"
    program, command, model, *flags = shlex.split(engine["command"])
    assert (program, command, model) == ("rookworld", "uci", "nano")
    assert parse(UciSettings, flags, command="uci", default=UciSettings()).sides


def test_the_options_for_lichess_bot_are_known() -> None:
    options = textwrap.dedent(snippet("yaml").split("uci_options:\n")[1].split("challenge")[0])
    pairs = [line.split(": ") for line in options.strip().splitlines()]
    assert {"Move Overhead", "Threads", "Hash"} <= {name for name, _ in pairs}
    for name, value in pairs:
        assert not OPTIONS[name].fault(value)


def test_the_script_names_the_command() -> None:
    assert snippet("sh").splitlines() == ["#!/bin/sh", 'exec rookworld uci nano "$@"']
    compile(snippet("python"), "docs/play.md", "exec")


def test_the_table_has_every_option_and_its_default() -> None:
    rows = PAGE.split("## UCI options")[1].split("\n\n")[1].splitlines()[2:]
    found = {row.split("|")[1].strip(" `"): row.split("|")[2].strip() for row in rows}
    defaults = {name: option.default or "empty" for name, option in OPTIONS.items()}
    assert found == defaults | {"Threads": "the machine's cores"}
