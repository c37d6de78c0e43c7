"""The life of captured regions: due, captured, verified, replayed, refused, released."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from math import isfinite
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.errors import (
    FIX,
    CaptureError,
    GraphError,
    in_one_line,
    is_out_of_memory,
    no_room,
)
from lightning_graphs.policy.worth import CapturePolicy, History, Outlook
from lightning_graphs.private.distributed import (
    FsdpModules,
    forget_backward,
    is_within_backward,
    reducer_is_warm,
    take_no_more_times,
)
from lightning_graphs.private.exchange import TURN
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.peers import PartedError, Peers, parted
from lightning_graphs.regions.plan import Plan
from lightning_graphs.values.signature import KEYS, Sightings

# ------------------ Cache of plans

Key = TypeVar("Key", bound=Hashable)
P = TypeVar("P", bound=Plan)

_VALUES = 8
"""How many plans there are for one shape, at most: values that change may never come back."""
_FAILURES = 32
"""After how many captures in a row that failed, though the next might succeed, one is refused."""


class PlanCache(Generic[Key, P]):
    """Captured plans by key; none is ever dropped for one that is used less."""

    def __init__(
        self,
        policy: CapturePolicy,
        release: Callable[[P], None],  # called with a plan that leaves the cache
        capacity: int | None = None,  # number of plans at most; None: as many as are worth it
        # The part of a key that comes back; the rest are values that may change for good
        shape: Callable[[Key], Hashable] = lambda key: key,
    ) -> None:
        self._policy = policy
        self._release = release
        self._capacity = float("inf") if capacity is None else capacity
        self._shape = shape
        self.by_key: dict[Key, P] = {}  # the one that was used last comes last
        self._counted: dict[Key, int] = {}
        self._seen: OrderedDict[Key, int] = OrderedDict()
        self._shapes = Sightings()
        self._refused: OrderedDict[Key, int] = OrderedDict()
        # Why the last key that was asked about is not due yet; empty if it is, or never will be
        self.why_not = ""
        self.is_full = False  # it would have been, if there had been room for one more plan
        self._captures = 0
        self._past_uses = 0
        self._asked = Outlook(0.0, 0.0, ())  # for the key that was asked about last
        # How many replays of all plans were expected: in each step, and from when on
        self._share = self._since = 0.0
        self._steps = 0  # that had no plan

    def __len__(self) -> int:
        return len(self.by_key)

    def shapes(self) -> Iterable[tuple[Any, float]]:
        """Yield the shapes that came, and how often, of long ago less; none once it is cleared."""
        self._count_uses()
        return self._shapes.items()

    def plans(self) -> list[P]:
        return list(reversed(self.by_key.values()))

    def get(self, key: Key) -> P | None:
        """Return the plan of ``key``, now the most recently used one; None if there is none."""
        if key in self.by_key:
            self.by_key[key] = self.by_key.pop(key)
        return self.by_key.get(key)

    # ------------------------------------------------------------------ what is worth a plan

    def see(self, key: Key) -> int:
        """Count a sighting of ``key``, for which there is no plan; return how many there were."""
        self._steps += 1
        self._shapes.see(self._shape(key))
        _count(self._seen, key)
        return self._seen[key]

    def is_new(self, key: Key) -> bool:
        """Whether no step of this shape came before the one that was counted last."""
        return self._shapes.count(self._shape(key)) <= 1.0

    def is_due(self, key: Key) -> bool:
        """Count a sighting of ``key``; return whether it is worth a capture now."""
        self.why_not = ""
        if key in self._refused:
            return False
        if self.by_key:
            self._count_uses()  # that came before this one
        seen = self.see(key)
        shape = self._shape(key)
        shapes = {self._shape(other) for other in self.by_key}
        # How many were refused or dropped, or gave way to another one of their shape
        lost = self._captures - len(shapes)
        uses = self._uses
        promised = self._share * (self._steps + uses) - self._since
        history = History(seen, lost, uses, promised, moved=shape in shapes)
        self.why_not = self._policy.why_not(history, partial(self._outlook, shape, shapes))
        self.is_full = not self.why_not and not self._has_room(shape)
        if self.is_full:
            self.why_not = f"max_graphs={self._capacity} allows no more graphs; raise it, or pad"
        return not self.why_not

    @property
    def _uses(self) -> int:
        uses: Iterable[int] = map(attrgetter("uses"), self.by_key.values())
        return self._past_uses + sum(uses)

    def _outlook(self, shape: Hashable, known: Collection[Hashable]) -> Outlook:
        """Estimate how often a shape comes, and all others that have no plan."""
        rest, shares = self._shapes.rest(shape), self._shapes.shares()
        share = shares.pop(shape)
        others = [part for key, part in shares.items() if key not in known]
        self._asked = Outlook(share, rest, others)
        return self._asked

    def _count_uses(self) -> None:
        uses: dict[Hashable, int] = {}
        for key, plan in self.by_key.items():
            shape, before = self._shape(key), self._counted[key]
            uses[shape] = uses.get(shape, 0) + plan.uses - before
            self._counted[key] = plan.uses
        self._shapes.add(uses)

    def _has_room(self, shape: Hashable) -> bool:
        """Whether a plan may be added, in the place of one that is used much less if need be."""
        other = self._in_the_way(shape)
        if other is None or self._shape(other) == shape:
            return True
        least = self._shapes.count(self._shape(other))
        return self._shapes.count(shape) >= 2.0 * least + self._policy.break_even

    def _in_the_way(self, shape: Hashable) -> Key | None:
        """Find the key whose plan gives way to this shape: its own oldest, or the least used."""
        is_full = len(self.by_key) >= self._capacity
        same = [key for key in self.by_key if self._shape(key) == shape]
        if same:
            return same[0] if is_full or len(same) >= _VALUES else None
        least = min(self.by_key, key=lambda k: self._shapes.count(self._shape(k)), default=None)
        return least if is_full else None

    def add(self, key: Key, plan: P) -> None:
        """Keep a captured plan, releasing the one before and, beyond capacity, the least used."""
        if key in self.by_key:
            self.drop(key)
        other = self._in_the_way(self._shape(key))
        if other is not None:
            self.drop(other)
        self._seen.pop(key, None)
        self._captures += 1
        share, rest, _ = self._asked
        self._asked = Outlook(0.0, 0.0, ())
        self._share += share
        self._since += share * (self._steps + self._uses) - (rest if isfinite(rest) else 0.0)
        self.by_key[key] = plan
        self._counted[key] = plan.uses + 1  # the coming one has been seen already

    def drop(self, key: Key) -> None:
        plan = self.by_key.pop(key)
        self._past_uses += plan.uses
        del self._counted[key]
        self._release(plan)

    def refuse(self, key: Key) -> None:
        """Never find ``key`` due again: its capture failed, or its plan is wrong and dropped."""
        _count(self._refused, key)
        if key in self.by_key:
            self.drop(key)
        else:
            self._captures += 1

    def drop_all(self) -> None:
        """Release every plan; sightings stay counted."""
        for key in reversed([*self.by_key]):
            self.drop(key)

    def clear(self) -> None:
        """Release every plan and forget every sighting; refusals stay."""
        self.drop_all()
        self._seen.clear()
        self._shapes.clear()


def _count(book: OrderedDict[Any, int], key: Any) -> None:
    book[key] = book.pop(key, 0) + 1
    while len(book) > KEYS:
        book.popitem(last=False)


# ------------------ Decisions of all ranks

# NCCL demands it: whether a collective is captured "must be uniform over all ranks participating",
# and who launches a graph must launch "the graph derived from that collective capture" (NCCL's user
# guide, "Using NCCL with CUDA Graphs"). So each rank says ahead of a step what it could do, and all
# do what all can. They say it from host to host, over gloo: no rank waits for its device.

GIVE_UP, EAGER, CAPTURE = -1, 0, 1
"""What becomes of a call; larger numbers are those of plans, which replay it."""
_WELL, _FAILED, _NO_ROOM = range(3)

_Result = TypeVar("_Result")


class Ranks:
    """Decisions that ranks make together; with one rank they cost nothing.

    Every rank calls the same methods in the same order.

    Args:
        group: A group over gloo in which ranks agree; None: there is one rank, or each decides
            alone, about steps in which none waits for another.
        wrappers: Those of DDP, which reduce gradients.
        units: The modules whose parameters FSDP2 gathers; None without FSDP2.
        is_sharded: Whether parameters are, so that submodules cannot be captured.
    """

    def __init__(
        self,
        group: Any = None,
        wrappers: Sequence[DistributedDataParallel] = (),
        units: FsdpModules | None = None,
        *,
        is_sharded: bool = False,
        ready: bool = False,  # steps may be captured; see :meth:`are_ready`
    ) -> None:
        self.are_one = group is None
        # Called with the reason when a rank calls :meth:`leave`
        self.on_leave: Callable[[str], None] = lambda _: None
        self.numbers = itertools.count(CAPTURE + 1)  # of plans that all ranks capture together
        self.wrappers: tuple[Any, ...] = tuple(wrappers)
        self.units = units
        self.whole_steps_only, self.ready = is_sharded, ready
        self._reason = self.lost = ""  # why graphs are wrong from now on; empty if they are right
        self._open = contextlib.ExitStack()
        self._group = group
        self._peers = None if group is None else Peers(group)

    def close(self) -> None:
        """Decide alone from now on, as with one rank; may be called again."""
        if self._peers is not None:
            self._peers.close()
        self._group, self.wrappers, self._peers = None, (), None
        self.are_one = True
        self._open.close()

    def are_ready(self) -> bool:
        """Tell whether steps may be captured: DDP's reducers must have ended their timing."""
        if not self.ready:
            self.ready = all(map(reducer_is_warm, self.wrappers))
            for ddp in self.wrappers if self.ready else ():
                take_no_more_times(ddp)
        return self.ready

    def waits_for_gradients(self) -> bool:
        """Tell whether a backward pass has failed that a reducer of DDP still waits for."""
        return any(map(is_within_backward, self.wrappers))

    def tells(self) -> bool:
        """Return what this rank tells all others ahead of a step, next to what it could do."""
        return False

    def hears(self, told: bool) -> None:
        """Take note of whether any rank has told it."""

    def agree(self, choice: int, wish: bool) -> tuple[int, bool]:
        """Decide with all ranks what to do with the coming step, and whether all wish it.

        It is what all have chosen. If some lack a graph that others have, all capture. If ranks
        would replay different graphs, because their batches differ, the step is eager.
        """
        if self._group is None:
            return choice, wish
        most, least, against, leaving, told = self._largest(
            choice, -choice, not wish, bool(self._reason), self.tells()
        )
        self.hears(told)
        if leaving:
            rank, reason = self._first_said(self._reason)
            self.on_leave(self._reason or f"rank {rank} has switched its graphs off: {reason}")
            self.close()
            return EAGER, False
        if most != -least:
            choice = min(-least, CAPTURE) if -least <= CAPTURE else EAGER
        return choice, not against

    def leave(self, reason: str) -> None:
        """Switch all ranks to eager steps: from the next step on, at once if there is one rank."""
        if self._group is None:
            self.on_leave(reason)
        self._reason = reason

    def any(self, value: bool) -> bool:
        """Tell whether it is true on any rank."""
        return bool(self._largest(value)[0])

    def all_or_none(
        self,
        run: Callable[[], _Result],
        # Called with the result if another rank has raised
        undo: Callable[[_Result], None] = lambda _: None,
        *,
        # It exchanges data with other ranks before it raises: no rank can go on if only some raise
        exchanges: bool = False,
    ) -> _Result:
        """Run something on all ranks, and raise a CaptureError on all if it raises on one."""
        if self.are_one and not self.wrappers:
            return run()
        error, result, outcome = None, None, _WELL
        try:
            result = run()
        except Exception as raised:
            error, outcome = raised, _NO_ROOM if is_out_of_memory(raised) else _FAILED
            if self.units is not None:
                self.units.forget_step()
            if exchanges and outcome == _FAILED and not isinstance(error, GraphError):
                raise
        waits = error is not None and self.waits_for_gradients()
        worst, least, unfinished = self._largest(outcome, -outcome, waits)
        if unfinished:
            for ddp in self.wrappers:
                forget_backward(ddp)
            self.ready, self.lost = False, "DDP makes its buckets again"
        if worst != _WELL:
            rank, said = self._first_said(error)
            error_text, _, fix = str(said).partition(FIX)
            if exchanges and least == _WELL:
                raise PartedError(
                    "No rank can go on, because one has failed that the others wait for.",
                    f"rank {rank}: {error_text}",
                    fix or "correct the error of that rank; the others only waited for it",
                ) from error
            try:
                if error is not None:
                    raise error
            finally:
                del error, said  # their traceback refers to this frame and those of callers
            undo(result)  # type: ignore[arg-type]
            observed = f"on rank {rank}: {error_text}"
            if worst == _NO_ROOM:
                raise no_room("A captured step", observed)
            raise CaptureError(
                "A step must be captured on all ranks, and compute there what the eager step does.",
                observed,
                fix or "correct the error of that rank",
            )
        return result  # type: ignore[return-value]

    def raise_on_all(self, error: BaseException | None) -> None:
        """Raise the error of one rank on all of them, which call this together."""
        if not self.any(error is not None):
            return
        rank, said = self._first_said("" if error is None else in_one_line(error))
        if error is not None:
            raise error
        raise PartedError(
            "No rank can go on, because an assertion has failed on one of them.",
            f"rank {rank}: {said}",
            "correct the error of that rank; the others only take part in its steps",
        )

    def _first_said(self, said: Any) -> tuple[int, Any]:
        """Return the first rank whose text is not empty, and the text."""
        found = [said]
        if self._group is not None:
            found *= torch.distributed.get_world_size(self._group)
            mine = str(said) or type(said).__name__ if isinstance(said, Exception) else said
            self._exchange(torch.distributed.all_gather_object, found, mine)
        return next((rank, other) for rank, other in enumerate(found) if other)

    def _largest(self, *values: int) -> list[Any]:
        """Return the largest of each value over all ranks."""
        if self._group is None:
            return list(values)
        numbers = torch.tensor([*map(int, values)], device="cpu")
        self._exchange(torch.distributed.all_reduce, numbers, torch.distributed.ReduceOp.MAX)
        return numbers.tolist()

    def _exchange(self, collective: Callable[..., Any], *args: Any) -> None:
        """Call a collective of the group; raise a PartedError if a rank is gone."""
        try:
            collective(*args, self._group)
        except RuntimeError as error:
            if self._peers is None or not self._peers.are_parted(error):
                raise
            raise parted(self._peers.lost) from None


# ------------------ Life cycle


Call = TypeVar("Call")


class Region(ABC, Generic[Call, P]):
    """Code that a life cycle captures; a call is one run of it, with what it is given."""

    captures_later = False
    """A call that is to be captured runs already: a later one like it is, if all is well."""

    def key(self, call: Call) -> Any:
        """Return what tells the call from others; None: it runs eagerly, and is not counted.

        Raises:
            CaptureError: No graph could be for this call.
        """
        return call

    def wait(self, key: Any) -> None:
        """Note that calls with this key are not worth a capture yet; the cache says why."""

    def is_ready(self, key: Any) -> bool:
        """Whether all is there that a capture of such a call needs."""
        return True

    @abstractmethod
    def capture(self, call: Call, key: Any) -> P | None:
        """Capture the call; None: that would cost more than it saves.

        Raises:
            GraphError: It cannot be captured.
        """

    def enter(self, plan: P, call: Call) -> bool | None:
        """Note that a captured plan is in the cache, and prepare it for its first replay.

        False: the call goes another way than the plan.
        """
        return None

    def compare(self, plan: P, call: Call) -> bool:
        """Run the call both ways from one state, and leave all as it was before.

        False: the call runs eagerly, for another reason than its results.

        Raises:
            GraphError: The replay computes something else.
        """
        return True

    def may_succeed(self, key: Any, error: GraphError) -> bool:
        """Whether a capture that failed so may succeed in a later call."""
        return False

    def judge(self, plan: P, call: Call) -> P | None:
        """Look at the trial of a plan, which is due; the cache may have another one then.

        Returns a plan whose replay, which was compared, is the call.
        """
        return None

    @abstractmethod
    def refuse(self, error: GraphError) -> None:
        """Tell that such calls run eagerly, or raise."""

    @abstractmethod
    def discard(self, plan: P) -> None:
        """Release the graphs of a plan."""

    def release(self, plan: P) -> None:
        """Let a plan go that was entered."""
        self.discard(plan)


class Verifies(Protocol):
    """Decides which plans are compared with the eager call."""

    is_on: bool  # any are
    every: int  # compared again after so many steps; 0: never again

    @property
    def is_due(self) -> bool:
        """Whether plans that were compared before are compared again in this step."""


class Lifecycle(Generic[Call, P]):
    """Finds, captures and verifies the plans of a region; its owner replays them."""

    def __init__(
        self,
        region: Region[Call, P],
        context: TrainingContext,
        verifier: Verifies | None,  # None: a capture has verified what it made
        # The part of a key that comes back; the rest are values that may change for good
        shape: Callable[[Any], Hashable] = lambda key: key,
    ) -> None:
        self._region = region
        self._policy, self._ranks = context.policy, context.ranks
        self._verifier = verifier if verifier is not None and verifier.is_on else None
        # What compares plans again, every so many steps
        self._again = verifier if verifier is not None and verifier.every > 0 else None
        capacity = context.options.max_graphs
        self.cache = PlanCache[Any, P](self._policy, region.release, capacity, shape)
        self.is_failing = False  # this rank gives up as soon as all do
        self.has_failed = False  # all ranks gave up
        self._failed = 0  # captures that failed since the last one that did not

    def plan_for(self, call: Call, *found: P | None) -> P | None:
        """Find the plan for a replay of this call; capture and verify one if it is due.

        None: the call runs eagerly. ``found`` is what :meth:`find` gave for the call, if it was
        asked before.
        """
        region, key, plan = self._region, None, found[0] if found else self.find(call)
        if plan is not None and plan.uses >= plan.due:
            plan.cancel()
            if (judged := region.judge(plan, call)) is not None:
                return judged
            plan = self.find(call)
        if plan is not None:
            choice, wish = plan.number, plan.unverified and self._policy.affords_verification
        else:
            key = self._due_key(call)
            choice, wish = EAGER if key is None else CAPTURE, False
        if self.is_failing:
            choice = GIVE_UP
        if not self._ranks.are_one:
            choice, wish = self._ranks.agree(choice, wish)
        self.has_failed |= choice == GIVE_UP
        if plan is not None and choice <= CAPTURE:
            plan.cancel()
        if choice == CAPTURE:
            if plan is not None and not region.captures_later:  # another rank has lost it
                self.cache.drop(plan.key)
            return self.capture(call, region.key(call) if key is None else key)
        if choice <= EAGER or plan is None:
            return None
        again = self._again is not None and self._again.is_due
        return self.verified(plan, call) if wish or again else plan

    def find(self, call: Call) -> P | None:
        """Find the first plan that fits, from the one that was used last on; it is then ready."""
        plans = self.cache.by_key
        for place, (key, plan) in enumerate(reversed(plans.items())):
            if (not place or plan.may_fit(call)) and plan.fits(call):
                if place:
                    plans[key] = plans.pop(key)
                return plan
        return None

    def is_ready(self, plan: P) -> bool:
        """Whether a plan that fits may be replayed with nothing else to decide, on one rank."""
        again = plan.uses >= plan.due or (self._again is not None and self._again.is_due)
        return not (plan.unverified or self.is_failing or self._policy.is_over or again)

    def _due_key(self, call: Call) -> Hashable | None:
        """Return the key of a call that is to be captured now; None for any other."""
        try:
            key = self._region.key(call)
        except CaptureError as error:
            self._refuse(None, error)
            return None
        if key is None:
            return None
        if not self.cache.is_due(key):
            if self.cache.why_not:
                self._region.wait(key)
            return None
        return key if self._region.is_ready(key) else None

    def capture(self, call: Call, key: Hashable) -> P | None:
        """Capture and verify a call whose key was due; return None if that fails."""
        region = self._region
        try:
            with TURN:
                plan = self._ranks.all_or_none(partial(region.capture, call, key), self._undo)
        except GraphError as error:
            self._failed += 1
            if not region.may_succeed(key, error) or self._failed >= _FAILURES:
                self._refuse(key, error)
            return None
        if plan is None:
            return None
        self._failed = 0
        plan.number = next(self._ranks.numbers)
        plan.unverified = self._verifier is not None
        self.cache.add(plan.key, plan)
        is_missed = region.enter(plan, call) is False
        if self._ranks.any(is_missed):
            if not is_missed:
                plan.cancel()
            return None
        is_too_much = self._ranks.any(not self._policy.affords_verification)
        found = plan if is_too_much else self.verified(plan, call)
        plan.surroundings = None
        return found

    def _undo(self, plan: P | None) -> None:
        if plan is not None:  # another rank has none
            self._region.discard(plan)

    def verified(self, plan: P, call: Call) -> P | None:
        """Return the plan if it computes what the eager call does; else drop it."""
        if self._verifier is None:
            return plan
        try:
            with TURN, self._policy.verifying():
                return plan if self._region.compare(plan, call) else None
        except GraphError as error:
            self._policy.refuted()
            self._refuse(plan.key, error)
            return None
        finally:
            plan.unverified = False

    def _refuse(self, key: Hashable, error: GraphError) -> None:
        if key is not None:
            self.cache.refuse(key)
        self._region.refuse(error)

    def give_up(self) -> None:
        """Let no call have graphs any more: at once if there is one rank, else when all do."""
        self.is_failing = True
        self.has_failed |= self._ranks.are_one
