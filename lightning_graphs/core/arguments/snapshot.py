"""Remembers what a region of user code may change, puts it back, and reads it by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.core.arguments.buffers import bytes_of, copy_all
from lightning_graphs.core.arguments.tree import flatten
from lightning_graphs.core.private.distributed import local
from lightning_graphs.core.private.torch import clone_all
from lightning_graphs.errors import ReplayError

_AT_ONCE = 2**24
"""Bytes that are gathered for one copy between device and host: each has to wait for the device."""


class Part(Protocol):
    """Something that is no tensor, remembered as it was when this was made."""

    def restore(self) -> object:
        """Put it back; may be called again."""


class Snapshot:
    """Values of tensors, and other parts, as they are when this is made.

    Values are saved once for each storage, together with what else lies in it: on the device as far
    as there is room, the rest in memory of the host. Tensors in several pieces of memory are left
    out, because no graph writes them in place.

    Args:
        tensors: Whose values are saved; a sharded one stands for the part of this rank.
        parts: What is remembered beside them; put back after the tensors, in this order.
        room: How many of so many bytes may be saved on the device; all of them if not given.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        *parts: Part,
        room: Callable[[int], float] = float,
    ) -> None:
        self._parts = [*parts]
        self._tensors = [local(t) for t in tensors if t.layout is torch.strided]
        self._memory = [tensor.detach() for tensor in self._tensors]
        self._addresses = [t.untyped_storage().data_ptr() for t in self._tensors]
        storages: dict[torch.device, dict[int, torch.UntypedStorage]] = {}
        for tensor, address in zip(self._tensors, self._addresses, strict=True):
            if address:
                found = tensor.untyped_storage()
                storages.setdefault(tensor.device, {}).setdefault(address, found)
        size = sum(found.nbytes() for own in storages.values() for found in own.values())
        on_device = room(size)
        self._saved: list[tuple[list[Tensor], list[Tensor]]] = []  # storages and their copies
        # By the first of the storages that are gathered: where on the device
        self._gathered: dict[Tensor, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for own in storages.values():
                here, there = _split(map(bytes_of, own.values()), on_device)
                if here:
                    self._saved.append((here, clone_all(here)))
                self._save_on_host(there)
        self._copies = {
            view.data_ptr(): copy
            for own, copies in self._saved
            for view, copy in zip(own, copies, strict=True)
        }

    def _save_on_host(self, views: list[Tensor]) -> None:
        memory: Tensor | None = None
        for part in _parts(views):
            if len(part) == 1:
                self._saved.append((part, [part[0].to("cpu", copy=True)]))
                continue
            if memory is None:  # kept: to restore must need no memory that may be gone by then
                memory = part[0].new_empty(min(_AT_ONCE, sum(view.nbytes for view in views)))
            gathered = self._gathered[part[0]] = memory[: sum(view.nbytes for view in part)]
            torch.cat(part, out=gathered)
            self._saved.append((part, _apart(gathered.to("cpu", copy=True), part)))

    @property
    def addresses(self) -> list[int]:
        """Where the storages begin whose values are saved."""
        return self._addresses

    def saved(self, tensor: Tensor) -> Tensor:
        """The saved value of a tensor whose storage is in the snapshot: a view to read only."""
        address = tensor.untyped_storage().data_ptr()
        if not address:
            return torch.empty_like(tensor)
        copy = self._copies[address]
        is_part = copy.nbytes < copy.untyped_storage().nbytes()
        storage = (copy.clone() if is_part else copy).untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def add(self, part: Part) -> None:
        """Put back one part more from now on."""
        self._parts.append(part)

    def restore(self) -> None:
        """Write saved values back in place, and put the parts back; version counters stay.

        Raises:
            ReplayError: A tensor was given another storage, which a graph would not reach. It has
                its former one again.
        """
        moved = []
        for i, (tensor, address) in enumerate(zip(self._tensors, self._addresses, strict=True)):
            if tensor.untyped_storage().data_ptr() != address:
                moved.append(i)
                tensor.data = self._memory[i]
        with torch.no_grad():
            for views, values in self._saved:
                if (gathered := self._gathered.get(views[0])) is not None:
                    gathered.copy_(bytes_of(values[0].untyped_storage()))
                    values = _apart(gathered, views)
                copy_all(views, values)
        for part in self._parts:
            part.restore()
        for i in moved:
            raise ReplayError(
                "A snapshot can be restored only into the memory that it was taken of.",
                f"tensor {i} of shape {tuple(self._tensors[i].shape)} moved since the snapshot",
                "change tensors in place between the snapshot and its restoration",
            )

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Put all of it back after the body."""
        try:
            yield
        finally:
            self.restore()


def _split(views: Iterable[Tensor], room: float) -> tuple[list[Tensor], list[Tensor]]:
    """Those that have room, and those that have none."""
    here: list[Tensor] = []
    there: list[Tensor] = []
    for view in views:
        if view.nbytes <= room:
            here.append(view)
            room -= view.nbytes
        else:
            there.append(view)
    return here, there


def _parts(views: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those that are copied at once; a large one alone, which then needs no memory beside it."""
    part: list[Tensor] = []
    size = 0
    for view in views:
        if part and size + view.nbytes > _AT_ONCE:
            yield part
            part, size = [], 0
        part.append(view)
        size += view.nbytes
    if part:
        yield part


def _apart(together: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.split(together, [view.numel() for view in views]))


# ------------------------------------------------------------------ parts


class Gradients:
    """What ``.grad`` of parameters is, and which of them are trained; not the values."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._known = [(p, p.grad, p.requires_grad) for p in parameters]

    @property
    def tensors(self) -> list[Tensor]:
        return [gradient for _, gradient, _ in self._known if gradient is not None]

    def forget(self) -> None:
        """Let go of those that parameters have no more."""
        self._known = [
            (p, None if p.grad is None else gradient, trained)
            for p, gradient, trained in self._known
        ]

    def restore(self) -> None:
        for parameter, gradient, trained in self._known:
            parameter.requires_grad_(trained)
            parameter.grad = gradient


class OptimizerState:
    """What an optimizer knows of its parameters, and its gradient scaler of the scale."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._known = {p: dict(state) for p, state in optimizer.state.items()}
        self._scale: dict[str, Any] = {} if scaler is None else scaler.state_dict()
        values = (value for state in self._known.values() for value in state.values())
        self.tensors = [value for value in values if isinstance(value, Tensor)]

    def restore(self) -> int:
        """Put it back; of how many parameters there were other tensors."""
        table: dict[Any, Any] = self._optimizer.state
        mine = set(map(id, self.tensors))
        made = [[v for v in s.values() if isinstance(v, Tensor)] for s in table.values()]
        for parameter in [p for p in table if p not in self._known]:
            del table[parameter]
        for parameter, known in self._known.items():
            table[parameter].clear()
            table[parameter].update(known)
        if self._scaler is not None:
            # With a scale given, `update` forgets a step that was left halfway.
            self._scaler.update(self._scale["scale"])
            self._scaler.load_state_dict(self._scale)
        return sum(any(id(tensor) not in mine for tensor in tensors) for tensors in made)


# ------------------------------------------------------------------ by name


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor that a region computes or changes."""

    name: str  # what a message calls it
    value: Tensor  # the tensor itself, not a copy
    gradient: str = ""  # the name of the gradient that an update of it was computed from; or empty
    is_gradient: bool = False  # whether it is a gradient itself


def results_in(value: Any, name: str, of: str = "") -> list[Result]:
    """The tensors in a value, by name; constants take part by their names."""
    leaves: list[tuple[str, Any]] = []
    flatten(value, name, leaves)
    return [
        Result(f"{found}{of}", local(leaf.detach()))
        if isinstance(leaf, Tensor)
        else Result(f"{found} = {leaf!r}{of}", torch.empty(0))
        for found, leaf in leaves
    ]


@dataclass(frozen=True, slots=True)
class RegionState:
    """What a region of user code may change: what a snapshot is taken of, and results are read of.

    Names are those of messages.
    """

    tensors: Mapping[str, Tensor]  # buffers, and what else the region is known to write
    parameters: Mapping[str, Tensor]  # what may have a gradient
    unseen: Sequence[Tensor] = ()  # what it may write unnoticed, and is not compared
    optimizer: Optimizer | None = None  # which the region steps; None if it steps none
    scaler: torch.amp.GradScaler | None = None

    @classmethod
    def of_step(
        cls,
        root: nn.Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        written: Mapping[str, Tensor] = MappingProxyType({}),  # other tensors, by name
        unseen: Sequence[Tensor] = (),
        others: Iterable[Tensor] = (),  # with gradients; they may be parameters of the module
    ) -> RegionState:
        """What a training step of a module changes that steps this optimizer."""
        names: dict[Tensor, str] = {
            parameter: f"`{name}`" for name, parameter in root.named_parameters()
        }
        for i, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                names.setdefault(parameter, f"`group {i}, parameter {k} of the optimizer`")
        further = [tensor for tensor in others if tensor not in names]
        names |= {tensor: f"`tensor {i} with a gradient`" for i, tensor in enumerate(further)}
        named = {name: tensor for tensor, name in names.items()}
        tensors = {f"buffer `{name}`": buffer for name, buffer in root.named_buffers()}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in written.items()}
        return cls(tensors, named, unseen, optimizer, scaler)

    def take(self, room: Callable[[int], float], *parts: Part) -> Snapshot:
        """Take a snapshot of it, and of further parts; see :class:`Snapshot`."""
        gradients = Gradients(self.parameters.values())
        tensors = [*self.tensors.values(), *self.unseen, *self.parameters.values()]
        tensors += gradients.tensors
        own: list[Part] = [gradients]
        if self.optimizer is not None:
            known = OptimizerState(self.optimizer, self.scaler)
            tensors += known.tensors
            own.append(known)
        return Snapshot(tensors, *own, *parts, room=room)

    def results(self) -> list[Result]:
        """What the region has changed, in the order of its computation."""
        found = [Result(name, local(tensor)) for name, tensor in self.tensors.items()]
        found += [
            Result(_gradient_of(name), local(p.grad), is_gradient=True)
            for name, p in self.parameters.items()
            if p.grad is not None
        ]
        return found if self.optimizer is None else found + self._updated(self.optimizer)

    def _updated(self, optimizer: Optimizer) -> list[Result]:
        """What a step of the optimizer changes: parameters, its own state, the loss scale."""
        found = [
            Result(f"parameter {name}", local(parameter), _gradient_of(name))
            for name, parameter in self.parameters.items()
        ]
        found += [
            Result(f"the optimizer's `{key}` of {name}", local(value), _gradient_of(name))
            for name, parameter in self.parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        if self.scaler is not None:
            found.append(Result("the loss scale", torch.tensor(self.scaler.get_scale())))
        return found


def _gradient_of(name: str) -> str:
    return f"the gradient of {name}"
