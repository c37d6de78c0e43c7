"""Runs a region both ways from one state, and compares the results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, UntypedStorage

from lightning_graphs.device.emulated import WriteWatch
from lightning_graphs.device.graph import without_garbage_collection
from lightning_graphs.errors import GraphError, VerificationError, first_line, is_out_of_memory
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.private.callsite import is_raised_by_user
from lightning_graphs.private.torch import storage_reference
from lightning_graphs.regions.agreement import Ranks
from lightning_graphs.report.messages import Messages
from lightning_graphs.values.memory import bytes_of, storage_address
from lightning_graphs.values.snapshot import (
    Fingerprint,
    Part,
    RegionState,
    Result,
    Snapshot,
    fingerprints_of,
)

# ------------------ Tolerances

_OF_NOISE = 4.0
"""How many times the difference of two eager runs a replay may differ. Both are draws from one
distribution, and norms of many elements hardly scatter: a replay beyond it is no such draw."""

_NOISE_IN_ROUNDINGS = 8.0
"""Up to how many roundings the difference of two eager runs counts. Kernels whose order is not
fixed round otherwise in each run; what differs by more was computed from something else."""

_OF_GRADIENTS = 2.0**-4
"""How large the terms of one gradient may be that cancel, relative to all gradients together."""

_OF_UPDATE = 0.5
"""Which part of an update may differ if the gradient before it already differed by rounding.
A step that was left out, or taken twice, is off by a whole one."""

_MOSTLY_ROUNDING = 2.0**-4
"""From which relative difference on a gradient is called rounding and nothing else."""

_ROUNDING = {
    torch.float64: 2.0**-40,
    torch.float32: 2.0**-17,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
"""Relative rounding of a sum of products: 64 units in the last place of float32, since sums over
many terms may be ordered otherwise, and one unit of the short formats, whose products kernels add
up in float32."""

_TF32 = 2.0**-10
"""Relative rounding of float32 on a GPU, whose kernels may round factors to TF32's 10 bits."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are apart."""

    # The Euclidean norm of the difference; infinite if one of them alone is not finite
    norm: float
    largest: float  # the largest difference of two elements


NONE = Difference(0.0, 0.0)


def difference(a: Tensor, b: Tensor) -> Difference:
    """Measure how far two tensors are apart; equal elements, NaN included, are not."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(math.inf, math.inf)
    if a.numel() == 0:
        return NONE
    left, right = _wide(a), _wide(b)
    same = (left == right) | (left.isnan() & right.isnan())
    apart = torch.where(same, 0.0, left - right).abs().nan_to_num_(nan=math.inf)
    return Difference(float(torch.linalg.vector_norm(apart)), float(apart.max()))


def size(tensor: Tensor) -> float:
    """Return the Euclidean norm of the finite elements."""
    if tensor.numel() == 0:
        return 0.0
    return float(torch.linalg.vector_norm(_wide(tensor).nan_to_num(0.0, 0.0, 0.0)))


def _wide(tensor: Tensor) -> Tensor:
    """Convert to values in which differences neither overflow nor vanish."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    if dense.dtype in (torch.float16, torch.bfloat16):
        return dense.float()
    return dense if dense.dtype is torch.float32 else dense.double()


class Tolerance:
    """The rule by which a replay is accepted whose bits are not those of the eager step.

    It is asked only if bits differ. A correct replay has other bits for one of two reasons. Kernels
    that add up with atomics round differently in every run, eager or not: two eager runs show by
    how much. And a library may choose another algorithm while it is captured, which rounds
    differently, each time in one way.

    So a replay may differ by one rounding, plus four times what two eager runs differ. A rounding
    is that of the coarsest arithmetic in the step, relative to the tensor. A gradient may also
    differ by a sixteenth of a rounding relative to all gradients together: one that vanishes in
    exact arithmetic (of a bias before a normalization) is the rounding of terms that cancel. Eager
    runs that differ by more than eight roundings depend on something that is no part of the state,
    and that a replay froze: beyond that their difference does not count. Differences are Euclidean
    norms over a tensor: a largest element scatters from run to run, a norm hardly does.

    What an optimizer computes from a gradient that was not bit-equal may differ by half of the
    update: Adam divides by the gradient's own size, and rounding may turn around the update of an
    element that is nearly zero. After a gradient that is only rounding, it is not judged.
    """

    def __init__(self, device_type: str, arithmetic: torch.dtype | None) -> None:
        self._device_type = device_type
        self._least = _ROUNDING[arithmetic] if arithmetic is not None else 0.0

    def allowed(self, eager: Tensor, noise: float, gradients: float = 0.0) -> float:
        """Return the norm by which a replay may differ."""
        rounding = self._rounding(eager.dtype) * (size(eager) + _OF_GRADIENTS * gradients)
        return _OF_NOISE * min(noise, _NOISE_IN_ROUNDINGS * rounding) + rounding

    def allowed_of_update(self, eager: Tensor, noise: float, update: float) -> float:
        """Return the norm by which a result may differ whose gradient was not bit-equal."""
        return _OF_NOISE * noise + self._rounding(eager.dtype) * size(eager) + _OF_UPDATE * update

    def is_rounding(self, gradient: Tensor, apart: Difference) -> bool:
        """Whether a gradient is only rounding: an accepted replay has an unrelated one."""
        return apart.norm > _MOSTLY_ROUNDING * size(gradient)

    def _rounding(self, dtype: torch.dtype) -> float:
        if dtype.is_complex:
            dtype = dtype.to_real()
        if not dtype.is_floating_point:
            return 0.0
        own = _ROUNDING.get(dtype, 0.0)
        if dtype is torch.float32 and self._device_type == "cuda":
            own = _TF32
        return max(own, self._least)


# ------------------ Comparisons

_Result = TypeVar("_Result")
_RULE = "A replay must compute what the eager step computes, to the bit or within its rounding."
_REMEDY = (
    "look for Python values that the step reads and that change out of sight (an environment "
    "variable, the state of a library, a file), and make them tensors or attributes"
)


class WrittenMemory:
    """Memory that runs of one region write, and that no walk from its module finds.

    An optimizer that a hook steps holds such memory, and so does a C extension. The dispatcher
    shows it in a run whose values are neither compared nor kept; kernels outside of torch are not
    shown.
    """

    def __init__(self) -> None:
        self._found: list[Callable[[], UntypedStorage | None]] | None = None

    @property
    def is_found(self) -> bool:
        """Whether a run has shown it."""
        return self._found is not None

    def add_to(
        self,
        snapshot: Snapshot,
        run: Callable[[], object],
        spare: Iterable[Tensor] = (),  # whose values nothing needs
        # Runs something on all ranks
        together: Callable[[Callable[[], object]], object] = lambda run: run(),
    ) -> None:
        """Add that memory to a snapshot; the first time a run, which is undone, finds it.

        Raises:
            Exception: See :meth:`shown_by`.
        """
        if self._found is not None:
            storages = [storage for find in self._found if (storage := find()) is not None]
            snapshot.add(Snapshot(map(bytes_of, storages)))
            return
        try:
            together(lambda: self.shown_by(run, snapshot, spare))
        finally:
            snapshot.restore()

    def shown_by(
        self, run: Callable[[], _Result], snapshot: Snapshot, spare: Iterable[Tensor] = ()
    ) -> _Result | None:
        """Return what a run gives that finds that memory, and adds it to a snapshot.

        None: the watching itself has caused an error, which does not come again.

        Raises:
            Exception: The run raised it in user code, is refused, or found no memory.
        """
        watch = WriteWatch({*snapshot.addresses, *map(storage_address, spare)})
        snapshot.add(watch)
        result = None
        try:
            with watch:
                result = run()
        except Exception as error:
            is_known = isinstance(error, GraphError) or is_out_of_memory(error)
            if is_known or is_raised_by_user(error):
                raise
        self._found = list(map(storage_reference, watch.found()))
        return result


@dataclass(frozen=True, slots=True)
class Comparison:
    """A region that can run eagerly, and replay, from one state.

    Both ways return what they computed besides their state, without copies, under equal names.
    """

    state: RegionState  # what both may change
    eager: Callable[[], list[Result] | None]
    replayed: Callable[[], list[Result] | None]
    parts: Sequence[Part] = ()  # what else is put back, as it is now
    written: WrittenMemory | None = None  # what both write outside of that state
    spare: Sequence[Tensor] = ()  # memory that is overwritten before it is read again
    beside: int = 0  # bytes that the eager run takes next to copies of the state
    goes_on: bool = False  # a replay that is equal is the step: what it has made stays
    # Surrounds the first eager run, and that it is undone
    alone: Callable[[], AbstractContextManager[object]] = nullcontext


class Verifier:
    """Decides which steps are verified, and compares a region of one with its replay.

    An eager run leaves a fingerprint of every result; the first one is watched, and shows what
    memory is written. Where the bits of a replay from that state differ from those of a watched
    run, an unwatched one follows. Where they still differ, the region runs eagerly twice more and
    replays once more, now with copies of what differs, and the :class:`Tolerance` is asked.

    A replay comes last. If it is equal it may be the step itself, which goes on from what that has
    made; else everything is as before. Hooks do not run, logs and metrics are not updated. What the
    region does to the world outside of module, optimizer and generators (a file that it writes) it
    does once more for each run.
    """

    def __init__(
        self,
        verify: bool | int,  # never, once for each capture, or again every so many steps
        tolerance: Tolerance,
        budget: MemoryBudget,
        ranks: Ranks,
        messages: Messages,  # count comparisons, and report those that found no memory
        step: Callable[[], int],  # how many optimizer steps were taken
    ) -> None:
        self.budget, self.ranks = budget, ranks
        self.is_on = verify is not False
        self.every = 0 if isinstance(verify, bool) else verify
        # What code writes outside of its state, by what it depends on except for shapes
        self.written: defaultdict[Hashable, WrittenMemory] = defaultdict(WrittenMemory)
        self.step = step
        self._tolerance = tolerance
        self._messages = messages

    @property
    def is_due(self) -> bool:
        """Whether graphs that were verified before are verified again in this step."""
        return self.every > 0 and self.step() % self.every == 0

    @without_garbage_collection()
    def compare(self, ways: Comparison, what: str, tolerance: Tolerance | None = None) -> bool:
        """Compare both ways, or say that there was no memory for it.

        True: the last replay is the step, and what it has made is there. Else all is as before.

        Raises:
            VerificationError: The replay computes something else.
        """
        self._messages.compared()
        is_step = False
        try:
            state = self.ranks.all_or_none(partial(self._take, ways))
            try:
                written = ways.written
                if self.ranks.whole_steps_only:  # FSDP2 frees and fills all parameters
                    written = None
                elif written is not None and (written.is_found or self.ranks.wrappers):
                    shown = partial(self._run_unreduced, ways.eager)
                    run = partial(self.ranks.all_or_none, exchanges=True)
                    written.add_to(state, shown, ways.spare, run)
                    written = None
                self._require(ways, state, tolerance or self._tolerance, written)
                is_step = ways.goes_on
            finally:
                if not is_step:
                    state.restore()
                del state  # an error's traceback holds this frame
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._messages.unverified(what, first_line(error))
        finally:
            torch.cuda.empty_cache()  # of the eager run and the copy of the state
        return is_step

    def _run_unreduced(self, way: Callable[[], object]) -> None:
        """Run it without a reduction over ranks, which would write all of DDP's buckets."""
        with ExitStack() as reduced:
            for ddp in self.ranks.wrappers:
                reduced.enter_context(ddp.no_sync())
            way()

    def _take(self, ways: Comparison) -> Snapshot:
        return ways.state.take(lambda n: self.budget.room_for(n, ways.beside), *ways.parts)

    def _run(self, ways: Comparison, way: Callable[[], list[Result] | None]) -> list[Result]:
        """Run it one way on all ranks; return what it computed, and its state after it."""
        return self.ranks.all_or_none(lambda: (way() or []) + ways.state.results(), exchanges=True)

    def _require(
        self,
        ways: Comparison,
        state: Snapshot,
        tolerance: Tolerance,
        written: WrittenMemory | None,  # is to be found by the first run
    ) -> None:
        way = ways.eager
        if written is not None:
            way = partial(written.shown_by, lambda: ways.eager() or [], state, ways.spare)
        with ways.alone():
            expected = self._bits(ways, way)
            state.restore()
        found = self._bits(ways, ways.replayed)
        if written is not None and expected != found:  # maybe because the first run was watched
            state.restore()
            expected = self._bits(ways, ways.eager)
            state.restore()
            found = self._bits(ways, ways.replayed)
        (names, known), (replayed, now) = expected, found
        self.ranks.all_or_none(partial(self._require_names, names, replayed))
        differing = {n for n, a, b in zip(names, known, now, strict=True) if a != b}
        if self.ranks.any(bool(differing)):
            state.restore()
            self._require_values(ways, state, differing, tolerance)

    def _bits(
        self, ways: Comparison, way: Callable[[], list[Result] | None]
    ) -> tuple[list[str], list[Fingerprint]]:
        """Run it one way; return the names and fingerprints of its results."""
        results = self._run(ways, way)
        values = [result.value for result in results]
        return [result.name for result in results], fingerprints_of(values, together=True)

    def _require_values(
        self,
        ways: Comparison,
        state: Snapshot,
        differing: set[str],  # and what shares a fingerprint with these
        rule: Tolerance,
    ) -> None:
        again = self._run(ways, ways.eager)
        known = {r.name: r.value.detach().clone() for r in again if r.name in differing}
        updates = {
            r.name: difference(r.value, state.saved(r.value).to(r.value.device)).norm
            for r in again
            if r.name in known and r.gradient
        }
        gradients = math.hypot(*(size(r.value) for r in again if r.is_gradient))
        del again
        state.restore()
        third = self._run(ways, ways.eager)
        noise = {r.name: difference(r.value, known[r.name]) for r in third if r.name in known}
        del third
        state.restore()
        results = self._run(ways, ways.replayed)

        def judge() -> None:
            changed, unjudged = set(), set()
            for result in results:
                eager = known.get(result.name)
                if eager is None or result.gradient in unjudged:
                    continue
                apart = difference(result.value, eager)
                runs = noise.get(result.name, NONE)
                if result.gradient in changed:
                    allowed = rule.allowed_of_update(eager, runs.norm, updates[result.name])
                else:
                    of_all = gradients if result.is_gradient else 0.0
                    allowed = rule.allowed(eager, runs.norm, of_all)
                if apart.norm != 0.0:
                    changed.add(result.name)
                if not apart.norm <= allowed:
                    raise self._error(
                        f"{result.name} differs by up to {apart.largest:.3g}; two eager runs "
                        f"differ by up to {runs.largest:.3g}"
                    )
                if result.is_gradient and rule.is_rounding(eager, apart):
                    unjudged.add(result.name)

        self.ranks.all_or_none(judge)

    def _require_names(self, eager: Sequence[str], replayed: Sequence[str]) -> None:
        both = {*eager} & {*replayed}
        for way, names in (("the eager step", eager), ("the replay", replayed)):
            for name in [name for name in names if name not in both]:
                raise self._error(f"only {way} has {name}")

    def _error(self, observed: str) -> VerificationError:
        return VerificationError(_RULE, f"at step {self.step()}, {observed}", _REMEDY)
