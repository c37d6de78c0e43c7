"""From an observed step to graphs: every call a plan of its own, captured in the observed order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_graphs.core.autograd.gradients import GradientBuffers, LentGradients
from lightning_graphs.core.autograd.lending import ReplayOrder, Source
from lightning_graphs.core.capturing import CallableCapture, CaptureSettings
from lightning_graphs.core.graph import GraphPool
from lightning_graphs.core.graphed import Stores
from lightning_graphs.core.private.torch import (
    capture_unseen,
    has_compiled_anything,
    has_gradient_hooks,
)
from lightning_graphs.errors import GraphError, ReplayError
from lightning_graphs.training.costs.memory import NoRoomError, code_captured
from lightning_graphs.training.guards.own_code import OwnCode
from lightning_graphs.training.guards.python_state import Attributes
from lightning_graphs.training.modules.entry import original_call
from lightning_graphs.training.modules.observation import Direction, Observation, ObservedCall
from lightning_graphs.training.modules.sites import Baked, CallRefused, CapturedCalls, Site
from lightning_graphs.training.statistics import CaptureCost, capture_cost

Result = TypeVar("Result")
_REQUIRES_GRAD = attrgetter("requires_grad")


def pattern_of(calls: Sequence[ObservedCall], observation: Observation) -> Hashable:
    """What tells one step from another with the same batch: which calls, and in which order."""
    number = {call: i for i, call in enumerate(calls)}
    return (
        tuple((call.ordinal, call.key()) for call in calls),
        tuple(
            (number[call], direction) for call, direction in observation.passes if call in number
        ),
    )


@dataclass(frozen=True, slots=True)
class Means:
    """What captures are made with."""

    root: LightningModule  # the user's module
    own: OwnCode  # tells its author's code from others'
    pool: GraphPool  # whose memory, stream and backend the graphs use
    gradient_buffers: GradientBuffers  # where parameter gradients go
    lends: bool = True  # outputs that the next graph reads are handed out without a copy
    # Backward graphs write the gradients of parameters themselves. Where somebody asks for the
    # gradients of some parameters only, autograd must know of them.
    direct: bool = True


def capture_calls(
    calls: Sequence[ObservedCall], observation: Observation, means: Means, baked: Baked
) -> CapturedCalls:
    """Capture forward and backward of these calls in the order in which the step ran them."""
    # No call is inside of another. Those without autograd share graphs that are made when called.
    for call in calls:
        _refuse_other_submodules(call)
    captured = CapturedCalls(calls, observation)
    calls = [call for call in calls if call.grad_enabled]
    together = {call for call in calls if not _is_detached(call)}
    pool = means.pool
    groups = [(pool, [(c, d) for c, d in observation.passes if c in together])]
    for call in calls:
        if call not in together:
            # Its backward, should one run in the same step, finds its activations whatever ran in
            # between. The next step makes them void.
            apart = pool.beside()
            groups.append((apart, [(call, "forward"), (call, "backward")]))
    captures: dict[ObservedCall, _Capture] = {}
    # The observed step was the warm-up. Compiled code compiles anew for a capture, because of
    # autocast's cache, which is off.
    warm = not has_compiled_anything()
    try:
        with capture_cost(pool.backend) as cost:
            for memory, passes in groups:
                own, order = captured.group(memory)
                for call in dict.fromkeys(call for call, _ in passes):
                    here = replace(means, pool=own)
                    captures[call] = _Capture(call, here, order, baked, warm=warm)
                for call, direction in passes:
                    if means.lends and direction == "forward":
                        captures[call].read_in_place(captures)
                    elif means.lends:
                        captures[call].read_gradients_in_place(captures)
                    captures[call].run(direction)
    except BaseException:
        for capture in captures.values():
            capture.passes.abandon()
        captured.abandon()
        raise
    for capture in captures.values():
        captured.put(capture.finish())
    # All of them share the memory, whose size takes long to read: the first one stands for it.
    for capture in list(captures.values())[:1]:
        capture.cost.added.update(cost.added)
    for capture in captures.values():
        capture.passes.outputs.settle()
    return captured


def _refuse_other_submodules(call: ObservedCall) -> None:
    if len(list(call.module.modules())) != len(call.training):
        raise CallRefused(
            call,
            "A module is captured as it was when a step was observed.",
            "submodules were added or removed since",
            "do so before the fit, or in the first steps",
        )


def capture_alone(call: ObservedCall, means: Means, baked: Baked) -> Site:
    """Capture a call without autograd, which any other may follow."""
    pool = means.pool
    own = pool.beside(pool.handle)
    capture = _Capture(call, replace(means, pool=own), ReplayOrder(), baked, warm=False)
    try:
        with capture_cost(pool.backend) as cost:
            capture.run("forward")
            capture.run("backward")
    except BaseException:
        capture.passes.abandon()
        own.close()
        raise
    capture.cost.added.update(cost.added)
    return capture.finish()


def _is_detached(call: ObservedCall) -> bool:
    return call.requires_grad and call.backwards == 0


def _of_module(name: str, error: ReplayError) -> None:
    """Let a refused backward pass say what a user of the callback can do about it."""
    error.observed = f"in the backward pass of `{name}`: {error.observed or 'they were released'}"
    error.remedy = (
        f'GraphCapture(exclude=["{name}"]) runs that module eagerly; with automatic optimization '
        'scope="step" captures such passes as well'
    )
    error.args = (error.rule, error.observed, error.remedy)


class _Capture:
    """The capture of one call, as it was observed."""

    def __init__(
        self,
        call: ObservedCall,
        means: Means,
        order: ReplayOrder,
        baked: Baked,
        *,
        warm: bool,  # it has just run, as it is captured
    ) -> None:
        self._call = call
        self._restored = partial(as_observed, call, means.pool.backend.device_type)
        with self._restored():
            self._attributes = Attributes(call.module)
        self._baked = baked
        self.pool = pool = means.pool
        self.cost = CaptureCost()
        self._written: dict[str, Tensor] = {}
        self._stores: dict[Direction, Stores] = {"forward": (), "backward": ()}
        hooked = any(map(has_gradient_hooks, call.module.parameters()))
        direct = means.direct and not hooked and not call.partial
        here = CaptureSettings(pool, order, direct, True, gradient_buffers=means.gradient_buffers)

        def prepare() -> CallableCapture:
            original = original_call(call.module)
            capture = CallableCapture(call.module, call.args, call.kwargs, here, original)
            capture.draws = call.draws
            capture.gradient_strides = call.gradient_strides
            capture.used_elsewhere = call.used_elsewhere
            if not warm:
                with baked.loose.kept():
                    self._left_alone(partial(capture.warm_up, 1))
            return capture

        started = perf_counter()
        self.passes = self._explained(prepare)
        self.cost.ms = (perf_counter() - started) * 1e3

    def read_in_place(self, earlier: Mapping[ObservedCall, _Capture]) -> None:
        """Copy no argument that a graph of the same pool has already: as its output, or its own."""
        found: dict[int, tuple[Tensor, Source]] = {}
        for leaf, sources in self._call.sources.items():
            for seen in sources:
                capture = self._beside(seen.call, earlier)
                if capture is None or (leaf in found and not seen.returned):
                    continue
                passes, index = capture.passes, seen.index
                found[leaf] = passes.lend(index) if seen.returned else passes.share(index)
        if found:
            self.passes.read_in_place(found)

    def read_gradients_in_place(self, others: Mapping[ObservedCall, _Capture]) -> None:
        """Copy no gradient of an output that only one call of the same pool was given."""
        # A tensor that is returned twice has two gradients, and no memory of one is for both.
        given: dict[int, list[tuple[Tensor, LentGradients] | None]] = {}
        for other in others.values():
            for leaf, makers in other._call.sources.items():
                mine = [made.index for made in makers if made.returned and made.call is self._call]
                lent = other.passes.lent_gradient(leaf) if other.pool is self.pool else None
                for output in mine:
                    given.setdefault(output, []).append(lent if len(mine) == 1 else None)
        alone = ((output, found[0]) for output, found in given.items() if len(found) == 1)
        self.passes.read_gradients_in_place({i: lent for i, lent in alone if lent is not None})

    def _beside(
        self, call: ObservedCall, captures: Mapping[ObservedCall, _Capture]
    ) -> _Capture | None:
        """The capture of another call over the same pool, if it has begun."""
        capture = captures.get(call)
        if capture is None or capture.pool is not self.pool or call is self._call:
            return None
        return capture

    def run(self, direction: Direction) -> None:
        passes = self.passes
        started = perf_counter()
        self._baked.left()  # by others, since
        capture = passes.capture_forward if direction == "forward" else passes.capture_backward
        self._explained(partial(self._left_alone, capture))
        written, self._stores[direction] = self._baked.left()
        self._written |= written
        self.cost.ms += (perf_counter() - started) * 1e3

    def finish(self) -> Site:
        """The graphs, at the end of all captures."""
        with self._restored():
            graphed = self.passes.finish()
            graphed.forward_stores = self._stores["forward"]
            graphed.backward_stores = self._stores["backward"]
            graphed.explain = partial(_of_module, self._call.name)
            parameters = list(self._call.module.parameters())
            required = list(map(_REQUIRES_GRAD, parameters))
        return Site(self._call, graphed, self.cost, parameters, required, self._written)

    def _explained(self, run: Callable[[], Result]) -> Result:
        """Run a part as the call was run; a failure names the call, and leaves nothing behind."""
        call = self._call
        try:
            # Leaving inference mode turns autograd on, whatever it was.
            with (
                code_captured("A captured module"),
                torch.inference_mode(False),
                self._restored(),
                capture_unseen([]),
            ):
                return run()
        except NoRoomError:
            raise
        except GraphError as error:
            raise CallRefused(call, error.rule, error.observed, error.remedy) from error

    def _left_alone(self, run: Callable[[], Result]) -> Result:
        return self._baked.left_alone(run, self._call.module, self._attributes)


@contextlib.contextmanager
def as_observed(call: ObservedCall, device_type: str) -> Iterator[None]:
    """Let the module be in the state in which an observed call found it, while the body runs.

    Autocast, grad mode, default dtype, train/eval flags and ``requires_grad`` of its parameters.
    """
    modules, parameters = list(call.module.modules()), list(call.module.parameters())
    flags = [m.training for m in modules]
    required = [p.requires_grad for p in parameters]
    _set_flags(modules, call.training)
    _set_requires_grad(parameters, [p not in call.frozen for p in parameters])
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(call.kernels.default_dtype)
    try:
        with (
            torch.set_grad_enabled(call.grad_enabled),
            torch.autocast(
                device_type,
                dtype=call.autocast,
                enabled=call.autocast is not None,
                cache_enabled=False,
            ),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        _set_flags(modules, flags)
        _set_requires_grad(parameters, required)


def _set_flags(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        if module.training is not flag:  # setting an attribute of a module takes long
            module.training = flag


def _set_requires_grad(parameters: Sequence[nn.Parameter], required: Sequence[bool]) -> None:
    for parameter, require in zip(parameters, required, strict=True):
        if parameter.requires_grad is not require:
            parameter.requires_grad_(require)
