"""What replays call after their graphs, as the doctor sees it: metrics, and what is only logged."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_graphs.device.rules import Obstacle
from lightning_graphs.errors import CaptureError
from lightning_graphs.lightning.logs import METRIC_LATER
from lightning_graphs.lightning.metrics import METRIC_VALUE, StepMetrics, metrics_exchanged
from lightning_graphs.private.callsite import CallSite
from lightning_graphs.private.torch import current_autograd_node
from lightning_graphs.report.diagnosis import Diagnosis
from lightning_graphs.watch.late import LATE_RULES, Given, KeptCalls, Use
from lightning_graphs.watch.noted import NotedNumbers, Observer

_Found = tuple[str, Obstacle, CallSite]
"""Operator, obstacle, and the user's line."""


class NotedCalls:
    """Makes the calls that captures keep back, and notes where a step needs their values.

    What one observed step shows, the next one treats as a capture would: a metric whose value is
    used is looked into, and a call that reads values on the host is one that is kept back.
    """

    def __init__(
        self,
        metrics: StepMetrics,
        kept: KeptCalls,
        observer: Observer,
        numbers: NotedNumbers,
        diagnosis: Diagnosis,
        last: int,  # of the observed steps, from 1
    ) -> None:
        self._metrics, self._kept = metrics, kept
        self._observer, self._numbers, self._diagnosis = observer, numbers, diagnosis
        self._last = last
        # Metrics that the step computes, with the values that they had where they were logged
        self._logged: list[tuple[Metric, Any, CallSite]] = []
        self.sites: set[CallSite] = set()  # lines with calls that are kept back
        self._made: set[str] = set()  # those that were
        self._uses: dict[str, Use] = {}  # of their results, by the names of those that are numbers
        # What is in the way unless its call is kept back, by the name of that; and in which step
        self._postponed: dict[str, tuple[_Found, int]] = {}

    def begin(self) -> None:
        """Begin another step, with what the last one has shown."""
        self._metrics.learn()
        self._kept.drop_used()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch calls of metrics, and of Python functions that are kept back, in the body."""
        apart = self._metrics.apart()
        metrics = metrics_exchanged(apart, self._unobserved, self._needs)
        with metrics, self._kept.exchanged(self._make):
            yield

    def of_torch(self) -> contextlib.AbstractContextManager[object]:
        """Watch calls of torch that are kept back, in the body."""
        return self._kept.of_torch(self._make)

    def judge(self) -> None:
        """Judge a step at its end."""
        for metric, value, site in self._logged:
            if metric._forward_cache is not value:
                self._diagnosis.add(METRIC_LATER, "self.log", site)
        self._logged.clear()

    def finish(self) -> None:
        """Note what was not kept back in the end."""
        for name, (found, step) in self._postponed.items():
            if name not in self._made:
                self._add(found, step)

    # ------------------------------------------------------------------ metrics

    def _unobserved(
        self, metric: nn.Module, function: Callable[..., Any], _: str
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._observer.looking_away():
                result = function(*args, **kwargs)
                self._observer.forbid(result, functools.partial(self._needs, metric))
                return result

        return call

    def _needs(self, metric: nn.Module, what: str) -> None:
        """Let the next step show what is in the way of a metric that this one computes with."""
        if not self._observer.silent:
            self._metrics.needs(metric)
            if self._diagnosis.steps == self._last:
                self._observer.refuse(what, METRIC_VALUE)

    def metric_logged(self, metric: Metric, site: CallSite) -> None:
        """Note that a metric is logged as an object."""
        if not self._metrics.is_apart(metric):
            self._logged.append((metric, metric._forward_cache, site))

    # ------------------------------------------------------------------ other calls

    def postpones(self, found: _Found, stack: Sequence[FrameType]) -> bool:
        """Whether the next step shows if the call with an obstacle can be kept back.

        Args:
            found: The obstacle.
            stack: The frames that run, inner ones first.
        """
        operator, obstacle, site = found
        known = self._observer.answered or current_autograd_node() is not None
        if known or obstacle.rule not in LATE_RULES:
            return False
        entries = [(frame, frame.f_lasti, frame.f_lineno) for frame in reversed(stack)]
        texts = obstacle.rule, operator, obstacle.remedy
        if name := self._kept.learn_call(entries, texts, anyway=True):
            self._postponed[name] = found, self._diagnosis.steps
            self.sites.add(site)
        return bool(name)

    def _make(self, function: Callable[..., Any], given: Given, use: Use) -> Any:
        with self._observer.looking_away():
            result = function(*given[0], **given[1])
        if use.name not in self._postponed:
            return result
        self._made.add(use.name)
        self._uses[use.name] = use
        if type(result) is bool:  # of which no use would be seen; as a rule it is for a branch
            self.is_used(use.name)
            return result
        (_, obstacle, _), _ = self._postponed[use.name]
        self._observer.forbid(result, lambda _: self.is_used(use.name))

        def noted(leaf: Any) -> Any:
            is_number = type(leaf) in (int, float)
            return self._numbers.number(use.name, lambda: leaf, obstacle) if is_number else leaf

        return tree_map(noted, result)

    def is_used(self, name: str) -> bool:
        """Whether this names what a kept call gives; then its value is needed, as is noted."""
        use = self._uses.get(name)
        if use is None:
            return False
        with contextlib.suppress(CaptureError):  # it marks the call, which goes on here
            use.refuse(name)
        if (known := self._postponed.pop(name, None)) is not None:
            self._add(*known, self._diagnosis.steps)
        return True

    def _add(self, found: _Found, *steps: int) -> None:
        operator, obstacle, site = found
        now = self._diagnosis.steps
        for self._diagnosis.steps in steps:
            self._diagnosis.add(obstacle, operator, site)
        self._diagnosis.steps = now
