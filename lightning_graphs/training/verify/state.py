"""Keeps everything that a training step changes, puts it back, and reads it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.core.arguments.buffers import StateSnapshot
from lightning_graphs.core.generators import RandomState
from lightning_graphs.core.private.distributed import local
from lightning_graphs.training.step.optimizers import scaler_of
from lightning_graphs.training.verify.differences import Result, difference, results_in


class Kept:
    """Tensors, torch's random generators and others, copied to be put back.

    Copies are on the device as far as there is room, the rest in memory of the host. Tensors in
    several pieces of memory are left out: no graph writes them in place.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        random: RandomState,
        room: Callable[[int], int],  # how many of so many bytes may be copied on the device
        *others: Callable[[], object],  # put others back as they were
    ) -> None:
        tensors = [local(tensor) for tensor in tensors if tensor.layout is torch.strided]
        storages = [t.untyped_storage() for t in tensors]
        size = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        self._snapshot = StateSnapshot(tensors, room=room(size))
        self._others = [*others]
        self._random = random

    @property
    def addresses(self) -> list[int]:
        """Where the storages begin that it has copies of."""
        return self._snapshot.addresses

    def add(self, restore: Callable[[], object]) -> None:
        """Put back more, from now on."""
        self._others.append(restore)

    def restore(self) -> None:
        self._snapshot.restore()
        for restore in self._others:
            restore()
        self._random.restore()

    def moved(self, tensor: Tensor) -> float:
        """How far one of the tensors is from its copy, as a Euclidean norm."""
        return difference(tensor, self._snapshot.saved(tensor).to(tensor.device)).norm


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


class StepState:
    """The state that a step of one fit changes."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        loose: Mapping[str, Tensor],  # other tensors that the step writes, by name
        held: Sequence[Tensor] = (),  # and such as it may write unseen
        others: Iterable[Tensor] = (),  # with gradients; they may be parameters of the module
    ) -> None:
        self._optimizer = optimizer
        self._module = module
        self._buffers = dict(module.named_buffers())
        self._loose = dict(loose)
        self._held = held
        self._scaler = scaler_of(trainer.precision_plugin)
        self._parameters = _named_parameters(module, optimizer)
        known = set(self._parameters.values())
        further = [tensor for tensor in others if tensor not in known]
        self._parameters |= {f"tensor {i} with a gradient": t for i, t in enumerate(further)}

    def keep(self, room: Callable[[int], int], *others: Callable[[], object]) -> Kept:
        """A copy of it, and of others, as they are now; see :class:`Kept`."""
        parameters = self._parameters.values()
        gradients, known = Gradients(parameters), OptimizerState(self._optimizer, self._scaler)
        tensors = [*self._buffers.values(), *self._loose.values(), *self._held, *parameters]
        tensors += [*gradients.tensors, *known.tensors]
        random = RandomState(self._module.device, self._module.modules())
        return Kept(tensors, random, room, *others, gradients.restore, known.restore)

    def results(self, returned: Any) -> list[Result]:
        """What a step returned and what it changed, in the order of its computation."""
        found = [
            replace(output, name="the loss") if output.name in _LOSSES else output
            for output in results_in(returned, "output")
        ]
        found += [
            Result(f"buffer `{name}`", local(buffer)) for name, buffer in self._buffers.items()
        ]
        found += [Result(f"tensor `{name}`", local(tensor)) for name, tensor in self._loose.items()]
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
