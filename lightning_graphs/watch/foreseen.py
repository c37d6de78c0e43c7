"""What a step reads of its tensors: the last one of the warm-up shows it ahead of captures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.private.exchange import TURN, Member, exchanged, standing_in
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    has_memory,
    memory_of,
    named_buffers_in,
    named_modules_in,
)
from lightning_graphs.watch.assertions import is_read
from lightning_graphs.watch.tracers import Question, is_of_others, tensors_asked

_READ_ALL = ("tolist", "cpu", "nonzero")
"""Methods whose results are the host's, or have a shape that depends on numbers."""
_GETITEM = Tensor.__getitem__
_ELSEWHERE = ("torch.optim.", "torch.amp.")
"""Modules in whose place captures run other code, which reads nothing."""


class ForeseenReads:
    """What a step reads of its tensors on the host, and no graph could tell.

    Captures begin by it. A wrong guess makes them slower, and never wrong: they refuse what they
    have not recorded.
    """

    def __init__(self) -> None:
        self.is_any = False
        self.questions = 0  # numbers and truths that code has asked for; 0 if that is not all
        self._device = torch.device("cpu")
        self._known: set[int] = set()  # memory of buffers, whose numbers the host may know

    @contextlib.contextmanager
    def observing(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Observe the body, an eager step of this module."""
        questions = others = 0
        self._device = device
        buffers = (buffer for _, buffer in named_buffers_in(named_modules_in(("", module))))
        self._known = set(map(memory_of, filter(has_memory, buffers)))

        def note(asked: Question) -> None:
            nonlocal questions
            questions += self.counts(asked)

        def member(name: str) -> Member:
            own = getattr(Tensor, name)

            def call(_: FrameType, tensor: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal others
                others += self._is_here(tensor)
                return own(tensor, *args, **kwargs)

            return Tensor, name, standing_in(own, call, is_of_others)

        def see(function: Any, args: Any, kwargs: Any) -> Any:
            nonlocal others
            if function is _GETITEM:
                others += self._is_here(args[0]) and _is_masked(args[1])
            return function(*args, **kwargs)

        # Exchanged and put back, `__getitem__` would leave the class a slot of sequences, by which
        # torch.tensor takes each tensor of one number for a list
        reading = exchanged(map(member, _READ_ALL))
        with TURN, tensors_asked(note), reading, FunctionMode(see):
            yield
        self.is_any = bool(questions or others)
        self.questions = 0 if others else questions

    def counts(self, asked: Question) -> bool:
        """Return whether code asks for what only the host could tell."""
        if asked.frame.f_globals.get("__name__", "").startswith(_ELSEWHERE):
            return False
        here = filter(has_memory, filter(self._is_here, asked.tensors))
        unknown = [tensor for tensor in here if memory_of(tensor) not in self._known]
        return len(unknown) == len(asked.tensors) and is_read(asked)

    def _is_here(self, tensor: Any) -> bool:
        return type(tensor) in PLAIN_TENSORS and tensor.device == self._device


def _is_masked(index: Any) -> bool:
    """Return whether an index chooses as many entries as a mask is true."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in parts)
