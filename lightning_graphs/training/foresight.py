"""What a fit's code may do in a later step, read from the code: gradients that it asks for."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_graphs.core.tree import leaves_of
from lightning_graphs.training.own_code import codes_in

_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_graphs", "numpy"})
_STARTS_BACKWARD = (torch.autograd.grad, torch.autograd.backward)
_AGAIN = frozenset({"create_graph", "retain_graph"})
_TO_NODES = frozenset({"next_functions", "get_gradient_edge"})


class Foresight:
    """What the code of a fit can do with autograd, whether or not a step has done it yet.

    The classes of the module, of its submodules and of the trainer's callbacks are read, and every
    function that they reach by a global name. Libraries are left out.

    Args:
        module: The user's module, attached to its trainer.

    Attributes:
        asks_for_gradients: Some code may start a backward pass of its own, perhaps for some
            parameters only.
        differentiates_again: Some code may go through a graph more than once.
        reaches_nodes: Some code may get hold of the nodes that accumulate gradients, and put hooks
            on them, of which torch tells nobody.
    """

    def __init__(self, module: LightningModule) -> None:
        self._words: set[str] = set()
        self._seen: set[types.CodeType] = set()
        self.asks_for_gradients = not module.automatic_optimization
        self.reaches_nodes = False
        self._read_all([module, *module.modules(), *module.trainer.callbacks])  # type: ignore[attr-defined]
        self.differentiates_again = not self._words.isdisjoint(_AGAIN)

    def _read_all(self, roots: list[Any]) -> None:
        pending = [f for kind in {type(root) for root in roots} for f in _functions(kind)]
        while pending:
            function = pending.pop()
            for code in codes_in(function.__code__):
                if code not in self._seen:
                    self._seen.add(code)
                    pending += self._read(code, function.__globals__)

    def _read(self, code: types.CodeType, known: dict[str, Any]) -> Iterator[types.FunctionType]:
        """Note what one piece of code says; yields the functions that it names."""
        names = set(code.co_names)
        values = [known[name] for name in names if name in known]
        # A function of autograd by its path, by another name, or a tensor's method.
        self.asks_for_gradients |= (
            names >= {"autograd", "grad"}
            or "backward" in names
            or any(value is start for value in values for start in _STARTS_BACKWARD)
            or ("grad" in names and any(value is torch.autograd for value in values))
        )
        self.reaches_nodes |= not names.isdisjoint(_TO_NODES)
        for constant in code.co_consts:
            if isinstance(constant, tuple):  # names of keyword arguments are among them
                self._words.update(word for word in constant if isinstance(word, str))
        for value in values:
            if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                inside = (vars(value).get(name) for name in names)
                yield from (f for f in inside if isinstance(f, types.FunctionType))
            elif inspect.isclass(value):
                yield from _functions(value)
            elif isinstance(value, types.FunctionType) and not _is_library(value.__module__):
                yield value


@contextlib.contextmanager
def requests_watched(asked: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Call ``asked`` with the inputs of every backward pass that the body starts for some inputs.

    Gradients that a graph writes itself have no edge in autograd: it would call them unused.
    """
    grad, backward = torch.autograd.grad, torch.autograd.backward

    def watched_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked(leaves_of(inputs))
        return grad(outputs, inputs, *args, **kwargs)

    def watched_backward(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is not None:
            asked(leaves_of(kwargs["inputs"]))
        backward(*args, **kwargs)

    torch.autograd.grad, torch.autograd.backward = watched_grad, watched_backward
    try:
        yield
    finally:
        torch.autograd.grad, torch.autograd.backward = grad, backward


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if _is_library(base.__module__):
            continue
        for value in vars(base).values():
            found: Callable[..., Any] | None = value
            if isinstance(value, (staticmethod, classmethod)):
                found = value.__func__
            elif isinstance(value, property):
                found = value.fget
            if found is not None:
                found = inspect.unwrap(found) if callable(found) else found
            if isinstance(found, types.FunctionType):
                yield found


def _is_library(name: str | None) -> bool:
    top = (name or "").partition(".")[0]
    return top in _LIBRARIES or top in sys.stdlib_module_names - {"__main__"}
