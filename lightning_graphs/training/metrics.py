"""torchmetrics objects in a captured step: their calls are made again at every replay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.core.torch_private import clone_all
from lightning_graphs.core.tree import leaves_of, substitute
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.frozen import StandIn, refuse_stand_ins
from lightning_graphs.training.held_values import held_in

METRIC_VALUE = Obstacle(
    "The value of a metric is not part of a captured step: metrics are updated after it.",
    "hand it to self.log only, or compute what the loss needs with torch functions",
    kind="metric-value",
    code='self.log("accuracy", self.accuracy(logits, y))  # and nothing else with its value',
)
METRIC_EARLY = Obstacle(
    "What a captured step gives to a metric is read after the step.",
    "hand over a copy: value.clone()",
    kind="logged-early",
    code="self.accuracy(logits.clone(), y)",
)


class Deferred(StandIn):
    """What a metric returns while a step is captured: it has no value before the replay."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Any = None

    def refuse(self) -> NoReturn:
        observed = f"the value of {self.name} is used in training_step"
        raise CaptureError(METRIC_VALUE.rule, observed, METRIC_VALUE.remedy)

    def now(self) -> Any:
        return self.value


class MetricCall:
    """A call of a metric that every replay makes again, on copies of its tensors."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, name: str) -> None:
        refuse_stand_ins((args, kwargs))
        self._function = function
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        self._tensors = [tensor.detach() for tensor in tensors]
        self._template = substitute((args, kwargs), self._tensors)
        self._result = Deferred(name)
        self._items: dict[str, Deferred] | None = None
        owner = getattr(function, "__self__", None)
        if isinstance(owner, Mapping | nn.ModuleDict):
            keys = owner.keys()  # a MetricCollection returns a dict
            self._items = {key: Deferred(f"{name}[{key!r}]") for key in keys}

    @property
    def result(self) -> Deferred | dict[str, Deferred]:
        """What the call returns while a step is captured."""
        return self._result if self._items is None else dict(self._items)

    def reissue(self, _: object) -> None:
        args, kwargs = substitute(self._template, clone_all(self._tensors))
        value = self._function(*args, **kwargs)
        self._result.value = value
        for key, deferred in (self._items or {}).items():
            deferred.value = value[key] if value is not None else None


def metrics_of(module: LightningModule) -> list[tuple[str, nn.Module]]:
    """The outermost torchmetrics objects that a module holds; none if nobody has torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return []
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, child in held_in(module):
        if isinstance(child, kinds) and child not in inside:
            found.append((name.removeprefix("self."), child))
            inside.update(child.modules())
    return found
