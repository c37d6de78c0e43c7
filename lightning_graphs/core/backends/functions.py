"""Sees functions of torch that the dispatcher never shows, or shows too late."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """Gives every function of torch that is called, with its arguments, to another."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.higher_order.cond:
            return _cond(functools.partial(self._call, func), *args)
        return self._call(func, args, kwargs or {})


def _cond(call: Callable[..., Any], choice: Any, *rest: Any) -> Any:
    """Call the operator of ``torch.cond``, whose backward pass wants tuples from its branches.

    torch's compiler makes them of tensors, and no mode lets it compile.
    """
    *branches, inputs = rest
    is_single = False

    def in_tuple(branch: Callable[..., Any], *given: Any) -> Any:
        nonlocal is_single
        result = branch(*given)
        is_single = isinstance(result, Tensor)
        return (result,) if is_single else result

    result = call(
        (choice, *(functools.partial(in_tuple, branch) for branch in branches), inputs), {}
    )
    return result[0] if is_single else result
