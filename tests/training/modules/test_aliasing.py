"""Outputs that the next graph reads in place: not copied, and never overwritten under a caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.autograd.backward import OutputGradients
from lightning_graphs.autograd.callables import CallableCapture
from lightning_graphs.autograd.graphed import SharedArgument
from lightning_graphs.values.memory import AliasedBuffer, OutputPlan
from tests.training.fits import Net, batches, compare, fit_twice

CAPTURE: dict[str, Any] = {"scope": "modules", "modules": ["blocks.*"]}


class Chain(Net):
    """Three blocks, each fed with what the one before it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.25), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 3)

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        x = self.chain(self.net(batch["x"]))
        return nn.functional.cross_entropy(self.head(x).float(), batch["y"])


class Residual(Chain):
    """What goes from block to block is used beside them, too."""

    def chain(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        return self.blocks[2](second) + first * second


class Changing(Chain):
    """What a block returned is written in place before the next block reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3))

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.5)
        return x


class Keeping(Chain):
    """The output of the first block is kept, and read in the step after."""

    def chain(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        before = getattr(self, "_kept", None)
        self._kept = first.detach()
        x = self.blocks[2](self.blocks[1](first))
        return x if before is None else x + before.mean()


@pytest.fixture
def aliased(monkeypatch: pytest.MonkeyPatch) -> set[AliasedBuffer]:
    """All memory that callers may alias."""
    found: set[AliasedBuffer] = set()
    original = OutputPlan.alias_output

    def alias_output(self: OutputPlan, index: int) -> AliasedBuffer:
        found.add(original(self, index))
        return original(self, index)

    monkeypatch.setattr(OutputPlan, "alias_output", alias_output)
    return found


@pytest.mark.parametrize(("module", "count"), [(Chain, 2), (Residual, 2), (Changing, 0)])
def test_outputs_go_from_graph_to_graph_unless_something_else_comes_between(
    backend: str, tmp_path: Path, aliased: set[AliasedBuffer], module: type[Chain], count: int
) -> None:
    compare(*fit_twice(backend, tmp_path, module=module, capture=CAPTURE))
    assert len(aliased) == count


def test_an_output_that_somebody_keeps_is_not_overwritten(
    backend: str, tmp_path: Path, aliased: set[AliasedBuffer]
) -> None:
    compare(*fit_twice(backend, tmp_path, module=Keeping, capture=CAPTURE))
    assert len(aliased) == 2


def test_shapes_share_modules_and_not_memory(
    backend: str, tmp_path: Path, aliased: set[AliasedBuffer]
) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    compare(*fit_twice(backend, tmp_path, module=Chain, capture=CAPTURE, data=data))
    assert len(aliased) == 4


class HandingOut(Chain):
    """The output of the second block is handed to hooks, after the optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = self.blocks[0](self.net(batch["x"]))
        second = self.blocks[1](first)
        logits = self.head(self.blocks[2](second))
        loss = nn.functional.cross_entropy(logits, batch["y"])
        return {"loss": loss, "features": second.detach()}


def test_hooks_after_the_step_see_what_a_lent_output_was(
    backend: str, tmp_path: Path, aliased: set[AliasedBuffer]
) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    compare(*fit_twice(backend, tmp_path, module=HandingOut, capture=CAPTURE, data=data))
    assert len(aliased) == 4


class KeepingTheLast(Chain):
    """The output of the second block is kept, and read in the step after; batches of two sizes."""

    def chain(self, x: Tensor) -> Tensor:
        second = self.blocks[1](self.blocks[0](x))
        before = getattr(self, "_kept", None)
        self._kept = second.detach()
        x = self.blocks[2](second)
        return x if before is None else x + before.mean()


def test_an_output_that_is_kept_is_copied_from_then_on(
    backend: str, tmp_path: Path, aliased: set[AliasedBuffer]
) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    _, captured = fits = fit_twice(
        backend, tmp_path, module=KeepingTheLast, capture=CAPTURE, data=data
    )
    compare(*fits)
    assert len(aliased) == 4  # two outputs of either size, and none after the first replay
    reasons = captured.statistics.recaptures
    assert any("an output of a graphed module is kept" in reason for reason in reasons)


class Masked(nn.Module):
    """A block with an argument that all of its kind are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.relu(self.linear(x)) + mask


class WithMask(Chain):
    """Three blocks that are given the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.taken = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.taken += 1

    def masks(self, mask: Tensor) -> list[Tensor]:
        return [mask] * 3

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        mask = (x.detach() > 0).to(x.dtype)
        for block, given in zip(self.blocks, self.masks(mask), strict=True):
            x = block(x, given)
        return nn.functional.cross_entropy(self.head(x).float(), batch["y"])


class WithMasksOfTheirOwn(WithMask):
    """From the tenth step on every block is given another one."""

    def masks(self, mask: Tensor) -> list[Tensor]:
        return [mask * (i + 1) for i in range(3)] if self.taken > 10 else [mask] * 3


class WritingTheMask(WithMask):
    """From the tenth step on the mask is written between the blocks."""

    def masks(self, mask: Tensor) -> Any:
        for _ in range(3):
            yield mask
            if self.taken > 10:
                mask.mul_(0.5)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[SharedArgument]:
    """All static inputs that several calls read, each as often as one of them was captured."""
    found: list[SharedArgument] = []
    original = CallableCapture.share

    def share(self: CallableCapture, leaf: int) -> tuple[Tensor, SharedArgument]:
        found.append(original(self, leaf)[1])
        return original(self, leaf)

    monkeypatch.setattr(CallableCapture, "share", share)
    return found


@pytest.mark.parametrize(
    ("module", "captures"), [(WithMask, 1), (WithMasksOfTheirOwn, 2), (WritingTheMask, 2)]
)
def test_an_argument_that_several_calls_are_given_is_copied_once(
    backend: str,
    tmp_path: Path,
    shared: list[SharedArgument],
    module: type[WithMask],
    captures: int,
) -> None:
    _, captured = fits = fit_twice(backend, tmp_path, module=module, capture=CAPTURE)
    compare(*fits)
    assert len(shared) == 2
    assert len(set(shared)) == 1
    assert captured.statistics.captures == captures
    assert captured.statistics.replayed > 10
    assert len(captured.statistics.recaptures) == captures - 1
    assert all("which are copied now" in reason for reason in captured.statistics.recaptures)


class SkippingABlock(Chain):
    """From the tenth step on the second block is left out in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.taken += 1

    def chain(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != 1 or self.taken <= 10 or self.taken % 2:
                x = block(x)
        return x


def test_a_block_that_is_skipped(backend: str, tmp_path: Path) -> None:
    _, captured = fits = fit_twice(
        backend, tmp_path, module=SkippingABlock, capture=CAPTURE, max_epochs=3
    )
    compare(*fits)
    assert any("which are copied now" in reason for reason in captured.statistics.recaptures)
    assert captured.statistics.replayed > 15


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many gradients a backward pass was given, and how many of them it read in place."""
    found: list[tuple[int, int]] = []
    original = OutputGradients.take

    def take(self: OutputGradients, gradients: Any) -> Any:
        pairs = zip(self.buffers, gradients, strict=True)
        in_place = [g is not None and b.data_ptr() == g.data_ptr() for b, g in pairs]
        found.append((len(gradients), sum(in_place)))
        return original(self, gradients)

    monkeypatch.setattr(OutputGradients, "take", take)
    return found


class HookedBetween(Chain):
    """What goes from block to block has hooks on its gradient, and is kept with it."""

    def chain(self, x: Tensor) -> Tensor:
        self.seen: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 0 and x.requires_grad:
                x.register_hook(lambda gradient: gradient * 3)
            if i == 1 and x.requires_grad:
                x.register_hook(lambda gradient: self.seen.append(gradient))
        return x

    def on_after_backward(self) -> None:
        if self.seen:
            self.log("seen", self.seen[0].double().sum())


class UsedTwice(Chain):
    """What a block returns goes into the next block and into the loss."""

    def chain(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first)) + 0.1 * first


@pytest.mark.parametrize(
    ("module", "in_place"), [(Chain, 2), (HookedBetween, 1), (UsedTwice, 1), (Residual, 0)]
)
def test_gradients_go_from_graph_to_graph_unless_something_else_comes_between(
    backend: str,
    tmp_path: Path,
    taken: list[tuple[int, int]],
    module: type[Chain],
    in_place: int,
) -> None:
    compare(*fit_twice(backend, tmp_path, module=module, capture=CAPTURE))
    steps = [taken[i : i + 3] for i in range(0, len(taken), 3)]
    assert steps
    assert sum(count for _, count in steps[-1]) == in_place


class KeepingGradients(Chain):
    """The gradient between two blocks is kept, and read in the step after."""

    def chain(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        before = getattr(self, "_kept", None)

        def keep(gradient: Tensor) -> None:
            self._kept = gradient

        if first.requires_grad:
            first.register_hook(keep)
        x = self.blocks[2](self.blocks[1](first))
        return x if before is None else x + before.sum()


def test_a_gradient_that_somebody_keeps_is_not_overwritten(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=KeepingGradients, capture=CAPTURE))


class Twice(nn.Module):
    """Returns one tensor twice, as encoders do that return all hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x).tanh()
        return hidden, hidden


class ReturningTwice(Chain):
    """The next block is given one of the two; the other is used beside it, or not at all."""

    weight = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Twice(), nn.Linear(16, 16)))

    def chain(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0](x)
        x = self.blocks[1](first)
        return x + self.weight * second if self.weight else x


class UsingBoth(ReturningTwice):
    weight = 0.5


@pytest.mark.parametrize("module", [ReturningTwice, UsingBoth])
def test_gradients_of_a_tensor_that_is_returned_twice(
    backend: str, tmp_path: Path, taken: list[tuple[int, int]], module: type[Chain]
) -> None:
    capture = {**CAPTURE, "verify": False}
    compare(*fit_twice(backend, tmp_path, module=module, capture=capture))
    assert {in_place for _, in_place in taken} == {0}


class CachedMask(WithMask):
    """From the tenth step on the mask is one that was made under inference mode."""

    def masks(self, mask: Tensor) -> list[Tensor]:
        if self.taken > 10:
            with torch.inference_mode():
                mask = mask.clone()
        return [mask] * 3


def test_a_shared_argument_of_inference_mode(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=CachedMask, capture=CAPTURE))
