"""How many Python functions a replayed step calls, of Lightning and of this package together."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs.device.emulated import EmulatedGraph
from tests.training.fits import Trace, prepare

TORCH = str(Path(torch.__file__).parent)
STEPS = 56
"""After 48 steps the callback has ended its own timing."""


class Calls(Callback):
    """Counts calls from the end of one batch to that of the next, but for those of torch.

    What an emulated graph runs in a replay stands for what a GPU does: it is not counted.
    """

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self.replays = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sys.setprofile(None)
        self.steps.append(Counter())
        sys.setprofile(self._profile)

    on_validation_batch_end = on_predict_batch_end = on_train_batch_end

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and not self.replays and not code.co_filename.startswith(TORCH):
            self.steps[-1][f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    def on_train_end(self, *_: Any) -> None:
        sys.setprofile(None)

    on_validation_epoch_end = on_predict_epoch_end = on_train_end


class Small(LightningModule):
    """One parameter of eight weights, and so many keys that are logged."""

    def __init__(self, keys: int = 1, **options: Any) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(8))
        self.keys, self.options, self.scheduled = range(keys), options, keys == 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.weights * batch).sum()
        for key in self.keys:
            self.log(f"loss {key}", loss, **self.options)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weights * batch

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, fused=True)
        if not self.scheduled:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByHand(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Silent(Trace):
    def note(self, *_: Any) -> None:
        """Nothing."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Nothing."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing."""


FITS = {
    "a key": (80, Small, {}),
    "schedule": (92, lambda: Small(0), {}),
    "by hand": (113, ByHand, {}),
    "windows": (103, Small, {"accumulate_grad_batches": 2}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A callback that counts."""
    calls, original = Calls(), EmulatedGraph.replay

    def replay(graph: EmulatedGraph) -> None:
        calls.replays += 1
        try:
            original(graph)
        finally:
            calls.replays -= 1

    monkeypatch.setattr(EmulatedGraph, "replay", replay)
    return calls


def loader() -> Any:
    return DataLoader(list(torch.ones(STEPS, 8)), batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FITS)
def test_a_replayed_step_calls_few_functions(tmp_path: Path, calls: Calls, name: str) -> None:
    most, module, options = FITS[name]
    fit = prepare(
        "emulated",
        tmp_path,
        True,
        module=module,
        data=loader,
        callbacks=lambda: [calls],
        trace=Silent,
        validation=0,
        logger=False,
        **{"max_epochs": 1, "log_every_n_steps": 1000, **options},
    ).run()
    assert fit.statistics.fallbacks == []
    found = max(calls.steps[-6:-3], key=Counter.total)
    assert found.total() <= most, found


class Refused(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        (found,) = self.weights.nonzero(as_tuple=True)
        return (self.weights * batch).sum() + len(found)


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_step_that_is_refused_calls_few_functions_more(tmp_path: Path) -> None:
    found = []
    for captured in (False, True):
        calls = Calls()
        fit = prepare(
            "emulated",
            tmp_path,
            captured,
            module=Refused,
            data=loader,
            callbacks=lambda calls=calls: [calls],
            trace=Silent,
            validation=0,
            capture={"scope": "auto", "on_failure": "eager"},
            logger=False,
            max_epochs=1,
            log_every_n_steps=1000,
        ).run()
        found.append(max(calls.steps[-6:-3], key=Counter.total))
    assert fit.statistics.replayed == 0
    eager, refused = found
    assert refused.total() - eager.total() <= 180, refused - eager


EVALUATIONS = {"validate": 68, "predict": 58}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_replayed_batch_of_an_evaluation_calls_few_functions(
    tmp_path: Path, calls: Calls, name: str
) -> None:
    fit = prepare(
        "emulated", tmp_path, True, module=Small, validation=0, callbacks=lambda: [calls],
        trace=Silent, logger=False,
    )  # fmt: skip
    getattr(fit.trainer, name)(fit.module, loader())
    found = max(calls.steps[-6:-3], key=Counter.total)
    assert found.total() <= EVALUATIONS[name], found
