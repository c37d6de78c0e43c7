"""Random generators of the host and of GPUs, and the random state of cuDNN.

cuDNN keeps that state for the dropout between recurrent layers. torch has one tensor of it for each
GPU (``DropoutState`` in aten/src/ATen/native/cudnn/RNN.cpp) and hands it to ``aten::_cudnn_rnn`` as
the last argument; no public API leads to it. A kernel reads it
and moves it on, so replays of a graph draw the masks that eager calls would draw. But setting
torch's generator of the GPU in any way (a seed, a state, an offset) lets the next call make the
state again, seeded by a number of that generator, in other memory: no graph follows it there.

Where torch lacks what is used here, recurrent layers with dropout stay eager.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_graphs.errors import CaptureError, stop
from lightning_graphs.private.exchange import exchanged

# ------------------ Generators


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


def generator_identity(generator: torch.Generator) -> int:
    """Return the C++ generator's address: the dispatcher wraps it in a new Python object."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def random_place(device_type: str) -> tuple[int, ...]:
    """Return the offsets of the GPUs' generators.

    Nothing is known on a CPU, nor inside of a capture.
    """
    if device_type != "cuda" or torch.cuda.is_current_stream_capturing():
        return ()
    return tuple(generator.get_offset() for generator in torch.cuda.default_generators)


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


_OTHERS = (dict, list, tuple, Tensor, nn.Module)
"""Most of what modules hold; to ask each of them for what generators are takes longer."""


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
        # Those from which captured operators draw; graphs and snapshots have torch's own
        self._of_device: list[tuple[torch.Generator, Tensor]] = []
        self.outside: set[str] = set()  # names of values that another walk would not find
        self._with_torch = seen is None and device.type != "cpu"
        others = {getattr(generator, "name", "") for generator in seen or ()}
        self._states = [(g, g.get_state()) for _, g in shared_generators() if g.name not in others]
        self.add(OF_TORCH, torch.default_generator)
        for name, value in held:
            self.add(name, value)

    def add_outside(self, name: str, held: Any) -> None:
        """Add a value that is not among those given, as one in a global variable; see ``add``."""
        self.outside.add(name)
        self.add(name, held)

    def add(self, name: str, held: Any) -> None:
        """Add a value with its present state if it is a generator."""
        if isinstance(held, _OTHERS):
            return
        of_torch = isinstance(held, torch.Generator) and held.device.type == "cpu"
        access: tuple[Callable[[], Any], Callable[[Any], object]]
        if isinstance(held, random.Random):
            access = held.getstate, held.setstate
        elif isinstance(held, numpy.random.Generator):
            bits = held.bit_generator
            access = partial(getattr, bits, "state"), partial(setattr, bits, "state")
        elif isinstance(held, numpy.random.RandomState) or (of_torch and self._with_torch):
            access = held.get_state, held.set_state
        elif isinstance(held, torch.Generator) and held is not torch.default_generator:
            if not (held.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._of_device.append((held, held.get_state()))
            return
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
        for own, before in self._of_device:
            if not (own.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                own.set_state(before)


# ------------------ cuDNN


aten = torch.ops.aten

_call_layer = torch.rnn_tanh  # itself, also where the one of torch is exchanged
_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_BEFORE = (aten.empty.memory_format, aten.set_.source_Storage)
"""Operators that a call runs ahead of ``_cudnn_rnn`` where the random state is there."""


def draws_in_cudnn(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer that cuDNN computes, dropout included.

    torch's own kernels, as on a CPU, draw from torch's generators.
    """
    return (
        isinstance(module, nn.RNNBase)
        and module.training
        and module.dropout > 0
        and torch.backends.cudnn.is_acceptable(next(module.parameters()))
    )


def dropout_state_of(device: torch.device, modules: Iterable[nn.Module]) -> DropoutState | None:
    """Return a GPU's random state of recurrent layers, if one of these modules draws from it."""
    return DropoutState(device) if any(map(draws_in_cudnn, modules)) else None


class DropoutState:
    """cuDNN's random state on one GPU: looked at without a trace, and put back."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._generator = torch.cuda.default_generators[index]
        self._device = torch.device("cuda", index)

    def now(self) -> Tensor | None:
        """Return the tensor that holds it, or None if the next call renews it; change nothing."""
        state = self.look()
        if state is None:
            self.invalidate()
        return state

    def restore(self, saved: Tensor | None) -> None:
        """Put back a copy of the tensor, or with None let the next call make another state."""
        if saved is None:
            self.invalidate()
            return
        state = self.look()
        if state is None:  # the look has taken back that another state is to be made
            state = self.look()
        assert state is not None, "a state that was copied exists"
        state.copy_(saved)

    def invalidate(self) -> None:
        """Let the next call of a layer make another state, as setting the generator does."""
        self._generator.set_offset(self._generator.get_offset())

    def look(self) -> Tensor | None:
        """Return the state, by a call that ends before anything of it runs.

        None where the call would have made it: it does not want to any longer.
        """
        seen = _StateSeen()
        with (
            torch.inference_mode(False),
            torch.cuda.device(self._device),
            torch.autocast("cuda", enabled=False),
            torch.backends.cudnn.flags(enabled=True),
            torch.no_grad(),
            contextlib.suppress(_Stop),
        ):
            # Two layers of one unit, and dropout between them
            x, hidden = (torch.empty(n, 1, 1, device=self._device) for n in (1, 2))
            weights = [x[0]] * 4
            with seen:
                _call_layer(x, hidden, weights, False, 2, 0.5, True, False, False)
        return seen.state


class _Stop(Exception):
    """Ends a call once its arguments have been seen."""


class _StateSeen(TorchDispatchMode):
    """Sees the random state as a recurrent layer hands it to cuDNN, which does not run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state: Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _BEFORE:
            return func(*args, **(kwargs or {}))
        if func is aten._cudnn_rnn.default:
            self.state = args[-1]
        raise _Stop


class CapturedDropout:
    """The memory in which a graph reads cuDNN's random state and moves it on."""

    def __init__(self, state: Tensor) -> None:
        self._memory = state.detach()
        self._state = DropoutState(state.device)

    def is_current(self) -> bool:
        """Return whether a replay draws what an eager call would draw.

        A state that an eager call has made since is brought back to where the graph reads it. One
        that the next call is to make cannot be foreseen: that call must be an eager one.
        """
        state = self._state.now()
        if state is None:
            return False
        if state.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(state)
            state.set_(self._memory)  # type: ignore[call-overload]
        return True


class DropoutCapture:
    """Notes whether a capture draws dropout from cuDNN's random state."""

    def __init__(self) -> None:
        self.found: CapturedDropout | None = None
        self._to_be_made: DropoutState | None = None

    def noting(self) -> AbstractContextManager[None]:
        """Follow the recurrent layers that the body calls, a part of a capture."""
        owners = torch._VF, torch
        calls = [(o, name, self._noted(getattr(o, name))) for o in owners for name in _LAYERS]
        return exchanged(calls)

    def end(self) -> None:
        """Restore, after the capture, that the next call renews the state if it was so before."""
        if self._to_be_made is not None:
            self._to_be_made.invalidate()
            self._to_be_made = None

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.found is None and _draws(args):
                self._note(DropoutState(args[0].device))
            return original(*args, **kwargs)

        return call

    def _note(self, dropout: DropoutState) -> None:
        state = dropout.look()
        if state is None:
            self._to_be_made = dropout
            state = dropout.look()
        if state is None:
            stop(
                CaptureError(
                    "A capture needs the random state that cuDNN draws the dropout between "
                    "recurrent layers from.",
                    "no such layer has run in this process",
                    "run the layer once in training mode before its capture",
                )
            )
        self.found = CapturedDropout(state)


def _draws(args: Sequence[Any]) -> bool:
    """Return whether a recurrent layer's call lets cuDNN draw dropout.

    It is given ``(input, hidden, weights, bias, layers, dropout, train, ...)``, or the sizes of a
    packed batch ahead of the hidden state.
    """
    at = 5 if isinstance(args[2], list) else 6
    draws = args[at] > 0 and args[at + 1]
    return bool(draws and torch.backends.cudnn.is_acceptable(args[0]))
