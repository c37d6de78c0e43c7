"""Python that a step reads or leaves behind: a replay runs none, so it is watched or refused."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.core.torch_private import is_compiled
from lightning_graphs.errors import CaptureError

_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque)
_LIBRARIES = ("torch.nn.", "torch.ao.", "torch._dynamo.", "torchmetrics.")
_LIVE_IN_LIBRARIES = ("p", "momentum")

STORED = Obstacle(
    "A captured step runs no Python code: what it stores in attributes would stand still.",
    "store it from on_train_batch_end, from the values that training_step returns; change buffers "
    "in place",
    kind="python-state",
    code="def on_train_batch_end(self, outputs, batch, batch_idx):\n    self.calls += 1",
)
DRAWN = Obstacle(
    "A captured step runs no Python code: a number that it draws would stand still.",
    "draw on the device (torch.rand(..., device=...)), or in the data loader",
    kind="python-state",
    code="share = torch.rand((), device=self.device)  # in place of random.random()",
)


class AttributeReads:
    """Plain attributes of modules that captured steps have read: numbers, flags and texts.

    A capture bakes them in. Their values are part of what a captured step depends on, so that a
    hook which anneals a weight or changes a dropout rate gets a graph for the new value.

    Args:
        on_use: Called with the name of every attribute that is read or set, and whether it is set.
    """

    def __init__(self, on_use: Callable[[str, bool], object] | None = None) -> None:
        self._reads: dict[str, tuple[Any, Any]] = {}
        self._on_use = on_use

    def __len__(self) -> int:
        return len(self._reads)

    def values(self) -> tuple[tuple[str, Any], ...]:
        """Name and present value of everything that was read."""
        return tuple([(name, _held(owner, key)) for name, (owner, key) in self._reads.items()])

    @contextlib.contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Note what the body reads from the module and from submodules of its author's own.

        Their classes are exchanged for subclasses. Layers of torch cannot be, where compiled code
        checks their class; of theirs, the rates that training is known to move are noted.
        """
        compiled = any(map(is_compiled, module.modules()))
        exchanged = []
        for path, owner in module.named_modules():
            name = f"self.{path}" if path else "self"
            if type(owner).__module__.startswith(_LIBRARIES):
                for key in _LIVE_IN_LIBRARIES:
                    if isinstance(vars(owner).get(key), _PLAIN):
                        self._note(owner, name, key)
            elif not (compiled and path):
                exchanged.append((owner, type(owner), name))
        try:
            for owner, kind, name in exchanged:
                object.__setattr__(owner, "__class__", self._watched(kind, name))
            yield
        finally:
            for owner, kind, _ in exchanged:
                object.__setattr__(owner, "__class__", kind)

    def _watched(self, kind: type, path: str) -> type:
        inherited: Any = kind.__getattribute__
        inherited_set: Any = kind.__setattr__

        def read(owner: Any, key: str) -> Any:
            value = inherited(owner, key)
            if key == "_hparams" or _is_attribute(kind, key):
                name = f"{path}.{'hparams' if key == '_hparams' else key}"
                if self._on_use is not None:
                    self._on_use(name, False)
                if isinstance(value, _PLAIN):
                    self._reads.setdefault(name, (owner, key))
                else:
                    self._note_items(name, value)
            return value

        def write(owner: Any, key: str, value: Any) -> None:
            assert self._on_use is not None
            self._on_use(f"{path}.{key}", True)
            inherited_set(owner, key, value)

        watched: dict[str, Any] = {"__getattribute__": read}
        if self._on_use is not None:
            watched["__setattr__"] = write
        return type(kind)(kind.__name__, (kind,), watched)

    def _note(self, owner: Any, path: str, key: str) -> None:
        self._reads.setdefault(f"{path}.{key}", (owner, key))

    def _note_items(self, name: str, value: Any) -> None:
        """Note the plain values in a settings object: which of them was read does not show."""
        for key, held in _items(value):
            if isinstance(held, _PLAIN):
                self._reads.setdefault(f"{name}[{key!r}]", (value, key))


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of mappings, sequences, namespaces and dataclasses; nothing of others."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    foreign = type(value).__module__.startswith((*_LIBRARIES, "transformers."))
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not foreign):
        return list(vars(value).items())
    return []


def _held(owner: Any, key: Any) -> Any:
    try:
        return owner[key] if isinstance(owner, (dict, list, tuple)) else getattr(owner, key)
    except (KeyError, IndexError, AttributeError):
        return None


def _is_attribute(kind: type, key: str) -> bool:
    hidden = key.startswith("_") or key == "training"
    return not hidden and not isinstance(getattr(kind, key, None), property)


@contextlib.contextmanager
def nothing_left_behind(module: LightningModule) -> Iterator[None]:
    """Undo what the body leaves in attributes of modules and in Python's random generators.

    Raises:
        CaptureError: the body has left something: a replay would not leave it again.
    """
    attributes = Attributes(module)
    generators = Generators(module)
    try:
        yield
    finally:
        changed = attributes.changed()
        drawn = generators.drawn()
        attributes.restore()
        generators.restore()
    if changed:
        names = ", ".join(changed[:3])
        raise CaptureError(STORED.rule, f"training_step changes {names}", STORED.remedy)
    if drawn:
        names = ", ".join(drawn)
        raise CaptureError(DRAWN.rule, f"training_step draws from {names}", DRAWN.remedy)


class Attributes:
    """What the attributes of a module tree hold, and what the containers among them hold."""

    def __init__(self, module: nn.Module) -> None:
        self._containers: list[tuple[str, Any, Any]] = []
        for path, owner in module.named_modules():
            name = f"self.{path}" if path else "self"
            table = vars(owner)
            self._containers.append((name, table, table.copy()))
            for key, value in table.items():
                if type(value) in _CONTAINERS:
                    own = name if key in ("_parameters", "_buffers", "_modules") else ""
                    self._containers.append((own or f"{name}.{key}", value, value.copy()))

    def changed(self) -> list[str]:
        """The names of what is no longer as it was."""
        names: set[str] = set()
        for name, container, before in self._containers:
            if isinstance(container, dict):
                keys = {**before, **container}
                names.update(f"{name}.{key}" for key in keys if _differs(container, before, key))
            elif not _same(container, before):
                names.add(name)
        return sorted(names)

    def restore(self) -> None:
        """Put everything back."""
        for _, container, before in self._containers:
            if isinstance(container, dict):
                if any(_differs(container, before, key) for key in {**before, **container}):
                    container.clear()
                    container.update(before)
            elif not _same(container, before):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(before)


def _differs(now: dict[Any, Any], before: dict[Any, Any], key: Any) -> bool:
    if key not in now or key not in before:
        return True
    a, b = now[key], before[key]
    return a is not b and not (isinstance(a, _PLAIN) and type(a) is type(b) and a == b)


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


class Generators:
    """The states of the random generators that Python code on the host draws from."""

    def __init__(self, module: LightningModule) -> None:
        self._random = random.getstate()
        self._numpy: Any = sys.modules.get("numpy")
        self._legacy = self._numpy.random.get_state() if self._numpy else None
        # On a CPU, torch's generator is that of the captured operators themselves.
        self._torch = torch.get_rng_state() if module.device.type != "cpu" else None

    def drawn(self) -> list[str]:
        """The names of the generators that were drawn from."""
        names = []
        if random.getstate() != self._random:
            names.append("Python's random")
        if self._legacy is not None and not _equal(self._numpy.random.get_state(), self._legacy):
            names.append("numpy.random")
        if self._torch is not None and not torch.equal(torch.get_rng_state(), self._torch):
            names.append("torch's generator of the CPU")
        return names

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self._random)
        if self._legacy is not None:
            self._numpy.random.set_state(self._legacy)
        if self._torch is not None:
            torch.set_rng_state(self._torch)


def _equal(now: Any, before: Any) -> bool:
    return all(
        bool((a == b).all()) if hasattr(a, "all") else a == b
        for a, b in zip(now, before, strict=True)
    )
