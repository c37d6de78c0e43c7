"""Draws of code under capture: a replay draws ahead of its graph, in the same order."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_graphs.device.rules import DRAWN
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen
from lightning_graphs.errors import stop
from lightning_graphs.private.callsite import LIBRARIES
from lightning_graphs.private.exchange import Member, exchanged, replaced, standing_in
from lightning_graphs.private.generators import PythonGenerator, shared_generators
from lightning_graphs.private.torch import out_of_sight
from lightning_graphs.values.guards import is_plain
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.forms import Numbers
from lightning_graphs.watch.host_trace import HostTracer
from lightning_graphs.watch.tracers import (
    ArrayTracer,
    DrawingFunction,
    ScalarTracer,
    is_of_others,
    numbers_ahead,
    present,
    used,
)

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

    def drawing(
        name: str, function: Callable[..., Any], generator: PythonGenerator, *, draws: bool
    ) -> Any:
        own = exchange(name, function, generator)

        def call(_: FrameType, *args: Any, **kwargs: Any) -> Any:
            # A further function may be called with tensors elsewhere.
            is_own = threading.get_ident() not in _plainly and (draws or _are_plain((args, kwargs)))
            return own(*args, **kwargs) if is_own else function(*args, **kwargs)

        return standing_in(function, call)

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
    return all(is_plain(leaf) or isinstance(leaf, ScalarTracer) for leaf in leaves_of(values))


def drawn_by(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a drawing function itself, in an eager step and in a replay."""
    thread = threading.get_ident()
    _plainly.add(thread)
    try:
        return function(*present(args), **present(kwargs))
    finally:
        _plainly.discard(thread)


@contextlib.contextmanager
def draws_recorded(
    numbers: Numbers, recording: HostTracer, functions: Collection[DrawingFunction]
) -> Iterator[None]:
    """Record host computations and host draws of code under capture, the body.

    Replays call these functions of plain values as a whole, whatever they compute from draws.
    """
    tape, from_numpy, new = recording.tape, torch.from_numpy, torch.Tensor.__new__

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
                    stop(used(DRAWN, f"{name}, which draws from torch's generator, too,"))
            return numbers.number(numbers.unique(name), partial(getattr, drawn, "value"), DRAWN)

        return draw

    def converted(array: Any) -> Any:
        return torch.as_tensor(array) if isinstance(array, ArrayTracer) else from_numpy(array)

    def made(cls: Any, *data: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor and len(data) == 1 and numbers_ahead(data):
            return torch.tensor(*data, dtype=torch.get_default_dtype())
        return new(cls, *data, **kwargs)

    def seeding(name: str) -> Member:
        def seed(_: FrameType, *__: Any) -> Any:
            tape.note_set(f"torch.{name} is called")
            return torch.default_generator if name == "manual_seed" else torch.initial_seed()

        return torch, name, standing_in(getattr(torch, name), seed, is_of_others)

    def state(_: FrameType) -> Tensor:
        with out_of_sight():
            return tape.state()

    def set_state(_: FrameType, new_state: Tensor) -> None:
        with out_of_sight():
            tape.set_state(new_state)

    of_torch = [
        *map(seeding, ("manual_seed", "seed")),
        (torch, "get_rng_state", standing_in(torch.get_rng_state, state, is_of_others)),
        (torch, "set_rng_state", standing_in(torch.set_rng_state, set_state, is_of_others)),
    ]
    drawn = draws_exchanged(drawing, functions)
    # What gives the present value of data with live numbers in it; None of other data
    recording.reader_of = lambda d: partial(present, d) if numbers_ahead(d) else None
    of_arrays = replaced(torch, "from_numpy", converted)
    of_data = replaced(torch.Tensor, "__new__", made)
    with recording, drawn, of_arrays, of_data, exchanged(of_torch):
        try:
            yield
        finally:
            tape.put_back()


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
    DRAWN.stop_here(f"{name} draws on the host, next to compiled code,")


def _own(arguments: Any) -> Any:
    """Copy the containers and arrays in arguments, so that user code cannot change them."""
    return tree_map(lambda a: a.copy() if hasattr(a, "__array_interface__") else a, arguments)
