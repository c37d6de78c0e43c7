"""The host half of captured code: what it computes on the CPU, done again by every replay.

A graph holds what the device does. Code that is captured may also compute on the host: numbers and
tables that it makes there and copies to the device, draws of torch's CPU generator, of Python's and
of NumPy's, branches on them, and on values of its inputs. While it is captured these operators are
recorded. What follows from constants alone is computed once and stays on the device. The rest runs
before each replay, in its order: tensors that go to the device are copied into the graph's inputs,
and what Python reads is compared with what it was: where it is something else, the code would have
gone another way.

What the host reads of the device is computed on the host, too, where that is exact (integers,
booleans, comparisons, selections) and follows from inputs of which the host has a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_graphs.core.backends.recorder import tensors_in
from lightning_graphs.core.generators import HostGenerator

aten = torch.ops.aten


OF_SHAPES = frozenset({"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"})
"""Operators that look at the shape of a tensor, and at nothing in it."""

SMALL = 2**20  # elements that the host computes for each step, at most
_TIES = ("sort", "argsort", "topk", "argmax", "argmin", "median", "mode", "kthvalue")
"""Operators that may choose otherwise among equal values on another device."""
_SELECTIONS = OF_SHAPES | {
    *("_to_copy", "clone", "copy", "fill", "zero", "zeros", "ones", "full", "scalar_tensor"),
    *("where", "index", "index_put", "index_select", "gather", "scatter", "masked_fill"),
    *("cat", "stack", "flip", "roll", "constant_pad_nd", "abs", "neg", "clamp"),
    *("amax", "amin", "max", "min", "maximum", "minimum"),
    *("add", "sub", "rsub", "mul", "div"),  # rounded once, as IEEE 754 has it
}
"""Operators that compute the same for floating-point numbers on every device."""


@dataclass(frozen=True, slots=True)
class Register:
    """The place of a tensor that every replay computes anew."""

    index: int


@dataclass(slots=True)
class Operation:
    """One operator of the host half."""

    func: Callable[..., Any]  # the operator
    args: list[Any]  # its arguments, registers in place of tensors that are computed anew
    kwargs: dict[str, Any]  # likewise
    results: list[int]  # the registers of the tensors that it returns
    draws: HostGenerator | None = None  # the generator that it draws from
    read: Any = None  # what it told Python, for an operator that returns no tensor
    # Where its registers stand: in its arguments and in lists among them, under which key
    places: list[tuple[Any, Any, int]] = field(init=False)

    def __post_init__(self) -> None:
        lists = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, list)]
        found = [(holder, enumerate(holder)) for holder in (self.args, *lists)]
        self.places = [
            (holder, key, value.index)
            for holder, held in (*found, (self.kwargs, self.kwargs.items()))
            for key, value in held
            if isinstance(value, Register)
        ]


class Draw:
    """Operation: a call of a function that draws from Python's or NumPy's generator."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.value: Any = None  # what it has drawn last

    def __call__(self) -> None:
        self.value = self._call()


@dataclass(eq=False)
class HostHalf:
    """What the host computes for a graph."""

    operations: Sequence[Operation]
    values: list[Any]  # of the registers
    inputs: Sequence[tuple[int, int]]  # registers, and which input of the graph is copied to each
    held: Sequence[Tensor]  # memory that the graph reads
    _begun: dict[HostGenerator, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.generators = list({o.draws: None for o in self.operations if o.draws is not None})

    @property
    def read(self) -> tuple[Any, ...]:
        """What Python was told of values that every replay computes anew."""
        return tuple(o.read for o in self.operations if not o.results)

    @torch.no_grad()
    def run(self, copies: Callable[[], Sequence[Tensor | None]]) -> bool:
        """Compute what the coming replay needs; whether Python would be told what it was told.

        If not, the generators are where they were, and the graph is not for this step.
        """
        values = self.values
        self._begun = {}
        if self.inputs:
            given = copies()
            for register, i in self.inputs:
                if given[i] is None:
                    return False
                values[register] = given[i]
        self._begun = {generator: generator.get_state() for generator in self.generators}
        for operation in self.operations:
            for holder, key, register in operation.places:
                holder[key] = values[register]
            result = operation.func(*operation.args, **operation.kwargs)
            if not operation.results:
                if not _same(result, operation.read):
                    self.restore()
                    return False
            elif type(result) is Tensor:
                values[operation.results[0]] = result
            else:
                for register, tensor in zip(operation.results, tensors_in(result), strict=True):
                    values[register] = tensor
        return True

    def restore(self) -> None:
        """Put the generators back to where they were before the last :meth:`run`."""
        for generator, state in self._begun.items():
            generator.set_state(state)


def copy_in(static: Tensor, value: Tensor) -> Tensor:
    """Operation: copy a tensor of the host into memory of the device, without waiting."""
    static.copy_(value, non_blocking=True)
    return value


def shape(value: Tensor) -> torch.Size:
    """Operation: what Python is told of the shape of a tensor."""
    return value.shape


def numbers(value: Tensor) -> tuple[torch.Size, tuple[Any, ...]]:
    """Operation: what Python is told of a tensor by ``tolist`` and the like."""
    return value.shape, tuple(value.flatten().tolist())


READS = frozenset(
    {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
    | {shape, numbers}
)
"""Operations that tell Python something."""

SHAPES = (
    *("aten::nonzero", "aten::masked_select", "aten::bincount"),
    *("aten::_unique2", "aten::unique_consecutive", "aten::unique_dim"),
)
"""Operators that tell it the shape of their result."""


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)


def name_of(func: OpOverload) -> str:
    """The name of an operator, the same for those that write in place."""
    return func._schema.name.removeprefix("aten::").rstrip("_")


def is_exact(func: OpOverload, outputs: Sequence[Tensor], elements: int) -> bool:
    """Whether an operator computes so many elements at most, and the same on every device."""
    name = name_of(func)
    if "empty" in name or name in _TIES or func.namespace != "aten" or not outputs:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return True  # a view
    if sum(t.numel() for t in outputs) > elements:
        return False
    return name in _SELECTIONS or not any(t.is_floating_point() for t in outputs)
