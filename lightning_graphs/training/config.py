"""Options of ``GraphCapture`` from a file or a line of YAML, checked against its signature."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_graphs.training.options import OptionError

_FILES = (".json", ".yaml", ".yml")
_TABLE = "[tool.lightning_graphs]"
_NEW_LINE = "\n"
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Configuration:
    """Options as they were written.

    Attributes:
        values: Option name -> value, not yet checked.
        place: The file or the variable that holds them.
        text: The file's content, to find lines in; empty where there is no file.
    """

    values: Mapping[str, Any]
    place: str
    text: str = ""

    def apply(self, kind: type[_Made]) -> _Made:
        """Make a ``GraphCapture``, or a subclass of it, with these options.

        Raises:
            OptionError: an option is unknown or has an impossible value; names its line.
        """
        known = list(inspect.signature(kind).parameters)
        for key in self.values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                raise OptionError(
                    "A configuration holds options of GraphCapture only.",
                    f"{self._place_of(key)}: {key}",
                    f"write {near[0]}" if near else f"write one of {', '.join(known)}",
                )
        try:
            return kind(**self.values)
        except OptionError as error:
            named = [key for key in self.values if f"{key}=" in error.observed]
            place = self._place_of(named[0]) if named else self.place
            raise OptionError(error.rule, f"{place}: {error.observed}", error.remedy) from None

    def _place_of(self, key: object) -> str:
        name = re.escape(str(key))
        written = re.compile(rf"^[^#\n]*?(?<![\w-])[\"']?{name}[\"']?[ \t]*[:=]", re.MULTILINE)
        found = written.search(self.text, max(self.text.find(_TABLE), 0))
        if found is None:
            return self.place
        return f"{self.place}, line {self.text.count(_NEW_LINE, 0, found.end()) + 1}"


def options_of(value: str, variable: str) -> Configuration:
    """What the value of an environment variable says.

    Args:
        value: ``1``, ``pyproject``, the path of a YAML or JSON file, or options as YAML.
        variable: Name of the variable, for messages.

    Raises:
        OptionError: it is none of these, or the file is missing or cannot be read.
    """
    if value == "1":
        return Configuration({}, variable)
    if value == "pyproject":
        return _from_pyproject(Path("pyproject.toml"), variable)
    if _NEW_LINE not in value and Path(value).suffix.lower() in _FILES:
        return _from_file(Path(value), variable)
    values = _yaml(value, variable)
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{variable} is 0, 1, pyproject, a YAML or JSON file, or options in YAML.",
            f"{variable}={value}",
            f"write {variable}=1 for the defaults, or {variable}='scope: step'",
        )
    return Configuration(values, variable)


def _from_file(path: Path, variable: str) -> Configuration:
    text = _read(path, variable)
    if path.suffix.lower() == ".json":
        try:
            values = json.loads(text, object_pairs_hook=_without_repetition)
        except json.JSONDecodeError as error:
            raise _unreadable(f"{path}, line {error.lineno}: {error.msg}", "JSON") from None
        except ValueError as error:
            raise _unreadable(f"{path}: {error}", "JSON") from None
        except RecursionError:
            raise _unreadable(f"{path}: its brackets are nested too deeply", "JSON") from None
    else:
        values = _yaml(text, str(path))
    return _in_file(values, path, text)


def _from_pyproject(path: Path, variable: str) -> Configuration:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = _read(path, variable)
    try:
        tools = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(f"{path}: {error}", "TOML") from None
    if "lightning_graphs" not in tools:
        raise OptionError(
            f"{variable}=pyproject reads {_TABLE} of the working directory's pyproject.toml.",
            f"{path.absolute()} has no such table",
            f"add {_TABLE}, which may be empty, or write {variable}=1",
        )
    return _in_file(tools["lightning_graphs"], path, text)


def _read(path: Path, variable: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{variable} names a file that can be read.",
            f"{path.absolute()}: {error}",
            "correct the path, which starts from the working directory",
        ) from None


def _yaml(text: str, place: str) -> Any:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = str(key.value)
            if name in seen:
                observed = f"{place}, line {key.start_mark.line + 1}: {name} a second time"
                raise _unreadable(observed, "YAML")
            seen.add(name)
        return yaml.safe_load(text)
    except RecursionError:
        raise _unreadable(f"{place}: its brackets are nested too deeply", "YAML") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise _unreadable(f"{place}{line}: {problem}", "YAML") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values; json itself would keep the last of several."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key} a second time")
        values[key] = value
    return values


def _unreadable(observed: str, language: str) -> OptionError:
    return OptionError(
        f"Options of GraphCapture are written in {language} here.",
        observed,
        f"correct the {language}",
    )


def _in_file(values: Any, path: Path, text: str) -> Configuration:
    """A file without content asks for the defaults."""
    if not isinstance(values, Mapping) and values is not None:
        raise OptionError(
            "A file of options holds names with their values.",
            f"{path}: {type(values).__name__}",
            "write one 'name: value' a line",
        )
    return Configuration(values or {}, str(path), text)
