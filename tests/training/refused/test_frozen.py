"""Python that a capture would freeze: refused with its reason, and then equal to eager."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_graphs.watch.tracers import old_gradients_watched
from tests.training.fits import Net, compare, fit_twice, prepare, warned


class IndexedByRange(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for _ in range(batch_idx):
            loss = loss * 1.5
        return loss


class IndexedInAHelper(Net):
    def scale(self, loss: Any, i: int) -> Any:
        return loss * len(str(i))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scale(self.loss(batch), batch_idx)


class IndexReturned(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "index": batch_idx}


class IndexLogged(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("index", len(str(batch_idx)))
        return self.loss(batch)


class ByProgress(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / (1 + self.trainer.fit_loop.epoch_loop.batch_idx)


class Mixup(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = float(str(numpy.random.beta(1.0, 1.0)))
        return share * self.loss(batch)


class OldGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        old = self.net[0].weight.grad
        return self.loss(batch) * (1.0 if old is None else 1.0 + old.norm())


class OldGradientsDropped(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter in self.parameters():
            parameter.grad = None
        return self.loss(batch)


class OldGradientsClipped(Net):
    """Clips too early, which scales nothing, and logs the norm."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.log("norm", norm)
        return self.loss(batch)


class OldGradientsClippedByLightning(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clip_gradients(self.optimizers(), 2.0**-6, "norm")
        return self.loss(batch)


class OldNorms(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        norms = grad_norm(self, norm_type=2)
        return self.loss(batch) * (1.0 + sum(norms.values()))


REFUSED = [
    (IndexedByRange, "batch_idx"),
    (IndexedInAHelper, "batch_idx"),
    (IndexReturned, "batch_idx"),
    (IndexLogged, "batch_idx"),
    (ByProgress, "trainer.fit_loop"),
    (Mixup, "numpy"),
    (OldGradients, ".grad of a parameter is read"),
    (OldGradientsDropped, ".grad of a parameter is set"),
    (OldGradientsClipped, ".grad of a parameter is read"),
    (OldGradientsClippedByLightning, ".grad of a parameter is read"),
    (OldNorms, ".grad of a parameter is read"),
]


@pytest.mark.parametrize(
    ("module", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_refused_with_reason_and_equal(
    backend: str, tmp_path: Path, module: Any, reason: str
) -> None:
    _, captured = warned(
        backend, tmp_path, f"step(s run| runs) eagerly: (?s:.*){reason}", module=module
    )
    assert captured.statistics.replayed == 0


def test_clipping_is_refused_with_the_line_that_calls_it(backend: str, tmp_path: Path) -> None:
    capture = {"on_failure": "eager"}
    fit = prepare(backend, tmp_path, True, module=OldGradientsClipped, capture=capture)
    line = r"test_frozen.py:\d+ in training_step: norm = nn.utils.clip_grad_norm_"
    with pytest.warns(UserWarning, match=rf"cannot use gradients before its backward.*{line}"):
        fit.run()


class Moving(Net):
    """Moves a part of it to where it is, and zeroes gradients that Lightning zeroes as well."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.to(self.device)
        self.optimizers().zero_grad()
        return self.loss(batch)


def test_libraries_may_look_at_gradients_without_using_them(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=Moving))


class Restarting(Net):
    """Drops what was accumulated before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        return self.loss(batch)


@pytest.mark.parametrize("verify", [True, False])
def test_zeroing_that_drops_accumulated_gradients_is_refused(
    backend: str, tmp_path: Path, verify: bool
) -> None:
    capture = {"verify": verify}
    line = r"test_frozen.py:\d+ in training_step: self.zero_grad"
    warned(backend, tmp_path, line, capture=capture, module=Restarting, accumulate_grad_batches=2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # while torch imports its compiler
def test_the_compiler_may_ask_whether_there_is_a_gradient() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with old_gradients_watched():
        compiled = torch.compile(layer, backend="eager")(x)
    assert torch.equal(compiled, layer(x))


class Annealed(Net):
    """A Python attribute that another hook moves, as KL annealing does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.25
        self.save_hyperparameters({"scale": 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("weight", self.weight)
        return loss * self.weight * self.hparams.scale

    def on_train_epoch_start(self) -> None:
        self.weight = 0.25 * (1 + self.current_epoch)
        self.hparams.scale = 1.0 + (self.current_epoch == 3)


def test_an_attribute_that_a_hook_moves_recaptures(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Annealed, max_epochs=4)
    compare(eager, captured)
    assert captured.statistics.captures == 4
    assert "self.weight" in captured.statistics.recaptures[0]


class ScheduledDropout(Net):
    def on_train_epoch_start(self) -> None:
        self.net[3].p = 0.25 * (self.current_epoch % 2)


def test_an_attribute_of_a_submodule_that_a_hook_moves(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=ScheduledDropout, max_epochs=3))


class RateLogged(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("group", self.optimizers().param_groups[0]["lr"])
        self.log("scheduler", self.lr_schedulers().get_last_lr()[0])
        return self.loss(batch)


def test_a_learning_rate_logged_by_the_step_stays_live(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=RateLogged, max_epochs=3)
    # In a rehearsal the device tensor is a double, so what is logged has another dtype.
    assert captured.csv == eager.csv
    assert captured.statistics.replayed > 20
    assert len(set(captured.csv.split("group")[1].splitlines())) > 3


class Consuming(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(move_data_to_device(batch, self.device))


def test_a_step_that_takes_the_iterator_runs_eagerly(backend: str, tmp_path: Path) -> None:
    warned(backend, tmp_path, "dataloader_iter", module=Consuming, validation=0)


class SometimesSkipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch["x"]) == 5 else self.loss(batch)


def test_a_step_that_returns_none_for_some_signature(backend: str, tmp_path: Path) -> None:
    from tests.training.fits import batches

    _, captured = warned(
        backend, tmp_path, "got NoneType", module=SometimesSkipping, max_epochs=5,
        data=lambda: batches(6, last=5),
    )  # fmt: skip
    assert captured.statistics.replayed > 15


def test_code_that_cannot_take_a_stand_in_runs_eagerly(backend: str, tmp_path: Path) -> None:
    """A TypeError that exists only while capturing does not end a fit that trains eagerly."""

    class Dumping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            json.dumps(batch_idx)
            return self.loss(batch)

    warned(backend, tmp_path, "TypeError", module=Dumping)


class Settings(Net):
    """Weights of the loss in a dict, a list and a namespace, moved by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = {"loss": 1.0}
        self.factors = [1.0, 2.0]
        self.settings = SimpleNamespace(scale=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.weights["loss"] * self.factors[0] * self.settings.scale

    def on_train_epoch_start(self) -> None:
        self.weights["loss"] = 1.0 / (1 + self.current_epoch)
        self.factors[0] = 1.0 + self.current_epoch
        self.settings.scale = 0.5 * (1 + self.current_epoch)


def test_settings_that_a_hook_moves_are_conditions(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Settings, max_epochs=3)
    compare(eager, captured)
    assert captured.statistics.captures == 3


class Penalized(Net):
    """A gradient penalty, for which the step has autograd look at its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        x.requires_grad_()
        output = self.net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return nn.functional.cross_entropy(output, y) + gradient.pow(2).sum()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("scope", ["step", "auto"])
def test_a_gradient_penalty_on_the_batch(
    backend: str, tmp_path: Path, scope: str, verify: bool
) -> None:
    capture = {"scope": scope, "verify": verify}
    eager, captured = fit_twice(
        backend, tmp_path, module=Penalized, validation=0, max_epochs=3, capture=capture
    )
    compare(eager, captured)


def test_the_batch_has_the_gradients_of_an_eager_step(backend: str, tmp_path: Path) -> None:
    class Looking(Penalized):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.found = [*getattr(self, "found", []), batch["x"]]

    options: dict[str, Any] = {"module": Looking, "validation": 0, "max_epochs": 1}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured)
    for mine, theirs in zip(captured.module.found, eager.module.found, strict=True):
        assert mine.requires_grad
        assert torch.equal(mine.grad, theirs.grad)


class PenalizedByIndex(Penalized):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(str(batch_idx))


def test_a_gradient_penalty_that_is_refused(backend: str, tmp_path: Path) -> None:
    warned(backend, tmp_path, "batch_idx", module=PenalizedByIndex, validation=0)


def test_gradients_are_readable_after_a_capture(backend: str, tmp_path: Path) -> None:
    fit = prepare(backend, tmp_path, True, max_epochs=1).run()
    assert fit.statistics.captures == 1
    assert "grad" not in vars(nn.Parameter)
