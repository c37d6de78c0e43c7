"""Saves and restores random generators of torch, Python and NumPy around captures."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, Protocol

import numpy
import torch
from torch import Tensor, nn

from lightning_graphs.device.rules import SET_GENERATOR
from lightning_graphs.private.cudnn import DropoutState, dropout_state_of
from lightning_graphs.private.exchange import replaced


class HostGenerator(Protocol):
    """A generator of random numbers on the host: torch's, Python's or NumPy's."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


def comparable(state: Any) -> Any:
    """Make a generator's state comparable by one ``==``: arrays and tensors as bytes."""
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    if hasattr(state, "tobytes"):
        return state.tobytes()
    if isinstance(state, dict):
        return {key: comparable(value) for key, value in state.items()}
    if isinstance(state, tuple) and not isinstance(state[0], int):  # else hundreds of numbers
        return tuple(map(comparable, state))
    return state


def random_place(device_type: str) -> tuple[int, ...]:
    """Return the offsets of the GPUs' generators.

    Nothing is known on a CPU, nor inside of a capture.
    """
    if device_type != "cuda" or torch.cuda.is_current_stream_capturing():
        return ()
    return tuple(generator.get_offset() for generator in torch.cuda.default_generators)


def rewinding_refused(draws: bool) -> AbstractContextManager[None]:
    """Refuse to set CUDA's generators in the body, the capture of a backward pass that draws.

    Activation checkpointing sets them to where the forward pass began, for equal dropout. A graph
    of its own begins where the forward graph has ended.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise SET_GENERATOR.refused(
            "torch.cuda.set_rng_state is called in the backward pass, which draws numbers"
        )

    return replaced(torch.cuda, "set_rng_state", refuse) if draws else contextlib.nullcontext()


class RandomState:
    """Snapshot of torch's generators of the CPU and of one GPU.

    Args:
        device: The GPU; of a CPU there is no other generator.
        modules: Recurrent layers among these may draw from cuDNN's own state, which is kept, too.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]) -> None:
        self._on_host = torch.get_rng_state()
        self._on_device: Tensor | None = None
        self._dropout: DropoutState | None = None
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            # Another generator with an equal state: setting torch's own would renew cuDNN's.
            self._shared = torch.cuda.default_generators[index].graphsafe_get_state()
            self._on_device = self._shared.get_state()
            self._dropout = dropout_state_of(device, modules)
        if self._dropout is not None:
            masks = self._dropout.now()
            self._masks = None if masks is None else masks.clone()

    def restore(self) -> None:
        torch.set_rng_state(self._on_host)
        if self._on_device is not None:
            self._shared.set_state(self._on_device)
        if self._dropout is not None:
            self._dropout.restore(self._masks)


def random_states(tensors: Sequence[Tensor], modules: Iterable[nn.Module]) -> list[RandomState]:
    """Take a snapshot of torch's generators of CPU and the tensors' GPUs, cuDNN's included."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    if torch.cuda.is_available() and not devices:
        devices = {torch.device("cuda", torch.cuda.current_device())}
    modules = list(modules)
    return [RandomState(device, modules) for device in devices or {torch.device("cpu")}]


@dataclass(frozen=True, eq=False, slots=True)
class PythonGenerator:
    """A generator of Python or NumPy, with the interface of torch's."""

    name: str  # its name in messages
    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]


def shared_generators() -> Iterator[tuple[ModuleType, PythonGenerator]]:
    """List modules whose functions draw from one shared generator, with that generator."""
    yield random, PythonGenerator("Python's random", random.getstate, random.setstate)
    shared = numpy.random
    yield shared, PythonGenerator("numpy.random", shared.get_state, shared.set_state)


OF_TORCH = "torch's generator of the CPU"
"""Its name in messages, which is no name in code."""


class Generators:
    """States of the random generators from which Python code on the host draws.

    Those of Python, numpy and torch, those among the values that are given, and those that are
    added.

    Args:
        held: Names and values.
        device: Where the captured operators run: on a CPU, torch's generator is their own.
        seen: Generators whose draws are followed: these and all of torch's are left out.
    """

    def __init__(
        self,
        held: Iterable[tuple[str, Any]],
        device: torch.device,
        *,
        seen: Iterable[Any] | None = None,
    ) -> None:
        self._with_torch = seen is None and device.type != "cpu"
        others = {getattr(generator, "name", "") for generator in seen or ()}
        self._states = [(g, g.get_state()) for _, g in shared_generators() if g.name not in others]
        self.add(OF_TORCH, torch.default_generator)
        for name, value in held:
            self.add(name, value)

    def add(self, name: str, held: Any) -> None:
        """Add a value with its present state if it is a generator."""
        of_torch = isinstance(held, torch.Generator) and held.device.type == "cpu"
        access: tuple[Callable[[], Any], Callable[[Any], object]]
        if isinstance(held, random.Random):
            access = held.getstate, held.setstate
        elif isinstance(held, numpy.random.Generator):
            bits = held.bit_generator
            access = partial(getattr, bits, "state"), partial(setattr, bits, "state")
        elif isinstance(held, numpy.random.RandomState) or (of_torch and self._with_torch):
            access = held.get_state, held.set_state
        else:
            return
        generator = PythonGenerator(name, *access)
        self._states.append((generator, generator.get_state()))

    def drawn(self) -> list[str]:
        """List the names of generators that were drawn from."""
        states = ((g.name, comparable(g.get_state()), comparable(s)) for g, s in self._states)
        return [name for name, now, then in states if now != then]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)
