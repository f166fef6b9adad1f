"""The documentation as a site: `make docs` is strict, so a dead link, anchor or lost page fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_is_built_without_a_dead_link(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        build,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "index.html").exists()


def test_every_page_has_its_place_in_the_site() -> None:
    """Strictness would find a lost page too, later."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", config))
    docs = ROOT / "docs"
    pages = {str(one.relative_to(docs)) for one in docs.rglob("*.md")}
    assert {one for one in pages if not one.startswith("experiments/")} == named
