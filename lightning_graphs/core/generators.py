"""Keeps random generators right around captures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from lightning_graphs.core.obstacles import SET_GENERATOR
from lightning_graphs.core.private.cudnn import DropoutState, dropout_state_of
from lightning_graphs.exchange import replaced


class HostGenerator(Protocol):
    """A generator of random numbers on the host: torch's, Python's or NumPy's."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


def comparable(state: Any) -> Any:
    """A generator's state as something that one ``==`` compares, arrays and tensors as bytes."""
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
    """How many random numbers the generators of the GPUs have given.

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
    """torch's generators of the CPU and of one GPU as they are now, to be put back.

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
            # Another generator with the same state: to set torch's own would make cuDNN's anew.
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


@contextlib.contextmanager
def same_random_numbers(tensors: Sequence[Tensor], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore torch's random generators of the CPU and of the tensors' GPUs, cuDNN's included."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    if torch.cuda.is_available() and not devices:
        devices = {torch.device("cuda", torch.cuda.current_device())}
    modules = list(modules)
    states = [RandomState(device, modules) for device in devices or {torch.device("cpu")}]
    try:
        yield
    finally:
        for state in states:
            state.restore()
