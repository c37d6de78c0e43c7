"""Captured calls of submodules: what each depends on, and their captures in the order of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_graphs.autograd.backward import AliasedGradients, DirectGradients, GradientMemory
from lightning_graphs.autograd.callables import CallableCapture, CaptureSettings
from lightning_graphs.autograd.graphed import GraphedCallable, ReplayOrder, Source, Stores
from lightning_graphs.device.graph import CUDAGraph, GraphPool
from lightning_graphs.device.rules import COLLECTIVE, READ_BEFORE
from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    NoRoomError,
    ReplayError,
    VerificationError,
)
from lightning_graphs.private.callsite import add_line, calls_observed, definition_of
from lightning_graphs.private.engine import has_gradient_hooks, tensor_hooks
from lightning_graphs.private.exchange import inference_mode_left
from lightning_graphs.private.torch import (
    capture_unseen,
    hook_tables,
    hooks_registered,
    is_compiled_in_place,
)
from lightning_graphs.regions.conditions import CodeOfModules, moved_values, tensors_in_words
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.observe import Direction, Observation, ObservedCall, Pass
from lightning_graphs.regions.plan import Plan
from lightning_graphs.regions.verify import WrittenMemory
from lightning_graphs.report import GraphRecord
from lightning_graphs.report.messages import CaptureCost, Statistics, capture_cost, listed
from lightning_graphs.values.memory import REQUIRES_GRAD
from lightning_graphs.values.signature import EVERYTHING, BackendFlags, CallPlan, Modes, Signature
from lightning_graphs.values.snapshot import PythonSnapshot, Snapshot
from lightning_graphs.watch.assertions import Assertions, OpenAssertions
from lightning_graphs.watch.environment import Environment, code_captured
from lightning_graphs.watch.mechanism import Check
from lightning_graphs.watch.numbers import functions_asked
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.tracers import tensors_asked
from lightning_graphs.watch.user_code import iter_objects

# ------------------ Graphed calls


class CallRefused(CaptureError):
    """One of the calls cannot be captured; its forward is the line if the error has no other."""

    def __init__(self, call: ObservedCall, rule: str, observed: str, remedy: str) -> None:
        super().__init__(rule, observed, remedy)
        add_line(self, "in the code of", definition_of(call.original))
        self.call = call


class CallDiffers(CallRefused, VerificationError):
    """The graphs of one call compute something else than the call itself."""


class CallGuards:
    """Python values that a capture has read, which are constants in its graphs, or has set.

    They are attributes of modules and of the trainer, globals and closure variables.
    """

    def __init__(self, environment: Environment, modules: Sequence[nn.Module]) -> None:
        self.environment = environment
        self.reads = AttributeGuards()
        self.values: tuple[tuple[str, Any], ...] = ()  # their names and values at capture
        self._code = CodeOfModules(modules, graphed=True)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the body, a capture of these modules, reads."""
        with self.environment.calling(self.reads):
            yield
        self.environment.outside.read_into(self.reads)
        self.values = self.reads.now()

    @property
    def checks(self) -> tuple[Check, ...]:
        """Comparisons with the capture: of these values, and of the modules' code."""
        return (self.reads.now, self.values), (self._code.exchanged, "")

    def side_effects(self) -> tuple[dict[str, Tensor], Stores]:
        """Return tensors written and attributes set by the body since the last call."""
        return self.environment.loose.written(), self.reads.stored()

    def checks_of(
        self, call: ObservedCall, calls: Iterable[ObservedCall] | None
    ) -> tuple[Check, ...]:
        """Return the checks of one call among those of a step; None: a call by itself."""
        if calls is None:
            return self.checks
        # The code between calls may change any value. A call does not depend on attributes of
        # modules inside of other calls.
        inside = {id(module) for other in calls for module in other.module.modules()}
        read = self.reads.without(inside - set(map(id, call.module.modules())))
        return ((read.now, read.now()),)


@dataclass(slots=True, eq=False, kw_only=True)
class GraphedCall(Plan):
    """The graphs of one call of a module."""

    call: ObservedCall
    callable: GraphedCallable
    guards: CallGuards  # of its capture
    cost: CaptureCost  # what its capture took
    parameters: list[Parameter]  # of the module
    # What the call writes next to parameters and buffers, by name
    written: dict[str, Tensor]
    assertions: OpenAssertions | None = None  # those of the fit, if its code has any
    record: GraphRecord = field(default_factory=lambda: GraphRecord(signature=""))

    @property
    def is_as_captured(self) -> bool:
        """Whether the parameters require gradients that did, and no others."""
        frozen = self.call.frozen
        return not any(p.requires_grad is (p in frozen) for p in self.parameters)

    def fits(self, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> bool:
        return self.is_as_captured and self.holds() and self.callable.accepts(*call)

    def what_differs(self) -> str:
        """Describe what differs from the capture."""
        changes = self.call.kernels.changes(BackendFlags.now())
        if changes:
            return f"the step has set switches of torch otherwise: {', '.join(changes)}"
        return "a value that its code reads has changed within the step"


class CapturedStep(Plan):
    """The graphs for steps of one kind that make equal calls."""

    def __init__(
        self,
        kind: StepKind,
        calls: Sequence[ObservedCall],
        observation: Observation,
        captured: Sequence[GraphedCall],  # the calls that have graphs
        guards: CallGuards,
    ) -> None:
        self._orders = list(dict.fromkeys(graphed.callable.order for graphed in captured))
        super().__init__(key=(kind, guards.values), checks=guards.checks)
        self.kind = kind
        self.calls = calls
        self.guards = guards
        self.captured = captured
        passes = [graphed.callable.backward_pass for graphed in captured]
        # What its graphs write of gradients themselves
        self.direct: Sequence[DirectGradients]
        self.direct = [p.direct for p in passes if p is not None and p.direct is not None]
        # For each observed module the graphs of its calls under autograd, in their order; None for
        # a call that stays eager.
        self.graphed_calls: dict[nn.Module, list[GraphedCall | None]] = {}
        made = {graphed.call: graphed for graphed in captured}
        inside = set(calls)  # a replay makes no calls
        for call in observation.calls:
            if call.parent in inside:
                inside.add(call)
            elif call.grad_enabled:
                self.graphed_calls.setdefault(call.module, []).append(made.get(call))
        # Tables of hooks inside of the modules, all empty: a replay calls no hook.
        tables = [
            table
            for module in dict.fromkeys(call.module for call in calls)
            for inner in module.modules()
            if inner is not module or is_compiled_in_place(module)
            for table in hook_tables(inner)
            if not table
        ]
        self.hook_tables = [*{id(table): table for table in tables}.values()]
        signature = kind.signature
        self._call = CallPlan(signature, check_modes=True) if signature is not None else None

    @property
    def is_kept(self) -> bool:
        """Whether a caller still holds an output that was handed out without a copy."""
        # Any graph over this memory may overwrite it.
        return any(graphed.callable.outputs.is_kept for graphed in self.captured)

    def change(self, to: CapturedStep) -> str:
        """Why these graphs serve no step like the one that ``to`` was captured for."""
        known = self.guards.values
        lines = self.kind.change(to.kind)
        # Calls that were captured for other values may read other attributes
        lines += moved_values(known, to.guards.values) or moved_values(
            known, self.guards.reads.now()
        )
        return listed(lines) or "a step calls its modules differently"

    def fits(self, call: StepCall) -> bool:
        if call.flags != self.kind.flags or not self.holds():
            return False
        return self._call is None or self._call.match(call.batch, {}) is not None

    def begin(self) -> None:
        """Begin a step: every backward pass that is still pending is void."""
        self.uses += 1
        for order in self._orders:
            order.begin()

    def refuse_requests(self, inputs: Sequence[Any]) -> None:
        """Refuse a backward pass for some gradients only, if graphs write them themselves."""
        for graphed in self.captured:
            if any(tensor is p for tensor in inputs for p in graphed.parameters):
                raise ReplayError(
                    "A graphed module cannot compute some of its gradients only.",
                    "torch.autograd.grad or backward(inputs=...) was called for parameters of "
                    f"`{graphed.call.name}`",
                    f'write GraphCapture(exclude=["{graphed.call.name}"])',
                )

    def enter(self, statistics: Statistics) -> None:
        for found in self.graphed_calls.values():
            if calls := [graphed for graphed in found if graphed is not None]:
                enter(calls, statistics, f"; {len(calls)} calls" if len(calls) > 1 else "")


def release(graphed_calls: Sequence[GraphedCall], statistics: Statistics) -> None:
    for graphed in graphed_calls:  # one stands for all of its module, none of which is empty yet
        statistics.released(graphed.callable.forward_graph)
    for graphed in graphed_calls:
        graphed.callable.reset()


def enter(graphed_calls: Sequence[GraphedCall], statistics: Statistics, remark: str) -> None:
    """Enter the graphs of one module in the statistics, and count their replays there.

    All ranks have them by now, and look at their assertions together.
    """
    first = graphed_calls[0]
    added = next((graphed.cost.added for graphed in graphed_calls if graphed.cost.added), {})
    cost = CaptureCost(sum(graphed.cost.ms for graphed in graphed_calls), added)
    graphs: list[CUDAGraph] = []
    for graphed in graphed_calls:
        forward, backward = graphed.callable.forward_graph, graphed.callable.backward_pass
        graphs += [forward, *([backward.graph] if backward is not None else [])]
    words = tensors_in_words(first.callable.plan.signature) + remark
    record = statistics.captured(words, graphs, cost, scope=f"module {first.call.name}")
    for graphed in graphed_calls:
        graphed.record = record
        if graphed.assertions is not None:
            graphed.assertions.is_used = True


class Flags(NamedTuple):
    """What a step's graphs depend on next to its batch."""

    training: tuple[bool, ...]  # train/eval flag of every module
    requires_grad: tuple[bool, ...]  # of every parameter
    hooked: tuple[bool, ...]  # which parameters have hooks; empty if none has
    kernels: BackendFlags  # what operators choose their kernels by


class FlagsReader:
    """Reads the flags before each step."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._hooked: tuple[bool, ...] = ()
        self._hooks_looked_at = -1

    def now(self) -> Flags:
        training = tuple([m.training for m in self._modules])
        required = tuple(map(REQUIRES_GRAD, self._parameters))
        number = hooks_registered()
        if self._hooked or number != self._hooks_looked_at:
            self._hooks_looked_at = number
            found = [bool(tensor_hooks(p)) for p in self._parameters]
            self._hooked = tuple(found) if any(found) else ()
        return Flags(training, required, self._hooked, BackendFlags.now())


class StepKind(NamedTuple):
    """What is known of a step before it runs."""

    signature: Signature | None  # of its batch; None for batches that have none
    flags: Flags

    def change(self, to: StepKind) -> list[str]:
        """Describe how another kind differs, a line each."""
        lines: list[str] = []
        if self.signature is not None and to.signature is not None:
            lines = self.signature.diff(to.signature)
        names = ("train/eval flags", "requires_grad of parameters", "hooks on parameters")
        triples = zip(names, self.flags, to.flags, strict=False)
        changed = [name for name, before, after in triples if before != after]
        changed += self.flags.kernels.changes(to.flags.kernels)
        return lines + [f"{name} changed" for name in changed]


class StepCall(NamedTuple):
    """A step, ahead of its own code."""

    batch: tuple[Any, ...]
    flags: Flags
    calls: Sequence[ObservedCall] = ()  # what to capture of it, if it was observed
    observation: Observation | None = None


def batch_signature(batch: tuple[Any, ...], device_type: str) -> Signature | None:
    """Return the signature of a batch; None if it has none: the modules' own arguments decide."""
    try:
        modes = Modes.current(device_type)
        # Other values than tensors are compared by the calls that take them.
        return Signature.of(batch, {}, names=("batch",), modes=modes, unread=EVERYTHING)[0]
    except CaptureError:
        return None


# ------------------ Captures of calls


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """Settings and resources of captures."""

    context: TrainingContext
    pool: GraphPool  # whose memory, stream and backend the graphs use
    gradients: GradientMemory  # where those of parameters go
    # Raises if graphs differ from the modules' code
    check: Callable[[Sequence[GraphedCall]], object]
    aliases: bool = True  # outputs that the next graph reads are handed out without a copy
    # Backward graphs write the gradients of parameters themselves. If user code asks for those of
    # some parameters only, autograd needs an edge for each.
    direct: bool = True


def capture_step(
    calls: Sequence[ObservedCall], observation: Observation, config: CaptureConfig
) -> tuple[list[GraphedCall], CallGuards]:
    """Capture forward and backward of these calls in the order in which the step ran them."""
    # No call is inside of another. Those without autograd share graphs that are made when called.
    for call in calls:
        if len(list(call.module.modules())) != len(call.training):
            raise CallRefused(
                call,
                "A module must have the same submodules at its capture as in the step before.",
                "submodules were added or removed in between",
                "add and remove submodules before the fit, or in its first steps",
            )
    recorded = [call for call in calls if call.grad_enabled]
    # If a call that had no backward pass has one later, in the same step, its activations are in a
    # pool of their own, whatever ran in between. The next step makes them void.
    alone = [call for call in recorded if call.requires_grad and call.backwards == 0]
    for call in observation.among_uses(recorded):
        call.partial = True
    in_order = set(recorded) - set(alone)
    groups = [(config.pool, [(call, way) for call, way in observation.passes if call in in_order])]
    groups += [(config.pool.beside(), _both(call)) for call in alone]
    # The observed step was the warm-up. Compiled code compiles again for a capture, because of
    # autocast's cache, which is off.
    return _captured(calls, groups, config, recorded, warm=not config.context.compiled.runs)


def capture_alone(call: ObservedCall, config: CaptureConfig) -> GraphedCall:
    """Capture a call without autograd, which any other may follow."""
    graphed_calls, _ = _captured([call], [(config.pool, _both(call))], config, None, warm=False)
    return graphed_calls[0]


def _both(call: ObservedCall) -> list[Pass]:
    return [(call, "forward"), (call, "backward")]


def _captured(
    calls: Sequence[ObservedCall],
    groups: Sequence[tuple[GraphPool, Sequence[Pass]]],
    config: CaptureConfig,
    in_order: Sequence[ObservedCall] | None,  # the captured calls of a step; None of one by itself
    *,
    warm: bool,  # the calls have just run, as they are captured
) -> tuple[list[GraphedCall], CallGuards]:
    """Capture passes in their order, each group of them over the memory of a pool."""
    modules = list(dict.fromkeys(call.module for call in calls))
    guards = CallGuards(config.context.watch.environment(modules), modules)
    captures: list[_Capture] = []
    pools: list[GraphPool] = []
    try:
        with capture_cost(config.pool.backend) as cost, guards.watched():
            for memory, passes in groups:
                own, order = memory.beside(memory.handle), ReplayOrder()
                pools.append(own)
                here: dict[ObservedCall, _Capture] = {}
                for call in dict.fromkeys(call for call, _ in passes):
                    capture = here[call] = _Capture(call, config, own, order, guards)
                    captures.append(capture)
                    if not warm:
                        capture.warm_up(1)
                    capture.begin()
                for call, way in passes:
                    here[call].run(way, here if config.aliases else {})
        for capture in captures:
            capture.refuse_bound()
        graphed_calls = [c.graphed_call(guards.checks_of(c.observed, in_order)) for c in captures]
        for graphed in graphed_calls:
            graphed.callable.outputs.track_aliases()
        config.check(graphed_calls)
    except BaseException:
        for capture in captures:
            capture.abandon()
        for pool in pools:
            pool.close()
        raise
    # They share memory whose size takes long to read: it is entered for the first one alone.
    for graphed in graphed_calls[:1]:
        graphed.cost.added.update(cost.added)
    return graphed_calls, guards


def _of_module(name: str, error: ReplayError) -> None:
    """Word the refusal of a backward pass for a user of the callback."""
    error.observed = f"in the backward pass of `{name}`, {error.observed}"
    error.remedy = (
        f'write GraphCapture(exclude=["{name}"]), which runs that module eagerly; with automatic '
        'optimization scope="step" captures such passes as well'
    )
    error.args = (error.rule, error.observed, error.remedy)


class _Capture(CallableCapture):
    """The capture of one call, as it was observed."""

    binds = True

    @calls_observed
    def __init__(
        self,
        call: ObservedCall,
        config: CaptureConfig,
        pool: GraphPool,
        order: ReplayOrder,
        guards: CallGuards,
    ) -> None:
        self.observed = call
        self._guards = guards
        self._open_assertions, self._is_capturing = config.context.assertions, False
        self._assertions = Assertions(config.context.module.device)
        self._cost = CaptureCost()
        self._written: dict[str, Tensor] = {}
        self._stores: dict[Direction, Stores] = {"forward": (), "backward": ()}
        hooked = any(map(has_gradient_hooks, call.module.parameters()))
        direct = config.direct and not (hooked or call.partial)
        settings = CaptureSettings(pool, order, direct, True, gradients=config.gradients)
        with self._explained():
            self._attributes = PythonSnapshot(iter_objects(call.module))
            made_of = call.args, call.kwargs, settings, call.original, call.known
            super().__init__(call.module, *made_of)

    @calls_observed
    def warm_up(self, iterations: int) -> None:
        """Run the call and undo its writes, which a first run finds."""
        run, loose = partial(super().warm_up, iterations), self._guards.environment.loose
        kept = loose.snapshot = Snapshot(loose.tensors)
        try:
            with self._explained(), kept.undone(), self._refusing():
                WrittenMemory().add_to(kept, run)
                run()
        finally:
            loose.snapshot = None

    def _sources_of_arguments(
        self, others: Mapping[ObservedCall, _Capture]
    ) -> dict[int, tuple[Tensor, Source]]:
        """Find arguments that other graphs return, or take as well."""
        found: dict[int, tuple[Tensor, Source]] = {}
        for leaf, sources in self.observed.sources.items():
            for seen in sources:
                if seen.call not in others or (leaf in found and not seen.returned):
                    continue
                other, index = others[seen.call], seen.index
                found[leaf] = other.alias_output(index) if seen.returned else other.share(index)
        return found

    def _sources_of_gradients(
        self, others: Mapping[ObservedCall, _Capture]
    ) -> dict[int, tuple[Tensor, AliasedGradients]]:
        """Find gradients of outputs that the backward graph of exactly one other call writes."""
        # A tensor that is returned twice has two gradients, and no memory of one is for both.
        given: dict[int, list[tuple[Tensor, AliasedGradients] | None]] = {}
        for other in others.values():
            for leaf, makers in other.observed.sources.items():
                mine = [m.index for m in makers if m.returned and m.call is self.observed]
                for output in mine:
                    alias = other.alias_gradient(leaf) if len(mine) == 1 else None
                    given.setdefault(output, []).append(alias)
        alone = ((output, found[0]) for output, found in given.items() if len(found) == 1)
        return {output: alias for output, alias in alone if alias is not None}

    @calls_observed
    def run(self, way: Direction, producers: Mapping[ObservedCall, _Capture]) -> None:
        """Capture a pass, which reads in place what the graphs of other captures compute."""
        self._guards.side_effects()  # those of other captures are dropped
        with self._explained(), self._refusing():
            if way == "forward":
                self._is_capturing = True
                self.capture_forward(self._sources_of_arguments(producers))
                self._is_capturing = False
                if self._forward_graph.has_collectives:
                    raise COLLECTIVE.refused(f"`{self.observed.name}` calls some")
            else:
                self.capture_backward(self._sources_of_gradients(producers))
        written, self._stores[way] = self._guards.side_effects()
        self._written |= written

    def _call(self) -> Any:
        if not self._is_capturing:
            return super()._call()
        asked = tensors_asked(self._assertions.answer)
        with asked, functions_asked(lambda: self._assertions):
            returned = super()._call()
        self._assertions.finish()
        return returned

    def refuse_bound(self) -> None:
        """Refuse attributes that the call binds if a graph reads what was there before."""
        for each in self.bound:
            if each.owner is not None and self._guards.reads.may_have_read(each.owner, each.key):
                with self._explained():
                    raise READ_BEFORE.refused(
                        f"`{each.name}` is set to another tensor in every call, and may have been "
                        "read before"
                    )

    def graphed_call(self, checks: tuple[Check, ...]) -> GraphedCall:
        """Make the plan of the call, after all captures; it is valid as long as the checks hold."""
        with as_observed(self.observed):
            stores = self._stores["forward"], self._stores["backward"]
            made = self.finish(stores, partial(_of_module, self.observed.name))
        pending = self._assertions.pending(self._open_assertions)
        if pending is not None:
            made.follow(pending.note)
            made.follow(pending.look)
        return GraphedCall(
            key=(self.observed.key(), self.observed.kernels, self._guards.values),
            checks=((BackendFlags.now, self.observed.kernels), *checks),
            call=self.observed,
            callable=made,
            guards=self._guards,
            cost=self._cost,
            parameters=list(self.observed.module.parameters()),
            written=self._written,
            assertions=None if pending is None else self._open_assertions,
        )

    def _refusing(self) -> AbstractContextManager[None]:
        """Refuse what the module's code does that no replay can do."""
        environment, reads = self._guards.environment, self._guards.reads
        return environment.refusing_in(self.observed.module, self._attributes, reads)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Run the body as the call was run; a failure names the call, and leaves nothing behind."""
        call, started = self.observed, perf_counter()
        try:
            with (
                code_captured("A captured module"),
                inference_mode_left(),
                as_observed(call),
                capture_unseen([]),
            ):
                yield
        except NoRoomError:
            raise
        except GraphError as error:
            raise CallRefused(call, error.rule, error.observed, error.remedy) from error
        finally:
            self._cost.ms += (perf_counter() - started) * 1e3


@contextlib.contextmanager
def as_observed(call: ObservedCall) -> Iterator[None]:
    """Run the body with the module in the state in which the call was observed.

    Autocast, grad mode, default dtype, train/eval flags and ``requires_grad`` of its parameters.
    """
    modules, parameters = list(call.module.modules()), list(call.module.parameters())
    flags = [m.training for m in modules]
    required = list(map(REQUIRES_GRAD, parameters))
    _set(modules, "training", call.training)
    _set(parameters, "requires_grad", [p not in call.frozen for p in parameters])
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(call.kernels.default_dtype)
    try:
        with (
            torch.set_grad_enabled(call.grad_enabled),
            torch.autocast(
                call.device_type,
                dtype=call.autocast,
                enabled=call.autocast is not None,
                cache_enabled=False,
            ),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        _set(modules, "training", flags)
        _set(parameters, "requires_grad", required)


def _set(owners: Sequence[Any], name: str, values: Sequence[bool]) -> None:
    for owner, value in zip(owners, values, strict=True):
        if getattr(owner, name) is not value:  # setting an attribute of a module takes long
            setattr(owner, name, value)
