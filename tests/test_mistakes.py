"""Mistakes of users and machines, by the dozen: one line each, exit code 2, no traceback.

In process, through the one door. What the files hold is what people and crashes leave: cut, empty,
of another kind, nested without end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rookworld.cli.dispatch import main
from rookworld.data.sources import write_rows
from tiny_training import tiny_rows

DEEP = 200_000
HUGE = "9" * 20
AT_ONCE_S = 20.0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, tiny_rows())
    return path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake writes nothing where the tests run, and no hub is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def go_to_work(number: int, frame: object) -> None:
    raise AssertionError("a command went to work on what it should refuse")


def assert_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], expected: str = "", code: int = 2
) -> None:
    signal.signal(signal.SIGALRM, go_to_work)
    signal.setitimer(signal.ITIMER_REAL, AT_ONCE_S)
    try:
        found = main(args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("rookworld:")]
    assert (found, len(lines)) == (code, 1), shown.err
    assert "Traceback" not in shown.err and len(lines[0]) < 600
    assert expected in lines[0], lines[0]


# --- flags --------------------------------------------------------------------------------------

TRAIN = [
    *("--batch-size 0", f"--batch-size {HUGE}", "--batch-size -3", "--batch-size 1.5"),
    *("--batch-size many", "--k-samples 0", "--k-samples 99999999999", "--k-samples 1e3"),
    *("--steps 0", "--steps -1", f"--steps {HUGE}", "--steps nan", "--lr nan", "--lr inf"),
    *("--lr -1", "--lr 1e308", "--lr fast", "--clip-range 0", "--clip-range 1e308"),
    *("--clip-range nan", "--kl-coef nan", "--kl-coef -1", "--kl-coef 1e308", "--seed -1"),
    *(f"--seed {HUGE}{HUGE}", "--temperature 0", "--temperature -1", "--temperature 1e308"),
    *("--top-p 0", "--top-p 1.1", "--top-k -1", f"--top-k {HUGE}", "--mix-env-ratio 2"),
    *("--mix-env-ratio nan", "--device tpu", "--device cuda:99", "--device cuda:x"),
    *("--dtype float8", "--loss bce", "--judge nobody"),
    *("--engine /no/such/engine --judge stockfish",),
    *("--max-new-tokens 0", "--max-new-tokens 100000", "--max-new-tokens 99999999999"),
    *("--reward-shaping cubic", "--p-weights best -1", "--p-weights bset 1", "--p-malformed nan"),
    *("--p-malformed 1", "--preset big", "--config absent.toml", "--model absent/model"),
    *("--data absent.parquet", "--held-out absent.parquet", f"--micro-tokens {HUGE}"),
    *("--save-every 0", f"--updates-per-rollout {HUGE}", f"--score-workers {HUGE}"),
    *(f"--eval-policy-rows {HUGE}", "--weight-decay 1e308", "--clip-norm 1e400", "--keep 0"),
    *("--gamma 2", f"--nodes {HUGE}", "--out /dev/null/run", "--stepz 3", "--no-such", "stray"),
    *("--lr", "--recovery-lr-factor 0", "--target-kl 0"),
]  # fmt: skip


@pytest.mark.parametrize("flags", TRAIN)
def test_bad_flags_of_train(
    flags: str, tiny_folder: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["--model", str(tiny_folder), "--data", str(rows), "--held-out", str(rows)]
    args = ["train", *usual, "--device", "cpu", "--eval-mates", "0", "--dry-run", *flags.split()]
    assert_one_line(capsys, args)


OTHERS = [
    *("pretrain --n-embd 1000000000", "pretrain --n-embd 0", "pretrain --n-layer 99999999"),
    *("pretrain --n-head 7", f"pretrain --batch-size {HUGE}", "pretrain --n-positions 9999999999"),
    *("pretrain --lr 1e308", "pretrain --tokenizer none", "pretrain --data absent.npz"),
    *("eval", "eval nano nano2", "eval nano --suite chess", "eval nano --n-policy 0"),
    *(f"eval nano --batch-size {HUGE}", "eval nano --temperature nan", "eval nano --device tpu"),
    *("eval nano --temperature -1", "eval nano --suite puzzles --puzzles absent.csv"),
    *("data generate --task X", "data generate --task A --rows -1 --out a.parquet"),
    *("data generate --task A --rows 9 --out a.csv", "data generate --task A --shard 3/2"),
    *(f"data generate --task A --rows 5 --workers {HUGE} --out a.parquet", "data import"),
    *("data import embedded --split 1/2 --out a.parquet", "data show embedded --rows -1"),
    *("data show embedded:all", "data pack absent.jsonl", "data mine", "score"),
    *("report", "report absent", "analyze absent", "export nano nano", "uci --device tpu"),
    *("report . --port 99999", "inspect --batch-size 0", "check absent/model"),
]  # fmt: skip


@pytest.mark.parametrize("line", OTHERS)
def test_bad_flags_of_other_commands(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line(capsys, line.split())


@pytest.mark.parametrize("line", ["sweep", "sweep --parallel 2", "sweep --dry-run"])
def test_a_sweep_has_to_be_named(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = "name a file, or a built-in sweep: grid-432, r4, random-48"
    assert_one_line(capsys, line.split(), listed)


# --- TOML ---------------------------------------------------------------------------------------

TOML: dict[str, bytes] = {
    "cut": b'steps = 3\nlr = "',
    "nothing but brackets": b"a = " + b"[" * DEEP,
    "deep tables": b"a = " + b"{b=" * DEEP,
    "bytes": bytes(range(256)),
    "utf-16": "steps = 3".encode("utf-16"),
    "an unknown key": b"stepz = 3",
    "a wrong type": b'steps = "many"',
    "a list for a number": b"steps = [3]",
    "a date": b"steps = 2026-01-01",
    "beyond bounds": b"steps = 0",
    "a huge number": b"batch_size = 99999999999999999999",
    "not a number": b"lr = nan",
    "a table for a number": b"[steps]\na = 1",
    "a key twice": b"steps = 3\nsteps = 4",
    "a path with a zero": b'out = "a\\u0000b"',
}


EXPECTED = {"train --dry-run --config": "", "sweep": "bad.toml"}
"""A bound names the flag."""


@pytest.mark.parametrize("name", TOML)
@pytest.mark.parametrize("command", EXPECTED)
def test_bad_toml_files(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_bytes(TOML[name])
    assert_one_line(capsys, [*command.split(), "bad.toml"], EXPECTED[command])


def test_a_byte_order_mark_is_no_mistake(
    tmp_path: Path, tiny_folder: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Editors of Windows put one at the beginning."""
    settings = f"model = {json.dumps(str(tiny_folder))}\ndata = [{json.dumps(str(rows))}]\n"
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf" + settings.encode())
    assert main(["train", "--config", "a.toml", "--dry-run", "--device", "cpu"]) == 0


# --- models -------------------------------------------------------------------------------------


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def overwrite(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return overwrite


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


MODELS: dict[str, Callable[[Path], None]] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "an empty config": write("config.json", b""),
    "a config that is a list": write("config.json", b"[]"),
    "a config nested without end": write("config.json", b"[" * DEEP),
    "a config in bytes": write("config.json", bytes(range(256))),
    "another model": configured(model_type="llama"),
    "a width of a billion": configured(n_embd=10**9),
    "a billion layers": configured(n_layer=10**9),
    "a billion positions": configured(n_positions=10**9),
    "a vocabulary of a billion": configured(vocab_size=10**9),
    "an inner width of a billion": configured(n_inner=10**9),
    "heads that do not divide": configured(n_head=7),
    "a width in words": configured(n_embd="wide"),
    "no width": configured(n_embd=None),
    "an epsilon that is no number": configured(layer_norm_epsilon=float("nan")),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty weights": write("model.safetensors", b""),
    "cut weights": cut("model.safetensors"),
    "weights in words": write("model.safetensors", b"hello" * 99),
    "a header that lies": write("model.safetensors", b"\xff" * 64),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a cut tokenizer": cut("tokenizer.json"),
    "an empty tokenizer": write("tokenizer.json", b"{}"),
    "a tokenizer nested without end": write("tokenizer.json", b"[" * DEEP),
}


@pytest.mark.parametrize("name", MODELS)
def test_bad_model_folders(
    name: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    MODELS[name](folder)
    assert_one_line(capsys, ["export", str(folder), "--out", "out"], "model")
    assert not (tmp_path / "out").exists()


# --- data ---------------------------------------------------------------------------------------

DATA: dict[str, bytes] = {
    "empty.jsonl": b"",
    "empty.parquet": b"",
    "empty.txt": b"\n\n",
    "words.parquet": b"PAR1 hello PAR1",
    "words.jsonl": b"hello\n",
    "nested.jsonl": b"[" * DEEP + b"\n",
    "objects.jsonl": b'{"fen": ' * DEEP + b"\n",
    "digits.jsonl": b'{"fen": ' + b"9" * 9999 + b"}\n",
    "null.jsonl": b"null\n",
    "bytes.jsonl": bytes(range(256)),
    "other.jsonl": b'{"hello": 1}\n',
    "words.txt": b"hello\n",
    "zeros.txt": b"\x00" * 999,
    "words.txt.xz": b"hello",
    "cut.txt.xz": b"\xfd7zXZ\x00\x00\x04",
    "words.npz": b"PK hello",
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(DATA[name])
    packed = name.endswith("npz")
    args = ["data", "pack", name] if packed else ["data", "import", name, "--out", "a.jsonl"]
    assert_one_line(capsys, args, name)


def test_a_damaged_parquet_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its end, which names the columns, is whole; what it holds is not."""
    write_rows(tmp_path / "a.parquet", tiny_rows(20, 0))
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[8:300] = bytes(292)
    (tmp_path / "a.parquet").write_bytes(content)
    assert_one_line(capsys, ["data", "show", "a.parquet"], "a.parquet: a damaged Parquet file")


@pytest.mark.parametrize("text", ["[" * DEEP, "null", "[]", '{"row": 5, "completion": ""}', "{}"])
def test_bad_answers_to_score(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.jsonl").write_text(text)
    assert_one_line(capsys, ["score", "answers.jsonl"], "answers.jsonl:1")


# --- targets ------------------------------------------------------------------------------------

TARGETS = [
    *("data import ROWS --out {}/a.jsonl", "data import ROWS --out {}/a.parquet"),
    *("data import ROWS --out {}/a.txt", "data export ROWS --out {}/a.txt.xz"),
    *("data export ROWS --out {}/a.parquet", "data pack ROWS --out {}/a.npz"),
    *("data show ROWS --svg {}/a.svg", "export MODEL --out {}/model"),
    *("data generate --task A --rows 3 --workers 1 --out {}/a.parquet",),
    *("train --dry-run --steps 1 --model MODEL --data ROWS --held-out ROWS --out {}/run",),
    *("pretrain --data ROWS --out {}/run", "report RUN --out {}/a.html"),
    *("data mine MODEL ROWS --out {}/a.npz",),
    *("eval MODEL --suite selfplay --games 2 --max-plies 4 --pgn {}/a.pgn",),
]  # fmt: skip


@pytest.mark.parametrize("where", ["file", "n" * 300, "file/deeper"])
@pytest.mark.parametrize("line", TARGETS)
def test_targets_that_cannot_be_written(
    line: str,
    where: str,
    tiny_folder: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "run").mkdir()
    named = {"ROWS": str(rows), "MODEL": str(tiny_folder), "RUN": "run"}
    args = [named.get(word, word.format(where)) for word in line.split()]
    assert_one_line(capsys, args)
    assert (tmp_path / "file").read_text() == "in the way"
