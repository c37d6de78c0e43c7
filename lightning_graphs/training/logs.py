"""``self.log`` and metrics: recorded while a step is captured, called again at every replay."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.core.torch_private import clone_all, version_of
from lightning_graphs.core.tree import leaves_of, substitute
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.frozen import StandIn
from lightning_graphs.training.interception import replaced
from lightning_graphs.training.lightning_private import (
    batch_size_of,
    result_key,
    training_results,
)
from lightning_graphs.training.progress import ProgressValues

_LOG_SIGNATURE = inspect.signature(LightningModule.log)

METRIC_VALUE = Obstacle(
    "The value of a metric is not part of a captured step: metrics are updated after it.",
    "hand it to self.log only, or compute what the loss needs with torch functions",
    kind="metric-value",
    code='self.log("accuracy", self.accuracy(logits, y))  # and nothing else with its value',
)
LOGGED_EARLY = Obstacle(
    "What a captured step logs is read after the step.",
    "hand over a copy: value.clone()",
    kind="logged-early",
    code='self.log("loss", loss.clone())',
)


class Deferred(StandIn):
    """What a metric returns while a step is captured: it has no value before the replay."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: Any = None

    def refuse(self) -> NoReturn:
        observed = f"the value of {self.name} is used in training_step"
        raise CaptureError(METRIC_VALUE.rule, observed, METRIC_VALUE.remedy)


class _MetricCall:
    """A call of a metric that every replay makes again, on copies of its tensors."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, name: str) -> None:
        self._function = function
        self._template, self._tensors = _template(args, kwargs)
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

    def reissue(self) -> None:
        args, kwargs = substitute(self._template, clone_all(self._tensors))
        value = self._function(*args, **kwargs)
        self._result.value = value
        for key, deferred in (self._items or {}).items():
            deferred.value = value[key] if value is not None else None


class _LogCall:
    """A call of ``self.log`` that every replay makes again.

    The first one of an epoch goes through ``LightningModule.log``, which makes and resets the entry
    of the key; the others update the entry.
    """

    def __init__(self, module: LightningModule, args: Any, kwargs: Any) -> None:
        self._module = module
        self._log = module.log
        bound = _LOG_SIGNATURE.bind(module, *args, **kwargs)
        self.name: str = bound.arguments["name"]
        self.value: Any = bound.arguments["value"]
        self.prog_bar = bool(bound.arguments.get("prog_bar", False))
        self._batch_size: int | None = bound.arguments.get("batch_size")
        self._template, self._tensors = _template(args, kwargs)
        self._scalar: Tensor | None = None
        if isinstance(self.value, Tensor):
            self._scalar = self.value.detach().squeeze()
        elif isinstance(self.value, (int, float)):
            self._scalar = torch.tensor(self.value, dtype=torch.get_default_dtype())
        self._known_size: int | None = None

    def reissue(self) -> None:
        results = training_results(self._module.trainer)
        entry = results.get(result_key(self.name)) if results is not None else None
        if results is None or entry is None or entry.has_reset or self._scalar is None:
            args, kwargs = substitute(self._template, clone_all(self._tensors))
            self._log(*map(_value, args), **{key: _value(v) for key, v in kwargs.items()})
            return
        if self._known_size is None:
            self._known_size = batch_size_of(results, entry, self._batch_size)
            self._scalar = self._scalar.to(entry.value.device)
        results.update_metrics(result_key(self.name), self._scalar, self._known_size)


class LogRecorder:
    """Collects the calls of ``self.log`` and of metrics in one captured ``training_step``.

    Args:
        module: The module that is being captured.
        progress: Where values for the progress bar are mirrored to; None to read them directly.
    """

    def __init__(self, module: LightningModule, progress: ProgressValues | None = None) -> None:
        self._module = module
        self._progress = progress
        self._calls: list[_MetricCall | _LogCall] = []
        self._mirrored: frozenset[str] = frozenset()
        self._versions: list[tuple[str, Tensor, int]] = []
        state = (*module.parameters(), *module.buffers())
        self._state = frozenset(t.untyped_storage().data_ptr() for t in state)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Replace ``log`` of the module and the entry points of its metrics by recorders."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self._module, "log", self._record_log))
            for name, metric in metrics_of(self._module):
                for method in ("forward", "update", "compute", "reset"):
                    recorder = self._metric_recorder(metric, method, f"metric `{name}`")
                    stack.enter_context(replaced(metric, method, recorder))
            yield

    def _record_log(self, *args: Any, **kwargs: Any) -> None:
        args, kwargs = self._own("self.log", args, kwargs)
        del vars(self._module)["log"]  # the call must know the real one
        try:
            self._calls.append(_LogCall(self._module, args, kwargs))
        finally:
            vars(self._module)["log"] = self._record_log

    def _metric_recorder(self, metric: Any, method: str, name: str) -> Callable[..., Any]:
        function = getattr(metric, method)

        def record(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._own(name, args, kwargs)
            call = _MetricCall(function, args, kwargs, name)
            self._calls.append(call)
            return call.result

        return record

    def _own(self, name: str, args: Any, kwargs: Any) -> Any:
        """The arguments with copies of what the rest of the step will change.

        They are read after the whole step. Parameters and buffers have other values by then.
        """
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        own = [
            t.detach().clone() if t.untyped_storage().data_ptr() in self._state else t
            for t in tensors
        ]
        self._versions += [(name, t, version_of(t)) for t in own]
        return substitute((args, kwargs), own)

    def finish(self) -> None:
        """Copy what the progress bar shows to the host; a part of the captured step.

        Raises:
            CaptureError: a recorded value was changed in place since.
        """
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                observed = f"a tensor given to {name} is changed in place afterwards"
                raise CaptureError(LOGGED_EARLY.rule, observed, LOGGED_EARLY.remedy)
        self._versions.clear()
        if self._progress is not None:
            shown = [c for c in self._calls if isinstance(c, _LogCall) and c.prog_bar]
            values = {c.name: c.value for c in shown if isinstance(c.value, Tensor)}
            self._mirrored = self._progress.capture(values)

    def reissue(self) -> None:
        """Make the recorded calls again, on the values that the replay computed."""
        for call in self._calls:
            call.reissue()
        if self._progress is not None:
            self._progress.mirrored = self._mirrored


class QuickLog:
    """Stands for ``self.log`` in steps that are no graph as a whole, at a tenth of its price.

    The first call of a key in an epoch, and every one that differs from the last in more than the
    value, goes through ``LightningModule.log``; the others update the entry that it made.

    Args:
        module: The module, in whose ``training_step`` it stands.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._known: dict[str, dict[str, Any]] = {}

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Around the module's ``training_step``."""
        return replaced(self._module, "log", self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """``LightningModule.log``."""
        if len(args) == 2 and self._known.get(args[0]) == kwargs and _is_scalar(args[1]):
            results = training_results(self._module.trainer)
            key = result_key(args[0])
            entry = results.get(key) if results is not None else None
            if results is not None and entry is not None and not entry.has_reset:
                value = args[1].detach().squeeze().to(entry.value.device)
                size = batch_size_of(results, entry, kwargs.get("batch_size"))
                results.update_metrics(key, value, size)
                return
        del vars(self._module)["log"]  # the call must know the real one
        try:
            self._module.log(*args, **kwargs)
        finally:
            vars(self._module)["log"] = self
        if len(args) == 2 and all(type(v) in _PLAIN for v in kwargs.values()):
            self._known[args[0]] = kwargs


_PLAIN = (bool, int, str, type(None))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _template(args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Arguments of a call with detached tensors in them, and those tensors in order."""
    tensors = [leaf.detach() for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    return substitute((args, kwargs), tensors), tensors


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, Deferred) else argument


def metrics_of(module: LightningModule) -> list[tuple[str, nn.Module]]:
    """The outermost torchmetrics objects of a module; none if torchmetrics was never imported."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return []
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(child, kinds) and not inside:
            found.append((name, child))
    return found
