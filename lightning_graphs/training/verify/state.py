"""Everything that a training step changes: kept, put back, and read by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.core.arguments.buffers import StateSnapshot
from lightning_graphs.core.private.fsdp import local
from lightning_graphs.training.costs.memory import MemoryBudget
from lightning_graphs.training.step.body import scaler_of
from lightning_graphs.training.verify.differences import Result, difference, results_in


class Restorable(Protocol):
    """What can be put back as it was when it was made."""

    def restore(self) -> None:
        """Put it back."""


class Kept:
    """Tensors, torch's random generators and others, copied to be put back.

    Copies are on the device as far as there is room, the rest in memory of the host. Tensors in
    several pieces of memory are left out: no graph writes them in place.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        device: torch.device,
        budget: MemoryBudget,
        *others: Restorable,
        beside: int = 0,  # bytes that are taken beside the copies
    ) -> None:
        tensors = [local(tensor) for tensor in tensors if tensor.layout is torch.strided]
        storages = [t.untyped_storage() for t in tensors]
        size = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        self._snapshot = StateSnapshot(tensors, room=budget.room_for(size, beside))
        self.saved = self._snapshot.saved
        self._others = others
        self._device = device if device.type == "cuda" else None
        self._on_host = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if self._device else None

    def restore(self) -> None:
        """Put everything back."""
        self._snapshot.restore()
        for other in self._others:
            other.restore()
        torch.set_rng_state(self._on_host)
        if self._on_device is not None:
            assert self._device is not None
            torch.cuda.set_rng_state(self._on_device, self._device)


class StepState:
    """The state that a step of one fit changes, as it is now."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        loose: Mapping[str, Tensor],  # other tensors that the step writes, by name
        *others: Restorable,
        budget: MemoryBudget,
        beside: int = 0,  # bytes that the step takes beside it
    ) -> None:
        self._optimizer = optimizer
        self._budget, self._beside = budget, beside
        self._device = module.device
        self._buffers = dict(module.named_buffers())
        self._loose = dict(loose)
        self._scaler = scaler_of(trainer.precision_plugin)
        self._parameters = _named_parameters(module, optimizer)
        self._gradients = [p.grad for p in self._parameters.values()]
        self._state = {p: dict(s) for p, s in optimizer.state.items()}
        self._others = others
        self._tensors = [
            *self._buffers.values(),
            *self._loose.values(),
            *self._parameters.values(),
            *(p.grad for p in self._parameters.values() if p.grad is not None),
            *(v for s in self._state.values() for v in s.values() if isinstance(v, Tensor)),
        ]
        self._kept: Kept | None = None
        self._scale: dict[str, Any] = {}

    @contextlib.contextmanager
    def kept(
        self, together: Callable[[Callable[[], None]], None] = lambda keep: keep()
    ) -> Iterator[None]:
        """Copy the state, put it back at the end, whatever happened, and let go of the copy."""
        together(self.keep)
        try:
            yield
        finally:
            self.restore()
            self._kept = None

    def keep(self) -> None:
        """Copy the state."""
        self._kept = Kept(
            self._tensors, self._device, self._budget, *self._others, beside=self._beside
        )
        if self._scaler is not None:
            self._scale = self._scaler.state_dict()

    def restore(self) -> None:
        """Put the state back as it was when it was copied."""
        assert self._kept is not None
        self._kept.restore()
        for parameter, gradient in zip(self._parameters.values(), self._gradients, strict=True):
            parameter.grad = gradient
        table: dict[Any, Any] = self._optimizer.state
        for parameter in [p for p in table if p not in self._state]:
            del table[parameter]
        for parameter, known in self._state.items():
            table[parameter].clear()
            table[parameter].update(known)
        if self._scaler is not None:
            # With a scale given, `update` forgets a step that was left halfway.
            self._scaler.update(self._scale["scale"])
            self._scaler.load_state_dict(self._scale)

    def moved(self, tensor: Tensor) -> float:
        """How far a tensor of the state is from its copy, as a Euclidean norm."""
        assert self._kept is not None
        return difference(tensor, self._kept.saved(tensor).to(tensor.device)).norm

    def results(self, returned: Any) -> list[Result]:
        """What a step returned and what it changed, in the order of its computation."""
        found = [
            replace(output, name="the loss") if output.name in _LOSSES else output
            for output in results_in(returned, "output")
        ]
        found += [Result(f"buffer `{name}`", buffer) for name, buffer in self._buffers.items()]
        found += [Result(f"tensor `{name}`", tensor) for name, tensor in self._loose.items()]
        gradients = {name: f"the gradient of `{name}`" for name in self._parameters}
        found += [
            Result(gradients[name], local(p.grad), is_gradient=True)
            for name, p in self._parameters.items()
            if p.grad is not None
        ]
        for name, parameter in self._parameters.items():
            found.append(Result(f"parameter `{name}`", local(parameter), gradients[name]))
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    title = f"the optimizer's `{key}` of `{name}`"
                    found.append(Result(title, local(value), gradients[name]))
        if self._scaler is not None:
            found.append(Result("the loss scale", torch.tensor(self._scaler.get_scale())))
        return found


_LOSSES = ("output", "output['loss']", 'output["loss"]')


def _named_parameters(module: LightningModule, optimizer: Optimizer) -> dict[str, Tensor]:
    """The module's parameters, and those that only the optimizer has."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    known = set(named.values())
    for i, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            if parameter not in known:
                named[f"group {i}, parameter {k} of the optimizer"] = parameter
    return named
