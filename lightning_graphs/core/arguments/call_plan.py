"""A compiled check that a later call equals a signature, which hands out its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.core.arguments.leaves import Constant, Leaf, SameInside, TensorSpec
from lightning_graphs.core.arguments.signature import Modes, Signature
from lightning_graphs.core.arguments.tree import (
    Node,
    attributes_beside,
    attributes_in,
    flatten,
    has_more,
    is_registered,
)
from lightning_graphs.core.arguments.values import Identity, attributes_of, slots_of
from lightning_graphs.errors import CaptureError, SignatureError


class CallPlan:
    """A signature compiled into one flat function that checks a call and hands out its tensors.

    Containers are taken apart by generated code, at 40 % of the time of a walk; only kinds that
    live in torch's pytree registry are opened through the registry.
    """

    def __init__(self, signature: Signature, *, check_modes: bool = True) -> None:
        self.signature = signature
        self._check_modes = check_modes  # grad mode, autocast and inference mode count, too
        code = _Code()
        if check_modes:
            code.modes(signature.modes)
        code.arguments(signature.tree)
        code.leaves(signature.leaves)
        code.aliases(signature.specs, signature.aliases)
        # The tensor leaves of a call; None for one that differs
        self.match: Callable[[Sequence[Any], Mapping[str, Any]], list[Tensor] | None]
        self.match = code.compiled()

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensor leaves of a call, in order; a call that differs is refused."""
        found = self.match(args, kwargs)
        return self._explain(args, kwargs) if found is None else found

    def _explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        expected = self.signature
        rule = "A captured call is replayed for calls of the same signature only."
        modes = Modes.current(expected.modes.device_type) if self._check_modes else expected.modes
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
                "\n    ".join(lines),
                "call it as it was captured, or capture another graph for this signature",
            )
        return tensors


class _Code:
    """The generated function of a plan: one local variable for each node, one early return each."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._scope: dict[str, Any] = {"Tensor": Tensor, "Parameter": Parameter}
        self._variables: list[str] = []
        self._nodes = 0

    def text(self) -> str:
        body = "".join(f"        {line}\n" for line in self._lines)
        # A nested tensor raises RuntimeError when asked for its shape, compressed sparse ones do
        # for their strides.
        return (
            f"def match(args, kwargs):\n    try:\n{body}"
            "    except RuntimeError:\n        return None\n"
        )

    def compiled(self) -> Any:
        exec(_byte_code(self.text()), self._scope)
        return self._scope["match"]

    def modes(self, modes: Modes) -> None:
        self._scope |= {
            "is_grad_enabled": torch.is_grad_enabled,
            "is_autocast_enabled": torch.is_autocast_enabled,
            "get_autocast_dtype": torch.get_autocast_dtype,
            "is_inference": torch.is_inference_mode_enabled,
        }
        self._require(f"is_grad_enabled() is {modes.grad_enabled}")
        self._require(f"is_inference() is {modes.inference}")
        self._require(f"is_autocast_enabled({modes.device_type!r}) is {modes.autocast_enabled}")
        if modes.autocast_enabled:
            dtype = self._bind(modes.autocast_dtype)
            self._require(f"get_autocast_dtype({modes.device_type!r}) is {dtype}")

    def arguments(self, tree: Node) -> None:
        positional, keyword = (child for child in tree.children if child is not None)
        self._require(f"len(args) == {len(positional.children)}")
        self._unpack(positional.children, "args")
        if keyword.children:
            self._require(f"(*kwargs,) == {self._bind(keyword.context)}")
            self._unpack(keyword.children, "kwargs.values()")
        else:
            self._require("not kwargs")

    def leaves(self, leaves: Sequence[Leaf]) -> None:
        tensors = []
        for variable, leaf in zip(self._variables, leaves, strict=True):
            if isinstance(leaf, TensorSpec):
                self._tensor(variable, leaf)
                tensors.append(variable)
            elif isinstance(leaf, Constant):
                self._constant(variable, leaf)
            elif leaf.kind is not object:
                self._require(f"type({variable}) is {self._bind(leaf.kind)}")
        self._variables = tensors

    def aliases(self, specs: Sequence[TensorSpec], aliases: Sequence[int]) -> None:
        """Compares addresses within each set of tensors that could be the same, and returns."""
        groups = defaultdict(list)
        for index, spec in enumerate(specs):
            if 0 not in spec.shape:
                groups[spec].append(index)
        for spec, members in groups.items():
            if len(members) == 1:
                continue
            where = "id({})" if spec.requires_grad else "{}.data_ptr()"
            for i in members:
                self._lines.append(f"p{i} = {where.format(self._variables[i])}")
            firsts = [f"p{i}" for i in members if aliases[i] == i]
            for i in members:
                if aliases[i] != i:
                    self._require(f"p{i} == p{aliases[i]}")
            if len(firsts) > 1:
                self._require(f"len({{{', '.join(firsts)}}}) == {len(firsts)}")
        self._lines.append(f"return [{', '.join(self._variables)}]")

    def _bind(self, value: Any) -> str:
        name = f"k{len(self._scope)}"
        self._scope[name] = value
        return name

    def _require(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def _unpack(self, children: Sequence[Node | None], items: str) -> None:
        if not children:
            return
        start = self._nodes
        self._nodes += len(children)
        variables = [f"v{i}" for i in range(start, self._nodes)]
        self._lines.append(f"{', '.join(variables)}, = {items}")
        for variable, child in zip(variables, children, strict=True):
            if child is None:
                self._variables.append(variable)
            else:
                self._container(variable, child)

    def _container(self, variable: str, node: Node) -> None:
        self._require(f"type({variable}) is {self._bind(node.kind)}")
        if is_registered(node.kind):
            # The registry's own functions open it: slower, and right for whatever they do.
            opened = self._bind(partial(_registered_leaves, node))
            self._lines.append(f"{variable} = {opened}({variable})")
            self._require(f"{variable} is not None")
            self._unpack([None] * _leaf_count(node), variable)
        elif issubclass(node.kind, MutableMapping):
            self._require(f"(*{variable},) == {self._bind(node.context)}")
            items = f"{variable}.values()"
            if has_more(node.kind):
                items = f"(*{items}, {self._bind(attributes_beside)}({variable}))"
            self._unpack(node.children, items)
        elif issubclass(node.kind, tuple | list):
            self._require(f"len({variable}) == {len(node.children)}")
            self._unpack(node.children, variable)
        else:
            opener = attributes_in if slots_of(node.kind) else attributes_of
            self._lines.append(f"{variable} = {self._bind(opener)}({variable})")
            self._require(f"(*{variable},) == {self._bind(node.context)}")
            self._unpack(node.children, f"{variable}.values()")

    def _constant(self, variable: str, leaf: Constant) -> None:
        if isinstance(leaf.key, SameInside | Identity):
            self._require(f"{self._bind(leaf.key.matches)}({variable})")
        elif leaf.key is None or isinstance(leaf.key, bool):
            self._require(f"{variable} is {leaf.key}")
        elif issubclass(leaf.kind, float | complex):
            # NaN and signed zeros make == the wrong question.
            constant_of, key = self._bind(Constant.of), self._bind(leaf)
            self._require(f"{constant_of}({variable}) == {key}")
        else:
            kind, key = self._bind(leaf.kind), self._bind(leaf.key)
            same = f"({variable} is {key} or {variable} == {key})"
            self._require(f"type({variable}) is {kind} and {same}")

    def _tensor(self, variable: str, spec: TensorSpec) -> None:
        checks = [
            f"(type({variable}) is Tensor or type({variable}) is Parameter)",
            f"{variable}.layout is {self._bind(torch.strided)}",
            f"{variable}.dtype is {self._bind(spec.dtype)}",
            f"{variable}.shape == {self._bind(spec.shape)}",
            f"{variable}.stride() == {self._bind(spec.stride)}",
            f"{variable}.device == {self._bind(spec.device)}",
            f"{variable}.requires_grad is {spec.requires_grad}",
        ]
        if spec.dtype.is_complex:
            checks.append(f"not {variable}.is_conj()")
        if spec.dtype.is_complex or spec.dtype.is_floating_point:
            checks.append(f"not {variable}.is_neg()")
        self._require(" and ".join(checks))


@lru_cache(maxsize=256)
def _byte_code(text: str) -> CodeType:
    """Equal layers have equal plans but for the constants, which are names in the text."""
    return compile(text, "<call plan>", "exec")


def _leaf_count(node: Node | None) -> int:
    return 1 if node is None else sum(map(_leaf_count, node.children))


def _registered_leaves(node: Node, value: Any) -> list[Any] | None:
    found: list[tuple[str, Any]] = []
    return [leaf for _, leaf in found] if flatten(value, "", found) == node else None
