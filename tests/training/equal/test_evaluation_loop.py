"""While batches of an evaluation are replayed the loops are short; all else is as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, TQDMProgressBar
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_graphs.lightning import loop
from tests.training.fits import Fit, Net, Trace, batches, prepare

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*infer the batch"),
    pytest.mark.filterwarnings("ignore:predict returned None"),
    pytest.mark.filterwarnings("ignore:.*DataLoader. for evaluation"),
]
COUNT = 24


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How many batches were run by the short loops."""
    counts = SimpleNamespace(batches=0)
    for kind in (loop.EvaluationLoop, loop.PredictionLoop):
        run = kind._run

        def counted(*args: Any, run: Any = run) -> None:
            counts.batches += 1
            run(*args)

        monkeypatch.setattr(kind, "_run", counted)
    return counts


# ---------------------------------------------------------------------- what is compared


class EvaluationTrace(Trace):
    """Notes the state of the loop in the hooks of a batch, and metrics at every third batch."""

    def note(self, name: str, trainer: Any, module: LightningModule, *values: Any) -> None:
        loop = trainer._active_loop
        if name.endswith(("batch_start", "batch_end")) and not trainer.training:
            values += (module._current_fx_name, repr(loop.batch_progress))
            fetcher = loop._data_fetcher
            values += (fetcher.fetched, fetcher.done, repr(getattr(loop, "_seen_batches", 0)))
            if loop._results is not None and loop.batch_progress.current.ready % 3 == 0:
                kinds = trainer.callback_metrics, trainer.logged_metrics
                values += tuple(map(dict, (*kinds, trainer.progress_bar_metrics)))
        super().note(name, trainer, module, *values)


def _noted(name: str) -> Any:
    def hook(self: Trace, trainer: Any, module: Any, *values: Any) -> None:
        self.note(name, trainer, module, *values)

    return hook


for _stage in ("validation", "test", "predict"):
    for _end in ("batch_start", "batch_end", "epoch_end"):
        setattr(EvaluationTrace, f"on_{_stage}_{_end}", _noted(f"on_{_stage}_{_end}"))


class Logs(Net):
    """Logs for the end of the evaluation in all forms; returns more than the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("weighted", loss, batch_size=3, sync_dist=True)
        for i, reduce in enumerate(("max", "min", "sum", sum, torch.max)):
            self.log(f"reduced {i}", loss, reduce_fx=reduce)
        self.log_dict({"half": loss.half(), "double": loss.double(), "index": batch_idx + 1.0})
        self.accuracy(loss)
        self.log("accuracy", self.accuracy)
        return {"loss": loss, "labels": batch["y"]}

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"output": self.net(batch["x"]), "labels": [batch["y"], "digits", batch_idx]}


class LogsSteps(Logs):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("step", loss, on_step=True, on_epoch=False, sync_dist=True)
        return super().validation_step(batch, batch_idx)

    test_step = validation_step


class Hooks(Logs):
    """Logs in hooks, too, and moves batches in its own way."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", float(batch_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["loss"] + batch_idx)

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["more"] = batch["x"].sum()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * (2 + dataloader_idx)}


class LateSteps(Hooks):
    """Begins to log a value of the step late."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 19:
            self.log("late", outputs["loss"], on_step=True, on_epoch=True)


class Loaders(Logs):
    """Several loaders, with values that add up over all of them, and logs in hooks."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log(f"one {dataloader_idx}", loss, add_dataloader_idx=False)
        return loss

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log(f"hook {dataloader_idx}", outputs * 2, add_dataloader_idx=False)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch["x"]) + dataloader_idx

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * (2 + dataloader_idx)}


class Sampled(Logs):
    """Has a head, which logs; now and then what leaves it is no batch of a graph."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        rows = torch.nonzero(batch["x"].sum(1) > -99.0).flatten()
        rows = rows[torch.randperm(len(rows))[: 5 if batch_idx % 10 == 7 else 6]]
        self.log("rows", float(len(rows)))
        batch = {key: value[rows] for key, value in batch.items()}
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Indexless(Logs):
    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: Any) -> None:  # type: ignore[override]
        self.net(batch["x"])


class Zipped(Logs):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step(batch[0] | {"x": batch[0]["x"] + batch[1]["x"]}, batch_idx)


class Endless(IterableDataset[Any]):
    """Of unknown length: one batch is fetched ahead."""

    def __iter__(self) -> Iterator[Any]:
        yield from batches(COUNT, last=3)


class Acts(Callback):
    """Does something at the end of one batch."""

    def __init__(self, act: Callable[[Any, Any], None], at: int = 20) -> None:
        self.act, self.at = act, at

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == self.at:
            self.act(trainer, pl_module)


class Stopped(Exception):
    """Raised in a hook."""


def stop(*_: Any) -> None:
    raise Stopped


def adds_callback(trainer: Any, module: Any) -> None:
    trainer.callbacks.append(Acts(lambda t, m: m.log("added", 1.0), 22))


def patches_hook(trainer: Any, module: Any) -> None:
    module.on_validation_batch_start = lambda batch, i: module.log("patched", float(i))


def sigterm(trainer: Any, module: Any) -> None:
    trainer._signal_connector.received_sigterm = True


class Writer(BasePredictionWriter):
    """Keeps all that it is given to write."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, *values: Any) -> None:
        self.written.append(repr(values))

    write_on_epoch_end = write_on_batch_end


def one() -> Any:
    return DataLoader(batches(COUNT, last=5), batch_size=None)  # type: ignore[arg-type]


def sampled() -> Any:
    """A loader that has samplers, so that writers are told which samples a batch has."""
    samples = [{key: value[0] for key, value in batch.items()} for batch in batches(COUNT * 4)]
    return DataLoader(samples, batch_size=4)  # type: ignore[arg-type]


def whole(count: int) -> Any:
    return DataLoader(batches(count), batch_size=None)  # type: ignore[arg-type]


def two() -> Any:
    return [one(), whole(7)]


@dataclass
class Program:
    module: Callable[[], LightningModule] = Logs
    calls: tuple[str, ...] = ("validate",)
    data: Callable[[], Any] = one
    callbacks: Callable[[], list[Any]] = list
    raises: type[BaseException] | None = None
    least: int = 2  # batches that the short loop runs, of all calls
    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)  # arguments of the calls


def acting(act: Callable[[Any, Any], None], **options: Any) -> Program:
    return Program(callbacks=lambda: [Acts(act)], **options)


PROGRAMS = {
    "all": Program(Logs, ("validate", "test", "predict"), least=18),
    "values of steps": Program(LogsSteps, ("validate", "test")),
    "hooks": Program(Hooks, ("validate", "predict")),
    "late values of steps": Program(LateSteps),
    "head": Program(Sampled, data=lambda: whole(3 * COUNT)),
    "two loaders": Program(Loaders, ("validate", "predict"), data=two),
    "two loaders in one": Program(
        Zipped, data=lambda: CombinedLoader([whole(COUNT), whole(7)], "max_size_cycle")
    ),
    "without an index": Program(Indexless, ("validate", "predict")),
    "fetched ahead": Program(data=lambda: DataLoader(Endless(), batch_size=None)),
    "limited": Program(
        calls=("validate", "test", "predict"),
        options={f"limit_{kind}_batches": 19 for kind in ("val", "test", "predict")},
    ),
    "progress bar": Program(
        calls=("validate", "predict"),
        callbacks=lambda: [TQDMProgressBar()],
        options={"enable_progress_bar": True},
    ),
    "written": Program(
        calls=("predict",), data=sampled, callbacks=lambda: [Writer("batch_and_epoch")]
    ),
    "written at the end": Program(
        calls=("predict",), data=sampled, callbacks=lambda: [Writer("epoch")],
        given={"return_predictions": False},
    ),
    "a callback comes": acting(adds_callback),
    "a hook comes": acting(patches_hook),
    "raises": acting(stop, raises=Stopped),
    "a signal": acting(sigterm, raises=BaseException),
    "without inference mode": Program(options={"inference_mode": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_short_loop_is_lightnings(
    backend: str, tmp_path: Path, short: SimpleNamespace, name: str
) -> None:
    program, found, counts = PROGRAMS[name], [], []
    for captured in (False, True):
        fit = prepare(
            backend,
            tmp_path,
            captured,
            module=program.module,
            data=list,
            trace=EvaluationTrace,
            callbacks=program.callbacks,
            validation=0,
            **program.options,
        )
        results: list[Any] = []
        for call in program.calls:
            given = {} if call == "predict" else {"verbose": False}
            call_it = getattr(fit.trainer, call)
            raises = (
                contextlib.nullcontext()
                if program.raises is None
                else pytest.raises(program.raises)
            )
            with raises:
                results.append(call_it(fit.module, program.data(), **given, **program.given))
        results += [c.written for c in fit.trainer.callbacks if isinstance(c, Writer)]
        found.append((repr(results), *seen_in(fit)))
        counts.append(short.batches)
    assert found[1] == found[0]
    assert counts[0] == 0
    assert counts[1] >= program.least


def seen_in(fit: Fit) -> list[Any]:
    kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    return [*map(repr, fit.trace.events), *(repr(getattr(fit.trainer, kind)) for kind in kinds)]


class Validated(Logs):
    """Has an interval of validations within epochs, over two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("of steps", self.loss(batch), on_step=True)
        return super().validation_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return two()


@pytest.mark.parametrize("module", [Logs, Validated])
def test_validations_of_a_fit(
    backend: str, tmp_path: Path, short: SimpleNamespace, module: Any
) -> None:
    """``validate`` ahead of it, ``test`` behind it, and another fit."""
    found = []
    for captured in (False, True):
        fit = prepare(
            backend, tmp_path, captured, module=module, trace=EvaluationTrace,
            validation=0 if module is Validated else 12, val_check_interval=5,
            num_sanity_val_steps=1, max_epochs=2,
        )  # fmt: skip
        loaders = fit.module.val_dataloader()
        ahead = fit.trainer.validate(fit.module, loaders, verbose=False)
        fit.run()
        fit.trainer.fit_loop.max_epochs = 3
        fit.run()
        behind = fit.trainer.test(fit.module, one(), verbose=False) if module is Logs else ()
        found.append((repr([ahead, behind]), fit.csv, *seen_in(fit)))
    assert found[1] == found[0]
    assert short.batches > 40


def test_an_unknown_version_of_lightning_keeps_its_loops(
    backend: str, tmp_path: Path, short: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.__version__", "2.7.0")
    fit = prepare(backend, tmp_path, True, module=Logs, validation=0)
    fit.trainer.validate(fit.module, one(), verbose=False)
    assert fit.capture.report.evaluation["validation_step"].replayed > 8
    assert short.batches == 0
