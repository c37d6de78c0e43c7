"""Checks the options of :class:`~lightning_graphs.GraphCapture`, and knows their old names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import TypedDict

from lightning_graphs.core.callsite import stacklevel_of_user
from lightning_graphs.errors import FIX, GraphError


class OptionError(GraphError, ValueError):
    """An option has a value that it cannot have."""


class OldNames(TypedDict, total=False):
    """Options under names that they had before; configuration files may have them."""

    capture_after: int | None
    doctor: bool
    eval_graphs: bool
    profit_gate: bool


OLD_NAMES: Mapping[str, str] = {
    "capture_after": "min_repeats",
    "doctor": "diagnose",
    "eval_graphs": "validation",
    "profit_gate": "only_if_faster",
}
"""Names that options had before -> those that they have now; the former go in 0.2."""
OLD_VALUES: Mapping[tuple[str, str], bool] = {("verify", "off"): False, ("verify", "first"): True}
"""The same for values."""


def refuse_nameless(values: Sequence[object]) -> None:
    """Refuse options without their names, with the names that they may have meant."""
    if not values:
        return
    hints = get_type_hints(Options)
    meant = [name for name in OPTIONS if values[0] in get_args(hints[name])]
    raise TypeError(
        f"GraphCapture() takes keyword arguments alone, got the positional argument {values[0]!r}"
        f"{FIX}write GraphCapture({(meant or ['scope'])[0]}={values[0]!r})"
    )


def in_present_names(given: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Options under the names and with the values that they have now; a warning names the others.

    A name that was never one is a ``TypeError``, as Python's own.
    """
    options, written = dict(given), dict[str, str]()
    for old, value in further.items():
        if old not in OLD_NAMES:
            near = difflib.get_close_matches(old, given, n=1)
            hint = f"write {near[0]!r}" if near else f"write one of {', '.join(given)}"
            what = f"GraphCapture() got an unexpected keyword argument {old!r}"
            raise TypeError(f"{what}{FIX}{hint}")
        name = OLD_NAMES[old]
        if given[name] != OPTIONS[name]:
            raise OptionError(
                "An option must be given under one name.",
                f"got {old}={value!r} and {name}={given[name]!r}",
                f"keep {name}; {old} is its old name, which goes in 0.2",
            )
        options[name] = value
        written[name] = f"{old}={value!r}"
    for (name, value), new in OLD_VALUES.items():
        if options[name] == value:
            options[name] = new
            written[name] = f"{name}={value!r}"
    for name, text in written.items():
        warn_of_old_name(text, f"{name}={options[name]!r}")
    return options


def warn_of_old_name(written: str, present: str) -> None:
    what = f"GraphCapture: {written} is the old name, which goes in 0.2; write {present}"
    rank_zero_warn(what, category=FutureWarning, stacklevel=stacklevel_of_user())


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The arguments of ``GraphCapture``, which explains them: plain values, as files hold them."""

    scope: Literal["auto", "step", "modules"] = "auto"
    modules: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    validation: bool = False
    warmup_steps: int = 3
    min_repeats: int | None = None
    max_graphs: int | None = None
    on_failure: Literal["eager", "raise"] = "eager"
    backend: Literal["auto", "cuda", "emulated"] = "auto"
    verify: bool | int = True
    memory: float | Literal["auto"] = "auto"
    only_if_faster: bool = True
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
