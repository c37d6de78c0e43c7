"""Memory that graphs are captured over: static inputs, guarded addresses, saved state.

A graph reads and writes the addresses it was captured with. Everything here is prepared once, at
capture; what runs with every replay is one fused copy or one comparison of lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.core.tree import alias_groups

_REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class _Group:
    """Leaves that one foreach call copies; ``start`` and ``stop`` cut them out of the sources."""

    start: int
    stop: int
    targets: list[Tensor]
    non_blocking: bool


class StaticInputs:
    """Buffers of our own that stand for the tensor leaves of a call, and the copy into them.

    Every buffer has its leaf's shape, strides, dtype and ``requires_grad``; expanded and
    overlapping layouts are kept, so that kernels see what they saw. Leaves that are the same tensor
    (:func:`~lightning_graphs.core.signature.alias_groups`) share one buffer. Construct it outside
    of a capture, on the stream that will copy.

    Args:
        tensors: Tensor leaves of a signature; copied, never kept.
        device: Where the buffers live; each leaf's own device by default. Copies from CPU leaves to
            another device do not wait: as with ``Tensor.to(non_blocking=True)``, pinned memory
            must not be overwritten before the copy has run.

    Attributes:
        tensors: The buffers, one for each leaf, detached from every autograd graph.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> None:
        firsts = alias_groups(tensors)
        # A buffer made under inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            own = {i: _empty_like(tensors[i], device) for i in sorted(set(firsts))}
            leaves = [i for i, buffer in own.items() if buffer.numel()]
            leaves.sort(key=lambda i: _group_key(tensors[i], own[i]))
            spans = [_overlap_span(own[i]) for i in leaves]
            targets = [_linear(own[i], n) for i, n in zip(leaves, spans, strict=True)]
        self._leaves = leaves
        self._spans = [(k, span) for k, span in enumerate(spans) if span]
        self._targets = targets
        self._groups = _grouped([tensors[i] for i in leaves], targets)
        self._storages = frozenset(t.untyped_storage().data_ptr() for t in targets)
        self._differentiable = any(map(_REQUIRES_GRAD, tensors))
        self.copy_in(tensors)
        for i, buffer in own.items():
            buffer.requires_grad_(tensors[i].requires_grad)
        self.tensors = [own[first] for first in firsts]

    def copy_in(self, tensors: Sequence[Tensor]) -> None:
        """Copies the leaves of a call into the buffers, one foreach call for each kind of leaf.

        The leaves must have the specs and aliases of those at construction, which
        :class:`~lightning_graphs.core.signature.CallPlan` verifies: nothing is checked here. A
        leaf that already is its buffer costs no copy; one that lies in another buffer is read
        before that buffer is overwritten.
        """
        if self._differentiable and torch.is_grad_enabled():
            with torch.no_grad():
                self._copy(tensors)
        else:
            self._copy(tensors)

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        sources = [tensors[i] for i in self._leaves]
        for k, span in self._spans:
            sources[k] = _linear(sources[k], span)
        if not self._storages.isdisjoint([s.untyped_storage().data_ptr() for s in sources]):
            self._copy_foreign(sources)
            return
        for group in self._groups:
            part = sources[group.start : group.stop]
            torch._foreach_copy_(group.targets, part, group.non_blocking)

    def _copy_foreign(self, sources: list[Tensor]) -> None:
        """The copy when some sources lie in our own buffers, at their places or at others."""
        pending = []
        for source, target in zip(sources, self._targets, strict=True):
            if source.untyped_storage().data_ptr() not in self._storages:
                pending.append((source, target))
            elif source.data_ptr() != target.data_ptr():
                pending.append((source.clone(), target))
        for source, target in pending:
            target.copy_(source)


class AddressGuard:
    """Notices that tensors a graph was captured over have moved or changed since.

    A tensor is watched by identity, address, geometry, dtype and ``requires_grad``, never by value.

    Args:
        named: What messages call each tensor, such as ``parameter `encoder.weight```, and the
            tensor. They are kept alive.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(named)
        self._watch(
            [name for name, _ in pairs],
            [dict(enumerate(t for _, t in pairs))] * len(pairs),
            list(range(len(pairs))),
        )

    @classmethod
    def of_module(cls, module: nn.Module, prefix: str = "") -> AddressGuard:
        """Watches every parameter, buffer and submodule where the module keeps it.

        So a parameter that is replaced by another (assignment, ``load_state_dict(assign=True)``),
        one that appears where None was, and a replaced submodule are seen too.

        Args:
            module: The module; submodules shared between parents are watched in every parent.
            prefix: Put before every name, such as ``"model."``.
        """
        names: list[str] = []
        tables: list[Mapping[Any, Any]] = []
        keys: list[Any] = []
        for path, owner in module.named_modules(prefix=prefix.rstrip(".")):
            slots = (
                ("parameter", owner._parameters),
                ("buffer", owner._buffers),
                ("submodule", owner._modules),
            )
            for kind, table in slots:
                for key in table:
                    names.append(f"{kind} `{path}.{key}`" if path else f"{kind} `{key}`")
                    tables.append(table)
                    keys.append(key)
        guard = cls(())
        guard._watch(names, tables, keys)
        return guard

    def check(self) -> None:
        """Compares every watched tensor with what it was; about 0.2 us each.

        Raises:
            ReplayError: The first tensor that is not what it was, and how it differs.
        """
        try:
            found = list(map(getitem, self._tables, self._keys))
        except KeyError:
            self._refuse()
        if list(map(id, found)) != self._ids:
            self._refuse()
        # The objects are the same from here on, so only what can change in place is compared.
        tensors = self._tensors
        if (
            list(map(Tensor.data_ptr, tensors)) != self._pointers
            or list(map(_REQUIRES_GRAD, tensors)) != self._requires_grad
            or list(map(Tensor.stride, tensors)) != self._strides
        ):
            self._refuse()
