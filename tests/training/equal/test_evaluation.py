"""Steps of evaluations as graphs: their logs, metrics and results are those of eager ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_graphs import GraphCapture
from tests.pools import SharedPools, freed
from tests.training.fits import (
    Fit,
    FullTrace,
    Hidden,
    Net,
    assert_nothing_left,
    batches,
    compare,
    examined,
    fit_twice,
    line,
    loader_of,
    prepare,
    said_of_rates,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*parameters are float64"),  # which only CUDA minds
]


def counts(fit: Fit, name: str = "validation_step") -> tuple[int, int, int]:
    """Eager steps, replayed ones, and captures of an evaluation."""
    found = fit.capture.report.evaluation[name]
    return found.eager, found.replayed, sum(record.captures for record in found.graphs)


def said_of(fit: Fit) -> list[str]:
    found = fit.capture.report.evaluation["validation_step"]
    return [*found.fallbacks, *found.recaptures]


# ---------------------------------------------------------------------- logs


class Logging(Net):
    """Logs in all forms, and returns what a hook keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("mean", loss)
        self.log("both", loss * 2, on_step=True, on_epoch=True)
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log_dict({"most": loss.exp(), "least": -loss}, reduce_fx="max")
        self.log("sum", loss.exp(), reduce_fx="sum", prog_bar=True)
        self.log("of three", loss, batch_size=3, sync_dist=True)
        self.log("count", batch_idx * 2.0)
        self.log("constant", 3.0)
        return {"loss": loss, "output": self.net(batch["x"])}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"inference_mode": False},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"val_check_interval": 3, "limit_val_batches": 4, "num_sanity_val_steps": 2},
        {"val_check_interval": 3, "accumulate_grad_batches": 2},  # in the middle of a window
        {"capture": {"verify": 2}, "check_val_every_n_epoch": 2, "max_epochs": 6},
    ],
    ids=lambda options: ", ".join(map(str, options)),
)
def test_logs_and_outputs(backend: str, tmp_path: Path, options: Any) -> None:
    options = {"max_epochs": 3, **options}
    eager, captured = fit_twice(backend, tmp_path, module=Logging, validation=8, **options)
    compare(eager, captured, said=said_of_rates(captured))
    assert_nothing_left(captured)
    assert repr(captured.module.kept) == repr(eager.module.kept)
    first, replayed, captures = counts(captured)
    assert (first, captures) == (5, 1)
    assert replayed >= 7
    assert said_of(captured) == []


def test_not_if_it_is_switched_off(backend: str, tmp_path: Path) -> None:
    capture = {"evaluation": False}
    compare(*(fits := fit_twice(backend, tmp_path, module=Logging, capture=capture, validation=8)))
    assert fits[1].capture.report.evaluation == {}


# ---------------------------------------------------------------------- all evaluations


class Measured(Net):
    """Metrics in all forms, over two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(3), MeanMetric()
        kinds = {"a": MulticlassAccuracy(3), "b": MulticlassAccuracy(3, average="micro")}
        self.several = MetricCollection(kinds)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        output = self.net(batch["x"])
        loss = nn.functional.cross_entropy(output.float(), batch["y"])
        self.log("loss", loss)
        self.log(f"of loader {dataloader_idx}", loss, add_dataloader_idx=False, on_step=True)
        self.accuracy(output, batch["y"])
        self.log("accuracy", self.accuracy)
        self.mean.update(loss)
        self.several.update(output, batch["y"])
        self.log_dict(self.several)
        return {"loss": loss}

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch["x"]), {"labels": batch["y"], "kind": "digits"}

    def val_dataloader(self) -> Any:
        sizes = (9, 8), (7, 6)
        return [DataLoader(batches(*size), batch_size=None) for size in sizes]


@pytest.mark.parametrize("inference_mode", [True, False])
def test_validate_test_and_predict(backend: str, tmp_path: Path, inference_mode: bool) -> None:
    found: list[list[str]] = []
    for captured in (False, True):
        fit = prepare(
            backend, tmp_path, captured, module=Measured, validation=0, max_epochs=3,
            inference_mode=inference_mode, num_sanity_val_steps=1,
        ).run()  # fmt: skip
        results = [fit.csv, repr(fit.trainer.callback_metrics)]
        if captured:
            assert counts(fit) == (7, 41, 2)
        loaders = fit.module.val_dataloader()
        for kind in ("validate", "test", "predict"):
            options = {} if kind == "predict" else {"verbose": False}
            results.append(repr(getattr(fit.trainer, kind)(fit.module, loaders, **options)))
            if captured:
                name = {"validate": "validation_step"}.get(kind, f"{kind}_step")
                assert counts(fit, name) == (7, 9, 2)
                assert fit.capture.report.evaluation[name].fallbacks == ()
                assert fit.capture.report.replayed > 10  # the fit's steps stay in the report
                assert_nothing_left(fit)
        found.append(results)
    assert found[0] == found[1]


class Passing(Net):
    """Predicts with names and numbers of its batch, which no graph knows."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {**batch, "of": batch_idx, "output": self.net(batch["x"]), "kind": None}


def test_a_prediction_passes_on_what_its_batch_holds(backend: str, tmp_path: Path) -> None:
    def data() -> list[dict[str, Any]]:
        named = enumerate(batches(10))
        return [{**b, "names": [f"{i}.{k}" for k in range(8)], "n": i} for i, b in named]

    found = []
    for captured in (False, True):
        fit = prepare(backend, tmp_path, captured, module=Passing, validation=0)
        found.append(repr(fit.trainer.predict(fit.module, loader_of(data()))))
    assert found[0] == found[1]
    assert counts(fit, "predict_step") == (5, 5, 1)


# ---------------------------------------------------------------------- what stays eager


def test_a_last_batch_of_another_size_is_eager_or_has_a_graph(backend: str, tmp_path: Path) -> None:
    class Shorter(Logging):
        def val_dataloader(self) -> Any:
            return DataLoader(batches(6, last=5), batch_size=None)

    fits = fit_twice(backend, tmp_path, module=Shorter, validation=0, max_epochs=4)
    compare(*fits)
    assert counts(fits[1]) == (8, 16, 2)


class Reading(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val", loss if loss.tolist() > 1.0 else -loss)  # read


def test_a_refusal_names_the_line_once(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": Reading, "validation": 8}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, capture={"on_failure": "eager"}, **options)
    with pytest.warns(UserWarning, match="a validation step runs eagerly"):
        captured.run()
    compare(eager, captured)
    assert counts(captured) == (16, 0, 0)
    (said,) = said_of(captured)
    assert f":{line(Reading.validation_step, 'read')} in validation_step" in said


class Accumulating(Logging):
    """Adds to the gradients of its parameters, as a validation hardly should."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            loss = self.loss({key: value.clone() for key, value in batch.items()})
            loss.backward()
        self.log("val", loss.detach())

    def on_validation_epoch_end(self) -> None:
        self.kept += [p.grad.tolist() for p in self.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_gradients_of_training_are_refused(backend: str, tmp_path: Path) -> None:
    capture = {"on_failure": "eager"}
    fits = fit_twice(backend, tmp_path, module=Accumulating, validation=8, capture=capture)
    compare(*fits)
    assert fits[1].module.kept == fits[0].module.kept
    assert "runs a backward pass that reaches them" in said_of(fits[1])[0]
    assert counts(fits[1])[1] == 0


class Frozen(Net):
    """Logs a product with a number that no guard sees."""

    hidden = Hidden()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hidden["factor"] = factor = self.hidden["factor"] + 1.0
        self.log("val", self.loss(batch) * factor)


def test_what_is_logged_is_verified(backend: str, tmp_path: Path) -> None:
    captured = prepare(
        backend, tmp_path, True, module=Frozen, validation=8, capture={"on_failure": "eager"}
    )
    with pytest.warns(UserWarning, match="the logged `val` differs"):
        captured.run()
    Frozen.hidden.clear()
    assert counts(captured)[1] == 0


# ---------------------------------------------------------------------- weights and modes


class Averaged(Callback):
    """Validates averages of the weights, which it exchanges for them in its own way."""

    def __init__(self, exchange: Callable[[Tensor, Tensor], Any]) -> None:
        self.exchange = exchange
        self.averages: list[Tensor] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.averages = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for average, parameter in zip(self.averages, pl_module.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.25)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.averages = [
            self.exchange(average, parameter)
            for average, parameter in zip(self.averages, pl_module.parameters(), strict=True)
        ]

    on_validation_end = on_validation_start


def by_values(average: Tensor, parameter: Tensor) -> Tensor:
    before = parameter.detach().clone()
    parameter.data.copy_(average)
    return before


def by_memory(average: Tensor, parameter: Tensor) -> Tensor:
    before = parameter.data
    parameter.data = average
    return before


@pytest.mark.parametrize("exchange", [by_values, by_memory])
def test_exchanged_weights(backend: str, tmp_path: Path, exchange: Any) -> None:
    fits = fit_twice(
        backend, tmp_path, module=Logging, validation=8, max_epochs=4,
        callbacks=lambda: [Averaged(exchange)],
    )  # fmt: skip
    compare(*fits)
    assert counts(fits[1])[1] > 0
    assert repr(fits[1].module.kept) == repr(fits[0].module.kept)


class Dropping(Logging):
    """Validates with dropout in every second epoch."""

    def on_validation_epoch_start(self) -> None:
        if self.current_epoch % 2:
            self.net[3].train()


def test_modes_are_a_part_of_the_key(backend: str, tmp_path: Path) -> None:
    fits = fit_twice(backend, tmp_path, module=Dropping, validation=8, max_epochs=6)
    compare(*fits)
    assert repr(fits[1].module.kept) == repr(fits[0].module.kept)
    assert counts(fits[1])[2] == 2


class Attending(Logging):
    """Has layers with a kernel of their own in eval mode, which a mode would make them leave."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Unflatten(1, (4, 4)), encoder, nn.Flatten(), nn.Linear(16, 4)
        )


@pytest.mark.parametrize("inference_mode", [True, False])
def test_layers_keep_their_kernels_of_evaluation(
    backend: str, tmp_path: Path, inference_mode: bool
) -> None:
    options: dict[str, Any] = {"module": Attending, "validation": 8, "max_epochs": 3}
    fits = fit_twice(backend, tmp_path, inference_mode=inference_mode, **options)
    compare(*fits)
    eager, captured = (fit.module.kept for fit in fits)
    for mine, theirs in zip(captured, eager, strict=True):
        assert torch.equal(mine["output"], theirs["output"])
    assert counts(fits[1])[1] >= 7


# ---------------------------------------------------------------------- memory


class Counted(Callback):
    """Counts the bytes of the graphs of validations, and those that lie in memory of training."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        capture = next(c for c in trainer.callbacks if isinstance(c, GraphCapture))
        plans = capture._evaluation.evaluation.plans.values()  # type: ignore[union-attr]
        recordings = [g._captured.recording for plan in plans for g in plan.graphs.values()]
        self.all = sum(storage.nbytes() for r in recordings for storage, _ in r._born)
        self.shared = sum(storage.nbytes() for r in recordings for storage, _ in freed(r))


class Shown(Logging):
    """Keeps the gradients of training for its validation, and looks at them there."""

    def on_validation_model_zero_grad(self) -> None:
        """Zero nothing."""

    def on_validation_epoch_end(self) -> None:
        self.kept += [p.grad.clone() for p in self.parameters() if p.grad is not None]


class Kept(Logging):
    """Keeps the gradients of the last step, and looks at them after its validation."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.last = [p.grad for p in self.parameters()]

    def on_validation_epoch_end(self) -> None:
        self.kept += [gradient.clone() for gradient in self.last if gradient is not None]
        self.last = []


class ByHand(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


SHARED = {
    "a window": {"val_check_interval": 3, "accumulate_grad_batches": 2},
    "two shapes": {"data": lambda: batches(6) + batches(6, 5), "val_check_interval": 5},
    "gradients are shown": {
        "data": lambda: batches(6) + batches(6, 5), "val_check_interval": 5, "module": Shown,
    },
    "gradients are kept": {
        "data": lambda: batches(6) + batches(6, 5), "val_check_interval": 5, "module": Kept,
    },
    "by hand": {"module": ByHand, "val_check_interval": 3},
    "submodules": {
        "capture": {"scope": "modules"}, "val_check_interval": 3, "accumulate_grad_batches": 2,
    },
    "hooks within a step": {"trace": FullTrace, "val_check_interval": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_memory_is_shared_with_training(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = {"module": Logging, "validation": 8, "max_epochs": 4, **SHARED[name]}
    pools, counted = SharedPools(monkeypatch), Counted()
    eager = prepare(backend, tmp_path, False, **options).run()
    callbacks = [counted] if backend == "emulated" else []
    captured = prepare(backend, tmp_path, True, callbacks=lambda: callbacks, **options).run()
    compare(eager, captured)
    assert repr(captured.module.kept) == repr(eager.module.kept)
    assert counts(captured)[1] > 0
    if backend == "emulated":
        assert max(pools.spoilt.values()) > 10_000
        assert counted.shared > 0.8 * counted.all


# ---------------------------------------------------------------------- observed


def test_the_doctor_finds_what_a_capture_refuses(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"module": Reading, "validation": 4}
    eager = prepare(backend, tmp_path, False, **options).run()
    observed = examined(backend, tmp_path, **options)
    compare(eager, observed, replayed=False)
    diagnosis = observed.capture.report.evaluation["validation_step"].diagnosis
    (found,) = diagnosis.obstacles
    assert (found.kind, found.line) == ("host-read", line(Reading.validation_step, "read"))
    assert "3 validation steps observed" in capsys.readouterr().out


class Moved(Logging):
    """Its batches are made in inference mode, as those are which Lightning moves to a GPU."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return {name: value.to(device, copy=True) for name, value in batch.items()}


@pytest.mark.parametrize("kind", [Logging, Measured, Passing, Moved])
def test_the_doctor_finds_nothing_else(backend: str, tmp_path: Path, kind: Any) -> None:
    observed = prepare(
        backend, tmp_path, True, module=kind, validation=0, capture={"diagnose": True}
    )
    loaders = [loader_of(batches(4)), loader_of(batches(4))][: 1 + (kind is Measured)]
    for name in ("predict",) if kind is Passing else ("validate",):
        getattr(observed.trainer, name)(observed.module, loaders)
        (found,) = observed.capture.report.evaluation.values()
        assert found.diagnosis is not None
        assert (found.diagnosis.steps, found.diagnosis.obstacles) == (3, [])
