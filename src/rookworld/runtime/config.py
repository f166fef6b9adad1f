"""Settings as frozen dataclasses: defaults < preset < TOML file < flags, one resolved JSON.

Laws: an unknown key or flag, or a bad value, is one line with a suggestion and exit code 2; what a
run used can be read back from its `config.json`. tyro turns each field and its docstring into a
flag; what it would print as a box is reduced to a line here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import io
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import tyro

from rookworld.runtime.errors import ConfigError

Settings = TypeVar("Settings")

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
    "eval": "MODEL [MODEL …]",
    "score": "FILE",
    "analyze": "RUN [RUN …]",
    "report": "RUN [RUN …]",
    "sweep": "[FILE]",
    "uci": "[MODEL]",
    "export": "MODEL",
    "data import": "SOURCE [SOURCE …]",
    "data show": "[SOURCE]",
    "data pack": "[SOURCE …]",
    "data mine": "MODEL SOURCE [SOURCE …]",
}
"""Command -> what it takes besides the flags of its settings, of which alone tyro knows."""


def parse(
    kind: type[Settings],
    args: Sequence[str],
    *,
    command: str,
    default: Settings | None = None,
    about: str | None = None,
) -> Settings:
    """`args` as a `kind`, starting from `default`; `--help` prints and exits as usual.

    `about` heads the help of a command that shares its settings with another.
    """
    check_lists(kind, args)
    takes = TAKES.get(command.removeprefix("rookworld "), "")
    about = about or inspect.cleandoc(kind.__doc__ or "")
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parsed: Settings
            parsed, unknown = tyro.cli(
                kind,
                args=list(args),
                prog=f"{command} {takes}".rstrip(),
                description=f"{about}\n{LAYERS_HELP}" if LAYERS in takes else about,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes,),
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(
            f"{command.removeprefix('rookworld ')}: {_first_paragraph(stderr.getvalue())}"
        ) from None
    if unknown:
        raise ConfigError(_unknown_argument(kind, unknown[0], command))
    return parsed


def check_lists(kind: type[Any], args: Sequence[str]) -> None:
    """Refuse a list begun twice: the first would be forgotten. A number given twice is a change."""
    for field in dataclasses.fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        given = sum(arg == flag or arg.startswith(f"{flag}=") for arg in args)
        if given > 1 and str(field.type).startswith("tuple"):
            raise ConfigError(f"{flag} is there {given} times: write all its values after one")


def _first_paragraph(box: str) -> str:
    """The message inside tyro's box: what stands under its title, up to the next rule."""
    message: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip().strip("│").strip()
        is_rule = set(text) <= set("─-╭╮╰╯")
        if is_rule and message:
            break
        if not is_rule:
            message.append(text)
    return " ".join(message)


def _unknown_argument(kind: type[Any], argument: str, command: str) -> str:
    short = command.removeprefix("rookworld ")
    if not argument.startswith("-"):
        return f"{short}: unexpected argument {argument!r}; see `{command} --help`"
    name = argument.split("=")[0].lstrip("-").replace("-", "_")
    hint = suggestion(name, (field.name for field in dataclasses.fields(kind)))
    hint = hint.replace("_", "-").replace("'", "'--", 1)
    return f"{short}: unknown flag {argument!r}{hint}; see `{command} --help`"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def override(settings: Settings, values: Mapping[str, Any], where: str) -> Settings:
    """`settings` with `values` from a preset or file laid over it; unknown keys fail."""
    hints = typing.get_type_hints(type(settings))
    known = {field.name for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
    clean: dict[str, Any] = {}
    for raw, value in values.items():
        name = raw.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{where}: unknown key {raw!r}{suggestion(name, known)}")
        clean[name] = coerce(value, hints[name], f"{where}: {raw}")
    return dataclasses.replace(settings, **clean)  # type: ignore[type-var]


def coerce(value: Any, hint: Any, where: str) -> Any:
    """A TOML or JSON value as the field's type, or a line that says what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return coerce(value, next(a for a in arguments if a is not type(None)), where)
    if origin is typing.Literal:
        if value in arguments:
            return value
        known = ", ".join(map(str, arguments))
        raise ConfigError(f"{where} = {value!r}: expected one of {known}")
    if origin is tuple:
        return tuple(coerce(item, arguments[0], where) for item in _listed(value, where))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} = {value!r}: expected {hint.__name__}")
    return value


def _listed(value: Any, where: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    raise ConfigError(f"{where} = {value!r}: expected a list")


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file, or one line that says what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None


def resolved(settings: Any) -> dict[str, Any]:
    """Every field as JSON would hold it."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    return plain


HERE_AND_NOW = ("out", "resume", "dry_run")
"""Settings that a command has for itself, not from the run it goes on with."""


def of_run(default: Settings, folder: Path) -> Settings | None:
    """The settings that a run of this kind was last given; None without such a run."""
    path = folder / "config.json"
    names = {field.name for field in dataclasses.fields(default)}  # type: ignore[arg-type]
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(told, dict) or set(told) != names:
        return None
    kept = {name: value for name, value in told.items() if name not in HERE_AND_NOW}
    return override(default, kept, str(path))


def short_hash(settings: Any, ignore: Iterable[str] = ()) -> str:
    """Eight characters that are equal when the settings are."""
    left_out = set(ignore)
    plain = {key: value for key, value in resolved(settings).items() if key not in left_out}
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def take_option(args: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `--name` and the arguments without it (for flags that choose the defaults)."""
    rest: list[str] = []
    value: str | None = None
    pending = iter(args)
    for argument in pending:
        if argument == f"--{name}":
            value = next(pending, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"--{name} needs a value")
        elif argument.startswith(f"--{name}="):
            value = argument.split("=", 1)[1]
        else:
            rest.append(argument)
    return value, rest


def layered(
    default: Settings, presets: Mapping[str, Mapping[str, Any]], args: Sequence[str]
) -> tuple[Settings, list[str]]:
    """`default` with the `--preset` and `--config` found in `args`, and the arguments left."""
    preset, rest = take_option(args, "preset")
    file, rest = take_option(rest, "config")
    if preset is not None:
        if preset not in presets:
            known = ", ".join(presets)
            hint = suggestion(preset, presets)
            raise ConfigError(f"--preset {preset}: not one of {known}{hint}")
        default = override(default, presets[preset], f"preset {preset}")
    if file is not None:
        default = override(default, read_toml(Path(file)), file)
    return default, rest


def leading(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first flag, and the rest."""
    flags = (i for i, argument in enumerate(args) if argument[:1] == "-" and argument != "-")
    count = next(flags, len(args))
    return list(args[:count]), list(args[count:])


# --- bounds of numbers ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Where a number may lie: never at infinity, and NaN lies nowhere."""

    lowest: float
    highest: float = inf
    lowest_allowed: bool = True
    said: str = ""
    """What is allowed, where there is more to say than the numbers."""

    def hold(self, value: float) -> bool:
        inside = self.lowest <= value <= self.highest and -inf < value < inf
        return inside and (self.lowest_allowed or value != self.lowest)

    def allowed(self) -> str:
        if self.said:
            return self.said
        if self.lowest == -inf:
            return f"give {self.highest} or less"
        if not self.lowest_allowed:
            end = "" if self.highest == inf else f" and at most {self.highest}"
            return f"give more than {self.lowest}{end}"
        return f"give {self.lowest} " + ("or more" if self.highest == inf else f"to {self.highest}")


COUNT = Bounds(1, said="must be positive")
FROM_ZERO = Bounds(0)
POSITIVE = Bounds(0, lowest_allowed=False)
SHARE = Bounds(0, 1)
SHARE_NOT_ZERO = Bounds(0, 1, lowest_allowed=False)
SEED = Bounds(0, 2**64 - 1)  # what torch takes


def bounds_of(table: Mapping[Bounds, str]) -> dict[str, Bounds]:
    """Field name -> bounds, of a table that names the fields of each kind."""
    return {name: bounds for bounds, names in table.items() for name in names.split()}


def check_bounds(settings: object, table: Mapping[str, Bounds]) -> None:
    """Refuse, by its flag, a number beyond its bounds; None is a number not given."""
    for name, bounds in table.items():
        value = getattr(settings, name)
        if value is None:
            continue
        finite = -inf < value < inf  # isfinite() cannot take every int
        allowed = bounds.allowed() if finite else "give a finite number"
        require(bounds.hold(value), f"--{name.replace('_', '-')} {value}: {allowed}")
