"""`rookworld web`: a model or a run in the browser."""

from __future__ import annotations

from rookworld.cli.display import say
from rookworld.cli.flags import leading, parse
from rookworld.runtime.errors import ConfigError


def web(args: list[str]) -> int:
    from rookworld.web.settings import WebSettings
    from rookworld.web.subject import find_subject

    sources, rest = leading(args)
    settings = parse(WebSettings, rest, command="rookworld web", default=WebSettings())
    try:
        from rookworld.web.server import serving
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"`rookworld web` needs {package}: pip install 'rookworld[web]'"
        ) from None
    with serving(find_subject(sources), settings) as page:
        print(page.address, flush=True)
        say("open it in a browser; Ctrl-C ends")
        page.serve()
    # nothing but a signal ends it, whichever of asyncio and the server took that for handled
    raise KeyboardInterrupt
