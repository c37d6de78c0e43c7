"""Where captured code stores something: a replay runs none of it, and stores it again."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

from torch import Tensor, nn

from lightning_graphs.core.values import Absence, attributes_of

Stores = tuple[tuple[nn.Module, str, Any], ...]
"""Module, name and value of each attribute; the values are plain ones."""


def set_again(stores: Stores) -> None:
    """Set these attributes, past whatever the module makes of it: that has run at capture."""
    for module, name, value in stores:
        vars(module)[name] = value


class Place:
    """Where something is kept.

    Args:
        name: What messages call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def now(self) -> Any:
        """What is there."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        """Keep this there."""
        raise NotImplementedError

    def is_still(self, now: Any, given: Any) -> bool:
        """Whether what is there is what was put there."""
        return now is given

    def is_counted(self) -> bool:
        """Whether a number of Python's is there that steps count."""
        return False

    def is_filled(self) -> bool:
        """Whether a list is there to which steps append."""
        return False


class Entry(Place):
    """An attribute, or an entry of what attributes hold, levels deep.

    Args:
        name: What messages call it.
        owner: The module, or a table of its parameters or buffers.
        keys: Of the attribute, of the entry in what it holds, and so on.
    """

    def __init__(self, name: str, owner: Any, keys: tuple[Any, ...]) -> None:
        super().__init__(name)
        self.owner = owner
        self.keys = keys

    @property
    def table(self) -> Any:
        """What it is an entry of."""
        table = _table_of(self.owner)
        for key in self.keys[:-1]:
            table = _table_of(table[key])
        return table

    def now(self) -> Any:
        table, key = self.table, self.keys[-1]
        return table.get(key, Absence.ABSENT) if isinstance(table, dict) else table[key]

    def put(self, value: Any) -> None:
        if value is Absence.ABSENT:
            self.table.pop(self.keys[-1], None)
        else:
            self.table[self.keys[-1]] = value


def _table_of(owner: Any) -> Any:
    return owner if isinstance(owner, (dict, list, deque)) else attributes_of(owner)


class Content(Entry):
    """What a list or a deque holds that is an entry."""

    def now(self) -> Any:
        return tuple(super().now())

    def put(self, value: Any) -> None:
        container = super().now()
        container.clear()
        container.extend(value)

    def is_still(self, now: Any, given: Any) -> bool:
        return len(now) == len(given) and all(map(operator.is_, now, given))


class Number(Entry):
    """A number of Python's that steps count.

    Attributes:
        base: What it is before the present step.
    """

    base: Any = None

    def is_counted(self) -> bool:
        return type(self.now()) in (int, float)


class Growing(Entry):
    """A list to which steps append."""

    def is_filled(self) -> bool:
        return type(self.now()) is list


class Memory(Place):
    """The memory of a parameter or buffer, which ``tensor.data = ...`` exchanges."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name)
        self.tensor = tensor

    def now(self) -> Any:
        return self.tensor.detach()

    def put(self, value: Any) -> None:
        self.tensor.data = value

    def is_still(self, now: Any, given: Any) -> bool:
        return bool(now.data_ptr() == given.data_ptr() and now.stride() == given.stride())
