"""Runs a region both ways from one state, and compares."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_graphs.autograd.backward import unrepeated, zero_gradient
from lightning_graphs.autograd.nodes import gradients_kept_apart
from lightning_graphs.device.generators import Generators, RandomState
from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    ReplayError,
    VerificationError,
    first_line,
    in_one_line,
)
from lightning_graphs.lightning.context import TrainingContext
from lightning_graphs.lightning.logs import LogRecorder
from lightning_graphs.policy.budget import is_out_of_memory
from lightning_graphs.private.callsite import stacklevel_of_user
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import without_hooks
from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.calls import CallRefused, GraphedCall, as_observed
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.regions.tolerance import NONE, Tolerance, difference, size
from lightning_graphs.regions.written import WrittenMemory
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import (
    Part,
    PythonSnapshot,
    RegionState,
    Result,
    Snapshot,
    fingerprints_of,
    results_in,
)
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.batch import new_results
from lightning_graphs.watch.object_graph import UnregisteredTensors, iter_objects
from lightning_graphs.watch.side_effects import Places
from lightning_graphs.watch.tracers import rates_exchanged

# ------------------ Runs a part of a step eagerly and as graphs, from one state, and compares the

_Computed = TypeVar("_Computed")

_RULE = "A replay must compute what the eager step computes, to the bit or within its rounding."
_REMEDY = (
    "look for Python values that the step reads and that change out of sight (a context variable, "
    "the state of a library, a file), and make them tensors or attributes"
)
_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A part of a step that can be run eagerly, and as graphs."""

    eager: Callable[[], list[Result]]  # runs it eagerly; what it computed and changed, in place
    replayed: Callable[[], list[Result]]  # replays it; the same results under the same names
    take: Callable[[], Snapshot]  # of the state from which both start
    written: WrittenMemory | None = None  # what both write beside that; None for nothing
    spare: Sequence[Tensor] = ()  # memory that is overwritten before it is read again


class Verifier:
    """Decides which steps are verified, and compares a part of one with its replay.

    The first time, an eager run before all others shows what memory is written, and is undone. The
    eager run that is compared leaves a fingerprint of every result. Where the bits of a replay
    from the same state differ, it runs eagerly twice more and replays once more, now with copies of
    what differs, and asks the :class:`~differences.Tolerance`.
    Afterwards everything is as before. Hooks do not run, logs do not reach Lightning and metrics
    are not updated. What the step does to the world outside of module, optimizer and generators (a
    file that it writes) it does once more for each run.
    """

    def __init__(self, fit: TrainingContext) -> None:
        self.root, self.budget, self.ranks = fit.module, fit.budget, fit.ranks
        self._statistics = fit.statistics
        verify = fit.options.verify
        self.is_on = verify is not False
        self.every = 0 if isinstance(verify, bool) else verify
        self._said: set[str] = set()
        # What code writes beside its state, by what tells how it goes but for shapes
        self.written: defaultdict[Hashable, WrittenMemory] = defaultdict(WrittenMemory)
        precision = str(fit.trainer.precision_plugin.precision)
        self._tolerance = Tolerance(self.root.device.type, _ARITHMETIC.get(precision))

    @property
    def is_due(self) -> bool:
        """Whether graphs that were verified before are verified again in this step."""
        return self.every > 0 and self.root.global_step % self.every == 0

    def compare(self, ways: Comparison, what: str, tolerance: Tolerance | None = None) -> None:
        """Compare both ways, or say that there was no memory for it."""
        self._statistics.comparisons += 1
        try:
            kept = self.ranks.together(ways.take)
            try:
                # FSDP2 frees and fills all parameters anew
                if ways.written is not None and not self.ranks.whole_steps_only:
                    shown = partial(self._unreduced, ways.eager)
                    ways.written.keep_with(kept, shown, ways.spare, self._run)
                self._require(ways, kept, tolerance or self._tolerance)
            finally:
                kept.restore()
                del kept
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._say(what, first_line(error))
        finally:
            if self.root.device.type == "cuda":
                torch.cuda.empty_cache()  # of the eager run and the copy of the state

    def _unreduced(self, way: Callable[[], object]) -> None:
        """Run it without a reduction over ranks, which would write all of DDP's buckets."""
        ddp = self.ranks.ddp
        with nullcontext() if ddp is None else ddp.no_sync():
            way()

    def _run(self, way: Callable[[], _Computed]) -> _Computed:
        return self.ranks.together(way, exchanges=True)

    def _require(self, ways: Comparison, kept: Snapshot, tolerance: Tolerance) -> None:
        expected = self._run(ways.eager)
        names = [result.name for result in expected]
        known = fingerprints_of([result.value for result in expected], together=True)
        del expected
        kept.restore()
        found = self._run(ways.replayed)
        self.ranks.together(partial(self._require_names, names, [r.name for r in found]))
        now = fingerprints_of([result.value for result in found], together=True)
        del found
        differing = {n for n, a, b in zip(names, known, now, strict=True) if a != b}
        if self.ranks.any(bool(differing)):
            kept.restore()
            self._require_values(ways, kept, differing, tolerance)

    def _require_values(
        self,
        ways: Comparison,
        kept: Snapshot,
        differing: set[str],  # and what shares a fingerprint with these
        rule: Tolerance,
    ) -> None:
        again = self._run(ways.eager)
        held = {r.name: r.value.detach().clone() for r in again if r.name in differing}
        updates = {
            r.name: difference(r.value, kept.saved(r.value).to(r.value.device)).norm
            for r in again
            if r.name in held and r.gradient
        }
        gradients = math.hypot(*(size(r.value) for r in again if r.is_gradient))
        del again
        kept.restore()
        third = self._run(ways.eager)
        noise = {r.name: difference(r.value, held[r.name]) for r in third if r.name in held}
        del third
        kept.restore()
        results = self._run(ways.replayed)

        def judge() -> None:
            changed, unjudged = set(), set()
            for result in results:
                eager = held.get(result.name)
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
                    raise VerificationError(
                        _RULE,
                        f"{self._where}, {result.name} differs by up to {apart.largest:.3g}; two "
                        f"eager runs differ by up to {runs.largest:.3g}",
                        _REMEDY,
                    )
                if result.is_gradient and rule.is_rounding(eager, apart):
                    unjudged.add(result.name)

        self.ranks.together(judge)

    def _require_names(self, eager: Sequence[str], replayed: Sequence[str]) -> None:
        ways = (("the eager step", eager, replayed), ("the replay", replayed, eager))
        for way, names, others in ways:
            known = set(others)
            for name in names:
                if name not in known:
                    raise VerificationError(_RULE, f"{self._where}, only {way} has {name}", _REMEDY)

    @property
    def _where(self) -> str:
        return f"at step {self.root.global_step}"

    def _say(self, line: str, reason: str) -> None:
        """Warn, once in a fit for each line, that there was no memory for a check."""
        if line not in self._said:
            self._said.add(line)
            rank_zero_warn(f"GraphCapture: {line}: {reason}", stacklevel=stacklevel_of_user())


# ------------------ Verifies all that is captured: whole steps, optimizer steps by themselves, cal


class Verification(StepBody):
    """Runs captured steps both ways from one state, and optimizer steps by themselves."""

    def __init__(self, agreement: Verifier, body: StepBody, places: Places | None = None) -> None:
        super().__init__(body.fit, body.optimizer, body.capturable, body.observers)
        self._places = places
        self._agreement = agreement

    def _state(self, written: dict[str, Tensor], others: Sequence[Tensor] = ()) -> RegionState:
        unseen = UnregisteredTensors(self.module, iter_objects(self.module)).small
        parts = self.module, self.optimizer, self._scaler
        return RegionState.of_step(*parts, written=written, unseen=unseen, others=others)

    def _take(self, state: RegionState, room: Callable[[int], int], *parts: Part) -> Snapshot:
        return state.take(room, *parts, RandomState(self.module.device, self.module.modules()))

    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """With rates on the device: kernels round others otherwise."""
        rates = None if self.capturable is None else self.capturable.live_rates()
        with rates_exchanged(self.fit.watch.schedulers, self.optimizer, rates):
            super().update(cut)

    def check(self, plan: StepPlan, args: tuple[Any, ...]) -> None:
        """Verify a plan with the batch that is about to be trained on."""
        batch = plan.call.match((args[0],), {})
        assert batch is not None, "the plan was found for this batch"
        plan.rewind_host()
        for name in plan.stores:  # another step may have set them otherwise
            plan.store(name)
        state, budget = self._state(plan.loose, plan.outside.parameters), self._agreement.budget

        def take() -> Snapshot:
            parts = () if plan.host is None else (plan.host,)
            # The gradients of the graph lie where the eager step would compute
            return self._take(state, lambda n: budget.room_for(n, plan.gradients.held), *parts)

        ways = Comparison(
            partial(self._eager, plan, args, batch, state),
            partial(self._replayed, plan, args, batch, state),
            take,
            self._agreement.written[plan.conditions],
            plan.gradients.buffers,
        )
        with budget.nothing_kept():
            self._agreement.compare(ways, "a captured step was not verified")
        plan.fill(batch)

    def _eager(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor], state: RegionState
    ) -> list[Result]:
        """Run the step eagerly; what it computed, and what it changed, in place."""
        if not plan.adds:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        recorder = LogRecorder(self.module)
        own = StaticInputs(batch).tensors  # it may change its batch in place
        arguments = (substitute(args[0], own), *args[1:])
        memory = self._agreement.budget.memory_of(plan.graphs["forward"])
        # They are the graph's own, and not lent: somebody may keep them
        gradients = plan.gradients.taking_over() if self._agreement.ranks.are_one else nullcontext()
        assert self._places is not None, "whole steps have places"
        seen = None if plan.host is None else plan.host.generators
        generators = Generators(iter_objects(self.module), self.module.device, seen=seen)
        clocks: AbstractContextManager[None] = nullcontext()
        if plan.clocks is not None:
            clocks = plan.clocks.repeated(self.fit.watch.own)
        with (
            # But for the stand-ins of a capture: here every value is real
            self.surrounded(recorder, self._places, generators),
            memory,
            gradients,
            clocks,
        ):
            results = list if plan.places is None else plan.places.eager_results()
            output = self.run(arguments, plan.conditions.phase, recorder)
            stored = results()
        if plan.changes is not None:
            stored += new_results(arguments[0], own)
        output.finish_capture()
        return _returned(output.hand_out()) + state.results() + stored

    def _replayed(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor], state: RegionState
    ) -> list[Result]:
        """The same of a replay."""
        plan.fill(batch)
        for number in plan.numbers:
            number.refresh()
        for name, graph in plan.graphs.items():
            if name == ("backward" if "backward" in plan.graphs else "forward"):
                plan.adopt()
            graph.replay()
        plan.attach()
        stored = [] if plan.places is None else plan.places.results()
        if plan.changes is not None:
            own = StaticInputs(batch).tensors
            changed = substitute(args[0], own)
            plan.changes.apply(changed, copies=False)
            stored += new_results(changed, own)
        return _returned(plan.outputs.hand_out()) + state.results() + stored

    def check_update(self, replay: Callable[[], None]) -> None:
        """Verify a captured optimizer step on the gradients that there are."""
        if not self._agreement.is_on:
            return
        state, room = self._state({}), self._agreement.budget.room_for
        held = list(iter_objects(self.module))
        python = PythonSnapshot(held), Generators(held, self.module.device)

        def results(step: Callable[[], None]) -> list[Result]:
            step()
            return state.results()

        runs = partial(results, self.update), partial(results, replay)
        written = self._agreement.written["update"]
        ways = Comparison(*runs, partial(self._take, state, room, *python), written)
        self._agreement.compare(ways, "the captured optimizer step was not verified")


_LOSSES = ("output", "output['loss']", 'output["loss"]')


def _returned(value: Any) -> list[Result]:
    """What a step has returned."""
    return [
        replace(output, name="the loss") if output.name in _LOSSES else output
        for output in results_in(value, "output")
    ]


# ------------------------------------------------------------------ calls of modules


class CallDiffers(CallRefused, VerificationError):
    """The graphs of one call compute something else than the call itself."""


class CallChecks:
    """Runs captured calls both ways from one state.

    For each call the module's own forward and its backward run on arguments that the call has had,
    and then its graphs, with the same random gradients of the outputs. Outputs, buffers and all
    gradients are compared. Hooks on parameters do not run.
    """

    def __init__(self, agreement: Verifier) -> None:
        self._agreement = agreement

    def check(self, sites: Sequence[GraphedCall], *, again: bool = False) -> None:
        """Verify the graphs of a step before it begins."""
        # A call of whose outputs somebody still holds the memory is left out, as by training.
        for site in sites:
            site.graphed.order.begin()
            self.check_site(site, again=again)

    def check_site(self, site: GraphedCall, *, again: bool = False) -> None:
        if not self._agreement.is_on:
            return
        call = site.call
        run = _CallRun(self._agreement, site, again=again)
        code = call.module, call.training, call.frozen, call.grad_enabled, call.recomputed
        written = self._agreement.written[code]
        ways = Comparison(run.eager, run.replayed, run.take, written)
        tolerance = Tolerance(run.device.type, call.autocast)
        try:
            self._agreement.compare(ways, "a captured module was not verified", tolerance)
        except GraphError as error:
            if again and isinstance(error, ReplayError):
                raise
            raise CallDiffers(call, error.rule, error.observed, error.remedy) from error


class _CallRun:
    """One captured call with its arguments, and the state that it changes."""

    def __init__(self, agreement: Verifier, site: GraphedCall, *, again: bool) -> None:
        self._root = root = agreement.root
        self.device = root.device
        self._budget = agreement.budget
        self._site = site
        call = site.call
        signature, samples = Signature.of(call.args, call.kwargs)
        self._names = signature.tensor_names
        self._samples = site.graphed.inputs.tensors if again else samples
        self._backward = site.graphed.backward_pass
        tensors = {f"buffer `{call.name}.{n}`": b for n, b in call.module.named_buffers()}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in site.written.items()}
        self._parameters = self._differentiable()
        unseen = [*site.baked.environment.loose.small, *call.module.parameters()]
        parameters = {name: parameter for parameter, name in self._parameters.items()}
        self._state = RegionState(tensors, parameters, unseen)
        self._python = (
            PythonSnapshot(iter_objects(call.module)),
            Generators(iter_objects(root), root.device),
        )

    def _differentiable(self) -> dict[Tensor, str]:
        """The parameters that the call gives a gradient, those outside of the module among them."""
        call, backward = self._site.call, self._backward
        found: dict[Tensor, None] = {p: None for p in call.module.parameters()}
        if backward is not None:
            direct = backward.direct
            found |= dict.fromkeys(backward.parameters.own if direct is None else direct.parameters)
        names: dict[Tensor, str] = {p: f"`{name}`" for name, p in self._root.named_parameters()}
        trained = (p for p in found if p not in call.frozen)
        return {p: names.get(p, f"parameter {i} of `{call.name}`") for i, p in enumerate(trained)}

    def take(self) -> Snapshot:
        random = RandomState(self.device, self._root.modules())
        return self._state.take(self._budget.room_for, *self._python, random)

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
        for parameter in self._parameters:
            parameter.grad = None
        # Copies: what reads or writes them past torch must not reach the samples.
        tensors = StaticInputs(self._samples).tensors
        args, kwargs = substitute((call.args, dict(call.kwargs)), tensors)
        with torch.inference_mode(False), as_observed(call), without_hooks(list(self._parameters)):
            returned = forward(*args, **kwargs)
            outputs = leaves_of(returned, Tensor)
            with torch.autocast(self.device.type, enabled=False):
                self._pull_back(outputs, tensors, direct=direct)
        found = results_in(returned, "output", f" of `{call.name}`")
        for name, tensor in zip(self._names, tensors, strict=True):
            title = f"{name} of `{call.name}`"
            # Kernels outside of torch, and `x.data`, write an argument unseen.
            found.append(Result(f"{title} after the call", tensor.detach()))
            if tensor.is_leaf and tensor.grad is not None:
                found.append(Result(f"the gradient of {title}", tensor.grad, is_gradient=True))
        return found + self._state.results()

    def _pull_back(
        self, outputs: Sequence[Tensor], arguments: Sequence[Tensor], *, direct: bool
    ) -> None:
        """Give arguments and parameters their gradients, for random ones of the outputs."""
        outputs = [output for output in outputs if output.requires_grad]
        # Everything that may have a gradient, each tensor once
        wanted = [*dict.fromkeys(t for t in (*arguments, *self._parameters) if t.requires_grad)]
        if self._backward is None or not outputs or not wanted:
            return
        generator = torch.Generator(self.device).manual_seed(0)
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
