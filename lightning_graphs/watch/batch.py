"""The batch of a captured step: which of its values code reads, and what code changes in it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_graphs.device.rules import BATCH_CHANGED, BATCH_VALUE, HOST_READ, refuse
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import (
    LIBRARIES,
    CallSite,
    CallSiteFinder,
    add_line,
    site_using,
)
from lightning_graphs.private.exchange import Absence, bind, bound, slots_of
from lightning_graphs.private.torch import of_class, version_of
from lightning_graphs.values.guards import Constant, attributes_of, is_object
from lightning_graphs.values.signature import Modes, Signature
from lightning_graphs.values.snapshot import PythonSnapshot, Result, iter_inside, refill, results_in
from lightning_graphs.values.tree import (
    MAPPINGS,
    Node,
    Unread,
    attributes_beside,
    is_registered,
    item_label,
    items_of,
    named_leaves,
    open_container,
    substitute,
)
from lightning_graphs.watch.places import Place
from lightning_graphs.watch.tracers import Tracer

# ------------------ Containers of the batch

_LISTS = (list, deque)


@dataclass(eq=False)
class Holder(Place):
    """A container of the batch, or the attributes that one has next to its items."""

    parent: int  # the number of what holds it
    key: Any  # under which it is held there; None: these are attributes of its parent
    value: Any
    before: dict[Any, Any]  # what it holds ahead of the step

    @property
    def is_beside(self) -> bool:
        return self.key is None

    def now(self) -> Any:
        return self.value

    def put(self, value: Any) -> None:
        raise TypeError("a batch is the caller's")

    def content(self, value: Any) -> dict[Any, Any]:
        """Return what a container in the place of this one holds."""
        return _attributes(value) if self.is_beside else _items(value)

    def refill(self, value: Any, content: Any) -> None:
        has_items = not (self.is_beside or _is_registered_object(value))
        if has_items and isinstance(value, _LISTS):
            refill(value, list(content.values()))
        elif has_items and isinstance(value, MutableMapping):
            if isinstance(value, dict):
                refill(value, content)
                return
            value.clear()
            value.update(content)
        else:
            for key in {**_attributes(value), **content}:
                new = content.get(key, Absence.ABSENT)
                bind(value if key in slots_of(type(value)) else attributes_of(value), key, new)

    @property
    def is_rewritable(self) -> bool:
        if self.is_beside or _is_registered_object(self.value):
            return True
        kind = type(self.value)
        known = kind in (list, deque, *MAPPINGS) or kind not in pytree.SUPPORTED_NODES
        return known and not isinstance(self.value, tuple)


def _items(value: Any) -> dict[Any, Any]:
    if _is_registered_object(value):
        return _attributes(value)
    if isinstance(value, MutableMapping):
        return dict(items_of(value))
    if isinstance(value, (tuple, *_LISTS)):
        return dict(enumerate(value))
    opened = open_container(value)
    is_known = opened is not None and type(value) in pytree.SUPPORTED_NODES
    return dict(enumerate(opened.values)) if opened and is_known else _attributes(value)


def _attributes(value: Any) -> dict[Any, Any]:
    table = attributes_of(value)
    if isinstance(value, MutableMapping) and not _is_registered_object(value):
        return attributes_beside(value)
    slots = {key: bound(value, key) for key in slots_of(type(value))}
    return {**table, **{k: v for k, v in slots.items() if v is not Absence.ABSENT}}


def _is_registered_object(value: Any) -> bool:
    """Return whether a value is registered as a container, and user code changes its attributes."""
    return is_registered(type(value)) and is_object(value) and bool(attributes_of(value))


def holders_in(value: Any) -> list[Holder]:
    """List every container in a value, outer ones first."""
    found: list[Holder] = []
    seen: set[int] = set()
    pending: list[tuple[str, int, Any, Any]] = [("batch", -1, 0, value)]
    for name, parent, key, held in pending:
        if isinstance(held, (Tensor, Tracer)) or id(held) in seen or open_container(held) is None:
            continue
        seen.add(id(held))
        number = len(found)
        found.append(Holder(name, parent, key, held, _items(held)))
        has_items = isinstance(held, (MutableMapping, tuple, *_LISTS))
        has_items = has_items and not _is_registered_object(held)
        if has_items and isinstance(held, MutableMapping) and type(held).__dictoffset__:
            found.append(Holder(name, number, None, held, _attributes(held)))
        for i, holder in enumerate(found[number:], number):
            for k, inside in holder.before.items():
                label = item_label(k) if has_items and not holder.is_beside else f".{k}"
                pending.append((name + label, i, k, inside))
    return found


def new_results(batch: Any, known: Sequence[Tensor]) -> Iterator[Result]:
    """Return what a step has added to a batch: all that is in it but for its former tensors."""
    had = set(map(id, known))
    for holder in holders_in(batch):
        for key, value in holder.before.items():
            if isinstance(value, Tensor) and id(value) not in had:
                yield from results_in(value, holder.name + item_label(key))


# ------------------ Values of the batch


class OfHost(Tensor):
    """Tensor of the host in a batch of the device; captured code may use nothing but its shape."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        name = getattr(function.__self__, "__name__", "") if name == "__get__" else name
        if name not in _OF_GEOMETRY:
            HOST_READ.refuse_here(f"{name} uses a tensor of the host in the batch")
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


_OF_GEOMETRY = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_nested"}
    | {"size", "dim", "numel", "stride", "is_floating_point", "__len__", "_version"}
)


def of_host(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Let a use of tensors of the host ask for a host program, which compares or copies them.

    Kernels are given numbers of the host as constants, and recurrent layers read lengths there.
    """
    return [t if t.device.type == device.type else of_class(OfHost, t) for t in tensors]


def objects_of(batch: Any, known: Container[int] = ()) -> PythonSnapshot:
    """Take a snapshot of the objects in a batch, but for containers: a capture copies those.

    Those whose ``id`` is known are left out.
    """
    leaves = named_leaves(batch, "batch")
    held = [(n, v) for n, v in leaves if not isinstance(v, Tensor) and id(v) not in known]
    return PythonSnapshot(iter_inside(held))


@contextlib.contextmanager
def objects_undone(
    batch: Any, listed: Callable[[Sequence[str]], str], known: Container[int] = ()
) -> Iterator[None]:
    """Undo and refuse what a capture, the body, writes into objects of its own batch.

    Those whose ``id`` is known are put back by other means.
    """

    def refuse(names: Sequence[str]) -> None:
        raise BATCH_CHANGED.refused(f"{LIBRARIES.step} changes {listed(names)}")

    with objects_of(batch, known).changes_undone(refuse):
        yield


def written_tensors(
    batch: Sequence[Tensor], own: Sequence[Tensor], versions: Sequence[int]
) -> list[int]:
    """List the tensors of a batch that the captured step writes, as replays must.

    Args:
        batch: The tensors of the batch.
        own: Their static inputs.
        versions: Version counters of the static inputs before the capture.
    """
    written = [i for i, tensor in enumerate(own) if version_of(tensor) != versions[i]]
    standing: dict[int, set[int]] = {}
    for tensor, static in zip(batch, own, strict=True) if written else ():
        standing.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(static))
    if any(len(standing[batch[i].untyped_storage().data_ptr()]) > 1 for i in written):
        raise CaptureError(
            "A captured step cannot change tensors of its batch that share memory, because a graph "
            "has a copy of each.",
            f"{LIBRARIES.step} changes one of them in place",
            "make a new tensor: write x = x + 1, not x += 1",
        )
    return written


class BatchValueRead(CaptureError):
    """Raised if a captured step reads Python values of its batch that differ between batches."""

    names: Collection[str] = ()


def _read(names: Collection[str], observed: str) -> BatchValueRead:
    error = BatchValueRead(BATCH_VALUE.rule, observed, BATCH_VALUE.remedy)
    error.names = names
    return error


class _UnreadValue(Tracer):
    """Tracer for a Python value of the batch, of any class; the signature has that."""

    def __setattr__(self, key: str, value: Any) -> None:
        if "_kind" in vars(self):  # it is made
            self.refuse()
        super().__setattr__(key, value)

    def __getattr__(self, name: str) -> Any:
        # Code asks what it may do with a value, such as move it; the type alone tells that.
        if not (self._kind.__dictoffset__ or hasattr(self._kind, name)):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}")
        return super().__getattr__(name)

    def __deepcopy__(self, memo: object) -> _UnreadValue:
        return self

    __copy__ = __deepcopy__
    __call__ = __contains__ = __fspath__ = __next__ = __reduce_ex__ = Tracer._refuse
    __setitem__ = __delitem__ = __delattr__ = __enter__ = Tracer._refuse
    __bytes__ = __buffer__ = Tracer._refuse


class BatchValues:
    """Decides which Python values of batches are guarded: constant ones, and those that steps read.

    The signature omits all others. During a capture each of these is a proxy; if user code reads
    it, the value is guarded from then on.
    """

    def __init__(
        self,
        function: Any,
        name: str = "batch",  # of the batch in messages
        is_read: Callable[[str], bool] = lambda name: False,  # whether a value is always guarded
    ) -> None:
        self._function = function  # the code that takes the batches
        self.name, self._is_read = name, is_read
        self.taken_at: CallSite | None = None  # its line that takes a tensor which no graph can
        self.unread: set[str] = set()  # names of values that differ between batches
        self.is_guarded: set[str] = set()
        self._before: Signature | None = None
        self.observed = ""  # the reader of one of them, and its line
        # What has read a value that is another one in the last batch; None if nothing has
        self.why: BatchValueRead | None = None

    def signature(
        self, batch: Any, modes: Modes, extra: tuple[Any, ...] = ()
    ) -> tuple[Signature, list[Tensor]]:
        """Return the signature of ``(batch,)`` and its tensors, in order.

        Raises:
            CaptureError: A tensor in it is no plain one; the line is one that names it.
        """
        while True:
            how: dict[str, Any] = {"names": (self.name,), "modes": modes, "extra": extra}
            try:
                signature, tensors = Signature.of((batch,), {}, unread=self.unread, **how)
            except CaptureError as error:
                name = error.observed.rpartition(" as ")[2]
                self.taken_at = site_using(name, self._function)
                add_line(error, "taken at", self.taken_at)
                raise
            before, self._before = self._before, replace(signature, extra=())
            moved = set() if before is None else set(_moved(before, signature))
            moved = {name for name in moved if not self._is_read(name)}
            self.why = _read(self.is_guarded, self.observed) if moved & self.is_guarded else None
            if moved <= self.unread | self.is_guarded:
                return signature, tensors
            self.unread |= moved - self.is_guarded

    def read(self, error: BatchValueRead) -> None:
        """Guard these values from now on."""
        self.observed = error.observed
        self.is_guarded |= set(error.names)
        self.unread -= self.is_guarded


def _moved(before: Signature, after: Signature) -> Iterator[str]:
    """List names of constants that changed, and of containers with changed constants."""
    known = dict(zip(before.names, before.leaves, strict=True))
    for name, leaf in zip(after.names, after.leaves, strict=True):
        then = known.get(name)
        if isinstance(then, Constant) and isinstance(leaf, Constant) and then != leaf:
            yield name
    if before.specs == after.specs:
        yield from _moved_containers("", before.tree, after.tree)


def _moved_containers(name: str, before: Node | None, after: Node | None) -> Iterator[str]:
    if before == after:
        return
    if before is not None and after is not None and before.labels == after.labels:
        for label, then, now in zip(after.labels, before.children, after.children, strict=True):
            yield from _moved_containers(name + label, then, now)
    else:
        yield name


class UnreadValues:
    """The values of a batch that its signature leaves out, while its step is captured."""

    def __init__(
        self,
        signature: Signature,
        step: CallSite,
        present: Callable[[], Any],  # gives the batch of the present replay, or of the capture
    ) -> None:
        self._read: dict[str, BatchValueRead] = {}
        self._step = step  # the code that is captured
        self._sites = CallSiteFinder()
        self._present = present
        self._proxies = {
            name: _UnreadValue(name, partial(self._now, name), self._refuse, leaf.kind)
            for name, leaf in zip(signature.names, signature.leaves, strict=True)
            if isinstance(leaf, Unread)
        }

    def _refuse(self, name: str) -> None:
        site = self._sites.here()
        how = "read at" if site.line else "stored or returned, in the code of"
        error = _read([name], f"{name} is {how} {(site if site.line else self._step).describe()}")
        self._read.setdefault(name, error)
        refuse(error)

    def _now(self, name: str) -> Any:
        """Return the value of a name in the batch of the present replay."""
        return dict(named_leaves(self._present(), "batch", self._proxies))[name]

    def left_out(self, batch: Any, tensors: Iterable[Tensor], name: str = "batch") -> Any:
        """Return a copy of the batch with other tensors, and with tracers for these values."""
        return substitute(batch, tensors, name, self._proxies)

    def refuse_read(self, raised: str = "") -> None:
        """Refuse a capture that has read one of the unguarded values."""
        for first in self._read.values():
            raise _read(list(self._read), first.observed)
        if raised and self._proxies:
            names = list(self._proxies)
            raise _read(names, f"{names[0]} is read, or else: {raised}")


def refuse_iterator(batch: Any) -> None:
    if isinstance(batch, Iterator):
        raise CaptureError(
            "A captured step cannot take its batch from an iterator.",
            f"{LIBRARIES.step} takes an iterator, a {type(batch).__qualname__}",
            "take a batch as the argument of the step",
        )
