"""What a callable holds beside its arguments, and what it must not be, hold or do."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lightning_graphs.core.arguments.buffers import AddressGuard
from lightning_graphs.core.autograd.nodes import leaves_behind, nodes_behind
from lightning_graphs.core.graphed import GraphedCallable
from lightning_graphs.core.private.torch import recorded_before, tables_of
from lightning_graphs.errors import CaptureError


class Held:
    """The modules and tensors that a callable names itself.

    Those are the callable where it is a module, and otherwise what it finds in its closure, its
    globals, ``self`` with its attributes, and the arguments of a ``functools.partial``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = [("", function)] if isinstance(function, nn.Module) else list(_held(function))
        # Root modules by the name that the callable has for them; its own is empty.
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}  # other tensors by name
        for name, value in found:
            if isinstance(value, nn.Module) and all(value is not m for m in self.modules.values()):
                self.modules[name] = value
            elif isinstance(value, Tensor):
                self.tensors[name] = value
        seen: set[nn.Module] = set()
        # All modules with their paths, each once, as they were at construction.
        self.owners = [
            named
            for name, root in self.modules.items()
            for named in root.named_modules(memo=seen, prefix=name)
        ]

        self.submodules = [owner for _, owner in self.owners]

    def named(self, kind: str) -> list[tuple[str, Tensor]]:
        """The parameters or buffers of all modules with their full names."""
        roots = self.modules.items()
        named = (item for name, root in roots for item in getattr(root, f"named_{kind}")(name))
        return list({id(tensor): (name, tensor) for name, tensor in named}.values())

    def state(self) -> list[Tensor]:
        """Every tensor that a call may read or write beside its arguments."""
        attributes = (v for owner in self.submodules for v in vars(owner).values())
        plain = [value for value in attributes if isinstance(value, Tensor)]
        named = (*self.named("parameters"), *self.named("buffers"))
        return [tensor for _, tensor in named] + plain + list(self.tensors.values())

    def guards(self, beside: Sequence[Tensor]) -> list[AddressGuard]:
        guards = [AddressGuard.of_module(root, name) for name, root in self.modules.items()]
        known = set(map(id, self.state()))
        loose = [(f"tensor `{name}`", tensor) for name, tensor in self.tensors.items()]
        loose += [(f"parameter {i}", p) for i, p in enumerate(beside) if id(p) not in known]
        return [*guards, AddressGuard([("", dict(loose))])] if loose else guards


class Bindings:
    """Which tensors the modules were holding, to notice and undo a rebinding.

    Parameters, buffers and plain attributes count, and the memory of each (``x.data = ...``).
    """

    def __init__(self, held: Held) -> None:
        self._tables: list[tuple[str, dict[str, Any], Mapping[str, Any]]] = [
            (path, table, _tensors_of(table))
            for path, owner in held.owners
            for table in (*tables_of(owner)[:2], vars(owner))
        ]
        self._memory = [
            (f"{path}.{key}.data" if path else f"{key}.data", tensor, tensor.detach())
            for path, _, before in self._tables
            for key, tensor in before.items()
            if not is_lazy(tensor)
        ]

    def restore(self) -> list[str]:
        """Bind everything as it was; returns the names of what was bound to something else."""
        rebound = []
        for name, tensor, was in self._memory:
            if tensor.layout is torch.strided and tensor.data_ptr() != was.data_ptr():
                rebound.append(name)
                tensor.data = was
        for path, table, before in self._tables:
            for key in {**before, **_tensors_of(table)}:
                if key in before and table.get(key) is before[key]:
                    continue
                rebound.append(f"{path}.{key}" if path else key)
                table.pop(key, None)
                if key in before:
                    table[key] = before[key]
        return rebound


def with_leaves_behind(
    outputs: Sequence[Tensor], known: list[Parameter], inputs: Sequence[Tensor]
) -> list[Parameter]:
    """The parameters and every other trainable leaf that the outputs depend on."""
    # A function does not say which parameters it uses, and a module may use some that are not its
    # own. Without this walk they would silently get no gradient.
    given = {id(t) for t in inputs}
    found = dict.fromkeys(known)
    found |= {leaf: None for leaf in leaves_behind(outputs) if id(leaf) not in given}  # type: ignore[misc]
    return list(found)


def _tensors_of(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if isinstance(value, Tensor)}


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from ((f"args[{i}]", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _held(function.func)
        return
    if isinstance(function, nn.Module):
        yield type(function).__name__, function
        return
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        yield "self", owner
        if not isinstance(owner, nn.Module):
            yield from getattr(owner, "__dict__", {}).items()
    plain = getattr(function, "__func__", function)
    if inspect.isfunction(plain):
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                yield name, cell.cell_contents
        used = dict.fromkeys(_names(plain.__code__))
        yield from ((n, plain.__globals__[n]) for n in used if n in plain.__globals__)
    else:
        yield from getattr(plain, "__dict__", {}).items()


def _names(code: CodeType) -> Iterator[str]:
    """Every name that a function looks up outside of itself, comprehensions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    forward = function.forward if isinstance(function, nn.Module) else function
    if isinstance(forward, GraphedCallable):
        raise CaptureError(
            "A callable is graphed once.",
            f"{type(function).__qualname__} has a graphed forward already",
            "call .forward.reset() on the module (or .reset() on the function) first",
        )
    return forward


def refuse_unfit_state(held: Held) -> None:
    forwards = (vars(module).get("forward") for module in held.submodules)
    if any(isinstance(forward, GraphedCallable) for forward in forwards):
        raise CaptureError(
            "A graphed callable cannot be part of another one.",
            "a module in it has a graphed forward already",
            "call .forward.reset() on that module first, or keep it outside",
        )
    buffers = held.named("buffers")
    trainable = next((name for name, buffer in buffers if buffer.requires_grad), None)
    if trainable is not None:
        raise CaptureError(
            "Only parameters of a graphed module may be trainable.",
            f"buffer `{trainable}` requires grad",
            "make it an nn.Parameter, or call requires_grad_(False) on it",
        )
    named = (*held.named("parameters"), *buffers)
    lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
    if lazy is not None:
        raise CaptureError(
            "A graph is captured over memory that exists.",
            f"`{lazy}` is not initialized yet",
            "call the module once before",
        )


def refuse_written_arguments(names: Sequence[str], written: Sequence[bool]) -> None:
    name = next((n for n, is_written in zip(names, written, strict=True) if is_written), None)
    if name is not None:
        raise CaptureError(
            "A graphed callable must not change its arguments: a replay would change our "
            "static inputs instead of the caller's tensors.",
            f"{name} is written in place",
            "work on a copy (x = x + 1 instead of x += 1), or return the new value",
        )


def refuse_history_of_others(outputs: Sequence[Tensor], start: int) -> None:
    earlier = (node for node in nodes_behind(outputs) if recorded_before(node, start))
    node = next(earlier, None)
    if node is not None:
        raise CaptureError(
            "A graphed callable gets what requires a gradient as an argument, or holds it as a "
            "parameter: a replay follows nothing else back.",
            f"an output depends on a tensor that {type(node).__name__.partition('Backward')[0]} "
            "computed before the call, found in an attribute, a variable or an object",
            "pass that tensor as an argument, or detach it",
        )


def refuse_rebound_tensors(names: Sequence[str]) -> None:
    if names:
        raise CaptureError(
            "A graphed callable changes the tensors of its modules in place only: a replay "
            "writes the memory it was captured with and binds no names.",
            f"`{names[0]}` is bound to another tensor in every call",
            "write `self.x.copy_(new)` instead of `self.x = new`, or return the new tensor",
        )


def refuse_sparse_gradients(gradients: Sequence[Tensor | None]) -> None:
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise CaptureError(
            "A graph writes dense gradients only: they need fixed addresses.",
            "a sparse gradient",
            "nn.Embedding(..., sparse=False)",
        )
