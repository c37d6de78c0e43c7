"""Steps, optimizer steps and calls that are verified: each runs eagerly and as graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.autograd.backward import gradients_copied, unrepeated, zero_gradient
from lightning_graphs.autograd.graphed import set_again
from lightning_graphs.device.emulated import WriteWatch
from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    ReplayError,
    VerificationError,
    in_one_line,
    is_out_of_memory,
)
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.generators import Generators, RandomState
from lightning_graphs.private.torch import hide_modes, hooks_registered, without_hooks
from lightning_graphs.regions.behind import HeadMissed, StepHead, Undone
from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.calls import CallRefused, GraphedCall, as_observed
from lightning_graphs.regions.conditions import CaptureKey
from lightning_graphs.regions.context import Recorder
from lightning_graphs.regions.gradients import drop_gradients
from lightning_graphs.regions.plan import StepOutputs, StepPlan, UpdateBehind
from lightning_graphs.regions.verify import Comparison, Tolerance, Verifier
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import Part, PythonSnapshot, RegionState, Result, results_in
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.head import HeadEnded
from lightning_graphs.watch.places import StepState
from lightning_graphs.watch.user_code import UnregisteredTensors, iter_objects


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
        self._leaves: frozenset[int] = frozenset()  # the ``id`` of each whose gradient is put back
        self._registers_hooks = False  # the step's own code, when it ran last
        # Surrounds the backward pass
        self._taking_over: Callable[[], AbstractContextManager[None]] = nullcontext
        # Optimizer steps that replays take behind their graphs, and what they find there
        self._behind: Iterator[UpdateBehind] = iter(())
        self._shown: list[Result] = []

    def _look(self) -> list[Tensor]:
        """Look at what modules hold, to compare; return tensors that may change unseen."""
        self._held = [*iter_objects(self.module)]
        return UnregisteredTensors(self.module, self._held).small

    def _state(self, plan: StepPlan | None = None) -> RegionState:
        """Describe what a step may change; without a plan an optimizer step."""
        unseen = self._look()
        parts = self.module, [*self.optimizers], self._scaler
        if plan is None:
            return RegionState.of_step(*parts, unseen=unseen)
        written, others = plan.loose, plan.outside.parameters
        followed = [one.counters for one in self.optimizers.values() if one is not None]
        counted = {place for counters in followed if counters for place in counters.places}
        return RegionState.of_step(
            *parts, written=written, unseen=unseen, others=others, renewed=plan.dropped,
            counted=counted,
        )  # fmt: skip

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
        parts: list[Part] = [m.state for m in plan.mechanisms if m.state is not None]
        parts.append(stored)
        is_whole = plan.head is None and len(plan.graphs) == 1
        state = self._state(plan)
        self._leaves = frozenset(map(id, state.parameters.values()))
        ways = Comparison(
            state,
            partial(self._eager, plan, args, batch),
            partial(self._replayed, plan, args, batch),
            [*parts, self._random()],
            self._verifier.written[plan.conditions],
            [] if self.client.optimizes_itself else plan.gradients.buffers,
            plan.gradients.pool_bytes,  # they lie where the eager step would compute
            goes_on=is_whole and all(m.repeated is None for m in plan.mechanisms),
            alone=self._verifier.budget.nothing_kept,
        )
        try:
            plan.is_launched = self._verifier.compare(ways, "a captured step was not verified")
        finally:
            self._held.clear()
            self._taking_over = nullcontext  # the graph's memory may be released
        if plan.head is None and not plan.is_launched:
            plan.take(batch)

    def _random(self) -> RandomState:
        return RandomState(self.module.device, self.module.modules())

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

    def step_behind(self, recorder: Recorder, optimizer: Optimizer) -> None:
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
            if not sees_code and self.client.is_backward_unseen(loss, self._leaves):
                around.callback(hide_modes())
            around.enter_context(self._taking_over())
            super()._backward(loss)

    def _outputs(self, returned: Any) -> StepOutputs:
        return StepOutputs(returned, self._comes_late)

    def _as_captured(self, plan: StepPlan, recorder: Recorder) -> AbstractContextManager[None]:
        """Set up what surrounds a capture, but for its tracers: here every value is real."""
        assert self._places is not None, "whole steps have places"
        seen = next((m.draws for m in plan.mechanisms if m.draws is not None), None)
        generators = Generators(self._held, self.module.device, seen=seen)
        return self.surrounded(recorder, self._places, [*self._held], generators)

    def _undone(self, args: tuple[Any, ...]) -> AbstractContextManager[Undone]:
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
        for group in self.optimizer.param_groups:
            drop_gradients(group["params"])

    def _replayed(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor]
    ) -> list[Result]:
        """Replay the step; return results under the names that :meth:`_eager` gives them."""
        with ExitStack() as around:
            given = args[0]
            if plan.head is None:
                plan.take(batch)
            else:
                undone = around.enter_context(self._undone(args))
                given, batch = self._leaving(plan, undone.arguments)
            plan.present.batch = given
            return self._launched(plan, given, batch)

    def _leaving(
        self, plan: StepPlan, arguments: Sequence[Any]
    ) -> tuple[dict[str, Any], Sequence[Tensor]]:
        """Run the head of a step, and take in what leaves it."""
        found: list[Any] = []

        def end(leaving: dict[str, Any], tensors: Sequence[Tensor]) -> None:
            plan.take(tensors)
            found.extend((leaving, tensors))
            raise HeadEnded

        assert plan.head is not None
        with suppress(HeadEnded):
            step = partial(self.client.run, *arguments)
            plan.head.run(step, partial(self._at_end, plan, end))
        leaving, tensors = found
        return leaving, tensors

    def _launched(self, plan: StepPlan, batch: Any, tensors: Sequence[Tensor]) -> list[Result]:
        for mechanism in plan.mechanisms:
            for instruction in mechanism.before if mechanism.repeated is None else ():
                instruction()
        for name, graph in plan.graphs.items():
            if name == plan.first_backward:
                for load in plan.loads():
                    load()
            graph.replay()
        plan.attach()
        stored = plan.effects.results(batch, tensors)
        found = plan.outputs.results(plan.outputs.hand_out()) + stored + _logged(plan.logged())
        return found + [result for step in plan.behind for result in step.results()]

    def check_update(self, replay: Callable[[], None]) -> bool:
        """Verify a captured optimizer step on the present gradients.

        True: the replay is the step, which is taken. Else all is as before.
        """
        state, held = self._state(), self._held
        parts = PythonSnapshot(held), Generators(held, self.module.device), self._random()
        written = self._verifier.written["update"]
        ways = Comparison(state, self.update, replay, parts, written, goes_on=True)
        held.clear()
        return self._verifier.compare(ways, "the captured optimizer step was not verified")


def _logged(tensors: Sequence[tuple[str, Tensor]]) -> list[Result]:
    """List what a step has logged."""
    return [Result(name, tensor.detach()) for name, tensor in tensors]


# ------------------------------------------------------------------ calls


class CallDiffers(CallRefused, VerificationError):
    """The graphs of one call compute something else than the call itself."""


class CallChecks:
    """Runs captured calls both ways from one state.

    For each call the module's own forward and backward run on arguments of the observed call, and
    then its graphs, both with one set of random gradients of the outputs. Outputs, buffers and all
    gradients are compared. Hooks on parameters do not run.
    """

    def __init__(self, verifier: Verifier, root: nn.Module, device: torch.device) -> None:
        self._verifier, self._root, self._device = verifier, root, device

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
        run = _CallRun(self._root, self._device, graphed, again=again)
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
        self, root: nn.Module, device: torch.device, graphed: GraphedCall, *, again: bool
    ) -> None:
        self._device = device
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
        with torch.inference_mode(False), as_observed(call), without_hooks(list(self._parameters)):
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
