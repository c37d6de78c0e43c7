"""Lightning's tuners fit for some steps and put everything back; checkpoints hold plain values.

| what                                  | compared with a run without the callback            |
| ------------------------------------- | --------------------------------------------------- |
| ``LearningRateFinder``, ``lr_find``   | the rate that is found, and the fit that follows    |
| ``BatchSizeFinder``, and its tuner    | the size that is found, and the fit that follows    |
| ``torch.load(..., weights_only=True)`` | the keys of the file, and the module that it makes |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.training.fits import Fit, Net, batches, compare, prepare


class Tuned(Net):
    """Has what the tuners set."""

    lr, batch_size = 1e-3, 2

    def train_dataloader(self) -> Any:
        samples = [{k: v[i] for k, v in batch.items()} for batch in batches(16) for i in range(8)]
        return DataLoader(samples, batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def sizes(fit: Fit) -> None:
    Tuner(fit.trainer).scale_batch_size(fit.module, max_trials=3, steps_per_trial=10)


TUNERS: dict[str, tuple[Callable[[], list[Callback]], Callable[[Fit], object]]] = {
    "LearningRateFinder": (lambda: [LearningRateFinder(num_training_steps=20)], lambda fit: None),
    "lr_find": (list, lambda fit: Tuner(fit.trainer).lr_find(fit.module, num_training=20)),
    "BatchSizeFinder": (
        lambda: [BatchSizeFinder(max_trials=3, steps_per_trial=10)],
        lambda fit: None,
    ),
    "scale_batch_size": (list, sizes),
}


def tuned(backend: str, root: Path, captured: bool, tuner: str) -> Fit:
    callbacks, before = TUNERS[tuner]
    options = {"callbacks": callbacks, "max_epochs": 1}
    one = prepare(backend, root, captured, module=Tuned, **options)
    before(one)
    one.trainer.fit(one.module)
    return one


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*val_dataloader")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval", "ignore:GraphCapture")
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_tuner_finds_what_it_finds_without_graphs(
    backend: str, tmp_path: Path, tuner: str
) -> None:
    eager, captured = (
        tuned(backend, tmp_path / str(graphs), graphs, tuner) for graphs in (False, True)
    )
    assert captured.statistics.replayed > 0
    found = [(one.module.lr, one.module.batch_size) for one in (eager, captured)]
    assert found[0] == found[1] != (1e-3, 2)
    for mine, other in zip(captured.module.parameters(), eager.module.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_checkpoint_holds_plain_values(backend: str, tmp_path: Path) -> None:
    fits = [prepare(backend, tmp_path, graphs).run() for graphs in (False, True)]
    files = [tmp_path / "eager.ckpt", tmp_path / "captured.ckpt"]
    for one, file in zip(fits, files, strict=True):
        one.trainer.save_checkpoint(file)
    eager, captured = (torch.load(file, weights_only=True) for file in files)
    assert eager.keys() == captured.keys()
    assert eager["optimizer_states"][0]["state"].keys() == {
        *captured["optimizer_states"][0]["state"]
    }
    for name, tensor in eager["state_dict"].items():
        assert torch.equal(tensor, captured["state_dict"][name])
    compare(*fits)
