"""Graphs of submodules that compute something else than their modules are found and named."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_graphs import VerificationError
from lightning_graphs.regions.submodules import CallChecks
from lightning_graphs.regions.verify import Comparison, Verification, Verifier
from tests.training.fits import (
    GradientTrace,
    Hidden,
    Net,
    assert_nothing_left,
    batches,
    compare,
    fit_twice,
    prepare,
    warned,
)
from tests.training.modules.test_aliasing import Chain, Keeping, Residual
from tests.training.modules.test_calls import Frozen, ParameterHooks, Teacher, Twice
from tests.training.modules.test_equal import Blocks
from tests.training.modules.test_limits import Rebinding
from tests.training.modules.test_manual import Accumulating, Gan

ALL = ["net", "blocks.*", "head"]


def verifying(*modules: str, verify: Any = 1, **options: Any) -> dict[str, Any]:
    return {"scope": "modules", "modules": list(modules), "verify": verify, **options}


# ---------------------------------------------------------------------- right graphs


class Normalized(Net):
    """A graphed block with buffers, whose input requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.first(batch["x"])).float(), batch["y"])


RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocks": (Blocks, verifying(*ALL)),
    "own choice": (Blocks, {"scope": "modules", "verify": 1}),
    "buffers": (Normalized, verifying("first", "net")),
    "aliased outputs": (Chain, verifying("blocks.*")),
    "outputs used twice": (Residual, verifying("blocks.*")),
    "outputs that are kept": (Keeping, verifying("blocks.*")),
    "hooks on parameters": (ParameterHooks, verifying("blocks.*")),
    "frozen parts": (Frozen, verifying("net", "blocks.*")),
    "without autograd": (Teacher, verifying("blocks.0", "blocks.1")),
    "two optimizers": (Gan, verifying("generator", "critic")),
    "accumulation by hand": (Accumulating, verifying("generator", "critic")),
}


@pytest.mark.parametrize("case", RIGHT)
def test_verifying_every_step_changes_nothing(backend: str, tmp_path: Path, case: str) -> None:
    module, capture = RIGHT[case]
    fits = fit_twice(backend, tmp_path, module=module, capture=capture, max_epochs=1,
                     data=lambda: batches(12))  # fmt: skip
    compare(*fits)
    assert_nothing_left(fits[1])


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.25},
        {"trace": GradientTrace, "gradient_clip_val": 0.25},
        {"precision": "bf16-mixed"},
    ],
)
def test_verifying_every_step_of_other_fits(backend: str, tmp_path: Path, options: Any) -> None:
    capture = verifying(*ALL)
    compare(*fit_twice(backend, tmp_path, module=Blocks, capture=capture, **options))


def test_calls_of_one_module_before_one_backward(backend: str, tmp_path: Path) -> None:
    capture = verifying("blocks.0", "blocks.1")
    eager, captured = fit_twice(backend, tmp_path, module=Twice, capture=capture, max_epochs=1)
    compare(eager, captured, tolerance=1e-5)


def test_hooks_on_parameters_run_as_often_as_ever(backend: str, tmp_path: Path) -> None:
    class Hooked(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.blocks[1][0].weight.register_hook(lambda g: self.seen.append(g.detach().clone()))

    capture = verifying("blocks.*")
    eager, captured = fit_twice(
        backend, tmp_path, module=Hooked, capture=capture, data=lambda: batches(12), max_epochs=1
    )
    compare(eager, captured)
    assert len(captured.module.seen) == len(eager.module.seen) == 12
    for mine, theirs in zip(captured.module.seen, eager.module.seen, strict=True):
        assert torch.equal(mine, theirs)


def test_memory_that_moves_is_no_mismatch(backend: str, tmp_path: Path) -> None:
    capture = verifying("blocks.*")
    fits = fit_twice(
        backend, tmp_path, module=Blocks, capture=capture, callbacks=lambda: [Rebinding()]
    )
    compare(*fits)
    moved = "a parameter or buffer of a graphed module has changed its memory"
    assert fits[1].statistics.recaptures.count(moved) == 1


def test_a_gradient_scaler_skips_as_ever(
    backend: str, device: torch.device, tmp_path: Path
) -> None:
    class Overflowing(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * batch["factor"]

    data = batches(12)
    for i, batch in enumerate(data):
        batch["factor"] = torch.tensor(float("inf") if i % 5 == 3 else 1.0)
    fits = []
    for captured in (False, True):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=5)
        plugin = MixedPrecision("16-mixed", device.type, scaler)
        options: dict[str, Any] = {"module": Overflowing, "data": lambda: data}
        options |= {"capture": verifying("blocks.*"), "max_epochs": 1, "plugins": [plugin]}
        fits.append(prepare(backend, tmp_path, captured, **options).run())
    compare(*fits)
    scalers = [one.trainer.precision_plugin.scaler.state_dict() for one in fits]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] < 2.0**10


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """``global_step`` of each check: of the calls of a step, and of optimizer steps."""
    steps: dict[str, list[int]] = {"calls": [], "updates": []}
    calls = _noting(CallChecks.check, steps["calls"])
    monkeypatch.setattr(CallChecks, "check", calls)
    updates = _noting(Verification.check_update, steps["updates"])
    monkeypatch.setattr(Verification, "check_update", updates)
    return steps


def _noting(check: Any, steps: list[int]) -> Any:
    def noting(self: Any, *args: Any, **options: Any) -> Any:
        steps.append(self._verifier.step())
        return check(self, *args, **options)

    return noting


@pytest.mark.parametrize(
    ("verify", "calls", "updates"),
    [
        (True, [6], [5]),
        (1, list(range(6, 20)), list(range(5, 20))),
        (4, [6, 8, 12, 16], [5, 8, 12, 16]),
    ],
)
def test_which_steps_are_verified(
    backend: str,
    tmp_path: Path,
    checks: dict[str, list[int]],
    verify: Any,
    calls: list[int],
    updates: list[int],
) -> None:
    capture = verifying("blocks.*", verify=verify)
    compare(*fit_twice(backend, tmp_path, module=Blocks, capture=capture, validation=0))
    assert checks == {"calls": calls, "updates": updates}


def test_switched_off_nothing_runs_twice(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Verifier, ways: Comparison, *_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Verifier, "compare", refuse)
    capture = verifying("blocks.*", verify=False)
    compare(*fit_twice(backend, tmp_path, module=Blocks, capture=capture, validation=0))


# ---------------------------------------------------------------------- wrong graphs

HIDDEN = Hidden()


@pytest.fixture(autouse=True)
def _nothing_hidden() -> Iterator[None]:
    HIDDEN.clear()
    yield
    HIDDEN.clear()


class Counting(nn.Linear):
    """Each run of its Python computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        HIDDEN["calls"] += 1
        return super().forward(x) * HIDDEN["calls"]


class Scaled(nn.Linear):
    """Reads a global, which no capture knows of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * HIDDEN["scale"]


class Writing(nn.Linear):
    """numpy writes into the memory of a tensor, and no capture sees it; on a CPU only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        memory = np.frombuffer((ctypes.c_float * 1).from_address(y.data_ptr()), "float32")
        memory += 1
        return y


class Peeking(nn.Linear):
    """Reads its argument past torch, on a CPU only: a capture takes the values for fixed."""

    def forward(self, x: Tensor) -> Tensor:
        peeked = sum((ctypes.c_float * x.numel()).from_address(x.data_ptr()))
        return super().forward(x) * (1.0 + int(peeked * 64) % 4)


class Overwriting(nn.Linear):
    """Writes its argument so that autograd does not notice."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(0.5)
        return super().forward(x)


def with_middle(middle: Callable[[], nn.Module]) -> Callable[[], Chain]:
    class Wrong(Chain):
        """The block in the middle is the wrong one; a hook moves the global once."""

        def __init__(self) -> None:
            super().__init__()
            HIDDEN.clear()
            self.blocks[1] = middle()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 12:
                HIDDEN["scale"] = 2.0

    return Wrong


def wide(kind: type[nn.Linear]) -> Callable[[], nn.Module]:
    return lambda: kind(16, 16)


FIRST = r"at step 6, output of `blocks\.1` differs by up to"


def test_a_hidden_counter_is_found_at_once(backend: str, tmp_path: Path) -> None:
    module = with_middle(wide(Counting))
    captured = prepare(
        backend, tmp_path, True, module=module, capture=verifying("blocks.*", verify=True)
    )
    with pytest.raises(VerificationError, match=FIRST):
        captured.run()
    assert_nothing_left(captured)
    assert all("forward" not in vars(m) for m in captured.module.modules())
    assert captured.statistics.graphs == []


def test_an_argument_that_is_written_unseen_is_found(backend: str, tmp_path: Path) -> None:
    capture = verifying("blocks.*", verify=True, on_failure="eager")
    _, captured = warned(
        backend,
        tmp_path,
        r"args\[0\] of `blocks\.1` after the call differs",
        capture=capture,
        module=with_middle(wide(Overwriting)),
        validation=0,
    )
    assert set(captured.statistics.modules) == {"blocks.0", "blocks.2"}


def test_a_write_past_the_dispatcher_is_found(tmp_path: Path) -> None:
    module = with_middle(wide(Writing))
    captured = prepare(
        "emulated", tmp_path, True, module=module, capture=verifying("blocks.*", verify=True)
    )
    with pytest.raises(VerificationError, match=FIRST + " 1; two eager runs differ by up to 0"):
        captured.run()


def test_a_later_check_runs_on_the_latest_arguments(tmp_path: Path) -> None:
    """On the observed arguments, with which it was captured, nothing would show."""
    module = with_middle(wide(Peeking))
    capture = verifying("blocks.1")  # by itself: it reads no memory of another graph
    captured = prepare("emulated", tmp_path, True, module=module, capture=capture)
    with pytest.raises(VerificationError, match=r"at step \d+, output of `blocks\.1` differs"):
        captured.run()
    assert captured.trainer.global_step > 6  # where the observed arguments were right


@pytest.mark.parametrize("choice", [["blocks.*"], None])
def test_a_wrong_module_is_left_out(backend: str, tmp_path: Path, choice: list[str] | None) -> None:
    options: dict[str, Any] = {"module": with_middle(wide(Scaled)), "validation": 0}
    capture = {"scope": "modules", "modules": choice, "verify": 3, "on_failure": "eager"}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, capture=capture, **options)
    with pytest.warns(UserWarning, match=r"`blocks\.1` runs eagerly: (?s:.*)at step 12") as caught:
        captured.run()
    assert sum("runs eagerly" in str(w.message) for w in caught) == 1
    compare(eager, captured, replayed=False)
    statistics = captured.statistics
    assert statistics.recaptures == ["`blocks.1` is no longer graphed"]
    graphed = {r.scope: r.replays for r in statistics.graphs}
    assert graphed["module blocks.1"] == 6
    assert graphed["module blocks.0"] == graphed["module blocks.2"] == 6 + 5


@pytest.mark.parametrize("inner", [False, True])
def test_a_module_that_is_wrong_from_the_start_is_left_out(
    backend: str, tmp_path: Path, inner: bool
) -> None:
    """Of one that was chosen unasked, the modules inside take its place."""
    plain, chosen = wide(Counting), ["blocks.*"]
    module = with_middle(lambda: nn.Sequential(nn.Linear(16, 16), plain()) if inner else plain())
    capture = {"scope": "modules", "modules": None if inner else chosen, "on_failure": "eager"}
    captured = prepare(backend, tmp_path, True, module=module, capture=capture, validation=0)
    with pytest.warns(UserWarning, match="runs eagerly") as caught:
        captured.run()
    wrong = ["blocks.1", "blocks.1.1"] if inner else ["blocks.1"]
    said = [str(w.message) for w in caught if "runs eagerly" in str(w.message)]
    assert len(said) == len(wrong)
    for name, line in zip(wrong, said, strict=True):
        assert f"`{name}` runs eagerly" in line
        assert f"output of `{name}` differs" in line
    assert captured.statistics.captures == 1
    assert not set(wrong) & set(captured.statistics.modules)
    assert ("blocks.1.0" in captured.statistics.modules) is inner
    assert {"blocks.0", "blocks.2"} <= set(captured.statistics.modules)


class WrongTeacher(Teacher):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].outer = Counting(32, 16)


def test_calls_without_autograd_are_verified_too(backend: str, tmp_path: Path) -> None:
    name = r"output\[\"hidden\"\]\[0\] of `blocks\.0` differs"
    options: dict[str, Any] = {"module": WrongTeacher}
    raising = prepare(backend, tmp_path, True, capture=verifying("blocks.0"), **options)
    with pytest.raises(VerificationError, match=name):
        raising.run()
    assert_nothing_left(raising)
    capture = verifying("blocks.0", on_failure="eager")
    going_on = prepare(backend, tmp_path, True, capture=capture, **options)
    with pytest.warns(UserWarning, match=f"without autograd: (?s:.*){name}"):
        going_on.run()
    assert all(record.replays == 0 for record in going_on.statistics.graphs)
