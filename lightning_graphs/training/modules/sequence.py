"""Captures the calls of an observed step, each as graphs of its own, in the observed order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_graphs.core.arguments.contents import Contents
from lightning_graphs.core.autograd.backward import GradientMemory, LentGradients
from lightning_graphs.core.autograd.lending import ReplayOrder, Source
from lightning_graphs.core.backends.undo import writes_undone
from lightning_graphs.core.callsite import calls_observed
from lightning_graphs.core.graph import GraphPool
from lightning_graphs.core.graphed import Stores
from lightning_graphs.core.passes import CallableCapture, CaptureSettings
from lightning_graphs.core.private.torch import (
    capture_unseen,
    has_gradient_hooks,
)
from lightning_graphs.errors import GraphError, ReplayError
from lightning_graphs.training.costs.memory import NoRoomError
from lightning_graphs.training.fit import CompiledCode
from lightning_graphs.training.guards.own_code import OwnCode
from lightning_graphs.training.guards.side_effects import code_captured
from lightning_graphs.training.guards.walkers import held_in
from lightning_graphs.training.modules.observation import Direction, Observation, ObservedCall, Pass
from lightning_graphs.training.modules.sites import REQUIRES_GRAD, Baked, CallRefused, Site
from lightning_graphs.training.statistics import CaptureCost, capture_cost


@dataclass(frozen=True, slots=True)
class Means:
    """What captures are made with."""

    root: LightningModule  # the user's module
    own: OwnCode  # tells its author's code from others'
    pool: GraphPool  # whose memory, stream and backend the graphs use
    gradients: GradientMemory  # where those of parameters go
    check: Callable[[Sequence[Site]], object]  # raises where graphs differ from the modules' code
    compiled: CompiledCode  # whether steps run any
    lends: bool = True  # outputs that the next graph reads are handed out without a copy
    # Backward graphs write the gradients of parameters themselves. Where somebody asks for the
    # gradients of some parameters only, autograd must know of them.
    direct: bool = True
    # Gradients of earlier steps are added to: autograd adds the sum of all uses of a parameter.
    adds: bool = False


def capture_step(
    calls: Sequence[ObservedCall], observation: Observation, means: Means
) -> tuple[list[Site], Baked]:
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
    # The backward of one that had none, should it run in the same step, finds its activations
    # whatever ran in between. The next step makes them void.
    alone = [call for call in recorded if call.requires_grad and call.backwards == 0]
    together = set(recorded) - set(alone)
    groups = [(means.pool, [(call, way) for call, way in observation.passes if call in together])]
    groups += [(means.pool.beside(), _both(call)) for call in alone]
    # The observed step was the warm-up. Compiled code compiles anew for a capture, because of
    # autocast's cache, which is off.
    return _captured(calls, groups, means, warm=not means.compiled.runs)


def capture_alone(call: ObservedCall, means: Means) -> Site:
    """Capture a call without autograd, which any other may follow."""
    sites, _ = _captured([call], [(means.pool, _both(call))], means, warm=False)
    return sites[0]


def _both(call: ObservedCall) -> list[Pass]:
    return [(call, "forward"), (call, "backward")]


def _captured(
    calls: Sequence[ObservedCall],
    groups: Sequence[tuple[GraphPool, Sequence[Pass]]],
    means: Means,
    *,
    warm: bool,  # the calls have just run, as they are captured
) -> tuple[list[Site], Baked]:
    """Capture passes in their order, each group of them over the memory of a pool."""
    baked = Baked(means.root, means.own, list(dict.fromkeys(call.module for call in calls)))
    captures: list[_Capture] = []
    pools: list[GraphPool] = []
    try:
        with capture_cost(means.pool.backend) as cost, baked.watched():
            for memory, passes in groups:
                own, order = memory.beside(memory.handle), ReplayOrder()
                pools.append(own)
                here: dict[ObservedCall, _Capture] = {}
                for call in dict.fromkeys(call for call, _ in passes):
                    here[call] = _Capture(call, replace(means, pool=own), order, baked, warm=warm)
                    captures.append(here[call])
                    here[call].passes.begin()
                for call, way in passes:
                    here[call].run(way, here if means.lends else {})
            sites = [capture.finish() for capture in captures]
        for capture in captures:
            capture.passes.outputs.settle()
        means.check(sites)
    except BaseException:
        for capture in captures:
            capture.passes.abandon()
        for pool in pools:
            pool.close()
        raise
    # All of them share the memory, whose size takes long to read: the first one stands for it.
    for site in sites[:1]:
        site.cost.added.update(cost.added)
    return sites, baked


def _of_module(name: str, error: ReplayError) -> None:
    """Let a refused backward pass say what a user of the callback can do about it."""
    error.observed = f"in the backward pass of `{name}`, {error.observed}"
    error.remedy = (
        f'write GraphCapture(exclude=["{name}"]), which runs that module eagerly; with automatic '
        'optimization scope="step" captures such passes as well'
    )
    error.args = (error.rule, error.observed, error.remedy)


class _Capture:
    """The capture of one call, as it was observed."""

    @calls_observed
    def __init__(
        self, call: ObservedCall, means: Means, order: ReplayOrder, baked: Baked, *, warm: bool
    ) -> None:
        self._call = call
        self._baked = baked
        self._cost = CaptureCost()
        self._written: dict[str, Tensor] = {}
        self._stores: dict[Direction, Stores] = {"forward": (), "backward": ()}
        hooked = any(map(has_gradient_hooks, call.module.parameters()))
        summed = means.adds and call.shares_parameters
        direct = means.direct and not (hooked or summed or call.partial)
        here = CaptureSettings(means.pool, order, direct, True, gradients=means.gradients)

        with self._explained():
            self._attributes = Contents(held_in(call.module))
            made = CallableCapture(call.module, call.args, call.kwargs, here, call.original)
            made.draws = call.draws
            made.gradient_strides = call.gradient_strides
            made.used_elsewhere = call.used_elsewhere
            if not warm:
                with (
                    baked.loose.kept(),
                    baked.left_alone(call.module, self._attributes),
                    writes_undone(partial(made.warm_up, 1)),
                ):
                    made.warm_up(1)
        self.passes = made

    def _read_arguments_in_place(self, others: Mapping[ObservedCall, _Capture]) -> None:
        """An argument may be the output of another graph, or an argument of it, too."""
        found: dict[int, tuple[Tensor, Source]] = {}
        for leaf, sources in self._call.sources.items():
            for seen in sources:
                if seen.call not in others or (leaf in found and not seen.returned):
                    continue
                passes, index = others[seen.call].passes, seen.index
                found[leaf] = passes.lend(index) if seen.returned else passes.share(index)
        if found:
            self.passes.read_in_place(found)

    def _read_gradients_in_place(self, others: Mapping[ObservedCall, _Capture]) -> None:
        """The gradient of an output may be that of an argument, if one call alone was given it."""
        # A tensor that is returned twice has two gradients, and no memory of one is for both.
        given: dict[int, list[tuple[Tensor, LentGradients] | None]] = {}
        for other in others.values():
            for leaf, makers in other._call.sources.items():
                mine = [made.index for made in makers if made.returned and made.call is self._call]
                for output in mine:
                    lent = other.passes.lent_gradient(leaf) if len(mine) == 1 else None
                    given.setdefault(output, []).append(lent)
        alone = ((output, found[0]) for output, found in given.items() if len(found) == 1)
        self.passes.read_gradients_in_place({i: lent for i, lent in alone if lent is not None})

    @calls_observed
    def run(self, way: Direction, lenders: Mapping[ObservedCall, _Capture]) -> None:
        """Capture a pass, which copies nothing in that graphs of these captures have already."""
        if way == "forward":
            self._read_arguments_in_place(lenders)
            capture = self.passes.capture_forward
        else:
            self._read_gradients_in_place(lenders)
            capture = self.passes.capture_backward
        self._baked.left()  # by others, since
        with self._explained(), self._baked.left_alone(self._call.module, self._attributes):
            capture()
        written, self._stores[way] = self._baked.left()
        self._written |= written

    def finish(self) -> Site:
        """The graphs, at the end of all captures."""
        with as_observed(self._call):
            graphed = self.passes.finish()
            graphed.forward_stores = self._stores["forward"]
            graphed.backward_stores = self._stores["backward"]
            graphed.explain = partial(_of_module, self._call.name)
            parameters = list(self._call.module.parameters())
            required = list(map(REQUIRES_GRAD, parameters))
        made = self._call, graphed, self._baked, self._cost
        return Site(*made, parameters, required, self._written)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Run the body as the call was run; a failure names the call, and leaves nothing behind."""
        call, started = self._call, perf_counter()
        try:
            # Leaving inference mode turns autograd on, whatever it was.
            with (
                code_captured("A captured module"),
                torch.inference_mode(False),
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
    """Let the module be in the state in which an observed call found it, while the body runs.

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
