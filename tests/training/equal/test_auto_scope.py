"""``scope="auto"``: the whole step if it can be captured, else submodules, else eager steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_graphs import CaptureError
from lightning_graphs.core import is_current_stream_capturing
from tests.training.fits import (
    GradientTrace,
    Hidden,
    Net,
    adamw,
    assert_nothing_left,
    batches,
    compare,
    fit_twice,
    prepare,
)
from tests.training.modules.test_equal import Blocks

AUTO = {"scope": "auto", "on_failure": "eager"}
SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")


def test_a_step_that_can_be_captured_is_one_graph(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, capture=AUTO)
    compare(eager, captured)
    assert {record.scope for record in captured.statistics.graphs} == {"step"}
    assert captured.statistics.modules == []


class Counted(Blocks):
    """State of every kind that a failed attempt to capture the step must not change."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(()))
        self.python_side = 0

    def loss(self, batch: Any) -> Tensor:
        self.seen += 1
        self.python_side += 1
        x = self.norm(self.net(batch["x"]))
        for block in self.blocks:
            x = block(x, scale=x.detach().std())["hidden"][0]
        loss = nn.functional.cross_entropy(self.head(x).float(), batch["y"])
        self.log("dice", torch.rand((), device=x.device), on_step=True, on_epoch=True)
        return loss * 2 if loss.tolist() > 0.5 else loss


@SAYS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1, "trace": GradientTrace},
        {"precision": "bf16-mixed"},
    ],
)
def test_submodules_where_the_step_reads_a_value(
    backend: str, tmp_path: Path, options: Any
) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Counted, capture=AUTO, **options)
    compare(eager, captured, replayed=False)
    assert captured.module.python_side == eager.module.python_side
    assert_nothing_left(captured)
    statistics = captured.statistics
    assert statistics.modules == ["net", "norm", *[f"blocks.{i}" for i in range(3)], "head"]
    assert statistics.replayed >= 5
    (reason,) = statistics.fallbacks
    assert "tolist" in reason
    assert "test_auto_scope.py:" in reason


@SAYS
def test_submodules_begin_with_the_next_step(backend: str, tmp_path: Path) -> None:
    capture = {**AUTO, "min_repeats": 0, "warmup_steps": 1}
    _, captured = fit_twice(backend, tmp_path, module=Counted, capture=capture, validation=0)
    # One warm-up step, one whose capture failed, one that was observed; the rest is replayed.
    assert captured.statistics.eager == 3
    assert captured.statistics.replayed == 17


class Weighted(Net):
    """Reads an attribute that moves before every step."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.w = 0.9**self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.w


class Worded(Weighted):
    """Reads a text that moves so: no replay computes with one."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.w = str(0.9**self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * float(self.w)


@SAYS
@pytest.mark.parametrize("accumulate", [1, 3, 8])
@pytest.mark.parametrize("scope", ["auto", "modules"])
def test_submodules_where_an_attribute_keeps_changing(
    backend: str, tmp_path: Path, scope: str, accumulate: int
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=Worded, data=lambda: batches(80 * accumulate), max_epochs=1,
        capture={**AUTO, "scope": scope}, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    compare(eager, captured, replayed=False)
    assert_nothing_left(captured)
    statistics = captured.statistics
    assert statistics.modules == ["net"]
    assert statistics.replayed > 0
    if scope == "auto":
        (reason,) = statistics.fallbacks
        assert reason.startswith("cannot capture the whole step; capturing submodules instead: ")
        assert re.search(
            r"self\.w: '0\.\d+' -> '0\.\d+', named at .*\n  Fix: .*a buffer that a hook fills",
            reason,
        )


SHARE: Any = 1.0


class OfAGlobal(Net):
    """A hook moves a global variable in every step, and the step reads it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * float(SHARE)

    def on_train_batch_start(self, *_: Any) -> None:
        global SHARE
        SHARE = str(1.0 - self.global_step / 128)


@SAYS
@pytest.mark.parametrize("accumulate", [1, 3])
def test_whole_steps_where_a_number_keeps_changing(
    backend: str, tmp_path: Path, accumulate: int
) -> None:
    """It is followed from the second capture on."""
    eager, captured = fit_twice(
        backend, tmp_path, module=Weighted, data=lambda: batches(30 * accumulate), max_epochs=1,
        capture=AUTO, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    compare(eager, captured, replayed=False)
    assert {record.scope for record in captured.statistics.graphs} == {"step"}
    assert captured.statistics.replayed >= 15
    assert not captured.statistics.fallbacks


@SAYS
def test_submodules_where_a_global_keeps_changing(backend: str, tmp_path: Path) -> None:
    fits = fit_twice(
        backend, tmp_path, module=OfAGlobal, data=lambda: batches(80), max_epochs=1, capture=AUTO
    )
    compare(*fits, replayed=False)
    statistics = fits[1].statistics
    assert statistics.modules == ["net"]
    assert statistics.replayed > 15
    (reason,) = statistics.fallbacks
    assert reason.startswith("cannot capture the whole step; capturing submodules instead: ")
    assert re.search(r"SHARE: '0\.\d+' -> '0\.\d+', named at .*\n  Fix: .*a buffer", reason)


@SAYS
@pytest.mark.parametrize("values", [4, 8])
def test_whole_steps_where_few_values_of_an_attribute_take_turns(
    backend: str, tmp_path: Path, values: int
) -> None:
    class Turning(Weighted):
        def on_train_batch_start(self, *_: Any) -> None:
            self.w = 0.5 + self.global_step % values

    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Turning,
        data=lambda: batches(15 * values),
        max_epochs=1,
        capture=AUTO,
    )
    compare(eager, captured)
    assert {record.scope for record in captured.statistics.graphs} == {"step"}
    assert captured.statistics.captures <= values


@SAYS
def test_whole_steps_are_kept_where_shapes_never_come_back(backend: str, tmp_path: Path) -> None:
    """Graphs of submodules would be no better off."""

    def data() -> Any:
        return [{**batch, "path": f"{max(i, 5)}.png"} for i, batch in enumerate(batches(60))]

    eager, captured = fit_twice(
        backend, tmp_path, module=Worded, data=data, max_epochs=1, capture=AUTO
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 1
    assert captured.statistics.modules == []
    (reason,) = captured.statistics.fallbacks
    assert "no batch signature came back" in reason


class Nothing(LightningModule):
    """Its only layer reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Reading(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return adamw(self)


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().tolist() > 0 else 0.5)


@SAYS
def test_eager_steps_where_nothing_can_be_captured(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Nothing, capture=AUTO, validation=0)
    compare(eager, captured, replayed=False)
    statistics = captured.statistics
    assert statistics.replayed == 0
    whole, layer, nothing = statistics.fallbacks
    for reason in (whole, layer):
        assert "tolist" in reason
        assert "test_auto_scope.py:" in reason
    assert "`layer`" in layer
    assert nothing.startswith("steps run eagerly: no submodule could be captured. List ")
    assert_nothing_left(captured)


@pytest.mark.parametrize("module", [Nothing, Counted])
def test_raise_means_the_first_refusal(backend: str, tmp_path: Path, module: Any) -> None:
    """Also where graphs of submodules would have been possible."""
    capture = {**AUTO, "on_failure": "raise"}
    fit = prepare(backend, tmp_path, True, module=module, capture=capture, validation=0)
    with pytest.raises(
        CaptureError, match=r"(on the host|CUDA refuses)(?s:.*)test_auto_scope\.py:"
    ):
        fit.run()
    assert_nothing_left(fit)


class Stepwise(Net):
    """Its optimizer calls the training step several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.125, max_iter=3)


@SAYS
def test_an_optimizer_that_calls_the_step_itself(backend: str, tmp_path: Path) -> None:
    class Module(Stepwise):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))

    fits = fit_twice(
        backend, tmp_path, module=Module, capture=AUTO, data=lambda: batches(6), validation=0
    )
    compare(*fits, replayed=False)
    assert "LBFGS calls the training step several times" in fits[1].statistics.fallbacks[0]
    assert fits[1].statistics.replayed > 10


HIDDEN = Hidden()


class Counting(nn.Linear):
    """A capture records something else than eager code computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if is_current_stream_capturing() else 1.0)


class Scaled(nn.Linear):
    """Reads a number of which no capture knows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * HIDDEN["scale"]


def with_inner(wrong: type[nn.Linear], moves: int | None = None) -> Callable[[], Net]:
    class Deep(Net):
        """One layer, far inside, is not what a graph makes of it."""

        def __init__(self) -> None:
            super().__init__()
            HIDDEN.clear()
            inner = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), wrong(16, 16)))
            self.net = nn.Sequential(nn.Linear(8, 16), inner, nn.Linear(16, 3))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if moves is not None and self.global_step >= moves:
                HIDDEN["scale"] = 1 + self.global_step / 64

    return Deep


@SAYS
def test_submodules_where_the_whole_step_computes_something_else(
    backend: str, tmp_path: Path
) -> None:
    fit = prepare(backend, tmp_path, True, module=with_inner(Counting), capture=AUTO).run()
    statistics = fit.statistics
    assert statistics.modules == ["net.0", "net.1.0", "net.2"]
    assert statistics.replayed > 5
    assert {r.scope for r in statistics.graphs if r.replays} == {
        f"module {name}" for name in statistics.modules
    }
    whole, *modules = statistics.fallbacks
    assert whole.startswith(
        "cannot capture the whole step; capturing submodules instead: A replay must compute what"
    )
    names = ["net", "net.1", "net.1.1", "net.1.1.1"]
    for name, reason in zip(names, modules, strict=True):
        assert reason.startswith(f"`{name}` runs eagerly: ")
        assert f"output of `{name}` differs" in reason
    assert_nothing_left(fit)


@SAYS
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("scope", ["auto", "modules"])
def test_submodules_where_a_later_check_finds_a_difference(
    backend: str, tmp_path: Path, scope: str, every: int
) -> None:
    """The number moves at every step, from the 12th on: whatever holds it is wrong soon."""
    options: dict[str, Any] = {"module": with_inner(Scaled, 12), "data": lambda: batches(60)}
    options |= {"max_epochs": 1, "validation": 0}
    capture = {**AUTO, "scope": scope, "verify": every}
    eager, captured = fit_twice(backend, tmp_path, capture=capture, **options)
    if every == 1:  # no wrong step is taken
        compare(eager, captured, replayed=False)
    statistics = captured.statistics
    replays = {record.scope: record.replays for record in statistics.graphs}
    for name in ("net.0", "net.1.0", "net.2"):
        assert replays[f"module {name}"] > 20, replays
    for name in ("net", "net.1", "net.1.1", "net.1.1.1"):
        assert replays.get(f"module {name}", 0) < 10, replays
    assert not any("every few steps" in reason for reason in statistics.fallbacks)
    assert_nothing_left(captured)


if torch.cuda.is_available():

    @pytest.mark.gpu
    @SAYS
    def test_submodules_under_loss_scaling(tmp_path: Path) -> None:
        eager, captured = fit_twice(
            "cuda", tmp_path, module=Counted, capture=AUTO, precision="16-mixed"
        )
        compare(eager, captured, replayed=False)
        assert captured.statistics.replayed > 10
        scales = [
            float(one.trainer.precision_plugin.scaler.get_scale()) for one in (eager, captured)
        ]
        assert scales[0] == scales[1]


class Manual(Net):
    """Takes the steps of an optimizer with a hook by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_manual_steps_of_an_optimizer_that_is_not_captured(backend: str, tmp_path: Path) -> None:
    strict = {"scope": "auto", "on_failure": "raise"}
    for capture in (strict, AUTO, {**strict, "scope": "modules"}, {**strict, "modules": ["net"]}):
        eager, captured = fit_twice(backend, tmp_path, module=Manual, capture=capture)
        compare(eager, captured, replayed=False)
        assert captured.statistics.replayed > 0
