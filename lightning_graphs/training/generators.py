"""The random generators of the host, from which a replay draws nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule

from lightning_graphs.training.held_values import held_in


class Generators:
    """The states of the random generators that Python code on the host draws from.

    Those of Python, numpy and torch, those that the module holds, and those that are added.
    """

    def __init__(self, module: LightningModule, *, torch_too: bool = True) -> None:
        self._numpy: Any = sys.modules.get("numpy")
        # On a CPU, torch's generator is that of the captured operators themselves.
        self._with_torch = torch_too and module.device.type != "cpu"
        found: list[tuple[str, _Get, _Set]] = [
            ("Python's random", random.getstate, random.setstate)
        ]
        if self._numpy is not None:
            numpy = self._numpy.random
            found.append(("numpy.random", numpy.get_state, numpy.set_state))
        if self._with_torch:
            name = "torch's generator of the CPU"
            found.append((name, torch.get_rng_state, torch.set_rng_state))
        self._states = [_State(name, get, put, get()) for name, get, put in found]
        for name, held in held_in(module):
            self.add(name, held)

    def add(self, name: str, held: Any) -> None:
        """Look at a value, if it is a generator, as it is now."""
        self._states += [_State(name, get, put, get()) for get, put in self._access(held)]

    def _access(self, held: Any) -> list[tuple[_Get, _Set]]:
        """How to read and write the state of a generator; nothing of other objects."""
        if isinstance(held, random.Random):
            return [(held.getstate, held.setstate)]
        if self._with_torch and isinstance(held, torch.Generator) and held.device.type == "cpu":
            return [(held.get_state, held.set_state)]
        if self._numpy is not None:
            if isinstance(held, self._numpy.random.RandomState):
                return [(held.get_state, held.set_state)]
            if isinstance(held, self._numpy.random.Generator):
                bits = held.bit_generator
                return [(partial(getattr, bits, "state"), partial(setattr, bits, "state"))]
        return []

    def drawn(self) -> list[str]:
        """The names of the generators that were drawn from."""
        return [s.name for s in self._states if _comparable(s.get()) != _comparable(s.value)]

    def restore(self) -> None:
        """Put the states back."""
        for state in self._states:
            state.put(state.value)


_Get = Callable[[], Any]
_Set = Callable[[Any], object]


class _State(NamedTuple):
    """A generator's name, how its state is read and written, and what it was."""

    name: str
    get: _Get
    put: _Set
    value: Any


def _comparable(state: Any) -> Any:
    """A generator's state as something that one ``==`` compares, arrays and tensors as bytes."""
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    if hasattr(state, "tobytes"):
        return state.tobytes()
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple) and not isinstance(state[0], int):  # else hundreds of numbers
        return tuple(map(_comparable, state))
    return state
