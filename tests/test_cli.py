"""The one door: help without torch, one line for a mistake, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from rookworld.cli.dispatch import COMMANDS, main
from rookworld.cli.display import bar, say, show
from rookworld.cli.help import TAKES
from rookworld.data.rows import row_text
from rookworld.data.sources import load_rows, training_rows, write_rows
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import EnvironmentRow, PolicyRow


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rookworld ")


@pytest.mark.parametrize(
    "command", ["train", "pretrain", "evolve", "eval", "score", "play", "uci", "match", "selfplay"]
)
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom rookworld.cli.dispatch import main\n"
        f"try:\n    main([{command!r}, '--help'])\nexcept SystemExit as stop:\n"
        "    assert not stop.code\nassert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"rookworld {command}" in done.stdout


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "--stpes", "3"], "did you mean '--steps'"),
        (["train", "--steps", "0"], "--steps 0: must be positive"),
        (["train", "--model", "no/such/folder/here"], "no model folder"),
        (["eval"], "name a model"),
        (["score", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["data", "shwo"], "did you mean 'show'"),
        (["data", "frobnicate"], "there are generate, import, export, show, pack, mine"),
        (["data", "show", "a.jsonl", "b.jsonl"], "one source at a time, not a.jsonl b.jsonl"),
        (["data", "generate", "--task", "A", "--out", "rows.csv"], "rows.csv"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert len([line for line in shown.err.splitlines() if line.startswith("rookworld:")]) == 1
    assert shown.out == ""


def test_score_prints_one_json_line_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in load_rows("embedded:test") if isinstance(row, PolicyRow))
    gold = {"row": row_text(row), "completion": POLICY.answer(row, "padded")}
    junk = {"row": row_text(row), "completion": "no idea"}
    file = tmp_path / "answers.jsonl"
    file.write_text(f"{json.dumps(gold)}\n{json.dumps(junk)}\n")
    assert main(["score", str(file)]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["reward"] == 1.0
    assert second["reward"] == -0.3
    assert set(first) == {"reward", "parts", "reason"}


def test_score_says_that_a_file_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.jsonl").write_text("\n")
    assert main(["score", str(tmp_path / "answers.jsonl")]) == 2
    assert "answers.jsonl: no answers in it" in capsys.readouterr().err


def test_score_names_the_line_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "answers.jsonl"
    wrong = '{"row": "P: nonsense", "completion": ""}\n'
    for blank, number in (("", 1), ("\n  \n", 3)):
        file.write_text(blank + wrong)
        assert main(["score", str(file)]) == 2
        assert f"{file}:{number}: not a gold row" in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", StringIO(blank + wrong))
        assert main(["score", "-"]) == 2
        assert f"-:{number}: not a gold row" in capsys.readouterr().err


def test_data_show_prints_rows_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "embedded:test", "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("P: ") >= 2
    assert "A/mate" in shown


def test_data_pack_takes_every_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = load_rows("embedded:test")
    policy = [row for row in rows if isinstance(row, PolicyRow)]
    environment = [row for row in rows if isinstance(row, EnvironmentRow)]
    one, two, both = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "both"))
    write_rows(one, policy[:2])
    write_rows(two, policy[2:5])
    write_rows(both, [*policy[5:6], *environment[:4]])
    out = tmp_path / "rows.npz"
    assert main(["data", "pack", str(one), str(two), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 5 rows")
    assert main(["data", "pack", str(out), str(both), "--out", str(out)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" of ")[0] for line in shown] == [
        f"{tmp_path / 'rows-P.npz'}: 6 rows",
        f"{tmp_path / 'rows-A.npz'}: 4 rows",
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train", ["[--preset NAME] [--config FILE]", "GRPO on analysis"]),
        ("pretrain", ["[--preset NAME] [--config FILE]", "Flags win over the file"]),
        ("check", ["check [MODEL] [--preset", "one line a law"]),
        ("overfit", ["overfit [--preset", "three criteria on one fixed batch"]),
        ("inspect", ["inspect [--preset", "side by side with the truth"]),
        ("eval", ["eval MODEL [MODEL"]),
        ("score", ["score FILE"]),
        ("analyze", ["analyze RUN [RUN"]),
        ("report", ["report RUN [RUN"]),
        ("sweep", ["sweep FILE"]),
        ("uci", ["uci [MODEL]"]),
        ("play", ["play [MODEL]", "--color"]),
        ("match", ["match A B", "--sprt"]),
        ("selfplay", ["selfplay MODEL"]),
        ("export", ["export MODEL"]),
        ("data pack", ["data pack [SOURCE"]),
        ("data mine", ["data mine MODEL SOURCE"]),
    ],
)
def test_help_shows_what_else_a_command_takes(
    command: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert not stop.value.code
    head = " ".join(capsys.readouterr().out.split("╭")[0].split())
    assert all(text in head for text in expected), head
    if command in ("check", "overfit", "inspect"):
        assert "GRPO on analysis" not in head


def test_every_command_with_words_before_its_flags_is_one() -> None:
    assert {name.split()[0] for name in TAKES} == set(COMMANDS)


def test_names_between_colons_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    say("embedded:train: rows")
    show("embedded:train: rows")
    shown = capsys.readouterr()
    assert shown.err == shown.out == "embedded:train: rows\n"


def test_a_bar_says_what_goes_on_between_two_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookworld.cli.display.PLAIN_EVERY_S", 0.0)
    with bar("training") as progress:
        progress.note("evaluating: analyses 64/600")
    assert capsys.readouterr().err == "training: evaluating: analyses 64/600\n"


def test_reading_rows_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookworld.data.sources.TOLD_EVERY", 2)
    rows = [row for row in load_rows("embedded:test") if isinstance(row, PolicyRow)]
    write_rows(tmp_path / "a.jsonl", rows[:5])
    write_rows(tmp_path / "b.jsonl", rows[5:8])
    told: list[int] = []
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    found = training_rows(sources, lambda done, total: told.append(done))
    assert len(found) == 8 and told == [2, 4, 7]
