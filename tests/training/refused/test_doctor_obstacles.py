"""The doctor: one obstacle at a time, and what looks like one and is none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_graphs.report.diagnosis import Diagnosis
from tests.training.examined import examined, line, rows
from tests.training.fits import Net, batches, compare, prepare
from tests.training.guards.test_reads_of_the_trainer import Storing
from tests.training.refused.test_frozen import REFUSED, Moving


class LoopedByIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for _ in range(batch_idx):
            loss = loss * 1.5  # looped
        return loss


class Looked(Net):
    def on_after_backward(self) -> None:
        self.seen = self.net[0].weight.grad.sum().item()


class Watcher(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        loss.item()


def _forward_hook(module: nn.Module, inputs: Any, output: Any) -> None: ...


def _gradient_hook(gradient: Tensor) -> None: ...


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(_forward_hook)
        self.net[4].bias.register_hook(_gradient_hook)
        nn.utils.parametrizations.weight_norm(self.net[0])


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient.sum().item()  # in backward
        return gradient


class Multiplied(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        probabilities = self.net(batch["x"]).softmax(-1)
        product = torch.prod(probabilities, dim=1)  # multiplied
        return self.loss(batch) + product.pow(2).mean()


class Scored(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        score = self.accuracy(self.net(batch["x"]), batch["y"])
        self.log("accuracy", score)
        self.log("object", self.accuracy)
        return self.loss(batch)


class UsedScore(Scored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        score = self.accuracy(self.net(batch["x"]), batch["y"])
        return self.loss(batch) * (2 - score)  # used


class ChangedAfterwards(Scored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        guess = self.net(batch["x"]).detach()
        self.log("share", guess.mean())
        self.accuracy(guess, batch["y"])  # too early
        guess.mul_(2)
        return self.loss(batch)


class LoggingNumbers(Net):
    """Logs numbers that a captured step logs anew."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("index", batch_idx)
        self.log("steps", self.global_step)
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + batch_idx)


class EmptyTensor(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        nothing = torch.tensor([], device=self.device)
        return self.loss(batch) + torch.cat([nothing, batch["x"][0]]).sum()


class Clipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # clipped
        self.log("norm", norm)
        return self.loss(batch)


def _of_numbers(gradient: Tensor) -> Tensor:
    return torch.tensor([1.0, 0.5, 0.25], device=gradient.device)  # made


def _drawn(gradient: Tensor) -> Tensor:
    return torch.rand(3, device="cpu").to(gradient.device)  # made


class TestSingleObstacles:
    @pytest.mark.parametrize(
        ("module", "name"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
    )
    def test_python_state_that_a_capture_refuses_is_found(
        self, backend: str, tmp_path: Path, module: Any, name: str
    ) -> None:
        found = rows(examined(backend, tmp_path, module=module), "python-state")
        assert {row.file for row in found} == {inspect.getfile(module)}
        if module.__name__ != "IndexedByRange":  # C code reads it: only the effect is seen
            assert any(name in row.operator or "self.log" in row.operator for row in found)

    def test_what_a_step_stores_on_its_trainer(self, backend: str, tmp_path: Path) -> None:
        eager = prepare(backend, tmp_path, False, module=Storing).run()
        fit = examined(backend, tmp_path, module=Storing)
        (row,) = rows(fit, "python-state")
        number = line(Storing.weight, "stored")
        assert (row.operator, row.file, row.line) == (
            "trainer.counted", inspect.getfile(Storing), number,
        )  # fmt: skip
        assert (row.effect, row.count) == ("eager step", 3)
        assert "cannot set the attribute" in row.rule
        assert "def on_train_batch_end" in row.code
        compare(eager, fit, replayed=False)
        assert fit.trainer.counted == eager.trainer.counted == 20  # type: ignore[attr-defined]

    def test_clipping_ahead_of_the_backward_pass(self, backend: str, tmp_path: Path) -> None:
        eager = prepare(backend, tmp_path, False, module=Clipping).run()
        fit = examined(backend, tmp_path, module=Clipping)
        (row,) = rows(fit, "python-state")
        number = line(Clipping.training_step, "clipped")
        assert (row.operator, row.file, row.line) == (
            ".grad of a parameter is read", __file__, number,
        )  # fmt: skip
        assert row.effect == "eager step"
        assert "cannot use gradients before its backward pass" in row.rule
        assert "def on_before_optimizer_step" in row.code
        compare(eager, fit, replayed=False)

    def test_a_tensor_of_a_metric_that_changes_afterwards(
        self, backend: str, tmp_path: Path
    ) -> None:
        (row,) = rows(examined(backend, tmp_path, module=ChangedAfterwards), "logged-early")
        assert row.line == line(ChangedAfterwards.training_step, "too early")

    def test_numbers_that_are_logged_anew(self, backend: str, tmp_path: Path) -> None:
        fit = examined(backend, tmp_path, module=LoggingNumbers)
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)

    def test_an_empty_tensor_is_no_copy(self, backend: str, tmp_path: Path) -> None:
        fit = examined(backend, tmp_path, module=EmptyTensor)
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)

    def test_a_library_may_look_at_gradients(self, backend: str, tmp_path: Path) -> None:
        fit = examined(backend, tmp_path, module=Moving)
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)

    def test_a_number_that_c_code_reads(self, backend: str, tmp_path: Path) -> None:
        fit = examined(backend, tmp_path, module=LoopedByIndex)
        (row,) = rows(fit, "python-state")
        assert row.line == line(LoopedByIndex.training_step, "looped")
        assert row.observed == "not in every step"

    def test_observers_cut_the_graph_and_are_no_obstacles(
        self, backend: str, tmp_path: Path
    ) -> None:
        fit = examined(backend, tmp_path, module=Looked, callbacks=lambda: [Watcher()])
        assert {(r.operator, r.function, r.effect) for r in rows(fit, "observer")} == {
            ("Watcher.on_before_backward", "on_before_backward", "further graph"),
            ("Looked.on_after_backward", "on_after_backward", "further graph"),
        }
        found = fit.capture.report.diagnosis
        assert found is not None
        assert found.obstacles == []  # their host reads are outside of the graphs

    def test_hooks_inside_of_submodules(self, backend: str, tmp_path: Path) -> None:
        fit = examined(backend, tmp_path, module=Hooked, capture={"scope": "modules"})
        assert [(r.operator, r.function, r.effect) for r in rows(fit, "hook")] == [
            ("hook of net.0", "_forward_hook", "further graph"),
        ]
        assert rows(examined(backend, tmp_path / "whole", module=Hooked), "hook") == []

    def test_a_host_read_in_a_backward_pass(self, backend: str, tmp_path: Path) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return ReadsInBackward.apply(self.loss(batch))

        (row,) = rows(examined(backend, tmp_path, module=Reading), "host-read")
        assert (row.line, row.count) == (line(ReadsInBackward.backward, "in backward"), 3)

    def test_a_backward_pass_of_torch_that_reads(self, backend: str, tmp_path: Path) -> None:
        eager = prepare(backend, tmp_path, False, module=Multiplied).run()
        fit = examined(backend, tmp_path, module=Multiplied)
        (row,) = rows(fit, "host-read")
        assert (row.line, row.count) == (line(Multiplied.training_step, "multiplied"), 3)
        compare(eager, fit, replayed=False)  # what is observed computes what it does unobserved

    @pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
    @pytest.mark.parametrize("made", [_of_numbers, _drawn])
    def test_the_host_does_nothing_ahead_of_a_backward_pass(
        self, backend: str, tmp_path: Path, made: Callable[[Tensor], Tensor]
    ) -> None:
        class Hooking(Net):
            def __init__(self) -> None:
                super().__init__()
                self.net[4].bias.register_hook(lambda gradient: gradient * made(gradient))

        options: dict[str, Any] = {"module": Hooking, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = examined(backend, tmp_path, **options)
        compare(eager, fit, replayed=False)
        is_seen = backend == "cuda" or made is not _drawn  # a CPU has one memory, and one generator
        found = {(r.line, r.effect) for r in fit.capture.report.diagnosis.findings}
        assert found == ({(line(made, "made"), "eager step")} if is_seen else set())
        fit = prepare(backend, tmp_path, True, capture={"on_failure": "eager"}, **options).run()
        compare(eager, fit, replayed=False)
        assert (fit.statistics.replayed == 0) == is_seen

    def test_metrics_are_none_unless_their_value_is_used(
        self, backend: str, tmp_path: Path
    ) -> None:
        fit = examined(backend, tmp_path / "logged", module=Scored)
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)
        (row,) = rows(examined(backend, tmp_path / "used", module=UsedScore), "metric-value")
        assert row.line == line(UsedScore.training_step, "used")

    def test_a_generator_that_is_rewound(self, backend: str, tmp_path: Path) -> None:
        class Checkpointed(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                logits = checkpoint(self.net, batch["x"], use_reentrant=False)
                return nn.functional.cross_entropy(logits.float(), batch["y"])

        fit = examined(backend, tmp_path, module=Checkpointed)
        assert {row.code for row in rows(fit, "random-generator")} == {
            "checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)"
        }

    def test_the_returned_index_and_a_missing_loss(self, backend: str, tmp_path: Path) -> None:
        class Returning(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if len(batch["x"]) == 5:
                    return None
                return {"loss": self.loss(batch), "index": batch_idx}

        fit = examined(
            backend, tmp_path, module=Returning, data=lambda: batches(3, last=5),
            capture={"warmup_steps": 3},
        )  # fmt: skip
        assert [row.operator for row in rows(fit, "python-state")] == ["batch_idx"]
        (row,) = rows(fit, "contract")
        assert row.observed == "got NoneType"
        assert row.line == inspect.getsourcelines(Returning.training_step)[1]

    def test_shapes_that_never_come_back(self, backend: str, tmp_path: Path) -> None:
        data = [batches(1, size)[0] for size in (3, 4, 5, 6)]
        (row,) = rows(examined(backend, tmp_path, data=lambda: data), "changing-shape")
        assert 'batch["x"]' in row.observed
        assert "[4,8]" in row.observed.replace(" ", "")

    @pytest.mark.parametrize("asked", [{"scope": "modules"}, {"scope": "auto", "modules": ["net"]}])
    def test_submodules_that_were_asked_for(
        self, backend: str, tmp_path: Path, asked: dict[str, Any]
    ) -> None:
        class Printing(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                print("a step")
                return self.loss(batch)

        fit = examined(backend, tmp_path, module=Printing, capture=asked)
        assert [r.effect for r in rows(fit, "python-state")] == ["stays eager between them"]
        assert not fit.capture.report.diagnosis.obstacles

    def test_draws_of_the_host_beside_submodules(self, backend: str, tmp_path: Path) -> None:
        class Noisy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + torch.rand(x.shape[-1:], device="cpu").to(x.device)  # inside

        class Mixing(Net):
            def __init__(self) -> None:
                super().__init__()
                self.net[3] = Noisy()

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                share = torch.rand((), device="cpu")  # between
                return self.loss(batch) * share

        options: dict[str, Any] = {"module": Mixing, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = examined(backend, tmp_path, capture={"scope": "modules"}, **options)
        compare(eager, fit, replayed=False)
        between, inside = line(Mixing.training_step, "between"), line(Noisy.forward, "inside")
        effects = {(r.operator, r.line): r.effect for r in rows(fit, "python-state")}
        assert effects == {
            ("aten.rand.default", between): "stays eager between them",
            ("aten.rand.default", inside): "eager step",
        }
        whole = examined(backend, tmp_path / "whole", **options)
        assert not whole.capture.report.diagnosis.obstacles

    def test_manual_optimization(self, backend: str, tmp_path: Path) -> None:
        class Reads(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * float(x.max() > 0)  # inside

        class Manual(Net):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.net[1] = Reads()
                self.steps = 0

            def training_step(self, batch: Any, batch_idx: int) -> None:
                self.steps += 1
                loss = self.loss(batch) * (1 + batch_idx)
                loss.item()  # read
                self.toggle_optimizer(self.optimizers())
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # of this step: no remark
                self.optimizers().step()
                self.untoggle_optimizer(self.optimizers())

        eager = prepare(backend, tmp_path, False, module=Manual).run()
        fit = examined(backend, tmp_path, module=Manual, capture={"scope": "auto"})
        (row,) = rows(fit, "configuration")
        assert row.effect == "submodules become graphs"
        assert "the whole step cannot be one, because the module optimizes manually" in row.observed
        assert 'modules=["net"]' in row.code
        assert row not in fit.capture.report.diagnosis.obstacles
        read, inside = line(Manual.training_step, "read"), line(Reads.forward, "inside")
        effects = {r.line: r.effect for r in rows(fit, "host-read")}
        assert effects == {read: "stays eager between them", inside: "eager step"}
        python = {r.operator: r.effect for r in rows(fit, "python-state")}
        assert {"batch_idx", "self.steps"} <= set(python)
        assert set(python.values()) == {"stays eager between them"}
        assert not [operator for operator in python if ".grad" in operator]
        assert {r.line for r in fit.capture.report.diagnosis.obstacles} == {inside}
        compare(eager, fit, replayed=False)

    @pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
    def test_collectives(self, backend: str, tmp_path: Path, single_process_group: None) -> None:
        class Reduced(nn.Sequential):
            def forward(self, x: Any) -> Any:
                found = super().forward(x)
                mean = found.detach().clone()
                dist.all_reduce(mean)  # inside
                return found + mean

        class Reducing(Net):
            def __init__(self) -> None:
                super().__init__()
                self.net[0] = Reduced(nn.Linear(8, 16, bias=False))

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                self.log("loss", mean, sync_dist=True)
                return loss

        options: dict[str, Any] = {"module": Reducing, "validation": 0}
        assert rows(examined(backend, tmp_path, **options), "collective") == []
        fit = examined(backend, tmp_path, capture={"scope": "modules"}, **options)
        (row,) = rows(fit, "collective")
        assert row.line == line(Reduced.forward, "inside")
        assert row.operator.startswith("c10d.allreduce")
        assert "scope='step'" in row.remedy


@pytest.fixture
def single_process_group(tmp_path: Path, backend: str) -> Iterator[None]:
    name = "nccl" if backend == "cuda" else "gloo"
    dist.init_process_group(name, init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
