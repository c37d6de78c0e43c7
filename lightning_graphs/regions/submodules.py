"""Decides which step of a fit is observed, captured or replayed by submodules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.autograd.backward import (
    EarlierGradients,
    gradients_copied,
    unrepeated,
    zero_gradient,
)
from lightning_graphs.device.rules import may_follow_values
from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    NoRoomError,
    ReplayError,
    in_one_line,
    is_out_of_memory,
)
from lightning_graphs.policy.worth import SETTLED
from lightning_graphs.private.callsite import CallSite, add_line, named_at
from lightning_graphs.private.engine import current_autograd_node, without_hooks
from lightning_graphs.private.exchange import TURN, exchanged, inference_mode_left, replaced
from lightning_graphs.private.generators import Generators, RandomState
from lightning_graphs.regions.calls import (
    CallDiffers,
    CallRefused,
    CaptureConfig,
    CapturedStep,
    FlagsReader,
    GraphedCall,
    StepCall,
    StepKind,
    as_observed,
    batch_signature,
    capture_step,
    release,
)
from lightning_graphs.regions.conditions import moved_values
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.dispatch import (
    MOVED,
    DispatchState,
    ForwardDispatcher,
    ModuleSelection,
)
from lightning_graphs.regions.gradients import PersistentGradients, drop_gradients
from lightning_graphs.regions.lifecycle import Lifecycle, Region
from lightning_graphs.regions.observe import StepObserver
from lightning_graphs.regions.tolerance import Tolerance
from lightning_graphs.regions.verify import Comparison, Verifier
from lightning_graphs.report.messages import FEW, PATIENCE
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.signature import Signature, Steady
from lightning_graphs.values.snapshot import PythonSnapshot, RegionState, Result, results_in
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.user_code import iter_objects


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a client knows of the code of steps before the first one."""

    # Graphs write the gradients of parameters themselves. False: a backward pass may be for some
    # parameters only, or a reducer has hooks on each.
    direct: bool
    adds: bool  # gradients of earlier steps may be added to
    again: CallSite  # a line at which a step may go through a graph twice; empty if there is none
    repeats: bool  # such a step can be run once more
    may_be_whole: bool  # whole steps can be captured, and were not tried


_USEFUL = 3
"""How many steps with a replay show that graphs were right before no call fits them any more."""


@dataclass(slots=True)
class Observed:
    """An observed step, which is captured when the values that it had come back."""

    kind: StepKind
    values: Hashable  # of attributes that earlier captures of such steps have read
    observer: StepObserver  # sees its calls, and keeps their arguments
    dispatchers: list[ForwardDispatcher]  # of the modules whose calls it sees
    waits: int = FEW  # how many steps with other values may come before
    since: float = field(default_factory=perf_counter)  # it began


class ModuleGraphs(Region[StepCall, CapturedStep]):
    """Observes, captures and replays the calls of chosen submodules, step by step."""

    def __init__(
        self,
        context: TrainingContext,
        facts: StepFacts,
        gradients: PersistentGradients,
        verifier: Verifier,
        *,
        looks_at_shapes: bool,  # in the first step that is observed, too
    ) -> None:
        module, options, pool = context.module, context.options, context.pool
        self._watches_requests, self._again = facts.direct, facts.again
        self._earlier = EarlierGradients() if facts.adds else None
        waits = PATIENCE if facts.again.line else 0
        # A step that goes through a graph twice is run once more, or else waited for.
        self._patience, self.insured = (0, waits) if facts.repeats else (waits, 0)
        self._verifier, self._checks = verifier, CallChecks(verifier, module)
        check = self._checks.check
        self._config = CaptureConfig(context, pool, gradients, check, direct=facts.direct)
        # What decides over the calls while a step runs.
        self.state = DispatchState(replace(self._config, pool=pool.beside()))
        self._context = context
        self._gradients = gradients
        self._device_type = pool.backend.device_type
        self._selection = ModuleSelection(module, options)
        self._flags = FlagsReader(module)
        # Of modules that were ever observed, and of those that have graphs
        self._dispatchers: dict[nn.Module, ForwardDispatcher] = {}
        self._graphed: dict[nn.Module, ForwardDispatcher] = {}
        self._life = Lifecycle[StepCall, CapturedStep](self, context, verifier, itemgetter(0))
        self._plans = self._life.cache
        self._last: CapturedStep | None = None
        # Steps are known by their batches; False: the arguments of modules decide
        self._by_batch, self._steady = True, Steady()
        self._forgotten = 0  # how often all graphs were dropped
        self._observed: Observed | None = None
        self._missed = 0  # steps with a call that found no graph
        self._idle = 0  # steps in a row in which no graph was replayed
        self._useful = 0  # steps in which one was, since the last capture
        context.messages.scope_changed()
        self._may_be_whole = facts.may_be_whole
        self._looks_at_shapes = looks_at_shapes and not context.compiled.runs
        # What takes memory that a step may need which was not replayed yet; or empty.
        self.memory_risk = ""

    def close(self) -> None:
        self._stop_observing()
        for dispatcher in self._dispatchers.values():  # an interrupt may have left one in its place
            dispatcher.remove()
        self._graphed.clear()
        self._plans.clear()
        self._last = None
        self.state.config.pool.close()

    # ------------------------------------------------------------------ each step

    def begin(self, args: tuple[Any, ...]) -> None:
        """Begin a step with this batch: with graphs, or eagerly and perhaps observed."""
        state = self.state
        if state.astray:
            self._stop_aliasing("a graphed module is given other tensors, which are copied now")
        elif self._last is not None and self._last.is_kept:
            # Any replay over this memory may overwrite it.
            self._stop_aliasing("an output of a graphed module is kept, and is copied now")
        if self._observed is not None:
            self._look_back(self._observed)
        elif state.replays:
            self._look_at_missed()
        if state.stale:
            self._forget(state.stale)
        step = self._step_for(StepCall(args[:1], self._flags.now()))
        state.missed, state.seeded, state.has_replayed = "", False, False
        state.eager_weights.clear()
        if step is None:
            self.memory_risk = "graphs" if len(self._plans) else ""
            if self._observed is not None:
                self.memory_risk = "arguments"
        else:
            is_settled = step.uses >= (SETTLED if self._verifier.budget.is_tight else 1)
            self.memory_risk = "" if is_settled else "replays"
            if step.uses < SETTLED or self._verifier.budget.is_tight:
                self._verifier.budget.settle()
            step.begin()
        state.replays = step is not None
        for module, dispatcher in self._graphed.items():
            dispatcher.begin(() if step is None else step.graphed_calls.get(module, ()))

    def _look_at_missed(self) -> None:
        """Say that the calls of the last step had no graphs; drop them if none is of use."""
        state, note = self.state, self._context.messages.note
        self._missed += bool(state.missed)
        if state.missed and self._missed == PATIENCE:
            note(state.missed)
        has_graphs = bool(self._graphed and self._last is not None and self._last.captured)
        self._useful += state.has_replayed
        is_idle = has_graphs and not (state.has_replayed or state.seeded)
        self._idle = self._idle + 1 if is_idle else 0
        if self._idle == FEW and not state.missed:
            note("steps run eagerly that call no graphed module")
            self._forget("steps run that call no graphed module")
        elif self._idle == FEW and self._useful > _USEFUL:  # arguments may always differ
            self._forget("no graph fits what steps call now")

    def begin_again(self, error: ReplayError) -> None:
        """Begin a step again that graphs could not serve: eagerly, and observed."""
        assert self._last is not None
        kind, self.insured = self._last.kind, PATIENCE
        add_line(error, "see", self._again)  # where a backward pass of Lightning's was refused
        self._forget(f"a step cannot be served: {error.observed}")
        self._observe(kind)
        self.state.has_replayed = self.state.replays = False

    def end(self) -> None:
        """End the step's own code: every module is as its author made it."""
        self.state.stepping = False
        for dispatcher in self._graphed.values():
            dispatcher.uninstall()

    def watching(self, loss: Any = None) -> AbstractContextManager[None]:
        """Watch the body, a part of a step or its backward pass, as far as that is needed."""
        direct, observed = self._watches_requests, self._observed
        requests = _passes_watched(self._asked, self._passing) if direct else nullcontext()
        if observed is None or observed.observer.is_over:
            return requests
        return self._observing(observed, loss, requests)

    def _passing(self) -> AbstractContextManager[None]:
        """Surround a backward pass of a step whose graphs write gradients themselves."""
        earlier, step = self._earlier, self._last if self.state.has_replayed else None
        # It may be inside of another pass, as a checkpoint's is
        if earlier is None or step is None or current_autograd_node() is not None:
            return nullcontext()
        return earlier.aside(step.direct)

    @contextmanager
    def _observing(
        self, observed: Observed, loss: Any, requests: AbstractContextManager[None]
    ) -> Iterator[None]:
        observed.observer.look_behind(loss)
        # If a backward pass is inside of the step's own code, they are there already.
        dispatchers = [d for d in observed.dispatchers if not d.is_installed]
        for dispatcher in dispatchers:
            dispatcher.install()
        before, self.state.observer = self.state.observer, observed.observer
        try:
            compiled = self._context.compiled.watching()
            with TURN, requests, compiled, observed.observer.looking_at_shapes():
                yield
        finally:
            self.state.observer = before
            for dispatcher in dispatchers:
                dispatcher.uninstall()

    def _stop_aliasing(self, reason: str) -> None:
        self.state.astray = False
        self._config = replace(self._config, aliases=False)
        self._forget(reason)

    def _step_for(self, call: StepCall) -> CapturedStep | None:
        """Find the graphs of this step; None: it runs eagerly, observed if it is worth graphs."""
        before = self._forgotten
        step = self._life.plan_for(call)
        if step is not None and any(step.hook_tables):
            self._forget("a hook was registered inside of a graphed module")
        if before != self._forgotten:
            return self._step_for(call)
        self._last = step or self._last
        return step

    def _difference(self, before: StepKind, kind: StepKind) -> list[str]:
        steps = (step.guards for step in self._plans_of(kind))
        moved = (
            line + named_at(line, guards.environment.outside.codes)
            for guards in steps
            for line in moved_values(guards.values, guards.reads.now())
        )
        return before.change(kind) or list(dict.fromkeys(moved))

    def _read(self, kind: StepKind) -> Hashable:
        """Read what captures of this kind have read: a value that keeps changing is no key."""
        return frozenset(item for step in self._plans_of(kind) for item in step.guards.reads.now())

    def _plans_of(self, kind: StepKind) -> list[CapturedStep]:
        return [step for step in self._plans.plans() if step.kind == kind]

    def _asked(self, inputs: Sequence[Any]) -> None:
        """Let autograd hand out all gradients: a backward pass is for these tensors only."""
        self._config = replace(self._config, direct=False)
        if self.state.replays and self._last is not None:
            self._last.refuse_requests(inputs)
        elif self._plans.plans():
            self._forget("a step asks for some gradients only")

    # ------------------------------------------------------------------ observation and capture

    def _observe(self, kind: StepKind) -> None:
        state, looks = self.state, self._looks_at_shapes
        observer = StepObserver(self._device_type, lambda: state.stepping, looks_at_shapes=looks)
        dispatchers = [
            self._dispatchers.setdefault(module, ForwardDispatcher(name, module, state))
            for name, module in self._selection.candidates().items()
        ]
        self._observed = Observed(kind, self._read(kind), observer, dispatchers)

    def _stop_observing(self) -> None:
        if self._observed is not None:
            self._observed.observer.discard()
            self._observed = None

    def _look_back(self, observed: Observed) -> None:
        """Capture what the last step has shown, if it is worth it and can be."""
        kind, observation = observed.kind, observed.observer.observation
        if not observed.observer.is_over:
            self._context.policy.observed(observed.since)
        observed.observer.remove()
        now = self._flags.now()  # a capture finds the hooks and the precision that are there
        is_fit = now.hooked == kind.flags.hooked and now.kernels == kind.flags.kernels
        if not (is_fit and self._read(kind) == observed.values):
            if observed.waits > 0:
                observed.waits -= 1  # values may take turns
                return
            is_fit &= not any(step.holds() for step in self._plans_of(kind))
        self._observed = None
        if not is_fit:
            return
        if self._selection.learn(observation):
            self._patience = 0
        elif self._patience > 0:
            self._patience -= 1
            self._context.messages.note(
                "steps run eagerly until one shows which module create_graph=True or "
                f"retain_graph=True concerns, {PATIENCE} steps at most: {self._again.describe()}"
            )
            return
        note = self._context.messages.note
        for module in self._selection.leave_out_unsteady(kind, observation, note):
            if module in self._graphed:
                self._graphed.pop(module).remove()
        if self._selection.wants_another(kind, observation):
            part = self._selection.steady_part(observation)
            if len(self._plans) or self._context.policy.goes_on_with_part(part):
                self._observe(kind)
            return
        calls = self._selection.first(observation, note)
        self._life.capture(StepCall((), now, calls, observation), (kind, self._read(kind)))

    # ------------------------------------------------------------------ the region

    def key(self, call: StepCall) -> Hashable:
        signature = batch_signature(call.batch, self._device_type) if self._by_batch else None
        kind = StepKind(signature, call.flags)
        return kind, self._read(kind)

    def wait(self, key: Any) -> None:
        plans = self._plans
        is_new, is_full = plans.is_new(key), plans.is_full
        signature = key[0].signature
        self._steady.steps += 1
        if is_new and signature is not None and self._steady.see(signature, PATIENCE):
            self._by_batch = False
        self._context.messages.waits(
            key[0], plans.why_not, self._difference, is_new=is_new, at_once=is_full
        )

    def is_ready(self, key: Any) -> bool:
        self._context.messages.replayed()
        if self._observed is None:  # else one waits for its values to come back
            self._observe(key[0])
        return False

    def capture(self, call: StepCall, key: Any) -> CapturedStep | None:
        """Capture the observed calls; a refused one is replaced by the calls that it makes."""
        kind, calls, observation = key[0], call.calls, call.observation
        assert observation is not None
        options, messages = self._context.options, self._context.messages
        with self._context.policy.timing_capture():
            while calls:
                try:
                    self._verifier.budget.require_room("A captured module")
                    with self._gradients.capturing():
                        graphed_calls, guards = capture_step(calls, observation, self._config)
                    return CapturedStep(kind, calls, observation, graphed_calls, guards)
                except CallRefused as error:
                    differs = isinstance(error, CallDiffers)
                    if options.on_failure == "raise" and (options.modules or differs):
                        raise
                    follows = not differs and may_follow_values(error.__cause__)
                    if follows and not (self._looks_at_shapes or self._context.compiled.runs):
                        self._looks_at_shapes = True  # another step shows all that it is about
                        self._observe(kind)
                        return None
                    self._selection.refuse(error.call.module)
                    calls = self._selection.calls(observation)
                    messages.refused(error.call.name, error)
                    if calls and not self._context.policy.goes_on():
                        return None
                    self._context.policy.tries_again()
        whole = '. scope="step" tries the whole step' if self._may_be_whole else ""
        if options.on_failure == "eager" and observation.calls:
            messages.note(
                "steps run eagerly: no submodule could be captured. List what is in the way with "
                f"diagnose=True, choose submodules with modules=[...]{whole}"
            )
        elif options.on_failure == "eager":
            messages.note(f"steps run eagerly: they call no submodule that has parameters{whole}")
        raise CaptureError(
            "GraphCapture(scope='modules') needs a submodule that can be captured.",
            "no submodule could be captured",
            "write on_failure='eager' to train without graphs, and to read why for each",
        )

    def refuse(self, error: GraphError) -> None:
        if self._context.options.on_failure == "raise":
            raise error
        if isinstance(error, NoRoomError):
            self._context.messages.note("a step runs eagerly", error)

    def discard(self, plan: CapturedStep) -> None:
        release(plan.captured, self._context.statistics)

    def enter(self, plan: CapturedStep, call: StepCall) -> None:
        statistics = self._context.statistics
        self._context.policy.succeeded()
        plan.enter(statistics)
        for made in plan.calls:
            dispatcher = self._graphed[made.module] = self._dispatchers[made.module]
            dispatcher.is_graphed = True
        statistics.captures += 1
        self._context.messages.chosen(list(dict.fromkeys(made.name for made in plan.calls)))
        if self._last is not None:
            change = self._last.change(plan)
            said = f"captured other graphs, as this changed: {change}"
            self._context.messages.recaptured(said, change)
        self._last = plan

    def compare(self, plan: CapturedStep, call: StepCall) -> bool:
        """Verify graphs that were right before; drop those that compute something else."""
        if plan.uses == 0:
            return True  # each of its calls was verified within the capture
        self._gradients.has_external_references()
        try:
            self._checks.check(plan.captured, again=True)
        except CallDiffers as error:
            if self._context.options.on_failure == "raise":
                raise
            self._selection.refuse(error.call.module)
            self._graphed.pop(error.call.module).remove()
            self._context.messages.refused(error.call.name, error)
            # Each module can be wrong once only, so that this ends by itself.
            self._forget(f"`{error.call.name}` is no longer graphed")
            return False
        except ReplayError:
            self._forget(MOVED)
            return False
        return True

    def _forget(self, reason: str) -> None:
        self.state.stale = ""
        self._useful = 0
        self._forgotten += 1
        self._context.messages.recaptured(f"recapturing, because {reason}", reason)
        self._stop_observing()
        self._plans.clear()
        self._last = None
        for dispatcher in self._graphed.values():
            dispatcher.forget()


@contextmanager
def _passes_watched(
    asked: Callable[[Sequence[Any]], None], passing: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Surround every backward pass that the body starts by ``passing()``.

    ``asked`` is called with the inputs of one for some inputs: gradients that a graph writes itself
    have no edge in autograd, which would call them unused.
    """

    def watched(original: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = args[place] if len(args) > place else kwargs.get("inputs")
            if inputs is not None:
                asked(leaves_of(inputs))
            with passing():
                return original(*args, **kwargs)

        return call

    engine = torch.autograd
    grad, backward = watched(engine.grad, 1), watched(engine.backward, 5)
    with exchanged([(engine, "grad", grad), (engine, "backward", backward)]):
        yield


# ------------------ Their verification


class CallChecks:
    """Runs captured calls both ways from one state.

    For each call the module's own forward and backward run on arguments of the observed call, and
    then its graphs, both with one set of random gradients of the outputs. Outputs, buffers and all
    gradients are compared. Hooks on parameters do not run.
    """

    def __init__(self, verifier: Verifier, root: Any) -> None:
        self._verifier, self._root = verifier, root

    def check(self, graphed_calls: Sequence[GraphedCall], *, again: bool = False) -> None:
        """Verify the graphs of a step before it begins."""
        # A replay runs only in order: a backward pass that is pending is void.
        for graphed in graphed_calls:
            graphed.callable.order.begin()
            self.check_call(graphed, again=again)

    def check_call(self, graphed: GraphedCall, *, again: bool = False) -> None:
        if not self._verifier.is_on:
            return
        call = graphed.call
        run = _CallRun(self._root, graphed, again=again)
        code = call.module, call.training, call.frozen, call.grad_enabled, call.recomputed
        written = self._verifier.written[code]
        ways = Comparison(run.state, run.eager, run.replayed, run.parts, written)
        tolerance = Tolerance(self._root.device.type, call.autocast)
        try:
            self._verifier.compare(ways, "a captured module was not verified", tolerance)
        except GraphError as error:
            if again and isinstance(error, ReplayError):
                raise
            raise CallDiffers(call, error.rule, error.observed, error.remedy) from error


class _CallRun:
    """One captured call with its arguments, and the state that it changes."""

    def __init__(self, root: Any, graphed: GraphedCall, *, again: bool) -> None:
        self._device = device = root.device
        self._graphed_call = graphed
        call = graphed.call
        signature, samples = Signature.of(call.args, call.kwargs)
        self._names = signature.tensor_names
        self._samples = graphed.callable.inputs.tensors if again else samples
        self._backward = graphed.callable.backward_pass
        tensors = {f"buffer `{call.name}.{n}`": b for n, b in call.module.named_buffers()}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in graphed.written.items()}
        self._parameters = self._differentiable(root)
        unseen = [*graphed.guards.environment.loose.small, *call.module.parameters()]
        parameters = {name: parameter for parameter, name in self._parameters.items()}
        self.state = RegionState(tensors, parameters, unseen)
        self.parts = (
            PythonSnapshot(iter_objects(call.module)),
            Generators(iter_objects(root), device),
            RandomState(device, root.modules()),
        )

    def _differentiable(self, root: nn.Module) -> dict[Tensor, str]:
        """Name the parameters that the call gives a gradient, also those outside of the module."""
        call, backward = self._graphed_call.call, self._backward
        found: dict[Tensor, None] = {p: None for p in call.module.parameters()}
        if backward is not None:
            direct = backward.direct
            found |= dict.fromkeys(backward.parameters.own if direct is None else direct.parameters)
        names: dict[Tensor, str] = {p: f"`{name}`" for name, p in root.named_parameters()}
        trained = (p for p in found if p not in call.frozen)
        return {p: names.get(p, f"parameter {i} of `{call.name}`") for i, p in enumerate(trained)}

    def eager(self) -> list[Result]:
        try:
            return self._run(self._graphed_call.callable.original, direct=False)
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
        with replaced(self._graphed_call.callable, "aliased_inputs", ()):
            return self._run(self._graphed_call.callable, direct=direct)

    def _run(self, forward: Callable[..., Any], *, direct: bool) -> list[Result]:
        call = self._graphed_call.call
        drop_gradients(self._parameters)
        # Copies: what reads or writes them past torch must not reach the samples.
        tensors = StaticInputs(self._samples).tensors
        args, kwargs = substitute((call.args, dict(call.kwargs)), tensors)
        with inference_mode_left(), as_observed(call), without_hooks(list(self._parameters)):
            returned = forward(*args, **kwargs)
            places = self._graphed_call.callable.outputs.bound
            bound = [(f"`{each.name}`", each.now((args, kwargs))) for each in places]
            outputs = leaves_of((returned, bound), Tensor)
            with torch.autocast(self._device.type, enabled=False):
                self._pull_back(outputs, tensors, direct=direct)
        found = results_in(returned, "output", f" of `{call.name}`")
        for name, value in bound:
            found += results_in(value, name, f" of `{call.name}`")
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
        with gradients_copied(wanted):
            gradients = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        for tensor, found in zip(wanted, gradients, strict=True):
            tensor.grad = found
