"""What changes by the clock of the training: learning rates, momenta, clipping, accumulation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from torch.optim import lr_scheduler

from tests.programs.table import Promises, row, table
from tests.training.equal.test_optimizers import in_scope
from tests.training.fits import (
    Fit,
    GradientTrace,
    Net,
    Trace,
    adamw,
    batches,
    compare,
    prepare,
    sgd,
)

Schedule = Callable[[torch.optim.Optimizer], dict[str, Any]]


def net_with(schedule: Schedule, optimizer: Any = adamw) -> Callable[[], Net]:
    """A module whose optimizer is scheduled."""

    def optimizers(module: Any) -> Any:
        made = optimizer(module)
        return {"optimizer": made, "lr_scheduler": schedule(made)}

    return lambda: Net(optimizers)


SCHEDULES: dict[str, Schedule] = {
    "step": lambda o: {"scheduler": lr_scheduler.StepLR(o, 4, 0.5), "interval": "step"},
    "epoch": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.5), "interval": "epoch"},
    "every third step": lambda o: {
        "scheduler": lr_scheduler.StepLR(o, 1, 0.5), "interval": "step", "frequency": 3,
    },
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0, factor=0.5),
        "monitor": "val",
    },
    "lambda": lambda o: {
        "scheduler": lr_scheduler.LambdaLR(o, lambda step: 2.0 ** -(step % 5)), "interval": "step",
    },
}  # fmt: skip


def one_cycle(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Cycles momentum (SGD) or the first beta (Adam) beside the rate."""
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=2**-5, total_steps=20)
    return {"scheduler": scheduler, "interval": "step"}


def cyclic(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduler = lr_scheduler.CyclicLR(optimizer, 2**-8, 2**-5, step_size_up=3)
    return {"scheduler": scheduler, "interval": "step"}


def fixed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, max_lr=2**-5, total_steps=20, cycle_momentum=False
    )
    return {"scheduler": scheduler, "interval": "step"}


class WarmingUp(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.param_groups[0]["lr"] = 2.0 ** -(3 + batch_idx % 4)
        optimizer.step(closure=closure)


class EveryOther(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class Setting(Net):
    """Sets rate and decay in a hook."""

    def set_rate(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 2.0 ** -(3 + self.trainer.global_step % 4)
        optimizer.param_groups[0]["weight_decay"] = float(self.trainer.global_step > 12)


class SettingBeforeZeroing(Setting):
    on_before_zero_grad = Setting.set_rate


class SettingBeforeStepping(Setting):
    on_before_optimizer_step = Setting.set_rate


class SettingInside(Net):
    """Sets its rate in the step itself; what was there is logged after that."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (group,) = self.optimizers().param_groups  # type: ignore[union-attr]
        before = group["lr"]
        group["lr"] = 2.0**-7 / (1 + self.global_step) + 0.5 * before
        self.log("before", before)
        self.log("after", group["lr"])
        return super().training_step(batch, batch_idx) * (1 + group["lr"])


class SettingByHand(SettingInside):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


class DecayingInside(Net):
    """Sets rate and decay, which a graph would freeze: the update runs behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (group,) = self.optimizers().param_groups  # type: ignore[union-attr]
        group["lr"] = 2.0**-7 / (1 + self.global_step)
        group["weight_decay"] = 0.01 * self.global_step
        return super().training_step(batch, batch_idx)


class Decaying(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.5


class Clipping(Net):
    """Its own clipping sees values."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        if float(self.net[0].weight.grad.norm()) > 0.05:
            self.clip_gradients(optimizer, 2**-6, "norm")


class Tightening(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.gradient_clip_val = 2.0 ** -(3 + 2 * self.current_epoch)


class Zeroing(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


# ---------------------------------------------------------------------- closures of one's own


class ClippingInAClosure(Net):
    """Clips gradients by itself, after Lightning's closure."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def clipped() -> Any:
            loss = optimizer_closure()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.0625)
            return loss

        optimizer.step(closure=clipped)


class Surgery(Net):
    """Drops the gradient of one layer in every other step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            if batch_idx % 2:
                self.net[0].weight.grad = None
            return loss

        optimizer.step(closure=closure)


class Sharpness(Net):
    """Takes gradients at perturbed weights: Lightning's closure runs twice in a step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def twice() -> Any:
            optimizer_closure()
            with torch.no_grad():
                moves = [p.grad * 0.0625 for p in self.parameters()]
                torch._foreach_add_(list(self.parameters()), moves)
            loss = optimizer_closure()
            with torch.no_grad():
                torch._foreach_sub_(list(self.parameters()), moves)
            return loss

        optimizer.step(closure=twice)


class Before(Net):
    """Calls Lightning's closure by itself, and then steps without one."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.0625)
        optimizer.step()


class Noisy(ClippingInAClosure):
    """Wraps only some steps."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 3:
            optimizer.step(closure=optimizer_closure)
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Looking(Net):
    """The closure of Lightning is known."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.seen.append(self.net[0].weight.detach().clone())


# ---------------------------------------------------------------------- hooks and outputs


class Outputs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        logits = self.net(batch["x"])
        return {"loss": loss, "twice": loss * 2, "logits": logits, "n": 3, "none": None}


class KeepingOutputs(Outputs):
    """Outputs that are kept are not overwritten by later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs["loss"])

    @property
    def seen(self) -> list[float]:
        return [loss.item() for loss in self.kept]


def updates(count: int) -> Callable[[Fit], bool]:
    return lambda fit: fit.trainer.global_step == count


EACH = "gradients; cut"
CYCLES = {
    "said": r"optimizer step runs eagerly: \w+LR moves momentum or betas .*cycle_momentum=False",
    "replayed": 0, "placed": False, "found": None, "max_epochs": 4, "graphs": 2,
}  # fmt: skip
ROWS = {
    f"{name}, {optimizer.__name__}": row(
        net_with(schedule, optimizer), max_epochs=4,
        callbacks=lambda: [LearningRateMonitor("step")],
        check=lambda fit, name=name: (
            name != "plateau" or fit.trainer.optimizers[0].param_groups[0]["lr"] < 2**-5
        ),
    )
    for name, schedule in SCHEDULES.items() for optimizer in (adamw, sgd)
}  # fmt: skip
ROWS |= {
    "cycled, two shapes": row(
        net_with(cyclic, sgd), data=lambda: batches(3) + batches(2, size=4) + batches(1), **CYCLES
    ),
    "cycled, accumulated": row(net_with(one_cycle), accumulate_grad_batches=2, **CYCLES),
    "not cycled": row(net_with(fixed), modules=("net",), below=""),
    **table(
        WarmingUp, EveryOther, SettingBeforeZeroing, SettingBeforeStepping, max_epochs=3,
        said=None, replayed=1,
    ),
    **table(Decaying, max_epochs=4, graphs=2),
    **table(
        SettingInside, max_epochs=3, callbacks=lambda: [LearningRateMonitor("step")],
        also="gradients; cut; accumulated; by threes; bf16",
    ),
    **table(SettingByHand, max_epochs=3),
    **table(
        DecayingInside, max_epochs=3, said="moves weight_decay", replayed=15, placed=False,
        found=None, also="accumulated",
    ),
    **{
        f"clipping by {algorithm}": row(
            gradient_clip_val=2**-6, gradient_clip_algorithm=algorithm, also=EACH
        )
        for algorithm in ("norm", "value")
    },
    **table(Clipping),
    **table(Tightening, gradient_clip_val=1.0),
    **{
        f"windows of {window}": row(
            accumulate_grad_batches=window, max_epochs=4, gradient_clip_val=2**-4,
            data=lambda: batches(7, last=5), val_check_interval=3, also=EACH,
        )
        for window in (2, 3, 4)
    },
    "other windows": row(
        max_epochs=4, check=updates(10 + 5 + 5 + 3), resumes=False,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})],
    ),
    **table(Zeroing, trace=GradientTrace),
    **table(
        ClippingInAClosure, Surgery, Sharpness, Noisy, said="a closure of its own", replayed=9,
        placed=False, found=None, also="accumulated", data=lambda: batches(16),
        capture={"warmup_steps": 2},
    ),
    **table(
        Before, said=None, replayed=9, also="accumulated", data=lambda: batches(16),
        capture={"warmup_steps": 2},
    ),
    **table(Looking, graphs=1),
    "plain": row(also="gradients; cut; accumulated; by threes; cut, accumulated; cut, by threes"),
    "updates": row(accumulate_grad_batches=3, max_epochs=3, check=updates(12)),
    **table(Outputs, KeepingOutputs),
    "limited": row(
        max_epochs=4, limit_train_batches=5, limit_val_batches=1, num_sanity_val_steps=1
    ),
    "max_steps": row(max_steps=13, max_epochs=-1, check=updates(13), resumes=False),
    "validation in an epoch": row(val_check_interval=3, accumulate_grad_batches=2),
    "an early step": row(
        data=lambda: batches(7), accumulate_grad_batches=3, max_epochs=5, check=updates(15)
    ),
}  # fmt: skip


def plain_adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=2**-7)


def plain_sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=2**-5, momentum=0.5)


def fit_with_cycles(
    backend: str, root: Path, eager: Callable[[], Net], captured: Callable[[], Net], **options: Any
) -> tuple[Fit, Fit]:
    """Both fits; that the optimizer step is eager is said once, with the way out."""
    plain = prepare(backend, root, False, module=eager, **options).run()
    cycled = prepare(backend, root, True, module=captured, **options)
    said = r"optimizer step runs eagerly: \w+LR moves momentum or betas .*cycle_momentum=False"
    with pytest.warns(UserWarning, match=said):
        cycled.run()
    assert len(cycled.statistics.fallbacks) == 1
    return plain, cycled


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("trace", [Trace, GradientTrace])
@pytest.mark.parametrize(("fused", "plain"), [(adamw, plain_adamw), (sgd, plain_sgd)])
def test_one_cycle_with_its_momentum(
    backend: str, tmp_path: Path, fused: Any, plain: Any, trace: type[Trace], scope: str
) -> None:
    """The eager optimizer step runs the fused kernel, whether or not the user asked for it."""
    for optimizer in (fused, plain):
        eager, captured = fit_with_cycles(
            backend,
            tmp_path / optimizer.__name__,
            net_with(one_cycle, fused),
            net_with(one_cycle, optimizer),
            trace=trace,
            **in_scope(scope),
        )
        own = captured.trainer.optimizers[0]
        if optimizer is plain:
            counters = [state["step"] for state in own.state.values() if "step" in state]
            assert all(counter.device.type == "cpu" for counter in counters)  # as without graphs
        groups = eager.trainer.optimizers[0].param_groups
        for mine, theirs in zip(own.param_groups, groups, strict=True):
            mine.update(fused=theirs["fused"])
        theirs = eager.trainer.optimizers[0].state.values()
        for mine, other in zip(own.state.values(), theirs, strict=True):
            if "step" in mine:  # counters to where a fused optimizer has them
                mine["step"] = mine["step"].to(other["step"].device)
        compare(eager, captured, replayed=False)
        assert captured.statistics.replayed >= 14


class AheadOfItsOptimizer(Net):
    """Steps its scheduler first, of which torch warns once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        cast(Any, self.lr_schedulers()).step()


class BehindAReplacedStep(Net):
    """Replaces the step of its optimizer after a scheduler was made, of which torch warns once."""

    def configure_optimizers(self) -> Any:
        made: Any = super().configure_optimizers()
        optimizer, own = made["optimizer"], made["optimizer"].step
        optimizer.step = lambda closure=None: own(closure)
        return made


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("module", "said"),
    [(Net, 0), (AheadOfItsOptimizer, 1), (BehindAReplacedStep, 1)],
)
def test_what_torch_says_of_the_order_of_steps(
    backend: str, tmp_path: Path, module: type[Net], said: int, by_hand: bool
) -> None:
    def stepping(self: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.lr_schedulers().step()

    own = {"training_step": stepping, "automatic_optimization": False} if by_hand else {}

    def made() -> Net:
        return type("Module", (module,), own)(net_with(SCHEDULES["step"])()._optimizers)

    for captured in (False, True):
        fit = prepare(backend, tmp_path, captured, module=made, capture={"on_failure": "eager"})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit.run()
        found = [str(each.message) for each in seen]
        assert (
            sum(
                "call `optimizer.step()` before" in f or "`lr_scheduler.step()` before" in f
                for f in found
            )
            == said
        ), found
    assert fit.statistics.replayed > 0


class TestSchedules(Promises):
    rows = ROWS
