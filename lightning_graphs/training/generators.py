"""The random generators of the host, from which a replay draws nothing unless it was recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_graphs.core.generators import comparable
from lightning_graphs.core.host_half import HostHalf
from lightning_graphs.training.held_values import held_in


@dataclass(frozen=True, eq=False, slots=True)
class PythonGenerator:
    """A generator of Python or NumPy, with the interface of torch's."""

    name: str  # what messages call it
    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]


def shared_generators() -> Iterator[tuple[ModuleType, PythonGenerator]]:
    """Modules whose functions draw from one generator, with that."""
    yield random, PythonGenerator("Python's random", random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        shared = numpy.random
        yield shared, PythonGenerator("numpy.random", shared.get_state, shared.set_state)


class Generators:
    """The states of the random generators that Python code on the host draws from.

    Those of Python, numpy and torch, those that the module holds, and those that are added; but for
    those that a host half draws from.
    """

    def __init__(self, module: LightningModule, host: HostHalf | None = None) -> None:
        self._numpy: Any = sys.modules.get("numpy")
        # On a CPU, torch's generator is that of the captured operators themselves.
        self._with_torch = host is None and module.device.type != "cpu"
        others = {getattr(g, "name", "") for g in (() if host is None else host.generators)}
        found = [generator for _, generator in shared_generators() if generator.name not in others]
        if self._with_torch:
            name = "torch's generator of the CPU"
            found.append(PythonGenerator(name, torch.get_rng_state, torch.set_rng_state))
        self._states = [(generator, generator.get_state()) for generator in found]
        for name, held in held_in(module):
            self.add(name, held)

    def add(self, name: str, held: Any) -> None:
        """Look at a value, if it is a generator, as it is now."""
        if (access := self._access(held)) is not None:
            generator = PythonGenerator(name, *access)
            self._states.append((generator, generator.get_state()))

    def _access(self, held: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
        """How to read and write the state of a generator; None of other objects."""
        if isinstance(held, random.Random):
            return held.getstate, held.setstate
        if self._with_torch and isinstance(held, torch.Generator) and held.device.type == "cpu":
            return held.get_state, held.set_state
        if self._numpy is not None:
            if isinstance(held, self._numpy.random.RandomState):
                return held.get_state, held.set_state
            if isinstance(held, self._numpy.random.Generator):
                bits = held.bit_generator
                return partial(getattr, bits, "state"), partial(setattr, bits, "state")
        return None

    def drawn(self) -> list[str]:
        """The names of the generators that were drawn from."""
        states = ((g.name, comparable(g.get_state()), comparable(s)) for g, s in self._states)
        return [name for name, now, then in states if now != then]

    def restore(self) -> None:
        """Put the states back."""
        for generator, state in self._states:
            generator.set_state(state)
