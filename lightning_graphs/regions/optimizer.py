"""Lets graphs step a user's optimizer: counters on the device, live rates, neutral checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial, wraps
from operator import attrgetter, getitem, itemgetter
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.autograd.backward import is_dense
from lightning_graphs.device.graph import is_current_stream_capturing
from lightning_graphs.device.rules import AFTERMATH, are_noted, stopped
from lightning_graphs.errors import CaptureError, CaptureStopped, GraphError, is_out_of_memory
from lightning_graphs.policy.worth import HyperParameterChurn
from lightning_graphs.private.exchange import nothing
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    capturable_unasked,
    count_for_schedulers,
    hides_memory,
    left_alone,
    local,
    scaling_states,
    step_hook_tables,
)
from lightning_graphs.regions.conditions import OptimizerGuard, each, where_moved
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.gradients import drop_gradients
from lightning_graphs.regions.tried import (
    RETURNING,
    UNSCALES_ITSELF,
    ClosureUse,
    Counters,
    HostState,
    can_watch,
    kept_in_place,
    numbers_of,
    runs_off_stream,
    unless_overflowed,
    why_failed,
)
from lightning_graphs.values.guards import REALS
from lightning_graphs.values.memory import GRADIENT
from lightning_graphs.values.snapshot import Gradients, OptimizerState
from lightning_graphs.values.tree import leaves_of, parameters_of
from lightning_graphs.watch.both_ways import BothWays
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.mechanism import Instruction
from lightning_graphs.watch.scalars import holds_number
from lightning_graphs.watch.user_code import hidden_in, step_brought

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with one kernel for all parameters that reads its learning rate on the device."""

Kernel = Literal["fused", "own"]
"""What Adam, AdamW and SGD run where they were not asked for another kernel: the fused one for all
parameters, or the one that torch would choose."""


def scaler_of(plugin: object) -> torch.amp.GradScaler | None:
    """Return the gradient scaler that a precision plugin has in its attribute ``scaler``."""
    scaler: Any = getattr(plugin, "scaler", None)
    is_scaler = isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
    return scaler if is_scaler else None


def capture_obstacle(
    module: nn.Module, optimizer: Optimizer, device_type: str, kernel: Kernel = "fused"
) -> str | None:
    """Why the step of this optimizer cannot be captured, in one sentence; None if it can."""
    name = type(optimizer).__name__
    if any(step_hook_tables(optimizer)):
        return f"{name} has step hooks, which a replay would not call"
    if why := why_not_beside(module, optimizer):
        return why
    if runs_off_stream(optimizer):
        return f"{name} launches its kernels on the default stream, where no capture sees them"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} was made with differentiable=True"
    parameters = parameters_of(optimizer)
    for tensor in filter(hides_memory, leaves_of([*optimizer.state.values()], Tensor)):
        return f"a tensor of its state {hidden_in(tensor)}"
    if not _why_not_fused(optimizer, kernel):
        return _too_precise(parameters, device_type)
    if why := why_not_sharded(optimizer):
        return why
    if _is_tried(optimizer, kernel, device_type):
        return _on_host(optimizer, device_type, {*numbers_of(optimizer, holds_number)} - {"lr"})
    has_rates = _has_rates(optimizer, kernel, device_type)
    return _too_precise(parameters, device_type) if has_rates else None


def why_not_beside(module: nn.Module, optimizer: Optimizer) -> str | None:
    """Why the step of an optimizer can be neither in a graph nor behind it; None if it can."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS calls the training step several times for each update"
    kinds = (nn.Embedding, nn.EmbeddingBag)
    for name, layer in module.named_modules():
        if isinstance(layer, kinds) and layer.sparse and layer.weight.requires_grad:
            return f"`{name}` has sparse gradients, whose memory changes in every step"
    devices = sorted({str(p.device) for p in parameters_of(optimizer)})
    found = f"parameters are on {' and '.join(devices)}, and a graph runs on one device"
    return found if len(devices) > 1 else None


def why_not_sharded(optimizer: Optimizer) -> str | None:
    """Why an optimizer without a fused kernel cannot step DTensors; None if it has no such."""
    name = type(optimizer).__name__
    found = f"with DTensors only a fused step can be captured, and {name} here has none"
    return found if is_sharded(optimizer) else None


def _too_precise(parameters: Iterable[Tensor], device_type: str) -> str | None:
    """Why the numbers of a graph are too coarse for these parameters; None if they are not."""
    if device_type == "cuda" and any(p.dtype is torch.float64 for p in parameters):
        return "parameters are float64, and a captured learning rate has 32 bits"
    return None


def _on_host(optimizer: Optimizer, device_type: str, follows: Container[str]) -> str | None:
    """Why tensors of the host in groups are in the way: who fills one later leaves no trace."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            is_here = isinstance(value, Tensor) and value.device.type == device_type
            if isinstance(value, Tensor) and not (is_here or key in follows):
                name = type(optimizer).__name__
                return f"{name} has `{key}` in a tensor of the host, whose value a graph would keep"
    return None


def _is_tried(optimizer: Optimizer, kernel: Kernel, device_type: str) -> bool:
    """Whether only a capture shows that graphs can take the step: torch has no form for them."""
    if _steps_as_torch(optimizer) and "capturable" in optimizer.defaults and device_type != "cpu":
        return False
    return bool(_why_not_fused(optimizer, kernel))


def _has_rates(optimizer: Optimizer, kernel: Kernel, device_type: str) -> bool:
    """Whether graphs read learning rates in tensors of their own; else these are constants.

    Other kernels than the fused ones may round numbers otherwise that they get from the device.
    """
    are_tensors = any(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups)
    is_fused = not _why_not_fused(optimizer, kernel)
    return is_fused or (are_tensors and not _is_tried(optimizer, kernel, device_type))


def _steps_as_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).step.__module__.startswith("torch.optim") and not step_brought(optimizer)


def _why_not_fused(optimizer: Optimizer, kernel: Kernel) -> str:
    """Why an optimizer runs no fused kernel, in words that follow its name; empty if it may.

    That kernel takes the elements of a parameter to fill their memory. It is given no parameters
    of whole numbers, since these have no gradient.
    """
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    if not (isinstance(optimizer, _FUSED) and _steps_as_torch(optimizer)) or (
        is_sgd and is_sharded(optimizer)
    ):
        return "has no fused kernel for graphs"
    groups = optimizer.param_groups
    if any(group.get("fused") is False for group in groups):
        return "was made with fused=False"
    if any(group.get("foreach") for group in groups):
        return "was made with foreach=True"
    if kernel == "own" and not all(group.get("fused") for group in groups):
        return "keeps its own kernel by optimizer_kernel='own'"
    parameters = parameters_of(optimizer)
    if any(p.is_complex() for p in parameters):
        return "has complex parameters, which torch's fused kernels do not take"
    if not all(_is_plain(p) for p in parameters if p.requires_grad):
        return "has parameters of a tensor subclass, which torch's fused kernels do not take"
    if not all(group.get("fused") or all(map(is_dense, group["params"])) for group in groups):
        return "has parameters with gaps in their memory, which torch's fused kernels do not take"
    return ""


def _is_plain(parameter: Tensor) -> bool:
    """Whether operators run on the tensor itself, or on the plain part of a DTensor."""
    own = type(parameter).__torch_dispatch__
    return own is Tensor.__torch_dispatch__ or local(parameter) is not parameter


def _are_alike(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether a fused kernel finds corresponding elements of each pair in equal places."""
    same = list(map(_kind, parameters)) == list(map(_kind, others))
    if not same or any(map(Tensor.is_neg, others)):
        return False
    strides = list(map(Tensor.stride, parameters)), list(map(Tensor.stride, others))
    return strides[0] == strides[1] or all(
        n == 1 or mine == theirs
        for parameter, *both in zip(parameters, *strides, strict=True)
        for n, mine, theirs in zip(parameter.shape, *both, strict=True)
    )


def _is_refusal(error: RuntimeError) -> bool:
    """Whether CUDA, or a rule ahead of it, has refused what a captured step does.

    Of errors of other classes the next attempt to capture learns, and of those before the step.
    """
    if isinstance(error, GraphError):
        return type(error) is CaptureError
    return not is_out_of_memory(error) and AFTERMATH not in str(error)


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether its parameters are DTensors: torch has no fused SGD over them.

    Steps that are capturable without being fused mix them with plain tensors, which torch refuses.
    """
    return any(local(p) is not p for p in parameters_of(optimizer))


class NoStateError(CaptureError):
    """An optimizer has no state for parameters that it steps for the first time."""


class UpdateRefused(CaptureError):
    """The step of one optimizer cannot be captured; what precedes it may be."""

    may_succeed = False  # the next capture follows the numbers in the way of this one
    optimizer: Optimizer | None = None  # whose step it is; None: that of any that follows numbers


class StateAwaited:
    """Remembers captures that found no optimizer state, which the next eager step makes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def may_come(self, key: Hashable, error: GraphError, *optimizers: Optimizer) -> bool:
        """Whether a capture failed for that reason, and more state is there than last time."""
        if not isinstance(error, NoStateError):
            return False
        found = sum(len(optimizer.state) for optimizer in optimizers)
        before, self._known[key] = self._known.get(key, -1), found
        return found > before


@contextlib.contextmanager
def state_undone(
    optimizers: Iterable[Optimizer],
    parameters: Sequence[Tensor],
    scaler: torch.amp.GradScaler | None = None,
) -> Iterator[None]:
    """Let a capture begin without gradients; afterwards they and the state are as before.

    So is what a scaler knows of steps that are under way, if the capture fails in one.

    Raises:
        NoStateError: An optimizer made state inside of the capture, as every replay would again.
    """
    before = Gradients(parameters)  # and which of them are trained
    states = {optimizer: OptimizerState(optimizer) for optimizer in optimizers}
    drop_gradients(parameters)
    under_way = {} if scaler is None else {k: {**v} for k, v in scaling_states(scaler).items()}
    try:
        yield
    finally:
        before.restore()
        if scaler is not None:
            scaling_states(scaler).clear()
            scaling_states(scaler).update(under_way)
        made = {optimizer: state.restore() for optimizer, state in states.items()}
    for optimizer, count in made.items():
        if not count:
            continue
        raise NoStateError(
            "An optimizer must have its state before its step is captured.",
            f"{type(optimizer).__name__} made state for {count} parameter(s) inside the capture",
            "let the optimizer take one more eager step, which unfrozen parameters need",
        )


_NONE: frozenset[str] = frozenset()
_following: WeakKeyDictionary[Optimizer, frozenset[str]] = WeakKeyDictionary()
"""Optimizers that are tried with live numbers: names of those that move time and again."""


def why_cycles_stay(context: TrainingContext) -> str:
    """Say why numbers that schedulers cycle keep updates eager; empty if graphs follow them."""
    kernel = context.options.optimizer_kernel, context.pool.backend.device_type
    for one in context.watch.optimizers if (cycles := context.watch.cycles) else ():
        name = "betas" if "betas" in one.defaults else "momentum"
        are_numbers = all(type(group.get(name)) in REALS for group in one.param_groups)
        if not (are_numbers and _is_tried(one, *kernel)):
            return cycles
        _following[one] = _following.get(one, _NONE).union({name, "lr"})
    return ""


_asking: WeakKeyDictionary[Optimizer, frozenset[FunctionType]] = WeakKeyDictionary()
"""Functions that the steps of optimizers call, and that ask the device which way to go."""


def follow_moving(capturables: Iterable[CapturableOptimizer], churn: HyperParameterChurn) -> None:
    """Let numbers of optimizers be live that have moved too often.

    A graph that freezes them runs the optimizer's kernels as they are. One that follows them has
    numbers on the device, a kernel for each parameter, and needs no further capture.
    """
    if any([one.follow(churn.moved) for one in capturables]):  # each learns
        churn.obstacle = ""


def rounded_otherwise(error: GraphError) -> UpdateRefused:
    """Return why an optimizer whose numbers were followed steps eagerly after all."""
    return UpdateRefused(
        "A number that changes in every step must give the same bits on the device.",
        f"with the numbers of the optimizer on the device {error.observed}",
        "keep counters in tensors on the device of the parameters, and change learning rates once "
        "an epoch; the step of this optimizer runs eagerly until then",
    )


class CapturableOptimizer:
    """Lets graphs step an optimizer, which looks unchanged to user code.

    A graph needs ``step`` counters on the device and, where torch has one, the fused kernel. The
    flags for both are in ``param_groups`` only while ``optimizer.step`` runs, captured or eager:
    hooks, schedulers, checkpoints and closures find the user's flags. Learning rates stay Python
    floats there; a capture reads tensors on the device, which :meth:`refresh` fills after a
    scheduler has changed the float. All other numbers of a group (betas, momentum, weight decay)
    are constants of a capture, and part of its key. :meth:`restore` undoes everything.

    An optimizer that runs no fused kernel has its learning rates as constants of a capture, too, or
    as tracers. One for which torch has no form for graphs runs as it is: a capture in which its
    step changes a number on the host is refused, and the next one may follow that.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        kernel: Kernel = "fused",
        *,
        may_follow: bool = True,  # its numbers do not move between two graphs of one step
    ) -> None:
        self.optimizer = optimizer
        self._device = device
        self._fused = not _why_not_fused(optimizer, kernel)
        self._is_tried = _is_tried(optimizer, kernel, device.type)
        self.has_rates = _has_rates(optimizer, kernel, device.type)
        self._may_follow = may_follow and not self.has_rates
        follows = _following.get(optimizer, _NONE) if self._may_follow else _NONE
        self.follows: frozenset[str] = follows
        """Names of its numbers on the host that are live in the graph."""
        self.counters: Counters | None = None  # those that the last capture has followed
        self._number: MakeNumber | None = None  # makes tracers in the present capture
        # It runs torch's fused kernel, and without graphs would run another one
        self.runs_other_kernel = self._fused and not all(
            group.get("fused") for group in optimizer.param_groups
        )
        # Its step calls a closure once, ahead of all else, and only passes on what that returns; of
        # one that is tried, the first step tells
        self.takes_closure_once = not self._is_tried
        self._has_taken_closure = self._hides = self._is_restored = False
        # What stands for a closure that has run ahead: code may ask whether there is one
        self.closure_ahead: tuple[Callable[[], Any], ...] = ()
        # Its state exists. A gradient scaler may skip the first steps of a fit.
        self.has_stepped = bool(optimizer.state) and not self._is_tried
        self.calls = 0  # steps that were taken, eager and captured ones
        self._own_step: Callable[..., Any] | None = vars(optimizer).get("step")
        # It divides gradients by the loss scale itself, and skips a step whose own overflow
        self.unscales = self._fused or getattr(optimizer, UNSCALES_ITSELF, False)
        vars(optimizer)["step"] = self._stand_in(optimizer.step)
        self.guard = OptimizerGuard(optimizer, ("lr",) if self.has_rates else self.follows)
        self._groups = self.guard.groups
        self._unlike: set[Tensor] = set()  # parameters whose state no fused kernel takes
        # The kernels on the CPU read a double, those on the GPU a float.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        try:
            self._convert_state()
            # On the device; no comparison puts them back, since `_filled` says what is there
            self.rates = [torch.zeros((), dtype=dtype, device=device) for _ in self._groups]
        except BaseException:  # such as an out-of-memory error
            self.restore()
            raise
        self._filled: list[float] = [float("nan")] * len(self._groups)

    def announced(self, say: Callable[[str], None]) -> CapturableOptimizer:
        """Return it, once its name is said if it runs another kernel than by itself."""
        if self.runs_other_kernel:
            say(type(self.optimizer).__name__)
        return self

    def _stand_in(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``optimizer.step``: the flags are set after its closure, and reset at its end."""

        def called(closure: Callable[[], Any] | None = None, **further: Any) -> Any:
            given = () if closure is None else (closure,)  # an author's may take none
            try:
                return step(*given, **further)
            except CaptureStopped as stop:
                raise stop.refusal from stop.__cause__

        taken = called
        if self._is_tried:
            taken = kept_in_place(self.optimizer, called, lambda: self.guard.is_captured)
        if not self.unscales:
            taken = unless_overflowed(self.optimizer, taken)

        @wraps(step)
        def stand_in(closure: Callable[[], Any] | None = None, **further: Any) -> Any:
            if self._is_restored:  # in the middle of a step, which is taken once more
                return called(closure, **further)
            self.calls += 1
            if self._is_tried:
                return self._step_as_it_is(partial(taken, **further), closure)
            returned = None if closure is None else torch.enable_grad()(closure)()
            with self._flags_exchanged() as is_as_captured:
                try:
                    taken(**further)
                except RuntimeError as error:
                    if is_current_stream_capturing() and _is_refusal(error):
                        raise self._refused(why_failed(self.optimizer, error)) from error
                    raise
            if not is_as_captured:  # what it has made may be laid out as a gradient was
                self._convert_state()
            self.has_stepped = True
            return returned

        known = left_alone(stand_in)
        count_for_schedulers(self.optimizer, known, step)
        return known

    def _step_as_it_is(self, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Take the step; refuse it if a capture cannot hold it, or if it computes on the host.

        Raises:
            UpdateRefused: It has failed in a capture, or has changed a value on the host.
        """
        if not is_current_stream_capturing():
            if closure is None or self._has_taken_closure:
                # Without one there is none to use otherwise, as under a gradient scaler
                self.takes_closure_once |= not self.has_stepped
                returned = step(closure)
            else:
                use, self._has_taken_closure = ClosureUse(closure), True
                sees = can_watch(self.optimizer)
                returned = use.watched(step) if sees else step(closure)
                self.takes_closure_once, self.closure_ahead = use.is_plain, use.stand_ins()
                self._hides = use.runs_compiled or not sees
            if closure is None and returned is not None:
                RETURNING.add(self.optimizer)
            self.has_stepped = True
            return returned
        if self.counters is not None and self.counters.are_moved:
            raise self._refused("it counts on the host, and is called twice in one step")
        before = HostState(self.optimizer, self._device)
        for tensor in before.hidden:
            raise self._refused(f"a tensor of its state {hidden_in(tensor)}")
        if why := _on_host(self.optimizer, self._device.type, self.follows):
            raise self._following(numbers_of(self.optimizer, holds_number), why)
        follows = self.follows
        if self._may_follow and are_noted():
            # Reads are no errors then, by which a capture would learn to follow these
            follows = follows.union(numbers_of(self.optimizer, holds_number))
        ways = BothWays(_asking.get(self.optimizer, frozenset()), self.optimizer)
        self.counters = counters = Counters(self.optimizer, follows, self._number, ways)
        try:
            with stopped(), capturable_unasked(self.optimizer), counters.followed():
                returned = step(closure)
        except Exception as error:
            before.restore()
            if is_out_of_memory(error):
                raise
            # Of what it has refused a tensor of the host may be the reason; a rehearsal cannot tell
            # these from others until they are read
            asked = numbers_of(self.optimizer, holds_number)
            refusal = self._following(asked, why_failed(self.optimizer, error))
            refusal.may_succeed = refusal.may_succeed or self._learns(ways)
            raise refusal from error
        if are_noted():
            self._learns(ways)
        if moved := before.moved():
            before.restore()
            names = ", ".join(f"`{name}`" for name in moved[:3])
            known = moved if numbers_of(self.optimizer).issuperset(moved) else ()
            raise self._following(known, f"it computes {names} on the host in every step")
        return returned

    def _learns(self, ways: BothWays) -> bool:
        """Learn which functions ask the device; tell whether there are more of them."""
        known = _asking[self.optimizer] = ways.functions | ways.learned()
        return known > ways.functions

    def _following(self, names: Collection[str], otherwise: str) -> UpdateRefused:
        """Let the next capture follow numbers on the host; return why this one has failed."""
        refusal = self._refused(otherwise)
        if names and self._number is not None:
            refusal.may_succeed = self.follow(names)
        return refusal

    def closure_refused(self) -> UpdateRefused | None:
        """Return why a step with a closure of its own use cannot be captured; None if it can."""
        if self.takes_closure_once or not self.has_stepped:
            return None
        why = "it does not call its closure once, ahead of all else, or computes with the loss"
        return self._refused(
            "it runs compiled code, which hides what that does" if self._hides else why
        )

    def _refused(self, observed: str) -> UpdateRefused:
        error = UpdateRefused(
            "A captured optimizer step must compute on the device alone.",
            f"{type(self.optimizer).__name__}: {observed}",
            "keep counters in tensors on the device of the parameters, and compute with these; the "
            "step of this optimizer runs eagerly until then",
        )
        error.optimizer = self.optimizer
        return error

    @contextlib.contextmanager
    def _flags_exchanged(self) -> Iterator[bool]:
        """Set the flags while the body steps; yield whether all groups run the captured kernel.

        A group whose gradients or state this kernel does not take runs the user's own kernel once.
        """
        groups = self.optimizer.param_groups
        given = [{key: group[key] for key in _FLAGS if key in group} for group in groups]
        if self.optimizer.state is not self.guard.state:  # loaded: its counters may be on the host
            self._convert_state()
        taken = self._taken() if self._fused else [True] * len(groups)
        for group, is_taken in zip(groups, taken, strict=True):
            if "capturable" in group and self._device.type == "cuda":
                group["capturable"] = True
            if self._fused and is_taken and "fused" in group:
                group["fused"], group["foreach"] = True, False
        try:
            yield all(taken)
        finally:
            for group, flags in zip(groups, given, strict=True):
                group.update(flags)

    def refresh(self, *, anew: bool = False) -> None:
        """Fill the learning rates on the device if they have changed since, or anew."""
        moved = []
        for i, group in enumerate(self._groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):  # a scheduler fills it in place
                self.rates[i].copy_(rate.view(()))
            elif anew or rate != self._filled[i]:
                self._filled[i] = rate
                moved.append(i)
        if len(moved) == 1:
            self.rates[moved[0]].fill_(self._filled[moved[0]])
        elif moved:  # two launches for all: numbers travel as arguments of the kernel
            rates = [self.rates[i] for i in moved]
            torch._foreach_zero_(rates)
            torch._foreach_add_(rates, [self._filled[i] for i in moved])

    @property
    def refreshing(self) -> Instruction:
        """The instruction that updates the learning rates before a replay."""
        if not self.has_rates:
            return nothing
        if any(isinstance(group["lr"], Tensor) for group in self._groups):
            return self.refresh
        return where_moved((each(itemgetter("lr"), self._groups), self._filled), self.refresh)

    def follow(self, names: Collection[str]) -> bool:
        """Let the next captures follow these numbers; tell if they have not done so yet."""
        if not (self._may_follow and (self._is_tried or {"lr"}.issuperset(names))):
            return False
        if self.follows.issuperset(names):
            return False
        _following[self.optimizer] = self.follows.union(names)
        return True

    def live_rates(self, number: MakeNumber | None = None) -> list[Any]:
        """Refresh the learning rates on the device, and return them: a scalar for each group.

        Those of other kernels than fused ones are returned as they are; a capture that follows them
        gives what makes the tracer of a number.
        """
        self._number, self.counters = number, None
        if "lr" in self.follows and number is not None:
            return [
                number(f"the learning rate of group {i}", partial(getitem, group, "lr"))
                if isinstance(group.get("lr"), (int, float))
                else group.get("lr")
                for i, group in enumerate(self._groups)
            ]
        if not self.has_rates:  # there may be none
            return [group.get("lr") for group in self._groups]
        self.refresh(anew=True)  # a run that is undone may have put back what was there
        return self.rates

    def _taken(self) -> list[bool]:
        """Find for each group whether the fused kernel takes its present gradients and state.

        The kernel runs over memory, not over elements: on a CPU it does not check that gradients
        and state have the layout of their parameter. That of SGD takes the momentum of all
        parameters, or of none.
        """
        groups = self.optimizer.param_groups
        has_momentum = isinstance(self.optimizer, torch.optim.SGD)
        trained = [p for p in parameters_of(self.optimizer) if p.grad is not None]
        gradients = list(map(GRADIENT, trained))
        if not PLAIN_TENSORS.issuperset(map(type, trained)):  # some were frozen before, perhaps
            self._unlike.update(p for p in trained if not _is_plain(p))
        if not (self._unlike or has_momentum) and _are_alike(trained, gradients):
            return [True] * len(groups)
        found = []
        for group in groups:
            trained = [p for p in group["params"] if p.grad is not None]
            is_taken = self._unlike.isdisjoint(trained)
            is_taken &= _are_alike(trained, list(map(GRADIENT, trained)))
            if has_momentum and group["momentum"] != 0:
                is_taken &= self._momentum_is_even(trained)
            found.append(is_taken)
        return found

    def _momentum_is_even(self, parameters: Sequence[Tensor]) -> bool:
        state = self.optimizer.state
        begun = [state.get(p, {}).get("momentum_buffer") is not None for p in parameters]
        return all(begun) or not any(begun)

    def _convert_state(self) -> None:
        """Bring state to the device and layout that the captured kernel takes, as after a load."""
        self._move_steps(to_host=False)
        self._unlike.clear()
        known = self.optimizer.state
        members = [p for p in parameters_of(self.optimizer) if p in known]
        for parameter in members if self._fused else ():
            state = known[parameter]
            for key, value in state.items():
                if key == "step" or not isinstance(value, Tensor):
                    continue
                if _kind(value) != _kind(parameter):
                    self._unlike.add(parameter)
                elif not _are_alike([parameter], [value]) and is_dense(parameter):
                    state[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)

    def _move_steps(self, *, to_host: bool) -> None:
        """Move ``step`` counters to the device, or back to where the optimizer keeps them."""
        if self._device.type != "cuda" or self._is_tried:
            return
        for group in self.optimizer.param_groups:
            if to_host and not self._counts_on_host(group):
                continue
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if isinstance(step := state.get("step"), Tensor):
                    state["step"] = step.to("cpu" if to_host else parameter.device)

    def neutral(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state as it would be without graphs, to be loaded without them, too."""
        if self._is_tried:
            return {**state_dict}
        on_host = {
            index
            for group in state_dict["param_groups"]
            if self._counts_on_host(group)
            for index in group["params"]
        }
        state = {
            index: {**entries, "step": entries["step"].cpu()}
            if index in on_host and isinstance(entries.get("step"), Tensor)
            else entries
            for index, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def restore(self) -> None:
        """Give the optimizer its own ``step`` and counters back."""
        self._is_restored = True
        vars(self.optimizer).pop("step", None)
        if self._own_step is not None:
            vars(self.optimizer)["step"] = self._own_step
        self._move_steps(to_host=True)

    def _counts_on_host(self, group: Mapping[str, Any]) -> bool:
        """Whether the optimizer itself keeps the ``step`` counters of a group on the CPU."""
        on_device = group.get("capturable") or group.get("fused")
        return not (on_device or isinstance(self.optimizer, torch.optim.ASGD))


_FLAGS = ("capturable", "fused", "foreach")
_kind = attrgetter("dtype", "device", "layout")
