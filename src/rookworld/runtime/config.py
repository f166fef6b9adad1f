"""Settings as frozen dataclasses: defaults < preset < TOML file < flags, one resolved JSON.

Laws: an unknown key or a bad value is one line with a suggestion and exit code 2; what a run used
can be read back from its `config.json`. Settings may be composed of sections, each of which is read
by one room of the house; flags, files and `config.json` show their fields side by side.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import tomllib
import types
import typing
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from rookworld.runtime.bounds import bounds_of, check_bounds
from rookworld.runtime.errors import ConfigError

Settings = TypeVar("Settings")


class Section:
    """Base of frozen dataclasses of settings: a number beyond its bounds is refused."""

    def __post_init__(self) -> None:
        for name, place in flat_fields(type(self)).items():
            bounds = bounds_of(place.hint)
            if bounds is not None and place.section is None:
                check_bounds(name, getattr(self, name), bounds)


class Composed(Section):
    """Base of settings in sections, made and changed by the flat names of their fields."""

    FIRST: ClassVar[tuple[str, ...]] = ()
    """Settings that a beginner needs, which the short help shows."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Another name -> the setting that it means."""
    IGNORED: ClassVar[Mapping[str, str]] = {}
    """A switch that is accepted and does nothing -> why."""
    ADVICE: ClassVar[Mapping[str, str]] = {}
    """A name of another trainer that means no setting -> what to do instead."""
    OWN: ClassVar[str] = ""
    """A setting that no other command has, by which a `config.json` is known."""

    @classmethod
    def upgrade(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What an earlier version wrote, as this one writes it."""
        return values

    @classmethod
    def of(cls, **flat: Any) -> Self:
        """The defaults but for these."""
        return replace_flat(cls(), flat)

    def but(self, **flat: Any) -> Self:
        """The same but for these."""
        return replace_flat(self, flat)


class Place(NamedTuple):
    """Where a setting stands."""

    section: str | None
    """Field of the whole that holds it; None: the whole itself."""
    hint: Any
    """Its type, with its bounds."""
    field: dataclasses.Field[Any]
    owner: type[Any]
    """The dataclass it is a field of."""


def flat_fields(kind: type[Any]) -> dict[str, Place]:
    """Every setting of `kind` by name, those of its sections among them."""
    return _flat_fields(typing.cast("Hashable", kind))


@cache
def _flat_fields(kind: Any) -> dict[str, Place]:
    found: dict[str, Place] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Section):
            places = flat_fields(hint)
            inner = {name: places[name]._replace(section=field.name) for name in places}
        else:
            inner = {field.name: Place(None, hint, field, kind)}
        twice = inner.keys() & found.keys()
        if twice:
            raise TypeError(f"{kind.__name__} has {', '.join(sorted(twice))} twice")
        found |= inner
    return found


def value_of(settings: Any, name: str) -> Any:
    """The value of a setting by its flat name."""
    section = flat_fields(type(settings))[name].section
    return getattr(settings if section is None else getattr(settings, section), name)


def replace_flat(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """`settings` with these values, each in its section."""
    places = flat_fields(type(settings))
    own: dict[str, Any] = {}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if name not in places:
            raise TypeError(f"{type(settings).__name__} has no {name!r}{suggestion(name, places)}")
        section = places[name].section
        (own if section is None else by_section.setdefault(section, {}))[name] = value
    for section, values in by_section.items():
        own[section] = dataclasses.replace(getattr(settings, section), **values)
    return dataclasses.replace(settings, **own)  # type: ignore[type-var]


NEAR = 0.7
"""Likeness from which a name is worth suggesting: a wrong one is worse than none."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=NEAR)
    return f", did you mean {near[0]!r}?" if near else ""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


@cache
def notice(line: str) -> None:
    """Say a line about settings, once a process."""
    logging.getLogger("rookworld").warning(line)


# --- files ---------------------------------------------------------------------------------------


def current_name(kind: type[Any], name: str, mark: str = "") -> str | None:
    """The setting that a name means, an alias with a line; None: accepted, and does nothing."""
    if not issubclass(kind, Composed):
        return name
    if name in kind.IGNORED:
        notice(f"{_shown(mark, name)} does nothing: {kind.IGNORED[name]}")
        return None
    if name in kind.ALIASES:
        notice(f"{_shown(mark, name)} is read as {_shown(mark, kind.ALIASES[name])}")
    return kind.ALIASES.get(name, name)


def _shown(mark: str, name: str) -> str:
    return mark + name.replace("_", "-") if mark else name


def advice(kind: type[Any], name: str) -> str:
    """What to do instead of a setting that we do not have; empty where there is nothing to say."""
    found = kind.ADVICE.get(name) if issubclass(kind, Composed) else None
    return f": {found}" if found else ""


def override(settings: Settings, values: Mapping[str, Any], where: str) -> Settings:
    """`settings` with `values` from a preset or file laid over it; unknown keys fail."""
    kind = type(settings)
    places = flat_fields(kind)
    clean: dict[str, Any] = {}
    for raw, value in upgraded(kind, values).items():
        name = current_name(kind, raw.replace("-", "_"))
        if name is None:
            continue
        if name not in places:
            hint = advice(kind, name) or suggestion(name, places)
            raise ConfigError(f"{where}: unknown key {raw!r}{hint}")
        clean[name] = coerce(value, places[name].hint, f"{where}: {raw}")
    return replace_flat(settings, clean)


def upgraded(kind: type[Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    return kind.upgrade(values) if issubclass(kind, Composed) else values


def coerce(value: Any, hint: Any, where: str) -> Any:
    """A TOML or JSON value as the field's type, or a line that says what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return coerce(value, arguments[0], where)
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
        return _tuple_of(value, arguments, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        require("\0" not in value, f"{where} = {value!r}: no path holds a zero byte")
        return Path(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} = {value!r}: expected {hint.__name__}")
    return value


def _tuple_of(value: Any, items: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if isinstance(value, dict):  # a table is a list of its names and values
        value = list(value.items())
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} = {value!r}: expected a list")
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise ConfigError(f"{where} = {value!r}: expected {len(items)} values")
    return tuple(coerce(one, item, where) for one, item in zip(value, items, strict=True))


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file, or one line that says what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None


def resolved(settings: Any) -> dict[str, Any]:
    """Every setting, flat, as JSON would hold it."""
    flat = {name: value_of(settings, name) for name in flat_fields(type(settings))}
    plain: dict[str, Any] = json.loads(json.dumps(flat, default=_plain))
    return plain


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def short_hash(settings: Any, ignore: Iterable[str] = ()) -> str:
    """Eight characters that are equal when the settings are."""
    left_out = set(ignore)
    plain = {key: value for key, value in resolved(settings).items() if key not in left_out}
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# --- the settings of a run -----------------------------------------------------------------------

HERE_AND_NOW = ("out", "resume", "overwrite", "dry_run")
"""Settings that a command has for itself, not from the run it goes on with."""


def of_run(default: Settings, folder: Path) -> Settings | None:
    """The settings that a run was last given; None where none has begun.

    A run of an earlier version may hold settings that are gone, and lack newer ones: a line each.
    """
    path = folder / "config.json"
    config = _read_config(path)
    if config is None:
        return None
    kind = type(default)
    places = flat_fields(kind)
    held = upgraded(kind, config)
    own = getattr(kind, "OWN", "")
    require(not own or own in held, f"{path}: no {own!r} in it, so another command's run")
    aliases = getattr(kind, "ALIASES", {})
    gone = [f"{n}={value}" for n, value in held.items() if aliases.get(n, n) not in places]
    known = {current_name(kind, n): v for n, v in held.items() if aliases.get(n, n) in places}
    if gone:
        notice(f"{path}: no longer settings, and ignored: {', '.join(gone)}")
    new = [f"{n}={value_of(default, n)}" for n in places if n not in known]
    if new:
        notice(f"{path}: not in it, and left at their defaults: {', '.join(new)}")
    kept = {str(n): value for n, value in known.items() if n not in HERE_AND_NOW}
    return override(default, kept, str(path))


def _read_config(path: Path) -> dict[str, Any] | None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); mend it, or give the run's flags and another --out"
        ) from None
    require(isinstance(held, dict), f"{path}: not a table of settings; mend it or take it away")
    return typing.cast("dict[str, Any]", held)
