"""What no graph can hold: graphs of torch.compile, prints, files, loggers, exceptions."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch import nn

from lightning_graphs.device.rules import SIDE_EFFECT, OnUse
from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    first_line,
    in_one_line,
    is_out_of_memory,
    no_room,
    refusals,
)
from lightning_graphs.private.callsite import CallSite, CallSiteFinder, frames_from
from lightning_graphs.private.exchange import exchanged
from lightning_graphs.private.torch import makes_own_graphs, module_hooks, values_checked_on_device
from lightning_graphs.watch.user_code import UserCode

_OWN_GRAPHS = (
    "is compiled to CUDA graphs of its own, which no graph can hold; write torch.compile(...) "
    "without mode, or mode='max-autotune-no-cudagraphs'"
)


def obstacle_in(module: nn.Module) -> str | None:
    """Why no graph can hold a module, or one inside of it, in a sentence; None if one can."""
    for owner in with_own_graphs(module):
        return f"`{owner}` {_OWN_GRAPHS}"
    return None


def with_own_graphs(module: nn.Module) -> Iterator[str]:
    """Qualified names of the submodules and attributes that ``torch.compile`` gave own graphs."""
    for name, inner in module.named_modules():
        if makes_own_graphs(inner):
            yield name or type(inner).__name__
            continue
        for attribute, value in vars(inner).items():
            if callable(value) and not isinstance(value, nn.Module) and makes_own_graphs(value):
                where = name if attribute == "_compiled_call_impl" else f"{name}.{attribute}"
                yield where.strip(".") or type(inner).__name__


def bound_by_hooks(root: nn.Module) -> dict[str, str]:
    """Weights that old hooks of ``torch.nn.utils`` bind anew in each call, and what to do.

    ``weight_norm``, ``spectral_norm`` and pruning set a plain attribute, ahead of the forward.
    """
    found: dict[str, str] = {}
    for path, inner in root.named_modules():
        for hook in module_hooks(inner):
            name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
            library, _, kind = type(hook).__module__.rpartition(".")
            if library == "torch.nn.utils" and name:
                new = "prune.remove" if kind == "prune" else f"parametrizations.{kind}"
                found[f"{path}.{name}".lstrip(".")] = f"{library}.{new}"
    return found


_CALLS = (
    *("builtins.print", "builtins.open", "io.open", "sys.stdout.write", "sys.stderr.write"),
    *("logging.Logger.handle", "rich.console.Console.print", "rich.console.Console.log"),
    *("torch.save", "wandb.log", "mlflow.log_metric", "mlflow.log_metrics"),
)
_NAMES = {"builtins.print": "print", "builtins.open": "open", "io.open": "open"}  # pathlib calls it
_NAMES["logging.Logger.handle"] = "a logger of Python"
_LOGGERS = ("logger", "loggers")  # properties that read others of the same name
_PASSING_ON = ("logging", "pathlib", "lightning_utilities", "rich", "tqdm")
"""Packages that print, write and log for whoever calls them."""

_RANK_ZERO = ".rank_zero"  # modules of Lightning that do so as well
# What reads attributes for others, to watch them
_WATCHERS = ("lightning_graphs.watch.", "lightning_graphs.lightning.trainer")


Effect = tuple[Any, str, str]
"""What user code is seen to use: an object or class, a name in it, and a name for messages."""


def effects_watched(
    own: UserCode, on_use: OnUse, further: Iterable[Effect]
) -> AbstractContextManager[None]:
    """Watch for prints, opened files, Python's loggers and further effects, in this thread.

    Only lines of user code count: libraries warn and log on their own account.
    """
    thread = threading.get_ident()

    def used(what: str, frame: FrameType | None) -> None:
        if frame is not None and threading.get_ident() == thread and own.runs_in(frame):
            site = CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            on_use(SIDE_EFFECT, what, f"{what} is used", site)

    present = [*further, *_present()]
    return exchanged((o, name, _watched(getattr(o, name), what, used)) for o, name, what in present)


def _present() -> Iterator[Effect]:
    """Those of Python and of known packages that have been imported."""
    for path in _CALLS:
        module, *outer, name = path.split(".")
        owner = functools.reduce(lambda o, n: getattr(o, n, None), outer, sys.modules.get(module))
        if hasattr(owner, "__dict__") and hasattr(owner, name):  # some programs have no console
            yield owner, name, _NAMES.get(path, path)


def _watched(original: Any, what: str, used: Callable[[str, FrameType | None], None]) -> Any:
    """A function that tells who calls it, or a property that tells who reads it."""
    is_property = isinstance(original, property)
    function = original.fget if is_property else original

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        frame = next((f for f in frames_from(sys._getframe(1)) if not _passes_on(f)), None)
        if not is_property or function(*args):  # without a logger, nothing is done with it
            used(what, frame)
        return function(*args, **kwargs)

    return property(watched, original.fset) if is_property else watched


def _passes_on(frame: FrameType) -> bool:
    """Whether a frame acts for the one that has called it."""
    module: str = frame.f_globals.get("__name__", "")
    is_library = module.partition(".")[0] in _PASSING_ON or module.endswith(_RANK_ZERO)
    watches = module.startswith(_WATCHERS) and module != __name__
    return is_library or watches or frame.f_code.co_name in _LOGGERS


class RaisedInCapture(CaptureError):
    """Code raised while it was captured; ``__cause__`` is what it raised."""


@contextlib.contextmanager
def code_captured(what: str) -> Iterator[None]:
    """Make a refusal of whatever the body, the capture of what is named so, raises.

    What is refused stays refused where an `except` in the captured code goes on without it: in an
    eager step, and so in a replay, there would have been nothing to go on from.
    """
    with refusals() as refused:
        try:
            with values_checked_on_device():
                yield
            if refused:
                raise refused[0]
        except GraphError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise no_room(what, first_line(error)) from error
            if refused:  # what the code makes of its refusal
                raise refused[0] from error
            site = CallSiteFinder().of_exception(error)
            raise RaisedInCapture(
                f"{what} must run without an error.",
                f"{in_one_line(error)}, at {site.describe()}",
                "correct the line, if it raises in an eager step, too; else only pass on or log "
                "the value: some, such as those of metrics, are not there during a capture",
            ) from error
