"""Python values that a capture would freeze: found while they can still be refused."""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_graphs.core.callsite import CallSite, CallSiteFinder
from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.core.tree import leaves_of
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.interception import properties_watched, replaced

_COUNTERS = ("global_step", "current_epoch", "is_last_batch")
_LIGHTNING = ("lightning", "pytorch_lightning")  # this package, too

COUNTER = Obstacle(
    "A captured step runs no Python code: a counter that it reads would stand still.",
    "move what depends on it to on_train_batch_end or another hook, or make it a tensor that "
    "a hook fills",
    kind="python-state",
    code='self.register_buffer("scale", torch.ones(()))  # in __init__\n'
    "self.scale.fill_(1.0 / (1 + batch_idx))  # in on_train_batch_start",
)
LOGGED_NUMBER = Obstacle(
    "A captured step runs no Python code: a Python number that it logs would stand still.",
    "log the tensor itself, without item() or float(), or log from on_train_batch_end; a learning "
    "rate with the callback LearningRateMonitor",
    kind="python-state",
    code='self.log("loss", loss)  # the tensor',
)


def refuse_frozen(name: str) -> NoReturn:
    """Raise for a Python value that changes from step to step and is read in a captured one."""
    observed = f"{name} is read at {CallSiteFinder().here().describe()}"
    raise CaptureError(COUNTER.rule, observed, COUNTER.remedy)


class StandIn(abc.ABC):
    """Stands for a value that a captured step does not have: it may be passed on, and not be used.

    It is no ``int`` or ``float``: C++ would read the value of one without asking.
    """

    @abc.abstractmethod
    def refuse(self) -> NoReturn:
        """Raise a :class:`CaptureError` that names the value."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __divmod__ = __rdivmod__ = __neg__ = __pos__ = __abs__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __bool__ = __index__ = __int__ = __float__ = __str__ = __repr__ = __format__ = _refuse
    __iter__ = __getitem__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # torch and copy ask whether there is such a protocol
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators of torch ask for it, and so none reads the value."""
        refuse_stand_ins((args, kwargs))
        return NotImplemented


class FrozenNumber(StandIn):
    """A Python number that is another one at every step, while one step is captured.

    Args:
        name: What a refusal calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def refuse(self) -> NoReturn:
        refuse_frozen(self.name)


def refuse_stand_ins(value: Any) -> None:
    """Refuse a value with something in it that a captured step does not have.

    Raises:
        CaptureError: names it.
    """
    for leaf in leaves_of(value):
        if isinstance(leaf, StandIn):
            leaf.refuse()


@contextlib.contextmanager
def rates_exchanged(trainer: Trainer, optimizer: Optimizer, rates: Sequence[Any]) -> Iterator[None]:
    """While capturing, schedulers and parameter groups give these learning rates, a group each."""
    schedulers = [
        config.scheduler
        for config in trainer.lr_scheduler_configs
        if getattr(config.scheduler, "optimizer", None) is optimizer
        and hasattr(config.scheduler, "_last_lr")
    ]
    last = [scheduler._last_lr for scheduler in schedulers]
    before = [group["lr"] for group in optimizer.param_groups]
    for scheduler in schedulers:
        scheduler._last_lr = list(rates)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for scheduler, known in zip(schedulers, last, strict=True):
            scheduler._last_lr = known
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate


@contextlib.contextmanager
def counters_watched(
    trainer: Trainer, on_read: Callable[[str], object] = refuse_frozen
) -> Iterator[None]:
    """While capturing, reading ``global_step``, ``current_epoch`` or ``is_last_batch`` is refused.

    The trainer's class is exchanged for a subclass: they are properties, and the module's own
    ``global_step`` and ``current_epoch`` read the trainer's. Its ``fit_loop`` holds counters and
    little else; only Lightning itself may look there.

    Args:
        trainer: The trainer.
        on_read: Called with the counter's name; where it returns, the read goes on.
    """
    original = type(trainer)

    def watching(name: str) -> property:
        def read(owner: Trainer) -> Any:
            on_read(f"trainer.{name}")
            return getattr(original, name).__get__(owner)

        return property(read)

    def fit_loop(owner: Trainer) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_LIGHTNING):
            on_read("trainer.fit_loop")
        return vars(owner)["fit_loop"]

    properties = {name: watching(name) for name in _COUNTERS}
    properties["fit_loop"] = property(fit_loop)
    with properties_watched(trainer, properties):
        yield


class LoggedNumbers:
    """Watches the Python numbers that warm-up steps log: one that changes cannot be captured."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self.changing: dict[str, CallSite] = {}

    @contextlib.contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Look at the numbers that pass through ``module.log``."""
        log = module.log

        def watched(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, (int, float)):
                if self._values.get(name, value) != value:
                    self.changing[name] = CallSiteFinder().here()
                self._values[name] = value
            return log(name, value, *args, **kwargs)

        with replaced(module, "log", watched):
            yield

    def refuse_changing(self) -> None:
        """Refuse to capture a step that logs a number which changes.

        Raises:
            CaptureError: names the key and the line.
        """
        for name, site in self.changing.items():
            raise CaptureError(
                LOGGED_NUMBER.rule,
                f"self.log({name!r}, ...) logged different numbers during warm-up, at "
                f"{site.describe()}",
                LOGGED_NUMBER.remedy,
            )
