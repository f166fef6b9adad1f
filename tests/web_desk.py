"""A desk for tests of the page: models that say what a table says, and a run with checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from starlette.testclient import TestClient

from rookworld.evaluation.generator import Answer
from rookworld.tasks.task import Style
from rookworld.web.app import Desk, make_app
from rookworld.web.engine import SecondOpinion
from rookworld.web.server import serving
from rookworld.web.settings import WebSettings
from rookworld.web.subject import Checkpoint, Subject
from rookworld.web.thinking import Thinker

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
ANALYSIS = " e2e4 e2e5 d2d4 E: 0.4 0.9 0.3 B: e2e4"


class Says:
    """Answers to analyses and to transitions, whatever the position; `asked` keeps the prompts."""

    style: Style = "compact"
    samples = 1

    def __init__(self, analysis: str, transition: str) -> None:
        self.texts = {"P": analysis, "A": transition}
        self.asked: list[str] = []

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        self.asked += prompts
        return [Answer(self.texts[prompt[0]]) for prompt in prompts]


class Scripted(Thinker):
    """A thinker whose models are `Says`, by the name of their checkpoint."""

    def __init__(self, subject: Subject, make: Callable[[str], Says]) -> None:
        super().__init__(subject, WebSettings(device="cpu"))
        self.made: dict[str, Says] = {}
        self.make = make

    def model(self, checkpoint: Checkpoint) -> Any:
        return self.made.setdefault(checkpoint.name, self.make(checkpoint.name))


@contextmanager
def client(thinker: Thinker, engine: SecondOpinion | None = None) -> Iterator[TestClient]:
    """The application, asked as its own page asks."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        app = make_app(Desk(thinker, engine, one, two))
        yield TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


@contextmanager
def served(subject: Subject) -> Iterator[int]:
    """A real server on a free port; its number."""
    with serving(subject, WebSettings(port=0, device="cpu")) as page:
        thread = Thread(target=page.serve)
        thread.start()
        try:
            yield int(page.address.rstrip("/").rsplit(":", 1)[1])
        finally:
            page.stop()
            thread.join()


def add_checkpoint(run: Path, name: str, model: Path) -> Path:
    """A model folder as a checkpoint of a run; `final` stands beside the others."""
    folder = run / name if name == "final" else run / "checkpoints" / name
    shutil.copytree(model, folder)
    return folder
