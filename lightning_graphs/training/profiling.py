"""Cheaper contexts of the profiler that records nothing: Lightning opens some 70 in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning.pytorch import Trainer

from lightning_graphs.training.interception import replaced
from lightning_graphs.training.own_code import is_lightnings


def is_profiled(trainer: Trainer) -> bool:
    """Whether anything but Lightning's own profiler that records nothing looks at the fit."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    kind = type(profiler)
    parts = (kind, kind.start, kind.stop, kind.profile)
    is_original = all(is_lightnings(p, "profilers.base", "profilers.profiler") for p in parts)
    is_patched = not {"start", "stop", "profile"}.isdisjoint(vars(profiler))
    return kind.__name__ != "PassThroughProfiler" or not is_original or is_patched


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


def has_cheap_contexts(trainer: Trainer) -> bool:
    """Whether :func:`cheap_contexts` has found that nothing is profiled."""
    return vars(trainer.profiler).get("profile") is _Unrecorded  # type: ignore[attr-defined]


class _Unrecorded(contextlib.ContextDecorator):
    """What ``Profiler.profile`` gives: a context, and a decorator."""

    def __init__(self, action_name: str) -> None:
        self._name = action_name

    def __enter__(self) -> str:
        return self._name

    def __exit__(self, *_: object) -> None:
        pass
