"""A small real fit, run with the callback and without, and compared value by value.

The kit of all tests of the callback: the module :class:`Net` and its :func:`batches`,
:func:`fit_twice` and :func:`compare`, :func:`examined` for the doctor, and what must not be there
after a fit, :func:`assert_nothing_left`.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture
from lightning_graphs.lightning.strategy import NAMES
from lightning_graphs.private.torch import local
from lightning_graphs.report.diagnosis import Finding

Optimizers = Callable[[LightningModule], Any]

# What Lightning says about tiny runs, and about being run without workers; none of it is ours.
_LIGHTNING_SAYS = (
    r".*does not have many workers which may be a bottleneck.*",
    r".*GPU available but not used.*",
    r".*The number of training batches .* is smaller than the logging interval.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r"You defined a `validation_step` but have no `val_dataloader`.*",
    r"You are using the `dataloader_iter` step flavor.*",
    r"Found `dataloader_iter` argument in the `training_step`.*",
    r"`training_step` returned `None`.*",
    r".*Trying to infer the `batch_size` from an ambiguous collection.*",
    r".*You are using a CUDA device .* that has Tensor Cores.*",
)


def adamw(module: LightningModule) -> torch.optim.Optimizer:
    """Fused, so that the captured step uses the same kernel; the rate is exact in float32."""
    return torch.optim.AdamW(module.parameters(), lr=2**-7, fused=True)


def sgd(module: LightningModule) -> torch.optim.Optimizer:
    """Fused SGD with momentum."""
    return torch.optim.SGD(module.parameters(), lr=2**-5, momentum=0.5, fused=True)


class Net(LightningModule):
    """Linear, BatchNorm and Dropout on ``{"x": f32[N, 8], "y": i64[N], ...}``."""

    def __init__(self, optimizers: Optimizers = adamw) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.Dropout(0.25),
            nn.Linear(16, 3),
        )
        self._optimizers = optimizers

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["x"]).float(), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self._optimizers(self)


def batches(count: int = 10, size: int = 8, last: int | None = None) -> list[dict[str, Any]]:
    """``count`` batches of ``size`` samples, the last one of ``last``."""
    generator = torch.Generator().manual_seed(3)
    sizes = [size] * count
    if last is not None:
        sizes[-1] = last
    return [
        {
            "x": torch.randn(n, 8, generator=generator),
            "y": torch.randint(0, 3, (n,), generator=generator),
        }
        for n in sizes
    ]


class Trace(Callback):
    """Writes down every hook that does not look into a step, with counters and values."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def note(self, name: str, trainer: Trainer, module: LightningModule, *values: Any) -> None:
        weights = sum(local(p).detach().sum(dtype=torch.float64) for p in module.parameters())
        found = map(_plain, (weights, *values))
        self.events.append((name, trainer.global_step, trainer.current_epoch, *found))

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note("on_train_batch_start", trainer, pl_module, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        gradients = _gradients(pl_module)
        self.note("on_train_batch_end", trainer, pl_module, batch_idx, outputs, gradients)


def _noting(name: str) -> Any:
    def hook(self: Trace, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.note(name, trainer, pl_module)

    return hook


for _name in (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_start", "on_validation_end", "on_validation_epoch_end", "on_train_end",
    "on_fit_end", "on_sanity_check_start", "on_sanity_check_end",
):  # fmt: skip
    setattr(Trace, _name, _noting(_name))


class GradientTrace(Trace):
    """Also looks at the gradients between backward and optimizer step."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_after_backward", trainer, pl_module, *_gradients(pl_module))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", trainer, pl_module, *_gradients(pl_module))


class FullTrace(GradientTrace):
    """Also looks at the gradients between forward and backward."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("on_before_zero_grad", trainer, pl_module, *_gradients(pl_module))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.note("on_before_backward", trainer, pl_module, loss)


def _gradients(module: LightningModule) -> list[Any]:
    return [p.grad for p in module.parameters()]


def _plain(value: Any) -> Any:
    """A value that ``==`` compares: tensors become lists."""
    if isinstance(value, Tensor):
        return (str(value.dtype), value.device.type, local(value).to_dense().tolist())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


class Table(CSVLogger):
    """Writes its file in :func:`csv_of` only; Lightning asks for it after every step."""

    def save(self) -> None:
        pass


@dataclass
class Fit:
    """What a fit left behind."""

    module: Any
    trainer: Trainer
    trace: Trace
    capture: GraphCapture
    csv: str
    loader: Any = field(repr=False, default=None)
    seed: int = 1

    @property
    def statistics(self) -> Any:
        return self.capture._statistics

    def run(self, **options: Any) -> Fit:
        """Fit, or fit once more, with the same trainer and module."""
        seed_everything(self.seed, verbose=False)
        fit(self.trainer, self.module, self.loader, **options)
        self.csv = csv_of(self.trainer)
        return self


def csv_of(trainer: Trainer) -> str:
    """The text of the metrics file, which rank 0 writes."""
    if not isinstance(trainer.logger, CSVLogger) or not trainer.is_global_zero:
        return ""
    CSVLogger.save(trainer.logger)
    path = Path(trainer.logger.experiment.metrics_file_path)
    return path.read_text() if path.exists() else ""


def fit(trainer: Trainer, module: LightningModule, loader: Any, **options: Any) -> None:
    """``trainer.fit`` without Lightning's remarks on tiny runs."""
    if "weights_only" not in inspect.signature(trainer.fit).parameters:  # Lightning 2.5
        options.pop("weights_only", None)
    with warnings.catch_warnings():
        for message in _LIGHTNING_SAYS:
            warnings.filterwarnings("ignore", message=message)
        trainer.fit(module, loader, **options)


def loader_of(data: Any) -> Any:
    """A loader that hands out ready-made batches; anything but a list is a loader already."""
    return DataLoader(data, batch_size=None) if isinstance(data, list) else data


class Hidden:
    """Numbers that nothing which watches Python values finds; 1.0 where none was set."""

    def __init__(self) -> None:
        values: dict[str, float] = {}
        self._values = ContextVar("values", default=values)  # one dict for all threads

    def __getitem__(self, name: str) -> float:
        return self._values.get().get(name, 1.0)

    def __setitem__(self, name: str, value: float) -> None:
        self._values.get()[name] = value

    def clear(self) -> None:
        """Forget every number."""
        self._values.get().clear()


def prepare(
    backend: str,
    root: Path,
    captured: bool,
    *,
    module: Callable[[], LightningModule] = Net,
    data: Callable[[], Any] = batches,
    validation: int = 2,
    callbacks: Callable[[], Sequence[Callback]] = list,
    trace: type[Trace] = Trace,
    capture: dict[str, Any] | None = None,
    seed: int = 1,
    **options: Any,
) -> Fit:
    """A trainer, a module and its data, made again from one seed; nothing runs yet.

    Args:
        backend: ``"emulated"`` or ``"cuda"``.
        root: Where logs and checkpoints go.
        captured: With the callback, or without.
        module: Makes the module.
        data: Makes a list of batches, or a loader.
        validation: Number of validation batches.
        callbacks: Makes further callbacks.
        trace: Which hooks are written down.
        capture: Options of the callback.
        seed: The seed of everything.
        options: Of the trainer.
    """
    seed_everything(seed, verbose=False)
    wanted = {"backend": backend, "on_failure": "raise", "scope": "step", **(capture or {})}
    wanted.setdefault(
        "only_if_faster", False
    )  # what a test is about is captured, if it pays or not
    own = GraphCapture(**wanted)
    seen = trace()
    logger = Table(str(root / ("captured" if captured else "eager")), name="logs")
    given: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "gpu" if backend == "cuda" else "cpu",
        "devices": 1,
        "logger": logger,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": str(root / ("captured" if captured else "eager")),
    }
    given.update(options)
    trainer = Trainer(callbacks=[seen, *callbacks(), *([own] if captured else [])], **given)
    result = Fit(module(), trainer, seen, own, "", loader_of(data()), seed)
    if validation:
        held_out = batches(validation)
        result.module.val_dataloader = lambda: DataLoader(held_out, batch_size=None)
    return result


def fit_twice(backend: str, root: Path, **options: Any) -> tuple[Fit, Fit]:
    """The same fit without and with the callback."""
    eager = prepare(backend, root, False, **options).run()
    captured = prepare(backend, root, True, **options).run()
    return eager, captured


def warned(backend: str, root: Path, said: str, **options: Any) -> tuple[Fit, Fit]:
    """The same fit without and with the callback, which warns so; both give the same values."""
    options["capture"] = {"on_failure": "eager", **options.get("capture", {})}
    eager = prepare(backend, root, False, **options).run()
    captured = prepare(backend, root, True, **options)
    with pytest.warns(UserWarning, match=said):
        captured.run()
    compare(eager, captured, replayed=False)
    return eager, captured


def named(*modules: str, **options: Any) -> dict[str, Any]:
    """Options of the callback that make graphs of these submodules."""
    return {"scope": "modules", "modules": list(modules), **options}


def examined(backend: str, root: Path, **options: Any) -> Fit:
    """A fit with the doctor."""
    capture = {"diagnose": True, **options.pop("capture", {})}
    return prepare(backend, root, True, capture=capture, **options).run()


def rows(fit: Fit, kind: str) -> list[Finding]:
    """What the doctor has found of this kind."""
    assert fit.capture.report.diagnosis is not None
    return [finding for finding in fit.capture.report.diagnosis.findings if finding.kind == kind]


def line(function: Any, text: str) -> int:
    """The number of the line of ``function`` that ends with the comment ``text``."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, each in enumerate(lines) if each.rstrip().endswith(f"# {text}"))


def said_of_rates(captured: Fit) -> list[str]:
    """What a fit says of its optimizer if parameters have become float64, which only CUDA minds."""
    dtypes = {parameter.dtype for parameter in captured.module.parameters()}
    if captured.statistics.backend != "cuda" or torch.float64 not in dtypes:
        return []
    why = "parameters are float64, and a captured learning rate has 32 bits"
    return [f"the optimizer step runs eagerly: {why}"]


def compare(
    eager: Fit,
    captured: Fit,
    *,
    replayed: bool = True,
    tolerance: float = 0.0,
    said: Sequence[str] = (),
) -> None:
    """Assert that two fits gave the same values.

    Args:
        eager: The fit without the callback.
        captured: The one with it.
        replayed: Steps must have been replayed, and none refused.
        tolerance: 0 for bit equality, which leaves nothing out; else parameters, buffers and
            optimizer state may differ by so much, and logs and hook values are not looked at.
        said: What else runs eagerly, where steps must have been replayed.
    """
    statistics = captured.statistics
    if replayed:
        assert statistics.replayed > 0, statistics
        assert statistics.fallbacks == [*said]
    assert counters(captured.trainer) == counters(eager.trainer)
    close(captured.module.state_dict(), eager.module.state_dict(), tolerance, "module")
    for mine, theirs in zip(captured.trainer.optimizers, eager.trainer.optimizers, strict=True):
        close(mine.state_dict(), theirs.state_dict(), tolerance, "optimizer")
    names = [[event[:3] for event in one.trace.events] for one in (captured, eager)]
    assert names[0] == names[1]
    if tolerance:
        return
    for mine, theirs in zip(captured.trace.events, eager.trace.events, strict=True):
        assert repr(mine) == repr(theirs)  # NaN is equal to itself there
    assert captured.csv == eager.csv
    for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        values = [_plain(dict(getattr(one.trainer, kind))) for one in (captured, eager)]
        assert values[0] == values[1], kind


def counters(trainer: Trainer) -> dict[str, Any]:
    """Every counter that Lightning keeps of a fit."""
    loop: dict[str, Any] = trainer.fit_loop.state_dict()
    rates = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    for state in rates:
        for key in ("anneal_func", "_anneal_func_type", "lr_lambdas"):
            state.pop(key, None)
    return {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "loop": {k: v for k, v in loop.items() if "_data_fetcher" not in k and "state" not in k},
        "schedulers": rates,
    }


def close(mine: Any, theirs: Any, tolerance: float, where: str) -> None:
    """Assert that two trees are equal in structure, types, devices and values."""
    assert type(mine) is type(theirs), where
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs), where
        for key in theirs:
            close(mine[key], theirs[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple, deque)):
        assert len(mine) == len(theirs), where
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            close(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(
            local(mine),
            local(theirs),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{where}: {m}",
        )
    else:
        assert mine == theirs, where


def assert_nothing_left(captured: Fit) -> None:
    """Assert that strategy, stream, optimizer, module and trainer are Lightning's again."""
    trainer = captured.trainer
    assert not set(NAMES) & set(vars(trainer.strategy))
    assert type(trainer) is Trainer
    assert "profile" not in vars(trainer.profiler)
    assert "log" not in vars(captured.module)
    assert "<locals>" not in repr(type(captured.module).__getattribute__)
    assert captured.capture._handler is None
    assert "autocast_context_manager" not in vars(trainer.precision_plugin)
    for optimizer in trainer.optimizers:
        assert "zero_grad" not in vars(optimizer)
        for group in optimizer.param_groups:
            assert isinstance(group["lr"], float)
            assert not group.get("foreach")
            assert not group.get("capturable")
    if torch.cuda.is_available():
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
