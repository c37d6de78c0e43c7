"""Private corners of dispatch modes, which see every operator of a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._ops import _higher_order_ops
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


def dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, outermost first; nothing public reads them."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """Run operators and functions of torch that no mode of this thread sees."""
    show = hide_modes()
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        show()


def hide_modes() -> Callable[[], None]:
    """Let no mode of this thread see operators; what to call to let them see again."""
    modes = [_python_dispatch._pop_mode() for _ in dispatch_modes()]

    def show() -> None:
        while modes:
            _python_dispatch._push_mode(modes.pop())

    return show


def run_kernel(operator: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """Run what an operator does on a device, where modes see the operators that it is made of.

    Nothing public leaves out the modes for an operator and keeps them for those inside of it.
    """
    key = getattr(torch._C.DispatchKey, device.type.upper())
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def let_higher_order_operators_in(mode: type[TorchDispatchMode]) -> None:
    """Let modes of this type see higher-order operators as all others.

    Newer versions of torch ask the type; older ones want a rule of each operator for each type.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for operator in _higher_order_ops.values():
        if mode not in operator.python_key_table:
            operator.py_impl(mode)(partial(_dispatched, operator))


def _dispatched(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


def eager_attention(operator: Any) -> Callable[..., Any] | None:
    """What ``flex_attention`` runs in eager mode; None for other operators."""
    kernels: dict[Any, Callable[..., Any]] = getattr(operator, "py_kernels", {})
    is_attention = str(operator).startswith("flex_attention")  # or its backward pass
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return kernels.get(key) if is_attention else None
