"""The arguments of a call that is observed: what becomes of them while it runs, and afterwards.

What runs in the middle of the eager step never raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.core.leaves import SameInside, as_hashable, special_kind
from lightning_graphs.core.refusals import is_changed
from lightning_graphs.core.tree import flatten
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.modules.entry import has_own_forward


class WatchedArguments:
    """The arguments of a call.

    Those who write tensors past autograd, as kernels outside of torch and ``x.data`` do, are found
    by comparing values alone. torch's own layers are not among them.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves: list[tuple[str, Any]] = []
        flatten(tuple(args), "args", leaves)
        flatten(dict(kwargs), "kwargs", leaves)
        self._tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        self._others = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, Tensor)]
        self._objects: list[tuple[str, SameInside]] = []
        self._before: list[Tensor] | None = None
        self._written: Sequence[Tensor | bool] | None = None
        if all(map(_runs_torch_alone, module.modules())):
            self._written = [False] * len(self._tensors)
        elif not any(map(special_kind, self._tensors)):  # a call with such a one is no graph
            with torch.no_grad(), contextlib.suppress(Exception):  # no memory, or odd dtypes
                self._before = [tensor.clone() for tensor in self._tensors]

    def look_again(self) -> None:
        """Look at them right after the call."""
        keys = [(name, as_hashable(leaf)) for name, leaf in self._others]
        self._objects = [(name, key) for name, key in keys if isinstance(key, SameInside)]
        if self._before is not None:
            pairs = zip(self._tensors, self._before, strict=True)
            with torch.no_grad(), contextlib.suppress(Exception):
                self._written = [_is_written(tensor, before) for tensor, before in pairs]
        self._before = None

    def written(self) -> list[bool] | None:
        """Which of the tensors hold other values than before; None if nobody could tell."""
        if self._written is None:
            return None
        with contextlib.suppress(Exception):
            return list(map(bool, self._written))
        return None

    def refuse_later_changes(self) -> None:
        """Refuse a capture where objects hold other values by now than right after the call."""
        for name, key in self._objects:
            now = as_hashable(key.value)
            if isinstance(now, SameInside) and (changes := key.changes(now)):
                raise CaptureError(
                    "A graphed module is captured after the step, with its arguments as they are "
                    "then.",
                    f"since the call, {name}{changes[0]}",
                    "pass what changes by itself, as a number or a tensor, or a new object to each "
                    "call",
                )


def _is_written(tensor: Tensor, before: Tensor) -> Tensor | bool:
    if tensor.untyped_storage().nbytes() == 0 and before.numel():  # released by the call
        return True
    return is_changed(tensor, before)


def _runs_torch_alone(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not has_own_forward(module)
