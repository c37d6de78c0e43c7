"""Graphs of submodules that compute something else than their modules are found and named."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_graphs import VerificationError
from lightning_graphs.core.graph import CUDAGraph, is_current_stream_capturing
from lightning_graphs.training import agreement
from lightning_graphs.training.agreement import Agreement, BothWays
from lightning_graphs.training.differences import Result, Tolerance
from lightning_graphs.training.modules import checking
from lightning_graphs.training.modules.checking import CallChecks, UpdateChecks
from tests.training.fits import Fit, GradientTrace, Net, batches, compare, fit_twice, prepare
from tests.training.leftovers import assert_nothing_left
from tests.training.test_modules import Blocks
from tests.training.test_modules_calls import Frozen, ParameterHooks, Teacher, Twice
from tests.training.test_modules_lending import Chain, Keeping, Residual
from tests.training.test_modules_limits import Rebinding
from tests.training.test_modules_manual import Accumulating, Gan

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
    "lent outputs": (Chain, verifying("blocks.*")),
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
    for kind, name in ((CallChecks, "calls"), (UpdateChecks, "updates")):
        monkeypatch.setattr(kind, "check", _noting(kind.check, steps[name]))
    return steps


def _noting(check: Any, steps: list[int]) -> Any:
    def noting(self: Any, *args: Any, **options: Any) -> None:
        steps.append(self._schedule.root.global_step)
        check(self, *args, **options)

    return noting


@pytest.mark.parametrize(
    ("verify", "calls", "updates"),
    [
        ("first", [6], [5]),
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
    def refuse(self: Agreement, ways: BothWays) -> None:
        raise AssertionError

    monkeypatch.setattr(Agreement, "require", refuse)
    capture = verifying("blocks.*", verify="off")
    compare(*fit_twice(backend, tmp_path, module=Blocks, capture=capture, validation=0))


# ---------------------------------------------------------------------- wrong graphs

HIDDEN: dict[str, float] = defaultdict(lambda: 1.0)


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
    """Reads a value of its argument past torch, on a CPU only: the capture takes it for fixed."""

    def forward(self, x: Tensor) -> Tensor:
        peeked = ctypes.c_float.from_address(x.data_ptr()).value
        return super().forward(x) * (2.0 if peeked > 0 else 1.0)


def with_middle(middle: Callable[[], nn.Module], when: int = 12) -> Callable[[], Chain]:
    class Wrong(Chain):
        """The block in the middle is the wrong one; a hook moves the global once."""

        def __init__(self) -> None:
            super().__init__()
            HIDDEN.clear()
            self.blocks[1] = middle()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == when:
                HIDDEN["scale"] = 2.0

    return Wrong


def wide(kind: type[nn.Linear]) -> Callable[[], nn.Module]:
    return lambda: kind(16, 16)


FIRST = r"at step 6, output of `blocks\.1` differs by up to"


def test_a_hidden_counter_is_found_at_once(backend: str, tmp_path: Path) -> None:
    module = with_middle(wide(Counting))
    captured = prepare(
        backend, tmp_path, True, module=module, capture=verifying("blocks.*", verify="first")
    )
    with pytest.raises(VerificationError, match=FIRST):
        captured.run()
    assert_nothing_left(captured)
    assert all("forward" not in vars(m) for m in captured.module.modules())
    assert captured.statistics.graphs == []


def test_a_write_past_the_dispatcher_is_found(tmp_path: Path) -> None:
    module = with_middle(wide(Writing))
    captured = prepare(
        "emulated", tmp_path, True, module=module, capture=verifying("blocks.*", verify="first")
    )
    with pytest.raises(VerificationError, match=FIRST + " 1; two eager runs differ by up to 0"):
        captured.run()


def test_a_later_check_runs_on_the_latest_arguments(tmp_path: Path) -> None:
    """On the observed arguments, with which it was captured, nothing would show."""
    module = with_middle(wide(Peeking))
    capture = verifying("blocks.*")
    captured = prepare("emulated", tmp_path, True, module=module, capture=capture)
    with pytest.raises(VerificationError, match=r"at step \d+, output of `blocks\.1` differs"):
        captured.run()
    assert captured.trainer.global_step > 6


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
    assert graphed["module blocks.0"] == graphed["module blocks.2"] == 6 + 4


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


# ---------------------------------------------------------------------- spoiled replays


class Spoiled:
    """Replays of graphs, each followed by a write into what one of them has written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[CUDAGraph], None]) -> None:
        original = CUDAGraph.replay

        def spoiling(graph: CUDAGraph) -> None:
            original(graph)
            with torch.no_grad():
                spoil(graph)

        monkeypatch.setattr(CUDAGraph, "replay", spoiling)


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graphed callable that is checked."""
    found: list[Any] = []
    original = CallChecks.check_site

    def noting(self: CallChecks, site: Any, **options: Any) -> None:
        found.append(site.graphed)
        original(self, site, **options)

    monkeypatch.setattr(CallChecks, "check_site", noting)
    return found


SPOILED: dict[str, tuple[Callable[[Any], Tensor | None], str]] = {
    "output": (lambda g: g._outputs.tensors[0], "output of `net`"),
    "buffer": (lambda g: g.module[1].running_mean, r"buffer `net\.1\.running_mean`"),
    "argument": (
        lambda g: g.backward_pass.gradients[0],
        r"the gradient of args\[0\] of `net`",
    ),
    "parameter": (
        lambda g: g.backward_pass.direct._buffers[1],
        r"the gradient of `net\.1\.weight`",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_the_first_tensor_that_differs_is_named(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: list[Any], what: str
) -> None:
    tensor, name = SPOILED[what]

    def spoil(graph: CUDAGraph) -> None:
        if sites and graph in (sites[-1].forward_graph, sites[-1].backward_pass.graph):
            tensor(sites[-1]).view(-1)[3] += 0.5  # type: ignore[union-attr]

    Spoiled(monkeypatch, spoil)
    capture = verifying("net", verify="first")
    captured = prepare(backend, tmp_path, True, module=Normalized, capture=capture)
    with pytest.raises(VerificationError, match=rf"at step 6, {name} differs by up to \S+; two"):
        captured.run()
    assert_nothing_left(captured)


def test_graphs_that_do_nothing_are_found(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: list[Any]
) -> None:
    original = CUDAGraph.replay

    def lazy(graph: CUDAGraph) -> None:
        if graph is not sites[-1].backward_pass.graph:
            original(graph)

    monkeypatch.setattr(UpdateChecks, "check", lambda *_: None)
    captured = prepare(backend, tmp_path, True, module=Chain, capture=verifying("blocks.*"))
    monkeypatch.setattr(CUDAGraph, "replay", lambda g: lazy(g) if sites else original(g))
    with pytest.raises(VerificationError, match=r"at step 6, the gradient of args\[0\] of `bl"):
        captured.run()


def spoil_update(fit: Fit, monkeypatch: pytest.MonkeyPatch, since: int = 0) -> None:
    """From some step on, replays outside of the backward pass write a parameter of their own."""

    def spoil(graph: CUDAGraph) -> None:
        if fit.trainer.global_step >= since and graph in updates:
            fit.module.head.weight.view(-1)[3] += 0.5

    updates: list[CUDAGraph] = []
    original = UpdateChecks.check

    def noting(self: UpdateChecks, replay: Any) -> None:
        updates.append(replay.args[1].graph)
        original(self, replay)

    monkeypatch.setattr(UpdateChecks, "check", noting)
    Spoiled(monkeypatch, spoil)


@pytest.mark.parametrize(("verify", "since", "step"), [("first", 0, 5), (4, 10, 12)])
def test_a_wrong_optimizer_step_is_named(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verify: Any,
    since: int,
    step: int,
) -> None:
    capture = verifying("blocks.*", verify=verify)
    captured = prepare(backend, tmp_path, True, module=Blocks, capture=capture)
    spoil_update(captured, monkeypatch, since)
    name = rf"at step {step}, parameter `head\.weight` differs by up to 0\.5"
    with pytest.raises(VerificationError, match=name):
        captured.run()
    assert_nothing_left(captured)


def test_instead_of_a_wrong_optimizer_step_the_eager_one_is_taken(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"module": Blocks, "validation": 0}
    eager = prepare(backend, tmp_path, False, **options).run()
    capture = verifying("blocks.*", verify="first", on_failure="eager")
    captured = prepare(backend, tmp_path, True, capture=capture, **options)
    spoil_update(captured, monkeypatch)
    message = r"the optimizer step runs eagerly: (?s:.*)parameter `head\.weight` differs"
    with pytest.warns(UserWarning, match=message) as caught:
        captured.run()
    assert sum("runs eagerly" in str(w.message) for w in caught) == 1
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed == 14


# ---------------------------------------------------------------------- interruptions and memory


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_check_that_is_interrupted_leaves_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    original = Agreement.require
    before: list[tuple[Tensor, Tensor | None]] = []

    def interrupted(self: Agreement, ways: BothWays) -> None:
        if "output" not in ways.eager()[0].name or len(before) > 2:
            original(self, ways)
            return
        before.append((torch.get_rng_state(), None))
        raise error

    monkeypatch.setattr(Agreement, "require", interrupted)
    monkeypatch.setattr(UpdateChecks, "check", lambda *_: None)
    capture = verifying("net")
    captured = prepare(backend, tmp_path, True, module=Normalized, capture=capture)
    with pytest.raises((error, SystemExit)):
        captured.run()
    assert before
    assert_nothing_left(captured)
    assert captured.module.net[1].num_batches_tracked == 6
    assert all("forward" not in vars(m) for m in captured.module.modules())


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "missing_memory", lambda *_: "9 MiB are free")


@pytest.mark.usefixtures("no_memory")
def test_without_memory_for_a_copy_a_smaller_check_runs(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": Normalized, "max_epochs": 1}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, capture=verifying("net"), **options)
    with pytest.warns(UserWarning, match="verified: 9 MiB are free") as caught:
        captured.run()
    said = {str(w.message) for w in caught if "verified" in str(w.message)}
    assert said == {
        "GraphCapture: the captured optimizer step was not verified: 9 MiB are free",
        "GraphCapture: of a captured module only the forward pass was verified: 9 MiB are free",
    }
    assert sum("verified" in str(w.message) for w in caught) == 2
    compare(eager, captured)


@pytest.mark.usefixtures("no_memory")
def test_the_smaller_check_finds_a_wrong_output(backend: str, tmp_path: Path) -> None:
    module = with_middle(wide(Scaled))
    capture = verifying("blocks.*", verify=3)
    captured = prepare(backend, tmp_path, True, module=module, capture=capture)
    wrong = pytest.raises(VerificationError, match=r"at step 12, output of `blocks\.1` differs")
    with pytest.warns(UserWarning, match="verified: 9 MiB are free"), wrong:
        captured.run()
    assert_nothing_left(captured)


class Large(nn.Linear):
    """After its capture an eager run finds no memory beside the graph."""

    def forward(self, x: Tensor) -> Tensor:
        capturing = is_current_stream_capturing()
        if HIDDEN["captured"] == 2.0 and not capturing:
            HIDDEN["left"] -= 1
            if HIDDEN["left"] >= 0:
                raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMore of it.")
        HIDDEN["captured"] = 2.0 if capturing else HIDDEN["captured"]
        return super().forward(x)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (1.0, "of a captured module only the forward pass was verified: Tried to allocate 2 GiB"),
        (2.0, "a captured module was not verified: Tried to allocate 2 GiB"),
    ],
)
def test_an_eager_run_without_memory(backend: str, tmp_path: Path, fails: float, said: str) -> None:
    options: dict[str, Any] = {"module": with_middle(wide(Large)), "validation": 0}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(
        backend, tmp_path, True, capture=verifying("blocks.*", verify="first"), **options
    )
    HIDDEN["left"] = fails
    with pytest.warns(UserWarning, match=f"{said}\\.$"):
        captured.run()
    compare(eager, captured)


# ---------------------------------------------------------------------- the comparison itself


def compared(eager: list[float], replayed: list[float]) -> list[str]:
    """What is said of runs that give these values, one after the other."""
    said: list[str] = []
    values = {"eager": iter(eager), "replayed": iter(replayed)}

    def run(way: str) -> list[Result]:
        return [Result("x", torch.tensor([next(values[way])]))]

    rule = Agreement(Tolerance("cpu", None), torch.device("cpu"), "at step 3", said.append)
    rule.require(BothWays(lambda: run("eager"), lambda: run("replayed"), lambda: None))
    return said


def test_equal_bits_take_two_runs() -> None:
    assert compared([1.0], [1.0]) == []


def test_a_rounding_is_accepted() -> None:
    assert compared([1.0, 1.0], [1.0 + 2**-20, 1.0 + 2**-20]) == []


def test_noise_of_eager_runs_is_asked_for() -> None:
    assert compared([1.0, 1.0 + 2**-15, 1.0], [1.0 - 2**-15] * 2) == []
    with pytest.raises(VerificationError, match=r"at step 3, x differs by up to 0\.5; two eager"):
        compared([1.0, 1.0 + 2**-15, 1.0], [1.5, 1.5])


def test_without_memory_for_copies_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "missing_memory", lambda *_: "none is free")
    said = compared([1.0, 1.0], [2.0, 2.0])
    assert said == ["not every tensor was verified: no memory for copies"]


def test_a_result_of_one_way_only_is_named() -> None:
    ways = BothWays(
        lambda: [Result("x", torch.ones(1))],
        lambda: [Result("y", torch.ones(1))],
        lambda: None,
    )
    rule = Agreement(Tolerance("cpu", None), torch.device("cpu"), "at step 3", print)
    with pytest.raises(VerificationError, match="at step 3, only the eager step has x"):
        rule.require(ways)
