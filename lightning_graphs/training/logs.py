"""``self.log`` and metrics: recorded while a step is captured, called again at every replay."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_graphs.core.torch_private import clone_all
from lightning_graphs.core.tree import flatten, substitute
from lightning_graphs.errors import CaptureError


@dataclass(slots=True)
class _Call:
    """A call of Python code that every replay makes again.

    Attributes:
        function: What was called.
        template: ``(args, kwargs)`` with the graph's own tensors in it.
        tensors: Those tensors, in order.
        result: Stands for the returned value in later calls.
    """

    function: Callable[..., Any]
    template: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: list[Tensor]
    result: Deferred


class Deferred:
    """What a metric returns while a step is captured: it has no value before the replay."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.value: Any = None

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            "The value of a metric is not part of a captured step: metrics are updated after it.",
            f"the value of {self._name} is used in training_step",
            "hand it to self.log only, or compute what the loss needs with torch functions",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __float__ = __int__ = __bool__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __getitem__ = __torch_function__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


class LogRecorder:
    """Collects the calls of ``self.log`` and of metrics in one captured ``training_step``.

    Args:
        module: The module that is being captured.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._calls: list[_Call] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Replace ``log`` of the module and the entry points of its metrics by recorders."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(self._module, "log", self._recorder(self._module, "log")))
            for name, metric in _metrics(self._module):
                for method in ("forward", "update", "compute", "reset"):
                    recorder = self._recorder(metric, method, f"metric `{name}`")
                    stack.enter_context(_replaced(metric, method, recorder))
            yield

    def _recorder(self, owner: Any, method: str, name: str = "self.log") -> Callable[..., Any]:
        function = getattr(owner, method)

        def record(*args: Any, **kwargs: Any) -> Deferred:
            found: list[tuple[str, Any]] = []
            flatten((args, kwargs), "", found)
            tensors = [leaf.detach() for _, leaf in found if isinstance(leaf, Tensor)]
            template = substitute((args, kwargs), tensors)
            call = _Call(function, template, tensors, Deferred(name))
            self._calls.append(call)
            return call.result

        return record

    def reissue(self) -> None:
        """Make the recorded calls again, on copies of the values that the replay computed."""
        for call in self._calls:
            args, kwargs = substitute(call.template, clone_all(call.tensors))
            args = tuple(a.value if isinstance(a, Deferred) else a for a in args)
            call.result.value = call.function(*args, **kwargs)


def _metrics(module: LightningModule) -> list[tuple[str, nn.Module]]:
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


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute past ``nn.Module.__setattr__`` and take it back."""
    attributes = vars(owner)
    missing = object()
    before = attributes.get(name, missing)
    attributes[name] = value
    try:
        yield
    finally:
        if before is missing:
            del attributes[name]
        else:
            attributes[name] = before
