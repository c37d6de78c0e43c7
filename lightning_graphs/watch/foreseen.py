"""What a step reads of its tensors: the last one of the warm-up shows it ahead of captures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.device.rules import DYNAMIC_SHAPE, HOST_READ
from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import (
    LIBRARIES,
    CallSiteFinder,
    frames_of_region,
    is_library,
)
from lightning_graphs.private.exchange import TURN
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    has_memory,
    memory_of,
    named_buffers_in,
    named_modules_in,
)
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.assertions import is_read
from lightning_graphs.watch.host_trace import FROM_PYTHON
from lightning_graphs.watch.tracers import Asks, Question, tensors_asked
from lightning_graphs.watch.user_code import steps_of_optimizers

_READ_ALL = ("tolist", "cpu")
"""Functions whose results are the host's."""
_SHAPED = ("nonzero", "argwhere", "masked_select")
"""Functions whose results have a shape that depends on numbers, as entries under a mask have."""
_ROUNDING = frozenset(
    {"sum", "mean", "std", "var", "norm", "cumsum", "prod", "softmax", "sigmoid", "exp", "log"}
    | {"sqrt", "pow", "matmul", "__matmul__", "einsum", "rand", "rand_like", "randn", "bernoulli"}
)
"""Functions that round real numbers, or draw them, otherwise on a host."""
_TRANSFORMS = "torch._functorch."
_GETITEM = Tensor.__getitem__
_NUMBERS = (Asks.ITEM, Asks.INT, Asks.FLOAT, Asks.NUMBER)
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
        # The refusal of a shape that code computes with, and that depends on numbers which no host
        # has, but the device has ahead of its parameters
        self.shape: CaptureError | None = None
        self.makes = self.makes_late = False  # tensors of Python values; behind a use of parameters
        self.used: set[int] = set()  # the ``id`` of tensors that functions of torch were given
        self._device = torch.device("cpu")
        self._known: set[int] = set()  # memory of buffers, whose numbers the host may know
        self._kept: set[tuple[CodeType, int]] = set()  # calls by which code asks that are kept back

    @contextlib.contextmanager
    def observing(
        self, module: nn.Module, device: torch.device, keep: Callable[[CaptureError], bool]
    ) -> Iterator[None]:
        """Observe the body, an eager step of this module.

        No host knows ahead of a replay what is computed of parameters. Numbers of that are offered
        to be kept back, as those that a capture is refused for.
        """
        questions = others = 0
        is_last = False  # code makes tensors of Python values behind what it asks for
        self._device = device
        self.used.clear()
        buffers = (buffer for _, buffer in named_buffers_in(named_modules_in(("", module))))
        self._known = set(map(memory_of, filter(has_memory, buffers)))
        trained: set[int] = set()  # memory of what is computed of parameters
        rounded: set[int] = set()  # and of what no host computes to the bit
        steps = steps_of_optimizers(module)  # which are left behind the graph where they read
        shaped: dict[int, tuple[Tensor, CaptureError]] = {}  # with the refusals of their shapes

        def is_trained(tensor: Tensor) -> bool:
            return tensor.requires_grad or (has_memory(tensor) and memory_of(tensor) in trained)

        def note(asked: Question) -> None:
            nonlocal questions, is_last
            if not self.counts(asked):
                return
            is_last = False
            entries = [*frames_of_region(asked.frame)]
            is_number = asked.asks in _NUMBERS and all(map(is_trained, asked.tensors))
            is_kept = is_number and steps.isdisjoint(each.f_code for each in entries)
            if is_kept and keep(_refusal(entries)):
                self._kept.add(_call_in(asked.frame))
            else:
                questions += 1

        def see(function: Any, args: Any, kwargs: Any) -> Any:
            nonlocal others, is_last
            result = function(*args, **kwargs)
            given, found = leaves_of((args, kwargs), Tensor), leaves_of(result, Tensor)
            before, new = ({memory_of(t) for t in some if has_memory(t)} for some in (given, found))
            self.used.update(map(id, given))
            name = getattr(function, "__name__", "")
            is_shape = _is_masked(args[1]) if function is _GETITEM else name in _SHAPED
            are_trained = any(map(is_trained, given))
            reads = (is_shape or name in _READ_ALL) and any(map(self._is_here, args[:1]))
            others += reads
            if self.shape is None and found:
                self.shape = next((shaped[id(t)][1] for t in given if id(t) in shaped), None)
                if reads and is_shape and not (are_trained or before.isdisjoint(rounded)):
                    error = _foreseen(name, sys._getframe(1))
                    shaped.update((id(t), (t, error)) for t in found)
            if _is_of_python(function, args, sys._getframe(2)):
                self.makes = is_last = True
                self.makes_late |= bool(trained or self.shape)
            is_rounded = name in _ROUNDING and any(map(torch.is_floating_point, found))
            is_rounded = is_rounded or not before.isdisjoint(rounded)
            for known, is_new in ((trained, are_trained), (rounded, is_rounded)):
                if is_new:
                    known.update(new)
                else:  # memory that was freed
                    known.difference_update(new)
            return result

        with TURN, tensors_asked(note), FunctionMode(see):
            yield
        self.is_any = bool(questions or others or self.makes)
        self.questions = 0 if others or is_last else questions

    def counts(self, asked: Question) -> bool:
        """Return whether code asks for what only the host could tell."""
        if asked.frame.f_globals.get("__name__", "").startswith(_ELSEWHERE):
            return False
        if _call_in(asked.frame) in self._kept:
            return False
        here = filter(has_memory, filter(self._is_here, asked.tensors))
        unknown = [tensor for tensor in here if memory_of(tensor) not in self._known]
        return len(unknown) == len(asked.tensors) and is_read(asked)

    def _is_here(self, tensor: Any) -> bool:
        return type(tensor) in PLAIN_TENSORS and tensor.device == self._device


def _call_in(frame: FrameType) -> tuple[CodeType, int]:
    return frame.f_code, frame.f_lasti


def _refusal(frames: Iterable[FrameType]) -> CaptureError:
    """Make the error by which a capture would be refused for what the innermost frame asks."""
    entries: TracebackType | None = None
    for each in frames:
        entries = TracebackType(entries, each, each.f_lasti, each.f_lineno)
    site = CallSiteFinder().here()
    return HOST_READ.refused(f"item() or float() at {site.describe()}").with_traceback(entries)


def _foreseen(name: str, frame: FrameType) -> CaptureError:
    """Make the error by which a capture would be refused for a shape, without keeping frames."""
    error = DYNAMIC_SHAPE.refused_here(name)
    frames = [f for f in frames_of_region(frame) if not is_library(f.f_code.co_filename)]
    error.lines = {f.f_code: f.f_lineno for f in frames}
    return error


def _is_masked(index: Any) -> bool:
    """Return whether an index chooses as many entries as a mask is true."""
    return any(isinstance(i, Tensor) and i.dtype is torch.bool for i in _parts(index))


def _is_of_python(function: Any, args: Any, frame: FrameType) -> bool:
    """Return whether a function that code calls there makes a tensor of Python values."""
    if function is _GETITEM:
        return any(isinstance(part, list) for part in _parts(args[1]))
    name, package = getattr(function, "__name__", ""), frame.f_globals.get("__name__", "")
    if package.partition(".")[0] in LIBRARIES.framework or package.startswith(_TRANSFORMS):
        return False  # logs are made otherwise in a replay, and transforms count their dimensions
    if name not in FROM_PYTHON:
        return False
    return name == "new_tensor" or not isinstance(args[0] if args else None, Tensor)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
