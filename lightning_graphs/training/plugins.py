"""``LIGHTNING_GRAPHS``: graphs for a program that does not know of them.

Lightning calls :func:`callbacks`, through the entry point ``lightning.pytorch.callbacks_factory``,
for every trainer that anybody makes, so nothing is imported here before graphs are asked for.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lightning_graphs.training.callback import GraphCapture
    from lightning_graphs.training.options import OptionError

VARIABLE = "LIGHTNING_GRAPHS"
_FILES = (".json", ".yaml", ".yml")
_OFF = frozenset({"", "0", "false", "off", "no"})
_WORDS = {
    **dict.fromkeys(("1", "true", "on", "yes"), ""),
    **{scope: f"scope: {scope}" for scope in ("auto", "step", "modules")},
    **dict.fromkeys(("diagnose", "doctor"), "diagnose: true"),
}
"""Single words -> the options that they stand for."""


def callbacks() -> list[Callback]:
    """The callback that the environment asks for; none without ``LIGHTNING_GRAPHS``.

    An empty value, ``0``, ``false``, ``off`` and ``no`` ask for none, everything else for that of
    :func:`capture_of`.

    Raises:
        OptionError: the value is none of these, or an option is unknown or impossible.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if value.lower() in _OFF:
        return []
    capture = capture_of(value)
    capture.gives_way = True
    return [capture]


def capture_of(value: str) -> GraphCapture:
    """The callback with the options that a value of the variable holds.

    Args:
        value: ``1``, ``true``, ``on`` or ``yes`` for the defaults, a scope, ``diagnose``, the path
            of a YAML or JSON file, or options as YAML.

    Raises:
        OptionError: it is none of these, or an option is unknown or impossible; with its line.
    """
    from lightning_graphs.training.callback import GraphCapture
    from lightning_graphs.training.options import OLD_NAMES, OptionError, Options

    text, place = _text_of(_WORDS.get(value.lower(), value))
    values, places = _read(text, place)
    known = list(Options.__dataclass_fields__)
    for name in values:
        if name not in (*known, *OLD_NAMES):
            near = difflib.get_close_matches(str(name), known, n=1)
            raise OptionError(
                "A configuration must hold options of GraphCapture only.",
                f"{places.get(str(name), place)}: {name}",
                f"write {near[0]}" if near else f"write one of {', '.join(known)}",
            )
    try:
        return GraphCapture(**values)
    except OptionError as error:
        place = next((places[name] for name in values if f"{name}=" in error.observed), place)
        raise OptionError(error.rule, f"{place}: {error.observed}", error.remedy) from None


def _text_of(value: str) -> tuple[str, str]:
    """The options as they are written, and where."""
    from lightning_graphs.training.options import OptionError

    if "\n" in value or Path(value).suffix.lower() not in _FILES:
        return value, VARIABLE
    try:
        return Path(value).read_text(encoding="utf-8"), value
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{VARIABLE} must name a file that can be read.",
            f"{Path(value).absolute()}: {error}",
            "correct the path, which starts from the working directory",
        ) from None


def _read(text: str, place: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Options by name, and where each is written. JSON is read as the YAML that it is."""
    import yaml

    from lightning_graphs.training.options import OptionError

    def unreadable(where: str, problem: str) -> OptionError:
        rule = "Options of GraphCapture must be written in YAML or JSON."
        return OptionError(rule, f"{where}: {problem}", "correct it")

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except RecursionError:
        raise unreadable(place, "its brackets are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}, line {mark.line + 1}" if mark is not None else place
        raise unreadable(where, getattr(error, "problem", None) or str(error)) from None
    if not isinstance(values, dict | None):
        raise OptionError(
            f"{VARIABLE} must be 0, 1, a scope, diagnose, a YAML or JSON file, or options in YAML.",
            f"{place}: {text.partition(chr(10))[0]}",
            "write one 'name: value' a line, such as 'scope: step'; or 1 for the defaults",
        )
    places: dict[str, str] = {}
    for key, _ in node.value if values else ():
        here = f"{place}, line {key.start_mark.line + 1}"
        if key.value in places:
            raise unreadable(here, f"{key.value} a second time")
        places[key.value] = here
    return values or {}, places
