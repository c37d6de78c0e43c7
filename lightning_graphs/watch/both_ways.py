"""Both ways of code that asks the device: the graph computes all, and chooses there.

``if p_norm != 0: d_p = d_p.add(p, alpha=decay)`` asks in the step of an optimizer. A capture runs
the body ahead, undoes what that has written, and goes on without it (``branched.py``).

``if cosine.max() < delta: ...; return perturb, ratio`` asks in a function that the step calls. A
capture runs each call of it once for every way that its answers may lead, undoes what that has
written, and lets the graph choose what was written and what is returned.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.rules import HOST_READ, are_noted
from lightning_graphs.device.trace import KnownStorage, Operation, OperatorCall, Recorder
from lightning_graphs.private.callsite import frames_from
from lightning_graphs.private.exchange import called_instead, code_of
from lightning_graphs.private.torch import PLAIN_TENSORS, version_of
from lightning_graphs.values.memory import addresses_of
from lightning_graphs.values.snapshot import PythonSnapshot, iter_inside
from lightning_graphs.values.tree import leaves_of, parameters_of
from lightning_graphs.watch.branched import Branch
from lightning_graphs.watch.branches import TORCH_FOLDER
from lightning_graphs.watch.forms import plain_value
from lightning_graphs.watch.on_device import DeviceNumber, Either, is_scalar, number_in, truth_of
from lightning_graphs.watch.tracers import Asks, Question, ScalarTracer, is_of_others

_MOST = 6
"""Ways of one call: each is computed."""


class BothWays:
    """Runs branches and functions that ask the device each way they may go.

    Args:
        functions: Known to ask.
        optimizer: Whose step a capture runs; calls of that are not run again.
    """

    is_captured = False  # numbers that ask are compared in a capture alone

    def __init__(self, functions: frozenset[FunctionType], optimizer: Optimizer) -> None:
        self.functions = functions
        self._optimizer = optimizer
        self._outermost = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
        # Tensors that were chosen behind branches, with their versions then, and those of both ways
        self._values: list[tuple[Tensor, int, tuple[Tensor, Tensor]]] = []
        self._asking: list[FrameType] = []  # what has asked outside of them
        self._way: Way | None = None  # that is run now
        self._numbers: Any = None

    @contextlib.contextmanager
    def followed(self, numbers: Any) -> Iterator[None]:
        """Run calls of the functions each way while the body runs.

        Raises:
            CaptureError: Code has written into a tensor that was chosen behind a branch, and on one
                way would have written into a parameter, a gradient or the optimizer's state.
        """
        self._numbers = numbers
        with called_instead(dict.fromkeys(self.functions, self._call)):
            yield
        for value, version, both in self._values:
            if version_of(value) != version and not self._lasting().isdisjoint(addresses_of(both)):
                HOST_READ.refuse_here("a value that a branch chooses is written later")

    def _lasting(self) -> set[int]:
        """Return where the memory of parameters, gradients and state begins."""
        tensors = leaves_of([*self._optimizer.state.values()], Tensor)
        tensors += [t for p in parameters_of(self._optimizer) for t in (p, p.grad) if t is not None]
        return addresses_of([t for t in tensors if type(t) in PLAIN_TENSORS])

    def answer(self, asked: Question) -> bool | None:
        """Answer whether a scalar of the device is true; None outside of these functions."""
        is_truth = asked.asks in (Asks.TRUTH, Asks.EQUALITY)
        if not (is_truth or asked.tensors[0].dtype is torch.bool):
            return None
        truth = truth_of(asked)
        if truth is None or truth.device != self._numbers.device:
            return None
        return self.holds(truth, asked.frame, called=asked.is_called)

    def holds(self, truth: Tensor, frame: FrameType, *, called: bool = False) -> bool | None:
        """Answer whether a scalar, or a comparison of numbers, is true."""
        if self._way is not None:
            return self._way.go(truth)
        branch = Branch.of(frame, called=called)
        if branch is not None and (found := branch.answer(truth, self)) is not None:
            return found
        self._asking.append(frame)
        if not (are_noted() and self._functions_of(frame)):
            return None
        return bool(number_in(truth))  # the next capture runs it each way

    def learned(self) -> frozenset[FunctionType]:
        """Return the functions of which the last capture has learned that they ask."""
        asking, self._asking = self._asking, []
        found = map(self._functions_of, asking if are_noted() else asking[-1:])
        return frozenset().union(*found)

    def _functions_of(self, frame: FrameType) -> frozenset[FunctionType]:
        """Return the function that has asked, unless it is known, or the outermost one."""
        for each in filter(is_of_others, frames_from(frame)):
            code = each.f_code
            if code is self._outermost or code in map(code_of, self.functions):
                break
            if not code.co_filename.startswith(TORCH_FOLDER):
                return frozenset(f for f in _functions_in(each.f_globals) if code_of(f) is code)
        return frozenset()

    def _call(self, function: Any, _: FrameType, *args: Any, **kwargs: Any) -> Any:
        if self._way is not None:  # what it asks decides the way of the outer one
            return function(*args, **kwargs)
        given = [each for each in (*args, *kwargs.values()) if not isinstance(each, Optimizer)]
        contents = PythonSnapshot(iter_inside([("an argument", each) for each in given]))
        pending: list[list[bool]] = [[]]
        found: list[Way] = []
        while pending:
            if len(found) == _MOST:
                HOST_READ.stop_here(f"more than {_MOST} ways lead through a function")
            self._way = way = Way(self._numbers.device, pending.pop())
            try:
                with way:
                    way.returned = function(*args, **kwargs)
            finally:
                self._way = None
            pending += way.others()
            if not (pending or found):  # it has not asked
                return way.returned
            if contents.changed():
                contents.restore()
                HOST_READ.stop_here("a function changes its arguments, and asks")
            way.undo()
            found.append(way)
        return self._chosen(found)

    def way(self) -> Way:
        """Return what records the one way of a branch."""
        return Way(self._numbers.device, [])

    def scalar(self, value: Any) -> Tensor | bool | None:
        """Return the truth of a value, of one of the device a scalar; None if it has none."""
        if isinstance(value, DeviceNumber):
            value = value.tensor
        if not isinstance(value, Tensor):
            return bool(value)
        is_one = value.numel() == 1 and value.device == self._numbers.device
        return value.detach().reshape(()).ne(0) if is_one else None

    def either(self, condition: Tensor, one: Any, other: Any) -> Any:
        """Return the value of a variable behind a branch, of those on its ways."""
        value = self._either(condition, one, other)
        if isinstance(value, Tensor) and value is not one:
            self._values.append((value, version_of(value), (one, other)))
        return value

    @torch.no_grad()
    def _chosen(self, ways: Sequence[Way]) -> Any:
        """Write and return what the way does that the device goes."""
        first, *others = ways
        conditions = [way.condition() for way in others]
        written = {address: whole for way in ways for address, (whole, *_) in way.written.items()}
        if any(w[0].dtype != written[a].dtype for way in ways for a, w in way.written.items()):
            HOST_READ.stop_here("a function writes memory as of other types on another way")
        for address, whole in written.items():
            values = [way.written[address][2] if address in way.written else whole for way in ways]
            pairs = zip(conditions, values[1:], strict=True)
            whole.copy_(reduce(lambda value, c: torch.where(c[0], c[1], value), pairs, values[0]))
        value = first.returned
        for condition, way in zip(conditions, others, strict=True):
            value = self._either(condition, way.returned, value)
        return value

    def _either(self, condition: Tensor, one: Any, other: Any) -> Any:
        """Return one value where a condition holds, and the other one elsewhere."""
        if one is other:
            return one
        kinds = [type(one), type(other)]
        if kinds[0] is kinds[1] and kinds[0] in (list, tuple) and len(one) == len(other):
            pairs = zip(one, other, strict=True)
            return kinds[0](self._either(condition, *pair) for pair in pairs)
        are_tensors = [isinstance(each, Tensor) for each in (one, other)]
        if all(are_tensors):
            alike = [(type(t), t.shape, t.dtype, t.device, t.requires_grad) for t in (one, other)]
            if alike[0] == alike[1]:
                return torch.where(condition, one, other)
        elif not any(are_tensors):
            if kinds[0] is kinds[1] and kinds[0] in (int, float, bool, str) and one == other:
                return one
            values = [plain_value(each) for each in (one, other)]
            if all(type(value) in (int, float) for value in values):
                dtype = torch.float64 if float in map(type, values) else torch.int64
                found = torch.where(condition, self._tensor(one, dtype), self._tensor(other, dtype))
                return DeviceNumber(self._numbers, found, owner=self)
        else:
            is_one = are_tensors[0]
            tensor, number = (one, other) if is_one else (other, one)
            is_number = type(number) in (int, float) or isinstance(number, ScalarTracer)
            if is_scalar(tensor, self._numbers.device) and is_number:
                is_tensor = condition if is_one else condition.logical_not()
                return Either(self._numbers, is_tensor, tensor, number)
        return HOST_READ.stop_here("a function returns values of other kinds on another way")

    def _tensor(self, number: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(number, ScalarTracer):
            found: Tensor = self._numbers.tensor_of(number, dtype)
            return found
        return torch.full((), number, dtype=dtype, device=self._numbers.device)


def _functions_in(names: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Yield the functions of a module, and of its classes."""
    for value in [*names.values()]:
        held = [*vars(value).values()] if isinstance(value, type) else [value]
        for each in held:
            found = each.__func__ if isinstance(each, (classmethod, staticmethod)) else each
            function = inspect.unwrap(found) if isinstance(found, FunctionType) else None
            if isinstance(function, FunctionType):
                yield function


@dataclass(eq=False)
class Way(Recorder):
    """One way of a call or of a branch, and what it writes."""

    device: torch.device
    answers: list[bool]  # the first ones
    returned: Any = None
    # By the address of a storage: all of it, what was there, and what the way leaves there
    written: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    _truths: list[Tensor] = field(default_factory=list)
    _goes: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(strict=False)

    def go(self, truth: Tensor) -> bool:
        """Answer a question, and remember it."""
        place = len(self._goes)
        self._truths.append(truth.ne(0))
        self._goes.append(self.answers[place] if place < len(self.answers) else False)
        return self._goes[-1]

    def others(self) -> list[list[bool]]:
        """List the answers by which ways leave this one that was not told to go them."""
        places = range(len(self.answers), len(self._goes))
        return [[*self._goes[:place], not self._goes[place]] for place in places]

    def condition(self) -> Tensor:
        """Compute whether the device goes this way."""
        pairs = zip(self._truths, self._goes, strict=True)
        found = [truth if goes else truth.logical_not() for truth, goes in pairs]
        return reduce(torch.logical_and, found)

    def before_write(self, tensor: Tensor, known: KnownStorage) -> None:
        address = tensor.untyped_storage().data_ptr()
        if known.born or address in self.written or tensor.device != self.device:
            return
        whole = tensor.detach().as_strided(
            (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
        )
        copy = whole.clone()
        self.written[address] = whole, copy, copy

    def keep(self, operation: Operation) -> None:
        """Record no operation."""

    def _run(self, call: OperatorCall) -> Any:
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            HOST_READ.stop_here("a function draws on one of its ways")
        return call.run()

    @torch.no_grad()
    def undo(self) -> None:
        """Put back what was there, and remember what the way has left there."""
        for address, (whole, before, _) in self.written.items():
            self.written[address] = whole, before, whole.clone()
            whole.copy_(before)
