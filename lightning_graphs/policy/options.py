"""Checks the options of :class:`~lightning_graphs.GraphCapture`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_graphs.errors import FIX, GraphError


class OptionError(GraphError, ValueError):
    """An option has a value that it cannot have."""


def refuse_unnamed(nameless: Sequence[object], unknown: Mapping[str, object]) -> None:
    """Refuse options without a name or under an unknown one, with the names that may be meant."""
    if nameless:
        hints, value = get_type_hints(Options), nameless[0]
        meant = [name for name in OPTIONS if value in get_args(hints[name])] or ["scope"]
        raise TypeError(
            f"GraphCapture() takes keyword arguments alone, got the positional argument {value!r}"
            f"{FIX}write GraphCapture({meant[0]}={value!r})"
        )
    for name in unknown:
        near = difflib.get_close_matches(name, OPTIONS, n=1)
        hint = f"write {near[0]!r}" if near else f"write one of {', '.join(OPTIONS)}"
        raise TypeError(f"GraphCapture() got an unexpected keyword argument {name!r}{FIX}{hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The arguments of ``GraphCapture``, which explains them: plain values, as files hold them."""

    scope: Literal["auto", "step", "modules"] = "auto"
    modules: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    evaluation: bool = True
    warmup_steps: int = 3
    min_repeats: int | None = None
    max_graphs: int | None = None
    on_failure: Literal["eager", "raise"] = "eager"
    backend: Literal["auto", "cuda", "emulated"] = "auto"
    verify: bool | int = True
    memory: float | Literal["auto"] = "auto"
    only_if_faster: bool = True
    overlap: bool = True
    optimizer_kernel: Literal["fused", "own"] = "fused"
    annotate: bool = False
    log_metrics: bool = False
    diagnose: bool = False

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Options).items():
            choices = (True, False) if hint is bool else get_args(hint)
            if hint is bool or get_origin(hint) is Literal:
                _require_one_of(name, getattr(self, name), choices)
        _require_at_least(
            "warmup_steps", self.warmup_steps, 1, ": eager steps make the optimizer's state"
        )
        if self.min_repeats is not None:
            _require_at_least("min_repeats", self.min_repeats, 0)
        if self.max_graphs is not None:
            _require_at_least("max_graphs", self.max_graphs, 1)
        if not (isinstance(self.verify, bool) or _is_whole(self.verify, 1)):
            raise OptionError(
                "verify must be True, False, or a whole number of at least 1.",
                f"got {self.verify!r}",
                "write verify=100 to verify every 100th step as well, or verify=False for never",
            )
        memory = self.memory
        is_number = isinstance(memory, (int, float)) and not isinstance(memory, bool)
        if memory != "auto" and not (is_number and float(memory) >= 0):
            raise OptionError(
                "memory must be 'auto' or a number of at least 0.",
                f"got {memory!r}: memory is a part of the peak of eager steps",
                "write memory=0.35 for a third more than eager steps take",
            )
        _require_names("modules", () if self.modules is None else self.modules)
        _require_names("exclude", self.exclude)
        if self.modules is not None and not self.modules:
            raise OptionError(
                "modules must name a submodule.",
                f"got {self.modules!r}",
                "leave modules out to have the largest submodules that can be captured",
            )
        for name in ("modules", "exclude"):
            if self.scope == "step" and (names := getattr(self, name)):
                raise OptionError(
                    f"{name} must be left out with scope='step', which captures whole steps.",
                    f"got {list(names)!r}",
                    f"write scope='modules', or leave out {name}",
                )

    @property
    def by_submodules(self) -> bool:
        """Whether graphs of submodules are asked for, and not tried after whole steps."""
        return self.scope == "modules" or bool(self.modules or self.exclude)

    @property
    def by_times(self) -> bool:
        """Whether measured times, where there are any, decide what is captured."""
        return self.only_if_faster and self.min_repeats is None


OPTIONS = {field.name: field.default for field in fields(Options)}
"""Names -> values by default."""


def _require_one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if (type(value), value) not in [(type(choice), choice) for choice in choices]:
        listed = ", ".join(map(repr, choices))
        allowed = " or ".join(f"{name}={choice!r}" for choice in choices)
        raise OptionError(f"{name} must be one of {listed}.", f"got {value!r}", f"write {allowed}")


def _require_names(name: str, value: Any) -> None:
    entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    if not all(isinstance(entry, str) and entry for entry in entries):
        meant = value if isinstance(value, str) and value else "encoder.layers.*"
        raise OptionError(
            f"{name} must be a list of names of submodules, of patterns or of classes.",
            f"got {value!r}",
            f"write {name}=[{meant!r}]",
        )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require_at_least(name: str, value: object, least: int, why: str = "") -> None:
    if not _is_whole(value, least):
        kind = "" if type(value) is int else f", a {type(value).__name__}"
        raise OptionError(
            f"{name} must be a whole number of at least {least}.",
            f"got {value!r}{kind}{why}",
            f"write {name}={least} or more",
        )
