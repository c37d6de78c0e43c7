"""Hooks that look at the optimizer during a fit find the user's own settings in its groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn, optim

from tests.training.equal.test_optimizers import in_scope
from tests.training.fits import Fit, Net, assert_nothing_left, close, compare, fit_twice, prepare
from tests.training.lifecycle.test_resume import Seeding

RATE = 2**-6
SCOPES = pytest.mark.parametrize("scope", ["step", "modules"])

# A large eps: what has no gradient but rounding errors stays where it is.
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=RATE, eps=2**-8),
    "AdamW with fused": lambda p: optim.AdamW(p, lr=RATE, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=RATE, momentum=0.5),
}


def tolerance_for(name: str) -> float:
    """An optimizer that is not fused by itself gives the same up to rounding."""
    return 0.0 if "fused" in name else 1e-4


def optimized(name: str) -> Callable[[Any], Any]:
    """The optimizer of whatever is not frozen when it is made."""
    return lambda module: OPTIMIZERS[name]([p for p in module.parameters() if p.requires_grad])


class Looking(Callback):
    """Notes at every hook of training what the groups say of the optimizer."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, trainer: Any, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self.seen.append((trainer.global_step, groups))


class LookingAtGradients(Looking):
    """Also between the parts of a step."""


_HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end",
    "on_validation_start", "on_train_epoch_end", "on_train_end",
)  # fmt: skip
for _name in _HOOKS:
    setattr(Looking, _name, Looking.look)
for _name in ("on_before_zero_grad", "on_before_backward", "on_before_optimizer_step"):
    setattr(LookingAtGradients, _name, Looking.look)


@SCOPES
@pytest.mark.parametrize("kind", [Looking, LookingAtGradients])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_see_the_flags_that_the_user_gave(
    backend: str, tmp_path: Path, name: str, kind: type[Looking], scope: str
) -> None:
    lookers: list[Looking] = []

    def callbacks() -> list[Callback]:
        lookers.append(kind())
        return [lookers[-1]]

    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Net(optimized(name)),
        callbacks=callbacks,
        **in_scope(scope),
    )
    compare(eager, captured, tolerance=tolerance_for(name))
    assert lookers[1].seen == lookers[0].seen
    assert_nothing_left(captured)
    assert "step" not in vars(captured.trainer.optimizers[0])


class Saving(Callback):
    """Saves a checkpoint at the beginning of every epoch, before a step has been taken."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        root = Path(trainer.default_root_dir)
        trainer.save_checkpoint(root / f"{trainer.current_epoch}.ckpt")


class Layerwise(BaseFinetuning):
    """Unfreezes a layer with each epoch, from the head on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net[0], pl_module.net[1]], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(
                pl_module.net[2 - epoch], optimizer, lr=2**-9, train_bn=True
            )


@SCOPES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_unfrozen_and_saved_before_the_next_step(
    backend: str, tmp_path: Path, name: str, scope: str
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Net(optimized(name)),
        callbacks=lambda: [Layerwise(), Saving()],
        max_epochs=4,
        **in_scope(scope),
    )
    tolerance = tolerance_for(name)
    compare(eager, captured, tolerance=tolerance)
    for epoch in range(4):
        mine, theirs = (
            torch.load(Path(one.trainer.default_root_dir) / f"{epoch}.ckpt", weights_only=False)
            for one in (captured, eager)
        )
        assert list(mine) == list(theirs)
        for part in ("optimizer_states", "state_dict"):
            close(mine[part], theirs[part], tolerance, f"{epoch}: {part}")
        (finetuning,) = (key for key in theirs["callbacks"] if "Layerwise" in key)
        assert mine["callbacks"][finetuning] == theirs["callbacks"][finetuning]


class Backbone(Net):
    """The same layers under the name that Lightning's callback looks for."""

    def __init__(self, optimizers: Any) -> None:
        super().__init__(optimizers)
        self.backbone = nn.Sequential(*self.net[:2])


def test_a_finetuned_backbone_resumes_as_without(backend: str, tmp_path: Path) -> None:
    """From checkpoints with and without the callback, with and without it."""

    def run(kind: str, captured: bool, epochs: int, checkpoint: Path | None = None) -> Fit:
        made = prepare(
            backend,
            tmp_path / kind,
            captured,
            module=lambda: Backbone(optimized("AdamW with fused")),
            trace=Seeding,
            callbacks=lambda: [BackboneFinetuning(1, initial_denom_lr=4.0, train_bn=False)],
            max_epochs=epochs,
        )
        return made.run(ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))

    ends = []
    for first in (False, True):
        checkpoint = tmp_path / f"{first}.ckpt"
        run(f"{first}", first, 3).trainer.save_checkpoint(checkpoint)
        ends += [run(f"{first}, then {then}", then, 5, checkpoint) for then in (False, True)]
    expected, *others = [one.trainer.optimizers[0].state_dict() for one in ends]
    assert len(expected["param_groups"]) == 2
    for mine, one in zip(others, ends[1:], strict=True):
        close(mine, expected, 0.0, "optimizer")
        close(one.module.state_dict(), ends[0].module.state_dict(), 0.0, "module")
    assert ends[3].statistics.replayed > 10


@SCOPES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_and_rates_in_the_middle_of_an_epoch(
    backend: str, tmp_path: Path, name: str, scope: str
) -> None:
    def optimizers(module: Any) -> Any:
        optimizer = optimized(name)(module)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Net(optimizers),
        callbacks=lambda: [
            LearningRateMonitor(log_momentum=True, log_weight_decay=True),
            ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False),
        ],
        enable_checkpointing=True,
        **in_scope(scope),
    )
    compare(eager, captured, tolerance=tolerance_for(name))
    saved = [
        sorted(Path(one.trainer.default_root_dir).rglob("*.ckpt")) for one in (eager, captured)
    ]
    assert len(saved[0]) == len(saved[1]) == 6
    for theirs, mine in zip(*saved, strict=True):
        close(
            torch.load(mine, weights_only=False)["optimizer_states"],
            torch.load(theirs, weights_only=False)["optimizer_states"],
            tolerance_for(name),
            mine.name,
        )


@pytest.mark.filterwarnings("ignore:GraphCapture")  # BatchNorm reads its count in one epoch
@SCOPES
@pytest.mark.parametrize("name", ["AdamW with fused", "SGD"])
def test_weight_averaging_makes_its_own_scheduler(
    backend: str, tmp_path: Path, name: str, scope: str
) -> None:
    """It wraps ``optimizer.step`` during the fit, as every scheduler does."""
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Net(optimized(name)),
        callbacks=lambda: [StochasticWeightAveraging(2**-6, swa_epoch_start=2)],
        max_epochs=6,
        capture={**in_scope(scope)["capture"], "on_failure": "eager"},
    )
    compare(eager, captured, replayed=False, tolerance=tolerance_for(name))
    assert captured.statistics.replayed > 10
    (optimizer,) = captured.trainer.optimizers
    assert "step" not in vars(optimizer)


def grow(module: Any) -> None:
    (optimizer,) = module.trainer.optimizers
    optimizer.add_param_group({"params": module.net[0].parameters(), "lr": 2**-8})


def load(module: Any) -> None:
    """As from a file: every ``step`` counter on the CPU."""
    (optimizer,) = module.trainer.optimizers
    state = optimizer.state_dict()
    state["state"] = {
        key: {n: v.cpu() if n == "step" else v.clone() for n, v in entries.items()}
        for key, entries in state["state"].items()
    }
    optimizer.load_state_dict(state)


@SCOPES
@pytest.mark.parametrize("at", [1, 7], ids=["during warm-up", "between replays"])
@pytest.mark.parametrize("change", [grow, load])
@pytest.mark.parametrize("name", ["AdamW", "AdamW with fused"])
def test_groups_added_and_state_loaded_in_the_middle(
    backend: str, tmp_path: Path, name: str, change: Any, at: int, scope: str
) -> None:
    class Changing(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == at:
                change(self)

    def optimizers(module: Any) -> Any:
        left_out = set(module.net[0].parameters()) if change is grow else set()
        return OPTIMIZERS[name]([p for p in module.parameters() if p not in left_out])

    eager, captured = fit_twice(
        backend, tmp_path, module=lambda: Changing(optimizers), **in_scope(scope)
    )
    compare(eager, captured, tolerance=tolerance_for(name))
