"""Numbers that modules hold in tensors and advance themselves, such as the pointer of a queue.

``ptr = int(self.queue_ptr)`` reads the device. Yet the host knows the number, since steps have made
it: a mirror has it. A captured step gets a tracer for it, as for a counter. Where the step writes
the tensor, each replay computes the number on the host as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_graphs.device.rules import HOST_READ
from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.errors import CaptureStopped, GraphError, ReplayError
from lightning_graphs.private.callsite import CallSite, CallSiteFinder
from lightning_graphs.private.exchange import Member, exchanged, standing_in
from lightning_graphs.private.torch import base_of, version_of
from lightning_graphs.values.signature import WHOLE
from lightning_graphs.watch.branches import LateError
from lightning_graphs.watch.forms import PARTS, Numbers, part_of
from lightning_graphs.watch.tracers import (
    Asks,
    Question,
    ScalarTracer,
    is_of_others,
    present,
    tensors_asked,
)

_UNKNOWN = object()


class Mirror:
    """The host's copy of a number that a module holds in a tensor of the device."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        self._value: Any = None
        self._version = -1  # of the tensor, when the host has read it last; replays leave it

    def now(self) -> Any:
        """Return the number; where eager code has written the tensor, wait and read it."""
        version = version_of(self.tensor)
        if version != self._version:
            self._value, self._version = self.tensor.item(), version
        return self._value

    def advance(self, value: Any) -> None:
        """Note what a replay writes."""
        self._value = value

    def synced(self, version: int) -> None:
        """Note that other ranks have written the number that it was, of which the device tells."""
        self._version = version

    def forget(self) -> None:
        """Note that a replay writes what the host does not know."""
        self._version = -1


class Mirrors:
    """The mirrors of a fit: of tensors whose number steps have asked for."""

    def __init__(self, on_change: Callable[[], object]) -> None:
        self.known: dict[int, Mirror] = {}  # by the ``id`` of the tensor
        self.asked: dict[int, Mirror] = {}
        self._on_change = on_change

    def learn(self) -> bool:
        """Let the next capture know what the last one has asked for; tell if there is anything."""
        new = {key: mirror for key, mirror in self.asked.items() if key not in self.known}
        self.asked = {}
        self.known |= new
        if new:
            self._on_change()  # graphs from before do not tell what they write
        return bool(new)


_mirrors: WeakValueDictionary[int, Mirror] = WeakValueDictionary()
"""Mirrors by the ``id`` of their tensors: training and evaluation share those of one module."""


def held_numbers(named: Iterable[tuple[str, Tensor]]) -> dict[int, Mirror]:
    """Make mirrors for those tensors that hold one whole number or flag."""
    found = {}
    for name, tensor in named:
        if tensor.numel() == 1 and tensor.dtype in WHOLE and not tensor.is_inference():
            known = _mirrors.get(id(tensor))
            found[id(tensor)] = Mirror(name, tensor) if known is None else known
    _mirrors.update(found)
    return found


class _MirrorMoved(LateError):
    """The error for a number that was written past torch's sight."""

    def __init__(self, name: str) -> None:
        self._name = name

    def make(self, now: Callable[[Any], Any]) -> BaseException:
        return ReplayError(
            "A number that the host knows must not be written past autograd.",
            f"{self._name} was another one on the device than the host had counted",
            f"write {self._name} itself, not its .data, or leave it eager (scope='modules')",
        )


class FollowedState:
    """What one captured step reads and writes of such numbers.

    Args:
        mirrors: Those of the fit.
        candidates: What may be asked for.
        numbers: Makes tracers.
        require: Has the graph compare a number on the device with that of the host.
        is_synced: A step begins with buffers of another rank, which are equal.
    """

    def __init__(
        self,
        mirrors: Mirrors,
        candidates: Mapping[int, Mirror],
        numbers: Numbers,
        require: Callable[[Tensor, CallSite, LateError], None],
        *,
        is_synced: bool,
    ) -> None:
        self._mirrors, self._numbers, self._require = mirrors, numbers, require
        self._is_synced = is_synced
        self._candidates = {**candidates, **mirrors.known}
        self._found: dict[Mirror, Any] = {}  # what the step has got or written last
        self._written: set[Mirror] = set()
        self._versions: dict[Mirror, int] = {}
        for mirror in mirrors.known.values():
            mirror.now()  # ahead of the capture, in which nothing may wait
            self._versions[mirror] = version_of(mirror.tensor)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the numbers in the body, captured code."""
        if not self._candidates:
            yield
            return
        with tensors_asked(self._answer):
            if not self._mirrors.known:
                yield
                return
            # Not as a member: a class that once had a `__getitem__` is a sequence ever after
            with exchanged(map(self._member, _WRITING)), FunctionMode(self._call):
                yield

    def _member(self, name: str) -> Member:
        own = getattr(Tensor, name)

        def write(_: FrameType, *args: Any, **kwargs: Any) -> Any:
            return self._write(_WRITING[name], own, *args, **kwargs)

        return Tensor, name, standing_in(own, write, is_of_others)

    def _call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._part(function, *args) if function in PARTS else function(*args, **kwargs)

    # ------------------------------------------------------------------ reads

    def _mirror(self, tensor: Any) -> Mirror | None:
        if not isinstance(tensor, Tensor) or tensor.numel() != 1:
            return None
        return self._candidates.get(id(base_of(tensor)))

    def _number(self, tensor: Tensor) -> Any:
        """Return the number in a tensor; None if it is none of these."""
        mirror = self._mirror(tensor)
        if mirror is None:
            return None
        if id(mirror.tensor) not in self._mirrors.known:
            self._mirrors.asked[id(mirror.tensor)] = mirror
            HOST_READ.stop_here(f"{mirror.name} is read")
        version = version_of(mirror.tensor)
        if version != self._versions[mirror]:
            if self._is_synced and mirror not in self._found:
                self._versions[mirror] = version
                mirror.synced(version)  # a capture cannot read it
            else:
                self._found[mirror] = _UNKNOWN
        if mirror not in self._found:
            self._found[mirror] = number = self._numbers.number(mirror.name, mirror.now)
            if isinstance(number, ScalarTracer):
                memory = self._numbers.tensor_of(number, torch.int64)
                same = mirror.tensor.detach().reshape(()) == memory
                self._require(same, CallSiteFinder().here(), _MirrorMoved(mirror.name))
        if self._found[mirror] is _UNKNOWN:
            HOST_READ.refuse_here(f"{mirror.name} is read")
            return None
        return self._found[mirror]

    def _answer(self, asked: Question) -> Any:
        return answered(asked, self._number, self._mirror, self._numbers)

    # ------------------------------------------------------------------ writes

    def _write(
        self,
        compute: Callable[..., Any],
        own: Callable[..., Any],
        tensor: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mirror = self._mirror(tensor)
        if mirror is None or id(mirror.tensor) not in self._mirrors.known:
            return own(tensor, *args, **kwargs)
        value = _UNKNOWN if kwargs else self._computed(compute, tensor, args)
        result = own(tensor, *args, **kwargs)
        self._found[mirror] = value
        self._written.add(mirror)
        self._versions[mirror] = version_of(mirror.tensor)
        return result

    def _computed(self, compute: Callable[..., Any], tensor: Tensor, args: Sequence[Any]) -> Any:
        """Return what a write makes of a number, if the host knows."""
        try:
            *_, given = args or (0,)
            if isinstance(given, Tensor):
                given = self._number(given)
            if not isinstance(given, (int, ScalarTracer)):
                return _UNKNOWN
            return compute(self._number(tensor) if compute is not _last else None, given)
        except (GraphError, CaptureStopped):
            return _UNKNOWN

    def instruction(self) -> Callable[[], None] | None:
        """Return what advances mirrors after each replay; None if the step writes no number."""
        changes: list[tuple[Mirror, Any]] = []
        for mirror in self._mirrors.known.values():
            is_known = version_of(mirror.tensor) == self._versions.get(mirror)
            if mirror in self._written or not is_known:
                value = self._found[mirror] if is_known else _UNKNOWN
                changes.append((mirror, value))
        if not changes:
            return None

        def advance() -> None:
            for mirror, value in [(mirror, present(value)) for mirror, value in changes]:
                if value is _UNKNOWN:
                    mirror.forget()
                else:
                    mirror.advance(type(mirror.now())(value))

        return advance

    def _part(self, own: Callable[..., Any], tensor: Tensor, index: Any, *value: Any) -> Any:
        """Get or set a part of a tensor, perhaps a number that is followed."""
        mirror = self._mirror(tensor)
        if mirror is not None and value and id(mirror.tensor) in self._mirrors.known:
            return self._write(_last, own, tensor, index, *value)
        return part_of(self._numbers, own, tensor, index, *value)


def answered(
    asked: Question, number: Callable[[Tensor], Any], knows: Callable[[Tensor], Any], uses: Numbers
) -> Any:
    """Return the number that code asks of a tensor, or its truth; None if the host knows neither.

    Args:
        asked: What it asks.
        number: Gives the number of a tensor, or None.
        knows: Whether there is one.
        uses: Notes where the next capture has to follow conversions.
    """
    (tensor, *_), asks = asked.tensors, asked.asks
    if asks is Asks.EQUALITY:
        return None
    if asks in (Asks.ITEM, Asks.NUMBER):
        return number(tensor)
    if asks is Asks.TRUTH:
        found = number(tensor)
        return None if found is None else bool(found)
    kind: type = int if asks is Asks.INT else float
    module = asked.frame.f_globals.get("__name__", "")
    if knows(tensor) is not None:
        uses.asked.add((module, kind))
    found = number(tensor)
    if isinstance(found, ScalarTracer):
        return found.converted(kind, module)
    return None if found is None else kind(found)


def _last(_: Any, given: Any) -> Any:
    return given


_WRITING: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("fill_", "zero_", "copy_"), _last),
    **dict.fromkeys(("add_", "__iadd__"), lambda number, given: number + given),
    **dict.fromkeys(("sub_", "__isub__"), lambda number, given: number - given),
    **dict.fromkeys(("remainder_", "__imod__"), lambda number, given: number % given),
}
"""Methods that write a tensor, and what they make of the number in it."""
