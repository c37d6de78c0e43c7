"""Real code under the rules of a capture: what a capture would refuse is noted, and goes on."""

from __future__ import annotations

import contextlib
import difflib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_graphs.core.callsite import CallSite, CallSiteFinder
from lightning_graphs.core.collectives import is_collective
from lightning_graphs.core.known_causes import with_known_remedy
from lightning_graphs.core.obstacles import (
    COLLECTIVE,
    COMPILED,
    FUNCTION_RULES,
    Obstacle,
)
from lightning_graphs.core.recorder import Operation, OperatorCall, Recorder
from lightning_graphs.core.rehearsed import REHEARSED
from lightning_graphs.core.tree import leaves_of

_NUMBERS = (bool, int, float)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with the Python numbers that a capture would bake into it."""

    operator: str
    numbers: tuple[float, ...]
    site: CallSite


@dataclass(frozen=True, slots=True)
class Change:
    """How two runs of the same code differ, though their inputs have the same shapes.

    Attributes:
        operator: The operator.
        what: The two numbers, or that it is missing in one of the runs.
        site: The user's line.
        whole: Whether it may follow from a shape: whole numbers, or a missing operator.
    """

    operator: str
    what: str
    site: CallSite
    whole: bool


def changes(before: Sequence[Call], now: Sequence[Call]) -> Iterator[Change]:
    """The operators that only one of the runs calls, and those that get other Python numbers."""
    a_keys, b_keys = ([(call.operator, call.site) for call in calls] for calls in (before, now))
    matcher = difflib.SequenceMatcher(None, a_keys, b_keys, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            call = now[j] if j < j_end else before[i]
            yield Change(call.operator, "not in every step", call.site, True)
            continue
        for first, second in zip(before[i:i_end], now[j:j_end], strict=True):
            pairs = zip(first.numbers, second.numbers, strict=False)
            differing = [(a, b) for a, b in pairs if a == a and b == b and a != b]
            if differing:
                a, b = differing[0]
                what = f"{a!r} in one step, {b!r} in another"
                whole = isinstance(a, int) and isinstance(b, int)
                yield Change(second.operator, what, second.site, whole)


class Observer(Recorder):
    """Notes every obstacle of the code that runs under it, and lets the code run.

    On a CPU, where all memory is the host's, copies from there are not seen.

    Args:
        note: Called with operator, obstacle and the user's line.
        look: Called with every Python function of torch and its arguments; the numbers that it
            returns are no part of the capture, here and in the backward pass.
    """

    raises = False

    def __init__(
        self,
        note: Callable[[str, Obstacle, CallSite], None],
        look: Callable[[Any, Any, Any], Iterable[float]],
        generators: Sequence[torch.Generator],
        *,
        until: types.CodeType,
        rehearsal: bool,
    ) -> None:
        super().__init__(generators)
        self.calls: list[Call] = []
        self._note = note
        self._look = look
        self._sites = CallSiteFinder(until)
        self._rehearsal = rehearsal
        self._silent = False
        self._forbidden: dict[int, Obstacle] = {}
        self._anew: set[float] = set()

    def begin(self) -> None:
        """Begin another step."""
        self.calls = []
        self._anew.clear()

    def here(self) -> CallSite:
        """The user's line that is being executed."""
        return self._sites.here()

    @property
    def silent(self) -> bool:
        """Whether nothing is noted at the moment."""
        return self._silent

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Note nothing that the body does."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def forbid(self, value: Any, obstacle: Obstacle) -> None:
        """Note ``obstacle`` wherever a tensor in ``value`` is used."""
        for leaf in leaves_of(value):
            if isinstance(leaf, Tensor):
                self._forbidden[self.know(leaf, born=True).id] = obstacle

    def refuse(self, operator: str, obstacle: Obstacle) -> None:
        # Compiled code runs eagerly under a dispatch mode, and so in full sight.
        hidden = obstacle is COMPILED or (obstacle.rehearsal and not self._rehearsal)
        if not self._silent and not hidden:
            self._note(operator, with_known_remedy(obstacle), self._sites.here())

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if not self._silent:
            self._anew.update(self._look(func, args, kwargs))
        rule = FUNCTION_RULES.get(name)
        obstacle = rule(args, kwargs) if rule is not None else None
        if obstacle is not None:
            self.refuse(name, obstacle)
            with self.looking_away():  # the operators inside of it are the same obstacle
                return func(*args, **kwargs)
        return REHEARSED.get(func, func)(*args, **kwargs)

    def keep(self, operation: Operation) -> None:
        if not self._silent:
            values = (*operation.args, *operation.kwargs.values())
            found = [v for v in values if type(v) in _NUMBERS]
            numbers = tuple(math.nan if v in self._anew else v for v in found)
            self.calls.append(Call(operation.name, numbers, operation.site))

    def _meet_constant(self, tensor: Tensor) -> None:
        super()._meet_constant(tensor)
        if not self._silent and tensor.dim() == 0 and tensor.device.type == "cpu":
            number: float = tensor.item()
            self.calls.append(Call("a tensor of a Python number", (number,), self._sites.here()))

    def _check(self, call: OperatorCall) -> None:
        super()._check(call)
        if is_collective(call.func):
            self.refuse(str(call.func), COLLECTIVE)
        if self._forbidden:
            for tensor in call.inputs:
                strided = tensor.layout is torch.strided
                if strided and (found := self._forbidden.get(self.know(tensor).id)):
                    self.refuse(str(call.func), found)
