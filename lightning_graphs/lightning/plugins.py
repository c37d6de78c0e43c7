"""``LIGHTNING_GRAPHS``: graphs for a program that does not know of them.

Lightning calls :func:`callbacks`, through the entry point ``lightning.pytorch.callbacks_factory``,
for every trainer of the process, and :func:`callbacks_of_fabric` for every Fabric, so nothing is
imported here before graphs are asked for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from lightning_graphs.lightning.callback import GraphCapture


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
    """Make the callback that the environment asks for; none without ``LIGHTNING_GRAPHS``.

    An empty value, ``0``, ``false``, ``off`` and ``no`` ask for none. Any other value is read by
    :func:`capture_of`.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if value.lower() in _OFF:
        return []
    capture = capture_of(value)
    capture.gives_way = True
    return [capture]


def callbacks_of_fabric() -> list[Any]:
    """Tell a Fabric that is made that graphs need a Trainer, or ``lightning_graphs.capture``.

    Raises:
        UnsupportedError: One of its callbacks is a GraphCapture.
    """
    if module := sys.modules.get("lightning_graphs.lightning.callback"):
        from lightning_graphs.lightning.private import given_to_fabric

        for one in given_to_fabric():
            if isinstance(one, module.GraphCapture):
                one.on_after_setup()
    if os.environ.get(VARIABLE, "").strip().lower() not in _OFF:
        from lightning.fabric.utilities import rank_zero_info

        rank_zero_info(
            f"{VARIABLE} is for trainers. In a loop of Fabric write step = "
            "lightning_graphs.capture(train_step, model, optimizer)."
        )
    return []


def capture_of(value: str) -> GraphCapture:
    """Make the callback with the options that a value of the variable holds.

    Args:
        value: ``1``, ``true``, ``on`` or ``yes`` for the defaults, a scope, ``diagnose``, the path
            of a YAML or JSON file, or options as YAML.

    Raises:
        OptionError: it is none of these, or an option is unknown or impossible.
    """
    from lightning_graphs.errors import FIX
    from lightning_graphs.lightning.callback import GraphCapture
    from lightning_graphs.policy.options import OptionError

    options, place = _options_in(_WORDS.get(value.lower(), value))
    try:
        return GraphCapture(**options)
    except TypeError as error:  # an unknown option
        what, _, fix = str(error).partition(FIX)
        raise OptionError(f"{place}: {what}", remedy=fix) from None
    except OptionError as error:
        raise OptionError(f"{place}: {error.rule}", error.observed, error.remedy) from None


def _options_in(text: str) -> tuple[dict[str, Any], str]:
    """Return options by name, and where they are written. JSON is a subset of YAML."""
    import yaml

    from lightning_graphs.policy.options import OptionError

    place = VARIABLE
    if "\n" not in text and Path(text).suffix.lower() in _FILES:
        place = text
        try:
            text = Path(place).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"{VARIABLE} must name a file that can be read.",
                f"got {Path(place).absolute()}: {error}",
                "correct the path, which begins at the working directory",
            ) from None
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        rule, said = f"{place} must hold valid YAML or JSON.", " ".join(str(error).split())
        raise OptionError(rule, said, "correct the text there") from None
    if not (values is None or (isinstance(values, dict) and all(type(n) is str for n in values))):
        raise OptionError(
            f"{VARIABLE} must be 0, 1, a scope, diagnose, a YAML or JSON file, or options in YAML.",
            f"got {text.partition(chr(10))[0]!r}" + (f" in {place}" if place != VARIABLE else ""),
            "write one 'name: value' a line, such as 'scope: step'; or 1 for the defaults",
        )
    return values or {}, place
