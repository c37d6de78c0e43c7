"""Graphs ahead of the forks of a step: a replay launches them, and looks which way its code goes.

Where that is another way than the captured one, all that they have written is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen
from lightning_graphs.private.generators import RandomState, draws_in_cudnn
from lightning_graphs.private.torch import is_strided, out_of_sight, plain, version_of
from lightning_graphs.values.memory import addresses_of, bytes_of, copy_all
from lightning_graphs.values.snapshot import Snapshot
from lightning_graphs.watch.forks import Fork, Forks
from lightning_graphs.watch.mechanism import Instruction


class CapturedForks:
    """Ends a graph where captured code asks the device which way to go on, and begins another one.

    Fused kernels of optimizers and of scalers count no versions of the tensors that they write; the
    schemas of operators tell.

    Args:
        forks: The ways that captures of the fit go.
        ends: End the graph that is captured, and begin another one; the first tells if it could.
        state: Tensors of the step from before the capture.
        refuse: Is called with each error of an operator, which user code may catch.
    """

    def __init__(
        self,
        forks: Forks,
        ends: Sequence[Callable[[], object]],
        state: Iterable[Tensor],
        refuse: Callable[[RuntimeError], object],
    ) -> None:
        self._forks, self._ends = forks, ends
        self._versions = [(tensor, version_of(tensor)) for tensor in state]
        self._memory: set[int] = set()  # where what operators have written begins
        self._written: list[Tensor] = []  # of the state, by the graphs ahead of forks
        self.seeing = OperatorsSeen(self._see)
        self.seeing.on_error = refuse

    def _see(self, call: OperatorCall, _: object) -> None:
        self._memory.update(addresses_of(call.written))

    def end(self) -> bool:
        """End a graph here; return whether it could."""
        end, *others = self._ends
        if not end():
            return False
        self._written = self._written_so_far()
        for other in others:
            other()
        return True

    def _written_so_far(self) -> list[Tensor]:
        with out_of_sight():  # each fork asks, while modes of the capture see functions of torch
            return [
                tensor
                for tensor, before in self._versions
                if version_of(tensor) != before
                or not self._memory.isdisjoint(addresses_of([tensor]))
            ]

    def replayed(self, graphs: Sequence[CUDAGraph], module: Any) -> Forked:
        """Return what replays do with the graphs that have ended at the forks of a module."""
        draws = any(graph.dropout for graph in graphs)
        modules = [*filter(draws_in_cudnn, module.modules())] if draws else []
        parts = self._written, module.device, modules
        return Forked(graphs, self._forks.taken, *parts, partial(self._forks.went, now=False))


class Forked:
    """The graphs ahead of the forks of a plan.

    Args:
        graphs: In their order; each ends where code asks which way to go on.
        forks: What it asks there, and the answer of the capture.
        written: Tensors from before the capture that these graphs write.
        device: Where they run.
        modules: Recurrent layers among them draw from cuDNN's random state in these graphs.
        went: Hears the answers of a step that goes another way.
    """

    def __init__(
        self,
        graphs: Sequence[CUDAGraph],
        forks: Sequence[Fork],
        written: Sequence[Tensor],
        device: torch.device,
        modules: Sequence[nn.Module],
        went: Callable[[list[bool]], object],
    ) -> None:
        self.graphs = [*graphs]
        self.lines = [*dict.fromkeys(fork.site.describe() for fork in forks)]  # that ask
        self.missed: list[bool] = []  # the answers of the last step that went another way
        self._parts = [(g.launch, f.truth, f.goes) for g, f in zip(graphs, forks, strict=True)]
        self._device, self._modules, self._went = device, modules, went
        self._before: Sequence[Instruction] = ()
        self._cancels: Sequence[Instruction] = ()
        self._random: RandomState | None = None  # as it was; None: they were not launched
        self._written: dict[int, Tensor] = {}
        self._own: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # with room for copies
        self.undoes(written)

    def begin(self, before: Sequence[Instruction], cancels: Sequence[Instruction]) -> None:
        """Take over what the plan does ahead of its graphs, and what undoes its preparations."""
        self._before, self._cancels = before, cancels

    def undoes(self, written: Sequence[Tensor]) -> None:
        """Let these tensors, too, be put back where a step goes another way."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor in written:
                if id(tensor) not in self._written:
                    self._written[id(tensor)] = tensor
                    kind = tensor.device, tensor.dtype
                    own, copies = self._own.setdefault(kind, ([], []))
                    own.append(tensor.data)  # with a version counter of its own
                    copies.append(torch.empty_like(tensor))

    def learn(self, before: Snapshot, state: Iterable[Tensor]) -> None:
        """Find which tensors of a snapshot the graphs have written, and undo them from now on."""
        pairs = ((t, before.saved(t)) for t in plain(state) if is_strided(t))
        self.undoes([t for t, saved in pairs if not torch.equal(_bits_of(t), _bits_of(saved))])

    @torch.no_grad()
    def take(self, _: object = None) -> bool:
        """Launch the graphs, as far as the step goes their way; else undo them."""
        self.undo()
        for instruction in self._before:
            instruction()
        self._random = RandomState(self._device, self._modules)
        for own, copies in self._own.values():
            copy_all(copies, own)
        answers = []
        for launch, truth, goes in self._parts:
            launch()
            answers.append(bool(truth.item()))
            if answers[-1] is not goes:
                self.missed = answers
                self._went(answers)
                self.undo()
                for instruction in self._cancels:
                    instruction()
                return False
        return True

    @torch.no_grad()
    def undo(self) -> None:
        """Undo what the graphs have done, unless the rest of the step was replayed."""
        if self._random is not None:
            for own, copies in self._own.values():
                copy_all(own, copies)
            self._random.restore()
            self._random = None

    def end(self) -> None:
        """Note that the rest of the step is replayed."""
        self._random = None


def _bits_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as bytes, on the host."""
    return bytes_of(tensor.detach().cpu().clone().untyped_storage())
