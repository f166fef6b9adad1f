"""The page's files, read once. What the page shares with the report is the report's own text.

Law: `report.js` is the report's scripts, as they are, and the line that exports their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".LICENSE": "text/plain",
}
SHARED = ("uplot.min.js", "tools.js", "curves.js")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is served."""

    content: bytes
    kind: str


def read_assets() -> dict[str, Asset]:
    """Every file of the page by its name."""
    home = files("rookworld").joinpath("assets")
    report, web = home.joinpath("report"), home.joinpath("web")
    found = {one.name: one.read_bytes() for one in web.iterdir() if one.is_file()}
    exports = found.pop("report_exports.js")
    scripts = (report.joinpath(name).read_bytes() for name in SHARED)
    found["report.js"] = b"\n".join((*scripts, exports))
    styles = (report.joinpath(name).read_bytes() for name in ("uplot.min.css", "page.css"))
    found["report.css"] = b"\n".join(styles)
    return {name: Asset(text, kind_of(name)) for name, text in found.items()}


def kind_of(name: str) -> str:
    return next(kind for end, kind in KINDS.items() if name.endswith(end))
