"""Outputs of graphed submodules that the loss does not use, always or in some steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.fits import GradientTrace, Net, compare, fit_twice


class Body(nn.Module):
    """Two outputs; on the second one depends a layer that the first one does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pooler = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).tanh(), self.pooler(x)


class Unused(Net):
    """The weights of the pooler get no gradient, so that no optimizer decays them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(8, 8), Body()

    def joined(self, hidden: Tensor, pooled: Tensor) -> Tensor:
        return hidden

    def loss(self, batch: Any) -> Any:
        hidden, pooled = self.body(self.first(batch["x"]))
        return super().loss({**batch, "x": self.joined(hidden, pooled)})


class Detached(Unused):
    def joined(self, hidden: Tensor, pooled: Tensor) -> Tensor:
        return hidden + pooled.detach()


class Sometimes(Unused):
    """Whether the second output has a gradient is another matter in every third step."""

    def joined(self, hidden: Tensor, pooled: Tensor) -> Tensor:
        used = self.trainer.global_step % 3 != 2
        return hidden + (pooled if used else pooled.detach())


class DetachedInside(Net):
    """The second graphed module lets no gradient through to the first."""

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.detach())

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(8, 8), self.Head(8, 8)

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "x": self.body(self.first(batch["x"]))})


@pytest.mark.parametrize("clip", [None, 0.25])
@pytest.mark.parametrize("module", [Unused, Detached, Sometimes, DetachedInside])
def test_what_only_they_depend_on_has_no_gradient(
    backend: str, tmp_path: Path, module: Any, clip: float | None
) -> None:
    capture = {"scope": "modules", "modules": ["first", "body"], "verify": 1}
    compare(
        *fit_twice(
            backend, tmp_path, module=module, capture=capture, trace=GradientTrace,
            gradient_clip_val=clip,
        )
    )  # fmt: skip


def test_they_are_kept_apart_over_an_accumulation(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "modules", "modules": ["first", "body"]}
    options: dict[str, Any] = {"module": Sometimes, "capture": capture}
    compare(*fit_twice(backend, tmp_path, accumulate_grad_batches=2, **options))


class Memory(nn.Module):
    """Returns what it remembers itself, beside what it computes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(2, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x + self.seen[0])
        self.seen.mul_(0.5)
        return y, self.seen[:1]


class Remembering(Net):
    """The step writes into what the module has returned, and reads what it returned before."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def loss(self, batch: Any) -> Any:
        y, first = self.memory(batch["x"])
        _, second = self.memory(y)
        first.add_(y.detach().mean(0))
        self.log("same", (first - second).abs().sum())
        return super().loss({**batch, "x": y})


@pytest.mark.parametrize("modules", [["memory"], ["memory", "net"]])
def test_what_a_module_remembers_is_returned_itself(
    backend: str, tmp_path: Path, modules: list[str]
) -> None:
    capture = {"scope": "modules", "modules": modules}
    compare(*fit_twice(backend, tmp_path, module=Remembering, capture=capture))


class Sharing(nn.Module):
    """Two outputs in one memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.how == "argument":
            return x + self.bias, x[:, :4]
        hidden = self.layer(x)
        others = {
            "same": hidden,
            "view": hidden[:, :4],
            "detached": hidden.detach(),
            "parameter": self.bias,
        }
        return hidden, others[self.how]


class Rewriting(Net):
    """Writes what a block has returned, or what it was given."""

    def __init__(self, how: str, writes: str) -> None:
        super().__init__()
        self.block = Sharing(how)
        self.writes = writes

    def loss(self, batch: Any) -> Any:
        x = batch["x"].clone()
        hidden, other = self.block(x)
        if self.writes == "output":
            (other if self.block.how == "argument" else hidden).mul_(0.5)
        elif self.writes == "argument":
            x.mul_(2.0)
        return super().loss({**batch, "x": hidden + x + other.sum(-1, keepdim=True)})


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("how", "writes"),
    [
        *((how, "nothing") for how in ("same", "view", "detached", "argument", "parameter")),
        *((how, "output") for how in ("same", "view", "detached", "argument")),
        ("argument", "argument"),
    ],
)
def test_outputs_that_share_memory_and_are_written(
    backend: str, tmp_path: Path, how: str, writes: str, verify: bool
) -> None:
    fits = fit_twice(
        backend,
        tmp_path,
        module=lambda: Rewriting(how, writes),
        capture={"scope": "modules", "modules": ["block"], "verify": verify, "on_failure": "eager"},
        validation=0,
    )
    statistics = fits[1].statistics
    if writes == "nothing":
        compare(*fits)
        return
    compare(*fits, replayed=False)
    assert statistics.replayed == 0
    assert "in the memory of another output" in statistics.fallbacks[0]


class Handing(nn.Module):
    """Hands its argument on, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).relu() + bias, bias


class Chain(Net):
    """A bias that one module computes goes through all others, as in T5."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.bias = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Handing() for _ in range(3))
        self.same = nn.Identity()
        self.read = read

    def loss(self, batch: Any) -> Any:
        hidden, bias = batch["x"], self.same(self.bias(batch["x"]))
        for block in self.blocks:
            hidden, bias = block(hidden, bias)
        loss = super().loss({**batch, "x": hidden + 0.1 * bias})
        return loss if not self.read or loss.item() > -1 else 2 * loss


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize(
    "capture",
    [
        {"scope": "auto"},
        {"scope": "modules"},
        {"scope": "modules", "modules": ["bias", "blocks.*", "net"]},
        {"scope": "modules", "modules": ["blocks.1"]},
        {"scope": "modules", "modules": ["same", "blocks.0", "blocks.2"]},
    ],
)
@pytest.mark.parametrize("read", [True, False])
def test_modules_that_hand_an_argument_on(
    backend: str, tmp_path: Path, read: bool, capture: dict[str, Any]
) -> None:
    capture = {**capture, "on_failure": "eager"}
    fits = fit_twice(backend, tmp_path, module=lambda: Chain(read), capture=capture, validation=0)
    compare(*fits, replayed=False)
    assert fits[1].statistics.replayed > 0
    if "same" in capture.get("modules", ()):
        assert "returns only its arguments" in fits[1].statistics.fallbacks[0]


class Transposed(nn.Module):
    """Returns what BatchNorm has computed over the middle dimension, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(1, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.layer(x[..., None]).transpose(1, 2))
        return hidden.transpose(1, 2)


class Strided(Net):
    """The gradient comes in other strides than the output has."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Transposed(), nn.LayerNorm(16)
        self.after = nn.Linear(16, 1)

    def loss(self, batch: Any) -> Any:
        hidden = self.norm(self.block(batch["x"]))
        return super().loss({**batch, "x": self.after(hidden)[..., 0]})


@pytest.mark.parametrize("modules", [["block"], ["block", "norm"], ["block", "norm", "after"]])
@pytest.mark.parametrize("verify", [True, False])
def test_gradients_in_other_strides_than_outputs(
    backend: str, tmp_path: Path, modules: list[str], verify: bool
) -> None:
    capture = {"scope": "modules", "modules": modules, "verify": verify}
    compare(*fit_twice(backend, tmp_path, module=Strided, capture=capture, max_epochs=4))
