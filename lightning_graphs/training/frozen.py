"""Python values that a capture would freeze: found while they can still be refused."""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.core.callsite import CallSiteFinder
from lightning_graphs.errors import CaptureError

_COUNTERS = ("global_step", "current_epoch")


def refuse_frozen(name: str, site: str = "") -> NoReturn:
    """Raise for a Python value that changes from step to step and is read in a captured one."""
    raise CaptureError(
        "A captured step runs no Python code: a counter that it reads would stand still.",
        f"{name} is read at {site or CallSiteFinder().here().describe()}",
        "move what depends on it to on_train_batch_end or another hook, or make it a tensor that "
        "a hook fills",
    )


class FrozenIndex(int):
    """``batch_idx`` in a captured step: it may be passed on, and not be used."""

    def _refuse(self, *_: Any) -> NoReturn:
        refuse_frozen("batch_idx")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __truediv__ = __pow__ = __and__ = __or__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __index__ = __int__ = __float__ = __str__ = __repr__ = _refuse
    __format__ = _refuse
    __hash__ = int.__hash__


def uses_argument(function: Callable[..., Any], position: int) -> str | None:
    """The line of ``function`` that computes with its argument; None if it is only passed on.

    It reads the bytecode, for uses that Python does not announce, such as ``range(batch_idx)``.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None or position >= code.co_argcount:
        return None
    name = code.co_varnames[position]
    computing = ("BINARY_", "COMPARE_", "FORMAT_", "UNARY_", "CONTAINS_", "POP_JUMP", "TO_BOOL")
    instructions = list(dis.get_instructions(code))
    for here, following in itertools.pairwise(instructions):
        loads = here.opname.startswith("LOAD_FAST") and name in str(here.argval)
        if loads and following.opname.startswith(computing):
            line = next(
                (
                    i.starts_line
                    for i in reversed(instructions[: instructions.index(here) + 1])
                    if i.starts_line
                ),
                0,
            )
            return f"{code.co_filename}:{line}"
    return None


@contextlib.contextmanager
def counters_refused(trainer: Trainer) -> Iterator[None]:
    """While capturing, reading ``global_step`` or ``current_epoch`` is refused.

    The trainer's class is exchanged for a subclass: both are properties, and the module's own
    ``global_step`` and ``current_epoch`` read the trainer's.
    """
    original = type(trainer)

    def refusing(name: str) -> property:
        return property(lambda _: refuse_frozen(f"trainer.{name}"))

    watched = type(original.__name__, (original,), {name: refusing(name) for name in _COUNTERS})
    trainer.__class__ = watched
    try:
        yield
    finally:
        trainer.__class__ = original


class LoggedNumbers:
    """Watches the Python numbers that warm-up steps log: one that changes cannot be captured."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self.changing: dict[str, str] = {}

    @contextlib.contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Look at the numbers that pass through ``module.log``."""
        log = module.log

        def watched(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, (int, float)):
                if self._values.get(name, value) != value:
                    self.changing[name] = CallSiteFinder().here().describe()
                self._values[name] = value
            return log(name, value, *args, **kwargs)

        before = vars(module).get("log")
        vars(module)["log"] = watched
        try:
            yield
        finally:
            if before is None:
                del vars(module)["log"]
            else:
                vars(module)["log"] = before

    def refuse_changing(self) -> None:
        """Refuse to capture a step that logs a number which changes.

        Raises:
            CaptureError: names the key and the line.
        """
        for name, site in self.changing.items():
            raise CaptureError(
                "A captured step runs no Python code: a Python number that it logs would stand "
                "still.",
                f"self.log({name!r}, ...) logged different numbers during warm-up, at {site}",
                "log it from on_train_batch_end, or log a tensor that the step computes",
            )
