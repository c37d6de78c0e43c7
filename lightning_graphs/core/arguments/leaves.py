"""The leaves of a call's arguments: tensors as specs, everything else as constants."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.core.arguments.values import Constant, Inside
from lightning_graphs.errors import CaptureError

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
        """The spec of a plain strided tensor; others, which errors call ``name``, are refused."""
        kind = special_kind(tensor)
        if kind:
            raise CaptureError(
                "An input of a graphed callable must be a plain strided tensor.",
                f"got {kind} as {name}",
                "pass plain tensors: `.to_dense()`, `.dequantize()`, `.resolve_conj()`, "
                "`.resolve_neg()`, or the parts of a tensor subclass",
            )
        shape, stride = tuple(tensor.shape), tensor.stride()
        return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

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
        contiguous = torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()
        if not contiguous or (self.shape == other.shape and self.stride != other.stride):
            text += f" stride ({_commas(self.stride)})"
        text += f" on {self.device}" if self.device != other.device else ""
        return text + (" requires_grad" if self.requires_grad and not other.requires_grad else "")


@dataclass(frozen=True, slots=True)
class Unread:
    """A Python value that the call does not read, whatever it is."""

    kind: type  # its type, which may count; else ``object``

    @property
    def text(self) -> str:
        return f"a {self.kind.__name__}"

    def matches(self, value: Any) -> bool:
        return self.kind is object or type(value) is self.kind


Leaf = TensorSpec | Constant | Unread


def alias_groups(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the index of the first one that is the same tensor, its own if none is.

    Without gradients, tensors are the same when storage, offset, geometry and dtype are. With
    gradients only one object is the same as itself, and an empty tensor is the same as none.
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


def leaf_changes(name: str, before: Leaf, after: Leaf) -> list[str]:
    """What changed from one leaf to another that differs, a line each."""
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
