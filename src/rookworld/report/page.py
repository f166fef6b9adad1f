"""Run folders → one HTML file that needs nothing else, or the same page served while they grow.

Laws: the file opens without a network (plotting library, styles and data are inside it); text that
a model or a user wrote is data and never markup; the server listens on 127.0.0.1 alone, answers
only requests that name it so, and writes nothing. No torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from rookworld.report.gallery import PIECES
from rookworld.report.page_data import page_data
from rookworld.report.run_reader import find_runs, is_evolution, is_sweep
from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.config import require
from rookworld.runtime.errors import RookworldError
from rookworld.runtime.run_folder import MATCH, PAIRED, ROUNDS, STREAMS, finite

_SCRIPTS = tuple(
    f"{name}.js"
    for name in ("tools", "summary", "curves", "runs", "films", "sweep", "rounds", "page")
)
"""Parts of one script, in its order."""
_SECURITY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'"
)


IDLE_S = 15.0
"""Seconds after which a connection that says nothing is closed; the page asks more often."""
MOST_CONNECTIONS = 400
"""Connections at the same time; more are turned away."""


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """A page about runs, a sweep, or the rounds of an evolution; see docs/metrics.md."""

    runs: tuple[Path, ...] = ()
    """Run folders, or the folder of a sweep or of an evolution."""
    out: Path | None = None
    """The HTML file; default: report.html in the first folder."""
    watch: bool = False
    """Serve the page on 127.0.0.1 instead, and follow the runs while they grow."""
    port: int = 8321
    """Port for --watch; 0: any free one."""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"--port {self.port}: not in 0…65535")

    @property
    def target(self) -> Path:
        return self.out or self.runs[0] / "report.html"


def folders_of(paths: Sequence[Path]) -> list[Path]:
    """Run and sweep folders as given; a folder of runs stands for all of them.

    An evolution is there beside its rounds.
    """
    if not paths:
        raise RookworldError("no run folder given; for example `rookworld report runs/train`")
    found: list[Path] = []
    for path in paths:
        found += [path] if is_sweep(path) or is_evolution(path) else []
        found += [] if is_sweep(path) else find_runs([path])
    return found


def write_report(settings: ReportSettings) -> Path:
    """Write the page; returns its path."""
    folders = folders_of(settings.runs)
    write_text(settings.target, page(page_data(folders)))
    return settings.target


def page(data: dict[str, Any]) -> str:
    """The whole page as text."""
    names = [run["name"] for run in data["runs"]]
    whole = [data["sweep"]] if data["sweep"] else data["evolutions"]
    title = ", ".join([one["name"] for one in whole] or names[:3])
    parts = {
        "title": escape(title or "RookWorld"),
        "uplot_css": _asset("uplot.min.css"),
        "page_css": _asset("page.css"),
        "pieces": PIECES,
        "data": script_json(data),
        "uplot_js": _asset("uplot.min.js"),
        "page_js": "\n".join(map(_asset, _SCRIPTS)),
    }
    # in one pass: what is put in is never searched for places itself
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def script_json(data: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element."""
    text = json.dumps(finite(data), separators=(",", ":"), ensure_ascii=False)
    text = text.encode(errors="replace").decode()  # half a surrogate pair cannot be written
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return files("rookworld").joinpath("assets", "report", name).read_text(encoding="utf-8")


# --- following ----------------------------------------------------------------------------------


@contextmanager
def serving(settings: ReportSettings) -> Iterator[tuple[str, Callable[[], None]]]:
    """The page's address and a function that serves until interrupted."""
    folders_of(settings.runs)
    try:
        server = _Server(settings)
    except OSError as error:
        raise RookworldError(
            f"--port {settings.port}: cannot be used ({error.strerror}); choose another, or 0"
        ) from None
    with server:
        yield f"http://127.0.0.1:{server.server_address[1]}/", server.serve_forever


def fingerprint(folders: Sequence[Path]) -> str:
    """Changes whenever one of the files behind the page does."""
    stamps = []
    for folder in folders:
        for name in (*STREAMS, PAIRED, MATCH, ROUNDS, "sweep.json", "DONE"):
            path = folder / name
            if path.exists():
                found = path.stat()
                stamps.append(f"{found.st_mtime_ns:x}-{found.st_size:x}")
    return f'"{".".join(stamps)}"'


class _Server(ThreadingHTTPServer):
    """A thread a connection, so many at most; what they ask for is made once for all of them."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, settings: ReportSettings) -> None:
        super().__init__(("127.0.0.1", settings.port), partial(_Handler, self))
        self.paths = settings.runs
        self.free = BoundedSemaphore(MOST_CONNECTIONS)
        self.making = Lock()
        self.made: tuple[str, str] | None = None

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Readers come and go; what is ours keeps its traceback."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def data(self, folders: Sequence[Path], tag: str) -> str:
        """The page's data of this fingerprint."""
        with self.making:
            if self.made is None or self.made[0] != tag:
                self.made = tag, script_json(page_data(folders, live=True))
            return self.made[1]


class _Handler(BaseHTTPRequestHandler):
    """`/` is the page, `/data` its data; unchanged data costs an empty answer."""

    protocol_version = "HTTP/1.1"

    def __init__(self, ours: _Server, *args: Any) -> None:
        self.paths, self.ours = ours.paths, ours
        super().__init__(*args)

    def setup(self) -> None:
        self.request.settimeout(IDLE_S)
        super().setup()

    def do_GET(self) -> None:
        try:
            self._get()
        except RookworldError as error:
            self._answer(503, "text/plain", f"{error}\n")
        except ConnectionError:
            self.close_connection = True  # the reader has gone; nobody is left to tell

    def _get(self) -> None:
        # a page elsewhere must not read runs by giving its own name to this address
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in ("127.0.0.1", "localhost"):
            self._answer(403, "text/plain", "this server speaks to its own machine only\n")
        elif self.path == "/":
            with self.ours.making:
                text = page(page_data(folders_of(self.paths), live=True))
            self._answer(200, "text/html", text)
        elif self.path == "/data":
            folders = folders_of(self.paths)
            tag = fingerprint(folders)
            if self.headers.get("If-None-Match") == tag:
                self._answer(304, "application/json", "", tag)
            else:
                self._answer(200, "application/json", self.ours.data(folders, tag), tag)
        else:
            self._answer(404, "text/plain", "only / and /data are here\n")

    def _answer(self, status: int, kind: str, text: str, tag: str | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store" if tag is None else "no-cache")
        self.send_header("Content-Security-Policy", _SECURITY)
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the page asks every few seconds."""
