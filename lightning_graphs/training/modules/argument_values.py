"""Whether a call that is observed writes its arguments: a replay would write copies of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.core.leaves import special_kind
from lightning_graphs.core.refusals import is_changed
from lightning_graphs.core.tree import leaves_of


class ArgumentValues:
    """The values of the tensors that a call is given, kept while it runs.

    Those who write past autograd, as kernels outside of torch and ``x.data`` do, are found by
    nothing else. torch's own layers are not among them.

    Args:
        module: What is called.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        self._before: list[Tensor] | None = None
        self._written: list[Tensor] | list[bool] | None = None
        if all(map(_is_torchs, module.modules())):
            self._written = [False] * len(self._tensors)
            return
        if any(map(special_kind, self._tensors)):  # such a call is no graph
            return
        with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
            self._before = [tensor.clone() for tensor in self._tensors]

    def compare(self) -> None:
        """Look at them after the call."""
        if self._before is not None:
            pairs = zip(self._tensors, self._before, strict=True)
            with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
                self._written = [is_changed(tensor, before) for tensor, before in pairs]
            self._before = None

    def written(self) -> list[bool] | None:
        """Which of them hold other values than before; None if nobody could tell."""
        return None if self._written is None else list(map(bool, self._written))


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)
