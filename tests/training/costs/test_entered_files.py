"""Which files of the package a step enters: a replayed one nine, from top to bottom."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_graphs
from lightning_graphs import GraphCapture
from lightning_graphs.device.emulated import EmulatedGraph
from tests.training.fits import batches

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
PACKAGE = Path(lightning_graphs.__file__).parent
REPLAYED = (
    "lightning/loop",
    "lightning/runner",
    "regions/lifecycle",
    "regions/plan",
    "regions/conditions",
    "values/guards",
    "values/signature",
    "values/memory",
    "lightning/logs",
)
EVALUATED = (*("lightning/loop", "lightning/evaluation_runner", *REPLAYED[2:]),)
STEPS = 60
"""After so many the callback has ended its own timing."""


class Logging(LightningModule):
    """One ``self.log``; nothing that its code computes on the host; a constant learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2**-7, fused=True)


EMULATION = ("device/emulated", "device/host_memory", "device/trace", "device/rules")
"""Stand for what a GPU and its driver do."""
CAPTURED = 35
"""Files that a captured and verified step enters, at most."""


class Entered(Callback):
    """Notes which files of the package each step enters, in the order of their first function.

    What an emulated graph runs in a replay stands for what a GPU does: it is not noted.
    """

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.is_replaying = False

    def on_train_batch_start(self, *_: Any) -> None:
        files: dict[str, None] = {}

        def note(frame: FrameType, event: str, _: object) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and not self.is_replaying and path.is_relative_to(PACKAGE):
                files.setdefault(path.relative_to(PACKAGE).with_suffix("").as_posix())

        self.files = files
        sys.setprofile(note)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)
        self.steps.append(list(self.files))


class EnteredByValidation(Entered):
    """Notes the same of validation steps."""

    on_validation_batch_start = Entered.on_train_batch_start
    on_validation_batch_end = Entered.on_train_batch_end

    def on_train_batch_start(self, *_: Any) -> None:
        pass

    on_train_batch_end = on_train_batch_start


@pytest.fixture(scope="module")
def entered(request: pytest.FixtureRequest) -> Entered:
    """The files that each step of a fit has entered on the emulated backend."""
    found, original = getattr(request, "param", Entered)(), EmulatedGraph.replay

    def replay(graph: EmulatedGraph) -> None:
        found.is_replaying = True
        try:
            original(graph)
        finally:
            found.is_replaying = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGraph, "replay", replay)
        Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[GraphCapture(backend="emulated"), found],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=STEPS if type(found) is EnteredByValidation else 0,
        ).fit(Logging(), *(DataLoader(batches(STEPS), batch_size=None) for _ in range(2)))  # type: ignore[arg-type]
    return found


def test_a_replayed_step_enters_nine_files_from_top_to_bottom(entered: Entered) -> None:
    assert entered.steps[-1] == list(REPLAYED)


def test_a_captured_and_verified_step_enters_few_files(entered: Entered) -> None:
    captured = max(entered.steps, key=len)
    assert "regions/verify" in captured
    assert "regions/step" in captured
    files = [name for name in captured if name not in EMULATION]
    assert len(files) <= CAPTURED, files


@pytest.mark.parametrize("entered", [EnteredByValidation], indirect=True)
def test_a_replayed_validation_step_enters_the_files_of_its_kind(entered: Entered) -> None:
    assert entered.steps[-1] == list(EVALUATED)
