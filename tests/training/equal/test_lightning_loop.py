"""While steps are replayed Lightning's loop is short; hooks, counters and logs are as before."""

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
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_graphs.lightning import loop
from lightning_graphs.regions.plan import StepOutputs
from tests.training.fits import FullTrace, Net, Trace, adamw, batches, compare, prepare


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How many steps were run by the short loop, and how many of them were replayed at once."""
    counts = SimpleNamespace(steps=0, replayed=0)
    step, replay = loop.ReplayLoop._step, loop.StepRunner.replay

    def counted(*args: Any) -> Any:
        counts.steps += 1
        return step(*args)

    def at_once(*args: Any, **kwargs: Any) -> Any:
        returned = replay(*args, **kwargs)
        counts.replayed += returned is not None
        return returned

    monkeypatch.setattr(loop.ReplayLoop, "_step", counted)
    monkeypatch.setattr(loop.StepRunner, "replay", at_once)
    return counts


# ---------------------------------------------------------------------- what is compared


class LoopTrace(Trace):
    """Also notes the state of the loops and the name of the hook; metrics at every third batch."""

    def note(self, name: str, trainer: Any, module: LightningModule, *values: Any) -> None:
        epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        state = {k: v for k, v in trainer.fit_loop.state_dict().items() if k != "state_dict"}
        more = (
            module._current_fx_name,
            state,
            epoch_loop._batches_that_stepped,
            (epoch_loop.batch_idx, epoch_loop.batch_progress.is_last_batch),
            (getattr(fetcher, "fetched", 0), getattr(fetcher, "done", False)),
            trainer.optimizers[0].param_groups[0]["lr"],
        )
        if epoch_loop.batch_idx % 3 == 0:
            if module.device.type == "cuda":  # the progress bar is a step behind till it is done
                torch.cuda.synchronize(module.device)
            kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
            more += tuple(map(dict, kinds))
        super().note(name, trainer, module, *values, *more)


class FullLoopTrace(LoopTrace, FullTrace):
    """All hooks of a step."""


class Logs(Net):
    """Logs in all common forms; returns more than the loss."""

    def __init__(self, optimizers: Any = adamw) -> None:
        super().__init__(optimizers)
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("single", loss * 2)
        self.log("total", loss * 3, on_step=False, on_epoch=True)
        self.log("weighted", loss, on_epoch=True, batch_size=3)
        for reduce in ("max", "min", "sum"):
            self.log(reduce, loss, on_step=False, on_epoch=True, reduce_fx=reduce)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx=max)  # Python's
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx=min)
        self.log_dict({"a": loss + 1, "b": loss + 2}, on_epoch=True)
        self.log("index", batch_idx + 1.0)
        self.log("double", loss.double(), on_epoch=True)
        self.accuracy(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "prediction": batch["x"].sum()}


class OwnSchedule(lr_scheduler.LambdaLR):
    """A class of user code."""


def scheduled(
    kind: Callable[[Any], Any], module: Any = Logs, **options: Any
) -> Callable[[], LightningModule]:
    """Make a module with a scheduler."""

    def optimizers(module: LightningModule) -> Any:
        optimizer = adamw(module)
        config = {"scheduler": kind(optimizer), "interval": "step", **options}
        epochs = {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}
        return [optimizer], [config, epochs]

    return lambda: module(optimizers)


def halved(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 4))


class Ends(Callback):
    """Does something at the end of one batch."""

    def __init__(self, act: Callable[[Any, Any], None], at: int = 20) -> None:
        self.act, self.at = act, at

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) == (0, self.at):
            self.act(trainer, pl_module)


class Starts(Ends):
    """Does something at the start of one batch."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.at:
            self.act(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing."""


class Stopped(Exception):
    """Raised in a hook."""


def stop(*_: Any) -> None:
    raise Stopped


class Holds(Callback):
    """Holds the dict of metrics, and looks into it without asking for it."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.held = trainer.callback_metrics
        outputs["held"] = dict(self.held)


class Skips(Logs):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 21 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (19, 20):
            self.log("rare", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)


class Moves(Logs):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * 2}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + 1}


class Sampled(Logs):
    """Has a head, which logs; now and then what leaves it is no batch of a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = torch.nonzero(batch["x"].sum(1) > -99.0).flatten()
        rows = rows[torch.randperm(len(rows))[: 5 if batch_idx % 10 == 7 else 6]]
        self.log("rows", float(len(rows)), on_epoch=True)
        batch = {key: value[rows] for key, value in batch.items()}
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        return {"loss": loss, "rows": len(rows)}


class OwnStep(Logs):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)


class ByHand(Logs):
    """Optimizes by its own code: twice in every other step, and by a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(1 + batch_idx % 2):
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            returned = super().training_step(batch, batch_idx)
            self.manual_backward(returned["loss"])
            optimizer.step()
        return returned if batch_idx % 3 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 0:
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return [optimizer], [halved(optimizer)]


class Two(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch["a"], "x": batch["a"]["x"] + batch["b"]["x"]}, 0)


class Endless(IterableDataset[Any]):
    """Of unknown length: one batch is fetched ahead."""

    def __iter__(self) -> Iterator[Any]:
        yield from batches(24, last=3)


def two_loaders() -> Any:
    return {
        "a": DataLoader(batches(24), batch_size=None),  # type: ignore[arg-type]
        "b": DataLoader(batches(7), batch_size=None),  # type: ignore[arg-type]
    }


def without(index: int) -> Any:
    """Batches with a None in one place."""
    return DataLoader(  # type: ignore[var-annotated]
        [None if i == index else batch for i, batch in enumerate(batches(24))],  # type: ignore[arg-type]
        batch_size=None,
    )


def sets(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda trainer, module: setattr(trainer, name, value)


def adds_callback(trainer: Any, module: Any) -> None:
    trainer.callbacks.append(Starts(lambda t, m: m.log("added", 1.0), 22))


def patches_hook(trainer: Any, module: Any) -> None:
    module.on_train_batch_end = lambda outputs, batch, i: module.log("patched", outputs["loss"])


def checkpoint(root: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(root / "checkpoints", save_top_k=-1, **options)


@dataclass
class Program:
    module: Callable[[], LightningModule] = Logs
    callbacks: Callable[[Path], list[Callback]] = lambda _: []
    data: Callable[[], Any] = lambda: batches(24)
    trace: type[Trace] = LoopTrace
    raises: bool = False
    at_once: bool = True  # steps are replayed without the strategy's methods
    options: dict[str, Any] = field(default_factory=dict)


def one(act: Callable[[Any, Any], None], kind: Any = Ends, **options: Any) -> Program:
    return Program(callbacks=lambda _: [kind(act)], **options)


VALIDATED = {"val_check_interval": 7, "enable_checkpointing": True}
PROGRAMS = {
    "plain": Program(),
    "nothing is read": Program(trace=Trace, options={"log_every_n_steps": 7}),
    "one key": Program(Net),
    "window": Program(options={"accumulate_grad_batches": 3, "log_every_n_steps": 2}),
    "window with a rest": Program(data=lambda: batches(63), options={"accumulate_grad_batches": 4}),
    "schedules": Program(
        scheduled(halved, frequency=2), lambda _: [LearningRateMonitor()], trace=LoopTrace
    ),
    "schedule of user code": Program(scheduled(lambda o: OwnSchedule(o, lambda n: 0.5**n))),
    "plateau": Program(
        scheduled(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1), monitor="loss")
    ),
    "schedules in windows": Program(
        scheduled(halved), options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    ),
    "all hooks": Program(scheduled(halved), trace=FullLoopTrace, at_once=False),
    "hooks of a batch": Program(
        Moves, lambda _: [Starts(lambda t, m: m.log("s", 1.0)), Ends(lambda t, m: None)]
    ),
    "head": Program(scheduled(halved, Sampled), options={"max_epochs": 3}),
    "head in windows": Program(Sampled, options={"max_epochs": 4, "accumulate_grad_batches": 2}),
    "epochs of one batch": Program(
        scheduled(halved, Sampled), data=lambda: batches(1), options={"max_epochs": 36}
    ),
    "own optimizer step": Program(OwnStep, at_once=False),
    "by hand": Program(ByHand, at_once=False),
    "by hand, checkpoints": Program(
        ByHand,
        lambda root: [checkpoint(root, every_n_train_steps=5, monitor="loss")],
        at_once=False,
        options={**VALIDATED, "max_steps": 45, "max_epochs": -1},
    ),
    "validation, checkpoints": Program(
        callbacks=lambda root: [checkpoint(root, every_n_train_steps=5, monitor="loss")],
        options=VALIDATED,
    ),
    "validation over epochs": Program(
        callbacks=lambda root: [checkpoint(root, monitor="val"), EarlyStopping("val", patience=9)],
        options={**VALIDATED, "check_val_every_n_epoch": None},
    ),
    "early stopping": Program(
        callbacks=lambda _: [EarlyStopping("val", patience=1, min_delta=9.0)],
        options={"val_check_interval": 11},
    ),
    "averaged weights": Program(
        callbacks=lambda _: [StochasticWeightAveraging(1e-3, 1, annealing_epochs=1)],
        options={"max_epochs": 3},
    ),
    "progress bar": Program(
        callbacks=lambda _: [TQDMProgressBar()], options={"enable_progress_bar": True}
    ),
    "max_steps": Program(options={"max_steps": 31, "max_epochs": -1}),
    "max_time": Program(options={"max_time": "00:01:00:00"}),
    "limited": Program(options={"limit_train_batches": 17, "max_epochs": 3}),
    "stop": one(sets("should_stop", True)),
    "stop, min_steps": one(sets("should_stop", True), Starts, options={"min_steps": 33}),
    "the window moves": one(sets("accumulate_grad_batches", 2)),
    "the window moves at a start": one(sets("accumulate_grad_batches", 2), Starts),
    "logs move": one(sets("log_every_n_steps", 4)),
    "no validation": one(sets("limit_val_batches", 0), options={"val_check_interval": 6}),
    "a callback comes": one(adds_callback),
    "a hook comes": one(patches_hook),
    "skips": Program(Skips),
    "raises": one(stop, raises=True, trace=Trace, options={"log_every_n_steps": 7}),
    "raises at a start": one(
        stop, Starts, raises=True, trace=Trace, options={"log_every_n_steps": 7}
    ),
    "a dict is held": Program(callbacks=lambda _: [Holds()], trace=Trace),
    "two loaders": Program(Two, data=two_loaders),
    "fetched ahead": Program(data=lambda: DataLoader(Endless(), batch_size=None)),
    "no batch": Program(data=lambda: without(20)),
    "two shapes": Program(data=lambda: batches(12) + batches(12, 5)),
}


@pytest.mark.filterwarnings(
    *(
        f"ignore:.*{said}"
        for said in ("yielded None", "swa_lrs", "lr_scheduler", "manual optimization")
    )
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_short_loop_is_lightnings(
    backend: str, tmp_path: Path, short: SimpleNamespace, name: str
) -> None:
    program, fits = PROGRAMS[name], []
    for captured in (False, True):
        root = tmp_path / str(captured)
        fit = prepare(
            backend,
            root,
            captured,
            module=program.module,
            data=program.data,
            trace=program.trace,
            callbacks=lambda root=root: program.callbacks(root),  # type: ignore[misc]
            **{"log_every_n_steps": 5, **program.options},
        )
        with pytest.raises(Stopped) if program.raises else contextlib.nullcontext():
            fit.run()
        fits.append(fit)
    compare(*fits)
    assert short.steps > 2  # it begins once each graph has its times, which a GPU tells later
    assert (short.replayed > 2) is program.at_once
    eager, mine = (
        sorted(p.name for p in tmp_path.glob(f"{c}/checkpoints/*")) for c in (False, True)
    )
    assert mine == eager
    for path in eager:
        loaded = [
            torch.load(tmp_path / str(c) / "checkpoints" / path, weights_only=False)
            for c in (False, True)
        ]
        for key in ("state_dict", "loops", "optimizer_states", "lr_schedulers", "global_step"):
            assert repr(loaded[1][key]) == repr(loaded[0][key]), (path, key)


class Blind(Logs):
    """No hook reads what its steps return: of training up to a batch, and of validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = super().training_step(batch, batch_idx)["loss"]
        return self.last

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.last * len(batch["x"]))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx))


class Quiet(Trace):
    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing is said of what it is given."""

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Nothing."""


class Unread(Quiet):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note("end", trainer, pl_module, batch_idx)


@pytest.mark.parametrize("trace", [Quiet, Unread])
def test_what_no_hook_reads_is_not_handed_out(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: type[Trace]
) -> None:
    copies, copied = StepOutputs.copies, []

    def counted(outputs: StepOutputs, owing: Any) -> Any:
        copied.append("training" if fits[1].trainer.training else "validation")
        return copies(outputs, owing)

    monkeypatch.setattr(StepOutputs, "copies", counted)
    parts: dict[str, Any] = {
        "trace": trace, "callbacks": lambda: [Starts(patches_hook, 30)], "validation": 60
    }  # fmt: skip
    fits = [
        prepare(backend, tmp_path, captured, module=Blind, data=lambda: batches(40), **parts)
        for captured in (False, True)
    ]
    compare(*(fit.run() for fit in fits))
    done = fits[1].statistics
    validated = done.evaluation["validation_step"].replayed
    # Steps that are timed are handed out, and those of training once another hook reads them
    unread = done.replayed - copied.count("training")
    assert unread == 0 if trace is Quiet else unread > 10
    assert copied.count("training") > 40
    assert validated - copied.count("validation") > 40


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_fit_goes_on_from_a_checkpoint_within_an_epoch(
    backend: str, tmp_path: Path, short: SimpleNamespace
) -> None:
    fits = []
    for captured in (False, True):
        root = tmp_path / str(captured)
        given = {
            "module": Logs,
            "data": lambda: batches(24),
            "callbacks": lambda root=root: [checkpoint(root, every_n_train_steps=20)],
            "log_every_n_steps": 5,
            "enable_checkpointing": True,
        }
        prepare(backend, root, captured, **given).run()
        short.steps = 0
        path = str(next(root.glob("checkpoints/*step=20.ckpt")))
        fits.append(prepare(backend, root / "again", captured, **given, trace=LoopTrace))
        fits[-1].run(ckpt_path=path, weights_only=False)
    compare(*fits)
    assert short.steps > 8


@pytest.mark.parametrize("version", ["2.7.0", "2.6.99", "2.7.0.dev1"])
def test_an_unknown_version_of_lightning_keeps_its_loop(
    backend: str,
    tmp_path: Path,
    short: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    monkeypatch.setattr("lightning.__version__", version)
    fit = prepare(backend, tmp_path, True, data=lambda: batches(20), max_epochs=1).run()
    assert fit.statistics.replayed > 8
    assert short.steps == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_only_profilers_get_a_mark_of_each_batch(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """torch's data loaders make one, which takes longer than all else that they do there."""
    marks: list[str] = []

    class Mark(torch.autograd.profiler.record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            marks.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Mark)
    loaders: list[Any] = []

    def data() -> Any:
        kept = bool(workers)
        loaders.append(
            DataLoader(batches(30), batch_size=None, num_workers=workers, persistent_workers=kept)  # type: ignore[arg-type]
        )
        return loaders[-1]

    def count(captured: bool) -> int:
        marks.clear()
        fits.append(prepare(backend, tmp_path, captured, data=data, validation=0).run())
        return sum("DataLoader" in mark for mark in marks)

    fits: list[Any] = []
    expected, seldom = count(False), count(True)
    compare(*fits)
    assert expected >= 60
    assert seldom < 30
    assert all("__next__" not in vars(type(each._iterator)) for each in loaders if workers)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert count(True) == expected
