"""Cheaper contexts of the profiler that records nothing: Lightning opens some 70 in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning.pytorch import Trainer

from lightning_graphs.training.interception import replaced

# ``pytorch_lightning`` is the same code under another name, with classes of its own.
_PASS_THROUGH = frozenset(
    f"{library}.profilers.{file}"
    for library in ("lightning.pytorch", "pytorch_lightning")
    for file in ("base", "profiler")
)


def is_profiled(trainer: Trainer) -> bool:
    """Whether anything but Lightning's own profiler that records nothing looks at the fit."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    kind = type(profiler)
    makers = {part.__module__ for part in (kind, kind.start, kind.stop, kind.profile)}
    is_patched = not {"start", "stop", "profile"}.isdisjoint(vars(profiler))
    return kind.__name__ != "PassThroughProfiler" or not makers <= _PASS_THROUGH or is_patched


@contextlib.contextmanager
def cheap_contexts(trainer: Trainer) -> Iterator[None]:
    """Where nothing is profiled, let ``profiler.profile(...)`` cost a third of what it costs.

    Lightning opens such a context around each hook of each callback.
    """
    if is_profiled(trainer):
        yield
        return
    profiler = trainer.profiler  # type: ignore[attr-defined]
    with replaced(profiler, "profile", _Unrecorded):
        yield


class _Unrecorded(contextlib.ContextDecorator):
    """What ``Profiler.profile`` gives: a context, and a decorator."""

    def __init__(self, action_name: str) -> None:
        self._name = action_name

    def __enter__(self) -> str:
        return self._name

    def __exit__(self, *_: object) -> None:
        pass
