"""Forks: where captured code asks the device which way to go on, and the host must wait to know.

``if not torch.isfinite(loss): return None`` is one. What was captured up to there is a graph of its
own. A replay launches it and waits for the answer, as eager code does; it goes on with the next
graph if that is the way that was captured. A capture executes nothing, so it assumes an answer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import NamedTuple

from torch import Tensor

from lightning_graphs.device.rules import HOST_READ
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSite, CallSiteFinder
from lightning_graphs.watch.branches import landings
from lightning_graphs.watch.choices import ifs_in
from lightning_graphs.watch.host import HostReads

_MOST = 12
"""Forks of one step: each is a graph, and a wait in every replay."""
_TURNS = 6
"""Ways that are tried of one step, until more is learned of it."""
_TRIES = 4
"""Steps that are captured in vain, since they go a way that cannot be."""
_ENDINGS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Fork(NamedTuple):
    """A truth that captured code has asked for."""

    truth: Tensor  # in the memory of the graph that computes it
    goes: bool  # by which the code went on
    site: CallSite


@dataclass(eq=False)
class Forks:
    """What captures of one fit have learned of the forks of its steps."""

    is_on: bool = False  # captures follow forks
    # Ends the graph that is captured, and begins another one; False: it cannot, as there is none
    ends: Callable[[], bool] | None = None
    taken: list[Fork] = field(default_factory=list)  # by the last capture, in its order
    # Conditions that choose more than a graph can choose on the device: code and line
    instead: set[tuple[CodeType, int]] = field(default_factory=set)
    first_refusal: CaptureError | None = None  # of the ways that were tried for a step
    _refused: set[tuple[bool, ...]] = field(default_factory=set)  # ways of steps, for good
    _trials: int = 0  # so often was another one assumed than the present step gives
    _turns: int = 0  # so many ways of the present step were refused
    _tries: int = 0  # so many steps went such ways
    _was_asked: bool = False  # a capture was, and has not answered
    _known: list[bool] = field(default_factory=list)  # answers in the step that is captured
    _way: list[bool] = field(default_factory=list)  # those of the coming capture
    _dead: set[tuple[bool, ...]] = field(default_factory=set)  # ways that were refused

    def begin_step(self) -> None:
        """Begin with captures of another step."""
        self._known, self.first_refusal, self._trials = [], None, 0
        self._dead.clear()
        self._turns = 0

    def ask(self) -> bool:
        """Note that code asks; tell whether it may be answered."""
        self._was_asked = True
        return self.is_on and len(self.taken) < _MOST

    def answer(self, truth: Tensor, frame: FrameType, *, called: bool) -> bool | None:
        """Answer whether a scalar is true, behind the graph that computes it.

        None: the graph cannot end there.

        Args:
            truth: The scalar.
            frame: The code that asks.
            called: It calls what asks, and would ask a tensor itself otherwise.
        """
        if not self.ask() or self.ends is None or not self.ends():
            return None
        place, code = len(self.taken), frame.f_code
        goes = self._way[place] if place < len(self._way) else _likely(frame, called=called)
        here = CallSiteFinder().here()  # in code of a package it is the line that calls that
        site = here if here.line else CallSite(code.co_filename, frame.f_lineno, code.co_name)
        self.taken.append(Fork(truth, goes, site))
        return goes

    def turn(self, error: CaptureError) -> bool:
        """Let the next capture go another way than the refused one; False if enough were tried."""
        self._turns += 1
        self.first_refusal = self.first_refusal or error
        answers = [fork.goes for fork in self.taken]
        self._dead.add(tuple(answers))
        while len(answers) > len(self._known) and self._turns <= _TURNS:
            last = answers.pop()
            other = [*answers, not last]
            if tuple(other) not in self._dead:
                self._way = other
                return True
            self._dead.add(tuple(answers))
        return False

    def learned(self) -> None:
        """Note that the next capture follows more than those before, whose refusals are void."""
        self._dead.clear()
        self._turns = 0
        self.first_refusal = None
        self._way = [*self._known]

    def went(self, answers: Sequence[bool], *, now: bool) -> None:
        """Note the answers up to the first one that was not assumed.

        Args:
            answers: The answers.
            now: They are those of the step that is captured.

        Raises:
            CaptureError: They are others each time.
        """
        self._way = [*answers]
        if now:
            self._trials += 1
            self._known, self.first_refusal = [*answers], None
            if self._trials > _MOST:
                line = self.taken[len(answers) - 1].site.describe()
                raise HOST_READ.refused(f"a value that is another one each time is read at {line}")

    def may_turn_later(self) -> bool:
        """Whether a later step may go a way that can be captured, as the present one does not."""
        if not self._known:
            return False
        self._refused.add(tuple(self._known))
        self._way, self._known = [], []
        self._tries += 1
        return self._tries <= _TRIES

    def is_refused(self) -> bool:
        """Whether the step that has just missed a plan goes a way that cannot be captured."""
        found = tuple(self._way) in self._refused
        if found:
            self._way = []
        return found

    def switch_on(self) -> bool:
        """Let captures follow forks from now on; tell whether that may help."""
        may_help = self._was_asked and not self.is_on
        self.is_on |= may_help
        return may_help

    @property
    def reads(self) -> HostReads:
        """The answers of the last capture, for the key of its plan."""
        return HostReads(
            tuple(fork.goes for fork in self.taken), tuple(fork.site for fork in self.taken)
        )


def _likely(frame: FrameType, *, called: bool) -> bool:
    """Guess the answer: code seldom leaves its function or a loop early."""
    found = landings(frame, called=called) or {}
    for node in ifs_in(frame.f_code) if len(found) == 2 else ():
        if node.test.lineno <= frame.f_lineno <= (node.test.end_lineno or 0):
            body = range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)
            entering = [outcome for outcome, line in found.items() if line in body]
            if len(entering) == 1 and isinstance(node.body[-1], _ENDINGS):
                return not entering[0]
    return False
