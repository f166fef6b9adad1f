"""A folder or a trial that one process works on at a time.

Laws: the kernel holds the lock, so it ends with its last holder, however that one died, and is
never stale; the file says which process of which machine took it last.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rookworld.runtime.errors import RookworldError

log = logging.getLogger(__name__)


class Lock:
    """An exclusive lock on a file, gone when its last holder is; children may hold it too."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """The lock, or None if somebody holds it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise RookworldError(f"{path}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise RookworldError(f"{path}: cannot be locked ({error.strerror})") from None
            log.warning("%s: no locks on this file system; start nothing twice here", path)
        _sign(file)
        return cls(file)

    def fileno(self) -> int:
        return self.file.fileno()

    def release(self) -> None:
        self.file.close()


def _sign(file: IO[bytes]) -> None:
    """Say who holds the lock; on a full disk nobody does, and the lock holds all the same."""
    with suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n".encode())


def holder(path: Path) -> str:
    """Who holds a lock, for a message."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"


@contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock, or say who else is `doing` something there."""
    lock = Lock.take(path)
    if lock is None:
        raise RookworldError(
            f"{path.parent}: {holder(path)} is {doing} here; wait for it, or choose another --out"
        )
    try:
        yield
    finally:
        lock.release()
