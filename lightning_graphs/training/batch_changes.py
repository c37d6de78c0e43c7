"""What a captured step does to the containers of its batch, done to the real ones by every replay.

A step that pops its labels, or puts an augmented image in place of the original, does so where
hooks can see it, and the next epoch of a dataset in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor

from lightning_graphs.core.arguments import held_in_all
from lightning_graphs.core.contents import Contents
from lightning_graphs.core.leaves import Constant
from lightning_graphs.core.outputs import OutputPlan
from lightning_graphs.core.torch_private import version_of
from lightning_graphs.core.tree import (
    Beside,
    attributes_beside,
    flatten,
    has_more,
    open_container,
    substitute,
)
from lightning_graphs.errors import CaptureError

_Way = tuple[Callable[[Any], Any], ...]
_RULE = "A captured step reads a copy of the batch: hooks do not see what it writes there."


@dataclass(frozen=True, slots=True)
class _Container:
    """A container in the batch as it was before the step.

    Attributes:
        name: What messages call it.
        way: From the batch to it, level by level; None where only the pytree registry knows it.
        held: The container, in the capture's own copy of the batch.
        content: What was in it: key or index, and value.
        beside: Its attributes beside that, by name.
    """

    name: str
    way: _Way | None
    held: Any
    content: list[tuple[Any, Any]]
    beside: list[tuple[Any, Any]]

    @property
    def is_rewritable(self) -> bool:
        """Whether other entries can be put in, in another batch."""
        return self.way is not None and isinstance(self.held, (MutableMapping, list))

    def find(self, batch: Any) -> Any:
        """The container at this place of another batch."""
        for step in self.way or ():
            batch = step(batch)
        return batch


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a changed container holds after the step.

    Attributes:
        key: Key or index.
        value: The value in the capture.
        tensors: Where each of its tensors comes from: the container and key it had before the
            step, or its index among the new tensors.
        moved: Container and key, where the value as a whole was in the batch before.
    """

    key: Any
    value: Any
    tensors: list[tuple[int, Any] | int]
    moved: tuple[int, Any] | None


class BatchChanges:
    """Rewrites the containers of a batch as the captured step has rewritten those of its own.

    Args:
        containers: All containers of the batch.
        rewritten: The entries of those that the step has changed, by their index.
        new: The tensors in these entries that the step has computed.
    """

    def __init__(
        self,
        containers: Sequence[_Container],
        rewritten: dict[int, list[_Entry]],
        new: OutputPlan,
    ) -> None:
        self._containers = containers
        self._rewritten = rewritten
        self._new = new

    def apply(self, batch: Any) -> None:
        """Change the containers of a batch; to be called after the replay of its step."""
        found = [c.find(batch) if c.way is not None else None for c in self._containers]
        before = [dict(_content(container)) if container is not None else {} for container in found]
        new = self._new.hand_out()
        for index, entries in self._rewritten.items():
            content = {}
            for entry in entries:
                if entry.moved is not None:
                    content[entry.key] = before[entry.moved[0]][entry.moved[1]]
                else:
                    tensors = [
                        new[t] if isinstance(t, int) else before[t[0]][t[1]] for t in entry.tensors
                    ]
                    content[entry.key] = substitute(entry.value, tensors)
            container: Any = found[index]
            if isinstance(container, list):
                container[:] = content.values()
            else:
                container.clear()
                container.update(content)


class OwnBatch:
    """The batch of a capture: its containers are copies, its tensors static inputs.

    Args:
        batch: The real batch.
        tensors: Static inputs, in the order of its tensor leaves.

    Attributes:
        value: The batch to capture with.
    """

    def __init__(self, batch: Any, tensors: Sequence[Tensor]) -> None:
        self.value = substitute(batch, tensors)
        self._containers = list(_containers("batch", self.value, ()))
        leaves: list[tuple[str, Any]] = []
        flatten(self.value, "batch", leaves)
        self._tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, Tensor)]
        self._versions = [version_of(tensor) for _, tensor in self._tensors]
        self._objects = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, Tensor)]

    def objects_left(self) -> AbstractContextManager[None]:
        """Undo what the body, a capture, changes in objects of the batch, which are no copies.

        Raises:
            CaptureError: names what it has changed.
        """

        def refuse(names: str) -> None:
            raise CaptureError(
                "A captured step runs no Python code: what it stores in objects of the batch would "
                "stand still.",
                f"training_step changes {names}",
                "return it, and store it in on_train_batch_end",
            )

        return Contents(held_in_all(self._objects)).left(refuse)

    def changes(self) -> BatchChanges | None:
        """What the captured step has done to its containers; None if nothing.

        Raises:
            CaptureError: it has written a tensor of the batch in place, or changed a container
                that is neither a dict nor a list.
        """
        for (name, tensor), before in zip(self._tensors, self._versions, strict=True):
            if version_of(tensor) != before:
                observed = f"training_step changes {name} in place"
                raise CaptureError(_RULE, observed, "make a new tensor: x = x + 1, not x += 1")
        for container in self._containers:
            if _differ(container.beside, _attributes(container.held)):
                observed = f"training_step changes attributes of {container.name}"
                raise CaptureError(_RULE, observed, "return what is new from training_step")
        changed = [
            i for i, c in enumerate(self._containers) if _differ(c.content, _content(c.held))
        ]
        for container in (self._containers[i] for i in changed):
            if not container.is_rewritable:
                kind = type(container.held).__qualname__
                observed = f"training_step changes {container.name}, a {kind}"
                raise CaptureError(_RULE, observed, "work on a copy: batch = copy.copy(batch)")
        if not changed:
            return None
        places = {
            id(value): (i, key)
            for i, container in enumerate(self._containers)
            if container.way is not None
            for key, value in container.content
        }
        new: list[Tensor] = []
        rewritten = {
            i: [_entry(k, v, places, new) for k, v in _content(self._containers[i].held)]
            for i in changed
        }
        plan = OutputPlan(new, static=False)
        plan.finish_capture()
        return BatchChanges(self._containers, rewritten, plan)


def _containers(name: str, value: Any, way: _Way | None) -> Iterator[_Container]:
    """Every container in a value, outer ones first."""
    opened = None if isinstance(value, Tensor) else open_container(value)
    if opened is None:
        return
    yield _Container(name, way, value, _content(value), _attributes(value))
    for i, (label, child) in enumerate(zip(opened.labels, opened.values, strict=True)):
        if isinstance(opened.context, tuple) and opened.context[i] is Beside.ATTRIBUTES:
            yield from _containers(name + label, child, None)
            continue
        step: Callable[[Any], Any] | None = None
        if isinstance(value, MutableMapping):
            step = itemgetter(opened.context[i])
        elif isinstance(value, (list, tuple)):
            step = itemgetter(i)
        elif is_dataclass(value):
            step = attrgetter(opened.context[i])
        onward = None if way is None or step is None else (*way, step)
        yield from _containers(name + label, child, onward)


def _content(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, MutableMapping):
        return list(container.items())
    opened = open_container(container)
    assert opened is not None
    more = has_more(type(container)) and bool(attributes_beside(container))
    return list(enumerate(opened.values[: len(opened.values) - more]))


def _attributes(container: Any) -> list[tuple[Any, Any]]:
    """The attributes beside its content, but for those that a property keeps when it is asked."""
    kind = type(container)
    if not has_more(kind):
        return []
    pairs = attributes_beside(container).items()
    return [(k, v) for k, v in pairs if not isinstance(getattr(kind, k, None), cached_property)]


def _differ(before: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    if [key for key, _ in now] != [key for key, _ in before]:
        return True
    pairs = zip(before, now, strict=True)
    return any(not _is_same(value, other) for (_, value), (_, other) in pairs)


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return False
    if open_container(before) is not None or open_container(now) is not None:
        return False  # a new one: its entries are put into the real batch anew
    return Constant.of(before) == Constant.of(now)


def _entry(key: Any, value: Any, places: dict[int, tuple[int, Any]], new: list[Tensor]) -> _Entry:
    if id(value) in places:
        return _Entry(key, value, [], places[id(value)])
    leaves: list[tuple[str, Any]] = []
    flatten(value, "", leaves)
    tensors: list[tuple[int, Any] | int] = []
    for _, leaf in leaves:
        if isinstance(leaf, Tensor):
            place = places.get(id(leaf))
            if place is None:
                new.append(leaf)
            tensors.append(len(new) - 1 if place is None else place)
    return _Entry(key, value, tensors, None)
