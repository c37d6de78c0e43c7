"""Hands out what a graphed callable returns: tensors of the caller's own."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_graphs.core.arguments.buffers import storage_address
from lightning_graphs.core.arguments.tree import flatten, substitute
from lightning_graphs.core.autograd.lending import LentMemory
from lightning_graphs.core.private.torch import clone_all
from lightning_graphs.errors import CaptureError

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip


Owing = list[tuple[Tensor, Tensor]]
"""Tensors that were handed out, and the gradient of each, which a graph computes."""


def gradients_of(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Number and gradient of those that keep theirs: leaves of autograd, or ``retain_grad()``."""
    keeping = ((i, t) for i, t in enumerate(tensors) if t.is_leaf or t.retains_grad)
    return [(i, t.grad) for i, t in keeping if t.grad is not None]


def tensors_returned(value: Any) -> list[Tensor]:
    """The tensors in what a call returns, which a replay returns anew; other objects it cannot."""
    leaves: list[tuple[str, Any]] = []
    flatten(value, "output", leaves)
    for name, leaf in leaves:
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise CaptureError(
                "A graphed callable must return containers of tensors, None and constants.",
                f"{name} is a {type(leaf).__qualname__}, in which a graph cannot find tensors",
                _remedy_for(leaf),
            )
    return [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]


def _remedy_for(leaf: object) -> str:
    """What to return in place of an object."""
    kind = type(leaf)
    if kind.__module__.startswith("transformers."):
        return "set config.use_cache = False: training needs no cache of keys and values"
    if isinstance(leaf, torch.distributions.Distribution):
        return f"return its parameters, and make the {kind.__name__} of them where it is used"
    return "return the tensors in that object instead"


class OutputPlan:
    """Rebuilds what a captured call returned around the tensors of a replay; constants stay."""

    def __init__(
        self,
        value: Any,
        *,
        static: bool,  # the graph's own output tensors are handed out instead of copies
        # Tensors of the callable's own. An output that lies in the memory of one is handed out
        # itself: whoever writes it means to write there.
        state: Sequence[Tensor] = (),
    ) -> None:
        tensors = tensors_returned(value)
        self.differentiable_indices = [i for i, t in enumerate(tensors) if t.requires_grad]
        self._plain = [i for i, t in enumerate(tensors) if not t.requires_grad]
        # With the autograd graph behind them
        self.requiring_grad = [tensors[i] for i in self.differentiable_indices]
        self.tensors = [tensor.detach() for tensor in tensors]
        self._gradients: list[tuple[int, Tensor]] = []  # of outputs that keep theirs, by index
        own = set(map(storage_address, state)) - {0}
        # Those that are handed out without a copy
        self._itself = {i for i in self._plain if storage_address(tensors[i]) in own}
        if static:
            self._itself.update(range(len(tensors)))
        self._lent: dict[int, LentMemory] = {}
        template = substitute(value, self.tensors)
        self._build: Callable[[Sequence[Tensor]], Any] = lambda found: substitute(template, found)
        if isinstance(value, Tensor):
            self._build = itemgetter(0)
        elif type(value) is tuple and all(isinstance(item, Tensor) for item in value):
            self._build = tuple

    def finish_capture(self) -> None:
        """Let go of the captured autograd graph."""
        found = gradients_of(self.requiring_grad)
        self._gradients = [(self.differentiable_indices[i], gradient) for i, gradient in found]
        self.requiring_grad = []

    def lend(self, index: int) -> LentMemory:
        """Hand out one of :attr:`tensors` itself from now on, not a copy."""
        if index not in self._lent:
            self._lent[index] = LentMemory(self.tensors[index])
            self._itself.add(index)
        return self._lent[index]

    def settle(self) -> None:
        """Begin to notice who keeps lent outputs, before the first replay."""
        for lent in self._lent.values():
            lent.settle()

    @property
    def is_kept(self) -> bool:
        return any(lent.is_kept for lent in self._lent.values())

    def give_away(self, owing: Owing) -> Any:
        """The return value of a call after which there is no replay: without copies."""
        return self._built([tensor.detach() for tensor in self.tensors], owing)

    def copies(self, owing: Owing) -> Any:
        """The return value of a call, and what is still to be the gradient of a tensor in it."""
        return self._built(self._take(range(len(self.tensors))), owing)

    def _built(self, found: list[Tensor], owing: Owing) -> Any:
        owing += [(found[i], gradient) for i, gradient in self._gradients]
        return self._build(found)

    def _take(self, indices: Sequence[int]) -> list[Tensor]:
        tensors, itself = self.tensors, self._itself
        if not itself:
            return clone_all([tensors[i] for i in indices])
        return [tensors[i].detach() if i in itself else tensors[i].clone() for i in indices]

    def differentiable(self) -> tuple[Tensor, ...]:
        """The outputs that require grad, for the autograd node to return."""
        return tuple(self._take(self.differentiable_indices))

    def hand_out(self, differentiable: Sequence[Tensor] | None = None) -> Any:
        if differentiable is None:
            return self._build(self._take(range(len(self.tensors))))
        if not self._plain:
            return self._build(differentiable)
        found = dict(zip(self.differentiable_indices, differentiable, strict=True))
        found.update(zip(self._plain, self._take(self._plain), strict=True))
        return self._build([found[i] for i in range(len(found))])
