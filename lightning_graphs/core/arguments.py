"""What the containers and objects hold that a call is given, to notice that the call changes it."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_graphs.core.values import DEPTH, is_object, is_plain
from lightning_graphs.errors import CaptureError

_CHANGEABLE = (list, dict, set, deque)
_FRAMEWORKS = frozenset({"torch", "torchmetrics", "lightning", "pytorch_lightning"})
_MOST = 10_000  # what has more inside is data


@contextlib.contextmanager
def contents_left(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Undo what the body, the capture of a call, changes in its containers and objects.

    Raises:
        CaptureError: names what it has changed, which a replay would leave as it is.
    """
    named = [(f"args[{i}]", value) for i, value in enumerate(args)]
    contents = ArgumentContents([*named, *((f'kwargs["{k}"]', v) for k, v in kwargs.items())])
    try:
        yield
    finally:
        changed = contents.changed()
        contents.restore()
    if changed:
        raise CaptureError(
            "A graphed callable must not change its arguments: a replay would leave the caller's "
            "containers and objects as they are.",
            f"{', '.join(changed[:3])} is changed by the call",
            "return the new value; of transformers' models, set config.use_cache = False, since "
            "training needs no cache of keys and values",
        )


class ArgumentContents:
    """The containers and the attributes of objects among the arguments of a call, levels deep.

    Of objects that C code implements, and of those of torch, Lightning and Python itself, nothing
    is known.

    Args:
        arguments: Name and value of each.
    """

    def __init__(self, arguments: Iterable[tuple[str, Any]]) -> None:
        self._tables: list[tuple[str, Any, Any]] = []
        self._seen: dict[int, Any] = {}
        for name, value in arguments:
            self._look_into(name, value, DEPTH)

    def _look_into(self, name: str, value: Any, depth: int) -> None:
        if (
            is_plain(value)
            or isinstance(value, (Tensor, nn.Module, type))
            or id(value) in self._seen
        ):
            return
        self._seen[id(value)] = value
        table = value if isinstance(value, _CHANGEABLE) else _attributes(value)
        if table is not None:
            self._tables.append((name, table, table.copy()))
        inside: Iterable[tuple[str, Any]] = ()
        if isinstance(table, dict):
            form = "{}[{!r}]" if table is value else "{}.{}"
            inside = ((form.format(name, key), held) for key, held in table.items())
        elif isinstance(value, (list, tuple, deque)):
            inside = ((f"{name}[{i}]", held) for i, held in enumerate(value))
        if depth > 0 and len(self._seen) < _MOST:
            for label, held in inside:
                self._look_into(label, held, depth - 1)

    def changed(self) -> list[str]:
        """The names of what is no longer as it was."""
        return [name for name, table, before in self._tables if not _holds_the_same(table, before)]

    def restore(self) -> None:
        """Put everything back."""
        for _, table, before in self._tables:
            if not _holds_the_same(table, before):
                table.clear()
                (table.extend if isinstance(table, (list, deque)) else table.update)(before)


def _attributes(value: Any) -> dict[str, Any] | None:
    package = type(value).__module__.partition(".")[0]
    if package in _FRAMEWORKS or (package in sys.stdlib_module_names and not is_object(value)):
        return None
    table: dict[str, Any] | None = getattr(value, "__dict__", None)
    return table


def _holds_the_same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict) and not all(map(is_, now, before)):
        return False
    values = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
    return all(map(_is_same, *values))


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (is_plain(now) and type(now) is type(before) and bool(now == before))
