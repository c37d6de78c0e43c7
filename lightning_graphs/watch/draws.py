"""Draws of ``random`` and ``numpy.random`` and readings of clocks: made again by every replay.

While a step is captured, functions that draw, and those of ``time``, return tracers.
A replay draws before its graph, in the same order, from the same generators. It reads the first
clock before its graph, and the others after it, in their order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import timeit
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from lightning_graphs.device.rules import CLOCK, DRAWN
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen
from lightning_graphs.private.callsite import LIBRARIES
from lightning_graphs.private.exchange import exchanged, replaced
from lightning_graphs.private.generators import PythonGenerator, shared_generators
from lightning_graphs.private.torch import out_of_sight
from lightning_graphs.values.guards import is_plain
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.host import Draw
from lightning_graphs.watch.host_trace import HostTracer
from lightning_graphs.watch.numbers import ArrayTracer, StepNumbers, numbers_ahead
from lightning_graphs.watch.reads import NUMBERS
from lightning_graphs.watch.tracers import FOR_A_WHILE, DrawingFunction, TracedNumber, present
from lightning_graphs.watch.user_code import UserCode

SETTERS = ("setstate", "set_state", "seed")
_GETTERS = ("getstate", "get_state")

Exchange = Callable[[str, Callable[..., Any], PythonGenerator], Callable[..., Any]]


_plainly: set[int] = set()
"""Threads in which drawing functions are not replaced."""


def draws_exchanged(
    exchange: Exchange, further: Collection[DrawingFunction] = ()
) -> AbstractContextManager[None]:
    """Replace the functions of shared generators in this thread.

    Args:
        exchange: Returns the replacement for a function's name, the function and its generator.
        further: Functions of plain values that are replaced as well.
    """
    thread = threading.get_ident()

    def drawing(
        name: str, function: Callable[..., Any], generator: PythonGenerator, *, draws: bool
    ) -> Any:
        own = exchange(name, function, generator)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_ours = threading.get_ident() == thread and thread not in _plainly
            # A further function may be called with tensors elsewhere.
            follows = is_ours and (draws or _are_plain((args, kwargs)))
            return own(*args, **kwargs) if follows else function(*args, **kwargs)

        vars(call)[FOR_A_WHILE] = True
        return call

    generators, members = {}, []
    for module, generator in shared_generators():
        generators[generator.name] = generator
        owner = getattr(generator.get_state, "__self__", module)
        for name, function in vars(module).items():
            if getattr(function, "__self__", None) is owner and name not in _GETTERS:
                own = drawing(f"{module.__name__}.{name}", function, generator, draws=True)
                members.append((module, name, own))
    for module_name, name, drawn in further:
        module = sys.modules[module_name]
        own = drawing(name, vars(module)[name], generators[drawn], draws=False)
        members.append((module, name, own))
    return exchanged(members)


def drawing_functions(generator: PythonGenerator) -> Iterator[DrawingFunction]:
    """List functions of plain values, called by name, through which the step draws now."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name != LIBRARIES.step:
        code, around = frame.f_code, frame.f_back
        if getattr(around.f_globals.get(code.co_name), "__code__", None) is code:
            count = code.co_argcount + code.co_kwonlyargcount
            if _are_plain([frame.f_locals.get(name) for name in code.co_varnames[:count]]):
                yield around.f_globals["__name__"], code.co_name, generator.name
        frame = around


def _are_plain(values: Any) -> bool:
    return all(is_plain(leaf) or isinstance(leaf, TracedNumber) for leaf in leaves_of(values))


@contextlib.contextmanager
def draws_recorded(
    numbers: StepNumbers, recording: HostTracer, functions: Collection[DrawingFunction]
) -> Iterator[None]:
    """Record host computations and host draws of code under capture, the body.

    Replays call these functions of plain values as a whole, whatever they compute from draws.
    """
    tape, from_numpy = recording.tape, torch.from_numpy

    def drawing(name: str, function: Callable[..., Any], generator: PythonGenerator) -> Any:
        def draw(*args: Any, **kwargs: Any) -> Any:
            numbers.drawing.update(drawing_functions(generator))
            numbers_ahead((args, kwargs))
            if name.endswith((*SETTERS, "shuffle")):
                numbers.refuse(DRAWN, name)
            call = partial(drawn_by, function, _own(args), _own(kwargs))
            with out_of_sight():
                state = torch.get_rng_state()
                drawn = tape.draw(generator, call)
                if not torch.equal(state, torch.get_rng_state()):
                    torch.set_rng_state(state)
                    numbers.refuse(DRAWN, f"{name}, which draws from torch's generator, too,")
            return numbers.number(numbers.unique(name), partial(getattr, drawn, "value"), DRAWN)

        return draw

    def converted(array: Any) -> Any:
        return torch.as_tensor(array) if isinstance(array, ArrayTracer) else from_numpy(array)

    drawn = draws_exchanged(drawing, functions)
    # What gives the present value of data with live numbers in it; None of other data
    recording.reader_of = lambda d: partial(present, d) if numbers_ahead(d) else None
    with recording, drawn, replaced(torch, "from_numpy", converted):
        yield


@contextlib.contextmanager
def draws_refused(device: torch.device) -> Iterator[None]:
    """Refuse the first host draw of the body, by Python, NumPy or torch, with its line."""

    def refusing(name: str, *_: Any) -> Callable[..., Any]:
        return partial(_refuse_draw, name)

    # On a CPU torch's draws are those of the device.
    mode = contextlib.nullcontext() if device.type == "cpu" else OperatorsSeen(_refuse_on_host)
    with draws_exchanged(refusing), mode:
        yield


def _refuse_on_host(call: OperatorCall, result: Any) -> None:
    if torch.Tag.nondeterministic_seeded in call.func.tags and any(
        tensor.device.type == "cpu" for tensor in leaves_of(result, torch.Tensor)
    ):
        _refuse_draw(str(call.func))


def _refuse_draw(name: str, *_: Any, **__: Any) -> NoReturn:
    raise DRAWN.refused_here(f"{name} draws on the host, beside code that is compiled,")


def _own(arguments: Any) -> Any:
    """Copy the containers and arrays in arguments, so that user code cannot change them."""
    return tree_map(lambda a: a.copy() if hasattr(a, "__array_interface__") else a, arguments)


def drawn_by(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a drawing function itself, in an eager step and in a replay."""
    thread = threading.get_ident()
    _plainly.add(thread)
    try:
        return function(*present(args), **present(kwargs))
    finally:
        _plainly.discard(thread)


# ------------------ Clocks

Read = Callable[[str, Callable[..., Any]], Any]
"""Answers a clock that user code reads, given its name and function."""

_APART = 0.001  # seconds, at least, between the times that captured code sees


class Readings:
    """The readings of clocks in one step."""

    def __init__(self) -> None:
        self._taken: list[Draw] = []

    def __len__(self) -> int:
        return len(self._taken)

    def reading(self, numbers: StepNumbers, name: str, function: Callable[..., Any]) -> Any:
        """Return one more reading during a capture, without a call of the user's clock."""
        reading = Draw(function)
        reading.value = self._apart(name)
        self._taken.append(reading)
        return numbers.number(numbers.unique(name), partial(getattr, reading, "value"), CLOCK)

    def _apart(self, name: str) -> Any:
        now, apart = NUMBERS[name.removeprefix("time.")](), len(self) * _APART
        return now + int(apart * 1e9) if isinstance(now, int) else now + apart

    def begin(self) -> None:
        """Read the first clock ahead of a replay."""
        self._taken[0]()

    def end(self, _: object = None) -> None:
        """Read the other clocks after a replay."""
        for reading in self._taken[1:]:
            reading()

    def repeated(self, own: UserCode) -> AbstractContextManager[None]:
        """Give the captured code, the body, the last readings again."""
        values = iter([reading.value for reading in self._taken])
        return clocks_exchanged(own, lambda name, _: next(values, self._apart(name)))


def clocks_exchanged(own: UserCode, read: Read) -> AbstractContextManager[None]:
    """Replace clocks that user code reads in this thread.

    Packages read clocks on their own account, some whenever Python collects garbage. Compiled code
    must see none of it.
    """
    thread = threading.get_ident()

    def standing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            follows = threading.get_ident() == thread and own.runs_in(sys._getframe(1))
            return read(f"time.{name}", partial(function, *args)) if follows else function(*args)

        vars(call)[FOR_A_WHILE] = True
        return call

    proxies: dict[int, Callable[..., Any]] = {}
    for name, known in NUMBERS.items():
        function = vars(time)[name]
        proxies[id(known)] = proxies[id(function)] = standing(name, function)
    return exchanged(
        [
            (module, key, proxies[id(value)])
            for module in (time, timeit, *_modules(own))
            for key, value in vars(module).items()
            if id(value) in proxies
        ]
    )


def _modules(own: UserCode) -> list[ModuleType]:
    """List the modules that user code is from."""
    found = map(sys.modules.get, filter(own.has_module, list(sys.modules)))
    return [module for module in found if isinstance(module, ModuleType)]
