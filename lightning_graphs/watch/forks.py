"""Forks: where captured code asks the device which way to go on, and the host must wait to know.

``if not torch.isfinite(loss): return None`` is one. What was captured up to there is a graph of its
own. A replay launches it and waits for the answer, as eager code does; it goes on with the next
graph if that is the way that was captured. A capture executes nothing, so it assumes an answer.
A branch that only chooses values needs none: the graph computes both ways, and chooses.
"""

from __future__ import annotations

import ast
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import filterfalse
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_graphs.device.rules import HOST_READ
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.private.callsite import CallSite, CallSiteFinder, compiled, lines_in, tree_of
from lightning_graphs.private.engine import leaf_of
from lightning_graphs.private.exchange import exchanged, nothing
from lightning_graphs.watch.branches import (
    LateError,
    LateWarning,
    Way,
    branch_at,
    is_warning,
    way_without_error,
)
from lightning_graphs.watch.host import HostReads

_MOST = 256
"""Forks of one step: each is a graph, and a wait in every replay."""
_GUESSES = 12
"""Answers of one capture that are guessed where code ends loops: it may never do so by guesses."""
_TRIALS = 12
"""Ways of one step that are captured, and that it does not go."""
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
    asker: tuple[CodeType, int]  # code and instruction that have asked
    is_guessed: bool = False  # and another turn of a loop may follow from it
    is_sure: bool = False  # the other way raises an error, which a capture would do in vain


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
    why_eager: CaptureError | None = None  # the refusal of the way that a step went last
    # Ways of steps that are refused for good, each with the refusal if that is known
    _refused: dict[tuple[bool, ...], CaptureError | None] = field(default_factory=dict)
    _trials: int = 0  # so often was another one assumed than the present step gives
    _turns: int = 0  # so many ways of the present step were refused
    _tries: int = 0  # so many steps went such ways
    _was_asked: bool = False  # a capture was, and has not answered
    _known: list[bool] = field(default_factory=list)  # answers in the step that is captured
    _way: list[bool] = field(default_factory=list)  # those of the coming capture
    _on_trial: bool = False  # no step has gone that way yet
    _first: list[bool] = field(default_factory=list)  # those of the first one of a step
    _usual: dict[tuple[CodeType, int], bool] = field(default_factory=dict)  # by who has asked
    _dead: set[tuple[bool, ...]] = field(default_factory=set)  # ways that were refused

    def begin_step(self) -> None:
        """Begin with captures of another step."""
        self._first, self._known, self.first_refusal, self._trials = self._way, [], None, 0
        self._dead.clear()
        self._turns = 0

    def quiet(self) -> AbstractContextManager[None]:
        """Let code not warn that goes a way on trial: the step may not go there."""
        return exchanged([(warnings, "warn", nothing)] if self._way and self._on_trial else [])

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
        place, code = len(self.taken), frame.f_code
        asker, is_guessed = (code, frame.f_lasti), False
        way = way_without_error(frame, called=called)
        if place < len(self._way):
            goes = self._way[place]
        elif way is not None:
            goes = self._usual.get(asker, way.outcome)
        else:
            goes, goes_on = _likely(frame, called=called)
            goes, is_guessed = self._usual.get(asker, goes) if goes_on else goes, not goes_on
        too_many = is_guessed and sum(fork.is_guessed for fork in self.taken) >= _GUESSES
        if not self.ask() or too_many or self.ends is None or not self.ends():
            return None
        here = CallSiteFinder().here()  # in code of a package it is the line that calls that
        site = here if here.line else CallSite.of(code, frame.f_lineno)
        self.taken.append(Fork(truth, goes, site, asker, is_guessed, way is not None))
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
            if not self.taken[len(answers)].is_sure and tuple(other) not in self._dead:
                self._way, self._on_trial = other, True
                return True
            self._dead.add(tuple(answers))
        return False

    def learned(self) -> None:
        """Note that the next capture follows more than those before, whose refusals are void."""
        self._dead.clear()
        self._turns = 0
        self.first_refusal = None
        self._way = [*(self._known or self._first)]

    def went(self, answers: Sequence[bool], *, now: bool) -> None:
        """Note the answers up to the first one that was not assumed.

        Args:
            answers: The answers.
            now: They are those of the step that is captured.

        Raises:
            CaptureError: They are others each time.
        """
        self._way, self._on_trial = [*answers], False
        if now:
            self._goes_on(answers)
            self._trials += 1
            self.first_refusal = None
            if self._trials > _TRIALS:
                line = self.taken[len(answers) - 1].site.describe()
                raise HOST_READ.refused(f"a value that is another one each time is read at {line}")

    def _goes_on(self, answers: Sequence[bool]) -> None:
        """Note which way the captured step goes; later ones may go the same way."""
        self._usual |= {f.asker: goes for f, goes in zip(self.taken, answers, strict=False)}
        self._known = [*answers]

    def missed(self, answers: Sequence[bool]) -> None:
        """Note that the captured step goes another way than the plan that was made for it.

        Raises:
            CaptureError: It was refused that way, and so were steps before it.
        """
        self._goes_on(answers)
        if (way := tuple(answers)) in self._dead:
            self._refused.setdefault(way, self.first_refusal)
            self._tries += 1
            if self._tries > _TRIES and self.first_refusal is not None:
                raise self.first_refusal

    def may_turn_later(self, error: GraphError) -> bool:
        """Whether a later step may go a way that can be captured, as the present one does not."""
        if not self._known:
            return False
        texts = error.rule, error.observed, error.remedy  # without frames, which hold gradients
        self._refused[tuple(self._known)] = CaptureError(*texts)
        self._way, self._known = [], []
        self._tries += 1
        return self._tries <= _TRIES

    def is_refused(self) -> bool:
        """Whether the step that has just missed a plan goes a way that cannot be captured."""
        if found := (way := tuple(self._way)) in self._refused:
            self._way, self.why_eager = [], self._refused[way]
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


def _likely(frame: FrameType, *, called: bool) -> tuple[bool, bool]:
    """Guess the answer: code seldom leaves its function or a loop early.

    Also tell whether code behind a branch goes on alike, so that it ends by whatever answers.
    """
    if (found := if_asking(frame, called=called)) is None:
        return False, False
    if not isinstance(found.node.body[-1], _ENDINGS):
        return False, True
    return found.entering is False, False


class Asking(NamedTuple):
    """An ``if`` that asks whether a value is true."""

    frame: FrameType
    node: ast.If
    entering: bool | None  # the answer by which its body is entered; None: further ones decide
    leaving: bool  # the answer by which it is not


def if_asking(frame: FrameType, *, called: bool) -> Asking | None:
    """Return the ``if`` whose condition code asks for now; None if it is in none."""
    branch = branch_at(frame, called=called)
    if branch is None or None in branch.lands.values():
        return None
    for node in ifs_in(branch.frame.f_code):
        if branch.frame.f_lineno in (test := lines_in(node.test)):
            body, lines = lines_in(*node.body), branch.listing.lines
            # Further ones are of the same lines: the jump back at the end of a loop's body
            first = next((i for i, n in enumerate(lines) if n in body), None)
            entering = next((goes for goes, at in branch.lands.items() if at == first), None)
            if entering is not None:
                return Asking(branch.frame, node, entering, not entering)
            over = (goes for goes, at in branch.lands.items() if lines[at or 0] not in test)
            return Asking(branch.frame, node, None, next(over, False))
    return None


# ------------------ Branches that only choose values: the graph computes both

# ``if not torch.isfinite(loss): loss = torch.tensor(1e9)`` reads the device, and all that follows
# from it is another value in a local variable. Code goes on here as if the condition did not hold;
# at the next line its variables become what ``torch.where`` has chosen.

_PURE = frozenset(
    ("tensor", "zeros_like", "ones_like", "full_like", "zeros", "ones", "full", "detach", "clone")
) | {"new_tensor", "new_zeros", "new_ones", "new_full", "nan_to_num", "clamp", "where", "abs"}
"""Functions and methods that make a tensor, and do nothing else."""


_EXPRESSIONS = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.keyword, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.Tuple, ast.List, ast.Subscript, ast.operator, ast.unaryop, ast.cmpop),
    ast.expr_context,
)


class Choice(NamedTuple):
    """An ``if`` that asks a condition, and whose branches only bind local variables, and warn."""

    frame: FrameType
    node: ast.If
    outcome: bool  # by which code skips the body
    names: tuple[str, ...]  # that either branch binds

    @property
    def site(self) -> CallSite:
        return CallSite.of(*self.place)

    @property
    def place(self) -> tuple[CodeType, int]:
        """Its code, and the line of its ``if``."""
        return self.frame.f_code, self.node.lineno

    def of_body(self) -> dict[str, Any]:
        """Compute what the variables would be behind the body."""
        names = dict(self.frame.f_locals)
        exec(compiled([*_binding(self.node.body)], self.frame), self.frame.f_globals, names)
        return {name: names.get(name) for name in self.names}

    def warning(self, held: Callable[[Any], Any]) -> LateWarning | None:
        """Return what warns as the body does; None if it does not."""
        told = tuple(filter(is_warning, self.node.body))
        return LateWarning(Way(self.outcome, self.frame, 0, told), held) if told else None

    def behind(self, choose: Choose) -> None:
        """Set what the variables become at the first line behind the ``if``, given those then."""
        waiting = self.frame.f_trace
        if isinstance(waiting, _Behind):  # its condition asks once more: `if a or b`
            waiting.choosing.append(choose)
        else:
            _Behind(choose).begin(self.frame, self.node)


Choose = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Gives what some variables become, of all of them."""


class UpToTheEnd:
    """Traces a frame up to the first line behind an ``if``, or to its end."""

    def begin(self, frame: FrameType, node: ast.If) -> None:
        self._lines, self._own, self._before = lines_in(node), frame.f_trace, sys.gettrace()
        frame.f_trace = self
        sys.settrace(lambda *_: None)

    def __call__(self, at: FrameType, event: str, _: object) -> Any:
        if event == "line" and at.f_lineno in self._lines:
            self.passes(at.f_lineno)
            return self
        sys.settrace(self._before)
        at.f_trace = self._own
        # Each look at the variables before Python 3.13 would undo changes of them
        self.ends(None if event == "exception" else at.f_locals)
        return self._own

    def passes(self, line: int) -> None:
        """React to a line of the ``if`` that is about to run."""

    def ends(self, table: dict[str, Any] | None) -> None:
        """React to the end, with the variables there; None if an error leads to it."""


class _Behind(UpToTheEnd):
    """Sets variables at the first line behind an ``if``."""

    def __init__(self, choose: Choose) -> None:
        self.choosing = [choose]

    def ends(self, table: dict[str, Any] | None) -> None:
        if table is not None:
            for choose in self.choosing:
                table.update(choose(table))


def choice_of(frame: FrameType, *, called: bool) -> Choice | None:
    """Return the choice of code that asks now whether a value is true; None if it does more."""
    found = if_asking(frame, called=called)
    if found is None or found.entering is None:
        return None
    statements: list[Any]  # those behind `else` run in the capture
    statements = [*_binding(found.node.body), *found.node.orelse]
    if not all(map(_is_choosing, statements)):
        return None
    names = tuple(dict.fromkeys(each.targets[0].id for each in statements))
    own = {*found.frame.f_code.co_varnames, *found.frame.f_code.co_cellvars}
    choice = Choice(found.frame, found.node, not found.entering, names)
    return choice if own.issuperset(names) else None


@functools.lru_cache(maxsize=256)
def ifs_in(code: CodeType) -> tuple[ast.If, ...]:
    tree = tree_of(code)
    return () if tree is None else tuple(n for n in ast.walk(tree) if isinstance(n, ast.If))


def _binding(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    return filterfalse(is_warning, statements)


def _is_choosing(statement: ast.stmt) -> bool:
    """Return whether a statement binds a variable to a new value, and no more."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return False
    parts = [*ast.walk(statement.value)]
    calls = [node.func for node in parts if isinstance(node, ast.Call)]
    names = (getattr(called, "attr", getattr(called, "id", "")) for called in calls)
    is_name = isinstance(statement.targets[0], ast.Name)
    return is_name and all(isinstance(n, _EXPRESSIONS) for n in parts) and _PURE.issuperset(names)


@dataclass(frozen=True, slots=True)
class Cut:
    """A chosen value by which a step would lose all gradients."""

    choice: Choice
    entering: Tensor  # whether the body is entered
    node: Node  # of the chosen value


def goes_through(node: Node | None, loss: Tensor | None) -> bool:
    """Return whether each gradient of a loss goes through a node."""
    if loss is None or loss.grad_fn is None:
        return False
    seen, pending = {node}, [loss.grad_fn]
    while pending:
        if (each := pending.pop()) in seen:
            continue
        if leaf_of(each) is not None:
            return False
        seen.add(each)
        pending += [after for after, _ in each.next_functions if after is not None]
    return True


class NoGradient(LateError):
    """The error of a backward pass without gradients, and a warning ahead of it.

    Args:
        warning: What warns; None if nothing does.
    """

    def __init__(self, warning: LateWarning | None) -> None:
        self._warning = warning

    def make(self, now: Callable[[Any], Any]) -> BaseException:
        """Return the error."""
        error = None if self._warning is None else self._warning.make(now)
        text = "element 0 of tensors does not require grad and does not have a grad_fn"
        return error or RuntimeError(text)


def chosen(entering: Tensor, body: Any, now: Any) -> tuple[Any, Node | None] | None:
    """Return the value that a variable has behind a choice; None if a graph cannot choose it.

    Beside it comes its node, if it has a gradient that it would not have behind the body.
    """
    if not (isinstance(body, Tensor) and isinstance(now, Tensor)):
        return (now, None) if body is now else None
    alike = (type(body), body.shape, body.dtype, body.device, body.is_contiguous())
    if alike != (type(now), now.shape, now.dtype, now.device, now.is_contiguous()):
        return None
    if body is now:
        return now, None
    if body.requires_grad or (now.requires_grad and not torch.is_grad_enabled()):
        return None  # a leaf that has a gradient of zeros has none in eager mode
    value = torch.where(entering, body, now)
    return value, value.grad_fn
