"""Verifies captured calls of modules: each runs by itself and as graphs, from one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.autograd.backward import unrepeated, zero_gradient
from lightning_graphs.autograd.nodes import gradients_kept_apart
from lightning_graphs.device.generators import Generators, RandomState
from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    ReplayError,
    VerificationError,
    in_one_line,
)
from lightning_graphs.policy.budget import is_out_of_memory
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import without_hooks
from lightning_graphs.regions.calls import CallRefused, GraphedCall, as_observed
from lightning_graphs.regions.gradients import drop_gradients
from lightning_graphs.regions.tolerance import Tolerance
from lightning_graphs.regions.verify import Comparison, Verifier
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import (
    PythonSnapshot,
    RegionState,
    Result,
    results_in,
)
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.object_graph import iter_objects


class CallDiffers(CallRefused, VerificationError):
    """The graphs of one call compute something else than the call itself."""


class CallChecks:
    """Runs captured calls both ways from one state.

    For each call the module's own forward and its backward run on arguments that the call has had,
    and then its graphs, with the same random gradients of the outputs. Outputs, buffers and all
    gradients are compared. Hooks on parameters do not run.
    """

    def __init__(self, verifier: Verifier, root: nn.Module, device: torch.device) -> None:
        self._verifier, self._root, self._device = verifier, root, device

    def check(self, sites: Sequence[GraphedCall], *, again: bool = False) -> None:
        """Verify the graphs of a step before it begins."""
        # A replay runs only in order: a backward pass that is pending is void.
        for site in sites:
            site.graphed.order.begin()
            self.check_site(site, again=again)

    def check_site(self, site: GraphedCall, *, again: bool = False) -> None:
        if not self._verifier.is_on:
            return
        call = site.call
        run = _CallRun(self._root, self._device, site, again=again)
        code = call.module, call.training, call.frozen, call.grad_enabled, call.recomputed
        written = self._verifier.written[code]
        ways = Comparison(run.state, run.eager, run.replayed, run.parts, written)
        tolerance = Tolerance(self._device.type, call.autocast)
        try:
            self._verifier.compare(ways, "a captured module was not verified", tolerance)
        except GraphError as error:
            if again and isinstance(error, ReplayError):
                raise
            raise CallDiffers(call, error.rule, error.observed, error.remedy) from error


class _CallRun:
    """One captured call with its arguments, and the state that it changes."""

    def __init__(
        self, root: nn.Module, device: torch.device, site: GraphedCall, *, again: bool
    ) -> None:
        self._device = device
        self._site = site
        call = site.call
        signature, samples = Signature.of(call.args, call.kwargs)
        self._names = signature.tensor_names
        self._samples = site.graphed.inputs.tensors if again else samples
        self._backward = site.graphed.backward_pass
        tensors = {f"buffer `{call.name}.{n}`": b for n, b in call.module.named_buffers()}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in site.written.items()}
        self._parameters = self._differentiable(root)
        unseen = [*site.baked.environment.loose.small, *call.module.parameters()]
        parameters = {name: parameter for parameter, name in self._parameters.items()}
        self.state = RegionState(tensors, parameters, unseen)
        self.parts = (
            PythonSnapshot(iter_objects(call.module)),
            Generators(iter_objects(root), device),
            RandomState(device, root.modules()),
        )

    def _differentiable(self, root: nn.Module) -> dict[Tensor, str]:
        """The parameters that the call gives a gradient, those outside of the module among them."""
        call, backward = self._site.call, self._backward
        found: dict[Tensor, None] = {p: None for p in call.module.parameters()}
        if backward is not None:
            direct = backward.direct
            found |= dict.fromkeys(backward.parameters.own if direct is None else direct.parameters)
        names: dict[Tensor, str] = {p: f"`{name}`" for name, p in root.named_parameters()}
        trained = (p for p in found if p not in call.frozen)
        return {p: names.get(p, f"parameter {i} of `{call.name}`") for i, p in enumerate(trained)}

    def eager(self) -> list[Result]:
        try:
            return self._run(self._site.graphed.original, direct=False)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise CaptureError(
                "A graphed module must run by itself, so that its graphs can be verified.",
                in_one_line(error),
                "capture a module that has this one inside, if a hook before the forward prepares "
                "something for it; or leave this one eager (exclude=[...])",
            ) from error

    def replayed(self) -> list[Result]:
        backward = self._backward
        direct = backward is not None and backward.direct is not None
        # No other graph waits for its backward pass: any argument may go into lent memory.
        with replaced(self._site.graphed, "borrowed", ()):
            return self._run(self._site.graphed, direct=direct)

    def _run(self, forward: Callable[..., Any], *, direct: bool) -> list[Result]:
        call = self._site.call
        drop_gradients(self._parameters)
        # Copies: what reads or writes them past torch must not reach the samples.
        tensors = StaticInputs(self._samples).tensors
        args, kwargs = substitute((call.args, dict(call.kwargs)), tensors)
        with torch.inference_mode(False), as_observed(call), without_hooks(list(self._parameters)):
            returned = forward(*args, **kwargs)
            outputs = leaves_of(returned, Tensor)
            with torch.autocast(self._device.type, enabled=False):
                self._pull_back(outputs, tensors, direct=direct)
        found = results_in(returned, "output", f" of `{call.name}`")
        for name, tensor in zip(self._names, tensors, strict=True):
            title = f"{name} of `{call.name}`"
            # Kernels outside of torch, and `x.data`, write an argument unseen.
            found.append(Result(f"{title} after the call", tensor.detach()))
            if tensor.is_leaf and tensor.grad is not None:
                found.append(Result(f"the gradient of {title}", tensor.grad, is_gradient=True))
        return found

    def _pull_back(
        self, outputs: Sequence[Tensor], arguments: Sequence[Tensor], *, direct: bool
    ) -> None:
        """Give arguments and parameters their gradients, for random ones of the outputs."""
        outputs = [output for output in outputs if output.requires_grad]
        # Everything that may have a gradient, each tensor once
        wanted = [*dict.fromkeys(t for t in (*arguments, *self._parameters) if t.requires_grad)]
        if self._backward is None or not outputs or not wanted:
            return
        generator = torch.Generator(self._device).manual_seed(0)
        buffers = self._backward.output_gradients.buffers  # in the strides that training gives
        layouts = buffers if len(buffers) == len(outputs) else outputs
        pairs = zip(outputs, layouts, strict=True)
        given = [zero_gradient(output, layout.stride()) for output, layout in pairs]
        for gradient in given:
            std = max(gradient.numel(), 1) ** -0.5
            unrepeated(gradient).normal_(std=std, generator=generator)
        if direct:
            torch.autograd.backward(outputs, given)
            return
        # It runs no accumulation of gradients, to which a reducer's hooks are tied
        with gradients_kept_apart(wanted):
            gradients = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        for tensor, found in zip(wanted, gradients, strict=True):
            tensor.grad = found
