"""Trees of a call's arguments: containers as hashable nodes, leaves as specs and constants.

Containers are those that ``torch.utils._pytree`` knows, registered ones included, and beyond them
mutable mappings and dataclasses that nobody registered. Everything else is a leaf.
"""

from __future__ import annotations

import copy
import json
import reprlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.errors import CaptureError

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SHORT_DTYPES = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a captured kernel depends on in a tensor, apart from its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, name: str = "tensor") -> TensorSpec:
        """The spec of a tensor; ``name`` is what an error calls it.

        Raises:
            CaptureError: The tensor is no plain strided tensor that a static input can stand for.
        """
        kind = _special_kind(tensor)
        if kind:
            raise CaptureError(
                "An input of a captured call must be a plain strided tensor.",
                f"{name}: {kind}",
                "pass plain tensors: `.to_dense()`, `.dequantize()`, `.resolve_conj()`, "
                "`.resolve_neg()`, or the parts of a tensor subclass",
            )
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps; always so when empty."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True

    def __str__(self) -> str:
        return self._text(
            not self.is_contiguous, self.device.type != "cpu", requires_grad=self.requires_grad
        )

    def against(self, other: TensorSpec) -> str:
        """The text of this spec in a diff with another: what differs, and no more."""
        strided = self.shape == other.shape and self.stride != other.stride
        return self._text(
            strided or not self.is_contiguous,
            self.device != other.device,
            requires_grad=self.requires_grad and not other.requires_grad,
        )

    def _text(self, stride: bool, device: bool, *, requires_grad: bool) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        for long, short in _SHORT_DTYPES:
            if dtype.startswith(long):
                dtype = short + dtype.removeprefix(long)
                break
        text = f"{dtype}[{_commas(self.shape)}]"
        text += f" stride ({_commas(self.stride)})" if stride else ""
        text += f" on {self.device}" if device else ""
        return text + (" requires_grad" if requires_grad else "")


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Equal only to a holder of the same object, kept alive here so that its id stays its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf that is no tensor: baked into the graph, so it has to stay what it was.

    Equal by type and value; what cannot be hashed is equal to itself only. Floats are compared by
    their hexadecimal text, so that NaN equals NaN and 0.0 differs from -0.0.
    """

    kind: type
    key: Hashable
    text: str = field(compare=False)

    @classmethod
    def of(cls, value: Any) -> Constant:
        """The constant that stands for a value."""
        return cls(type(value), _hashable(value), reprlib.repr(value))


@dataclass(frozen=True, slots=True)
class Node:
    """A container; a child that is None is a leaf.

    Attributes:
        kind: Type of the container.
        context: What the kind does not tell: length, keys, field names.
        children: One for each element.
        labels: What follows the container's name to reach each child: ``[0]``, ``["x"]``, ``.x``.
    """

    kind: type
    context: Hashable
    children: tuple[Node | None, ...]
    labels: tuple[str, ...] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind.__name__} of {len(self.labels)} ({', '.join(self.labels)})"


class Opened(NamedTuple):
    """One level of a container.

    Attributes:
        context: What its type does not tell: length, keys, field names.
        labels: What follows its name to reach each value.
        values: What is in it.
    """

    context: Any
    labels: list[str]
    values: Sequence[Any]


def alias_groups(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the index of the first one that is the same tensor, its own if none is.

    Without gradients, tensors are the same when storage, offset, geometry and dtype are. With
    gradients only one object is the same as itself: two autograd leaves over one storage receive
    gradients of their own. An empty tensor is the same as none.
    """
    first: dict[Hashable, int] = {}
    groups = []
    for index, tensor in enumerate(tensors):
        key: Hashable = id(tensor)
        if tensor.numel() == 0:
            key = (index,)
        elif not tensor.requires_grad:
            where = (tensor.data_ptr(), tensor.device)
            key = (*where, tensor.shape, tensor.stride(), tensor.dtype)
        groups.append(first.setdefault(key, index))
    return tuple(groups)


def is_registered(kind: type) -> bool:
    """Whether only torch's pytree registry knows how to open a container of this kind."""
    return kind in pytree.SUPPORTED_NODES and kind not in (tuple, list, *_MAPPINGS)


def flatten(value: Any, name: str, leaves: list[tuple[str, Any]]) -> Node | None:
    """The structure of a value; its leaves are appended with their names, depth first."""
    opened = None if isinstance(value, Tensor) else open_container(value)
    if opened is None:
        leaves.append((name, value))
        return None
    pairs = zip(opened.values, opened.labels, strict=True)
    children = tuple(flatten(child, name + label, leaves) for child, label in pairs)
    kind = type(value)
    context = _frozen(opened.context) if is_registered(kind) else opened.context
    return Node(kind, context, children, tuple(opened.labels))


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a value, depth first."""
    found: list[tuple[str, Any]] = []
    flatten(value, "", found)
    return [leaf for _, leaf in found]


def substitute(value: Any, tensors: Iterable[Tensor]) -> Any:
    """A copy of a tree with its tensor leaves replaced, in order; constants stay the same objects.

    The containers are new ones of the same kinds, so that whoever changes them changes no original.
    """
    return _substitute(value, iter(tensors))


def _substitute(value: Any, supply: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(supply)
    opened = open_container(value)
    if opened is None:
        return value
    kind: Any = type(value)
    values = [_substitute(child, supply) for child in opened.values]
    if kind is tuple or kind is list:
        return kind(values)
    if is_registered(kind):
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(values, opened.context)
    if isinstance(value, tuple):
        return kind(*values)
    clone = copy.copy(value)
    for key, child in zip(opened.context, values, strict=True):
        if isinstance(clone, MutableMapping):
            clone[key] = child
        else:
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(clone, key, child)
    return clone


def first_change(path: str, before: Node | None, after: Node | None) -> str:
    """The first place, depth first, where two trees differ, and what is there in each.

    The empty path is that of the positional arguments, whose labels are whole names already.
    """
    if before is not None and after is not None:
        # The context of a deque does not tell its length.
        same = (before.kind, before.context) == (after.kind, after.context)
        if same and len(before.children) == len(after.children):
            triples = zip(before.labels, before.children, after.children, strict=True)
            for label, a, b in triples:
                if a != b:
                    return first_change(path + label, a, b)
        if str(before) == str(after):
            a_text, b_text = reprlib.repr(before.context), reprlib.repr(after.context)
            return f"{path}: {before.kind!r} {a_text} -> {after.kind!r} {b_text}"
    return f"{path or 'args'}: {before or 'a leaf'} -> {after or 'a leaf'}"


def open_container(value: Any) -> Opened | None:
    """One level of a container; None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return Opened(len(value), [f"[{i}]" for i in range(len(value))], value)
    if is_registered(kind):
        return _open_registered(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Opened(kind._fields, [f".{name}" for name in kind._fields], value)
    if isinstance(value, MutableMapping):
        keys = tuple(value)
        return Opened(keys, [_item(key) for key in keys], [value[key] for key in keys])
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in fields(value))
        return Opened(names, [f".{name}" for name in names], [getattr(value, n) for n in names])
    return None


def _open_registered(value: Any) -> Opened:
    definition = pytree.SUPPORTED_NODES[type(value)]
    children, context = definition.flatten_fn(value)
    values = list(children)
    labels = [f"[{i}]" for i in range(len(values))]
    with_keys: Callable[[Any], Any] | None = definition.flatten_with_keys_fn
    if with_keys is not None:
        entries = [entry for entry, _ in with_keys(value)[0]]
        labels = [_item(e.key) if isinstance(e, pytree.MappingKey) else str(e) for e in entries]
    return Opened(context, labels, values)


def _item(key: Any) -> str:
    return f"[{json.dumps(key, ensure_ascii=False) if type(key) is str else reprlib.repr(key)}]"


def _frozen(context: Any) -> Hashable:
    """A context as something hashable: pytree contexts are lists and dicts as often as not."""
    if isinstance(context, list | tuple):
        return (type(context), *map(_frozen, context))
    if isinstance(context, dict):
        return (type(context), *((_frozen(k), _frozen(v)) for k, v in context.items()))
    return _hashable(context)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return (value.real.hex(), value.imag.hex())
    try:
        hash(value)
    except TypeError:
        return Same(value)
    key: Hashable = value
    return key


def _special_kind(tensor: Tensor) -> str:
    """What is not plain about a tensor; empty for a plain strided one."""
    if type(tensor) not in (Tensor, Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    kinds = {
        "a nested tensor": tensor.is_nested,
        f"a tensor of layout {tensor.layout}": tensor.layout is not torch.strided,
        "a quantized tensor": tensor.is_quantized,
        "a meta tensor": tensor.is_meta,
        "a lazily conjugated view": tensor.is_conj(),
        "a lazily negated view": tensor.is_neg(),
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def _commas(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
