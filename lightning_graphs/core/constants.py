"""Numbers that a capture froze, found in its graph again and rewritten between replays.

Whoever wants to move a number later captures a mark in its place: a number that occurs nowhere
else. What carries the mark in the graph is where the number belongs. That works for numbers that
kernels take as they are, as torch's fused optimizers take ``beta1`` or ``weight_decay``; a kernel
that gets something computed from the mark is refused.
"""

from __future__ import annotations

import abc
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from lightning_graphs.core.driver import (
    argument_sizes,
    kernel_nodes,
    require_driver,
    set_kernel_params,
)
from lightning_graphs.errors import UnsupportedError

_DOUBLE, _FLOAT = ctypes.sizeof(ctypes.c_double), ctypes.sizeof(ctypes.c_float)
_PLAUSIBLE = (1e-30, 1e30)
"""Between these, a number was meant as one: pointers and integers read as numbers lie outside."""


def marks(count: int) -> list[float]:
    """Distinct numbers in [0.5, 0.75) that nobody computes: to be captured and found again."""
    return [0.5 + 0.2381746539017 * (i + 1) / (count + 1) for i in range(count)]


class Constant(abc.ABC):
    """A number that a capture froze."""

    @property
    @abc.abstractmethod
    def places(self) -> int:
        """How often the graph holds it."""

    @abc.abstractmethod
    def write(self, value: float) -> None:
        """Let the coming replays compute with ``value``; one that is under way keeps its own.

        Raises:
            GraphError: the driver refuses.
        """


class _Kernel:
    """One kernel node of an executable graph, with its arguments in memory of our own."""

    def __init__(self, graph_exec: int, node: Any, params: Any, sizes: Sequence[int]) -> None:
        self._graph_exec = graph_exec
        self._node = node
        self._params = params
        found = (ctypes.c_void_p * len(sizes)).from_address(int(params.kernelParams))
        self._copies = [
            ctypes.create_string_buffer(ctypes.string_at(at, size), size)
            for at, size in zip(found, sizes, strict=True)
        ]
        addresses = [ctypes.addressof(copy) for copy in self._copies]
        self._pointers = (ctypes.c_void_p * len(sizes))(*addresses)

    def doubles(self) -> list[ctypes.c_double]:
        """The arguments that may be numbers in double precision, to read and to write."""
        return [ctypes.c_double.from_buffer(c) for c in self._copies if len(c) == _DOUBLE]

    def floats(self) -> list[float]:
        """The arguments that may be numbers in single precision."""
        return [ctypes.c_float.from_buffer(c).value for c in self._copies if len(c) == _FLOAT]

    def submit(self) -> None:
        """Hand the arguments, as they are now, to the executable graph."""
        self._params.kernelParams = ctypes.addressof(self._pointers)
        set_kernel_params(self._graph_exec, self._node, self._params)


class _KernelConstant(Constant):
    def __init__(self) -> None:
        self._places: list[tuple[_Kernel, ctypes.c_double]] = []

    @property
    def places(self) -> int:
        return len(self._places)

    def add(self, kernel: _Kernel, place: ctypes.c_double) -> None:
        self._places.append((kernel, place))

    def write(self, value: float) -> None:
        for kernel, place in self._places:
            place.value = value
            kernel.submit()


def constants_of_cuda(
    raw_graph: int, raw_graph_exec: int, numbers: Sequence[float]
) -> list[Constant]:
    """The constants with these values, in the kernels of a graph.

    Args:
        raw_graph: The template, a ``CUgraph`` handle.
        raw_graph_exec: What was instantiated from it, a ``CUgraphExec`` handle.
        numbers: Distinct numbers, as of :func:`marks`.

    Raises:
        UnsupportedError: The driver is older than CUDA 12.4, or a kernel that holds one of the
            numbers also holds one that nobody has accounted for, and may be computed from it.
        GraphError: A handle is none, or the driver refuses.
    """
    require_driver((12, 4), "Rewriting a number inside of a CUDA graph")
    constants = {number: _KernelConstant() for number in numbers}
    layouts: dict[tuple[int, int], list[int]] = {}
    for node, params in kernel_nodes(raw_graph):
        if not int(params.kernelParams):
            continue  # packed into a buffer, as some launchers do and torch's own do not
        function = int(params.kern), int(params.func)
        if function not in layouts:
            layouts[function] = argument_sizes(params)
        if _DOUBLE not in layouts[function]:
            continue
        kernel = _Kernel(raw_graph_exec, node, params, layouts[function])
        doubles = kernel.doubles()
        marked = [place for place in doubles if place.value in constants]
        if not marked:
            continue
        others = [place.value for place in doubles if place.value not in constants]
        for other in itertools.chain(others, kernel.floats()):
            _refuse_computed(other)
        for place in marked:
            constants[place.value].add(kernel, place)
    return list(constants.values())


def _refuse_computed(number: float) -> None:
    smallest, largest = _PLAUSIBLE
    # A one stands for a factor that is not used: the learning rate beside its pointer.
    if smallest < abs(number) < largest and number != 1.0:
        raise UnsupportedError(
            "A number inside of a graph is rewritten only where nothing was computed from it.",
            f"its kernel holds {number!r} as well",
            "this version of torch hands its kernels other arguments than those known to us",
        )
