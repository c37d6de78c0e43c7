"""Modes of torch that are left, and entered again, around others that were entered before them.

torch leaves modes only in the reverse order of their entry; its stacks of them are private.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils import _python_dispatch

from lightning_graphs.private.torch import dispatch_modes


def modes_entered() -> tuple[int, int]:
    """Return how many dispatch modes and function modes are entered in this thread."""
    return len(dispatch_modes()), torch._C._len_torch_function_stack()


@contextlib.contextmanager
def modes_left(entered: tuple[int, int]) -> Iterator[None]:
    """Leave modes that were entered after these for the body, which exchanges the others.

    A capture ends, and another one begins, while modes are entered that watch its code.
    """
    dispatching, functions = modes_entered()
    inner = [_python_dispatch._pop_mode() for _ in range(dispatching - entered[0])]
    others = [torch._C._pop_torch_function_stack() for _ in range(functions - entered[1])]
    try:
        yield
    finally:
        for mode in reversed(others):
            torch._C._push_on_torch_function_stack(mode)
        for mode in reversed(inner):
            _python_dispatch._push_mode(mode)
