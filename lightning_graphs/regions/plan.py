"""Captured steps: their graphs, what replays do beside them, and whether one is for a batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_graphs.autograd.graphed import Stores, set_again
from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.lightning.logs import LogRecorder
from lightning_graphs.private.cudnn import CapturedDropout
from lightning_graphs.regions.conditions import CaptureKey, conditions_of
from lightning_graphs.regions.gradients import BatchGradients, GradientBuffers
from lightning_graphs.regions.optimizer import CapturableOptimizer
from lightning_graphs.values.memory import OutputPlan, Owing, StaticInputs, clone_all
from lightning_graphs.values.signature import CallPlan, Signature
from lightning_graphs.watch.batch import BatchChanges
from lightning_graphs.watch.containers import Readings
from lightning_graphs.watch.host import HostProgram
from lightning_graphs.watch.numbers import NumberOnDevice
from lightning_graphs.watch.side_effects import SideEffects


@dataclass(slots=True)
class StepPlan:
    """A captured step."""

    inputs: StaticInputs  # the static batch
    outputs: OutputPlan  # what ``training_step`` returned
    logs: LogRecorder  # its calls of ``self.log`` and of metrics
    # What ``.grad`` is after the backward pass, of the optimizer's parameters
    gradients: GradientBuffers
    outside: GradientBuffers  # the same, of parameters that the optimizer does not have
    # In the order of their capture. "forward" is replayed in place of ``training_step``; where they
    # are no part of another one, "backward" in place of the backward pass, "unscale" ahead of the
    # hooks before the optimizer step, "step" in place of clipping and optimizer step
    graphs: dict[str, CUDAGraph]
    # What the host has of the tensors of a batch
    copies: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
    # Checks a batch against the signature and takes its tensors out
    call: CallPlan = field(init=False)
    conditions: CaptureKey = field(init=False)  # what it was captured under
    steps: bool = False  # whether the optimizer step is captured at all
    adds: bool = False  # whether its gradients are added to those of earlier steps
    # What it writes beside parameters and buffers, by name
    written: dict[str, Tensor] = field(default_factory=dict)
    writes_batch: Sequence[int] = ()  # the tensors of its batch that it changes in place
    asked: BatchGradients | None = None  # which gradients of its batch it asks for
    batch: Sequence[Tensor] = ()  # of the coming replay, where it does any of this
    # Tensors of the present replay, and what is their gradient after its backward pass
    owing: Owing = field(default_factory=list)
    changes: BatchChanges | None = None  # what it does to the containers of its batch
    loaded: Any = None  # the batch of the coming replay, where it does something
    # Attributes that each of its graphs sets, by the graph's name in a capture
    stores: dict[str, Stores] = field(default_factory=dict)
    # What it finds in places where it stores something, and leaves there; or None
    places: SideEffects | None = None
    uses: int = 0  # how often it was replayed
    unverified: bool = False  # it is yet to be compared with the eager step
    # What the gradient scaler knows between ``unscale`` and ``step``
    scaling: dict[str, Any] = field(default_factory=dict)
    host: HostProgram | None = None  # what its code computes on the host; None if that is nothing
    dropout: CapturedDropout | None = None  # cuDNN's random state, if its recurrent layers draw
    clocks: Readings | None = None  # what its code reads of clocks; None if that is nothing
    number: int = 0  # the same on all ranks
    # What its graphs read of the optimizer and the trainer, to be refreshed before every replay
    numbers: Sequence[CapturableOptimizer | NumberOnDevice] = ()

    def fits(self, batch: Any, conditions: CaptureKey) -> bool:
        """Whether batch and fit are what it was captured from; if so it is ready for a replay."""
        if not self.conditions.holds(conditions):
            return False
        if self.dropout is not None and not self.dropout.is_current():
            return False
        tensors = self.call.match((batch,), {})
        return tensors is not None and self.fill(tensors)

    def fill(self, batch: Sequence[Tensor]) -> bool:
        """Copy a batch and what steps before have stored in; compute on the host what it needs.

        False: the code would go another way than the graphs.
        """
        if self.asked and not self.asked.take(batch):
            return False
        if self.places is not None and not self.places.take():
            return False
        if self.host is not None and not self.host.run(partial(self.copies, batch)):
            return False
        self.inputs.copy_in(batch)
        if self.writes_batch or self.asked:
            self.batch = batch
        return True

    @property
    def told(self) -> tuple[Hashable, ...]:
        """What it depends on beside batch and conditions."""
        places = () if self.places is None else (self.places.signature,)
        return (*places, *(() if self.host is None else (self.host.read,)))

    @property
    def loose(self) -> dict[str, Tensor]:
        """What it writes beside parameters and buffers now, by name."""
        return self.written if self.places is None else {**self.written, **self.places.written}

    def rewind_host(self) -> None:
        """Let the generators of the host be where they were before: there is no replay."""
        if self.host is not None:
            self.host.restore()

    def store(self, graph: str) -> None:
        """Set the attributes that the code in one of its graphs sets."""
        if graph in self.stores:
            set_again(self.stores[graph])

    def hand_out(self, *, copies: bool = True) -> Any:
        """After a replay of ``forward``: set attributes, log, and return what the step returns."""
        self.store("forward")
        if self.clocks is not None:
            self.clocks.end()
        self.logs.reissue()
        self.owing.clear()
        if self.places is not None:
            self.places.store(self.owing)
        if self.changes is not None:
            self.changes.apply(self.loaded, copies=copies)
            self.loaded = None
        if self.batch:
            self._write_batch()
        return self.outputs.copies(self.owing) if copies else self.outputs.give_away(self.owing)

    @torch.no_grad()
    def _write_batch(self) -> None:
        batch, self.batch = self.batch, ()
        for i in self.writes_batch:
            batch[i].copy_(self.inputs.tensors[i])
        if self.asked:
            self.asked.hand_out(batch, self.owing)

    def adopt(self) -> None:
        """Bring in the gradients of earlier steps to which this one adds its own."""
        if self.adds:
            self.gradients.load()
        self.outside.load()

    def attach(self, *, bound: bool = False) -> None:
        """Make ``.grad`` of everything what it is after the backward pass."""
        self.gradients.bind(zeroed=not self.adds, bound=bound)
        self.outside.bind()
        if self.owing:
            self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        """Let tensors that were handed out have their gradients."""
        copies = clone_all([gradient for _, gradient in self.owing])
        for (tensor, _), gradient in zip(self.owing, copies, strict=True):
            if tensor.grad is None:
                tensor.grad = gradient
            else:
                tensor.grad.copy_(gradient)
        self.owing.clear()


def without_values(signature: Signature) -> Hashable:
    """What of a signature comes back where the values that a step reads move on."""
    conditions = conditions_of(signature)
    return replace(signature, extra=(conditions.phase, conditions.gradients))
