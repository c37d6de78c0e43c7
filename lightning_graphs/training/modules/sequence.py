"""Captures the calls of an observed step, each as graphs of its own, in the observed order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_graphs.core.arguments.contents import Contents
from lightning_graphs.core.arguments.snapshot import Snapshot
from lightning_graphs.core.autograd.backward import GradientMemory, LentGradients
from lightning_graphs.core.autograd.lending import ReplayOrder, Source
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
from lightning_graphs.training.verify.written import WrittenMemory


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
                    capture = here[call] = _Capture(call, means, own, order, baked)
                    captures.append(capture)
                    if not warm:
                        capture.warm_up(1)
                    capture.begin()
                for call, way in passes:
                    here[call].run(way, here if means.lends else {})
            sites = [capture.site() for capture in captures]
        for site in sites:
            site.graphed.outputs.settle()
        means.check(sites)
    except BaseException:
        for capture in captures:
            capture.abandon()
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


class _Capture(CallableCapture):
    """The capture of one call, as it was observed."""

    @calls_observed
    def __init__(
        self, call: ObservedCall, means: Means, pool: GraphPool, order: ReplayOrder, baked: Baked
    ) -> None:
        self._observed = call
        self._baked = baked
        self._cost = CaptureCost()
        self._written: dict[str, Tensor] = {}
        self._stores: dict[Direction, Stores] = {"forward": (), "backward": ()}
        hooked = any(map(has_gradient_hooks, call.module.parameters()))
        summed = means.adds and call.shares_parameters
        direct = means.direct and not (hooked or summed or call.partial)
        settings = CaptureSettings(pool, order, direct, True, gradients=means.gradients)
        with self._explained():
            self._attributes = Contents(held_in(call.module))
            made_of = call.args, call.kwargs, settings, call.original, call.known
            super().__init__(call.module, *made_of)

    @calls_observed
    def warm_up(self, iterations: int) -> None:
        """Run the call, and put back what it writes: a run before that one shows what."""
        run, loose = partial(super().warm_up, iterations), self._baked.environment.loose
        kept = loose.snapshot = Snapshot(loose.tensors)
        try:
            with self._explained(), kept.undone(), self._refusing():
                WrittenMemory().keep_with(kept, run)
                run()
        finally:
            loose.snapshot = None

    def _sources_of_arguments(
        self, others: Mapping[ObservedCall, _Capture]
    ) -> dict[int, tuple[Tensor, Source]]:
        """Arguments that are outputs of other graphs, or arguments of them, too."""
        found: dict[int, tuple[Tensor, Source]] = {}
        for leaf, sources in self._observed.sources.items():
            for seen in sources:
                if seen.call not in others or (leaf in found and not seen.returned):
                    continue
                other, index = others[seen.call], seen.index
                found[leaf] = other.lend(index) if seen.returned else other.share(index)
        return found

    def _sources_of_gradients(
        self, others: Mapping[ObservedCall, _Capture]
    ) -> dict[int, tuple[Tensor, LentGradients]]:
        """Gradients of outputs that are those of arguments of one other call alone."""
        # A tensor that is returned twice has two gradients, and no memory of one is for both.
        given: dict[int, list[tuple[Tensor, LentGradients] | None]] = {}
        for other in others.values():
            for leaf, makers in other._observed.sources.items():
                mine = [m.index for m in makers if m.returned and m.call is self._observed]
                for output in mine:
                    lent = other.lent_gradient(leaf) if len(mine) == 1 else None
                    given.setdefault(output, []).append(lent)
        alone = ((output, found[0]) for output, found in given.items() if len(found) == 1)
        return {output: lent for output, lent in alone if lent is not None}

    @calls_observed
    def run(self, way: Direction, lenders: Mapping[ObservedCall, _Capture]) -> None:
        """Capture a pass, which copies nothing in that graphs of these captures have already."""
        self._baked.left()  # by others, since
        with self._explained(), self._refusing():
            if way == "forward":
                self.capture_forward(self._sources_of_arguments(lenders))
            else:
                self.capture_backward(self._sources_of_gradients(lenders))
        written, self._stores[way] = self._baked.left()
        self._written |= written

    def site(self) -> Site:
        """The graphs, at the end of all captures."""
        with as_observed(self._observed):
            stores = self._stores["forward"], self._stores["backward"]
            graphed = self.finish(stores, partial(_of_module, self._observed.name))
            parameters = list(self._observed.module.parameters())
            required = list(map(REQUIRES_GRAD, parameters))
        made = self._observed, graphed, self._baked, self._cost
        return Site(*made, parameters, required, self._written)

    def _refusing(self) -> AbstractContextManager[None]:
        """Refuse what the module's code does that no replay can do."""
        environment, reads = self._baked.environment, self._baked.reads
        return environment.refusing_in(self._observed.module, self._attributes, reads)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Run the body as the call was run; a failure names the call, and leaves nothing behind."""
        call, started = self._observed, perf_counter()
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
