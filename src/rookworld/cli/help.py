"""What `--help` shows of a command: its settings by group, each with its docstring and default.

Written here rather than by tyro, so that help is short, grouped, and there at once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

from rookworld.runtime.config import Composed, Place, flat_fields, value_of

WIDTH = 100
INDENT = " " * 6
LAYERS = "[--preset NAME] [--config FILE]"
LAYERS_HELP = """--preset NAME starts from settings by name (a wrong name lists them), --config FILE
from a TOML file with these flags' names as keys. Flags win over the file, the file over the
preset."""
TAKES = {
    "train": LAYERS,
    "check": f"[MODEL] {LAYERS}",
    "overfit": LAYERS,
    "inspect": LAYERS,
    "pretrain": LAYERS,
    "evolve": "",
    "eval": "MODEL [MODEL …]",
    "score": "FILE",
    "analyze": "RUN [RUN …]",
    "report": "RUN [RUN …]",
    "sweep": "FILE",
    "play": "[MODEL]",
    "uci": "[MODEL]",
    "match": "A B",
    "selfplay": "MODEL",
    "web": "[MODEL | RUN]",
    "export": "MODEL",
    "data import": "SOURCE [SOURCE …]",
    "data export": "SOURCE [SOURCE …]",
    "data show": "[SOURCE]",
    "data pack": "[SOURCE …]",
    "data mine": "MODEL SOURCE [SOURCE …]",
}
"""Command -> what it takes besides the flags of its settings."""


def page(
    kind: type[Any], command: str, default: Any | None, about: str | None, *, whole: bool
) -> str:
    """The help of a command: what a beginner needs, or the `whole` of it by groups."""
    takes = TAKES.get(command.removeprefix("rookworld "), "")
    first = kind.FIRST if issubclass(kind, Composed) else ()
    lines = [f"usage: {command} {takes}".rstrip() + " [FLAGS]", ""]
    lines += [about or inspect.cleandoc(kind.__doc__ or "")]
    if LAYERS in takes:
        lines += [LAYERS_HELP]
    places = flat_fields(kind)
    if first and not whole:
        lines += ["", *entries(places, first, default)]
        more = len(places) - len(first)
        lines += ["", f"--help-all shows the other {more}, by groups."]
        return "\n".join(lines)
    for section in dict.fromkeys(place.section for place in places.values()):
        names = [name for name, place in places.items() if place.section == section]
        lines += ["", *heading(section, places[names[0]]), *entries(places, names, default)]
    return "\n".join(lines)


def heading(section: str | None, place: Place) -> Iterable[str]:
    """The title of a group: its name, and what its docstring begins with."""
    if section is not None:
        yield f"{section}: {inspect.cleandoc(place.owner.__doc__ or '').splitlines()[0]}"


def entries(places: dict[str, Place], names: Iterable[str], default: Any | None) -> Iterable[str]:
    said = {owner: docs(owner) for owner in {places[name].owner for name in names}}
    for name in names:
        place = places[name]
        flag = f"  --{name.replace('_', '-')}{values(place.hint, name)}"
        text = said[place.owner].get(name, "")
        if default is not None:
            text += shown_default(value_of(default, name))
        yield flag
        yield textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def shown_default(value: Any) -> str:
    """A default, where there is one to show; of a switch the flag itself says it."""
    if value is None or value == () or isinstance(value, bool):
        return "" if value is not True else " (on by default)"
    if isinstance(value, tuple):
        value = " ".join(map(str, chain(*value) if isinstance(value[0], tuple) else value))
    return f" ({value})"


def values(hint: Any, name: str) -> str:
    """What is written after a flag."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return values(arguments[0], name)
    if origin in (typing.Union, types.UnionType):
        return values(next(one for one in arguments if one is not type(None)), name)
    if origin is typing.Literal:
        return " " + "|".join(map(str, arguments))
    if origin is tuple:
        one = values(arguments[0], name)
        return f"{one} …" if arguments[-1] is Ellipsis else one * len(arguments)
    if hint is bool:
        return f", --no-{name.replace('_', '-')}"
    return {int: " N", float: " X", Path: " PATH"}.get(hint, f" {hint.__name__.upper()}")


def docs(kind: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass, those of its bases among them."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if "__dataclass_fields__" in vars(base):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            body = typing.cast("ast.ClassDef", definition).body
            for node, after in pairwise(body):
                if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                    name = ast.unparse(node.target)
                    found[name] = " ".join(str(ast.literal_eval(after.value)).split())
    return found
