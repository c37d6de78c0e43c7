"""Python inside of graphed submodules: what it reads is watched, what it leaves is refused."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_graphs.regions.submodules import ModuleGraphs
from tests.training.fits import Net, adamw, batches, compare, fit_twice
from tests.training.modules.test_equal import named


class Gain(nn.Module):
    """A layer whose attributes and settings scale its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.25)
        self.gain = 1.0
        self.settings = {"shift": 0.0}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) * self.gain + self.settings["shift"]


class Gained(Net):
    layer: type[Gain] = Gain

    def __init__(self) -> None:
        super().__init__(adamw)
        self.net = self.layer()


class Change(Callback):
    """Changes an attribute at the beginning of the second epoch, or before every step."""

    def __init__(self, what: str, always: bool = False) -> None:
        self.what = what
        self.always = always

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.always and trainer.global_step != 10:
            return
        net = pl_module.net
        if self.what == "rate":
            net.dropout.p += 1 / 64
        elif self.what == "gain":
            net.gain += 1 / 64
        else:
            net.settings["shift"] += 1 / 64


NAMES = {
    "rate": "self.net.dropout.p: 0.25 -> 0.265625",
    "gain": "self.net.gain: 1.0 -> 1.015625",
    "setting": "self.net.settings['shift']: 0.0 -> 0.015625",
}


@pytest.mark.parametrize("what", NAMES)
def test_an_attribute_that_changes_gets_other_graphs(
    backend: str, tmp_path: Path, what: str
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Gained,
        capture={**named("net"), "validation": True},
        callbacks=lambda: [Change(what)],
        validation=4,
        max_epochs=3,
    )
    compare(eager, captured)
    assert captured.statistics.captures == 2
    assert captured.statistics.recaptures == [NAMES[what]]


@pytest.mark.parametrize("what", NAMES)
def test_an_attribute_that_moves_in_every_step_is_not_chased(
    backend: str, tmp_path: Path, what: str
) -> None:
    moved = re.escape(NAMES[what].partition(": ")[0])
    with pytest.warns(UserWarning, match=f"steps run eagerly: .* steps differ: {moved}: "):
        eager, captured = fit_twice(
            backend,
            tmp_path,
            module=Gained,
            capture={**named("net"), "validation": True},
            callbacks=lambda: [Change(what, always=True)],
            validation=4,
        )
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 1


class TakingTurns(Callback):
    """Two or three values take turns, a step each."""

    def __init__(self, gains: list[float]) -> None:
        self.gains = gains

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.net.gain = self.gains[batch_idx % len(self.gains)]


@pytest.mark.parametrize("gains", [[1.0, 1.5], [1.0, 1.5, 2.0], [1.0] * 5 + [2.0] * 5])
def test_values_that_take_turns_are_captured_once_each(
    backend: str, tmp_path: Path, gains: list[float]
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Gained,
        data=lambda: batches() * 4,
        capture=named("net"),
        callbacks=lambda: [TakingTurns(gains)],
    )
    compare(eager, captured)
    different = len(set(gains))
    assert captured.statistics.captures == different
    # Each value is seen twice, observed, and captured when it comes back.
    steps = captured.trainer.global_step
    assert captured.statistics.replayed >= steps - 3 - different * (3 + 2)


def test_a_value_that_is_seldom_there_is_not_chased(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Gained,
        data=lambda: batches() * 8,
        capture=named("net"),
        callbacks=lambda: [TakingTurns([1.0] * 15 + [2.0])],
        max_epochs=1,
    )
    compare(eager, captured)
    assert captured.statistics.captures <= 2


class Hooking(Callback):
    """A hook on a parameter comes and goes, at other steps than the value changes."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.net.gain = [1.0, 1.5, 2.0][batch_idx % 3]
        if batch_idx % 7 == 0:
            self.hook = pl_module.net.linear.weight.register_hook(lambda g: g * 0.5)
        elif batch_idx % 7 == 4:
            self.hook.remove()


class Precise(Callback):
    """The precision of products changes, at other steps than the value does."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.net.gain = [1.0, 1.5, 2.0][batch_idx % 3]
        torch.set_float32_matmul_precision("highest" if batch_idx % 5 < 3 else "high")


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_hooks_that_come_and_go_while_values_take_turns(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Gained,
        data=lambda: batches() * 6,
        capture={**named("net"), "on_failure": "eager"},
        callbacks=lambda: [Hooking()],
        max_epochs=1,
    )
    compare(eager, captured)


@pytest.mark.usefixtures("precision")
def test_a_step_is_captured_under_its_own_precision(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured_under: list[tuple[str, str]] = []
    original = ModuleGraphs.capture

    def noted(self: Any, call: Any, key: Any) -> Any:
        kernels = key[0].flags.kernels
        captured_under.append(
            (kernels.precision_of_float32_products, torch.get_float32_matmul_precision())
        )
        return original(self, call, key)

    monkeypatch.setattr(ModuleGraphs, "capture", noted)
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Gained,
        data=lambda: batches() * 6,
        capture=named("net"),
        callbacks=lambda: [Precise()],
        max_epochs=1,
    )
    compare(eager, captured)
    assert {under for _, under in captured_under} == {"highest", "high"}
    assert all(wanted == under for wanted, under in captured_under)


class Remembering(Gain):
    """Reads the last entry of a list that grows at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gains[-1]


class Grown(Gained):
    layer = Remembering

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(self.net, Remembering)
        self.net.gains.append(1.0 + batch_idx / 64)


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_list_that_grows_at_every_step_leaves_it_eager(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=Grown, data=lambda: batches() * 6, capture=named("net")
    )
    compare(eager, captured, replayed=False)
    assert any("self.net.gains" in line for line in captured.statistics.fallbacks)


class Counting(Gain):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Drawing(Gain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counting, "module's forward changes self.calls"),
        (Drawing, "draws from Python's random"),
    ],
)
def test_python_that_a_replay_would_leave_out(
    backend: str, tmp_path: Path, kind: type[Gain], reason: str
) -> None:
    class Module(Gained):
        layer = kind

    fits = fit_twice(
        backend,
        tmp_path,
        module=Module,
        capture={"scope": "modules", "on_failure": "eager"},
        data=lambda: batches(8),
    )
    compare(*fits, replayed=False)
    assert fits[0].module.net.calls == fits[1].module.net.calls
    assert reason in fits[1].statistics.fallbacks[0]
    assert fits[1].statistics.modules == ["net.linear"]


class Scaled(nn.Linear):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Setting(Net):
    """The step sets what its submodules read, before it calls them or between two calls."""

    when = 0  # of the two

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(8, 8) for _ in range(3))
        for block in self.blocks:
            block.gain = 1.0

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for i, block in enumerate(self.blocks):
            if i == self.when:
                self.blocks[self.when].gain = 1.0 + (self.trainer.global_step >= 12)
            x = block(x)
        return super().loss({**batch, "x": x})


class SettingBetween(Setting):
    when = 2


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("module", [Setting, SettingBetween])
def test_what_a_step_sets_before_a_call(
    backend: str, tmp_path: Path, module: Any, verify: bool
) -> None:
    capture = {**named("blocks.*"), "verify": verify}
    eager, captured = fit_twice(
        backend, tmp_path, module=module, capture=capture, data=lambda: batches(40), max_epochs=1
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.recaptures == [f"self.blocks.{module.when}.gain: 1.0 -> 2.0"]
    assert captured.statistics.replayed > 20


class TakingASparseOne(nn.Linear):
    def forward(self, x: Tensor, sparse: Tensor) -> Tensor:
        return super().forward(x) + sparse.sum()


class GivenASparseOne(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = TakingASparseOne(8, 8)

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch["x"], torch.eye(3, device=self.device).to_sparse())
        return super().loss({**batch, "x": x})


def test_a_sparse_argument_is_refused_by_name(backend: str, tmp_path: Path) -> None:
    capture = {**named("first", "net"), "on_failure": "eager"}
    with pytest.warns(UserWarning, match=r"a tensor of layout torch.sparse_coo as args\[1\]"):
        fits = fit_twice(backend, tmp_path, module=GivenASparseOne, capture=capture)
    compare(*fits, replayed=False)
    assert fits[1].statistics.modules == ["net"]


class Growing(Net):
    """A submodule is added after the step that was observed, before its capture."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 6:
            self.net.append(nn.Identity())


@pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly")
def test_a_submodule_that_is_added_before_the_capture(backend: str, tmp_path: Path) -> None:
    capture = {**named("net"), "on_failure": "eager"}
    with pytest.warns(UserWarning, match="submodules were added or removed in between"):
        fits = fit_twice(backend, tmp_path, module=Growing, capture=capture, validation=0)
    compare(*fits, replayed=False)


TABLE = torch.ones(3)


class ReadingATable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE.to(x.device)


class WithATable(Net):
    """A hook puts another tensor in the place of a global one, which then is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), ReadingATable(16, 3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global TABLE
        if self.trainer.global_step in (0, 10):
            TABLE = torch.full((3,), 1.0 + self.trainer.global_step / 8, device=self.device)


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_another_tensor_in_a_global_gets_another_graph(
    backend: str, tmp_path: Path, scope: str
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=WithATable, capture={"scope": scope, "verify": False}
    )
    compare(eager, captured)
    assert [line.partition(":")[0] for line in captured.statistics.recaptures] == ["TABLE"]


class Attending(nn.Module):
    """Scaled dot-product attention of samples to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x)[None, None].chunk(3, dim=-1)
        found: Tensor = nn.functional.scaled_dot_product_attention(query, key, value)[0, 0]
        return found


class Choosing(Net):
    """Asks for a kernel of attention, for one of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attending(), Attending()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            hidden = self.first(batch["x"])
        return super().training_step({**batch, "x": self.second(hidden)}, batch_idx)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["step", "modules"])
def test_a_kernel_that_the_step_asks_for(backend: str, tmp_path: Path, scope: str) -> None:
    capture = named("first", "second", on_failure="eager") if scope == "modules" else {}
    eager, captured = fit_twice(backend, tmp_path, module=Choosing, capture=capture)
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0
    if scope == "modules":
        assert captured.statistics.modules == ["second"]
        (said,) = captured.statistics.fallbacks
        assert "`first` is not graphed: it is made under switches" in said
        assert "kernels of attention" in said


class Reading(nn.Module):
    """Computes with a switch, so that everybody sees which one a graph was captured under."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if torch.backends.cuda.math_sdp_enabled() else 2.0
        factor += torch.get_default_dtype().itemsize
        hidden: Tensor = self.linear(x) * factor
        return hidden


class Switching(Net):
    """Sets switches around a block from some batch on, with autograd and without."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Reading()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = torch.get_default_dtype()
        late = batch_idx >= 7
        torch.set_default_dtype(torch.float64 if batch_idx in (6, 8) else before)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if late else nullcontext():
                with torch.no_grad():
                    target = self.block(batch["x"])
                x = self.block(batch["x"]) + target
        finally:
            torch.set_default_dtype(before)
        return super().training_step({**batch, "x": x}, batch_idx)


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_switches_that_a_later_step_sets(backend: str, tmp_path: Path) -> None:
    capture = named("block", "net", on_failure="eager", verify=False)
    eager, captured = fit_twice(backend, tmp_path, module=Switching, capture=capture)
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0
    assert captured.statistics.modules == ["block", "net"]
