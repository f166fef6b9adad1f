"""The application: the page's own files, and a JSON interface to the models (docs/web.md).

Laws: no path of a request ever becomes a path on disk: files are looked up by name among those
read at the start, checkpoints among those of the run. Models think on one thread and the engine on
another, so that the server answers meanwhile. What a person mistypes is `refused`, and no error;
a question that is no question is status 400 and one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rookworld import __version__
from rookworld.runtime.errors import DataError, RookworldError
from rookworld.runtime.run_folder import finite
from rookworld.web.asking import Ask, read_ask
from rookworld.web.assets import Asset, read_assets
from rookworld.web.engine import SecondOpinion
from rookworld.web.live import Followers, checkpoint_records
from rookworld.web.positions import NotUnderstood, after_move, read_game
from rookworld.web.protection import MOST_BYTES, Protection, TooLarge, refuse_length
from rookworld.web.thinking import Thinker, size_of

Record = dict[str, Any]


@dataclass(frozen=True)
class Desk:
    """Whoever answers, and the threads on which they do."""

    thinker: Thinker
    engine: SecondOpinion | None
    model_thread: ThreadPoolExecutor
    engine_thread: ThreadPoolExecutor

    def state(self) -> Record:
        """What the page is about."""
        subject, engine = self.thinker.subject, self.engine
        found = checkpoint_records(subject)
        return {
            "version": __version__,
            "name": subject.name,
            "run": subject.run is not None,
            "checkpoints": found,
            "parameters": size_of(self.thinker.model(subject.checkpoint())) if found else 0,
            "engine": {"name": engine.name, "nodes": engine.nodes} if engine else None,
        }

    def think(self, ask: Ask) -> Record:
        return self.thinker.think(ask.fen, ask.checkpoint)

    def predict(self, ask: Ask) -> Record:
        return self.thinker.predict(ask.fen, ask.move, ask.history, ask.checkpoint)

    def walk(self, ask: Ask) -> Record:
        return self.thinker.walk(ask.fen, ask.history, ask.checkpoint)

    def compare(self, ask: Ask) -> Record:
        if self.engine is None:
            raise DataError("no engine is installed here")
        return {"fen": ask.fen, "candidates": self.engine.think(ask.fen)}


def move(ask: Ask) -> Record:
    return after_move(ask.fen, ask.move)


def read(ask: Ask) -> Record:
    return read_game(ask.text("text", MOST_BYTES))


def make_app(desk: Desk) -> Protection:
    """The application behind its protection."""
    subject = desk.thinker.subject
    followers = Followers(subject.run, subject) if subject.run else None
    assets = read_assets()
    answers: dict[str, tuple[ThreadPoolExecutor | None, Callable[[Ask], Record]]] = {
        "move": (None, move),
        "read": (None, read),
        "think": (desk.model_thread, desk.think),
        "predict": (desk.model_thread, desk.predict),
        "walk": (desk.model_thread, desk.walk),
        "compare": (desk.engine_thread, desk.compare),
    }

    async def state(request: Request) -> Response:
        return json_answer(await on(desk.model_thread, desk.state))

    async def live(request: Request) -> Response:
        if followers is None:
            return json_answer({"error": "this is a model, not a run"}, 404)
        if followers.full:
            return json_answer({"error": "too many are watching"}, 503)
        return StreamingResponse(followers.events(), media_type="text/event-stream")

    async def ask(request: Request) -> Response:
        found = answers.get(request.path_params["what"])
        if found is None:
            return json_answer({"error": "no such question"}, 404)
        thread, answer = found
        return json_answer(await on(thread, partial(answer, await read_ask(request))))

    async def file(request: Request) -> Response:
        return served(assets.get(request.path_params.get("name", "index.html")))

    routes = [
        Route("/", file),
        Route("/api/state", state),
        Route("/api/live", live),
        Route("/api/{what}", ask, methods=["POST"]),
        Route("/{name}", file),
    ]
    handlers = {RookworldError: mistake, TooLarge: refuse_length}
    return Protection(Starlette(routes=routes, exception_handlers=handlers))


async def on(thread: ThreadPoolExecutor | None, work: Callable[[], Record]) -> Record:
    """Work on a thread: its own, or any."""
    return await asyncio.get_running_loop().run_in_executor(thread, work)


async def mistake(request: Request, error: Exception) -> Response:
    """A mistake as one line: the asker's, or something here that is missing or broken."""
    line = " ".join(str(error).split())
    if isinstance(error, NotUnderstood):
        return json_answer({"refused": line})
    return json_answer({"error": line}, 400 if isinstance(error, DataError) else 503)


def json_answer(content: Record, status: int = 200) -> JSONResponse:
    return JSONResponse(finite(content), status)


def served(asset: Asset | None) -> Response:
    if asset is None:
        return json_answer({"error": "no such page"}, 404)
    return Response(asset.content, media_type=asset.kind)
