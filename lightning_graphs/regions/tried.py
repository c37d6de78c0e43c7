"""An optimizer step that is tried as it is: what it does besides computing on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.errors import GraphError, in_one_line
from lightning_graphs.private.callsite import line_of_class
from lightning_graphs.private.exchange import Absence
from lightning_graphs.values.snapshot import PythonSnapshot, iter_inside
from lightning_graphs.values.tree import leaves_of


def why_failed(optimizer: Optimizer, error: BaseException) -> str:
    """Say what an optimizer step has failed by in a capture, with the optimizer's own line."""
    said = in_one_line(error)
    if isinstance(error, GraphError):
        return said
    site = line_of_class(error, type(optimizer))
    return f"{said} at {site.describe()}" if site.line else said


class ClosureUse:
    """Finds whether a step only calls its closure, once and ahead of all work on tensors."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        self._watching = contextlib.ExitStack()
        self._calls, self._is_only_called = 0, True
        self._loss: Any = None

    @property
    def is_plain(self) -> bool:
        return self._calls == 1 and self._is_only_called

    def watched(self, step: Callable[..., Any]) -> Any:
        """Take the step, and watch its functions of torch."""
        with self._watching:
            self._watch()
            return step(self._called)

    def _watch(self) -> None:
        self._watching.enter_context(FunctionMode(self._seen))

    def _called(self) -> Any:
        self._calls += 1
        self._watching.close()  # what the closure runs is not the step's own
        try:
            self._loss = self._closure()
            return self._loss
        finally:
            self._watch()

    def _seen(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = leaves_of((args, kwargs), Tensor)
        is_ahead = self._calls == 0 and bool(tensors)
        if is_ahead or any(tensor is self._loss for tensor in tensors):
            self._is_only_called = False
        return function(*args, **kwargs)


class HostState:
    """What an optimizer has on the host: values in its state and attributes, and CPU tensors.

    Tensors of a CPU count only where parameters are elsewhere.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._tables: list[dict[Any, Any]] = [*optimizer.state.values(), vars(optimizer)]
        self._values = PythonSnapshot(iter_inside(("state", table) for table in self._tables[:-1]))
        self._values.add("", vars(optimizer))
        here = (v for v in self._tensors() if v.device.type == "cpu" != device.type)
        self._known = [(tensor, tensor.clone()) for tensor in here]

    def _tensors(self) -> Iterator[Tensor]:
        held = chain.from_iterable(table.values() for table in self._tables)
        return (value for value in held if isinstance(value, Tensor))

    def moved(self) -> list[str]:
        """List the names of what has another value now."""
        found = list(self._values.changes())
        names = {str(c.key) if c.key is not Absence.ABSENT else c.name for c in found}
        changed = {id(tensor) for tensor, was in self._known if not torch.equal(tensor, was)}
        names |= {str(k) for table in self._tables for k, v in table.items() if id(v) in changed}
        return sorted(names)

    def restore(self) -> None:
        self._values.restore()
        for tensor, was in self._known:
            tensor.copy_(was)
