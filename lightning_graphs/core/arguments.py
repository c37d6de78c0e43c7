"""What the containers and objects hold that a call is given, to notice that the call changes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_graphs.core.contents import Contents
from lightning_graphs.core.values import DEPTH, MOST_INSIDE, attributes_of, entries, is_plain
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
    """Name and value of the containers and objects in some values, levels deep, these first.

    Of objects of transformers, which are no author's own, the tables of attributes: the layers of a
    model fill those of a cache.

    Args:
        named: Name and value of each.
    """
    seen: dict[int, Any] = {}
    for name, value in named:
        yield from _held_in(name, value, seen, DEPTH)


def _held_in(name: str, value: Any, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Any]]:
    if is_plain(value) or isinstance(value, (Tensor, nn.Module, type)) or id(value) in seen:
        return
    seen[id(value)] = value
    if _is_of_transformers(value):
        value = attributes_of(value)
        inside = [(f".{key}", key, held) for key, held in value.items()]
    else:
        inside = entries(value) or [(label, label, held) for label, held in _called_with(value)]
    yield name, value
    if depth > 0 and len(inside) <= MOST_INSIDE:
        for label, _, held in inside:
            yield from _held_in(name + label, held, seen, depth - 1)


def _called_with(value: Any) -> Iterator[tuple[str, Any]]:
    """What a function changes that is handed on for others to call."""
    if isinstance(value, (MethodType, BuiltinMethodType)):
        if not isinstance(value.__self__, ModuleType):
            yield ".__self__", value.__self__
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                yield f".{name}", cell.cell_contents


def _is_of_transformers(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("transformers.") and not issubclass(kind, (dict, nn.Module))
