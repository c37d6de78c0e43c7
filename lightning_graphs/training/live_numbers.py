"""Betas, momentum, weight decay: kept live inside of a graph where somebody moves them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer

from lightning_graphs.core.constants import Constant, marks
from lightning_graphs.core.graph import CUDAGraph
from lightning_graphs.errors import GraphError, UnsupportedError

_KEYS = ("betas", "momentum", "dampening", "weight_decay", "eps")
LIVE_KEYS = frozenset(_KEYS)
"""What torch's fused kernels take as Python has it, whatever its value."""

HyperParameters = tuple[tuple[str, Any], ...]
"""Name and value of everything in the groups of an optimizer that a capture freezes."""


def cycles_momentum(trainer: Trainer) -> bool:
    """Whether a scheduler of the fit says that it moves momentum or betas at every step."""
    configs = trainer.lr_scheduler_configs
    return any(getattr(config.scheduler, "cycle_momentum", False) for config in configs)


class NumbersFrozenError(UnsupportedError):
    """The numbers of an optimizer cannot be rewritten inside of a graph."""


@dataclass(slots=True)
class _Number:
    """One key of one group, with the marks that stand for it in a capture: two for betas."""

    group: dict[str, Any]
    key: str
    marks: list[float]

    def mark(self) -> Any:
        return self.marks[0] if len(self.marks) == 1 else tuple(self.marks)

    def takes_part(self) -> bool:
        """Whether the coming optimizer step computes with it."""
        if self.key == "momentum" and self.group["momentum"] == 0:
            return False
        return any(p.grad is not None and p.numel() for p in self.group["params"])


@dataclass(slots=True)
class _GraphNumber:
    """One key of one group inside of a graph."""

    group: dict[str, Any]
    key: str
    constants: list[Constant]
    seen: Any = None
    written: list[Any] = field(default_factory=list)

    def write(self) -> None:
        value = self.group[self.key]
        values = [value] if len(self.constants) == 1 else list(value)
        before = self.written or [None] * len(values)
        for constant, now, old in zip(self.constants, values, before, strict=True):
            if now != old:
                constant.write(float(now))
        self.written = values
        # A list may be changed in place: it equals no tuple, and is looked at every time.
        self.seen = tuple(value) if isinstance(value, list) else value


class GraphNumbers:
    """The live numbers inside of one graph, which keeps its own until it is replayed.

    Args:
        numbers: A group and key each, with the constants of the graph that hold its value.
    """

    def __init__(self, numbers: list[_GraphNumber]) -> None:
        self._numbers = numbers

    def refresh(self) -> None:
        """Write into the graph what has moved since its last replay.

        Raises:
            GraphError: the driver refuses.
        """
        for number in self._numbers:
            if number.group[number.key] != number.seen:
                number.write()


class LiveNumbers:
    """The numbers in the groups of a fused optimizer, while captures leave them open.

    Args:
        groups: The optimizer's parameter groups.

    Attributes:
        keys: The keys of each group that are live.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.keys = [
            frozenset(filter(lambda k: _is_plain(group.get(k)), _KEYS)) for group in groups
        ]
        places = [
            (group, key)
            for group, keys in zip(groups, self.keys, strict=True)
            for key in _KEYS
            if key in keys
        ]
        counts = [len(group[key]) if key == "betas" else 1 for group, key in places]
        unused = iter(marks(sum(counts)))
        self._all = [
            _Number(group, key, [next(unused) for _ in range(count)])
            for (group, key), count in zip(places, counts, strict=True)
        ]
        self._marked: list[_Number] = []

    def conditions(self) -> HyperParameters:
        """What a graph freezes nevertheless: without momentum the kernel is another one."""
        found = [number.group["momentum"] for number in self._all if number.key == "momentum"]
        return tuple([("uses momentum", momentum != 0) for momentum in found])

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Around the optimizer step in a capture: marks stand for the numbers."""
        self._marked = [number for number in self._all if number.takes_part()]
        before = [number.group[number.key] for number in self._marked]
        for number in self._marked:
            number.group[number.key] = number.mark()
        try:
            yield
        finally:
            for number, value in zip(self._marked, before, strict=True):
                number.group[number.key] = value

    def find(self, graph: CUDAGraph) -> GraphNumbers:
        """The numbers inside of the graph that was captured last.

        They must be refreshed before its first replay, which would compute with the marks.

        Args:
            graph: The graph with the optimizer step in it, captured with ``keep_graph=True``.

        Raises:
            NumbersFrozenError: they cannot be rewritten in it.
        """
        wanted = [mark for number in self._marked for mark in number.marks]
        try:
            constants = graph.constants(wanted)
        except GraphError as error:
            raise NumbersFrozenError(error.rule, error.observed, error.remedy) from error
        missing = {m for m, constant in zip(wanted, constants, strict=True) if not constant.places}
        if missing:
            names = sorted({n.key for n in self._marked if not missing.isdisjoint(n.marks)})
            raise NumbersFrozenError(
                "A number is rewritten where the kernel of the optimizer takes it as it is.",
                f"no kernel takes {', '.join(names)} so",
                "this version of torch hands its kernels other arguments than those known to us",
            )
        known = iter(constants)
        return GraphNumbers(
            [_GraphNumber(n.group, n.key, [next(known) for _ in n.marks]) for n in self._marked]
        )


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return all(type(v) in (int, float) for v in values)
