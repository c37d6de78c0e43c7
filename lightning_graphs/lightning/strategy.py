"""Exchanges the three strategy methods through which every training step passes.

Every hook, counter, progress bar, logger and checkpoint stays in Lightning's hands. The methods
have had these names and signatures since Lightning 2.0; they are looked up on the instance.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_graphs.errors import CaptureError
from lightning_graphs.private.exchange import replaced
from lightning_graphs.watch.user_code import is_lightnings

NAMES = ("training_step", "backward", "optimizer_step")


@dataclass(frozen=True, slots=True)
class StrategyCalls:
    """The strategy's own methods."""

    training_step: Callable[..., Any]
    backward: Callable[..., Tensor]
    optimizer_step: Callable[..., Any]


def loss_of(returned: Any) -> Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor):
        raise CaptureError(
            "training_step must return the loss, or a dict with it under 'loss'.",
            f"got {type(returned).__qualname__}"
            + (f" with loss={loss!r}" if isinstance(returned, Mapping) else ""),
            "return a loss for every batch; a step that is sometimes skipped cannot be captured",
        )
    return loss


class StepHandler(Protocol):
    """What takes the place of the strategy's methods."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any: ...

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any: ...


def calls_of(strategy: Strategy) -> StrategyCalls:
    return StrategyCalls(strategy.training_step, strategy.backward, strategy.optimizer_step)


def intercepted(strategy: Strategy, handler: StepHandler) -> contextlib.ExitStack:
    """Let ``handler`` answer until this is closed, which gives a user's own methods back, too."""
    stack = contextlib.ExitStack()
    for name in NAMES:
        stack.enter_context(replaced(strategy, name, getattr(handler, name)))
    return stack


@contextlib.contextmanager
def log_exchanged(
    module: LightningModule, log: Callable[..., None]
) -> Iterator[Callable[..., None]]:
    """Let ``self.log`` of a module end in ``log``: below what overrides it, and ``super().log``."""
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

    with replaced(base, "log", exchanged):
        yield own
