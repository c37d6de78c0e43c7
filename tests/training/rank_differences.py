"""Fits in which one rank is made to differ, as every rank runs them."""

from __future__ import annotations

import os
import re
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_graphs import GraphCapture
from lightning_graphs.errors import CaptureError, is_out_of_memory, no_room
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.regions import peers
from lightning_graphs.regions.peers import PartedError
from tests.ranks import in_folder, run_on_ranks, state_of
from tests.training.ddp_fits import DDP, Plain, of_rank
from tests.training.fits import Fit, Hidden, Net, compare, prepare

ODD = 1
"""The rank that differs."""
READ = "A capture cannot (read a value on the host|contain an operation that CUDA refuses)"
"""What a rehearsal and CUDA say of it."""
_HIDDEN = Hidden()


class ReadsOnOne(Net):
    """Reads a value on the host, on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == ODD and float(loss) > 1e9:
            loss = -loss
        return loss


class Read(torch.autograd.Function):
    """Reads a value on the host in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        float(gradient.sum())
        return gradient


class ReadsInBackward(Plain):
    """Reads a value on the host in the middle of the backward pass, on one rank."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch["x"])
        if self.global_rank == ODD:
            hidden = Read.apply(hidden)
        return nn.functional.cross_entropy(self.net[2](self.net[1](hidden)), batch["y"])


class Scaled(Net):
    """Multiplies the loss by a number whose changes no guard sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * _HIDDEN["scale"]


class MovesOn(Net):
    """Has an attribute that takes a new value at every step of one rank."""

    scale = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == ODD:
            self.scale += 2**-6

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale


class At(Callback):
    """Does something once, on the odd rank, ahead of a step."""

    def __init__(self, step: int, action: Callable[[Any, Any], None]) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == ODD:
            self.action(trainer, module)


def _hide(trainer: Any, module: Any) -> None:
    _HIDDEN["scale"] = 2.0


def _move(trainer: Any, module: Any) -> None:
    weight = module.net[0].weight
    _HIDDEN["memory"] = weight.data = weight.data.clone()


def _switch_off(trainer: Any, module: Any) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, GraphCapture):
            assert callback._summary is not None
            callback._summary._fit.ranks.leave("told to")


def _no_room(self: MemoryBudget, what: str, **_: Any) -> None:
    raise no_room(what, "there is none")


def _with_odd_batches(rank: int, where: Callable[[int], bool]) -> list[dict[str, Any]]:
    data = of_rank(rank)
    for i in filter(where, range(len(data)) if rank == ODD else ()):
        data[i] = {name: value[:5] for name, value in data[i].items()}
    return data


Expect = Callable[[int, Fit], None]


def _equal(rank: int, fit: Fit) -> None:
    """Replayed again and again, with nothing to say."""
    assert fit.statistics.replayed >= 15
    assert fit.statistics.fallbacks == []


def _eager(said: str, elsewhere: str, replays: int = 0) -> Expect:
    def expect(rank: int, fit: Fit) -> None:
        assert fit.statistics.replayed == replays
        (line,) = fit.statistics.fallbacks
        assert re.search(said if rank == ODD else elsewhere, line), line

    return expect


def _recaptured(rank: int, fit: Fit) -> None:
    assert fit.statistics.captures == 2
    assert fit.statistics.replayed >= 15


_EAGER = {"on_failure": "eager"}

KINDS: dict[str, tuple[Callable[[int], dict[str, Any]], Expect]] = {
    "a batch of another shape": (
        lambda rank: {"data": partial(_with_odd_batches, rank, lambda i: i == 17)},
        _equal,
    ),
    "every third batch of another shape": (
        lambda rank: {
            "data": partial(_with_odd_batches, rank, lambda i: i % 3 == 0),
            "max_epochs": 3,
        },
        _equal,
    ),
    "a capture that is refused": (
        lambda rank: {"module": ReadsOnOne, "capture": _EAGER},
        _eager(READ, f"on rank 1: {READ}"),
    ),
    "a backward pass that is refused": (
        lambda rank: {
            "module": ReadsInBackward,
            "capture": _EAGER,
            "strategy": DDPStrategy(bucket_cap_mb=1e-4),
        },
        _eager(READ, f"on rank 1: {READ}"),
    ),
    "a capture without room": (
        lambda rank: {"capture": _EAGER},
        _eager("there is none", "on rank 1: A captured step needs memory"),
    ),
    "a replay that is wrong": (
        lambda rank: {
            "module": Scaled,
            "capture": {**_EAGER, "verify": 4},
            "callbacks": lambda: [At(28, _hide)],
        },
        _eager("at step 28", "at step 28", 28 - 14),
    ),
    "graphs that are lost": (lambda rank: {"callbacks": lambda: [At(20, _move)]}, _recaptured),
    "graphs that are switched off": (
        lambda rank: {"callbacks": lambda: [At(24, _switch_off)]},
        _eager("told to", "rank 1 has switched its graphs off: told to", 24 - 14),
    ),
    "a step that takes new values": (
        lambda rank: {
            "module": MovesOn,
            "capture": {**_EAGER, "scope": "auto"},
            "max_epochs": 4,
        },
        lambda rank, fit: None,
    ),
}


def trained_twice(rank: int, backend: str, root: Path, kind: str) -> Any:
    """Fit with the callback and without; the state after it, and what was replayed."""
    options, expect = KINDS[kind]
    folder, fits = in_folder(root, rank), []
    if kind == "a capture without room" and rank == ODD:
        MemoryBudget.require_room = _no_room  # type: ignore[method-assign]
    for is_captured in (False, True):
        _HIDDEN.clear()
        given = {"data": partial(of_rank, rank), **DDP, **options(rank)}
        fits.append(prepare(backend, folder, is_captured, **given).run())
    compare(*fits, replayed=False)
    expect(rank, fits[1])
    return state_of(fits[1].module), fits[1].statistics.replayed


def require_together(backend: str, root: Path, kind: str) -> None:
    """Assert that fits are equal with graphs and without, and that ranks went the same way."""
    (first, replayed), (second, again) = run_on_ranks(trained_twice, backend, root, kind)
    assert replayed == again
    parameters = [name for name in first if "running" not in name]
    assert [first[name] for name in parameters] == [second[name] for name in parameters]


def stopped(rank: int, backend: str, root: Path) -> Any:
    """Get a SIGTERM on one rank, in the middle of a fit; where each of them has stopped."""

    def signal_self(trainer: Any, module: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    made = prepare(
        backend,
        in_folder(root, rank),
        True,
        data=partial(of_rank, rank),
        callbacks=lambda: [At(17, signal_self)],
        **DDP,
    )
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        made.run()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert made.trainer.received_sigterm is (rank == ODD)
    return made.trainer.global_step, made.statistics.replayed


def failing(rank: int, backend: str, root: Path) -> None:
    """Raise on one rank, in the middle of a fit."""

    def fail(trainer: Any, module: Any) -> None:
        raise ValueError("broken on one rank")

    at = At(17, fail)
    prepare(backend, in_folder(root, rank), True, callbacks=lambda: [at], **DDP).run()


class BreaksWhenVerified(Plain):
    """Raises in the middle of the backward pass of one rank, once that is wanted."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch["x"])
        if self.global_rank == ODD and _HIDDEN["breaks"] == 0.0:
            hidden.register_hook(_break)
        return nn.functional.cross_entropy(self.net[2](self.net[1](hidden)), batch["y"])


def _break(gradient: Tensor) -> None:
    raise ValueError("broken on one rank")


def _want_to_break(trainer: Any, module: Any) -> None:
    _HIDDEN["breaks"] = 0.0


def failing_when_verified(rank: int, backend: str, root: Path) -> None:
    """Raise on one rank, where others wait for its gradients, in a verification."""
    _HIDDEN.clear()
    at = At(16, _want_to_break)
    given = {**DDP, "strategy": DDPStrategy(bucket_cap_mb=1e-4), "capture": {"verify": 4}}
    prepare(
        backend,
        in_folder(root, rank),
        True,
        callbacks=lambda: [at],
        module=BreaksWhenVerified,
        **given,
    ).run()


def parting(rank: int, root: Path) -> Any:
    """Find no memory on one rank, where ranks exchange data, then fail; what both are told."""
    told = []

    class Parts(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step != 16:
                return
            (graphs,) = (c for c in trainer.callbacks if isinstance(c, GraphCapture))
            with pytest.raises(PartedError) as raised:
                graphs._handler.runner._ranks.all_or_none(_find_no_memory, exchanges=True)
            assert not is_out_of_memory(raised.value)
            told.append(str(raised.value))
            with pytest.raises((AssertionError, CaptureError)) as raised:
                graphs._handler.runner._ranks.all_or_none(_say_nothing)
            told.append(f"{raised.typename}: {raised.value}")

    prepare("emulated", in_folder(root, rank), True, callbacks=lambda: [Parts()], **DDP).run()
    return told


def _say_nothing() -> None:
    if torch.distributed.get_rank() == ODD:
        raise AssertionError


def _find_no_memory() -> None:
    if torch.distributed.get_rank() == ODD:
        raise torch.OutOfMemoryError("CUDA out of memory")


class NeedsMore(Plain):
    """Finds no memory for one batch of one rank, which is larger than those before."""

    def loss(self, batch: Any) -> Tensor:
        if self.global_rank == ODD and len(batch["x"]) > 8:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        return super().loss(batch)


def out_of_memory(rank: int, backend: str, root: Path) -> None:
    """Find no memory for a step on one rank, while graphs have theirs; a file has what is said."""
    data = of_rank(rank)
    data[17] = {name: torch.cat([value, value]) for name, value in data[17].items()}
    given = {**DDP, "data": lambda: data, "module": NeedsMore}
    made = prepare(backend, in_folder(root, rank), True, capture=_EAGER, **given)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            made.run()
        finally:
            lines = [str(w.message) for w in said if "runs out of memory" in str(w.message)]
            (root / f"said by {rank}").write_text("\n".join(lines))
            assert made.statistics.replayed > 0


def dying(rank: int, backend: str, root: Path, *, busy: bool = False) -> None:
    """End the process of one rank at once; with ``busy``, before its device does a step.

    The others wait for that on their devices, and a file has what they say.
    """

    def die(trainer: Any, module: Any) -> None:
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(4_000_000_000)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    peers.PATIENCE = 3.0
    os.dup2(os.open(root / f"said by {rank}", os.O_WRONLY | os.O_CREAT), 2)
    at = At(17, die)
    prepare(backend, in_folder(root, rank), True, callbacks=lambda: [at], **DDP).run()


class Checked(Plain):
    """Looks whether its loss is finite, only to raise."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            raise ValueError("broken on one rank")
        return loss


def asserting(rank: int, backend: str, root: Path, every: int) -> Any:
    """Let an assertion of one rank fail in a replay; what each of them raises, and when."""
    data = of_rank(rank)
    if rank == ODD:
        data[17]["x"][0, 0] = torch.nan
    options = {**DDP, "data": lambda: data, "log_every_n_steps": every, "module": Checked}
    made = prepare(backend, in_folder(root, rank), True, **options)
    with pytest.raises((ValueError, PartedError)) as raised:
        made.run()
    assert made.statistics.replayed > 0
    return raised.typename, str(raised.value), made.trainer.global_step


def require_ended(backend: str, root: Path, every: int, ends: int) -> None:
    """Assert that both end where a step is logged, or after an epoch, when NaN has reached both."""
    other, odd = run_on_ranks(asserting, backend, root, every, seconds=60)
    assert odd[::2] == ("ValueError", ends)
    assert "raised by step 17" in odd[1]
    assert other[::2] == ("PartedError" if every == 1 else "ValueError", ends)
    assert ("rank 1: ValueError: broken" if every == 1 else "raised by step 18") in other[1]
