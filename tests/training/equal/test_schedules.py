"""What changes by the clock of the training: learning rates, momenta, clipping, accumulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from torch.optim import lr_scheduler

from tests.training.equal.test_optimizers import in_scope
from tests.training.fits import (
    FullTrace,
    GradientTrace,
    Net,
    Trace,
    TrainingContext,
    adamw,
    batches,
    compare,
    fit_twice,
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


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduler(backend: str, tmp_path: Path, name: str, optimizer: Any) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=net_with(SCHEDULES[name], optimizer), max_epochs=4,
        callbacks=lambda: [LearningRateMonitor("step")],
    )  # fmt: skip
    compare(eager, captured)
    rates = [group["lr"] for group in captured.trainer.optimizers[0].param_groups]
    assert all(type(rate) is float for rate in rates)


def test_plateau_scheduler_lowers_the_rate(backend: str, tmp_path: Path) -> None:
    module = net_with(SCHEDULES["plateau"])
    eager, captured = fit_twice(backend, tmp_path, module=module, max_epochs=4)
    compare(eager, captured)
    assert captured.trainer.optimizers[0].param_groups[0]["lr"] < 2**-7


def one_cycle(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Cycles momentum (SGD) or the first beta (Adam) beside the rate."""
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=2**-5, total_steps=20)
    return {"scheduler": scheduler, "interval": "step"}


def cyclic(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduler = lr_scheduler.CyclicLR(optimizer, 2**-8, 2**-5, step_size_up=3)
    return {"scheduler": scheduler, "interval": "step"}


def plain_adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=2**-7)


def plain_sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=2**-5, momentum=0.5)


def fit_with_cycles(
    backend: str, root: Path, eager: Callable[[], Net], captured: Callable[[], Net], **options: Any
) -> tuple[TrainingContext, TrainingContext]:
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


def test_cycled_momentum_with_two_shapes(backend: str, tmp_path: Path) -> None:
    module = net_with(cyclic, sgd)
    eager, captured = fit_with_cycles(
        backend, tmp_path, module, module, max_epochs=4,
        data=lambda: batches(3) + batches(2, size=4) + batches(1),
    )  # fmt: skip
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 2


def test_cycled_momentum_with_accumulation(backend: str, tmp_path: Path) -> None:
    module = net_with(one_cycle)
    eager, captured = fit_with_cycles(
        backend, tmp_path, module, module, accumulate_grad_batches=2, max_epochs=4
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 2


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_momentum_that_is_not_cycled_stays_in_the_graph(
    backend: str, tmp_path: Path, scope: str
) -> None:
    def fixed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"scheduler": lr_scheduler.OneCycleLR(
            optimizer, max_lr=2**-5, total_steps=20, cycle_momentum=False
        ), "interval": "step"}  # fmt: skip

    compare(*fit_twice(backend, tmp_path, module=net_with(fixed), **in_scope(scope)))


def test_rate_set_by_an_overridden_optimizer_step(backend: str, tmp_path: Path) -> None:
    class WarmingUp(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            optimizer.param_groups[0]["lr"] = 2.0 ** -(3 + batch_idx % 4)
            optimizer.step(closure=closure)

    compare(*fit_twice(backend, tmp_path, module=WarmingUp))


def test_updates_skipped_by_an_overridden_optimizer_step(backend: str, tmp_path: Path) -> None:
    class EveryOther(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=closure)
            else:
                closure()

    compare(*fit_twice(backend, tmp_path, module=EveryOther, max_epochs=3))


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_before_optimizer_step"])
def test_rate_and_decay_set_in_a_hook(backend: str, tmp_path: Path, hook: str) -> None:
    class Setting(Net):
        pass

    def set_rate(self: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 2.0 ** -(3 + self.trainer.global_step % 4)
        optimizer.param_groups[0]["weight_decay"] = float(self.trainer.global_step > 12)

    setattr(Setting, hook, set_rate)
    compare(*fit_twice(backend, tmp_path, module=Setting, max_epochs=3))


def test_hyper_parameter_changed_once_recaptures(backend: str, tmp_path: Path) -> None:
    class Decaying(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.5

    eager, captured = fit_twice(backend, tmp_path, module=Decaying, max_epochs=4)
    compare(eager, captured)
    assert captured.statistics.captures == 2


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(backend: str, tmp_path: Path, algorithm: str, trace: type[Trace]) -> None:
    compare(
        *fit_twice(
            backend,
            tmp_path,
            gradient_clip_val=2**-6,
            gradient_clip_algorithm=algorithm,
            trace=trace,
        )
    )


def test_overridden_clipping_sees_values(backend: str, tmp_path: Path) -> None:
    class Clipping(Net):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            weight = self.net[0].weight
            if float(weight.grad.norm()) > 0.05:
                self.clip_gradients(optimizer, 2**-6, "norm")

    compare(*fit_twice(backend, tmp_path, module=Clipping))


def test_clipping_value_changed_during_training(backend: str, tmp_path: Path) -> None:
    class Tightening(Net):
        def on_train_epoch_start(self) -> None:
            self.trainer.gradient_clip_val = 2.0 ** -(3 + 2 * self.current_epoch)

    compare(*fit_twice(backend, tmp_path, module=Tightening, gradient_clip_val=1.0))


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("window", [2, 3, 4])
def test_accumulation(backend: str, tmp_path: Path, window: int, trace: type[Trace]) -> None:
    compare(
        *fit_twice(
            backend,
            tmp_path,
            accumulate_grad_batches=window,
            trace=trace,
            max_epochs=4,
            gradient_clip_val=2**-4,
            data=lambda: batches(7, last=5),
            val_check_interval=3,
        )
    )


def test_accumulation_scheduler(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, max_epochs=4,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})],
    )  # fmt: skip
    compare(eager, captured)
    assert captured.trainer.global_step == 10 + 5 + 5 + 3


def test_own_zero_grad(backend: str, tmp_path: Path) -> None:
    class Zeroing(Net):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad(set_to_none=False)

    compare(*fit_twice(backend, tmp_path, module=Zeroing, trace=GradientTrace))
