"""The signature of a call, the prepared check of later calls, and how often each one comes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf, prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.errors import CaptureError, SignatureError
from lightning_graphs.private.engine import saved_tensors_hooks
from lightning_graphs.private.torch import attention_switches
from lightning_graphs.values.guards import Constant
from lightning_graphs.values.tree import (
    MAPPINGS,
    Leaf,
    Node,
    TensorSpec,
    Unread,
    alias_groups,
    first_change,
    flatten,
    leaf_changes,
    open_container,
    own_class,
)

_flash, _efficient, _cudnn, _math = attention_switches


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


EVERYTHING = _Everything()
"""The names of all leaves."""


@dataclass(frozen=True, slots=True)
class Modes:
    """The switches of torch that change what a call computes."""

    grad_enabled: bool
    autocast_enabled: bool
    autocast_dtype: torch.dtype | None
    inference: bool
    device_type: str = "cpu"

    @classmethod
    def current(cls, device_type: str) -> Modes:
        """The switches now in force on this thread."""
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else None
        inference = torch.is_inference_mode_enabled()
        return cls(torch.is_grad_enabled(), autocast, dtype, inference, device_type)

    def diff(self, other: Modes) -> list[str]:
        """One line for each switch that differs."""
        names = ("grad mode", "autocast", "inference mode", "device type")
        triples = zip(names, self._in_words(), other._in_words(), strict=True)
        return [f"{name}: {a} -> {b}" for name, a, b in triples if a != b]

    def _in_words(self) -> tuple[str, ...]:
        dtype = str(self.autocast_dtype).removeprefix("torch.")
        grad, inference = ("on" if on else "off" for on in (self.grad_enabled, self.inference))
        return grad, dtype if self.autocast_enabled else "off", inference, self.device_type


class BackendFlags(NamedTuple):
    """The switches by which operators choose kernels; a capture bakes the choice in.

    They are global to all threads, unlike autocast and grad mode.
    """

    precision_of_float32_products: str
    kernels_of_attention: tuple[bool, ...]  # flash, memory-efficient, cuDNN's and plain ones
    deterministic_algorithms: bool
    default_dtype: torch.dtype
    saved_tensors_hooks: bool  # not of all threads: what autograd saves passes through them

    @classmethod
    def now(cls) -> BackendFlags:
        return cls(
            torch.get_float32_matmul_precision(),
            (_flash(), _efficient(), _cudnn(), _math()),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            saved_tensors_hooks() is not None,
        )

    def changes(self, to: BackendFlags) -> list[str]:
        triples = zip(KERNEL_CHOICES, self, to, strict=True)
        return [name for name, before, after in triples if before != after]


KERNEL_CHOICES = tuple(name.replace("_", " ") for name in BackendFlags._fields)
"""What messages call them."""


@dataclass(frozen=True, slots=True)
class Signature:
    """All that must be equal between a captured call and a later one."""

    tree: Node  # of ``(args, kwargs)``
    leaves: tuple[Leaf, ...]
    aliases: tuple[int, ...]  # of the tensors among them; see :func:`alias_groups`
    modes: Modes
    extra: tuple[Hashable, ...]  # further keys of the caller
    names: tuple[str, ...] = field(compare=False)  # of the leaves, such as ``batch["x"][1]``
    arg_names: tuple[str, ...] = field(compare=False)  # of the leading positional arguments
    _hash: int = field(default=0, init=False, compare=False, repr=False)

    def __hash__(self) -> int:
        if not self._hash:  # signatures are keys of many books, and large
            parts = self.tree, self.leaves, self.aliases, self.modes, self.extra
            object.__setattr__(self, "_hash", hash(parts))
        return self._hash

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],  # their order counts
        *,
        names: Sequence[str] | None = None,  # of the leading arguments, instead of ``args[i]``
        modes: Modes | None = None,  # those in force now, on the first tensor's device
        extra: tuple[Hashable, ...] = (),
        # Names of Python values, and of containers of such, that do not count; with ``EVERYTHING``
        # their types do not count either
        unread: Container[str] = (),
        # Whether values of tensors on the host count, beside those of the device
        host_values: bool = False,
    ) -> tuple[Signature, list[Tensor]]:
        """Return the signature of a call and its tensor leaves, in order."""
        arg_names = tuple(names or ())
        paths = (*arg_names, *(f"args[{i}]" for i in range(len(arg_names), len(args))))[: len(args)]
        found: list[tuple[str, Any]] = []
        nodes = tuple(flatten(v, path, found, unread) for v, path in zip(args, paths, strict=True))
        positional = Node(tuple, len(args), nodes, paths)
        keyword = flatten(dict(kwargs), "kwargs", found)
        tree = Node(tuple, 2, (positional, keyword), ("", "kwargs"))

        tensors = [leaf for _, leaf in found if isinstance(leaf, Tensor)]
        has_device = host_values and any(t.device.type != "cpu" for t in tensors)

        def leaf_of(name: str, value: Any) -> Leaf:
            if isinstance(value, Tensor):
                spec = TensorSpec.of(value, name)
                is_read = has_device and value.device.type == "cpu"
                is_read |= host_values and name.endswith(_PACKED)
                return spec.with_values(value, name) if is_read else spec
            # Code tells enums apart by `is`, of which no stand-in hears
            if name in unread and not (isinstance(value, Enum) and unread is not EVERYTHING):
                return Unread(object if unread is EVERYTHING else type(value))
            return Constant.of(value)

        leaves = tuple(leaf_of(name, value) for name, value in found)
        if modes is None:
            modes = Modes.current(tensors[0].device.type if tensors else "cpu")
        leaf_names = tuple(name for name, _ in found)
        aliases = alias_groups(tensors)
        return cls(tree, leaves, aliases, modes, extra, leaf_names, arg_names), tensors

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        pairs = zip(self.names, self.leaves, strict=True)
        return tuple(name for name, leaf in pairs if isinstance(leaf, TensorSpec))

    def diff(self, other: Signature) -> list[str]:
        """List the changes from this signature to another, a line each."""
        lines = []
        if self.tree != other.tree:
            lines.append(f"structure: {first_change('', self.tree, other.tree)}")
        else:
            triples = zip(self.names, self.leaves, other.leaves, strict=True)
            for name, a, b in triples:
                lines += leaf_changes(name, a, b) if a != b else ()
            if self.specs == other.specs:
                lines += self._alias_changes(other)
        lines += self.modes.diff(other.modes)
        if self.extra != other.extra:
            lines.append(f"extra: {self.extra!r} -> {other.extra!r}")
        return lines

    def _alias_changes(self, other: Signature) -> list[str]:
        names = self.tensor_names

        def text(leaf: int, first: int) -> str:
            return "a tensor of its own" if first == leaf else f"the same tensor as {names[first]}"

        pairs = enumerate(zip(self.aliases, other.aliases, strict=True))
        return [f"{names[i]}: {text(i, a)} -> {text(i, b)}" for i, (a, b) in pairs if a != b]


_PACKED = ".batch_sizes"
"""End of the name of the tensor that a packed sequence has on the host, on any device."""

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
"""Of these no tensor is a lazily negated or conjugated view."""


class CallPlan:
    """A signature as flat lists, by which one loop checks a call and hands out its tensors."""

    def __init__(
        self,
        signature: Signature,
        *,
        # Whether the switches of torch count, too, or autocast alone
        check_modes: bool | Literal["autocast"] = True,
    ) -> None:
        self.signature = signature
        self._modes = signature.modes if check_modes else None
        self._all_modes = check_modes is True
        positional, keyword = (node for node in signature.tree.children if node is not None)
        self._arguments, self._keywords = len(positional.children), keyword.context
        taken = [*positional.children, *keyword.children]
        self._taken = len(taken)
        self._containers: list[tuple[int, Node]] = []
        self._constants: list[tuple[int, type, Any]] = []
        self._others: list[tuple[int, Callable[[Any], bool]]] = []
        tensors: list[int] = []
        for place, leaf in zip(self._places(0, taken), signature.leaves, strict=True):
            if isinstance(leaf, TensorSpec):
                tensors.append(place)
            elif isinstance(leaf, Constant) and type(leaf.key) is leaf.kind:
                self._constants.append((place, leaf.kind, leaf.key))
            else:
                self._others.append((place, leaf.matches))
        self._tensors = [
            (
                *(place, s.kind, s.dtype, s.shape, s.stride, s.device, s.requires_grad),
                s.dtype not in WHOLE,
            )
            for place, s in zip(tensors, signature.specs, strict=True)
        ]
        # Of tensors of the host, by their index among the tensors
        specs = enumerate(signature.specs)
        self._values = [(i, [*s.values]) for i, s in specs if s.values is not None]
        alike: dict[TensorSpec, list[int]] = defaultdict(list)
        for i, spec in enumerate(signature.specs):
            if 0 not in spec.shape:
                alike[spec].append(i)
        self._alike = [
            (
                id if spec.requires_grad else Tensor.data_ptr,
                group,
                [signature.aliases[i] for i in group],
            )
            for spec, group in alike.items()
            if len(group) > 1
        ]

    def _places(self, begin: int, nodes: Sequence[Node | None]) -> Iterator[int]:
        """Yield the indices of leaves in a list to which each container appends its entries."""
        for place, node in enumerate(nodes, begin):
            if node is None:
                yield place
            else:
                self._containers.append((place, node))
                inside = self._taken
                self._taken += len(node.children)
                yield from self._places(inside, node.children)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensor leaves of a call, in order; refuse a call that differs."""
        found = self.match(args, kwargs)
        return self._explain(args, kwargs) if found is None else found

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the tensor leaves of a call; None for one that differs."""
        modes = self._modes
        if modes is not None and (
            torch.is_autocast_enabled(modes.device_type) is not modes.autocast_enabled
            or (
                modes.autocast_enabled
                and torch.get_autocast_dtype(modes.device_type) is not modes.autocast_dtype
            )
            or (self._all_modes and torch.is_grad_enabled() is not modes.grad_enabled)
            or (self._all_modes and torch.is_inference_mode_enabled() is not modes.inference)
        ):
            return None
        if len(args) != self._arguments or (*kwargs,) != self._keywords:
            return None
        found: list[Any] = [*args, *kwargs.values()]
        for place, node in self._containers:
            value, context = found[place], node.context
            kind: Any = node.kind
            if type(value) is not kind:
                return None
            if kind is tuple or kind is list:
                if len(value) != context:
                    return None
                found += value
            elif kind in MAPPINGS:
                if (*value,) != context:
                    return None
                found += value.values()
            else:
                opened = open_container(value)
                if opened is None or opened.frozen_context != context:
                    return None
                if len(opened.values) != len(node.children):
                    return None
                found += opened.values
        for place, kind, key in self._constants:
            value = found[place]
            if type(value) is not kind or not (value is key or value == key):
                return None
        for place, matches in self._others:
            if not matches(found[place]):
                return None
        tensors = []
        try:
            for place, kind, dtype, shape, stride, device, grad, may_be_lazy in self._tensors:
                tensor = found[place]
                if (
                    (
                        type(tensor) is not kind
                        and not (kind is Tensor and type(tensor) is Parameter)
                    )
                    or (kind is not Tensor and own_class(tensor))
                    or tensor.layout is not torch.strided
                    or tensor.dtype is not dtype
                    or tensor.shape != shape
                    or tensor.stride() != stride
                    or tensor.device != device
                    or tensor.requires_grad is not grad
                    or (may_be_lazy and (tensor.is_neg() or tensor.is_conj()))
                ):
                    return None
                tensors.append(tensor)
        except RuntimeError:  # a nested one was asked for its shape, or a compressed sparse one
            return None
        for i, values in self._values:
            if tensors[i].flatten().tolist() != values:
                return None
        for place_of, group, firsts in self._alike:
            known: dict[int, int] = {}
            where = map(place_of, map(tensors.__getitem__, group))
            if [*map(known.setdefault, where, group)] != firsts:
                return None
        return tensors

    def _explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        expected = self.signature
        rule = "A graphed callable must be called with the signature of its capture."
        modes = expected.modes
        if self._modes is not None:
            grad, inference = (modes.grad_enabled, modes.inference)
            now = Modes.current(modes.device_type)
            modes = now if self._all_modes else replace(now, grad_enabled=grad, inference=inference)
        try:
            how: dict[str, Any] = {"modes": modes, "host_values": bool(self._values)}
            names, extra = expected.arg_names, expected.extra
            signature, tensors = Signature.of(args, kwargs, names=names, extra=extra, **how)
        except CaptureError as error:
            raise SignatureError(rule, error.observed, error.remedy) from error
        if signature != expected:
            lines = expected.diff(signature)
            raise SignatureError(
                rule,
                "got " + "\n    ".join(lines),
                "pass arguments like those of the capture, or capture another graph for these",
            )
        return tensors


# ------------------ How often they come

KEYS = 512
"""How many keys are remembered, however many shapes there are."""
_RECENT = 1024
"""Sightings after which older ones count half."""
_EQUAL = 1e6
"""Sightings of every shape in advance that make all shares equal."""


@dataclass(slots=True, eq=False)
class _Seen:
    """How often a shape has come."""

    batches: float = 0.0
    visits: float = 0.0


_MOST_ARE_NEW = 0.75
"""The part of steps without graphs, at least, whose batch has a shape that none had before."""


class Steady:
    """Tells of batches whose shapes are others each time, but for that of their largest tensor.

    Such are images with lists of boxes: hardly a shape of a whole batch comes back, and the modules
    that are given the images have one shape all the time.
    """

    def __init__(self) -> None:
        self.steps = 0  # without graphs, since there is such a tensor; the caller counts them
        self._new = 0  # those of them with a new shape
        self._largest: TensorSpec | None = None

    def see(self, batch: Signature, patience: int) -> bool:
        """Note a batch of a new shape; return whether more than ``patience`` steps are like it."""
        largest = max(batch.specs, key=lambda spec: prod(spec.shape), default=None)
        if largest != self._largest:
            self._largest, self.steps, self._new = largest, 1, 0
        self._new += 1
        return self.steps > patience and self._new >= _MOST_ARE_NEW * self.steps


class Sightings:
    """Counts batches by shape, and estimates the share of each shape in the coming ones.

    Batches of one shape in a row are one visit. That a shape comes back, and how often, its visits
    tell: images of a size for ten steps, and then of another one, have not come back nine times.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, _Seen] = OrderedDict()  # the latest comes last
        self._last: _Seen | None = None
        self._in_a_row = 0  # batches of the last visit

    def see(self, shape: Hashable) -> None:
        """Count a batch."""
        self._seen[shape] = seen = self._seen.pop(shape, None) or _Seen()
        self._visit(seen, 1)
        while len(self._seen) > KEYS:
            self._seen.popitem(last=False)

    def _visit(self, seen: _Seen, batches: int) -> None:
        seen.batches += batches
        if seen is not self._last:
            self._last, self._in_a_row = seen, 0
            seen.visits += 1.0
        self._in_a_row += batches

    def add(self, counts: Mapping[Hashable, int]) -> None:
        """Count batches that were replayed, and let those of long ago count less.

        Those that were replayed last come last. Their order is not known beyond that: several
        shapes have come in visits of the usual length.
        """
        counts = {shape: count for shape, count in counts.items() if count}
        if not counts:
            return
        usual = self._usual
        for shape, count in counts.items():
            seen = self._seen.setdefault(shape, _Seen())
            if len(counts) == 1:
                self._visit(seen, count)
            else:
                seen.batches += count
                seen.visits += max(1.0, count / usual)
                self._last, self._in_a_row = seen, 1
        if sum(seen.batches for seen in self._seen.values()) > _RECENT:
            for seen in self._seen.values():
                seen.batches /= 2.0
                seen.visits /= 2.0

    @property
    def _usual(self) -> float:
        """How many batches a visit has on average."""
        batches = sum(seen.batches for seen in self._seen.values())
        return max(1.0, batches / max(1.0, sum(seen.visits for seen in self._seen.values())))

    def count(self, shape: Hashable) -> float:
        return seen.batches if (seen := self._seen.get(shape)) is not None else 0.0

    def items(self) -> Iterable[tuple[Any, float]]:
        return [(shape, seen.batches) for shape, seen in self._seen.items()]

    def rest(self, shape: Hashable) -> float:
        """Estimate how many batches of a shape follow at once: as many as came in a row so far."""
        if self._last is None or self._seen.get(shape) is not self._last:
            return 0.0
        return float(self._in_a_row) if len(self._seen) > 1 else inf

    def shares(self) -> dict[Hashable, float]:
        """Estimate the share of each shape, from 0 to 1, but for the visit that is under way.

        The part of visits that were single ones estimates how many will bring something new (Good,
        "The population frequencies of species", Biometrika 1953). The rest is divided among the
        shapes: equally if their counts differ by no more than chance makes of equal shares, and by
        their counts if they differ by much more (the counts of shapes are Poisson numbers, whose
        means follow a gamma distribution).
        """
        kinds, total, squares, single = len(self._seen), 0.0, 0.0, 0
        for seen in self._seen.values():
            total += seen.visits
            squares += seen.visits**2
            single += seen.visits <= 1.0
        if single >= total:
            return dict.fromkeys(self._seen, 0.0)
        known = 1.0 - single / total
        mean = known * total / kinds  # with those that have not come yet, of which each counts 0
        variance = known * squares / kinds - mean * mean
        equal = min(_EQUAL, mean * mean / max(variance - mean, 1e-9))
        each = known / (total + kinds * equal) / self._usual
        return {
            shape: each * (seen.visits + equal) * seen.batches / seen.visits
            for shape, seen in self._seen.items()
        }

    def clear(self) -> None:
        self._seen.clear()
        self._last, self._in_a_row = None, 0
