"""Files and folders that are whole or absent: a reader sees the old one or the new one.

Law: what is new is filled under a temporary name beside the old, synced, and then renamed. What a
killed writer has left is taken away: of a folder before the next one is written, of a file by
`remove_unfinished`.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rookworld.runtime.errors import RookworldError


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary name to write to; when the block ends without error, the file is in place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync_path(temporary)
        temporary.replace(path)
        _sync_path(path.parent)
    except OSError as error:
        raise RookworldError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Take away what writers of this file left when they were killed; none may be at it now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.[0-9]*"):
        left.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`; the disk is left alone if it already says so."""
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to fill; when the block ends without error it is synced and gets its name.

    A folder already of that name is replaced if the new one holds a file for each of its files;
    what would be lost otherwise is named and kept.
    """
    folder = Path(folder).absolute()
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    replaced = unfinished.with_suffix(".old")
    try:
        _tidy(folder)
        unfinished.mkdir(parents=True)
        yield unfinished
        _refuse_to_lose(folder, unfinished)
        _sync(unfinished)
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
        _sync_path(folder.parent)
    except OSError as error:
        raise RookworldError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(unfinished, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what killed writers of a folder left beside it, or give it back its name.

    Before anything new is written: whoever dies here has left nothing, so leftovers never pile up.
    """
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        match = re.fullmatch(r"\.(\d+)\.(new|old)", leftover.name.removeprefix(f".{folder.name}"))
        if match and (int(match[1]) == os.getpid() or not _runs(int(match[1]))):
            if match[2] == "old" and not folder.exists():
                leftover.rename(folder)  # killed between two renames
            else:
                shutil.rmtree(leftover, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another's process
    return True


def _refuse_to_lose(folder: Path, replacement: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RookworldError(f"cannot write {folder}: a file is in the way")
    for path in sorted(folder.rglob("*")):
        if not (replacement / path.relative_to(folder)).exists():
            raise RookworldError(
                f"{folder} holds {path.relative_to(folder)}, which saving there would delete: "
                "choose another folder or move it"
            )


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync_path(path)


def _sync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
