"""Ways in which a step calls its graphed submodules, each compared with eager training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.fits import (
    Fit,
    GradientTrace,
    Net,
    adamw,
    assert_nothing_left,
    batches,
    compare,
    fit_twice,
    named,
)
from tests.training.modules.test_equal import Blocks
from tests.training.modules.test_manual import replays

BLOCKS = named("blocks.*")


def trained(
    backend: str, root: Path, module: Callable[[], Any] = Blocks, **options: Any
) -> tuple[Fit, Fit]:
    """A fit without the callback and one with it, of the same values."""
    tolerance = options.pop("tolerance", 0.0)
    options = {"capture": BLOCKS, "validation": 0, **options}
    eager, captured = fit_twice(backend, root, module=module, **options)
    assert_nothing_left(captured)
    compare(eager, captured, replayed=False, tolerance=tolerance)
    assert captured.statistics.replayed > 0, captured.statistics
    return eager, captured


# ---------------------------------------------------------------------- hooks


class Hooked(Blocks):
    """Hooks on a graphed block write down every value that they see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        block = self.blocks[1]
        block.register_forward_pre_hook(lambda _, args: self.see("pre", args[0]))
        block.register_forward_hook(lambda _, args, out: self.see("post", out["hidden"][0]))

    def see(self, name: str, tensor: Tensor) -> None:
        self.seen.append((name, tensor.detach().sum().item()))


def test_hooks_on_a_graphed_module_see_every_call(backend: str, tmp_path: Path) -> None:
    eager, captured = trained(backend, tmp_path, Hooked)
    assert captured.module.seen == eager.module.seen
    assert len(captured.module.seen) == 2 * 20
    assert captured.statistics.fallbacks == []


class HookedBackward(Blocks):
    """A backward hook around a graphed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.head.register_full_backward_hook(self.see)
        self.head.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))

    def see(self, _: nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen.append([g.detach().sum().item() for g in (*inputs, *outputs)])


def test_backward_hooks_on_a_graphed_module(backend: str, tmp_path: Path) -> None:
    eager, captured = trained(backend, tmp_path, HookedBackward, capture=named("blocks.*", "head"))
    assert captured.module.seen == eager.module.seen
    assert captured.statistics.fallbacks == []
    assert replays(captured)["module head"] > 10


class ParameterHooks(Blocks):
    """Gradient hooks of both kinds on parameters of graphed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.blocks[0].inner.weight.register_hook(lambda gradient: gradient * 0.5)
        self.blocks[1].outer.weight.register_post_accumulate_grad_hook(
            lambda p: self.seen.append(p.grad.sum().item())
        )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_on_parameters(backend: str, tmp_path: Path, accumulate: int) -> None:
    eager, captured = trained(backend, tmp_path, ParameterHooks, accumulate_grad_batches=accumulate)
    assert captured.module.seen == eager.module.seen
    assert len(captured.module.seen) == 20
    assert captured.statistics.fallbacks == []


class HookLater(Callback):
    """Registers a hook when the fit is under way."""

    def __init__(self, register: Callable[[Any], None]) -> None:
        self.register = register

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.register(pl_module)


def test_a_parameter_hook_of_a_later_epoch(backend: str, tmp_path: Path) -> None:
    def register(module: Any) -> None:
        module.blocks[0].inner.weight.register_hook(lambda gradient: gradient * 0.5)

    _, captured = trained(backend, tmp_path, callbacks=lambda: [HookLater(register)])
    assert captured.statistics.recaptures == ["hooks on parameters changed"]
    assert captured.statistics.fallbacks == []


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_hook_inside_of_a_graphed_module_of_a_later_epoch(backend: str, tmp_path: Path) -> None:
    def register(module: Any) -> None:
        module.blocks[0].inner.register_forward_hook(lambda _, args, out: out * 0.5)

    _, captured = trained(backend, tmp_path, callbacks=lambda: [HookLater(register)])
    assert captured.statistics.recaptures == ["a hook was registered inside of a graphed module"]
    reason = "`blocks.0` is not graphed: it has a hook on `inner` inside of it"
    assert captured.statistics.fallbacks[0].startswith(reason)


def test_a_module_with_a_hook_inside_is_not_graphed(backend: str, tmp_path: Path) -> None:
    class Inside(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].outer.register_forward_hook(lambda _, args, output: output * 1.5)

    with pytest.warns(UserWarning, match="`blocks.1` is not graphed: it has a hook on `outer` ins"):
        _, captured = trained(backend, tmp_path, Inside)
    assert captured.statistics.modules == ["blocks.0", "blocks.2"]


# ---------------------------------------------------------------------- recomputation


class Checkpointed(Blocks):
    """One block is recomputed in the backward pass."""

    reentrant = False

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        for i, block in enumerate(self.blocks):
            scale = x.detach().std()

            def run(x: Tensor, block: Any = block, scale: Tensor = scale) -> Tensor:
                return block(x, scale=scale)["hidden"][0]

            x = checkpoint(run, x, use_reentrant=self.reentrant) if i == 1 else run(x)
        return nn.functional.cross_entropy(self.head(x).float(), batch["y"])


class CheckpointedReentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("module", [Checkpointed, CheckpointedReentrant])
def test_a_module_that_is_recomputed_is_not_graphed(
    backend: str, tmp_path: Path, module: Any
) -> None:
    with pytest.warns(UserWarning, match="`blocks.1` is not graphed: it is recomputed in the back"):
        _, captured = trained(backend, tmp_path, module)
    assert captured.statistics.modules == ["blocks.0", "blocks.2"]
    assert len(captured.statistics.fallbacks) == 1


@pytest.mark.parametrize("module", [Checkpointed, CheckpointedReentrant])
def test_checkpointing_beside_graphed_modules(backend: str, tmp_path: Path, module: Any) -> None:
    _, captured = trained(backend, tmp_path, module, capture=named("net", "blocks.0", "head"))
    assert captured.statistics.fallbacks == []


# ---------------------------------------------------------------------- call patterns


class Twice(Blocks):
    """Each block is called twice before the backward pass; all share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner.weight = self.blocks[0].inner.weight

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        for block in [*self.blocks[:2], *self.blocks[:2]]:
            x = block(x, scale=x.detach().std())["hidden"][0]
        return nn.functional.cross_entropy(self.head(x).float(), batch["y"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_calls_before_backward_and_a_shared_weight(
    backend: str, tmp_path: Path, accumulate: int
) -> None:
    _, captured = trained(
        backend,
        tmp_path,
        Twice,
        capture=named("blocks.0", "blocks.1"),
        accumulate_grad_batches=accumulate,
        tolerance=1e-5,  # four gradients of the shared weight are added in another order
    )
    assert captured.statistics.fallbacks == []
    steps = captured.statistics.replayed
    assert replays(captured) == {"module blocks.0": 2 * steps, "module blocks.1": 2 * steps}


class OtherStrides(Net):
    """As scheduled sampling gives a layer a column of the batch, or what was computed."""

    def loss(self, batch: Any) -> Tensor:
        columns, outputs = batch["x"].view(-1, 2, 4).transpose(1, 2), []
        for i in range(4):
            column = columns[:, i].repeat(1, 4)
            is_strided = (self.global_step + i * i) % 3
            column = column.t().contiguous().t() if is_strided else column
            outputs.append(self.net[0](column).relu() * (i + 1.3))
        return torch.stack(outputs).square().mean() + super().loss(batch) * 0.5


class OtherStridesOfOne(OtherStrides):
    """Two modules with one weight; a call of one of them is eager in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(8, 16)
        self.tied.weight = self.net[0].weight

    def loss(self, batch: Any) -> Tensor:
        x, outputs = batch["x"], []
        for i in range(4):
            is_strided = i == 1 and self.global_step % 3 == 0
            given = (x + i).t().contiguous().t() if is_strided else x + i
            outputs.append((self.tied, self.net[0])[i % 2](given).relu() * (i + 1.3))
        return torch.stack(outputs).square().mean() + Net.loss(self, batch) * 0.5


@pytest.mark.parametrize("module", [OtherStrides, OtherStridesOfOne])
def test_calls_that_are_eager_among_graphs_of_one_module(
    backend: str, tmp_path: Path, module: type[Net]
) -> None:
    """Autograd adds all that calls give of a weight in one order, whichever of them are graphs."""
    names = ["net.0"] if module is OtherStrides else ["net.0", "tied"]
    _, captured = trained(
        backend, tmp_path, module, capture=named(*names), trace=GradientTrace, max_epochs=3
    )
    done = sum(replays(captured).values())
    assert 0 < done < 5 * captured.statistics.replayed


class Teacher(Blocks):
    """A frozen block teaches, without autograd; the student is called with other arguments."""

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        with torch.no_grad():
            goal = self.blocks[0](x, scale=x.std())["hidden"][0]
        x = self.blocks[1](x, scale=x.detach().std())["hidden"][0]
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits, batch["y"]) + (x - goal).square().mean()


class InferringTeacher(Teacher):
    """The same under inference mode, whose tensors autograd refuses to keep."""

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        with torch.inference_mode():
            goal = self.blocks[0](x.detach(), scale=x.std())["hidden"][0]
            assert goal.is_inference()
        x = self.blocks[1](x, scale=x.detach().std())["hidden"][0]
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits, batch["y"]) + (x - goal.clone()).square().mean()


@pytest.mark.parametrize("module", [Teacher, InferringTeacher])
@pytest.mark.parametrize("choice", [named("blocks.0", "blocks.1"), {"scope": "modules"}])
def test_calls_without_autograd_in_a_step(
    backend: str, tmp_path: Path, module: type[Teacher], choice: Any
) -> None:
    _, captured = trained(backend, tmp_path, module, capture=choice)
    assert captured.statistics.fallbacks == []
    assert replays(captured)["module blocks.0"] >= 8
    assert replays(captured)["module blocks.1"] > 10


@pytest.mark.parametrize("choice", [BLOCKS, {"scope": "modules"}])
def test_validation_steps_are_graphs_of_their_own(
    backend: str, tmp_path: Path, choice: Any
) -> None:
    class Validated(Blocks):  # without the read of its loss
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            hidden = self.net(batch["x"])
            for block in self.blocks:
                hidden, _ = block(hidden, scale=hidden.std())["hidden"]
            self.log("val", self.head(hidden).float().square().mean())

    _, captured = trained(backend, tmp_path, Validated, capture=choice, validation=4)
    assert not any("without autograd" in record.signature for record in captured.statistics.graphs)
    evaluation = captured.statistics.evaluation["validation_step"]
    assert [r.scope for r in evaluation.graphs] == ["validation_step"]
    assert (evaluation.eager, evaluation.replayed) == (5, 3)
    assert captured.statistics.fallbacks == evaluation.fallbacks == []


# ---------------------------------------------------------------------- modes and frozen parts


class At(Callback):
    """Changes the module at the beginning of some epoch."""

    def __init__(self, epoch: int, change: Callable[[Any], None]) -> None:
        self.epoch = epoch
        self.change = change

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.change(pl_module)


def test_a_part_that_goes_to_eval_mode(backend: str, tmp_path: Path) -> None:
    _, captured = trained(
        backend, tmp_path, callbacks=lambda: [At(1, lambda m: m.blocks[1].eval())]
    )
    assert captured.statistics.recaptures == ["train/eval flags changed"]
    assert captured.statistics.fallbacks == []


@pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
def test_a_value_for_which_the_whole_module_cannot_be_captured(
    backend: str, tmp_path: Path
) -> None:
    """The new graphs are of other modules, which do not read the value that has moved."""
    _, captured = trained(
        backend,
        tmp_path,
        Net,
        capture={"scope": "modules"},
        callbacks=lambda: [At(1, lambda m: setattr(m.net[1], "momentum", None))],
        max_epochs=3,
    )
    assert captured.statistics.recaptures == ["self.net.1.momentum: 0.1 -> None"]


class Flipping(Blocks):
    """Every other step, and within one step, a block is in eval mode."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[0].eval()
        self.blocks[1].train(batch_idx % 2 == 0)
        loss = self.loss(batch)
        self.blocks[0].train()
        return loss


def test_flags_that_flip_in_every_step(backend: str, tmp_path: Path) -> None:
    _, captured = trained(backend, tmp_path, Flipping, data=lambda: batches(16))
    assert captured.statistics.captures == 2
    assert captured.statistics.fallbacks == []


class Frozen(Blocks):
    """The first layers and part of a block are frozen."""

    def __init__(self) -> None:
        super().__init__(lambda module: adamw(module))
        self.net.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].inner.requires_grad_(False)


@pytest.mark.parametrize("choice", ["blocks", "own"])
def test_frozen_parts(backend: str, tmp_path: Path, choice: str) -> None:
    capture = named("net", "blocks.*") if choice == "blocks" else {"scope": "modules"}
    _, captured = trained(backend, tmp_path, Frozen, capture=capture)
    assert captured.statistics.fallbacks == []
    assert captured.module.blocks[0].inner.weight.grad is None


def test_unfreezing_in_mid_training(backend: str, tmp_path: Path) -> None:
    _, captured = trained(
        backend, tmp_path, Frozen, callbacks=lambda: [At(1, lambda m: m.requires_grad_(True))]
    )
    assert captured.statistics.recaptures == ["requires_grad of parameters changed"]
    assert captured.statistics.fallbacks == []
    assert captured.statistics.captures == 2


class FrozenInside(Net):
    """Its network, with statistics and dropout, is frozen in some steps, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net(batch["x"])
        leaf = hidden.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.head(leaf).exp().sum(), leaf, create_graph=True)
        loss = nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])
        return loss + slope.float().square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.requires_grad_(batch_idx % 3 > 0)
        loss = super().training_step(batch, batch_idx)
        self.net.requires_grad_(True)
        return loss


def test_frozen_inside_of_some_steps(backend: str, tmp_path: Path) -> None:
    """A call that its graph cannot serve has not replayed it: statistics and draws count once."""
    _, captured = trained(
        backend, tmp_path, FrozenInside, capture=named("net", verify=False, on_failure="eager")
    )
    assert 5 < captured.statistics.replayed < 15


class Statistics(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.std_mean(x, 1, keepdim=True)


class Normalized(Net):
    """Uses one of two results of an operator, as of a recurrent layer's: no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()

    def loss(self, batch: Any) -> Tensor:
        spread, _ = self.statistics(self.net[0](batch["x"]))
        return super().loss(batch) + spread.mean()


def test_a_result_that_gets_no_gradient(backend: str, tmp_path: Path) -> None:
    _, fit = trained(backend, tmp_path, Normalized, capture=named("statistics"))
    assert fit.statistics.modules == ["statistics"]


class LowRank(nn.Module):
    """A frozen layer with a trainable product of rank two beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Adapted(Blocks):
    def __init__(self) -> None:
        super().__init__(
            lambda module: torch.optim.AdamW(
                [p for p in module.parameters() if p.requires_grad], lr=2**-7, fused=True
            )
        )
        self.requires_grad_(False)
        for block in self.blocks:
            block.inner, block.outer = LowRank(block.inner), LowRank(block.outer)


@pytest.mark.parametrize("names", [["blocks.*"], ["LowRank"], ["blocks.*.inner", "head"]])
def test_low_rank_adapters(backend: str, tmp_path: Path, names: list[str]) -> None:
    _, captured = trained(backend, tmp_path, Adapted, capture=named(*names))
    assert captured.statistics.fallbacks == []


class RecomputedInside(nn.Module):
    """A layer with dropout whose activations its own backward pass computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return x + hidden


class Recomputing(Net):
    """Two such layers ahead of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputed = nn.Sequential(RecomputedInside(), RecomputedInside())

    def loss(self, batch: Any) -> Tensor:
        return super().loss({**batch, "x": self.recomputed(batch["x"])})


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("scope", ["auto", "step", "modules"])
def test_dropout_that_is_recomputed_inside_is_right_or_refused(
    backend: str, tmp_path: Path, scope: str, verify: bool
) -> None:
    capture: dict[str, Any] = {"scope": scope, "verify": verify, "on_failure": "eager"}
    if scope == "modules":
        capture["modules"] = ["recomputed.*"]
    fits = fit_twice(backend, tmp_path, module=Recomputing, capture=capture, validation=0)
    compare(*fits, replayed=False)
    if scope == "modules" or backend == "emulated":  # CUDA draws again in one graph
        assert "rewind a random generator" in fits[1].statistics.fallbacks[0]
