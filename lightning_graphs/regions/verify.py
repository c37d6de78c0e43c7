"""Runs a region both ways from one state, and compares the results."""

from __future__ import annotations

import gc
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter, sleep
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer

from lightning_graphs.autograd.graphed import set_again
from lightning_graphs.device.emulated import WriteWatch
from lightning_graphs.device.graph import without_garbage_collection
from lightning_graphs.errors import GraphError, VerificationError, first_line, is_out_of_memory
from lightning_graphs.policy.worth import MemoryBudget, MemoryKept
from lightning_graphs.private.callsite import is_raised_by_user
from lightning_graphs.private.generators import Generators, RandomState
from lightning_graphs.private.torch import (
    hide_modes,
    hooks_registered,
    modules_in,
    storage_reference,
)
from lightning_graphs.regions.behind import HeadMissed, StepHead, UndoneHead, WayMissed
from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.conditions import CaptureKey
from lightning_graphs.regions.context import StepRecorder
from lightning_graphs.regions.gradients import drop_gradients
from lightning_graphs.regions.lifecycle import Ranks
from lightning_graphs.regions.plan import StepOutputs, StepPlan, UpdateBehind
from lightning_graphs.regions.tolerance import NONE, Difference, Tolerance, differences, sizes
from lightning_graphs.report.messages import Messages
from lightning_graphs.values.memory import StaticInputs, bytes_of, storage_address
from lightning_graphs.values.snapshot import (
    Fingerprint,
    PythonSnapshot,
    RegionState,
    Result,
    Snapshot,
    SnapshotPart,
    fingerprints_of,
)
from lightning_graphs.values.tree import parameters_of, substitute
from lightning_graphs.watch.head import HeadEnded
from lightning_graphs.watch.places import StepState
from lightning_graphs.watch.user_code import UnregisteredTensors, iter_objects

# ------------------ Comparisons

_Result = TypeVar("_Result")
_RULE = "A replay must compute what the eager step computes, to the bit or within its rounding."
_REMEDY = (
    "look for Python values that the step reads and that change out of sight (the state of a "
    "library, a file), and make them tensors or attributes"
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

    def forget(self) -> None:
        """Let the next run show it again."""
        self._found = None

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
    parts: Sequence[SnapshotPart] = ()  # what else is put back, as it is now
    written: WrittenMemory | None = None  # what both write outside of that state
    spare: Sequence[Tensor] = ()  # memory that is overwritten before it is read again
    beside: int = 0  # bytes that the eager run takes next to copies of the state
    goes_on: bool = False  # a replay that is equal is the step: what it has made stays
    # Surrounds the first eager runs, and that they are undone
    alone: Callable[[], AbstractContextManager[object]] = nullcontext


_OF_NCCL = 1.0
"""Seconds in which torch's thread for NCCL lets go of what was reduced; it looks ten times."""


@contextmanager
def nothing_kept(budget: MemoryBudget, ranks: Ranks) -> Iterator[None]:
    """Raise :class:`MemoryKept` on all ranks if a tensor of the body lives on in a graph's pool."""
    before = budget.allocated
    yield
    if not budget.shares:
        return
    for generation in (1, 2):  # what refers to itself: to look at all takes long
        if budget.allocated > before:
            gc.collect(generation)
    until = 0.0 if ranks.are_one else perf_counter() + _OF_NCCL
    while budget.allocated > before and perf_counter() < until:
        sleep(0.01)
    if ranks.any(budget.allocated > before):
        budget.shares = False
        raise MemoryKept


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
                    if self.ranks.any(not written.is_found):  # as on a rank with another key
                        written.forget()
                    shown = partial(self._run_unreduced, ways.eager)
                    run = partial(self.ranks.all_or_none, exchanges=True)
                    with nullcontext() if written.is_found else ways.alone():
                        written.add_to(state, shown, ways.spare, run)
                    written = None
                self._require(ways, state, tolerance or self._tolerance, written)
                is_step = not self.ranks.any(not ways.goes_on)
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
        moved = [r for r in again if r.name in known and r.gradient]
        pairs = [(r.value, state.saved(r.value).to(r.value.device)) for r in moved]
        apart = differences(pairs)
        updates = {r.name: each.norm for r, each in zip(moved, apart, strict=True)}
        gradients = math.hypot(*sizes([r.value for r in again if r.is_gradient]))
        size = dict(zip(known, sizes([*known.values()]), strict=True))
        del again, moved, pairs
        state.restore()
        noise = _apart_from(known, self._run(ways, ways.eager))
        state.restore()
        results = self._run(ways, ways.replayed)

        def judge() -> None:
            changed, unjudged = set(), set()
            found = _apart_from(known, results)
            for result in results:
                if result.name not in known or result.gradient in unjudged:
                    continue
                name, dtype = result.name, known[result.name].dtype
                apart, runs = found[name], noise.get(name, NONE)
                if result.gradient in changed:
                    allowed = rule.allowed_of_update(dtype, size[name], runs.norm, updates[name])
                else:
                    of_all = gradients if result.is_gradient else 0.0
                    allowed = rule.allowed(dtype, size[name], runs.norm, of_all)
                if apart.norm != 0.0:
                    changed.add(name)
                if not apart.norm <= allowed:
                    raise self._error(
                        f"{name} differs by up to {apart.largest:.3g}; two eager runs "
                        f"differ by up to {runs.largest:.3g}"
                    )
                if result.is_gradient and rule.is_rounding(size[name], apart):
                    unjudged.add(name)

        self.ranks.all_or_none(judge)

    def _require_names(self, eager: Sequence[str], replayed: Sequence[str]) -> None:
        both = {*eager} & {*replayed}
        for way, names in (("the eager step", eager), ("the replay", replayed)):
            for name in [name for name in names if name not in both]:
                raise self._error(f"only {way} has {name}")

    def _error(self, observed: str) -> VerificationError:
        return VerificationError(_RULE, f"at step {self.step()}, {observed}", _REMEDY)


def _apart_from(known: Mapping[str, Tensor], results: Iterable[Result]) -> dict[str, Difference]:
    """By name, how far results are apart from those that are known."""
    both = {r.name: (r.value, known[r.name]) for r in results if r.name in known}
    return dict(zip(both, differences([*both.values()]), strict=True))


# ------------------ Steps, and optimizer steps


class Verification(StepBody):
    """Compares captured steps, and captured optimizer steps, with what Lightning runs."""

    def __init__(
        self,
        verifier: Verifier,
        body: StepBody,
        places: StepState | None = None,
        head: StepHead | None = None,  # of steps that have one
    ) -> None:
        super().__init__(body.context, body.optimizers, body.observers)
        self._places, self._head = places, head
        # Whether a step that has come to the end of its head is one for these conditions
        self.fits: Callable[[CaptureKey], bool] = lambda _: True
        # Runs the step's code that is compared
        self._run_code: Callable[[Callable[[], Any]], Any] = lambda code: code()
        # Whether replays get what has a name in its result behind their graphs
        self._comes_late: Callable[[str], bool] = lambda _: False
        self._verifier = verifier
        self._held: list[tuple[str, Any]] = []  # what modules hold, during a comparison
        self._leaves: dict[int, Tensor] = {}  # by ``id``, those whose gradients are put back
        self._registers_hooks = False  # the step's own code, when it ran last
        # Surrounds the backward pass
        self._taking_over: Callable[[], AbstractContextManager[None]] = nullcontext
        # Optimizer steps that replays take behind their graphs, and what they find there
        self._behind: Iterator[UpdateBehind] = iter(())
        self._shown: list[Result] = []

    def _look(self, plan: StepPlan | None = None) -> list[Tensor]:
        """Look at what modules hold, to compare; return tensors that may change unseen."""
        known = None if plan is None or plan.head is not None else plan.surroundings
        if known is None or self._places is None:
            self._held = [*iter_objects(self.module)]
            return UnregisteredTensors(self.module, self._held).small
        held, before, small = known
        self._held = [*held]
        if not self._verifier.ranks.wrappers:  # runs without a reduction set attributes of DDP
            self._places.known = before
        return [tensor for find in small if (tensor := find()) is not None]

    def _state(self, plan: StepPlan | None = None) -> RegionState:
        """Describe what a step may change; without a plan an optimizer step."""
        unseen = self._look(plan)
        parts = self.module, [*self.optimizers], self._scaler
        if plan is None:
            return RegionState.of_step(*parts, unseen=unseen)
        written, others = plan.loose, plan.outside.parameters
        followed = [one.counters for one in self.in_graphs]
        counted = {place for counters in followed if counters for place in counters.places}
        return RegionState.of_step(
            *parts, written=written, unseen=unseen, others=others, renewed=plan.dropped,
            counted=counted,
        )  # fmt: skip

    @property
    def _rates(self) -> list[Tensor]:
        """The learning rates on the device, which each way fills as it finds those of the user."""
        return [rate for one in self.in_graphs for rate in one.rates]

    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """Run with rates on the device: kernels round those of the host in another way."""
        with self.rates_given(self.optimizer):
            super().update(cut)

    def check(self, plan: StepPlan, args: tuple[Any, ...]) -> None:
        """Verify a plan with the batch that is about to be trained on.

        The replay is the step, and the plan is launched then, unless more of the step runs around
        its graph: a head, hooks between several graphs, clocks that it reads. All is undone then; a
        head runs once for each way, with equal draws.

        Raises:
            HeadMissed: It has ended with something else than what the plan is for.
            MemoryKept: User code keeps what the eager run has computed.
        """
        batch: Sequence[Tensor] = ()
        if plan.head is None:
            matched = plan.call.match((args[0],), {})
            assert matched is not None, "the plan was found for this batch"
            batch = matched
            plan.cancel()
        stored = PythonSnapshot()
        for owner, name, _ in chain.from_iterable(plan.stores.values()):
            stored.add_place(name, owner, name)
        parts: list[SnapshotPart] = [m.state for m in plan.mechanisms if m.state is not None]
        parts.append(stored)
        is_whole = plan.head is None and len(plan.captured) == 1
        state = self._state(plan)
        self._leaves = {id(leaf): leaf for leaf in state.parameters.values()}
        ways = Comparison(
            state,
            partial(self._eager, plan, args, batch),
            partial(self._replayed, plan, args, batch),
            [*parts, self._random()],
            self._verifier.written[plan.conditions],
            [*self._rates, *([] if self.client.optimizes_itself else plan.gradients.buffers)],
            plan.gradients.pool_bytes,  # they lie where the eager step would compute
            goes_on=is_whole and all(m.repeated is None for m in plan.mechanisms),
            alone=partial(nothing_kept, self._verifier.budget, self._verifier.ranks),
        )
        try:
            plan.is_launched = self._verifier.compare(ways, "a captured step was not verified")
        finally:
            self._held.clear()
            if self._places is not None:
                self._places.known = self._places.last = None
            self._taking_over = nullcontext  # the graph's memory may be released
            self._leaves.clear()
        if plan.head is None and not plan.is_launched and not plan.take(batch):
            raise WayMissed

    def _random(self) -> RandomState:
        return RandomState(self.module.device, modules_in(self.module))

    def _eager(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor]
    ) -> list[Result]:
        """Run the step eagerly; return what it computed besides its state."""
        if not (plan.adds or self.client.optimizes_itself):
            self._drop_gradients()
        for stores in plan.stores.values():  # another step may have set them otherwise
            set_again(stores)
        recorder, self._comes_late = self.client.mute(), plan.outputs.comes_late
        self._behind, self._shown = iter(plan.behind), []
        memory = self._verifier.budget.memory_of(plan.graphs["forward"])
        # The graph's own buffers, and not given away: user code may keep them
        is_one = self._verifier.ranks.are_one
        self._taking_over = plan.gradients.taking_over if is_one else nullcontext
        results: Callable[[], list[Result]] = list
        with ExitStack() as around:

            def begin(batch: Any, tensors: Sequence[Tensor]) -> None:
                nonlocal results
                if plan.head is not None:
                    undone.quiet.close()
                    around.enter_context(recorder.recording())
                for mechanism in plan.mechanisms:
                    if mechanism.repeated is not None:
                        around.enter_context(mechanism.repeated())
                results = plan.effects.eager_results(batch, tensors)

            if plan.head is None:
                own = StaticInputs(batch).tensors  # it may change its batch in place
                arguments = (substitute(args[0], own), *args[1:])
                around.enter_context(self._as_captured(plan, recorder))
                begin(arguments[0], own)
            else:
                undone = around.enter_context(self._undone(args))
                arguments = tuple(undone.arguments)
                at_end = partial(self._at_end, plan, begin)
                self._run_code = partial(plan.head.run, at_end=at_end)
            around.enter_context(memory)
            if self.client.optimizes_itself:
                around.enter_context(self._taking_over())
            try:
                output = self.run(arguments, plan.conditions.phase, recorder)
            finally:
                self._run_code = lambda code: code()
            stored = results()
        output.finish_capture()
        shown, self._shown = self._shown, []
        return plan.outputs.results(output.hand_out()) + stored + _logged(recorder.logged()) + shown

    def step_behind(self, recorder: StepRecorder, optimizer: Optimizer) -> None:
        for step in itertools.islice(self._behind, 1):
            self._shown += step.results(eager=True)

    def _call(self, arguments: Sequence[Any]) -> Any:
        hooks = hooks_registered()
        try:
            return self._run_code(partial(super()._call, arguments))
        finally:
            self._registers_hooks = hooks_registered() != hooks

    def _backward(self, loss: Tensor) -> None:
        """Run it unwatched where it writes nothing that is not put back in any case."""
        watch = WriteWatch.pausable() if self._verifier.ranks.are_one else None
        sees_code = watch is None or watch.packs or self._registers_hooks
        with ExitStack() as around:
            unseen = not sees_code and self.client.is_backward_unseen(loss, self._leaves)
            if unseen:
                around.callback(hide_modes())
            around.enter_context(self._taking_over())
            super()._backward(loss)
        if unseen and watch is not None:  # a fused update declares that it writes gradients
            watch.leave_out(leaf.grad for leaf in self._leaves.values() if leaf.grad is not None)

    def _outputs(self, returned: Any) -> StepOutputs:
        return StepOutputs(returned, self._comes_late)

    def _as_captured(self, plan: StepPlan, recorder: StepRecorder) -> AbstractContextManager[None]:
        """Set up what surrounds a capture, but for its tracers: here every value is real."""
        assert self._places is not None, "whole steps have places"
        seen = next((m.draws for m in plan.mechanisms if m.draws is not None), None)
        generators = Generators(self._held, self.module.device, seen=seen)
        return self.surrounded(recorder, self._places, [*self._held], generators)

    def _undone(self, args: tuple[Any, ...]) -> AbstractContextManager[UndoneHead]:
        assert self._head is not None, "the step has a head"
        return self._head.undone(args, tensors=False)

    def _at_end(
        self,
        plan: StepPlan,
        use: Callable[[Any, Sequence[Tensor]], object],  # called with what leaves the head
        leaving: dict[str, Any],
    ) -> None:
        assert self._head is not None, "the step has a head"
        with self._head.modes():
            tensors = plan.call.match((leaving,), {})
        if tensors is None or not self.fits(plan.conditions):
            raise HeadMissed
        use(leaving, tensors)

    def _drop_gradients(self) -> None:
        """Drop what a step zeroes; the state that is put back has it."""
        drop_gradients(parameters_of(self.optimizer))

    def _replayed(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor]
    ) -> list[Result]:
        """Replay the step; return results under the names that :meth:`_eager` gives them."""
        with ExitStack() as around:
            given = args[0]
            if plan.head is not None:
                undone = around.enter_context(self._undone(args))
                given, batch = self._leaving(plan, undone.arguments)
            elif not plan.take(batch):
                raise WayMissed
            plan.present.batch = given
            return self._launched(plan, given, batch)

    def _leaving(
        self, plan: StepPlan, arguments: Sequence[Any]
    ) -> tuple[dict[str, Any], Sequence[Tensor]]:
        """Run the head of a step, and take in what leaves it."""
        found: list[Any] = []

        def end(leaving: dict[str, Any], tensors: Sequence[Tensor]) -> None:
            if not plan.take(tensors):
                raise WayMissed
            found.extend((leaving, tensors))
            raise HeadEnded

        assert plan.head is not None
        with suppress(HeadEnded):
            step = partial(self.client.run, *arguments)
            plan.head.run(step, partial(self._at_end, plan, end))
        leaving, tensors = found
        return leaving, tensors

    def _launched(self, plan: StepPlan, batch: Any, tensors: Sequence[Tensor]) -> list[Result]:
        if plan.forked is not None:
            plan.forked.end()
        for mechanism in plan.mechanisms:
            before = mechanism.before if mechanism.repeated is None and not plan.forked else ()
            for instruction in (*before, *mechanism.noted):
                instruction()
        shown: list[Result] = []
        for name, graph in plan.graphs.items():
            if name == plan.first_backward and not plan.loads_ahead:
                for load in plan.loads():
                    load()
            for ahead, update in plan.between if name == "forward" else ():
                ahead.replay()  # neither way takes the step itself
                shown += update.results()
            graph.replay()
        plan.attach()
        for read in plan.outputs.reads():  # where nothing reads results, those of a replay are left
            read()
        stored = plan.effects.results(batch, tensors)
        found = plan.outputs.results(plan.outputs.hand_out()) + stored + _logged(plan.logged())
        behind = [update for update in plan.behind if not update.is_between]
        return found + shown + [result for update in behind for result in update.results()]

    def check_update(self, replay: Callable[[], None]) -> bool:
        """Verify a captured optimizer step on the present gradients.

        True: the replay is the step, which is taken. Else all is as before.
        """
        state, held = self._state(), self._held
        parts = PythonSnapshot(held), Generators(held, self.module.device), self._random()
        written = self._verifier.written["update"]
        ways = Comparison(state, self.update, replay, parts, written, self._rates, goes_on=True)
        held.clear()
        return self._verifier.compare(ways, "the captured optimizer step was not verified")


def _logged(tensors: Sequence[tuple[str, Tensor]]) -> list[Result]:
    """List what a step has logged."""
    return [Result(name, tensor.detach()) for name, tensor in tensors]
