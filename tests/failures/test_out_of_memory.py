"""Out of memory at any allocation of a step that is ours: the fit ends as it does without us."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_graphs.device.emulated import EmulatedGraph
from lightning_graphs.device.graph import is_current_stream_capturing
from lightning_graphs.lightning import runner
from lightning_graphs.lightning.strategy import NAMES
from lightning_graphs.policy import worth as timing
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.private.exchange import bind, bound
from lightning_graphs.regions import recovery as retry
from lightning_graphs.regions import update
from lightning_graphs.regions.optimizer import CapturableOptimizer
from lightning_graphs.values.memory import OutputPlan
from tests.failures.support import forwards_are_their_own
from tests.pools import SharedPools
from tests.training.fits import Fit, Net, adamw, assert_nothing_left, batches, compare, prepare

pytestmark = pytest.mark.filterwarnings("ignore:GraphCapture")
SAMPLES = 12 if torch.cuda.is_available() else 6
"""Fits of each case, at allocations that are spread over all of them."""


class Allocations(TorchDispatchMode):
    """Counts the operators that take memory, and lets one of them find none.

    Attributes:
        count: How many there were.
        counts: Whether they are counted at present.
    """

    def __init__(self, failing: int | None) -> None:
        super().__init__()
        self.count = 0
        self.counts = False
        self._failing = failing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counts and _storages(result) - _storages((args, kwargs)):
            self.count += 1
            if self.count - 1 == self._failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return result

    @contextlib.contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        before, self.counts = self.counts, counts
        try:
            yield
        finally:
            self.counts = before


def _storages(tree: Any) -> set[int]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {t.untyped_storage()._cdata for t in tensors if t.numel()}


class Shortage(Callback):
    """Runs some steps where memory is short, in the three methods of the strategy.

    What Lightning and hooks allocate between them is theirs.
    """

    def __init__(self, steps: range, failing: int | None = None) -> None:
        self.allocations = Allocations(failing)
        self._steps = steps
        self._open = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx in self._steps:
            self._open.enter_context(self.allocations)
            for name in NAMES:
                self._watch(trainer.strategy, name)

    def _watch(self, strategy: Any, name: str) -> None:
        own, counting = getattr(strategy, name), self.allocations.counting
        before = bound(vars(strategy), name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "optimizer_step":
                optimizer, closure, *rest = args
                args = (optimizer, uncounted(closure), *rest)
            with counting(True):
                return own(*args, **kwargs)

        def uncounted(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                with counting(False):
                    return closure()

            return call

        def unwatch() -> None:
            if vars(strategy).get(name) is watched:
                bind(vars(strategy), name, before)

        vars(strategy)[name] = watched
        self._open.callback(unwatch)

    def on_train_batch_end(self, *_: Any) -> None:
        self._open.close()

    def on_exception(self, *_: Any) -> None:
        self._open.close()


@pytest.fixture(autouse=True)
def _replays_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a replay dispatches nothing; here its operators do."""
    own = EmulatedGraph.replay

    def replay(graph: EmulatedGraph) -> None:
        modes = [m for m in _modes() if isinstance(m, Allocations)]
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode.counting(False))
            own(graph)

    monkeypatch.setattr(EmulatedGraph, "replay", replay)
    # The closures of these tests are wrapped to count what Lightning's own allocates.
    monkeypatch.setattr(runner, "is_lightnings_closure", lambda _: True)


def _modes() -> list[Any]:
    from lightning_graphs.private.exchange import dispatch_modes

    return dispatch_modes()


class Logging(Net):
    """Has state of every kind that a step changes before it may find no memory."""

    def __init__(self, optimizers: Any = adamw) -> None:
        super().__init__(optimizers)
        self.mean = torchmetrics.MeanMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.loose = torch.zeros(())

    def on_train_start(self) -> None:
        self.loose = self.loose.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        self.loose += 1
        self.log("input", batch["x"].abs().mean(), on_step=True, on_epoch=True)
        self.mean(batch["x"].mean())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "twice": loss * 2}


class Parts(Logging):
    """Submodules only can be graphs; what is between them draws, counts and reads on the host."""

    def __init__(self, optimizers: Any = adamw) -> None:
        super().__init__(optimizers)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU())
        self.head = nn.Sequential(nn.Dropout(0.25), nn.Linear(16, 3))
        self.steps = 0

    def loss(self, batch: Any) -> Tensor:
        self.steps += self.training
        hidden = self.net(batch["x"]) * (1 + torch.rand(()).item() * random.random())
        loss = nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])
        return loss * 2 if loss.tolist() > 0.5 else loss


class Manual(Parts):
    """The same with manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)["loss"]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def rmsprop(module: LightningModule) -> torch.optim.Optimizer:
    """Its step takes memory, and is none of a graph on a CPU."""
    return torch.optim.RMSprop(module.parameters(), lr=2**-7)


STEP: dict[str, Any] = {"scope": "step", "warmup_steps": 1, "min_repeats": 0}
MODULES = {**STEP, "scope": "modules"}
# The steps: 0 warms up; a whole step is captured, verified and replayed in 1, submodules are
# observed in 1 and the rest follows in 2. The last of six is another shape.
CASES: dict[str, tuple[type[LightningModule], dict[str, Any], range, dict[str, Any]]] = {
    "step": (Logging, STEP, range(1, 2), {}),
    # The first window makes the state of the optimizer.
    "step, accumulated": (Logging, STEP, range(2, 4), {"accumulate_grad_batches": 2}),
    "step, eager optimizer": (lambda: Logging(rmsprop), STEP, range(1, 2), {}),  # type: ignore[dict-item]
    "step, another shape": (Logging, {**STEP, "min_repeats": 1}, range(5, 6), {}),
    "step, another shape, accumulated": (
        Logging,
        {**STEP, "min_repeats": 1},
        range(5, 6),
        {"accumulate_grad_batches": 3},
    ),
    "modules": (Parts, MODULES, range(1, 3), {}),
    "modules, accumulated": (Parts, MODULES, range(1, 3), {"accumulate_grad_batches": 2}),
    "modules, eager optimizer": (lambda: Parts(rmsprop), MODULES, range(1, 3), {}),  # type: ignore[dict-item]
    "modules, another shape": (Parts, {**MODULES, "min_repeats": 1}, range(5, 6), {}),
    "modules, manual": (Manual, MODULES, range(1, 3), {}),
    "auto": (Logging, {**STEP, "scope": "auto"}, range(1, 2), {}),
    "auto, modules": (Parts, {**STEP, "scope": "auto"}, range(1, 4), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_out_of_memory_at_any_allocation(backend: str, tmp_path: Path, case: str) -> None:
    module, capture, steps, trainer = CASES[case]

    def fit(captured: bool, shortage: Shortage | None = None) -> tuple[Fit, Any]:
        made = prepare(
            backend,
            tmp_path,
            captured,
            module=module,
            capture={**capture, "on_failure": "eager"},
            data=lambda: batches(6, last=5),
            callbacks=lambda: [shortage] if shortage is not None else [],
            **trainer,
        ).run()
        return made, (torch.get_rng_state().tolist(), random.getstate())

    eager, generators = fit(False)
    everything = Shortage(steps)
    captured, _ = fit(True, everything)
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0
    count = everything.allocations.count
    assert count > SAMPLES
    for i in range(SAMPLES):
        failing = i * count // SAMPLES
        shortage = Shortage(steps, failing)
        captured, now = fit(True, shortage)
        assert shortage.allocations.count > failing
        compare(eager, captured, replayed=False)
        assert now == generators, failing
        assert getattr(captured.module, "steps", 0) == getattr(eager.module, "steps", 0)
        torch.testing.assert_close(captured.module.loose, eager.module.loose)
        statistics = captured.statistics
        assert statistics.eager + statistics.replayed == 12, failing
        assert len(statistics.fallbacks) <= 2, statistics.fallbacks
        assert_nothing_left(captured)
        forwards_are_their_own(captured.module)


@pytest.mark.parametrize("case", ["modules", "auto, modules"])
def test_an_optimizer_without_room_for_its_graph_steps_eagerly(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Also where submodules take over from whole steps, in the middle of a step."""

    def short(*args: Any, **kwargs: Any) -> CapturableOptimizer:
        with Allocations(0) as allocations, allocations.counting(True):
            return CapturableOptimizer(*args, **kwargs)

    monkeypatch.setattr(update, "CapturableOptimizer", short)
    module, capture, _, _ = CASES[case]
    eager = prepare(backend, tmp_path, False, module=module).run()
    captured = prepare(
        backend, tmp_path, True, module=module, capture={**capture, "on_failure": "eager"}
    ).run()
    compare(eager, captured, replayed=False)
    statistics = captured.statistics
    said = "the optimizer step runs eagerly: A captured optimizer step needs memory of its own"
    assert statistics.fallbacks[-1].startswith(said)
    assert statistics.replayed > 0
    assert "step" not in vars(captured.trainer.optimizers[0])
    assert_nothing_left(captured)


class NoRoom(Net):
    """Finds no memory inside of a capture, for batches of 8 rows."""

    def loss(self, batch: Any) -> Tensor:
        if is_current_stream_capturing() and len(batch["x"]) == 8:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        return super().loss(batch)


class NoRoomInside(Parts):
    """The same in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = Large()


class Large(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if is_current_stream_capturing():
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        return nn.functional.gelu(x)


@pytest.mark.parametrize("scope", ["step", "auto"])
def test_a_step_without_room_stays_eager_and_smaller_ones_do_not(
    backend: str, tmp_path: Path, scope: str
) -> None:
    data = [batch for size in (8, 5) for batch in batches(5, size)]
    options: dict[str, Any] = {"module": NoRoom, "data": lambda: data}
    eager = prepare(backend, tmp_path, False, **options).run()
    capture = {"scope": scope, "on_failure": "eager"}
    captured = prepare(backend, tmp_path, True, capture=capture, **options).run()
    compare(eager, captured, replayed=False)
    statistics = captured.statistics
    (reason,) = statistics.fallbacks
    assert reason.startswith("a step runs eagerly: A captured step needs memory of its own")
    assert "Tried to allocate 2 GiB" in reason
    assert statistics.modules == []
    assert (statistics.eager, statistics.replayed) == (12, 8)


def test_submodules_without_room_stay_eager_as_a_whole(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "modules", "on_failure": "eager"}
    eager = prepare(backend, tmp_path, False, module=NoRoomInside).run()
    captured = prepare(backend, tmp_path, True, module=NoRoomInside, capture=capture).run()
    compare(eager, captured, replayed=False)
    (reason,) = captured.statistics.fallbacks
    assert reason.startswith("a step runs eagerly: A captured module needs memory of its own")
    assert captured.statistics.replayed == 0


def test_what_does_not_fit_without_graphs_either_is_raised(backend: str, tmp_path: Path) -> None:
    class Growing(Net):
        def loss(self, batch: Any) -> Tensor:
            if len(batch["x"]) == 5:
                raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
            return super().loss(batch)

    captured = prepare(
        backend,
        tmp_path,
        True,
        module=Growing,
        data=lambda: batches(8, last=5),
        capture={"on_failure": "eager"},
    )
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        captured.run()
    assert captured.trainer.global_step == 7
    assert captured.statistics.replayed > 0
    assert len(captured.statistics.fallbacks) == 1
    assert_nothing_left(captured)


@pytest.fixture(autouse=True)
def little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBudget, "is_roomy", False)


@pytest.mark.parametrize("case", ["step", "modules"])
def test_copies_on_the_host_restore_as_those_on_the_device(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(MemoryBudget, "room_for", lambda *_: 0)
    module, capture, _, _ = CASES[case]
    capture = {**capture, "verify": 2}
    compare(
        prepare(backend, tmp_path, False, module=module).run(),
        prepare(backend, tmp_path, True, module=module, capture=capture).run(),
    )


@pytest.mark.parametrize(("on_failure", "copies"), [("eager", True), ("raise", False)])
def test_only_steps_that_may_be_repeated_are_copied(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_failure: str, copies: bool
) -> None:
    made: list[str] = []

    class Counted(retry.StateBefore):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append("step")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(retry, "StateBefore", Counted)
    options: dict[str, Any] = {"capture": {"on_failure": on_failure}}
    options["data"] = partial(batches, 6, last=5)  # eager steps beside graphs
    compare(
        prepare(backend, tmp_path, False, **options).run(),
        prepare(backend, tmp_path, True, **options).run(),
    )
    assert bool(made) is copies


def test_the_end_of_timing_brings_no_graphs_back(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_LONGEST", 6)  # the step that finds no memory is the sixth
    module, capture, steps, _ = CASES["step, another shape"]
    shortage = Shortage(steps, 30)
    captured = prepare(
        backend,
        tmp_path,
        True,
        module=module,
        capture={**capture, "on_failure": "eager"},
        data=lambda: batches(6, last=5),
        callbacks=lambda: [shortage],
    ).run()
    assert shortage.allocations.count > 30
    statistics = captured.statistics
    assert (statistics.captures, statistics.replayed, statistics.eager) == (1, 3, 9)
    assert_nothing_left(captured)


class Keeping(Net):
    """Keeps what steps hand out, to look at it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "out": self.net(batch["x"]).detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return {"out": self.net(batch["x"])}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.kept.append(outputs["out"])

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.kept.append(outputs["out"])


@pytest.mark.parametrize("where", ["training", "validation"])
def test_no_graph_overwrites_what_is_handed_out_without_copies(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The other kind of step, which replays next, may have freed the memory that it lies in."""
    SharedPools(monkeypatch)
    own, failed = OutputPlan.copies, [0]

    def copies(plan: OutputPlan, owing: Any) -> Any:
        if not failed[0] and any(len(tensor) == 5 for tensor in plan.tensors if tensor.ndim):
            failed[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return own(plan, owing)

    def fit(captured: bool) -> Fit:
        made = prepare(
            backend, tmp_path, captured, module=Keeping, validation=0, val_check_interval=6,
            capture={**STEP, "on_failure": "eager"},
            data=lambda: batches(11) + batches(1, 5) if where == "training" else batches(12),
        )  # fmt: skip
        held_out = batches(4) if where == "training" else batches(3) + batches(1, 5)
        made.module.val_dataloader = lambda: DataLoader(held_out, batch_size=None)
        return made.run()

    eager = fit(False)
    monkeypatch.setattr(OutputPlan, "copies", copies)
    captured = fit(True)
    compare(eager, captured, replayed=False)
    assert failed == [1]
    assert repr(captured.module.kept) == repr(eager.module.kept)
