"""Rows from files, the package and the hub; import with its repairs and its side file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import chess
import pytest

from rookworld.data.files import write_records
from rookworld.data.importing import ImportSettings, import_rows
from rookworld.data.rows import repair_row, row_record, row_text
from rookworld.data.sources import EMBEDDED, load_rows, write_rows
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.tasks.environment import KINDS, transition
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Row, legal_moves

BLACK = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
P_WHITE = PolicyRow(
    chess.STARTING_FEN, ("e2e4", "d2d4", "g1f3", "c2c4", "g2g3"), (30, 25, 20, 1, 0)
)
P_BLACK = PolicyRow(BLACK, ("c7c5", "e7e5", "e7e6", "c7c6", "a7a5"), (-20, -25, -30, -31, -90))
A_FIRST = transition(chess.STARTING_FEN, "d2d4")
A_ILLEGAL = transition(BLACK, "e2e4", ("e2e4",))
ROWS: list[Row] = [P_WHITE, P_BLACK, A_FIRST, A_ILLEGAL]

# As public rows have it: moves in any order, and for Black the worst of them as B.
PUBLIC_BLACK = (
    f"P: {BLACK:90}M: {'e7e5 a7a5 c7c5 e7e6 c7c6':30}E: {'-0.25 -0.9 -0.2 -0.3 -0.31':40}B: a7a5"
)


def ignored(rows: int) -> None:
    """Progress that nobody watches."""


@pytest.mark.parametrize("name", ["rows.txt", "rows.jsonl", "text.jsonl", "text.parquet"])
def test_any_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "rows.txt":
        path.write_text("\n".join(map(row_text, ROWS)) + "\n\n")
    elif name == "rows.jsonl":
        path.write_text("".join(json.dumps(row_record(row)) + "\n" for row in ROWS))
    elif name == "text.jsonl":
        path.write_text("".join(json.dumps({"text": row_text(row)}) + "\n" for row in ROWS))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": [row_text(row) for row in ROWS]}), path)
    assert load_rows(path) == ROWS
    assert load_rows(str(path), limit=2) == ROWS[:2]
    assert load_rows(tmp_path) == ROWS


def test_parquet_keeps_rows_exactly(tmp_path: Path) -> None:
    deep = PolicyRow(P_WHITE.fen, P_WHITE.moves, P_WHITE.cp, 21)
    write_rows(tmp_path / "p.parquet", [deep])
    write_rows(tmp_path / "a.parquet", [A_FIRST, A_ILLEGAL])
    assert load_rows(tmp_path) == [A_FIRST, A_ILLEGAL, deep]
    with pytest.raises(DataError, match="A and P rows cannot go into one Parquet file"):
        write_rows(tmp_path / "both.parquet", ROWS)
    with pytest.raises(DataError, match=r"written to \.parquet or \.jsonl"):
        write_records(tmp_path / "rows.csv", [], {})


def test_import_repairs_what_is_known_and_keeps_the_rest_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "public.txt"
    lost = row_text(A_FIRST).replace("+0.001+", "+0.5+")
    texts = [PUBLIC_BLACK, row_text(P_WHITE), lost.removeprefix("A: "), "P: nonsense", "hello"]
    texts += [row_text(A_ILLEGAL) + "<|endoftext|>", row_text(P_WHITE, "compact")]
    texts += [row_text(A_FIRST).replace("+d2d4+d2d4+", "+d2d4+e2e4+")]
    source.write_text("".join(text + "\n" for text in texts))
    report = import_rows(
        ImportSettings(sources=(str(source),), out=tmp_path / "own.parquet"), ignored
    )
    p_file, a_file = tmp_path / "own-P.parquet", tmp_path / "own-A.parquet"
    assert report.files == {str(a_file): 2, str(p_file): 2}
    assert load_rows(p_file) == [P_BLACK, P_WHITE]
    assert load_rows(a_file) == [A_FIRST, A_ILLEGAL]
    assert (report.repeated, report.malformed) == (1, 3)
    assert report.side_file is not None
    aside = [json.loads(line) for line in Path(report.side_file).read_text().splitlines()]
    assert [bad["content"] for bad in aside] == ["P: nonsense", "hello", texts[-1]]
    assert aside[0]["place"] == f"{source}:4"
    assert "1 P rows with Black to move" in report.notes[0]
    counted = [note.split(" ")[0] for note in report.notes]
    assert counted == ["1", "1", "1", "3", "malformed", "1"]
    with caplog.at_level(logging.WARNING):
        load_rows(source)
    assert len(caplog.records) == 4 and "3 malformed rows left out" in caplog.text


def test_rows_with_commas_are_imported_and_said(tmp_path: Path) -> None:
    """The form in which rows stand in prose; an answer like that stays malformed."""
    answer = "M: e2e4,d2d4,g1f3,c2c4,b1c3 E: 0.3,0.2,0.1,0.2,0.1 B: e2e4"
    source = tmp_path / "prose.jsonl"
    texts = [f"P: {chess.STARTING_FEN} {answer}", f"P: {chess.STARTING_FEN}\n{answer}"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = import_rows(
        ImportSettings(sources=(str(source),), out=tmp_path / "rows.jsonl"), lambda count: None
    )
    assert done.malformed == 0 and done.repeated == 1
    assert any("2 rows with commas" in note for note in done.notes)
    (row,) = load_rows(tmp_path / "rows.jsonl")
    assert isinstance(row, PolicyRow)
    assert row.moves[0] == "e2e4" and row.cp == (30, 20, 20, 10, 10)
    assert POLICY.parse(answer.removeprefix("M: ")).fault is not None


def test_import_splits_by_position_and_writes_text(tmp_path: Path) -> None:
    boards = [chess.Board() for _ in range(40)]
    for number, board in enumerate(boards):
        for move in list(board.legal_moves)[number % 20 :][:1]:
            board.push(move)
        if number >= 20:
            board.push(next(iter(board.legal_moves)))
    rows = [transition(board.fen(), next(iter(legal_moves(board.fen())))) for board in boards]
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = ImportSettings(
        sources=(str(tmp_path / "rows.jsonl"),), out=tmp_path / "own.txt", split="50/25/25"
    )
    report = import_rows(settings, ignored)
    assert report.repeated == 0 and report.side_file is None and report.notes == ()
    names = ["own-train.txt", "own-validation.txt", "own-test.txt"]
    assert [Path(name).name for name in report.files] == names
    parts = [load_rows(name) for name in report.files]
    assert sorted(row.fen for part in parts for row in part) == sorted(row.fen for row in rows)


@pytest.mark.parametrize("split", ["90/10", "a/b/c", "0/0/0", "-1/1/1", "inf/1/1", "nan/1/1"])
def test_a_split_is_three_shares(tmp_path: Path, split: str) -> None:
    with pytest.raises(ConfigError, match="is not like 90/5/5"):
        ImportSettings(sources=("embedded",), out=tmp_path / "a.parquet", split=split)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/file.parquet", "no such file"),
        ("rows.jsonl", "no such file"),
        ("embedded:all", "no such part; there are train, rare, validation, test, mate"),
        ("nobody/nothing", "not a file here, and the hub did not give it"),
    ],
)
def test_a_missing_source_is_one_line(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(source)
    assert "\n" not in str(caught.value)


def test_hub_files_are_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "data" / "train-0.parquet", [A_FIRST])
    write_rows(tmp_path / "data" / "test-0.parquet", [A_ILLEGAL])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert load_rows("owner/name") == [A_ILLEGAL, A_FIRST]
    assert load_rows("owner/name:train") == [A_FIRST]
    with pytest.raises(DataError, match="no Parquet file with 'dev' in it"):
        load_rows("owner/name:dev")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="not a Parquet file"):
        load_rows(tmp_path / "bad.parquet")
    (tmp_path / "bad.jsonl").write_text("no\n[]\n{}\n")
    with pytest.raises(DataError, match="no rows in it"):
        load_rows(tmp_path / "bad.jsonl")
    with pytest.raises(DataError, match="no row could be read"):
        import_rows(
            ImportSettings(sources=(str(tmp_path / "bad.jsonl"),), out=tmp_path / "a.parquet"),
            ignored,
        )


# The rows in the package


def test_embedded_rows_are_true_and_of_every_kind() -> None:
    for part in ("train", "validation", "test"):
        rows = load_rows(f"embedded:{part}")
        policy = [row for row in rows if isinstance(row, PolicyRow)]
        environment = [row for row in rows if isinstance(row, EnvironmentRow)]
        assert len(policy) > 400 and len(environment) >= 1000
        for row in policy:
            legal = legal_moves(row.fen)
            assert set(row.moves) <= legal and len(row.moves) == min(5, len(legal))
            assert list(row.cp) == sorted(row.cp, reverse=True)
        assert all(repair_row(row) == (row, ()) for row in rows)
        assert {row.kind for row in environment} == set(KINDS)


def test_embedded_parts_share_no_position() -> None:
    seen: set[str] = set()
    for part in EMBEDDED:
        keys = {position_key(row.fen) for row in load_rows(f"embedded:{part}")}
        assert not keys & seen
        seen |= keys


def test_embedded_alone_is_the_train_part() -> None:
    assert load_rows("embedded", limit=50) == load_rows("embedded:train", limit=50)
