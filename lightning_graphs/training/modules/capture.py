"""From an observed step to graphs: every call a plan of its own, captured in the observed order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from time import perf_counter
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import Parameter

from lightning_graphs.core.backend import PoolHandle
from lightning_graphs.core.callsite import CallSiteFinder
from lightning_graphs.core.capturing import CallableCapture
from lightning_graphs.core.gradients import GradientBuffers
from lightning_graphs.core.graph import CUDAGraph
from lightning_graphs.core.graphed import GraphedCallable
from lightning_graphs.core.order import ReplayOrder
from lightning_graphs.core.pool import GraphPool
from lightning_graphs.core.signature import Modes, Signature
from lightning_graphs.core.torch_private import accumulation_hooks, gradient_hooks, hook_tables
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.reporting import GraphRecord
from lightning_graphs.training.modules.observation import (
    Direction,
    Observation,
    ObservedCall,
    as_observed,
)
from lightning_graphs.training.python_state import (
    DRAWN,
    STORED,
    AttributeReads,
    Attributes,
    Generators,
)
from lightning_graphs.training.statistics import CaptureCost, Statistics, tensors_in_words

Result = TypeVar("Result")
OriginalForward = Callable[[nn.Module], Callable[..., Any]]
_REQUIRES_GRAD = attrgetter("requires_grad")


class CallRefused(CaptureError):
    """One of the calls cannot be captured.

    Attributes:
        call: The call.
    """

    def __init__(self, call: ObservedCall, rule: str, observed: str, remedy: str) -> None:
        super().__init__(rule, observed, remedy)
        self.call = call


class Baked:
    """The attributes of modules that a capture has read, and that its graphs therefore contain.

    Args:
        root: The user's module.

    Attributes:
        values: Their names and values at capture.
    """

    def __init__(self, root: LightningModule) -> None:
        self._root = root
        self._reads = AttributeReads()
        self.values: tuple[tuple[str, Any], ...] = ()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the body, a capture, reads."""
        with self._reads.watching(self._root):
            yield
        self.values = self.now()

    def now(self) -> tuple[tuple[str, Any], ...]:
        """Their names and present values."""
        return self._reads.values()


@dataclass(slots=True)
class Site:
    """The graphs of one call in a step.

    Attributes:
        call: The observed call.
        graphed: Its graphs.
        cost: What their capture took.
        parameters: The module's parameters.
        requires_grad: Which of them required a gradient.
        record: Where replays are counted.
    """

    call: ObservedCall
    graphed: GraphedCallable
    cost: CaptureCost
    parameters: list[Parameter]
    requires_grad: list[bool]
    record: GraphRecord = field(default_factory=lambda: GraphRecord(signature=""))

    @property
    def graphs(self) -> list[CUDAGraph]:
        """The forward graph, and the backward graph if there is one."""
        backward = self.graphed.backward_pass
        return [self.graphed.forward_graph, *([backward.graph] if backward is not None else [])]

    @property
    def is_as_captured(self) -> bool:
        """Whether the same parameters require gradients."""
        return list(map(_REQUIRES_GRAD, self.parameters)) == self.requires_grad

    def accepts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call could be replayed now."""
        return self.is_as_captured and self.graphed.accepts(args, kwargs)

    def release(self, statistics: Statistics) -> None:
        """Release the graphs; their record stays."""
        statistics.released(self.graphed.forward_graph)
        self.graphed.reset()


class CapturedCalls:
    """The graphs of the calls of one step.

    Args:
        calls: The calls that are captured.
        observation: The step that they are of.

    Attributes:
        sites: For each module the graphs of its calls, in their order; None for a call that stays
            eager.
        hook_tables: Tables of hooks inside of the modules, all empty: a replay calls no hook.
    """

    def __init__(self, calls: Sequence[ObservedCall], observation: Observation) -> None:
        chosen = dict.fromkeys(call.module for call in calls)
        self._index: dict[ObservedCall, int] = {}
        self.sites: dict[nn.Module, list[Site | None]] = {module: [] for module in chosen}
        for call in observation.calls:
            if call.module in chosen and call.grad_enabled:
                self._index[call] = len(self.sites[call.module])
                self.sites[call.module].append(None)
        self.hook_tables = [
            table
            for module in chosen
            for inner in module.modules()
            if inner is not module
            for table in hook_tables(inner)
            if not table
        ]
        self._orders: list[ReplayOrder] = []
        self._pools: list[GraphPool] = []

    def group(self, pool: GraphPool) -> tuple[GraphPool, ReplayOrder]:
        """Graphs with an order of their own, released together, over the memory of ``pool``."""
        own = GraphPool(pool.handle, stream=pool.stream, backend=pool.backend.name)
        order = ReplayOrder()
        self._pools.append(own)
        self._orders.append(order)
        return own, order

    def put(self, site: Site) -> None:
        """Keep the graphs of a call at its place."""
        self.sites[site.call.module][self._index[site.call]] = site

    @property
    def captured(self) -> list[Site]:
        """The graphs of every call that has some."""
        return [site for sites in self.sites.values() for site in sites if site is not None]

    @property
    def is_waiting(self) -> bool:
        """Whether a backward pass is still to come."""
        return any(order.is_waiting for order in self._orders)

    def begin(self) -> None:
        """Begin a step: every backward pass that is still pending is void."""
        for order in self._orders:
            order.begin()

    def enter(self, statistics: Statistics) -> None:
        """Enter the graphs of each module in the statistics."""
        for sites in self.sites.values():
            found = [site for site in sites if site is not None]
            if found:
                enter(found, statistics, f"; {len(found)} calls" if len(found) > 1 else "")

    def release(self, statistics: Statistics) -> None:
        """Release every graph."""
        for site in self.captured:
            site.release(statistics)
        self.abandon()

    def abandon(self) -> None:
        """Release what a failed attempt has captured."""
        for pool in self._pools:
            pool.close()


def enter(sites: Sequence[Site], statistics: Statistics, remark: str) -> None:
    """Enter the graphs of one module in the statistics, and count their replays there.

    Args:
        sites: The graphs of its calls.
        statistics: The statistics.
        remark: Put behind the arguments in words.
    """
    call = sites[0].call
    signature, _ = Signature.of(call.args, call.kwargs)
    cost = CaptureCost(sum(site.cost.ms for site in sites))
    for site in sites:
        for pool, size in site.cost.added.items():
            cost.added[pool] = cost.added.get(pool, 0) + size
    graphs = [graph for site in sites for graph in site.graphs]
    words = tensors_in_words(signature) + remark
    record = statistics.captured(words, graphs, cost, scope=f"module {call.name}")
    for site in sites:
        site.record = record


def pattern_of(calls: Sequence[ObservedCall], observation: Observation) -> Hashable:
    """What tells one step from another with the same batch: which calls, and in which order."""
    number = {call: i for i, call in enumerate(calls)}
    return (
        tuple(map(_described, calls)),
        tuple(
            (number[call], direction) for call, direction in observation.passes if call in number
        ),
    )


def _described(call: ObservedCall) -> Hashable:
    # The switches of torch count where the call noted them; those of now are the same for all.
    modes = Modes.current("cpu")
    try:
        signature: Hashable = Signature.of(call.args, call.kwargs, modes=modes)[0]
    except CaptureError:
        signature = None
    return call.name, signature, call.autocast, call.grad_enabled, call.frozen, call.training


@dataclass(frozen=True, slots=True)
class Means:
    """What captures are made with.

    Attributes:
        root: The user's module.
        pool: Whose memory, stream and backend the graphs use.
        gradient_buffers: Where parameter gradients go.
        original: Gives a module's own forward.
    """

    root: LightningModule
    pool: GraphPool
    gradient_buffers: GradientBuffers
    original: OriginalForward


def capture_calls(
    calls: Sequence[ObservedCall], observation: Observation, means: Means
) -> CapturedCalls:
    """Capture forward and backward of these calls in the order in which the step ran them.

    Args:
        calls: What is captured; no call is inside of another. Those without autograd are not:
            they share graphs that are made when they are called.
        observation: The step that they are of.
        means: What the captures are made with.

    Raises:
        CallRefused: a call cannot be captured; no graph is left and everything is as before.
    """
    captured = CapturedCalls(calls, observation)
    calls = [call for call in calls if call.grad_enabled]
    together = {call for call in calls if not _is_detached(call)}
    pool = means.pool
    groups = [(pool, [(c, d) for c, d in observation.passes if c in together])]
    for call in calls:
        if call not in together:
            # Its backward, should it ever run, finds its activations whatever ran in between.
            apart = GraphPool(stream=pool.stream, backend=pool.backend.name)
            groups.append((apart, [(call, "forward"), (call, "backward")]))
    captures: dict[ObservedCall, _Capture] = {}
    try:
        for memory, passes in groups:
            own, order = captured.group(memory)
            for call in dict.fromkeys(call for call, _ in passes):
                captures[call] = _Capture(call, replace(means, pool=own), order)
            for call, direction in passes:
                if direction == "forward":
                    captures[call].read_in_place(captures)
                captures[call].run(direction)
    except BaseException:
        for capture in captures.values():
            capture.passes.abandon()
        captured.abandon()
        raise
    for capture in captures.values():
        captured.put(capture.finish())
    for capture in captures.values():
        capture.passes.outputs.settle()
    return captured


def capture_alone(call: ObservedCall, means: Means) -> Site:
    """Capture a call without autograd, which any other may follow.

    Args:
        call: The call.
        means: What the capture is made with.

    Raises:
        CallRefused: it cannot be captured; no graph is left and everything is as before.
    """
    pool = means.pool
    own = GraphPool(pool.handle, stream=pool.stream, backend=pool.backend.name)
    capture = _Capture(call, replace(means, pool=own), ReplayOrder())
    try:
        capture.run("forward")
        capture.run("backward")
    except BaseException:
        capture.passes.abandon()
        own.close()
        raise
    return capture.finish()


def _is_detached(call: ObservedCall) -> bool:
    return call.requires_grad and call.backwards == 0


class _Capture:
    """The capture of one call, as it was observed."""

    def __init__(self, call: ObservedCall, means: Means, order: ReplayOrder) -> None:
        self._call = call
        self._root = means.root
        self.pool = pool = means.pool
        self._cost = CaptureCost()
        hooked = any(gradient_hooks(p) or accumulation_hooks(p) for p in call.module.parameters())

        def prepare() -> CallableCapture:
            with torch.autocast(
                pool.backend.device_type,
                dtype=call.autocast,
                enabled=call.autocast is not None,
                cache_enabled=False,
            ):
                capture = CallableCapture(
                    call.module,
                    call.args,
                    call.kwargs,
                    pool=pool,
                    order=order,
                    direct=not hooked and not call.partial,
                    allow_unused=True,
                    static_outputs=False,
                    gradient_buffers=means.gradient_buffers,
                    original=means.original(call.module),
                )
            capture.warm_up(1)
            return capture

        started = perf_counter()
        self.passes = self._explained(prepare)
        self._cost.ms = (perf_counter() - started) * 1e3

    def read_in_place(self, earlier: Mapping[ObservedCall, _Capture]) -> None:
        """Copy no argument that is the output of a graph of the same pool."""
        found = {}
        for leaf, made in self._call.sources.items():
            for call, output in made:
                capture = earlier.get(call)
                if capture is not None and capture.pool is self.pool and call is not self._call:
                    outputs = capture.passes.outputs
                    found[leaf] = outputs.tensors[output], outputs.lend(output)
        if found:
            self.passes.read_in_place(found)

    def run(self, direction: Direction) -> None:
        """Capture one pass."""
        passes = self.passes
        started, reserved = perf_counter(), self._reserved()
        self._explained(
            passes.capture_forward if direction == "forward" else passes.capture_backward
        )
        self._cost.ms += (perf_counter() - started) * 1e3
        added: dict[PoolHandle, int] = self._cost.added
        added[self.pool.handle] = added.get(self.pool.handle, 0) + self._reserved() - reserved

    def _reserved(self) -> int:
        # While a capture runs, its pool alone grows; reading every pool's size takes far longer.
        return torch.cuda.memory_reserved() if self.pool.backend.name == "cuda" else 0

    def finish(self) -> Site:
        """The graphs, at the end of all captures."""
        with as_observed(self._call):
            graphed = self.passes.finish()
            parameters = list(self._call.module.parameters())
            required = list(map(_REQUIRES_GRAD, parameters))
        return Site(self._call, graphed, self._cost, parameters, required)

    def _explained(self, run: Callable[[], Result]) -> Result:
        """Run a part as the call was run; a failure names the call, and leaves nothing behind."""
        call = self._call
        try:
            # Leaving inference mode turns autograd on, whatever it was.
            with torch.inference_mode(False), as_observed(call):
                return self._unchanged(run)
        except GraphError as error:
            raise CallRefused(call, error.rule, error.observed, error.remedy) from error
        except torch.OutOfMemoryError as error:
            raise CallRefused(
                call,
                "A captured module needs memory of its own, beside that of eager steps.",
                str(error).partition("\n")[0],
                "allow fewer graphs (max_graphs), or make the batch smaller",
            ) from error
        except Exception as error:
            site = CallSiteFinder().of_exception(error)
            raise CallRefused(
                call,
                "A module is captured by running its code.",
                f"{type(error).__name__}: {error}, at {site.describe()}",
                "mend the line, if the eager call raises it too; or exclude the module",
            ) from error

    def _unchanged(self, run: Callable[[], Result]) -> Result:
        """Refuse code that stores values in attributes or draws numbers on the host."""
        attributes, generators = Attributes(self._call.module), Generators(self._root)
        try:
            result = run()
        finally:
            changed, drawn = attributes.changed(), generators.drawn()
            attributes.restore()
            generators.restore()
        if changed:
            names = ", ".join(changed[:3])
            raise CaptureError(STORED.rule, f"its forward changes {names}", STORED.remedy)
        if drawn:
            observed = f"its forward draws from {', '.join(drawn)}"
            raise CaptureError(DRAWN.rule, observed, DRAWN.remedy)
        return result
