"""Finds what a callable holds next to its arguments, and refuses what it must not hold."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_graphs.autograd.graphed import GraphedCallable
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import codes_in
from lightning_graphs.private.exchange import bind
from lightning_graphs.private.torch import is_strided, tables_of
from lightning_graphs.values.memory import AddressGuard
from lightning_graphs.values.snapshot import PythonSnapshot


class FreeVariables:
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
        """Every tensor that a call may read or write next to its arguments."""
        attributes = (v for owner in self.submodules for v in vars(owner).values())
        named = (*self.named("parameters"), *self.named("buffers"), *self.tensors.items())
        plain = [value for value in attributes if isinstance(value, Tensor)]
        return list(filter(is_strided, (*(tensor for _, tensor in named), *plain)))

    def guards(self, beside: Sequence[Tensor]) -> list[AddressGuard]:
        guards = [AddressGuard.of_module(root, name) for name, root in self.modules.items()]
        known = set(map(id, self.state()))
        loose = [(f"tensor `{name}`", tensor) for name, tensor in self.tensors.items()]
        loose += [(f"parameter {i}", p) for i, p in enumerate(beside) if id(p) not in known]
        return [*guards, AddressGuard([("", dict(loose))])] if loose else guards

    def refuse_what_is_unfit(self) -> None:
        """Refuse modules that no graph can have inside."""
        forwards = (vars(module).get("forward") for module in self.submodules)
        if any(isinstance(forward, GraphedCallable) for forward in forwards):
            raise CaptureError(
                "A graphed callable cannot contain another one.",
                "a module inside of it is graphed already",
                "call .forward.reset() on that module first, or leave that module out",
            )
        buffers = self.named("buffers")
        trainable = next((name for name, buffer in buffers if buffer.requires_grad), None)
        if trainable is not None:
            raise CaptureError(
                "A graphed module can train parameters, but no buffers.",
                f"buffer `{trainable}` requires grad",
                "make the buffer an nn.Parameter, or call requires_grad_(False) on it",
            )
        named = (*self.named("parameters"), *buffers)
        lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
        if lazy is not None:
            raise CaptureError(
                "A module with uninitialized parameters cannot be graphed.",
                f"`{lazy}` is not initialized yet",
                "call the module once before the capture",
            )


class Bindings(PythonSnapshot):
    """Which tensors the modules were holding, to notice and undo a rebinding.

    Parameters, buffers and plain attributes count, and the memory of each (``x.data = ...``).
    """

    def __init__(self, held: FreeVariables) -> None:
        super().__init__()
        self._memory: list[tuple[str, Tensor, Tensor]] = []
        for path, owner in held.owners:
            tables = tables_of(owner)[:2]
            for holder in (owner, *tables):
                self.add(path, holder)
            self._memory += [
                (f"{path}.{key}.data".removeprefix("."), tensor, tensor.detach())
                for table in (*tables, vars(owner))
                for key, tensor in table.items()
                if isinstance(tensor, Tensor) and not is_lazy(tensor)
            ]

    def rebound(self) -> list[str]:
        """Bind every tensor as it was; the names of what was bound to something else."""
        names = []
        for name, tensor, was in self._memory:
            if tensor.layout is torch.strided and tensor.data_ptr() != was.data_ptr():
                names.append(name)
                tensor.data = was
        for change in list(self.changes()):
            if isinstance(change.before, Tensor) or isinstance(change.now, Tensor):
                names.append(change.name.removeprefix("."))
                bind(change.table, change.key, change.before)
        return names


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
        used = dict.fromkeys(n for code in codes_in(plain.__code__) for n in code.co_names)
        yield from ((n, plain.__globals__[n]) for n in used if n in plain.__globals__)
    else:
        yield from getattr(plain, "__dict__", {}).items()
