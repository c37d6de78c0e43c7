"""Assertions of captured code: conditions that it reads only to raise an error.

The graph computes the condition and remembers whether it has ever failed. The host looks at that
without waiting after each replay, and waits where something becomes lasting, such as a checkpoint.
The error comes late, then: the steps since have been made, and nothing of them was kept.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import COUNTER, HOST_READ
from lightning_graphs.errors import GraphError
from lightning_graphs.private.callsite import CallSite, CallSiteFinder
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    in_transform,
    is_strided,
    out_of_sight,
    version_of,
)
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.branches import (
    LateError,
    NotKept,
    Way,
    can_be_raised_late,
    compares_to_raise,
    is_caught,
    late_of,
    way_on,
)
from lightning_graphs.watch.forks import (
    Choice,
    Cut,
    Forks,
    NoGradient,
    choice_of,
    chosen,
    goes_through,
)
from lightning_graphs.watch.forms import Numbers
from lightning_graphs.watch.on_device import DeviceNumber, truth_of
from lightning_graphs.watch.tracers import Asks, Question, ScalarTracer, Tracer

_ROOM = 256  # assertions of one graph, and numbers in their messages


class Ranks(Protocol):
    """Decides for all ranks of a fit."""

    @property
    def are_one(self) -> bool:
        """Whether there is one rank, or each decides alone."""

    def raise_on_all(self, error: BaseException | None) -> None:
        """Raise the error of one rank on all of them."""


def _is_plain(tensor: Any, device: torch.device) -> bool:
    return type(tensor) in PLAIN_TENSORS and is_strided(tensor) and tensor.device == device


def _way(asked: Question) -> Way | None:
    """Return how code goes on that asks values of a device only to raise; else None."""
    way = way_on(asked.frame, called=asked.is_called)
    if way is None or (way.outcome and _is_number(asked)) or not can_be_raised_late(way):
        return None
    return way


def _is_compared(asked: Question) -> bool:
    """Return whether code compares the number of a tensor, and that only to raise."""
    (tensor, *_) = asked.tensors
    is_real = asked.asks is Asks.ITEM and tensor.numel() == 1 and not tensor.is_complex()
    return is_real and compares_to_raise(asked.frame)


def _is_number(asked: Question) -> bool:
    """Return whether code gets a number, of which only nought is known."""
    return asked.asks is Asks.ITEM and asked.tensors[0].dtype is not torch.bool


def is_read(asked: Question) -> bool:
    """Return whether the host has to know what code asks: no graph asserts it, or chooses by it."""
    if asked.asks in (Asks.INT, Asks.FLOAT, Asks.NUMBER):
        return True
    if _way(asked) is not None or _is_compared(asked):
        return False
    return _is_number(asked) or choice_of(asked.frame, called=asked.is_called) is None


@dataclass(frozen=True, slots=True)
class _Held:
    """A number in a message, which the graph keeps as it is when the assertion fails."""

    place: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Noted:
    """A counter in a message, of which the host notes the value of each replay."""

    place: int


class Checked(NamedTuple):
    """A function that reads on the host whether there is a result."""

    owner: Any
    called: str
    computed: Callable[..., Any]  # returns that, next to the result
    name: str  # in torch's error


_INVERTED = torch.linalg.inv_ex, "linalg.inv"
CHECKED = (
    Checked(torch.linalg, "cholesky", torch.linalg.cholesky_ex, "linalg.cholesky"),
    Checked(torch.linalg, "solve", torch.linalg.solve_ex, "torch.linalg.solve"),
    Checked(torch.linalg, "inv", *_INVERTED),
    Checked(torch, "inverse", *_INVERTED),
    Checked(Tensor, "inverse", *_INVERTED),
)


class _NoResult(LateError):
    """The error of a function of ``torch.linalg``, in torch's words.

    Args:
        name: Of the function, as torch says it.
        first: The number of the first matrix that has none, and what torch knows of it.
        is_alone: There is one matrix.
    """

    def __init__(self, name: str, first: Any, *, is_alone: bool) -> None:
        self._name, self._first, self._is_alone = name, first, is_alone

    def make(self, now: Callable[[Any], Any]) -> BaseException | None:
        index, known = (int(now(number)) for number in self._first)
        infos = torch.zeros(index + 1, dtype=torch.int32)
        infos[index] = known
        given = infos[index] if self._is_alone else infos
        try:
            torch.ops.aten._linalg_check_errors(given, self._name, is_matrix=self._is_alone)
        except RuntimeError as error:
            return error
        return None


class _Negative(LateError):
    """The error for a negative deviation, in torch's words."""

    def make(self, now: Callable[[Any], Any]) -> BaseException:
        return RuntimeError("normal expects all elements of std >= 0.0")


@dataclass(frozen=True, slots=True)
class Assertion:
    """A condition of captured code, and the error where it fails."""

    site: CallSite
    raising: LateError


class Room(NamedTuple):
    """Memory for the assertions of one graph, made before that is captured.

    What a graph allocates itself is written by what ran before, in every replay. The first of each
    counts the replays themselves.
    """

    holds: Tensor
    times: Tensor
    numbers: Tensor
    seen: Tensor

    @classmethod
    @torch.inference_mode(False)
    def on(cls, device: torch.device) -> Room:
        count = _ROOM + 1
        return cls(
            torch.ones(count, dtype=torch.bool, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(_ROOM, dtype=torch.float64, device=device),
            torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda"),
        )


class Assertions:
    """Assertions of the code that is captured into one graph.

    Args:
        device: Where it computes.
        is_host: Tells tensors of the host, where device and host are one.
        room: Memory that there is.
    """

    def __init__(
        self,
        device: torch.device,
        is_host: Callable[[Tensor], bool] = lambda _: False,
        room: Room | None = None,
    ) -> None:
        self._device, self._is_host = device, is_host
        self.is_over = self.is_captured = False
        self.found: list[Assertion] = []
        self._noted: list[Callable[[], Any]] = []  # give counters in messages
        self._holds, self._times, self._numbers, self._seen = room or Room.on(device)
        self._numbers_held = 0
        self._places: dict[tuple[CodeType, int], int] = {}  # of the line that asked last
        # Values that the graph has chosen, with their versions then; those that cut gradients off
        self._chosen: list[tuple[Tensor, int, Choice]] = []
        self._cuts: list[Cut] = []
        self.forks = Forks()
        self.numbers = Numbers(device)  # of the capture

    def computed(
        self, check: Checked, frame: FrameType, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """Compute what a function checks on the host; None if it has to do that itself.

        Where code may catch the error, to try another matrix, it has to.
        """
        given = [*leaves_of((args, kwargs), Tensor)]
        is_other = self.is_over or in_transform() or any(map(self._is_host, given))
        is_plain = all(_is_plain(tensor, self._device) for tensor in given)
        has_room = len(self.found) < _ROOM and "out" not in kwargs
        if is_other or not (is_plain and has_room) or is_caught(frame):
            return None
        result: Tensor
        result, info = check.computed(*args, **kwargs)
        with torch.no_grad():
            infos = info.reshape(-1)
            if infos.numel():
                at = (infos != 0).int().argmax()
                first = self._held((at, infos.take(at)), len(self.found) + 1)
                error = _NoResult(check.name, first, is_alone=not info.dim())
                self.require((infos == 0).all(), CallSiteFinder().here(), error)
        return result

    def normal(
        self,
        mean: Any,
        std: Any = None,
        *,
        generator: torch.Generator | None = None,
        **further: Any,
    ) -> Tensor | None:
        """Draw as ``torch.normal`` does, with the same bits; None if it has to do that itself.

        It reads on the host whether a deviation is negative. Here the graph asserts it. Source:
        ``normal_out_impl`` in ATen's DistributionTemplates.h.
        """
        given = leaves_of((mean, std), Tensor)
        is_other = (
            further or not isinstance(std, Tensor) or type(mean) not in (*PLAIN_TENSORS, float)
        )
        if is_other or self.is_over or in_transform() or any(map(self._is_host, given)):
            return None
        grows = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if grows or any(t.is_complex() or not _is_plain(t, self._device) for t in given):
            return None
        with torch.no_grad():
            if std.numel():
                self.require(std.min() >= 0, CallSiteFinder().here(), _Negative())
            if not isinstance(mean, Tensor):
                mean = std.new_full((), mean)
            drawn: Tensor = mean.new_empty(torch.broadcast_shapes(mean.shape, std.shape))
            return drawn.normal_(generator=generator).mul_(std).add_(mean)

    def answer(self, asked: Question) -> Any:
        """Answer what code asks of tensors; None if neither the graph nor a fork can tell."""
        if self.is_over or any(map(self._is_host, asked.tensors)) or in_transform():
            return None
        if not all(_is_plain(tensor, self._device) for tensor in asked.tensors):
            return None
        if asked.asks in (Asks.INT, Asks.FLOAT, Asks.NUMBER):
            return self._forked(asked)
        if (way := _way(asked)) is not None:
            return self._asserted(asked, way)
        if _is_compared(asked):
            return self._number(asked.tensors[0].detach())
        choice = None if _is_number(asked) else choice_of(asked.frame, called=asked.is_called)
        if choice is not None and choice.place not in self.forks.instead:
            return self._chooses(asked, choice)
        return self._forked(asked)

    def _forked(self, asked: Question) -> Any:
        """Let the graph end where code asks, and answer; None if it may not."""
        (tensor, *_) = asked.tensors
        if tensor.dtype is not torch.bool and asked.asks not in (Asks.TRUTH, Asks.EQUALITY):
            if tensor.numel() != 1 or tensor.is_complex() or not self.forks.ask():
                return None
            if asked.asks in (Asks.INT, Asks.FLOAT):  # the next capture follows that, too
                kind = int if asked.asks is Asks.INT else float
                self.numbers.asked.add((asked.frame.f_globals.get("__name__", ""), kind))
                return None
            return self._number(tensor)
        if asked.asks in (Asks.INT, Asks.FLOAT, Asks.NUMBER):
            return None
        if (truth := truth_of(asked)) is None:
            return None
        return self.forks.answer(truth, asked.frame, called=asked.is_called)

    def _number(self, tensor: Tensor) -> DeviceNumber:
        with torch.no_grad():
            now = tensor.detach().reshape(()).clone()  # code may go on to change it in place
        return DeviceNumber(self.numbers, now, owner=self)

    def _chooses(self, asked: Question, choice: Choice) -> bool | None:
        """Let the graph choose the values of variables; answer by which way code goes on."""
        if (value := truth_of(asked)) is None:
            return None
        with torch.no_grad():
            entering = value.bool().logical_not() if choice.outcome else value.bool()
        body = choice.of_body()

        def choose(table: dict[str, Any]) -> dict[str, Any]:
            values = {n: chosen(entering, body[n], table.get(n)) for n in choice.names}
            found = {name: value for name, value in values.items() if value is not None}
            if len(found) < len(values) or len(self.found) == _ROOM:
                self._refuse(choice)
                return {}
            cuts = [Cut(choice, entering, node) for _, node in found.values() if node is not None]
            self._cuts += cuts
            self._chosen += [
                (value, version_of(value), choice)
                for value, _ in found.values()
                if isinstance(value, Tensor)
            ]
            warning = choice.warning(lambda value: self._held(value, len(self.found) + 1))
            if not cuts and warning is not None:
                self.require(entering.logical_not(), choice.site, warning)
            return {name: value for name, (value, _) in found.items()}

        choice.behind(choose)
        return choice.outcome

    def _refuse(self, choice: Choice) -> None:
        self.forks.instead.add(choice.place)
        self.forks.ask()
        HOST_READ.refuse(
            f"a condition that chooses more than a graph can is read at {choice.site.describe()}"
        )

    def look_behind(self, loss: Tensor | None) -> None:
        """Assert that no value was chosen without which a loss would have no gradients.

        Raises:
            GraphError: The loss would have some, and others than a graph computes.
        """
        cuts, self._cuts = self._cuts, []
        for cut in cuts:
            if not goes_through(cut.node, loss):
                self._refuse(cut.choice)
            warning = cut.choice.warning(lambda value: self._held(value, len(self.found) + 1))
            self.require(cut.entering.logical_not(), cut.choice.site, NoGradient(warning))

    def holds(self, truth: Tensor, frame: FrameType) -> bool | None:
        """Answer whether a comparison is true that code makes only to raise."""
        asked = Question(frame, Asks.TRUTH, [truth], lambda: truth)
        way = None if in_transform() else _way(asked)
        found = None if way is None or self.is_over else self._asserted(asked, way)
        if found is None and not self.is_over:
            found = self.forks.answer(truth, frame, called=False)
        return found

    def _asserted(self, asked: Question, way: Way) -> bool | None:
        if (value := truth_of(asked)) is None:
            return None
        with torch.no_grad():
            if not way.outcome:
                value = value.logical_not()
            code, line = asked.frame.f_code, asked.frame.f_lineno
            known = self._places.get((code, line))
            if known is not None and len(self.found) >= _ROOM // 2:  # a loop: any of its turns
                self._holds[known].logical_and_(value)
                error = late_of(way, lambda value: tree_map_only(Tensor, NotKept, value))
                self.found[known - 1] = Assertion(self.found[known - 1].site, error)
                return way.outcome
            if len(self.found) == _ROOM:
                return None
            place = len(self.found) + 1
            self._places[code, line] = place
            raising = late_of(way, lambda value: self._held(value, place))
        self.require(value, CallSite.of(code, line), raising)
        return way.outcome

    def require(self, condition: Tensor, site: CallSite, error: LateError) -> None:
        """Assert a condition of the device, a scalar, with the line and the error of its failure.

        Beyond the room for them there is no further assertion.
        """
        if len(self.found) == _ROOM:
            return
        self.found.append(Assertion(site, error))
        with torch.no_grad():
            self._holds[len(self.found)].logical_and_(condition)

    def _held(self, value: Any, place: int) -> Any:
        """Replace tensors and counters in a value by what outlives a replay."""
        value = tree_map_only(Tracer, self._to_note, value)
        return tree_map_only(Tensor, lambda tensor: self._kept(tensor, place), value)

    def _to_note(self, tracer: Tracer) -> Any:
        if not (isinstance(tracer, ScalarTracer) and tracer.obstacle is COUNTER):
            return tracer
        self._noted.append(tracer.now)
        return _Noted(len(self._noted) - 1)

    def _kept(self, tensor: Tensor, place: int) -> NotKept | _Held:
        is_number = _is_plain(tensor, self._device) and tensor.numel() == 1
        if not is_number or tensor.is_complex() or self._numbers_held == _ROOM:
            return NotKept(tensor)
        held = _Held(self._numbers_held, tensor.dtype)
        self._numbers_held += 1
        memory = self._numbers[held.place]
        number = tensor.detach().reshape(()).double()
        memory.copy_(torch.where(self._holds[place], number, memory))
        return held

    def finish(self) -> None:
        """Capture the copy of what was found to the host, at the end of the code."""
        self.is_over = True
        self.look_behind(None)
        for value, version, choice in self._chosen:  # eager code would write another tensor
            if version_of(value) != version:
                self._refuse(choice)
        self._chosen.clear()
        if not self.found:
            return
        rooms = (self._holds, self._times, self._seen)
        with torch.no_grad():
            with out_of_sight():  # a host half would take the views for the user's
                holds, times, seen = (room[: len(self.found) + 1] for room in rooms)
            times.add_(holds)
            seen.copy_(times, non_blocking=True)

    def pending(self, fit: OpenAssertions) -> PendingAssertions | None:
        """Return what a plan with the captured graph has to look at; None if there is nothing."""
        self.is_captured = True
        if not self.found:
            return None
        count = len(self.found) + 1
        memory = self._holds, self._times, self._numbers
        return PendingAssertions(fit, self.found, self._seen[:count], memory, self._noted)


@dataclass(eq=False)
class PendingAssertions:
    """The assertions in the replays of one graph, of which the host does not know all yet."""

    fit: OpenAssertions
    assertions: list[Assertion]
    seen: Tensor  # how often each held before it first failed, behind the number of replays
    memory: tuple[Tensor, Tensor, Tensor]  # what the graph writes on the device
    noted: Sequence[Callable[[], Any]]  # give the counters in messages
    # Of replays that may be under way, with these counters
    _steps: deque[tuple[int, list[Any]]] = field(default_factory=deque)
    _known: int = 0  # how many replays came before those

    def __post_init__(self) -> None:
        self._values = self.seen.numpy()

    def note(self) -> None:
        """Note a replay of the present step, before counters move on; an instruction of a plan."""
        self._steps.append((self.fit.step(), [read() for read in self.noted]))
        self.fit.open[self] = None

    def look(self) -> None:
        """Look at what is known of the replays that were noted; an instruction of a plan.

        Raises:
            Exception: The error of an assertion that has failed.
        """
        fit = self.fit
        if fit.is_lasting():
            fit.settle()
        elif fit.ranks.are_one:
            done, *times = self._values.tolist()
            if min(times) < done:
                fit.settle()  # what is copied at this moment may be seen in parts
            while self._known < done - 1:
                self._steps.popleft()
                self._known += 1

    @property
    def last(self) -> int:
        """The step of the last replay that was noted."""
        return self._steps[-1][0]

    def failure(self, last: int) -> tuple[int, BaseException] | None:
        """Return the first step in which an assertion has failed, and its error.

        No replay may be under way.

        Args:
            last: The last step of the fit.
        """
        while (found := self._next_failure()) is not None:
            step, assertion, error = found
            if error is not None:
                return step, _told(error, assertion, self.fit, step, last)
        return None

    def _next_failure(self) -> tuple[int, Assertion, BaseException | None] | None:
        """Return step, assertion and error of the first failure; one that has warned is over."""
        done, *times = self._values.tolist()
        first = min(times)
        if first == done:
            self._steps.clear()
            self._known = done
            return None
        index = times.index(first)
        assertion = self.assertions[index]
        numbers = self.memory[2].tolist()
        place = first - self._known
        steps = [*self._steps]
        step, noted = steps[place] if 0 <= place < len(steps) else steps[-1]

        def number(held: _Held | _Noted) -> Any:
            if isinstance(held, _Noted):
                return noted[held.place]
            return torch.tensor(numbers[held.place], dtype=torch.float64).to(held.dtype)

        error = assertion.raising.make(lambda value: tree_map_only((_Held, _Noted), number, value))
        if error is None:  # the next time it warns again
            holds, counts, _ = self.memory
            holds[index + 1].fill_(True)
            counts[index + 1].fill_(done)
            self.seen[index + 1].fill_(done)
        return step, assertion, error


def _told(
    error: BaseException, assertion: Assertion, fit: OpenAssertions, step: int, last: int
) -> BaseException:
    """Let an error say which step it is of, and that it comes late."""
    late = ", and the update of that step was made" if fit.updates else ""
    if fit.updates and last != step:
        late += f"; updates up to step {last} have been made"
    if assertion.raising.reads_late:
        late += "; attributes in its message are as they are now"
    text = (
        f"(raised by step {step}, at {assertion.site.describe()}; a graph has computed the "
        f"condition{late})"
    )
    first = error.args[0] if error.args else ""
    if isinstance(error, GraphError):
        error.observed += f" {text}"
        error.args = (error.rule, error.observed, error.remedy)
    elif len(error.args) <= 1 and (isinstance(error, AssertionError) or isinstance(first, str)):
        error.args = (f"{first}\n{text}".lstrip(),)
    elif hasattr(error, "add_note"):
        error.add_note(text)
    return error


@dataclass(eq=False)
class OpenAssertions:
    """The assertions of a fit whose outcome the host has yet to look at."""

    step: Callable[[], int]  # the number of the step that runs
    is_lasting: Callable[[], bool]  # whether something of the present step becomes lasting
    synchronize: Callable[[], None]  # waits for the device
    ranks: Ranks
    updates: bool = True  # steps update parameters
    open: dict[PendingAssertions, None] = field(default_factory=dict)
    is_used: bool = False  # a plan has some, and so has one on every other rank
    failed: BaseException | None = None
    room: Room | None = None  # for the next graph that has some

    def begin(self, device: torch.device, is_host: Callable[[Tensor], bool]) -> Assertions:
        """Make the assertions of one more graph, in the room that there is."""
        room, self.room = self.room, None
        return Assertions(device, is_host, room)

    def release(self) -> None:
        """Release the room for the next graph, since there is none."""
        self.room = None

    def settle(self) -> None:
        """Wait until the outcome of every replay is known.

        Raises:
            Exception: The error of an assertion that has failed.
        """
        if self.is_used and self.failed is None:
            self.ranks.raise_on_all(self.find())

    def find(self) -> BaseException | None:
        """Wait, and return the error of an assertion that has failed on this rank."""
        if self.open and self.failed is None:
            self.synchronize()
            last = max(pending.last for pending in self.open)
            failures = [found for one in self.open if (found := one.failure(last)) is not None]
            self.failed = min(failures, key=operator.itemgetter(0))[1] if failures else None
            self.open.clear()
        return self.failed
