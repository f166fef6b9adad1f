"""What several test modules share: tiny models, made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rookworld.runtime.errors import EngineError
from rookworld.tasks.engine import find_engine
from tiny_training import one_thread, save_tiny, save_warm

if not torch.cuda.is_available():
    # Kernels are interpreted then. Read when Triton is imported, which nobody has done yet.
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Two that each spin on both of them take twice as long as one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with the chess tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def warm_folder(tiny_folder: Path) -> Path:
    """The same, knowing the answer format and some of the answers to `tiny_rows`."""
    folder = tiny_folder.with_name("warm")
    with one_thread():
        save_warm(folder, tiny_folder)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `engine` run for real where Stockfish is; elsewhere skipped and counted."""
    try:
        find_engine()
    except EngineError as error:
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(pytest.mark.skip(reason=str(error)))
