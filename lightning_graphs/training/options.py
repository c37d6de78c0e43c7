"""The options of :class:`~lightning_graphs.GraphCapture`, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_graphs.errors import GraphError

OnFailure = Literal["eager", "raise"]
Scope = Literal["step"]
BackendChoice = Literal["auto", "cuda", "emulated"]


class OptionError(GraphError, ValueError):
    """An option has a value that it cannot have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Plain values only, so that a configuration file can hold them; see ``GraphCapture``."""

    scope: Scope = "step"
    warmup_steps: int = 3
    capture_after: int = 2
    max_graphs: int = 8
    on_failure: OnFailure = "eager"
    backend: BackendChoice = "auto"

    def __post_init__(self) -> None:
        _require_one_of("scope", self.scope, ("step",))
        _require_one_of("on_failure", self.on_failure, ("eager", "raise"))
        _require_one_of("backend", self.backend, ("auto", "cuda", "emulated"))
        _require_at_least(
            "warmup_steps", self.warmup_steps, 1, "eager steps make the optimizer's state"
        )
        _require_at_least("capture_after", self.capture_after, 0, "it counts sightings")
        _require_at_least("max_graphs", self.max_graphs, 1, "it counts graphs")


def _require_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise OptionError(
            f"{name} is one of {listed}.", f"{name}={value!r}", f"write one of {listed}"
        )


def _require_at_least(name: str, value: object, least: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(
            f"{name} is a whole number of at least {least}: {why}.",
            f"{name}={value!r}",
            f"write {name}={least} or more",
        )
