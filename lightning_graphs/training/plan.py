"""A captured step: its graphs, and what a replay does beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_graphs.core.buffers import StaticInputs
from lightning_graphs.core.call_plan import CallPlan
from lightning_graphs.core.graph import CUDAGraph
from lightning_graphs.core.host_half import HostHalf
from lightning_graphs.core.outputs import OutputPlan
from lightning_graphs.core.stores import Stores, set_again
from lightning_graphs.training.conditions import Phase
from lightning_graphs.training.gradients import AttachedGradients
from lightning_graphs.training.live_numbers import NumberOnDevice
from lightning_graphs.training.logs import LogRecorder
from lightning_graphs.training.stored import CapturedStores


@dataclass(slots=True)
class StepPlan:
    """A captured step.

    Attributes:
        call: Checks a batch against the signature and takes its tensors out.
        inputs: The static batch.
        outputs: What ``training_step`` returned.
        logs: Its calls of ``self.log`` and of metrics.
        gradients: What ``.grad`` is after the backward pass, of the optimizer's parameters.
        outside: The same, of parameters that the optimizer does not have.
        phase: Which part of an accumulation window it is.
        forward: Replayed in place of ``training_step``.
        backward: Replayed in place of the backward pass; None if it is part of ``forward``.
        unscale: Replayed ahead of the hooks before the optimizer step; None if nothing is unscaled
            there.
        step: Replayed in place of clipping and optimizer step; None if an earlier one does it.
        steps: Whether the optimizer step is captured at all.
        graphs: All of its graphs, in the order of their capture.
        adds: Whether its gradients are added to those of earlier steps.
        written: What it writes beside parameters and buffers, by name.
        stores: Attributes that each of its graphs sets, by the graph's name in a capture.
        places: What it finds in places where it stores something, and leaves there; or None.
        scaling: What the gradient scaler knows between ``unscale`` and ``step``.
        uses: How often it was replayed.
        unverified: It is yet to be compared with the eager step.
        host: What its code computes on the host; None if that is nothing.
        number: The same on all ranks.
        numbers: Numbers of the trainer that its graphs read, to be refreshed before every replay.
    """

    call: CallPlan
    inputs: StaticInputs
    outputs: OutputPlan
    logs: LogRecorder
    gradients: AttachedGradients
    outside: AttachedGradients
    phase: Phase
    forward: CUDAGraph
    backward: CUDAGraph | None = None
    unscale: CUDAGraph | None = None
    step: CUDAGraph | None = None
    steps: bool = False
    graphs: list[CUDAGraph] = field(default_factory=list)
    adds: bool = False
    written: dict[str, Tensor] = field(default_factory=dict)
    stores: dict[str, Stores] = field(default_factory=dict)
    places: CapturedStores | None = None
    uses: int = 0
    unverified: bool = False
    scaling: dict[str, Any] = field(default_factory=dict)
    host: HostHalf | None = None
    number: int = 0
    numbers: Sequence[NumberOnDevice] = ()

    def run_host(self, batch: Callable[[], Sequence[Tensor | None]]) -> bool:
        """Compute on the host what the coming replay needs; whether it goes the captured way.

        Args:
            batch: Tells what the host has of the batch.
        """
        return self.host is None or self.host.run(batch)

    def fill(self, batch: Sequence[Tensor]) -> None:
        """Copy the tensors of a batch in, and what steps before have stored."""
        self.inputs.copy_in(batch)
        if self.places is not None:
            self.places.take()

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
            self.host.rewind()

    def store(self, graph: str) -> None:
        """Set the attributes that the code in one of its graphs sets."""
        if graph in self.stores:
            set_again(self.stores[graph])

    def hand_out(self, *, copies: bool = True) -> Any:
        """After a replay of ``forward``: set attributes, log, and return what the step returns."""
        self.store("forward")
        if self.places is not None:
            self.places.store()
        self.logs.reissue()
        return self.outputs.hand_out() if copies else self.outputs.give_away()

    def adopt(self) -> None:
        """Bring in the gradients of earlier steps to which this one adds its own."""
        if self.adds:
            self.gradients.adopt()
        self.outside.adopt()

    def attach(self, *, attached: bool = False) -> None:
        """Make ``.grad`` of every parameter what it is after the backward pass.

        Args:
            attached: For those of the optimizer it is so already.
        """
        self.gradients.attach(zeroed=not self.adds, attached=attached)
        self.outside.attach()
