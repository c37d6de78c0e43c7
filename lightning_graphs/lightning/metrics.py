"""Metrics in captured steps: updated after the replay, or a part of the step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeGuard

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_graphs.device.rules import Obstacle, Remedy, know_cause
from lightning_graphs.private.callsite import is_library
from lightning_graphs.private.exchange import exchanged, subclassed
from lightning_graphs.watch.late import LateValue, Use
from lightning_graphs.watch.tracers import used
from lightning_graphs.watch.user_code import iter_objects, objects_in

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
        self._changed: list[str] = []
        # Names of those to which a step gives tensors that it changes afterwards
        self.copied: set[str] = set()
        # By ``id``: the hash of a metric changes with its states
        self._inside: dict[int, nn.Module] = {}

    def needs(self, metric: nn.Module) -> None:
        """Note that a step has used the value of a metric."""
        self._asked.append(metric)

    def changes(self, name: str) -> None:
        """Note that a step changes a tensor after it has given it to a metric of this name."""
        self._changed.append(name)

    def refuse_use(self, metric: nn.Module, what: str) -> NoReturn:
        """Refuse to use what a metric gives or keeps, where that is updated after the replay."""
        self.needs(metric)
        raise used(METRIC_VALUE, what)

    def learn(self) -> bool:
        """Let captured steps compute metrics whose values were used; whether anything is new.

        All that is inside of one goes with it, and so does what it is inside of.
        """
        asked, self._asked = set(map(id, self._asked)), []
        known = len(self._inside) + len(self.copied)
        self.copied.update(self._changed)
        self._changed.clear()
        for _, metric in metrics_of(self._module):
            held = (value for _, value in objects_in("", metric, {}))
            inside = {id(value): value for value in held if isinstance(value, nn.Module)}
            if asked & inside.keys():
                self._inside.update(inside)
        return len(self._inside) + len(self.copied) > known

    def is_apart(self, module: nn.Module) -> bool:
        """Whether a module is a metric that is updated after the replay."""
        return is_metric(module) and id(module) not in self._inside

    def apart(self) -> list[tuple[str, Metric | MetricCollection]]:
        """List names and metrics that are updated after the replay."""
        return [found for found in metrics_of(self._module) if self.is_apart(found[1])]


_METRICS = frozenset({Metric, MetricCollection})


def is_metric(value: object) -> TypeGuard[Metric | MetricCollection]:
    # As `isinstance`, which asks every class of torchmetrics about a class that is new to it.
    return not _METRICS.isdisjoint(type(value).__mro__)


def metrics_of(module: nn.Module) -> list[tuple[str, Metric | MetricCollection]]:
    """Find the metrics that a module holds, also those inside of others, outer ones first."""
    held = iter_objects(module)
    return [(name.removeprefix("self."), one) for name, one in held if is_metric(one)]


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
        for method in ("forward", "update", "compute", "reset")
    ]
    with contextlib.ExitStack() as stack:
        for name, metric in named:
            if isinstance(metric, Metric):
                look = functools.partial(read, metric)
                stack.enter_context(subclassed(metric, _reads_noted(metric, name, look)))
        stack.enter_context(exchanged(methods))
        yield


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


def results_of(owner: object, use: Use) -> tuple[Any, Callable[[Any], object]]:
    """Return tracers for the result of a metric that is kept back, and what gives them values."""
    if not isinstance(owner, MetricCollection):
        late = LateValue(use)
        return late, late.give
    keys = owner.keys(keep_base=False)
    several = {k: LateValue(dataclasses.replace(use, name=f"{use.name}[{k!r}]")) for k in keys}

    def give(values: Any) -> None:
        for key, value in (values or {}).items():
            several[key].give(value)

    return several, give
