"""Checks that a later call equals a signature, by prepared lists, and hands out its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.core.arguments.leaves import Constant, TensorSpec
from lightning_graphs.core.arguments.signature import Modes, Signature
from lightning_graphs.core.arguments.tree import MAPPINGS, Node, frozen_context, open_container
from lightning_graphs.errors import CaptureError, SignatureError

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
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
            (place, s.dtype, s.shape, s.stride, s.device, s.requires_grad, s.dtype not in _WHOLE)
            for place, s in zip(tensors, signature.specs, strict=True)
        ]
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
        """Where leaves are in a list to whose end each container adds what is in it."""
        for place, node in enumerate(nodes, begin):
            if node is None:
                yield place
            else:
                self._containers.append((place, node))
                inside = self._taken
                self._taken += len(node.children)
                yield from self._places(inside, node.children)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensor leaves of a call, in order; a call that differs is refused."""
        found = self.match(args, kwargs)
        return self._explain(args, kwargs) if found is None else found

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """The tensor leaves of a call; None for one that differs."""
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
                if opened is None or frozen_context(kind, opened) != context:
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
            for place, dtype, shape, stride, device, requires_grad, may_be_lazy in self._tensors:
                tensor = found[place]
                if (
                    (type(tensor) is not Tensor and type(tensor) is not Parameter)
                    or tensor.layout is not torch.strided
                    or tensor.dtype is not dtype
                    or tensor.shape != shape
                    or tensor.stride() != stride
                    or tensor.device != device
                    or tensor.requires_grad is not requires_grad
                    or (may_be_lazy and (tensor.is_neg() or tensor.is_conj()))
                ):
                    return None
                tensors.append(tensor)
        except RuntimeError:  # a nested one was asked for its shape, or a compressed sparse one
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
            signature, tensors = Signature.of(
                args, kwargs, names=expected.arg_names, modes=modes, extra=expected.extra
            )
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
