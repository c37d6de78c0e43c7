"""The graphs of the calls of one step, what they contain beside tensors, and depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_graphs.core.arguments.signature import (
    EVERYTHING,
    CallPlan,
    KernelChoice,
    Modes,
    Signature,
)
from lightning_graphs.core.arguments.values import HeldValues
from lightning_graphs.core.callsite import add_line, definition_of
from lightning_graphs.core.graph import CUDAGraph
from lightning_graphs.core.graphed import GraphedCallable, Stores
from lightning_graphs.core.private.torch import (
    accumulation_hooks,
    gradient_hooks,
    hook_tables,
    hooks_registered,
    is_compiled_in_place,
)
from lightning_graphs.errors import CaptureError, ReplayError
from lightning_graphs.reporting import GraphRecord
from lightning_graphs.training.guards.conditions import moved_values
from lightning_graphs.training.guards.environment import Environment
from lightning_graphs.training.guards.frozen import old_gradients_watched, rates_exchanged
from lightning_graphs.training.guards.own_code import CodeOfModules, OwnCode
from lightning_graphs.training.guards.python_state import AttributeReads
from lightning_graphs.training.host.logs import refuse_log
from lightning_graphs.training.interception import log_exchanged
from lightning_graphs.training.lightning_private import kept_log_caught
from lightning_graphs.training.modules.observation import Observation, ObservedCall
from lightning_graphs.training.statistics import CaptureCost, Statistics, listed, tensors_in_words

REQUIRES_GRAD = attrgetter("requires_grad")


class CallRefused(CaptureError):
    """One of the calls cannot be captured; where nothing else does, its forward tells the line."""

    def __init__(self, call: ObservedCall, rule: str, observed: str, remedy: str) -> None:
        super().__init__(rule, observed, remedy)
        add_line(self, "in the code of", definition_of(call.original))
        self.call = call


class Baked:
    """What of Python's values a capture has read, and its graphs therefore contain; what it sets.

    Those are attributes of modules and of the trainer, and global and enclosing variables.
    """

    def __init__(self, root: LightningModule, own: OwnCode, modules: Sequence[nn.Module]) -> None:
        self._root = root
        self.reads = AttributeReads()
        self.values: tuple[tuple[str, Any], ...] = ()  # their names and values at capture
        self._code = CodeOfModules(modules, graphed=True)
        self.environment = Environment(root, own, modules=modules)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the body, a capture of these modules, reads."""
        trainer = self._root.trainer
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.environment.reading(self.reads))
            others = self.environment.in_attributes
            stack.enter_context(old_gradients_watched(trainer, others=others))
            for optimizer in trainer.optimizers:
                stack.enter_context(rates_exchanged(trainer, optimizer))
            stack.enter_context(log_exchanged(self._root, refuse_log))
            stack.enter_context(kept_log_caught(trainer, refuse_log))
            yield
        self.environment.outside.read_into(self.reads)
        self.values = self.reads.now()

    @property
    def is_current(self) -> bool:
        """Whether all of this is as it was at capture, the code of the modules, too."""
        return self.reads.now() == self.values and not self._code.exchanged()

    def left(self) -> tuple[dict[str, Tensor], Stores]:
        """Tensors that the body has written, and attributes that it has set, since last asked."""
        return self.environment.loose.written(), self.reads.stored()

    def share(self, sites: Sequence[Site]) -> None:
        """Let each of these calls look at its part: the code between them may change any value."""
        # Attributes of a module inside of other calls are no matter of a call.
        inside = {id(module) for site in sites for module in site.call.module.modules()}
        for site in sites:
            own = {id(module) for module in site.call.module.modules()}
            site.read = self.reads.without(inside - own)
            site.values = site.read.now()


@dataclass(slots=True)
class Site:
    """The graphs of one call in a step."""

    call: ObservedCall
    graphed: GraphedCallable
    baked: Baked  # of its capture
    cost: CaptureCost  # what their capture took
    parameters: list[Parameter]  # of the module
    requires_grad: list[bool]  # which of them required a gradient
    # What the call writes beside parameters and buffers, by name.
    written: dict[str, Tensor] = field(default_factory=dict)
    record: GraphRecord = field(default_factory=lambda: GraphRecord(signature=""))
    read: HeldValues = field(default_factory=HeldValues)  # values of Python's in the graphs
    values: tuple[tuple[str, Any], ...] = ()  # their names and values at capture

    @property
    def is_as_captured(self) -> bool:
        return list(map(REQUIRES_GRAD, self.parameters)) == self.requires_grad

    @property
    def is_current(self) -> bool:
        """Whether every value that is in the graphs is the one of then."""
        now = self.read.now()
        return now is self.values or now == self.values

    def accepts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        same = self.is_as_captured and self.call.kernels == KernelChoice.now()
        return same and self.graphed.accepts(args, kwargs)


class CapturedStep:
    """The graphs for steps of one kind that make the same calls."""

    def __init__(
        self,
        kind: StepKind,
        calls: Sequence[ObservedCall],
        observation: Observation,
        captured: Sequence[Site],  # the graphs of every call that has some
        baked: Baked,
    ) -> None:
        self.kind = kind
        self.key = (kind, observation.pattern(calls), baked.values)
        self.baked = baked
        self.captured = captured
        self.uses = 0
        # For each observed module the graphs of its calls under autograd, in their order; None for
        # a call that stays eager.
        self.sites: dict[nn.Module, list[Site | None]] = {}
        made = {site.call: site for site in captured}
        inside = set(calls)  # a replay makes no calls
        for call in observation.calls:
            if call.parent in inside:
                inside.add(call)
            elif call.grad_enabled:
                self.sites.setdefault(call.module, []).append(made.get(call))
        # Tables of hooks inside of the modules, all empty: a replay calls no hook.
        self.hook_tables = [
            table
            for module in dict.fromkeys(call.module for call in calls)
            for inner in module.modules()
            if inner is not module or is_compiled_in_place(module)
            for table in hook_tables(inner)
            if not table
        ]
        self._orders = list(dict.fromkeys(site.graphed.order for site in captured))
        signature = kind.signature
        self._call = CallPlan(signature, check_modes=True) if signature is not None else None
        baked.share(captured)

    @property
    def is_kept(self) -> bool:
        """Whether a caller still holds an output that was handed out without a copy."""
        # Any graph over the same memory may overwrite it.
        return any(site.graphed.outputs.is_kept for site in self.captured)

    @property
    def is_waiting(self) -> bool:
        return any(order.is_waiting for order in self._orders)

    def change(self, to: CapturedStep) -> str:
        lines = self.kind.change(to.kind)
        lines += moved_values(self.baked.values, to.baked.values)
        return listed(lines) or "a step calls its modules differently"

    def fits(self, args: tuple[Any, ...], flags: Flags) -> bool:
        if flags != self.kind.flags or not self.baked.is_current:
            return False
        return self._call is None or self._call.match(args, {}) is not None

    def refuse_requests(self, inputs: Sequence[Any]) -> None:
        """Refuse a backward pass for some gradients only, where graphs write them themselves."""
        for site in self.captured:
            if any(tensor is p for tensor in inputs for p in site.parameters):
                raise ReplayError(
                    "A graphed module cannot compute some of its gradients only.",
                    "torch.autograd.grad or backward(inputs=...) was called for parameters of "
                    f"`{site.call.name}`",
                    f'write GraphCapture(exclude=["{site.call.name}"])',
                )

    def begin(self) -> None:
        """Begin a step: every backward pass that is still pending is void."""
        for order in self._orders:
            order.begin()

    def enter(self, statistics: Statistics) -> None:
        for found in self.sites.values():
            if sites := [site for site in found if site is not None]:
                enter(sites, statistics, f"; {len(sites)} calls" if len(sites) > 1 else "")


def release(sites: Sequence[Site], statistics: Statistics) -> None:
    for site in sites:  # one stands for all of its module, none of which is empty yet
        statistics.released(site.graphed.forward_graph)
    for site in sites:
        site.graphed.reset()


def enter(sites: Sequence[Site], statistics: Statistics, remark: str) -> None:
    """Enter the graphs of one module in the statistics, and count their replays there."""
    first = sites[0]
    added = next((site.cost.added for site in sites if site.cost.added), {})
    cost = CaptureCost(sum(site.cost.ms for site in sites), added)
    graphs: list[CUDAGraph] = []
    for site in sites:
        backward = site.graphed.backward_pass
        graphs += [site.graphed.forward_graph, *([backward.graph] if backward is not None else [])]
    words = tensors_in_words(first.graphed.plan.signature) + remark
    record = statistics.captured(words, graphs, cost, scope=f"module {first.call.name}")
    for site in sites:
        site.record = record


class Flags(NamedTuple):
    """What a step's graphs depend on beside its batch."""

    training: tuple[bool, ...]  # train/eval flag of every module
    requires_grad: tuple[bool, ...]  # of every parameter
    hooked: tuple[bool, ...]  # which parameters have hooks; empty if none has
    kernels: KernelChoice  # what operators choose their kernels by


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
            found = [bool(gradient_hooks(p) or accumulation_hooks(p)) for p in self._parameters]
            self._hooked = tuple(found) if any(found) else ()
        return Flags(training, required, self._hooked, KernelChoice.now())


class StepKind(NamedTuple):
    """What is known of a step before it runs."""

    signature: Signature | None  # of its batch; None for batches that have none
    flags: Flags

    @property
    def is_told_by_tensors(self) -> bool:
        """Whether there is nothing but tensors in the batch on which shapes could depend."""
        signature = self.signature
        return signature is not None and len(signature.specs) == len(signature.leaves)

    def change(self, to: StepKind) -> list[str]:
        """What is different in another kind, for a person to read."""
        lines: list[str] = []
        if self.signature is not None and to.signature is not None:
            lines = self.signature.diff(to.signature)
        names = ("train/eval flags", "requires_grad of parameters", "hooks on parameters")
        triples = zip(names, self.flags, to.flags, strict=False)
        changed = [name for name, before, after in triples if before != after]
        changed += self.flags.kernels.changes(to.flags.kernels)
        return lines + [f"{name} changed" for name in changed]


def batch_signature(batch: tuple[Any, ...], device_type: str) -> Signature | None:
    """The signature of a batch; None where it has none, and the modules' own arguments decide."""
    try:
        modes = Modes.current(device_type)
        # What is no tensor is a matter of the calls that are given it.
        return Signature.of(batch, {}, names=("batch",), modes=modes, unread=EVERYTHING)[0]
    except CaptureError:
        return None
