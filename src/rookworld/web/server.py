"""One process, one port on 127.0.0.1: the page is served until somebody ends it.

Laws: nothing but this machine can connect; a connection that asks nothing, or takes its time over
asking, is closed; there are never more than a bounded number of them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import chess
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rookworld.runtime.errors import RookworldError
from rookworld.web.app import Desk, make_app
from rookworld.web.engine import second_opinion
from rookworld.web.settings import WebSettings
from rookworld.web.subject import Subject
from rookworld.web.thinking import Thinker

IDLE_S = 10
MOST_CONNECTIONS = 64
MOST_HEADER_BYTES = 16_384


class ImpatientProtocol(H11Protocol):
    """A connection that is closed when it has had no request in progress for a while.

    uvicorn itself waits for ever for the first request, and for one that comes byte by byte.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._seen = self.cycle
        self._watch = self.loop.call_later(IDLE_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        at_work = self.cycle is not None and not self.cycle.response_complete
        if not at_work and self.cycle is self._seen:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._watch = self.loop.call_later(IDLE_S, self._look)


@dataclass(frozen=True)
class Page:
    """A page on its port."""

    listener: socket.socket
    server: uvicorn.Server

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/"

    def serve(self) -> None:
        """Until somebody interrupts, or stops it from another thread."""
        self.server.run(sockets=[self.listener])

    def stop(self) -> None:
        self.server.should_exit = True


@contextmanager
def serving(subject: Subject, settings: WebSettings) -> Iterator[Page]:
    """The page, ready to be served."""
    with listening(settings.port) as listener, desk_of(subject, settings) as desk:
        config = uvicorn.Config(
            make_app(desk),
            http=ImpatientProtocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=1,
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        )
        yield Page(listener, uvicorn.Server(config))


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A port of this machine, which others cannot reach."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        except OSError as error:
            raise RookworldError(
                f"--port {port}: cannot be used ({error.strerror}); choose another, or 0"
            ) from None
        yield listener


@contextmanager
def desk_of(subject: Subject, settings: WebSettings) -> Iterator[Desk]:
    """A model in memory and an engine that runs, each with a thread; both end with the block."""
    thinker = Thinker(subject, settings)
    engine = second_opinion(settings.engine, settings.nodes)
    model_thread, engine_thread = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    try:
        if subject.checkpoints():
            # the first answer packs the weights: nobody should wait for it later
            model_thread.submit(thinker.think, chess.STARTING_FEN).result()
        yield Desk(thinker, engine, model_thread, engine_thread)
    finally:
        model_thread.shutdown(cancel_futures=True)
        engine_thread.shutdown(cancel_futures=True)
        if engine is not None:
            engine.close()
