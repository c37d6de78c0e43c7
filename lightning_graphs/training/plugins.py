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
        OptionError: it is none of these, or an option is unknown or impossible.
    """
    import yaml

    from lightning_graphs.training.callback import GraphCapture
    from lightning_graphs.training.options import OLD_NAMES, OptionError, Options

    is_file = "\n" not in value and Path(value).suffix.lower() in _FILES
    place = value if is_file else VARIABLE
    try:
        text = (
            Path(value).read_text(encoding="utf-8") if is_file else _WORDS.get(value.lower(), value)
        )
        options: dict[str, Any] = yaml.safe_load(text) or {}  # JSON is YAML
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{VARIABLE} must name a file that can be read.",
            f"{Path(value).absolute()}: {error}",
            "correct the path, which starts from the working directory",
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}, line {mark.line + 1}" if mark is not None else place
        raise OptionError(
            "Options of GraphCapture must be written in YAML or JSON.",
            f"{where}: {getattr(error, 'problem', None) or error}",
            "correct it",
        ) from None
    if not isinstance(options, dict):
        raise OptionError(
            f"{VARIABLE} must be 0, 1, a scope, diagnose, a YAML or JSON file, or options in YAML.",
            f"{place}: {text.partition(chr(10))[0]}",
            "write one 'name: value' a line, such as 'scope: step'; or 1 for the defaults",
        )
    known = list(Options.__dataclass_fields__)
    for name in options:
        if name not in (*known, *OLD_NAMES):
            near = difflib.get_close_matches(str(name), known, n=1)
            raise OptionError(
                "A configuration must hold options of GraphCapture only.",
                f"{place}: {name}",
                f"write {near[0]}" if near else f"write one of {', '.join(known)}",
            )
    try:
        return GraphCapture(**options)
    except OptionError as error:
        raise OptionError(error.rule, f"{place}: {error.observed}", error.remedy) from None
