"""Which operators of a step run beside the others, and what waits for what.

A graph that is captured on one stream is a chain: each kernel waits for the one before. Nothing but
the optimizer waits for the gradients of weights and biases. They go to a side stream, which leaves
the main one in the same graph and joins it again. What runs there, and each wait between the two
streams, is chosen ahead of the capture, from the data flow of one that is not kept.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAIN, SIDE, UPDATE = 0, 1, 2
"""Streams: of the step, of gradients of weights, and of the optimizer."""

_HIGHEST = 4
"""How many operators of the backward pass follow each other, from a gradient of a weight to the
optimizer, at most: sum over a view, cast, sum of two uses."""

_HEAVY = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "sum", "embedding_dense_backward")
)
"""Operators that are worth a stream's waits. Of others what follows from these runs beside, too."""

_COUNTS = ("aten::_foreach_add_", "aten::add_")
"""Operators that count an optimizer's steps."""

_BUCKETS = 4
"""The parts of an update, at most: each follows its gradients."""

_NO_KERNEL = ("aten::empty", "aten::new_empty")


class WorkPart(enum.Enum):
    """What of an operator is a piece of work."""

    WHOLE = enum.auto()
    FIRST = enum.auto()  # its first result: the gradient of the input
    REST = enum.auto()  # its other results: those of weight and bias
    SHARE = enum.auto()  # some of the tensors that it updates


@dataclass(slots=True, eq=False)
class Work:
    """An operator of a step, or a part of one, with the memory that it uses.

    Memory is known by numbers of storages; each allocation has another one.
    """

    operator: int  # its position in the step
    name: str
    reads: tuple[int, ...]  # all storages that it is given
    writes: tuple[int, ...] = ()  # those among them that it writes
    born: tuple[int, ...] = ()  # those that it makes
    in_backward: bool = False
    is_barrier: bool = False  # nothing is known of what it reads and writes
    part: WorkPart = WorkPart.WHOLE
    # Of an update of many tensors, each by itself: the storages of each, of which a part has these
    tensors: tuple[tuple[int, ...], ...] = ()
    share: tuple[int, ...] = ()

    @property
    def made(self) -> tuple[int, ...]:
        return self.writes + self.born

    @property
    def launches(self) -> bool:
        return not self.name.startswith(_NO_KERNEL)


@dataclass(slots=True, eq=False)
class Schedule:
    """The works of a step, in order of their launch, each on its stream.

    Attributes:
        works: What is launched.
        streams: The stream of each work.
        waits: For each work, those on other streams whose end its stream waits for ahead of it.
        held: For each work, the storages of the other stream that it uses: they must live until
            that stream has waited for it.
        releases: For each work, those whose storages may be let go of behind its waits.
        last: What the main stream waits for in the end.
    """

    works: list[Work]
    streams: list[int]
    waits: list[tuple[int, ...]] = field(default_factory=list)
    held: list[tuple[int, ...]] = field(default_factory=list)
    releases: list[tuple[int, ...]] = field(default_factory=list)
    last: tuple[int, ...] = ()

    @property
    def marks(self) -> set[int]:
        """The works that another stream waits for."""
        return {i for waits in (*self.waits, self.last) for i in waits}

    @property
    def beside(self) -> int:
        """How many works run on other streams than the main one."""
        return len(self.streams) - self.streams.count(MAIN)

    def of_operators(self) -> list[list[int]]:
        """List the works of each operator."""
        found: list[list[int]] = []
        for i, work in enumerate(self.works):
            if work.operator == len(found):
                found.append([])
            found[work.operator].append(i)
        return found


def schedule(works: Sequence[Work], sizes: Sequence[int], room: int) -> Schedule:
    """Choose what runs beside the main stream, and what waits for what.

    Args:
        works: Those of a step; operators that may be parted come as two, one behind the other.
        sizes: Bytes of each storage.
        room: Bytes that may be held for the side stream beyond what one stream holds.
    """
    works, streams = _joined(works, _chosen(works))
    works, streams = _updated_early(works, streams, sizes)
    return _Clocks(works, streams, sizes, room).schedule()


# ------------------ What runs beside


def _chosen(works: Sequence[Work]) -> list[bool]:
    """Choose works which little of the backward pass waits for."""
    beside = [False] * len(works)
    in_backward = [i for i, work in enumerate(works) if work.in_backward]
    if not in_backward:
        return beside
    window = range(in_backward[0], in_backward[-1] + 1)
    heights, users = _heights(works, window)
    maker: dict[int, int] = {}
    for i in window:
        work = works[i]
        if 0 < heights[i] <= _HIGHEST and not work.is_barrier:
            makers = [maker[name] for name in work.reads if name in maker]
            is_worth_it = work.name in _HEAVY or work.part is WorkPart.REST
            beside[i] = is_worth_it or (bool(makers) and all(beside[m] for m in makers))
        if work.launches:
            maker.update(dict.fromkeys(work.made, i))
    for i in reversed(window):  # the main stream has nothing else to do by then
        if not beside[i] and works[i].launches:
            break
        beside[i] = False
    for i in reversed(window):  # what is made for nothing else
        is_whole = works[i].launches and works[i].part is WorkPart.WHOLE and not works[i].is_barrier
        if is_whole and users[i] and heights[i] <= _HIGHEST:
            beside[i] |= all(beside[user] for user in users[i])
    return beside


def _heights(works: Sequence[Work], window: range) -> tuple[dict[int, int], dict[int, set[int]]]:
    """Return the length of the longest chain of readers from each work on, and its readers."""
    heights: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    readers: dict[int, set[int]] = {}
    for i in reversed(window):
        work = works[i]
        users[i] = {user for name in work.made for user in readers.get(name, ())}
        heights[i] = int(work.launches) + max((heights[u] for u in users[i]), default=0)
        for name in work.born:
            readers.pop(name, None)
        for name in work.reads:
            readers.setdefault(name, set()).add(i)
    return heights, users


def _joined(works: Sequence[Work], beside: Sequence[bool]) -> tuple[list[Work], list[int]]:
    """Join parts of an operator that run on one stream."""
    found: list[Work] = []
    streams: list[int] = []
    for work, is_beside in zip(works, beside, strict=True):
        stream = SIDE if is_beside else MAIN
        if work.part is WorkPart.REST and streams[-1] == stream:
            first = found.pop()
            streams.pop()
            work = Work(
                first.operator,
                first.name,
                first.reads,
                first.writes,
                first.born + work.born,
                first.in_backward,
                first.is_barrier,
            )
        found.append(work)
        streams.append(stream)
    return found, streams


def _updated_early(
    works: Sequence[Work], streams: Sequence[int], sizes: Sequence[int]
) -> tuple[list[Work], list[int]]:
    """Let an optimizer update weights in a few parts, as their gradients come."""
    maker: dict[int, int] = {}  # the last work that wrote a storage
    found: list[Work] = []
    placed: list[int] = []
    end = max((i for i, work in enumerate(works) if work.in_backward), default=len(works))
    for i, work in enumerate(works):
        stream = streams[i]
        makers = {placed[maker[name]] for name in work.reads if name in maker}
        parts = [(work, stream)]
        if i > end and work.tensors:
            parts = _shares(work, maker, placed, sizes)
        elif i > end and work.name in _COUNTS and makers <= {UPDATE}:
            parts = [(work, UPDATE)]
        for part, stream in parts:
            if part.launches:
                maker.update(dict.fromkeys(part.made, len(found)))
            found.append(part)
            placed.append(stream)
    is_parted = any(work.part is WorkPart.SHARE for work in found)
    return (found, placed) if is_parted else ([*works], [*streams])


def _shares(
    work: Work, maker: dict[int, int], placed: Sequence[int], sizes: Sequence[int]
) -> list[tuple[Work, int]]:
    """Part an update: each part takes the tensors whose gradients come next."""
    of_all = {name for names in work.tensors for name in names}
    common = tuple(name for name in work.reads if name not in of_all)
    after = [[maker[name] for name in (*names, *common) if name in maker] for names in work.tensors]
    early = [i for i, makers in enumerate(after) if all(placed[m] != MAIN for m in makers)]
    if not early:
        return [(work, MAIN)]
    early.sort(key=lambda i: max((m for m in after[i] if placed[m] == SIDE), default=-1))
    total = sum(sizes[name] for i in early for name in work.tensors[i])
    shares: list[list[int]] = [[]]
    taken = 0
    for i in early:
        if taken > total / _BUCKETS:
            shares.append([])
            taken = 0
        shares[-1].append(i)
        taken += sum(sizes[name] for name in work.tensors[i])
    late = [i for i in range(len(after)) if i not in {*early}]
    found = [(_share(work, share, common), UPDATE) for share in shares]
    return found + ([(_share(work, late, common), MAIN)] if late else [])


def _share(work: Work, share: Sequence[int], common: tuple[int, ...]) -> Work:
    names = dict.fromkeys(name for i in share for name in work.tensors[i])
    writes = {*work.writes}
    return Work(
        work.operator,
        work.name,
        (*names, *common),
        tuple(name for name in names if name in writes),
        part=WorkPart.SHARE,
        share=tuple(share),
    )


# ------------------ What waits for what


class _Clocks:
    """Finds the waits between streams: as few as the memory that works share needs.

    Data flows from what wrote a storage last; a writer waits for all readers before. Memory that is
    freed is given out again, to the stream that it was allocated on: so the main stream's is held
    while another one uses it, and a work on another one waits for what used any memory of its own.
    """

    def __init__(
        self, works: list[Work], streams: list[int], sizes: Sequence[int], room: int
    ) -> None:
        self._found = Schedule(works, streams)
        self._sizes, self._room = sizes, room
        self._known = [[-1] * 3 for _ in range(3)]  # up to which work of each one a stream waited
        self._clocks: list[list[int]] = []  # the same behind each work
        self._tails = [-1] * 3
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}  # the last on each stream, since it was written
        self._home: dict[int, int] = {}  # the stream that a storage was allocated on
        # The last work of each other stream that used memory of one
        self._visited = [[-1] * 3 for _ in range(3)]
        self._barrier = -1
        # Works on others, with the storages of this step that are held for them
        self._pending: list[tuple[int, list[int]]] = []
        self._held: set[int] = set()
        self._gone: set[int] = set()  # storages that nothing uses any more
        self._extra = 0  # bytes of those that are held all the same
        self._ends: dict[int, list[int]] = {}  # the storages that each work is the last to use
        for name, i in {n: i for i, w in enumerate(works) for n in w.reads + w.made}.items():
            self._ends.setdefault(i, []).append(name)

    def schedule(self) -> Schedule:
        found = self._found
        for i, work in enumerate(found.works):
            self._place(i, work, found.streams[i])
        found.last = self._missing(MAIN, self._tails)
        return found

    def _place(self, i: int, work: Work, stream: int) -> None:
        streams, needs = self._found.streams, [-1] * 3
        for wait in self._needed(work, stream):
            if wait >= 0:
                needs[streams[wait]] = max(needs[streams[wait]], wait)
        if stream != MAIN and max(self._known[stream]) < 0 and max(needs) < 0 and i > 0:
            needs[streams[0]] = 0  # where it leaves the main one
        waits = self._missing(stream, needs)
        known = self._known[stream]
        for wait in waits:
            known[:] = map(max, known, self._clocks[wait])
        known[stream] = self._tails[stream] = i
        self._clocks.append([*known])
        self._found.waits.append(waits)
        self._found.releases.append(self._released() if stream == MAIN else ())
        self._note(i, work, stream)
        ended = self._ends.get(i, ())
        self._gone.update(ended)
        self._extra += sum(self._sizes[name] for name in ended if name in self._held)

    def _missing(self, stream: int, needs: Sequence[int]) -> tuple[int, ...]:
        """Leave out what a stream knows of already, or by waiting for the others."""
        streams, known = self._found.streams, self._known[stream]
        new = [wait for other, wait in enumerate(needs) if other != stream and wait > known[other]]
        return tuple(
            wait
            for wait in new
            if not any(self._clocks[o][streams[wait]] >= wait for o in new if o != wait)
        )

    def _needed(self, work: Work, stream: int) -> Iterable[int]:
        """Yield what the work must follow on any stream."""
        if work.is_barrier:
            yield from self._tails
        for name in work.reads:
            yield self._writer.get(name, -1)
        for name in work.writes:
            yield from self._readers.get(name, ())
        if stream == MAIN:
            yield self._to_make_room()
        else:
            yield from self._visited[stream]
            yield self._barrier

    def _to_make_room(self) -> int:
        """Return what the main stream waits for so that less memory is held; -1: for nothing."""
        if self._extra <= self._room:
            return -1
        left = self._extra
        for work, names in self._pending:
            left -= sum(self._sizes[name] for name in names if name in self._gone)
            if left <= self._room // 2:
                return work
        return -1

    def _released(self) -> tuple[int, ...]:
        streams, known = self._found.streams, self._known[MAIN]
        released = tuple(work for work, _ in self._pending if work <= known[streams[work]])
        if released:
            before = self._held
            self._pending = [entry for entry in self._pending if entry[0] not in released]
            held = (name for work, _ in self._pending for name in self._found.held[work])
            self._held = {name for name in held if name in self._home}
            let_go = (before - self._held) & self._gone
            self._extra -= sum(self._sizes[name] for name in let_go)
        return released

    def _note(self, i: int, work: Work, stream: int) -> None:
        touched = dict.fromkeys(work.reads + work.writes)
        lent = stream != MAIN
        held = tuple(n for n in touched if lent and self._home.get(n, MAIN) == MAIN)
        self._found.held.append(held)
        if held:
            new = [n for n in held if n not in self._held and n in self._home]  # of this step
            self._held.update(new)
            self._pending.append((i, new))
        for name in touched:
            if self._home.get(name, stream) != stream:
                self._visited[self._home[name]][stream] = i
        if work.is_barrier:
            self._barrier = i
        for name in work.reads:
            self._readers.setdefault(name, [-1] * 3)[stream] = i
        for name in work.made:
            self._writer[name] = i
            self._readers[name] = [-1] * 3
            self._readers[name][stream] = i
        for name in work.born:
            self._home[name] = stream
