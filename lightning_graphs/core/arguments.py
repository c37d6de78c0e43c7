"""What the containers and objects hold that a call is given, to notice that the call changes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_graphs.core.contents import Contents
from lightning_graphs.core.values import attributes_of, called_with, entries, in_slot, walk
from lightning_graphs.errors import CaptureError


def contents_left(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Undo what the body, the capture of a call, changes in its containers and objects.

    Raises:
        CaptureError: names what it has changed, which a replay would leave as it is.
    """
    remedy = "return the new value, and let the caller store it"
    if any(map(_is_of_transformers, [*args, *kwargs.values()])):
        remedy = "set config.use_cache = False: training needs no cache of keys and values"

    def refuse(names: str) -> None:
        raise CaptureError(
            "A graphed callable must not change its arguments: a replay would leave the caller's "
            "containers and objects as they are.",
            f"the call changes {names}",
            remedy,
        )

    return contents_of(args, kwargs).left(refuse)


def contents_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contents:
    """What the arguments of a call hold now."""
    named = [(f"args[{i}]", value) for i, value in enumerate(args)]
    named += [(f'kwargs["{key}"]', value) for key, value in kwargs.items()]
    return Contents(held_in_all(named))


def held_in_all(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Name and value of the containers and objects in some values, levels deep, these first."""
    seen: dict[int, Any] = {}
    for name, value in named:
        yield from walk(name, value, seen, inside=_inside)


def _inside(value: Any) -> list[tuple[str, Any, Any]]:
    """What is in an argument, and in what it hands on for others to call.

    Of objects of transformers, which are no author's own, the tables of attributes: the layers of a
    model fill those of a cache.
    """
    if _is_of_transformers(value):
        return [("", "", attributes_of(value))]
    found = list(entries(value) or [])
    if isinstance(value, (MethodType, BuiltinMethodType, partial)):
        found += [(label, label, given) for label, given in called_with(value)]
    elif isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        cells = zip(names, value.__closure__ or (), strict=True)
        found += [(f".{name}", name, in_slot(cell, "cell_contents")) for name, cell in cells]
    return found


def _is_of_transformers(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("transformers.") and not issubclass(kind, (dict, nn.Module))
