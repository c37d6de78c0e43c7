"""One call of a submodule in an observed step: how it was made, and the state it found."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_graphs.core.signature import KernelChoice, Modes, Signature
from lightning_graphs.core.torch_private import current_autograd_node
from lightning_graphs.errors import CaptureError


@dataclass(eq=False, slots=True)
class ObservedCall:
    """One call of a module in the observed step."""

    name: str  # qualified name of the module
    module: nn.Module
    args: tuple[Any, ...]  # its positional arguments, detached from the autograd graph
    kwargs: Mapping[str, Any]  # its keyword arguments, likewise
    autocast: torch.dtype | None  # data type of autocast; None while it was off
    kernels: KernelChoice  # what operators chose their kernels by
    grad_enabled: bool  # whether autograd was recording
    frozen: frozenset[nn.Parameter]  # the module's parameters that required no gradient
    training: tuple[bool, ...]  # the train/eval flag of each of its submodules
    parent: ObservedCall | None  # the call of another observed module that made this one
    requires_grad: bool = False  # whether an output requires grad
    # The call was made by a backward pass, as activation checkpointing does.
    recomputed: bool = False
    backwards: int = 0  # how often a backward pass went through its outputs
    twice_differentiable: bool = False  # a backward pass was run with ``create_graph=True``
    partial: bool = False  # a backward pass left the module's parameters out
    # For each argument that other observed calls returned, by its index among the tensors of the
    # arguments, these calls and the index of the tensor in what they returned.
    sources: dict[int, list[tuple[ObservedCall, int]]] = field(default_factory=dict)
    # For each other argument without gradient that earlier calls were given, too: these calls and
    # the argument's index there.
    shared: dict[int, list[tuple[ObservedCall, int]]] = field(default_factory=dict)
    ordinal: int = 0  # which call of the module in the step it is, counted from 0
    # No backward pass went through it in its step, and the outputs' autograd graph was kept: one
    # may come later.
    outlives: bool = False
    # It was made inside of ``torch.func`` or forward-mode autograd; nothing else is known of it.
    transformed: bool = False
    # Which of the switches that choose kernels the step has set otherwise for it.
    switched: Sequence[str] = ()
    hands_on: bool = False  # it returns nothing with a gradient but what it was given
    # Memory that an output shares with another one or with an argument was written after the call,
    # before the next step began.
    rewritten: bool = False
    # In which strides the gradients of its outputs came, by the index of each.
    gradient_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    draws: bool = False  # it has drawn random numbers on a GPU
    shaped_by: str = ""  # an operator inside of it whose output shape depends on values; or empty
    # Such an operator ran before it in the step: its arguments may have any shape in the next one.
    follows_values: bool = False

    @classmethod
    def now(
        cls,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device_type: str,
        parent: ObservedCall | None = None,
    ) -> ObservedCall:
        """A call that is made now, with autocast of this type of device."""
        autocast = torch.is_autocast_enabled(device_type)
        return cls(
            name,
            module,
            args,
            kwargs,
            torch.get_autocast_dtype(device_type) if autocast else None,
            KernelChoice.now(),
            torch.is_grad_enabled(),
            frozenset(p for p in module.parameters() if not p.requires_grad),
            tuple(m.training for m in module.modules()),
            parent,
            recomputed=current_autograd_node() is not None,
        )

    def key(self) -> Hashable:
        """What tells this call from another one of its module."""
        # The switches of torch count where the call noted them; those of now are the same for all.
        modes = Modes.current("cpu")
        try:
            signature: Hashable = Signature.of(self.args, self.kwargs, modes=modes)[0]
        except CaptureError:
            signature = None
        return self.name, signature, self.autocast, self.grad_enabled, self.frozen, self.training

    def obstacle(self) -> str | None:
        """Why this call cannot be a graph, in words that follow its name; None if it can."""
        # What its code does is not looked at.
        if self.transformed:
            return "is made inside of a transform (torch.func, forward-mode autograd)"
        if self.switched:
            names = ", ".join(self.switched)
            return f"is made under switches of torch that the step has set just for it: {names}"
        if self.twice_differentiable:
            return "is differentiated twice (create_graph=True)"
        if self.backwards > 1:
            return "has more than one backward pass through it (retain_graph=True)"
        if self.outlives:
            return "has an output whose autograd graph is kept for a later step"
        if self.hands_on:
            return "returns nothing but what it was given, which is no work for a graph"
        if self.rewritten:
            return (
                "returns a tensor in the memory of another output or of an argument, and the step "
                "writes there; what a graph returns has memory of its own"
            )
        return None


class ObservedState:
    """The state of a module in which an observed call found it.

    Autocast, grad mode, default dtype, train/eval flags and ``requires_grad`` of its parameters.
    """

    def __init__(self, call: ObservedCall, device_type: str) -> None:
        self._device_type = device_type
        self._autocast = call.autocast
        self._grad_enabled = call.grad_enabled
        self._dtype = call.kernels.dtype
        self._modules = list(call.module.modules())
        self._training = call.training
        self._parameters = list(call.module.parameters())
        self._required = [p not in call.frozen for p in self._parameters]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the module be in that state while the body runs."""
        flags = [m.training for m in self._modules]
        required = [p.requires_grad for p in self._parameters]
        _set_flags(self._modules, self._training)
        _set_requires_grad(self._parameters, self._required)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with (
                torch.set_grad_enabled(self._grad_enabled),
                torch.autocast(
                    self._device_type,
                    dtype=self._autocast,
                    enabled=self._autocast is not None,
                    cache_enabled=False,
                ),
            ):
                yield
        finally:
            torch.set_default_dtype(dtype)
            _set_flags(self._modules, flags)
            _set_requires_grad(self._parameters, required)


def _set_flags(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        if module.training is not flag:  # setting an attribute of a module takes long
            module.training = flag


def _set_requires_grad(parameters: Sequence[nn.Parameter], required: Sequence[bool]) -> None:
    for parameter, require in zip(parameters, required, strict=True):
        if parameter.requires_grad is not require:
            parameter.requires_grad_(require)
