"""The signature of a call: what a later one must have in common with it for a replay."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_graphs.core.arguments.leaves import (
    Constant,
    Leaf,
    TensorSpec,
    Unread,
    alias_groups,
    leaf_changes,
)
from lightning_graphs.core.arguments.tree import Node, first_change, flatten
from lightning_graphs.core.private.torch import attention_switches

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


class KernelChoice(NamedTuple):
    """The switches by which operators choose their kernels: a capture keeps what was chosen.

    All threads have them in common, and neither autocast nor grad mode tells.
    """

    precision_of_float32_products: str
    kernels_of_attention: tuple[bool, ...]  # flash, memory-efficient, cuDNN's and plain ones
    deterministic_algorithms: bool
    default_dtype: torch.dtype

    @classmethod
    def now(cls) -> KernelChoice:
        return cls(
            torch.get_float32_matmul_precision(),
            (_flash(), _efficient(), _cudnn(), _math()),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )

    def changes(self, to: KernelChoice) -> list[str]:
        """The names of what is different in another choice."""
        triples = zip(KERNEL_CHOICES, self, to, strict=True)
        return [name for name, before, after in triples if before != after]


KERNEL_CHOICES = tuple(name.replace("_", " ") for name in KernelChoice._fields)
"""What messages call them."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything that must be equal between a captured call and a later one."""

    tree: Node  # of ``(args, kwargs)``
    leaves: tuple[Leaf, ...]
    aliases: tuple[int, ...]  # of the tensors among them; see :func:`alias_groups`
    modes: Modes
    extra: tuple[Hashable, ...]  # what else the caller distinguishes calls by
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
    ) -> tuple[Signature, list[Tensor]]:
        """The signature of a call and its tensor leaves, in order."""
        arg_names = tuple(names or ())
        paths = (*arg_names, *(f"args[{i}]" for i in range(len(arg_names), len(args))))[: len(args)]
        found: list[tuple[str, Any]] = []
        nodes = tuple(flatten(v, path, found, unread) for v, path in zip(args, paths, strict=True))
        positional = Node(tuple, len(args), nodes, paths)
        keyword = flatten(dict(kwargs), "kwargs", found)
        tree = Node(tuple, 2, (positional, keyword), ("", "kwargs"))

        def leaf_of(name: str, value: Any) -> Leaf:
            if isinstance(value, Tensor):
                return TensorSpec.of(value, name)
            if name in unread:
                return Unread(object if unread is EVERYTHING else type(value))
            return Constant.of(value)

        leaves = tuple(leaf_of(name, value) for name, value in found)
        tensors = [leaf for _, leaf in found if isinstance(leaf, Tensor)]
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
        """What changed from this signature to another, a line each."""
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
