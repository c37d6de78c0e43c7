"""Calls of ``self.log`` and of metrics: recorded in a capture, made again in every replay."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from operator import is_
from typing import Any, NoReturn, TypeGuard

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_graphs.device.rules import Obstacle, Remedy, know_cause, refuse
from lightning_graphs.errors import stop
from lightning_graphs.lightning.private import (
    HOOK,
    ResultTables,
    batch_size_of,
    begin_logs,
    beginning_of,
    bound_log_redirected,
    is_lightnings,
    present_hook,
    present_results,
    result_key,
    within_hook,
)
from lightning_graphs.lightning.strategy import ManualSteps, ProgressValues
from lightning_graphs.private.callsite import CallSite, CallSiteFinder, definition_of, is_library
from lightning_graphs.private.engine import current_autograd_node
from lightning_graphs.private.exchange import exchanged, replaced, subclassed
from lightning_graphs.private.torch import left_alone
from lightning_graphs.regions.conditions import in_turn
from lightning_graphs.regions.context import StepRecorder
from lightning_graphs.values.memory import Given, clone_all
from lightning_graphs.watch.kept import KeptCalls
from lightning_graphs.watch.late import LateCall, LateCalls, LatePolicy, LateValue
from lightning_graphs.watch.mechanism import Instruction
from lightning_graphs.watch.on_device import DeviceNumber
from lightning_graphs.watch.places import NumberMovedError
from lightning_graphs.watch.tracers import LateTracer, Tracer, refuse_tracers, used
from lightning_graphs.watch.user_code import Held, iter_objects, objects_in

_LOG_SIGNATURE = inspect.signature(LightningModule.log)

METRIC_LATER = Obstacle(
    "A replay logs a metric that the step computes with as it is at the end of the step.",
    "log the metric's value in place of the metric, or after its last call in the step",
    kind="metric-value",
    code='self.log("loss", loss)  # what self.criterion(...) has returned',
)
LOGGED_NUMBER = Obstacle(
    "A graph would freeze a Python number that the step logs.",
    "log the tensor itself, without item() or float(), or log from on_train_batch_end",
    kind="python-state",
    code='self.log("loss", loss)  # the tensor',
)
LOGGED_INSIDE = Obstacle(
    "A replay runs no Python code, and cannot log inside of a graphed module or from a hook in the "
    "backward pass.",
    "call self.log in training_step, with what the module returns; or leave the module out "
    "(exclude=[...])",
    kind="python-state",
    code='self.log("norm", norm)  # in training_step, with what the module returns',
)


def refuse_log(*_: Any, **__: Any) -> None:
    """Refuse ``self.log`` where no replay could call it again."""
    LOGGED_INSIDE.refuse_here("self.log is called")


@contextlib.contextmanager
def log_exchanged(
    module: LightningModule, log: Callable[..., None]
) -> Iterator[Callable[..., None]]:
    """Call ``log`` in place of ``LightningModule.log`` for a module, also below an override."""
    base: Any = next(
        kind
        for kind in type(module).__mro__
        if "log" in vars(kind) and is_lightnings(kind, "core.module")
    )
    original = base.log
    own = functools.partial(original, module)

    @functools.wraps(original)
    def exchanged(owner: LightningModule, *args: Any, **kwargs: Any) -> None:
        if owner is module:
            log(own, *args, **kwargs)
        else:
            original(owner, *args, **kwargs)

    with replaced(base, "log", left_alone(exchanged)):  # of a compiled training_step, too
        yield own


@dataclass(eq=False)
class _LogCall:
    """A call of ``self.log`` that every replay makes again with its own value.

    The first call goes through ``LightningModule.log``, which makes the entry of the key. Further
    calls update that entry, at a tenth of the cost.
    """

    module: LightningModule  # the module that logs
    base: Callable[..., None]  # Lightning's own function, bound to it
    name: str
    options: dict[str, Any]  # all other arguments but the value, by name
    value: Any = None  # a tensor in the graph's memory, a metric, or a tracer
    # Returns the present value of a tracer; None if ``value`` is logged itself
    now: Callable[[], Any] | None = None
    weight: LateValue | None = None  # the batch size, of which every replay has another one

    def __post_init__(self) -> None:
        self._results = present_results(self.module.trainer)
        self._begins = beginning_of(self.module.trainer)
        self._hook = present_hook(self.module)  # also while it is logged again
        self._key = result_key(self.module.trainer, self.name, self.options)
        self._size: Any = None
        is_tensor = isinstance(self.value, Tensor) and self.now is None
        self._scalar = self.value.detach().squeeze() if is_tensor else None

    def log(self, value: Any, size: Any = None) -> Any:
        """Log a value, and return the batch size that weights it; None if Lightning finds that."""
        results = self._results
        entry = results.get(self._key) if results is not None else None
        is_kind = isinstance(value, (Tensor, Metric))
        is_kind &= entry is not None and not (entry.has_reset and isinstance(value, Metric))
        if results is None or entry is None or not is_kind:
            with within_hook(self.module, self._hook):
                self.base(self.name, value, **self.options)
            return None
        if entry.has_reset or self._begins():  # each turn of a method resets its entries then
            begin_logs(self.module.trainer, results, self._hook)
        if size is None:
            size = batch_size_of(results, entry, self.options.get("batch_size"))
        if isinstance(value, Metric):
            results.update_metrics(self._key, value, size)
            return size
        if value is not self._scalar:
            value = value.detach().squeeze()
        value = value.to(entry.value.device, copy=entry.meta.reduce_fx in _KEEPING)
        results.update_metrics(self._key, value, size)
        return size

    @property
    def scalar(self) -> tuple[str, Tensor] | None:
        """The key of its results and its value, if that is all that a replay brings."""
        if self._scalar is None or self.weight is not None:
            return None
        return self._key, self._scalar

    def reissue(self, progress: ProgressValues | None) -> None:
        """Log again after a replay, and show a number of the host on the progress bar."""
        value = self.value if self._scalar is None else self._scalar
        if self.weight is not None:
            self.options["batch_size"], self._size = self.weight.now(), None
        if self.now is not None:
            value = self.now()
            if isinstance(value, Number):
                if progress is not None and self.options.get("prog_bar"):
                    progress.show(self.name, value)
                value = _tensor_of(value, self.module.device)
        self._size = self.log(value, self._size)


class LogUpdate:
    """Calls of ``self.log`` in their order; after the first time one update does most of them."""

    def __init__(self, calls: Sequence[LateCall | _LogCall]) -> None:
        self.rest: list[LateCall | _LogCall] = []  # what is made by itself nevertheless
        self._calls = [*calls]
        self._sizes: list[int] = []
        self._hooks = {call._hook for call in calls if isinstance(call, _LogCall)}
        logged = [call for call in calls if isinstance(call, _LogCall) and call.scalar]
        known = [call.scalar for call in logged if call.scalar is not None]
        keys = [key for key, _ in known]
        self._scalars = {key: value for key, value in known if keys.count(key) == 1}
        self._given = {
            key: c.options.get("batch_size") for c, key in zip(logged, keys, strict=True)
        }
        self._trainer: Any = None
        self._tables: ResultTables | None = None

    def begin(self) -> list[LateCall | _LogCall]:
        """Update what can be updated at once, and return the calls that are to be made."""
        tables = self._tables
        if tables is None:
            return self._calls
        entries = tables.entries
        are_same = all(map(is_, map(tables.entry_of, tables.keys), entries))
        if not are_same:
            return self._calls
        if any(map(tables.has_reset, entries)):
            if len(self._hooks) > 1:  # methods that alternate
                return self._calls
            self._begin_epoch(entries)
        self._update(tables)
        return self.rest

    def _begin_epoch(self, entries: Iterable[Any]) -> None:
        (hook,) = self._hooks
        begin_logs(self._trainer, present_results(self._trainer), hook)
        for entry in entries:
            entry.has_reset = False

    def _update(self, tables: ResultTables) -> None:
        """Update the entries, to the bit as Lightning does it for each of them."""
        for table, name in tables.caches:
            table[name] = None
        for table, name in tables.counts:
            table[name] += 1
        if tables.steps:
            copies = clone_all(tables.step_values)
            for (table, names), copy in zip(tables.steps, copies, strict=True):
                for name in names:
                    table[name] = copy
        values, sizes = tables.sum_values, self._sizes
        if tables.mean_values:
            values = [*torch._foreach_mul(tables.mean_values, sizes), *values]
            counts = torch._foreach_add([table[name] for table, name in tables.weights], sizes)
            for (table, name), value in zip(tables.weights, counts, strict=True):
                table[name] = value
        if tables.totals:
            sums = torch._foreach_add([table[name] for table, name in tables.totals], values)
            for (table, name), value in zip(tables.totals, sums, strict=True):
                table[name] = value
        for table, name, extreme, value in tables.extremes:
            table[name] = extreme(table[name], value)

    def learn(self) -> None:
        """Find what the next replay may update at once, after all calls were made."""
        first = next((c for c in self._calls if isinstance(c, _LogCall)), None)
        self._trainer = None if first is None else first.module.trainer
        results = None if first is None else present_results(self._trainer)
        if results is None or not self._scalars:
            return
        self._tables = tables = ResultTables(results, self._scalars)
        self._sizes, done = tables.sizes(self._given), set(tables.keys)
        self.rest = [
            call
            for call in self._calls
            if not isinstance(call, _LogCall) or call.scalar is None or call.scalar[0] not in done
        ]


class LogRecorder(StepRecorder):
    """Collects the calls of ``self.log`` and of metrics in one captured ``training_step``."""

    def __init__(
        self,
        module: LightningModule,  # the module that is being captured
        # Tells which metrics the step computes itself, and which other calls come after the replay
        later: tuple[StepMetrics, KeptCalls],
        # Where values for the progress bar are mirrored to; None to read them directly
        progress: ProgressValues | None = None,
        numbers: LoggedNumbers | None = None,  # knows which Python numbers change from step to step
        *,
        # Surrounds a run in which calls are made, not kept back, and which is undone
        undone: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
        manual: ManualSteps | None = None,  # optimizer steps of the step's own code
    ) -> None:
        self._module = module
        self._metrics, self._kept = later
        self._undone = undone
        self._progress = progress
        self._numbers = numbers
        self._manual = manual
        self._calls: list[LateCall | _LogCall] = []
        # Those that log a metric which the step computes, with its value then and the user's line
        self._objects: list[tuple[_LogCall, Any, str]] = []
        self._computed: list[tuple[str, Tensor]] = []  # what these are given, by name
        self._update: LogUpdate | None = None
        self._mirrored: frozenset[str] = frozenset()
        self._dtype = torch.get_default_dtype()

    @functools.cached_property
    def _late(self) -> LateCalls:
        state = (*self._module.parameters(), *self._module.buffers())
        return LateCalls(self._calls, state, self._module.device.type, self._kept.copied)

    @contextlib.contextmanager
    def recording(self, held: Held | None = None) -> Iterator[None]:
        """Record calls of ``LightningModule.log`` and of methods of metrics."""
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(log_exchanged(self._module, self._record_log))
            caught = partial(self._record_log, log)
            stack.enter_context(bound_log_redirected(self._module.trainer, caught))
            apart, refuse = self._metrics.apart(held), self._metrics.refuse_use
            stack.enter_context(metrics_exchanged(apart, self._metric_recorder, refuse))
            if self._manual is not None:
                stack.enter_context(self._manual.recording())
            if self._kept.known:
                stack.enter_context((self._undone or partial(self._kept.exchanged, self.keep))())
            yield

    def keeping(self, *, by_methods: bool) -> contextlib.AbstractContextManager[object]:
        """Keep back calls of torch in the body, the step's own code under capture."""
        if self._undone is not None or not self._kept.known:
            return contextlib.nullcontext()
        return self._kept.of_torch(self.keep, by_methods=by_methods)

    def _record_log(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if current_autograd_node() is not None:
            refuse_log()
            return
        self._dtype = torch.get_default_dtype()  # precision plugins set it for the step's own code
        arguments = _LOG_SIGNATURE.bind(self._module, *args, **kwargs).arguments
        _, name, value = (arguments.pop(key) for key in ("self", "name", "value"))
        size = arguments.get("batch_size")
        weight = size if isinstance(size, LateValue) else None
        if weight is not None:
            del arguments["batch_size"]
        elif size is not None and self._numbers is not None:
            self._numbers.refuse_frozen(name, f"self.log({name!r}, ...) was given batch sizes")
        refuse_tracers(arguments)
        device = self._module.device
        if isinstance(value, LateValue):
            self._kept.logged.add(name)  # an eager step has a number there
            if (read := self._number_read(value)) is not None:
                value = read.reshape(()).to(_dtype_of_numbers())  # as Lightning does with it
        if isinstance(value, DeviceNumber):
            self._kept.logged.add(name)
            value = value.tensor.to(_dtype_of_numbers())
        is_late = isinstance(value, LateTracer)
        if is_late:
            now = value.at_end
        else:
            now = value.now if isinstance(value, Tracer) else self.live(value)
        if now is None and isinstance(value, Number):
            site = CallSiteFinder().here()
            if self._numbers is not None and (name, site) in self._numbers.changing:
                what = f"self.log({name!r}, ...) logged different numbers during warm-up"
                observed = f"{what}, at {site.describe()}"
                error = NumberMovedError(LOGGED_NUMBER.rule, observed, LOGGED_NUMBER.remedy)
                error.number = value
                refuse(error)
            value = _tensor_of(value, device)
        elif now is None and isinstance(value, Tensor):
            # The rest of the step may change it in place. No replay copies a tensor of the host.
            value = self._widened(value.detach()) if value.device == device else value.detach()
            if name not in self._kept.logged:
                self._computed.append((f"the logged `{name}`", value))
        call = _LogCall(self._module, log, name, arguments, value, now, weight)
        if isinstance(value, Metric) and not self._metrics.is_apart(value):
            line = CallSiteFinder().here().describe()
            self._objects.append((call, value._forward_cache, line))
        elif is_late:
            self.at_end(partial(self._reissue, [call]))
        else:
            self._calls.append(call)

    def _number_read(self, late: LateValue) -> Tensor | None:
        """Return the tensor of the graph whose number a value is, if it is no more than that."""
        calls = [call for call in self._calls if isinstance(call, LateCall)]
        read = next((r for c in calls if (r := c.number_read(late)) is not None), None)
        return read if read is not None and read.device == self._module.device else None

    def _widened(self, value: Tensor) -> Tensor:
        """Copy a value, in 32 bits at least, as results convert all that are not whole numbers."""
        wide = self._dtype if self._dtype in _WIDE else torch.float32
        narrow = value.is_floating_point() and value.dtype not in _WIDE
        return value.to(wide) if narrow else value.clone()

    def _metric_recorder(
        self, metric: nn.Module, function: Callable[..., Any], name: str
    ) -> Callable[..., Any]:
        refuse = partial(self._metrics.refuse_use, metric)
        policy = LatePolicy(f"the value of {name}", refuse, self._kept.own.runs_in, self.keep)

        def record(*args: Any, **kwargs: Any) -> Any:
            result, give = metric_results(metric, policy)
            self._dtype = torch.get_default_dtype()
            call = self._late.add(function, (args, kwargs), name)
            call.take = give
            self._computed += [(f"an argument of {name}", tensor) for tensor in call.tensors]
            return result

        return record

    def keep(self, function: Callable[..., Any], given: Given, policy: LatePolicy) -> LateValue:
        """Keep a call back; see :data:`Keep`."""
        self._dtype = torch.get_default_dtype()
        return self._late.keep(function, given, policy)

    def finish(self) -> None:
        """Capture copies to the host of what the progress bar shows; find changed tensors."""
        may_be_late = self._kept.known or any(isinstance(c, LateCall) for c in self._calls)
        for name in self._late.finish() if may_be_late else ():  # the next capture gives it a copy
            self._kept.copy(name)
            METRIC_VALUE.refuse(f"a tensor given to {name} is changed in place")
        for call, logged, line in self._objects:
            if call.value._forward_cache is not logged:
                METRIC_LATER.refuse(f"a metric is logged, and called again, at {line}")
        if self._progress is not None:
            shown = [call for call in self._calls if isinstance(call, _LogCall)]
            values = {c.name: c.value for c in shown if c.options.get("prog_bar")}
            values = {name: v for name, v in values.items() if isinstance(v, Tensor)}
            self._mirrored = self._progress.capture(values)

    def logged(self) -> list[tuple[str, Tensor]]:
        """List the tensors in the recorded calls that a replay computes."""
        return self._computed

    def reissue(self) -> None:
        if self._progress is not None:
            self._progress.mirrored = self._mirrored
        if not self._calls:
            return
        self._update = update = self._update or LogUpdate(self._calls)
        calls = update.begin()
        if calls:
            self._reissue(calls)
        if calls is not update.rest:
            update.learn()

    @property
    def last(self) -> Instruction | None:
        """Logs metrics that the step computes, once the replay has given them their values.

        After that it steps schedulers, and Lightning counts the steps of the step's own code.
        """
        parts: list[Instruction] = []
        if self._objects:
            parts.append(partial(self._reissue, [call for call, *_ in self._objects]))
        parts += self._at_end
        if self._manual is not None:
            parts.append(self._manual.repeat)
        return in_turn(parts)

    def _reissue(self, calls: Sequence[LateCall | _LogCall]) -> None:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            for call in calls:
                call.reissue(self._progress)
        finally:
            torch.set_default_dtype(dtype)


@dataclass(eq=False)
class QuickLog:
    """Takes the place of ``LightningModule.log`` next to graphs of submodules, at a lower cost.

    The first call of a key in an epoch goes through Lightning's function, and so does a call that
    differs from the last one in more than the value. Further calls update the entry of the key.
    """

    module: LightningModule
    is_stepping: Callable[[], bool]
    # The last calls, by the method that logs and the name: keys of one name are apart
    known: dict[tuple[str | None, str], _LogCall] = field(default_factory=dict)

    def __call__(
        self, log: Callable[..., None], name: str, value: Any, *rest: Any, **options: Any
    ) -> None:
        """Log ``value`` as ``name``; ``log`` is ``LightningModule.log``."""
        key = vars(self.module).get(HOOK), name  # without a call: each value is logged so
        known = self.known.get(key) if self.is_stepping() and not rest else None
        is_same = known is not None and known.options == options
        if known is not None and is_same and isinstance(value, Tensor) and value.numel() == 1:
            known.log(value)
            return
        log(name, value, *rest, **options)
        if not rest and all(type(v) in _PLAIN for v in options.values()):
            self.known[key] = _LogCall(self.module, log, name, options)


@dataclass(eq=False)
class LoggedNumbers:
    """Finds Python numbers in logs of warm-up steps that change: a capture refuses them.

    So does it with batch sizes and with what a step returns beside its loss, if that can be read
    behind a replay. Else such a number is a part of the key.
    """

    # The number that was logged first, by its name and where: branches may log constants in turn
    values: dict[tuple[str, CallSite], Any] = field(default_factory=dict)
    changing: set[tuple[str, CallSite]] = field(default_factory=set)
    # The first batch size, by the name that is logged, and the first number returned, by its key
    others: dict[Any, Any] = field(default_factory=dict)
    frozen: dict[Any, CallSite] = field(default_factory=dict)
    is_asked: bool = False  # such a number was refused

    def watching(self, module: LightningModule) -> contextlib.AbstractContextManager[object]:
        return log_exchanged(module, self._watched)

    def _watched(
        self, log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(value, Number):
            here = name, CallSiteFinder().here()
            if self.values.setdefault(here, value) != value:
                self.changing.add(here)
        if type(size := kwargs.get("batch_size")) is int:
            self._compare(name, size, CallSiteFinder().here)
        log(name, value, *args, **kwargs)

    def returned(self, value: Any, function: Callable[..., Any]) -> None:
        """Note what a step of the warm-up has returned."""
        for key, number in _numbers_in(value):
            self._compare(key, number, partial(definition_of, function))

    def _compare(self, key: Any, number: Any, site: Callable[[], CallSite]) -> None:
        if self.others.setdefault(key, number) != number:
            self.frozen[key] = site()

    def refuse_frozen(self, key: Any, how: str) -> None:
        """Refuse a number in a capture that would be the same in every replay."""
        if (site := self.frozen.get(key)) is not None:
            self.is_asked = True
            LOGGED_NUMBER.refuse(f"{how} that differ from step to step, at {site.describe()}")

    def refuse_returned(self, value: Any) -> None:
        """Refuse such numbers in what a captured step has returned."""
        for key, _ in _numbers_in(value):
            self.refuse_frozen(key, f"training_step returns numbers under {key[0]!r}")

    def was_asked(self) -> bool:
        """Whether the last refusal was of such a number."""
        asked, self.is_asked = self.is_asked, False
        return asked


def _numbers_in(returned: Any) -> Iterator[tuple[tuple[str], int | float]]:
    """Yield the Python numbers in a dict that a step has returned, with their keys."""
    for key, value in returned.items() if isinstance(returned, Mapping) else ():
        if type(value) in (int, float):
            yield (key,), value


def _tensor_of(number: Any, device: torch.device) -> Tensor:
    """Make a tensor of a number as ``LightningModule.log`` does, without a copy from the host."""
    return torch.full((), number, dtype=_dtype_of_numbers(), device=device)


def _dtype_of_numbers() -> torch.dtype:
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


_PLAIN = (bool, int, str, type(None))
_WIDE = (torch.float32, torch.float64)
_KEEPING = (max, min)
"""Reductions of Python, which keep one of the tensors that they are given."""


# ------------------ Metrics

METRIC_VALUE = Obstacle(
    "A captured step cannot use the value of a metric, because metrics are updated after the step.",
    "only pass the value to self.log, or compute what the loss needs with torch functions",
    kind="metric-value",
    code='self.log("accuracy", self.accuracy(logits, y))  # and nothing else with its value',
)
know_cause(
    "torchmetrics/metric.py",
    "wrapped_func",
    Remedy(
        "let the metric, with whose value the step computes, look at none on the host: those of "
        "torchmetrics take validate_args=False or nan_strategy='disable'; or only log its value",
        'Accuracy(task="multiclass", num_classes=10, validate_args=False)',
    ),
)


class StepMetrics:
    """Tells the metrics that are updated after a replay from those that a step computes with.

    A step that uses the value of a metric, as its loss or in it, has the metric's code in its
    graphs, and its states are changed by them. Others wait for the outputs of the graphs, as code
    that may read values on the host.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._asked: list[nn.Module] = []
        # By ``id``: the hash of a metric changes with its states
        self._inside: dict[int, nn.Module] = {}

    def refuse_use(self, metric: nn.Module, what: str) -> NoReturn:
        """Refuse to use what a metric gives or keeps, where that is updated after the replay."""
        self._asked.append(metric)
        stop(used(METRIC_VALUE, what))

    def learn(self, used: Iterable[nn.Module] = ()) -> bool:
        """Let captured steps compute metrics whose values were used; whether anything is new.

        All that is inside of one goes with it, and so does what it is inside of.
        """
        asked, self._asked = set(map(id, (*self._asked, *used))), []
        known = len(self._inside)
        for _, metric in metrics_of(self._module):
            held = (value for _, value in objects_in("", metric, {}))
            inside = {id(value): value for value in held if isinstance(value, nn.Module)}
            if asked & inside.keys():
                self._inside.update(inside)
        return len(self._inside) > known

    def is_apart(self, module: nn.Module) -> bool:
        """Whether a module is a metric that is updated after the replay."""
        return is_metric(module) and id(module) not in self._inside

    def apart(self, held: Held | None = None) -> list[tuple[str, Metric | MetricCollection]]:
        """List names and metrics that are updated after the replay."""
        return [found for found in metrics_of(self._module, held) if self.is_apart(found[1])]


_METRICS = frozenset({Metric, MetricCollection})


def is_metric(value: object) -> TypeGuard[Metric | MetricCollection]:
    # As `isinstance`, which asks every class of torchmetrics about a class that is new to it.
    return not _METRICS.isdisjoint(type(value).__mro__)


def metrics_of(
    module: nn.Module,
    held: Held | None = None,  # what it holds, if that is known
) -> list[tuple[str, Metric | MetricCollection]]:
    """Find the metrics that a module holds, also those inside of others, outer ones first."""
    known = iter_objects(module) if held is None else held
    return [(name.removeprefix("self."), one) for name, one in known if is_metric(one)]


@contextlib.contextmanager
def metrics_exchanged(
    metrics: Iterable[tuple[str, Metric | MetricCollection]],  # and their names
    # Makes what stands in for a method, of the metric, the method and the name of the metric
    instead: Callable[[nn.Module, Callable[..., Any], str], Any],
    # Called with a metric and its name where user code reads what the metric keeps
    read: Callable[[nn.Module, str], object],
) -> Iterator[None]:
    """Exchange the methods by which steps update metrics, and watch what is read of these."""
    named = [*metrics]
    methods = [
        (metric, method, instead(metric, getattr(metric, method), f"metric `{name}`"))
        for name, metric in named
        for method in _UPDATING
        if hasattr(metric, method)
    ]
    with contextlib.ExitStack() as stack:
        for name, metric in named:
            if isinstance(metric, Metric):
                look = functools.partial(read, metric)
                stack.enter_context(subclassed(metric, _reads_noted(metric, name, look)))
        stack.enter_context(exchanged(methods))
        yield


_UPDATING = (
    *("forward", "update", "compute", "reset"),
    # A collection copies states between its metrics where it is looked into, as log_dict does
    "_compute_groups_create_state_ref",
)
_KEPT = (
    *("_forward_cache", "_computed", "_update_count"),
    *("update_count", "update_called", "metric_state"),
)


def _reads_noted(metric: Metric, name: str, read: Callable[[str], object]) -> dict[str, Any]:
    """Make the ``__getattribute__`` of a metric whose results user code may read back."""
    kept = {*metric._defaults, *_KEPT}
    inherited: Any = type(metric).__getattribute__

    def get(owner: Metric, key: str) -> Any:
        if key in kept and not is_library(sys._getframe(1).f_code.co_filename):
            read(f"`{key}` of metric `{name}`")
        return inherited(owner, key)

    return {"__getattribute__": get}


def metric_results(owner: object, policy: LatePolicy) -> tuple[Any, Callable[[Any], object]]:
    """Return tracers for the result of a metric that is kept back, and what gives them values."""
    if not isinstance(owner, MetricCollection):
        late = LateValue(policy)
        return late, late.give
    keys = owner.keys(keep_base=False)
    of_key = partial(dataclasses.replace, policy)
    several = {k: LateValue(of_key(name=f"{policy.name}[{k!r}]")) for k in keys}

    def give(values: Any) -> None:
        for key, value in (values or {}).items():
            several[key].give(value)

    return dict(several), give  # code may take out what it does not log
