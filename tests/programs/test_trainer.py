"""What a step reads from its trainer: compared before every step, or refused, and never frozen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.programs.table import Program, Promises, row, table
from tests.training.fits import Net, Trace, adamw, batches, named


class Silent(Trace):
    """Writes down nothing, so that no callback changes from step to step."""

    def note(self, *_: Any) -> None:
        pass


class Weighted(Net):
    """A loss with a weight of the trainer's."""

    def weight(self) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss * (1.0 + self.weight())


class ByMetric(Weighted):
    def weight(self) -> Any:
        return self.trainer.callback_metrics.get("val", 0.0)


class ByMetricInABranch(Weighted):
    def weight(self) -> Any:
        return 1.0 if "val" in self.trainer.callback_metrics else 0.0


class ByLoggedMetric(Weighted):
    def weight(self) -> Any:
        return float(self.trainer.logged_metrics.get("loss_step", 0.0))


class ByMetricOfTheBar(Weighted):
    def weight(self) -> Any:
        return len(self.trainer.progress_bar_metrics)


class ByScheduler(Weighted):
    def weight(self) -> Any:
        return self.trainer.lr_scheduler_configs[0].scheduler.last_epoch

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        scheduler = {"scheduler": _constant(optimizer), "interval": "step"}
        return [optimizer], [scheduler]


class BySchedulersCount(ByScheduler):
    def weight(self) -> Any:
        return len(str(self.lr_schedulers().last_epoch / 64))  # type: ignore[union-attr]


class ByLoop(Weighted):
    def weight(self) -> Any:
        return float(self.trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready)


def _constant(optimizer: Any) -> Any:
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda _: 1.0)


class Storing(Weighted):
    """Counts its steps on the trainer."""

    def weight(self) -> Any:
        count = getattr(self.trainer, "counted", 0)
        self.trainer.counted = count + 1  # type: ignore[attr-defined]  # stored
        return 0.0

    @property
    def seen(self) -> int:
        return getattr(self.trainer, "counted", 0)


class Moving(Callback):
    """Has a weight of its own, and moves those that others have, once an epoch."""

    weight = 1.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.weight = 1.0 + trainer.current_epoch
        trainer.weight = self.weight
        trainer.settings = getattr(trainer, "settings", SimpleNamespace(weight=0.0))
        trainer.settings.weight = self.weight
        if trainer.current_epoch == 2:
            trainer.rare = self.weight
        if trainer.datamodule is not None:
            trainer.datamodule.weight = self.weight


class Data(LightningDataModule):
    weight = 0.0

    def train_dataloader(self) -> Any:
        return DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]


class ByAttribute(Weighted):
    def weight(self) -> Any:
        return self.trainer.weight  # type: ignore[attr-defined]


class BySetting(Weighted):
    def weight(self) -> Any:
        return self.trainer.settings.weight  # type: ignore[attr-defined]


class ByAbsence(Weighted):
    def weight(self) -> Any:
        return getattr(self.trainer, "rare", 0.5)


class ByCallback(Weighted):
    def weight(self) -> Any:
        return self.trainer.callbacks[1].weight  # type: ignore[attr-defined]


class ByDataModule(Weighted):
    def weight(self) -> Any:
        return self.trainer.datamodule.weight  # type: ignore[attr-defined]


class ByConstants(Weighted):
    def weight(self) -> Any:
        trainer = self.trainer
        share = 1.0 / trainer.max_epochs + trainer.estimated_stepping_batches  # type: ignore[operator]
        world = trainer.world_size + trainer.global_rank + len(trainer.optimizers)
        loaded = len(trainer.train_dataloader)  # type: ignore[arg-type]
        on = trainer.training and not trainer.sanity_checking and trainer.strategy is not None
        return share + world + loaded * on / trainer.accumulate_grad_batches


class Layer(nn.Module):
    """Scales by what it reads from the trainer of the module that it is in."""

    def __init__(self, owner: Net, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.owner = [owner]
        self.what = what

    def factor(self) -> Any:
        owner, trainer = self.owner[0], self.owner[0].trainer
        if self.what == "grad":
            gradient = self.linear.weight.grad
            return 0.0 if gradient is None else gradient.norm()
        if self.what == "norm":
            return nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        if self.what == "store":
            trainer.counted = getattr(trainer, "counted", 0) + 1  # type: ignore[attr-defined]
            return 0.0
        if self.what == "metric":
            return trainer.callback_metrics.get("val", 0.0)
        if self.what == "owner":
            return owner.current_epoch
        if self.what == "rate":
            return trainer.optimizers[0].param_groups[0]["lr"]
        return getattr(trainer, self.what)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 + self.factor())


class Layered(Net):
    what = "global_step"
    seen = Storing.seen

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), Layer(self, self.what))

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 2.0 ** -(6 + self.current_epoch)


def layered(what: str) -> type[Layered]:
    return type("Layered", (Layered,), {"what": what})


MOVED = {"callbacks": lambda: [Moving()], "max_epochs": 3, "trace": Silent}
LIVE = {  # in whole steps they are, and submodules that use them run eagerly
    "global_step": "trainer.global_step is read at", "owner": "trainer.current_epoch is read at",
    "rate": "the learning rate is read at",
}  # fmt: skip
REFUSED = {
    "metric": "trainer.callback_metrics is read at", "grad": ".grad of a parameter is read at",
    "norm": ".grad of a parameter is read at", "store": "trainer.counted is set at",
}  # fmt: skip


def compared(module: type[Weighted], graphs: int, name: str, **options: Any) -> Program:
    """What can be compared is a condition."""
    return row(
        module, graphs=graphs, found=None, resumes=False, **{**MOVED, **options},
        check=lambda fit: any(name in line for line in fit.statistics.recaptures),
    )  # fmt: skip


ROWS = (
    table(
        each={
            ByMetric: "trainer.callback_metrics is read at .* in weight",
            ByMetricInABranch: "trainer.callback_metrics is read at .* in weight",
            ByLoggedMetric: "trainer.logged_metrics is read at .* in weight",
            ByMetricOfTheBar: "trainer.progress_bar_metrics is read at .* in weight",
            ByScheduler: "trainer.lr_scheduler_configs is read at .* in weight",
            ByLoop: "trainer.fit_loop is read at .* in weight",
            Storing: "trainer.counted is set at .* in weight",
        }
    )
    | table(
        each={BySchedulersCount: r"\(last_epoch of a scheduler\) / 64 is read at .* in weight"},
    )
    | {
        "ByAttribute": compared(ByAttribute, 3, "self.trainer.weight"),
        "BySetting": compared(BySetting, 3, "self.trainer.settings.weight"),
        "ByAbsence": compared(ByAbsence, 2, "self.trainer.rare"),
        "ByCallback": compared(ByCallback, 3, "self.trainer.callbacks[1].weight"),
        "ByDataModule": compared(
            ByDataModule, 3, "self.trainer.datamodule.weight", data=Data, validation=0
        ),
    }
    | table(ByConstants, graphs=1)
    | {
        what: row(layered(what), graphs=1, max_epochs=3, below=said) for what, said in LIVE.items()
    }
    | {
        what: row(layered(what), said=said, below=said, replayed=0, capture={"scope": "auto"})
        for what, said in REFUSED.items()
    }
    | {
        "a setting": row(
            layered("weight"), graphs=3, capture=named("net.2"), callbacks=lambda: [Moving()],
            max_epochs=3, found=None,
        )
    }
)  # fmt: skip


class TestTrainer(Promises):
    rows = ROWS
