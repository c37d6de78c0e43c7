"""Opens containers of arguments, and names their leaves.

Containers are those that ``torch.utils._pytree`` knows, registered ones included, and beyond them
mutable mappings, dataclasses, and objects that hold tensors or move themselves to a device
(``to``), without being registered.
"""

from __future__ import annotations

import copy
import json
import reprlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from itertools import islice, repeat
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.errors import CaptureError
from lightning_graphs.private.exchange import slots_of
from lightning_graphs.values.guards import (
    REALS,
    Constant,
    Inside,
    as_hashable,
    attributes_of,
    is_object,
    members_of,
)

# ------------------ Leaves

_SHORT_DTYPES = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))


_MOST_ON_HOST = 4096
"""Elements of a tensor of the host that are compared in each call."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Properties of a tensor on which captured kernels depend, apart from values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: type[Tensor] = Tensor  # its class, if that is one without operators of its own
    values: tuple[Any, ...] | None = None  # of a tensor of the host, which kernels do not read

    @classmethod
    def of(cls, tensor: Tensor, name: str = "tensor") -> TensorSpec:
        """The spec of a plain strided tensor; others, which errors call ``name``, are refused."""
        kind = special_kind(tensor)
        if kind:
            raise CaptureError(
                "An input of a graphed callable must be a plain strided tensor.",
                f"got {kind} as {name}",
                "pass plain tensors: `.to_dense()`, `.dequantize()`, `.resolve_conj()`, "
                "`.resolve_neg()`, or `.as_subclass(torch.Tensor)` of a tensor subclass",
            )
        own = Tensor if type(tensor) is Parameter else type(tensor)
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, own)

    def with_values(self, tensor: Tensor, name: str) -> TensorSpec:
        """Return the spec of a tensor of the host whose values a capture bakes in.

        Raises:
            CaptureError: It has too many, and is called ``name``.
        """
        if tensor.numel() > _MOST_ON_HOST:
            raise CaptureError(
                "A tensor of the host among the device tensors given to a graphed callable "
                "must be small, because a graph has its values.",
                f"got {self} as {name}",
                "move the tensor to the device ahead of the call",
            )
        return replace(self, values=tuple(tensor.flatten().tolist()))

    def __str__(self) -> str:
        # In a diff with its like on the CPU, without a gradient.
        return self.against(replace(self, device=torch.device("cpu"), requires_grad=False))

    def against(self, other: TensorSpec) -> str:
        """The text of this spec in a diff with another."""
        dtype = str(self.dtype).removeprefix("torch.")
        for long, short in _SHORT_DTYPES:
            if dtype.startswith(long):
                dtype = short + dtype.removeprefix(long)
                break
        text = f"{dtype}[{_commas(self.shape)}]"
        text = text if self.kind is Tensor else f"{self.kind.__name__} {text}"
        contiguous = torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()
        if not contiguous or (self.shape == other.shape and self.stride != other.stride):
            text += f" stride ({_commas(self.stride)})"
        text += f" on {self.device}" if self.device != other.device else ""
        if self.values != other.values and self.values is not None:
            text += f" of {reprlib.repr(list(self.values))}"
        return text + (" requires_grad" if self.requires_grad and not other.requires_grad else "")


@dataclass(frozen=True, slots=True)
class Unread:
    """A Python value that the call does not read, whatever it is."""

    kind: type  # its type, which may count; else ``object``

    @property
    def text(self) -> str:
        return f"a {self.kind.__name__}"

    def matches(self, value: Any) -> bool:
        if self.kind is not object:
            return type(value) is self.kind
        return value is None or type(value) in _SIMPLE or not leaves_of(value, Tensor)


_SIMPLE = frozenset({bool, *REALS, str})
"""Types of values in which no tensor can be."""

Leaf = TensorSpec | Constant | Unread


def alias_groups(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return for each tensor the index of the first one that it aliases, or its own.

    Without gradients, tensors are aliases if storage, offset, geometry and dtype are equal. With
    gradients an object is an alias of itself only, and an empty tensor of none.
    """
    first: dict[Hashable, int] = {}
    groups = []
    for index, tensor in enumerate(tensors):
        key: Hashable = id(tensor)
        if tensor.numel() == 0:
            key = (index,)
        elif not tensor.requires_grad:
            where = (tensor.data_ptr(), tensor.device)
            key = (*where, tensor.shape, tensor.stride(), tensor.dtype, type(tensor))
        groups.append(first.setdefault(key, index))
    return tuple(groups)


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Group the indices of tensors by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        kinds[tensor.device, tensor.dtype].append(i)
    return kinds


def in_parts(tensors: Sequence[Tensor], most: Callable[[torch.device], int]) -> Iterator[list[int]]:
    """Yield the indices of tensors of one kind, as many as are looked at together.

    Args:
        tensors: The tensors.
        most: Gives how many bytes these have on a device, at most; a larger tensor is alone.
    """
    for (device, _), indices in by_kind(tensors).items():
        part, taken = list[int](), 0
        for i in indices:
            size = tensors[i].numel() * tensors[i].itemsize
            if part and taken + size > most(device):
                yield part
                part, taken = [], 0
            part.append(i)
            taken += size
        yield part


def leaf_changes(name: str, before: Leaf, after: Leaf) -> list[str]:
    """List the changes from one leaf to another that differs, a line each."""
    if isinstance(before, TensorSpec) and isinstance(after, TensorSpec):
        return [f"{name}: {before.against(after)} -> {after.against(before)}"]
    keys = [leaf.key for leaf in (before, after) if isinstance(leaf, Constant)]
    inside = [key for key in keys if isinstance(key, Inside)]
    if len(inside) == 2 and (changes := inside[0].changes(inside[1])):
        return [name + line for line in changes]
    texts = [str(leaf) if isinstance(leaf, TensorSpec) else leaf.text for leaf in (before, after)]
    if texts[0] == texts[1]:
        texts[1] += " (another object)"
    return [f"{name}: {' -> '.join(texts)}"]


def special_kind(tensor: Tensor) -> str:
    """Name a tensor's special kind; empty for a plain strided one."""
    if class_of_its_own := own_class(tensor):
        return class_of_its_own
    kinds = {
        "a nested tensor": tensor.is_nested,
        f"a tensor of layout {tensor.layout}": tensor.layout is not torch.strided,
        "a quantized tensor": tensor.is_quantized,
        "a meta tensor": tensor.is_meta,
        "a lazily conjugated view": tensor.is_conj(),
        "a lazily negated view": tensor.is_neg(),
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def own_class(tensor: Tensor) -> str:
    """Name a tensor's class if it has operators or attributes of its own; empty for other ones."""
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return ""
    name = f"a {kind.__module__}.{kind.__qualname__}"
    functions = kind.__torch_function__
    plain = getattr(functions, "__func__", functions) in _PLAIN_FUNCTIONS
    if not plain or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or _overrides(kind):
        return name
    attributes = ", ".join(map(repr, members_of(tensor)))
    return f"{name} with the attributes {attributes}" if attributes else ""


@lru_cache
def _overrides(kind: type[Tensor]) -> bool:
    """Return whether a class has methods of its own in the place of those of tensors."""
    above = kind.__mro__[: kind.__mro__.index(Tensor)]
    return any(
        name not in _OF_ANY_CLASS and hasattr(Tensor, name) for k in above for name in vars(k)
    )


class _Any:
    """What Python writes into every class; from 3.13 on that are lines and attributes, too."""

    annotated: int


_OF_ANY_CLASS = frozenset(
    {*vars(_Any), "__annotations__", "__new__", "__init__"}
    | {"__repr__", "__str__", "__format__", "__init_subclass__", "__subclasshook__", "__hash__"}
    | {"__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
    | {"__torch_function__", "__torch_dispatch__"}  # which are looked at by themselves
)


_PLAIN_FUNCTIONS = (
    getattr(Tensor.__torch_function__, "__func__", None),
    Parameter.__torch_function__,
)
"""``__torch_function__`` of classes whose operators are those of tensors."""


def _commas(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


# ------------------ Containers

MAPPINGS = (dict, OrderedDict, defaultdict)
_PLAIN_CONTAINERS = (tuple, list, *MAPPINGS)


@dataclass(frozen=True, slots=True)
class Node:
    """A container; a child that is None is a leaf."""

    kind: type
    context: Hashable  # what the kind does not tell: length, keys, names of attributes
    children: tuple[Node | None, ...]
    # What follows the container's name to reach each child: `[0]`, `["x"]`, `.x`.
    labels: tuple[str, ...] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind.__name__} of {len(self.labels)} ({', '.join(self.labels)})"


class Opened(NamedTuple):
    """One level of a container; see :class:`Node`."""

    context: Any
    values: Sequence[Any]
    is_registered: bool = False  # only torch's pytree registry knows how to open it

    @property
    def frozen_context(self) -> Hashable:
        return _frozen(self.context) if self.is_registered else self.context


def is_registered(kind: type) -> bool:
    """Return whether only torch's pytree registry can open containers of this kind."""
    return kind in pytree.SUPPORTED_NODES and kind not in (tuple, list, *MAPPINGS)


def flatten(
    value: Any,
    name: str,
    leaves: list[tuple[str, Any]],
    closed: Container[str] = (),
    above: tuple[int, ...] = (),  # the objects that it is inside of, by ``id``
) -> Node | None:
    """Return the structure of a value; append its leaves with names, depth first.

    Containers whose name is in ``closed`` are leaves themselves, if there is no tensor in them, and
    so is an object that is inside of itself.
    """
    is_leaf = isinstance(value, Tensor) or id(value) in above
    opened = None if is_leaf else open_container(value)
    if opened is None:
        leaves.append((name, value))
        return None
    kind, start = type(value), len(leaves)
    labels = _labels(value, opened)
    pairs = zip(opened.values, labels, strict=True)
    inside = () if opened.is_registered else closed
    above = above if kind in _PLAIN_CONTAINERS else (*above, id(value))
    children = tuple(flatten(child, name + label, leaves, inside, above) for child, label in pairs)
    if name in closed and not any(isinstance(leaf, Tensor) for _, leaf in leaves[start:]):
        leaves[start:] = [(name, value)]
        return None
    return Node(kind, opened.frozen_context, children, tuple(labels))


def named_leaves(value: Any, name: str, closed: Container[str] = ()) -> list[tuple[str, Any]]:
    """List the leaves of a value with their names, depth first; see :func:`flatten`."""
    found: list[tuple[str, Any]] = []
    flatten(value, name, found, closed)
    return found


def leaves_of(value: Any, kind: type | tuple[type, ...] = object) -> list[Any]:
    """List the leaves of a value that are of some kind, depth first."""
    found: list[tuple[str, Any]] = []
    flatten(value, "", found)
    return [leaf for _, leaf in found if isinstance(leaf, kind)]


_OPENED = (list, tuple, dict, deque)


def held_in_containers(values: Iterable[Any]) -> Iterator[Any]:
    """Yield those values that are containers, in which tensors may be."""
    return (value for value in values if isinstance(value, _OPENED))


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps for one that is around it, and shares its groups (SAM)."""
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value.param_groups is optimizer.param_groups:
            return stepping(value)
    return optimizer


def parameters_of(*optimizers: Any) -> list[Any]:
    """List the parameters in the groups of optimizers."""
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]


def tensors_inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, and in containers inside of it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _OPENED):
        for held in value.values() if isinstance(value, dict) else value:
            yield from tensors_inside(held)


def substitute(
    value: Any,
    tensors: Iterable[Tensor],
    name: str = "",
    proxies: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Copy a tree with its tensor leaves replaced, in order; constants stay identical.

    The containers are new ones of the same kinds, so that a change of them changes no original.
    Other leaves, and containers without a tensor, are replaced by the proxy of their name.
    """
    return _Substitution(iter(tensors), proxies).of(value, name)


class _Substitution:  # no nested function: as a cycle it would keep tensors until the next gc
    def __init__(self, supply: Iterator[Tensor], proxies: Mapping[str, Any]) -> None:
        self._supply = supply
        self._proxies = proxies
        self._clones: dict[int, Any] = {}
        self._above: set[int] = set()  # the objects that are being copied, by ``id``

    def of(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._proxies[name] if name in self._proxies else next(self._supply)
        if isinstance(value, weakref.ref) and (clone := self._clones.get(id(value()))) is not None:
            return weakref.ref(clone)  # a part of an object that knows the whole
        if name in self._proxies:
            return self._proxies[name]
        if id(value) in self._above:
            return self._clones.get(id(value), value)
        opened = open_container(value)
        if opened is None:
            return value
        kind: Any = type(value)
        if kind in _PLAIN_CONTAINERS:
            return self._built(value, name, opened)
        self._above.add(id(value))
        try:
            return self._built(value, name, opened)
        finally:
            self._above.discard(id(value))

    def _built(self, value: Any, name: str, opened: Opened) -> Any:
        kind: Any = type(value)
        clone = None
        if not (isinstance(value, (tuple, list)) or opened.is_registered):
            clone = self._clones[id(value)] = copy.copy(value)
            if attributes_of(value) is value:  # a dict whose items are its attributes, too
                object.__setattr__(clone, "__dict__", clone)
        # Most have none, and need no names.
        labels = _labels(value, opened) if self._proxies else repeat("", len(opened.values))
        pairs = zip(opened.values, labels, strict=True)
        values = [self.of(child, name + label) for child, label in pairs]
        if kind is tuple or kind is list:
            return kind(values)
        if opened.is_registered:
            return pytree.SUPPORTED_NODES[kind].unflatten_fn(values, opened.context)
        if isinstance(value, tuple):
            return kind(*values)
        if len(values) > len(opened.context):
            attributes_of(clone).update(values.pop())
        if isinstance(value, MutableMapping) and (place := _place_of_items(value)) is not None:
            attributes_of(clone)[place] = dict(zip(opened.context, values, strict=True))
            return clone
        for key, child in zip(opened.context, values, strict=True):
            if isinstance(clone, MutableMapping):
                clone[key] = child
            else:  # a frozen dataclass refuses plain assignment
                object.__setattr__(clone, key, child)
        return clone


def first_change(path: str, before: Node | None, after: Node | None) -> str:
    """Return the first difference of two trees, depth first, and both values there."""
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
    """Open one level of a container; None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return Opened(len(value), value)
    if is_registered(kind):
        values, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return Opened(context, list(values), True)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Opened(kind._fields, value)
    if isinstance(value, MutableMapping):
        items = items_of(value)
        beside = {} if kind in MAPPINGS else attributes_beside(value)
        return Opened(tuple(items), [*items.values(), *([beside] if beside else [])])
    if is_dataclass(kind) or _is_structure(value):
        table = members_of(value)
        return Opened(tuple(table), list(table.values()))
    return None


def _labels(value: Any, opened: Opened) -> list[str]:
    """Return the suffixes of a container's name that reach its entries."""
    kind = type(value)
    if opened.is_registered:
        with_keys: Any = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
        if with_keys is not None:
            entries = [entry for entry, _ in with_keys(value)[0]]
            return [
                item_label(e.key) if isinstance(e, pytree.MappingKey) else str(e) for e in entries
            ]
    elif isinstance(value, MutableMapping):
        further = len(opened.values) - len(opened.context)
        return [*map(item_label, opened.context), *[".__dict__"] * further]
    elif type(opened.context) is tuple:
        return [f".{key}" for key in opened.context]
    return [f"[{i}]" for i in range(len(opened.values))]


def _is_structure(value: Any) -> bool:
    """Return whether an object stands for the tensors that it holds."""
    kind = type(value)
    if isinstance(value, _OF_TORCH):
        return True
    if not is_object(value) or slots_of(kind):
        return False
    return callable(getattr(kind, "to", None)) or _holds_tensors(value, _LEVELS)


_OF_TORCH = (torch.distributions.Distribution, torch.distributions.Transform)
"""Classes of torch's own whose objects hold tensors in attributes."""
_LEVELS, _ENTRIES = 3, 64
"""How deep tensors are looked for in an object that does not move itself to a device, and among how
many entries of each level."""


def _holds_tensors(value: Any, levels: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if levels and (isinstance(value, (dict, list, tuple)) or is_object(value)):
        held = value if isinstance(value, (list, tuple)) else attributes_of(value).values()
        held = value.values() if isinstance(value, dict) else held
        return any(_holds_tensors(one, levels - 1) for one in islice(held, _ENTRIES))
    return False


def _place_of_items(mapping: Any) -> str | None:
    """Return the attribute in which a mapping keeps its items; None if they are nowhere else."""
    kind = type(mapping)
    if issubclass(kind, dict):
        return None
    if kind not in _PLACES_OF_ITEMS and len(mapping):
        known = [mapping[key] for key in mapping]
        table = {name: v for name, v in attributes_of(mapping).items() if isinstance(v, dict)}
        same = (
            n for n, v in table.items() if [*v] == [*mapping] and all(map(is_, v.values(), known))
        )
        _PLACES_OF_ITEMS[kind] = next(same, None)
    place = _PLACES_OF_ITEMS.get(kind)
    return place if place and isinstance(attributes_of(mapping).get(place), dict) else None


_PLACES_OF_ITEMS: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def items_of(mapping: Any) -> Mapping[Any, Any]:
    """Return the items of a mutable mapping."""
    if (place := _place_of_items(mapping)) is not None:
        items: dict[Any, Any] = attributes_of(mapping)[place]
        return items
    return mapping if type(mapping) in MAPPINGS else {key: mapping[key] for key in mapping}


def attributes_beside(mapping: Any) -> dict[str, Any]:
    """Return the attributes of a mapping that are no items."""
    table = attributes_of(mapping)
    if table is mapping:  # a dict whose items are its attributes, too
        return {}
    place = _place_of_items(mapping)
    return {key: held for key, held in table.items() if key != place}


def item_label(key: Any) -> str:
    """Return the suffix of a name that reaches an item of a list or mapping."""
    return f"[{json.dumps(key, ensure_ascii=False) if type(key) is str else reprlib.repr(key)}]"


def _frozen(context: Any) -> Hashable:
    """Make a pytree context hashable: it may be a list or a dict."""
    if isinstance(context, list | tuple):
        return (type(context), *map(_frozen, context))
    if isinstance(context, dict):
        return (type(context), *((_frozen(k), _frozen(v)) for k, v in context.items()))
    return as_hashable(context)
