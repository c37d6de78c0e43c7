"""Errors of conditions that a graph computes: late, and as if the step had raised them.

PYTEST_DONT_REWRITE: the assertions in it are those of programs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributions import Categorical

from lightning_graphs.errors import ReplayError
from tests.programs.test_mirrors import Queue, of_moco
from tests.training.fits import Net, assert_nothing_left, batches, prepare

FAILING = 8  # the step whose batch is not finite
_TEXT = Path(__file__).read_text().splitlines()
_LINES = [(Path(__file__).name, n) for n, text in enumerate(_TEXT, 1) if text.endswith("# raised")]


class NotFinite(Exception):
    """An error of user code."""


class Raising(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            size = tuple(batch["x"].shape)
            raise NotFinite(f"a loss of {loss:.1f} for {size} in batch {batch_idx}")  # raised
        return loss


class ByHand(Net):
    """Its update and its count come ahead of the error."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        if not torch.isfinite(loss):
            raise NotFinite(f"batch {batch_idx} of {self.trainer.max_epochs} epochs")  # raised


class Asserting(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert not torch.isnan(batch["x"]).any(), batch["x"]  # raised
        return loss


class Unreadable(Net):
    """Its message is made of values that no replay keeps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        worst = batch["x"].abs().amax(1)
        if worst.isnan().any():
            raise NotFinite(worst.max().item())  # raised
        return super().training_step(batch, batch_idx)


class Acting(Net):
    """torch looks at the parameters of a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Identity()

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch["x"]).float()
        return -Categorical(logits=logits, validate_args=True).log_prob(batch["y"]).mean()


class Drawing(Net):
    """torch looks whether deviations are negative, which not-a-number is, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.normal(0.0, batch["x"].abs().amax(1))
        return super().training_step(batch, batch_idx) + noise.mean()


class Factoring(Net):
    """torch looks whether matrices have factors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"].float()
        scale = x.isnan().any(1).float() * -2 + 1
        factors = torch.linalg.cholesky(torch.eye(3, device=x.device) * scale[:, None, None])
        alone = torch.inverse(factors[0])
        return super().training_step(batch, batch_idx) + (factors @ alone).mean()


class Telling(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if torch.isnan(loss):
            print("the limit", self.current_epoch)
            print("x", torch.isnan(batch["x"]).sum())
            raise NotFinite("training stopped")  # raised
        return loss


class Resetting(Net):
    """Its loss becomes a number without gradients, which no backward pass takes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            loss = torch.full_like(loss.detach(), 1e9)
        return loss


class Warned(Net):
    """Warns of large values, and of some out of bounds, and goes on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        size = loss.detach() * batch["x"].abs().max()
        if size > 1000.0:
            warnings.warn(f"a loss of {loss.item():.3f}", stacklevel=1)
        try:
            bounded(size)
        except ValueError:
            warnings.warn("out of bounds", stacklevel=1)
        warn_of(size)
        return loss


def warn_of(size: Tensor) -> None:
    """Warn, and end."""
    if size > 1000.0 or size < 0.0:
        warnings.warn("out of range", stacklevel=1)


def bounded(size: Tensor) -> None:
    if (size > 1000.0).any():
        raise ValueError("too large")


def broken() -> list[dict[str, Any]]:
    data = batches(12)
    data[FAILING]["x"][0, 0] = torch.nan
    return data


@pytest.mark.parametrize(
    ("module", "error", "said"),
    [
        (Raising, NotFinite, r"a loss of nan for \(8, 8\) in batch 8\n"),
        (ByHand, NotFinite, r"batch 8 of 2 epochs\n(?s:.*)attributes in its message are as they"),
        (Asserting, AssertionError, r"<float32 tensor of shape \(8, 8\), whose values are gone>\n"),
        (Unreadable, NotFinite, r"^\("),
        (Telling, NotFinite, r"^training stopped\n"),
        (Resetting, RuntimeError, r"^element 0 of tensors does not require grad"),
        (Drawing, RuntimeError, r"^normal expects all elements of std >= 0.0"),
        (Factoring, torch.linalg.LinAlgError, r"linalg.cholesky: \(Batch element 0\): .* order 1 "),
        (Acting, ValueError, r"constraint IndependentConstraint(?s:.*)gone>\n"),
    ],
)
@pytest.mark.parametrize("every", [1, 50])
def test_the_error_of_the_step_is_raised(
    backend: str, tmp_path: Path, module: type[Net], error: Any, said: str, every: int
) -> None:
    """... with its line and its number, at the latest where the step is logged."""
    options: dict[str, Any] = {"module": module, "data": broken, "log_every_n_steps": every}
    eager = prepare(backend, tmp_path, False, **options)
    with pytest.raises(error):
        eager.run()
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.raises(error, match=said) as raised:
        captured.run()
    assert f"raised by step {FAILING}" in str(raised.value)
    end = raised.traceback[-1]
    if module not in (Acting, Drawing, Factoring, Resetting):
        assert (Path(end.path).name, end.lineno + 1) in _LINES
    assert captured.statistics.replayed > 0
    assert captured.statistics.fallbacks == []
    if every == 1:
        assert captured.trainer.global_step == FAILING + (module is ByHand)
    assert_nothing_left(captured)


class Saving(Callback):
    """Saves what there is when a fit ends, ahead of callbacks that are for checkpoints."""

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


@pytest.mark.filterwarnings("ignore:.*ckpt_path=")
@pytest.mark.parametrize("weights_only", [True, False])
def test_no_checkpoint_holds_a_state_behind_it(
    backend: str, tmp_path: Path, weights_only: bool
) -> None:
    saving = ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_top_k=-1, save_weights_only=weights_only
    )
    last = OnExceptionCheckpoint(tmp_path)
    fit = prepare(
        backend,
        tmp_path,
        True,
        module=Raising,
        data=broken,
        callbacks=lambda: [Saving(), saving, last],
        enable_checkpointing=True,
    )
    with pytest.warns(UserWarning, match="no checkpoint is saved"), pytest.raises(NotFinite):
        fit.run()
    steps = [
        torch.load(path, weights_only=False)["global_step"] for path in tmp_path.rglob("*.ckpt")
    ]
    assert sorted(steps) == list(range(1, FAILING + 1))
    fit.trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    assert (tmp_path / "by_hand.ckpt").exists()


class Counting(Queue):
    training_step = of_moco


class Moves(Callback):
    """Writes the number past autograd, which nothing notices but the device."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == FAILING:
            pl_module.pointer.data[0] = 24


def test_a_number_that_is_written_unseen_ends_the_fit(backend: str, tmp_path: Path) -> None:
    """... before it computes with another one than the host."""
    fit = prepare(backend, tmp_path, True, module=Counting, callbacks=lambda: [Moves()])
    with pytest.raises(ReplayError, match=r"self.pointer was another one") as raised:
        fit.run()
    assert fit.trainer.global_step == FAILING
    assert fit.statistics.replayed > 0
    assert f"raised by step {FAILING}" in str(raised.value)


@pytest.mark.parametrize("every", [1, 50])
def test_warnings_come_late_and_each_time(backend: str, tmp_path: Path, every: int) -> None:
    def large() -> list[dict[str, Any]]:
        data = batches(12)
        for index in (FAILING, FAILING + 2):
            data[index]["x"] = data[index]["x"] * 2.0**12
        return data

    found: list[tuple[list[str], Any]] = []
    for captures in (False, True):
        options: dict[str, Any] = {"module": Warned, "data": large, "log_every_n_steps": every}
        fit = prepare(backend, tmp_path, captures, **options)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            fit.run()
        said = [str(each.message) for each in given]
        said = [text for text in said if text.startswith(("a loss of", "out of"))]
        found.append((sorted(said), {k: v.cpu() for k, v in fit.module.state_dict().items()}))
    assert len(found[0][0]) >= 4
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name])
    assert fit.statistics.replayed > 0
    assert fit.statistics.fallbacks == []
