"""Files of records: Parquet and JSONL, with columns of given types; of lines also behind `.xz`.

Parquet keeps a note of its origin (settings, engine, counts) in its metadata. pyarrow is imported
only where Parquet is touched, so JSONL and text work without it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rookworld.runtime.atomic_files import atomic_file, write_text
from rookworld.runtime.errors import DataError

Record = dict[str, Any]
Columns = Mapping[str, str]
"""Column name → type."""

ORIGIN_KEY = b"rookworld"


def read_object(line: str) -> Record:
    """The object of a line of JSON, or a `DataError`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError("not a JSON object")
    return record


def format_of(path: Path) -> str:
    """The ending that says how a file is read, that of what is packed if it ends in `.xz`."""
    return Path(path.stem).suffix if path.suffix == ".xz" else path.suffix


@contextmanager
def open_lines(path: Path) -> Iterator[TextIO]:
    """A file of lines, unpacked if need be; bytes that are no UTF-8 are replaced."""
    opener = lzma.open if path.suffix == ".xz" else open
    try:
        # the signature mark that some editors put first is no part of a row
        file: TextIO = opener(path, "rt", encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        with file:
            yield file
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: not a whole xz file ({error})") from error


def write_records(
    path: Path, records: Sequence[Record], columns: Columns, origin: dict[str, Any] | None = None
) -> None:
    """Write records to .parquet or .jsonl, whole or not at all."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{path}: rows are written to .parquet or .jsonl")
    if path.suffix == ".jsonl":
        write_text(path, "".join(json.dumps(record) + "\n" for record in records))
        return
    with atomic_file(path) as temporary:
        _write_parquet(temporary, records, columns, origin)


def _write_parquet(
    path: Path, records: Sequence[Record], columns: Columns, origin: dict[str, Any] | None
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "string": pa.string(),
        "list<string>": pa.list_(pa.string()),
        "list<int32>": pa.list_(pa.int32()),
        "int16": pa.int16(),
        "int32": pa.int32(),
        "double": pa.float64(),
        "bool": pa.bool_(),
    }
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    if origin is not None:
        schema = schema.with_metadata({ORIGIN_KEY: json.dumps(origin)})
    values = [[record[name] for record in records] for name in columns]
    table = pa.table(values, schema=schema)
    pq.write_table(table, path, compression="zstd", compression_level=15)


def file_origin(path: Path) -> dict[str, Any] | None:
    """The note that came with a Parquet file of ours, None if there is none."""
    metadata = _parquet(path).schema_arrow.metadata or {}
    note = metadata.get(ORIGIN_KEY)
    return None if note is None else dict(json.loads(note))


def parquet_columns(path: Path) -> list[str]:
    """The names of a Parquet file's columns."""
    return list(_parquet(path).schema_arrow.names)


def parquet_rows(path: Path) -> int:
    """How many rows a Parquet file has."""
    return int(_parquet(path).metadata.num_rows)


def iterate_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """The records of a Parquet file, all columns or some."""
    file = _parquet(path)
    names = file.schema_arrow.names
    if missing := set(columns or ()) - set(names):
        raise DataError(f"{path}: no column {min(missing)!r}, only {', '.join(names)}")
    batches = file.iter_batches(columns=columns and list(columns))
    while (records := _next_records(path, batches)) is not None:
        yield from records


def _next_records(path: Path, batches: Iterator[Any]) -> list[Record] | None:
    """The records of the next batch, None behind the last."""
    try:
        batch = next(batches, None)
        return None if batch is None else batch.to_pylist()
    except (OSError, ValueError) as error:  # Arrow's own error is one of value
        raise DataError(f"{path}: a damaged Parquet file ({error})") from error


def iterate_records(path: Path, optional: Sequence[str]) -> Iterator[Record]:
    """The records of a Parquet or JSONL file; of Parquet those of the columns that it has."""
    if path.suffix != ".parquet":
        yield from read_records(path)
        return
    names = parquet_columns(path)
    yield from iterate_parquet(path, [name for name in optional if name in names])


def read_records(path: Path, columns: Sequence[str] | None = None) -> list[Record]:
    """The records of a Parquet or JSONL file; of Parquet all columns or some."""
    if path.suffix == ".parquet":
        return list(iterate_parquet(path, columns))
    try:
        with open_lines(path) as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a JSONL file ({error})") from error


def read_fens(path: Path) -> list[str]:
    """The positions of a file of rows."""
    try:
        found = [record["fen"] for record in read_records(path, ("fen",))]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: a row without 'fen'") from error
    if not all(isinstance(fen, str) for fen in found):
        raise DataError(f"{path}: a row whose 'fen' is no text")
    return found


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from error
