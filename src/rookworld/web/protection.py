"""What stands before every request: who may ask, how much, and what the page may load.

Laws: only requests that name this machine as their host are answered, so a foreign page cannot
rebind a name of its own to it; what changes nothing may be read by this page alone, and is asked
with JSON from the same origin; a body over the limit is refused before it is read, and a body
without a length as soon as it is too long; the page runs and draws its own files only.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 1_000_000
HOSTS = {"127.0.0.1", "localhost", "::1"}

CHESSGROUND_STYLE = "sha256-SyXRxMCl6H7Kgy9uTmu1UZqVBsRmMBF4sHRiTO3FQc0="
"""Hash of `color-scheme:light only`, the one style that chessground writes as an attribute."""
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def content_security() -> str:
    """Scripts, styles and data of this server, and pictures inside styles; nothing else."""
    return (
        "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
        f"style-src 'self' 'unsafe-hashes' '{CHESSGROUND_STYLE}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class TooLarge(Exception):
    """A body without a length has turned out too long."""


class Protection:
    """An application that only its own page on its own machine can talk to."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers["content-security-policy"] = content_security()
            await send(message)

        refusal = refused(scope["method"], Headers(scope=scope))
        app = self.app if refusal is None else refuse(*refusal)
        await app(scope, bounded(receive), sent)


LIMIT = f"at most {MOST_BYTES:,} bytes are read"


def refused(method: str, headers: Headers) -> tuple[HTTPStatus, str] | None:
    """Why a request is not even looked at."""
    host = headers.get("host", "")
    if len(headers.getlist("host")) != 1 or hostname(host) not in HOSTS:
        return HTTPStatus.FORBIDDEN, "this server speaks to its own machine only"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return HTTPStatus.FORBIDDEN, "only this server's own page may ask"
    followed = headers.get("sec-fetch-mode") == "navigate"  # a link to the page may be anywhere
    if not followed and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return HTTPStatus.FORBIDDEN, "only this server's own page may ask"
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > MOST_BYTES:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, LIMIT
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json"
    return None


def hostname(host: str) -> str | None:
    """The name in a Host header, without its port."""
    try:
        found = urlsplit(f"//{host}")
        return found.hostname if host == found.netloc and not found.username else None
    except ValueError:
        return None


def bounded(receive: Receive) -> Receive:
    """The body piece by piece, until it is too long."""
    seen = 0

    async def received() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MOST_BYTES:
            raise TooLarge
        return message

    return received


async def refuse_length(request: Request, error: Exception) -> Response:
    """What becomes of a `TooLarge`."""
    return refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, LIMIT)


def refuse(status: HTTPStatus, why: str) -> JSONResponse:
    """A refusal; what is left of the request is not waited for."""
    return JSONResponse({"error": why}, status, headers={"connection": "close"})
