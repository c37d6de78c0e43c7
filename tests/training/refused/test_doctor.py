"""The doctor: obstacles with their lines, in the words of a run; a fit is what it is without it.

That it agrees with runs is tested of every program, in ``tests/programs/test_programs.py``.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_graphs.report.diagnosis import Diagnosis, Finding
from tests.programs.test_refusals import Layer, Layered
from tests.programs.test_trainer import Storing
from tests.training.fits import (
    Fit,
    Net,
    Trace,
    assert_nothing_left,
    batches,
    compare,
    examined,
    line,
    prepare,
    rows,
)


def adagrad(module: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adagrad(module.parameters(), lr=2**-7)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Many(Net):
    """Next to nothing of it can be captured."""

    def __init__(self) -> None:
        super().__init__(adagrad)
        self.table = torch.ones(3)
        self.calls = 0
        self.losses: list[float] = []
        self.schedule = [1.0, 0.5, 0.25, 0.125, 0.0625, 1.0, 1.0, 1.0, 1.0, 1.0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"]).float()
        loss = nn.functional.cross_entropy(logits, batch["y"])
        self.losses.append(loss.item())
        loss = loss + len(str(loss.item()))  # item
        first = logits.detach().tolist()[0]  # tolist
        if self.device.type == "cpu":
            loss = loss + float(logits.detach().numpy().shape[0])  # numpy
        repr(loss)  # repr
        weights = torch.tensor([1.0, 2.0, 3.0], device=self.device)  # from numbers
        table = self.table.to(self.device)  # moved
        ramp = torch.arange(3).float().to(self.device)  # made and moved
        chosen = logits[logits > 0].sum()  # boolean index
        places = torch.nonzero(logits > 0).sum()  # nonzero
        selected = torch.masked_select(logits, logits > 0).sum()  # masked_select
        kinds = torch.unique(batch["y"]).sum()  # unique
        loss = loss + 1e-3 * (chosen + places + selected + kinds) + 0 * first[0]
        loss = loss + 1e-3 * (logits * weights * table * ramp).sum()
        loss = loss * len(str(batch_idx))  # batch_idx
        loss = loss / len(str(self.global_step))  # global_step
        loss = loss * (1 + batch_idx) + min(1.0, self.global_step / 7)
        self.calls += 1  # counter
        loss = loss * random.random() ** len(str(random.random()))  # random
        share = float(str(numpy.random.rand()))  # numpy.random
        loss = loss * share
        loss = loss * self.schedule[batch_idx]  # followed
        own = torch.Generator(self.device).manual_seed(1)
        loss = loss + torch.rand((), generator=own, device=self.device)  # generator
        self.log("calls", self.calls)
        self.log("loss", loss)
        return loss


_many: dict[str, Fit] = {}  # by backend; tests only look at it


@pytest.fixture
def many(backend: str, tmp_path: Path) -> Fit:
    if backend not in _many:
        _many[backend] = examined(backend, tmp_path, module=Many)
    return _many[backend]


# (kind, text of the line, operator in a rehearsal, operator on CUDA, part of remedy and code)
EXPECTED = [
    ("host-read", "item", "a number of the device", "", "torch.where(condition, a, b)"),
    ("host-read", "tolist", "tolist", "tolist", "keep the value on the device"),
    ("host-read", "repr", "__repr__", "__repr__", "keep the value on the device"),
    ("host-data", "from numbers", "tensor", "tensor", "register_buffer"),
    ("host-copy", "moved", "", "aten._to_copy.default", "register_buffer"),
    ("host-copy", "made and moved", "", "aten._to_copy.default", "device=self.device"),
    ("data-dependent-shape", "boolean index", "aten.index.Tensor", "", "torch.where(mask, "),
    ("data-dependent-shape", "nonzero", "aten.nonzero.default", "", "fixed shape"),
    ("data-dependent-shape", "masked_select", "aten.masked_select.default", "", "masked_fill"),
    ("data-dependent-shape", "unique", "aten._unique2.default", "", "fixed shape"),
    ("python-state", "batch_idx", "batch_idx", "", "on_train_batch_start"),
    ("python-state", "global_step", "trainer.global_step", "", "on_train_batch_start"),
    ("python-state", "random", "str(random.random#2)", "", "torch.rand(()"),
    ("python-state", "numpy.random", "str(numpy.random.rand)", "", "torch.rand(()"),
    ("random-generator", "generator", "aten.rand.generator", "", "without generator="),
]


class TestManyObstacles:
    def test_every_obstacle_has_its_line_and_remedy(self, many: Fit, backend: str) -> None:
        for kind, text, rehearsed, on_cuda, remedy in EXPECTED:
            operator = on_cuda if on_cuda and backend == "cuda" else rehearsed
            if not operator:  # a copy from host to host
                continue
            number = line(Many.training_step, text)
            (row,) = [
                row
                for row in rows(many, kind)
                if (row.file, row.line, row.operator) == (__file__, number, operator)
            ]
            assert row.function == "training_step"
            assert row.source.endswith(f"# {text}")
            assert remedy in row.remedy + row.code, (text, row.remedy, row.code)
            # Distinct labels follow from the batch.
            ahead = kind in ("host-data", "host-copy") or text == "unique"
            assert row.effect == ("runs ahead of the graph" if ahead else "eager step")
            assert row.rule

    def test_nothing_else_is_listed(self, many: Fit, backend: str) -> None:
        known = {(kind, line(Many.training_step, text)) for kind, text, *_ in EXPECTED}
        known |= {("host-read", line(Many.training_step, "numpy")), ("optimizer", 0)}
        known |= {("data-dependent-shape", 0)}  # the backward pass of a boolean index
        assert many.capture.report.diagnosis is not None
        found = [f for f in many.capture.report.diagnosis.findings if f.kind != "optimizer"]
        assert {(f.kind, f.line) for f in found} <= known

    def test_each_row_counts_how_often(self, many: Fit) -> None:
        number = line(Many.training_step, "item")
        assert [r.count for r in rows(many, "host-read") if r.line == number] == [3]
        assert [r.last_step for r in rows(many, "host-read") if r.line == number] == [3]

    def test_the_optimizer(self, many: Fit) -> None:
        (row,) = rows(many, "optimizer")
        assert (row.operator, row.effect) == ("Adagrad", "eager optimizer step")
        assert row.function == "configure_optimizers"
        assert "Adagrad" in row.observed
        assert "torch.optim.AdamW" in row.code

    def test_rows_as_json(self, many: Fit) -> None:
        found = many.capture.report.diagnosis
        assert found is not None
        read = json.loads(found.to_json())
        assert (read["steps"], read["obstacles"]) == (3, len(found.obstacles))
        assert Finding(**read["findings"][3]) == found.findings[3]
        assert len(read["findings"]) == len(found.findings)
        assert json.loads(many.capture.report.to_json())["diagnosis"] == read

    def test_the_report_shows_them(self, many: Fit, capsys: pytest.CaptureFixture[str]) -> None:
        report = many.capture.report
        report.show()
        assert capsys.readouterr().out.endswith(f"\n\n{report.diagnosis}\n")
        assert f" 0 captures, {len(report.diagnosis.obstacles)} obstacles, " in repr(report)

    def test_the_fit_is_what_it_is_without_the_doctor(
        self, many: Fit, backend: str, tmp_path: Path
    ) -> None:
        eager = prepare(backend, tmp_path, False, module=Many).run()
        compare(eager, many, replayed=False)
        assert many.module.losses == eager.module.losses
        assert many.module.calls == eager.module.calls == 20


class TestNoObstacle:
    def test_an_empty_table(
        self, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fit = examined(backend, tmp_path)
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)
        assert "nothing stands in the way (3 training steps observed)" in capsys.readouterr().out
        assert fit.statistics.captures == 0

    def test_an_optimizer_that_counts_in_tensors(self, backend: str, tmp_path: Path) -> None:
        module = partial(Net, lambda m: torch.optim.Adagrad(m.parameters()))
        fit = examined(backend, tmp_path, module=module)
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)

    def test_the_report_says_why_every_step_ran_eagerly(self, tmp_path: Path) -> None:
        fit = examined("emulated", tmp_path)
        report = fit.capture.report
        assert (report.eager, report.replayed) == (20, 0)
        assert report.fallbacks == ("diagnose=True: steps are observed, and none is captured",)
        fit.trainer.fit_loop.max_epochs = 3
        assert fit.run().capture.report.eager == 10

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
            {"precision": "bf16-mixed"},
            {"capture": {"warmup_steps": 50}},
        ],
        ids=["plain", "accumulation", "bf16", "observed to the end"],
    )
    def test_equal_to_the_plain_fit(
        self, backend: str, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        capture = options.pop("capture", {}) if "capture" in (options := dict(options)) else {}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = examined(backend, tmp_path, capture=capture, **options)
        compare(eager, fit, replayed=False)
        assert rows(fit, "host-read") == []
        assert_nothing_left(fit)

    def test_a_fit_without_backend_option_is_observed_on_a_cpu(self, tmp_path: Path) -> None:
        fit = examined("emulated", tmp_path, capture={"backend": "auto"})
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)

    def test_caches_that_the_first_step_fills_are_none(self, backend: str, tmp_path: Path) -> None:
        class Caching(Net):
            scale: Any = None

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.scale is None:
                    self.scale = torch.ones(1, device=self.device) * 2
                    self.scale.item()
                return self.loss(batch) * self.scale.sum()

        fit = examined(backend, tmp_path, module=Caching)
        assert fit.capture.report.diagnosis == Diagnosis(steps=3)


class TestLifecycle:
    def test_an_exception_shows_what_was_found_until_then(
        self, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Failing(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.loss(batch).tolist() > 100:
                    return None
                if len(self.trainer.callbacks) > 0 and self.global_step == 2:
                    raise ValueError("in the third step")
                return self.loss(batch)

        fit = prepare(backend, tmp_path, True, module=Failing, capture={"diagnose": True})
        with pytest.raises(ValueError, match="in the third step"):
            fit.run()
        assert fit.capture.report.diagnosis is not None
        assert (fit.capture.report.diagnosis.steps, len(rows(fit, "host-read"))) == (2, 1)
        assert "host-read" in capsys.readouterr().out
        assert random.random.__self__ is random._inst  # type: ignore[attr-defined]
        assert type(fit.module) is Failing

    def test_the_next_fit_is_observed_anew(self, backend: str, tmp_path: Path) -> None:
        fit = examined(backend, tmp_path)
        first = fit.capture.report.diagnosis
        fit.trainer.fit_loop.max_epochs = 4
        fit.run()
        assert fit.capture.report.diagnosis == first
        assert fit.capture.report.diagnosis is not first

    def test_hooks_see_plain_objects(self, backend: str, tmp_path: Path) -> None:
        class Recording(Trace):
            kinds: list[type] = []  # noqa: RUF012

            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
                self.kinds.append(type(i))

        examined(backend, tmp_path, trace=Recording)
        assert set(Recording.kinds) == {int}

    def test_what_is_printed(
        self, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                return loss * 2 if loss.tolist() > 100 else loss  # read

        fit = examined(backend, tmp_path, module=Reading)
        printed = capsys.readouterr().out
        assert printed.rstrip() == str(fit.capture.report.diagnosis)
        number = line(Reading.training_step, "read")
        assert (
            f"test_doctor.py:{number} in training_step: return loss * 2 if loss.tolist() > 100"
            in printed
        )
        assert "(eager step, 3 times)" in printed
        assert "  Fix: keep the value on the device" in printed
        assert '    self.log("loss", loss)  # the tensor, without item()' in printed


# ---------------------------------------------------------------------- one at a time


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


def _of_numbers(gradient: Tensor) -> Tensor:
    return torch.tensor([1.0, 0.5, 0.25], device=gradient.device)  # made


def _drawn(gradient: Tensor) -> Tensor:
    return torch.rand(3, device="cpu").to(gradient.device)  # made


@pytest.fixture
def single_process_group(tmp_path: Path, backend: str) -> Iterator[None]:
    name = "nccl" if backend == "cuda" else "gloo"
    dist.init_process_group(name, init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestSingleObstacles:
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

    def test_a_generator_that_is_rewound(self, backend: str, tmp_path: Path) -> None:
        class Checkpointed(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                logits = checkpoint(self.net, batch["x"], use_reentrant=False)
                return nn.functional.cross_entropy(logits.float(), batch["y"])

        fit = examined(backend, tmp_path, module=Checkpointed)
        assert {row.code for row in rows(fit, "random-generator")} == {
            "checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)"
        }

    def test_a_missing_loss(self, backend: str, tmp_path: Path) -> None:
        class Returning(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if len(batch["x"]) == 5:
                    return None
                return {"loss": self.loss(batch), "index": batch_idx}  # which is no obstacle

        fit = examined(
            backend, tmp_path, module=Returning, data=lambda: batches(3, last=5),
            capture={"warmup_steps": 3},
        )  # fmt: skip
        assert rows(fit, "python-state") == []
        (row,) = rows(fit, "contract")
        assert row.observed == "got NoneType"
        assert row.line == inspect.getsourcelines(Returning.training_step)[1]

    def test_shapes_that_never_come_back(self, backend: str, tmp_path: Path) -> None:
        data = [batches(1, size)[0] for size in (3, 4, 5, 6)]
        (row,) = rows(examined(backend, tmp_path, data=lambda: data), "changing-shape")
        assert 'batch["x"]' in row.observed
        assert "[5,8]" in row.observed.replace(" ", "")

    @pytest.mark.parametrize("asked", [{"scope": "modules"}, {"scope": "auto", "modules": ["net"]}])
    def test_submodules_that_were_asked_for(
        self, backend: str, tmp_path: Path, asked: dict[str, Any]
    ) -> None:
        class Printing(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                sys.stdout.write("a step")
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
                share = torch.rand((), device="cpu")
                return self.loss(batch) * share

        options: dict[str, Any] = {"module": Mixing, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = examined(backend, tmp_path, capture={"scope": "modules"}, **options)
        compare(eager, fit, replayed=False)
        inside = line(Noisy.forward, "inside")
        effects = {r.line: r.effect for r in fit.capture.report.diagnosis.findings}
        # A CPU has one memory, and one generator; replays of a whole step would draw, too
        assert effects == ({inside: "eager step"} if backend == "cuda" else {})
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
                if loss.item() > 1e9:  # read
                    return
                self.toggle_optimizer(self.optimizers())
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # of this step: no remark
                self.optimizers().step()
                self.untoggle_optimizer(self.optimizers())

        class Looking(Callback):
            def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
                pass

        looked_at = {"module": Manual, "callbacks": lambda: [Looking()]}
        eager = prepare(backend, tmp_path, False, **looked_at).run()
        fit = examined(backend, tmp_path, capture={"scope": "auto"}, **looked_at)
        (row,) = rows(fit, "configuration")
        assert row.effect == "submodules become graphs"
        assert "the whole step cannot be one, because the module optimizes manually" in row.observed
        assert 'modules=["net"]' in row.code
        assert row not in fit.capture.report.diagnosis.obstacles
        inside = line(Reads.forward, "inside")
        effects = {r.line: r.effect for r in rows(fit, "host-read")}
        assert effects == {inside: "eager step"}
        assert rows(fit, "python-state") == []  # a whole step could follow what there is
        assert {r.line for r in fit.capture.report.diagnosis.obstacles} == {inside}
        compare(eager, fit, replayed=False)

    @pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
    def test_collectives(self, backend: str, tmp_path: Path, single_process_group: None) -> None:
        class Reduced(nn.Sequential):
            def forward(self, x: Any) -> Any:
                found = super().forward(x)
                mean = found.detach().clone()
                dist.all_reduce(mean)
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
        row = rows(fit, "collective")[-1]
        assert row.line == inspect.getsourcelines(Reduced.forward)[1]
        assert row.operator == "`net.0` calls some"
        assert "scope='step'" in row.remedy


# ---------------------------------------------------------------------- as runs say


def _named(*names: Callable[[int, int], int]) -> Callable[[], list[dict[str, Any]]]:
    """Batches with the names of their files, as data sets give them."""
    (number,) = names or (lambda i, j: 8 * i + j,)
    return lambda: [
        {**batch, "name": [f"image{number(i, j)}" for j in range(8)]}
        for i, batch in enumerate(batches(24))
    ]


def _in_tuples() -> list[Any]:
    """Batches as a data set of tuples gives them."""
    return [(batch, tuple(batch["name"])) for batch in _named()()]


class Sorting(Net):
    """The name of the first sample decides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch, names = batch if isinstance(batch, tuple | list) else (batch, batch["name"])
        loss = self.loss(batch)
        if "1" in names[0]:  # read
            loss = loss * 2
        return loss


def _activations(module: Any, batch: Any) -> Tensor:
    return module.net(batch["x"]).argmax()


def _weights(module: Any, batch: Any) -> Tensor:
    return (module.net[0].weight > 0).sum()


def _rounded(module: Any, batch: Any) -> Tensor:
    """The device may round a sum in another way."""
    return batch["x"].sum() > 0


def _changed(module: Any, batch: Any) -> Tensor:
    labels = batch["y"].clone()
    labels[:1] = module.net(batch["x"])[:1, 0].long()
    return labels.max()


class Averaging(Net):
    """torch reads a number on the host, with no line of the author's in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.norm(batch["x"])})


SETTINGS = {"scale": 1.0}


class Set(Net):
    """A hook moves a number that the step finds outside of the module."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        SETTINGS["scale"] = 1 + 2.0**-self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * SETTINGS["scale"]


class Tempered(Net):
    """A hook moves a number that the forward reads."""

    temperature = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.temperature = 1 + 2.0**-self.global_step

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float() / math.sqrt(self.temperature)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch["x"]), batch["y"])


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class TemperedLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled(8, 8)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layer.scale = 1 + 2.0**-self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.layer(batch["x"])})


def agreed(root: Path, **options: Any) -> list[Finding]:
    """The doctor's rows with the words of the first refusal of a run: rule, remedy and line.

    On a GPU a refusal has the words of CUDA.
    """
    options = {"data": lambda: batches(20), "validation": 0, **options}
    capture = {"scope": "auto", "on_failure": "eager", **options.pop("capture", {})}
    said = prepare("emulated", root, True, capture=capture, **options).run().statistics.fallbacks
    found = examined("emulated", root, capture=capture, **options).capture.report.diagnosis
    assert found is not None

    def is_said(row: Finding) -> bool:
        words = (row.rule.rstrip("."), row.remedy, f"{__file__}:{row.line} in")
        return all(each in said[0] for each in words)

    return [row for row in found.obstacles if is_said(row)]


@pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
class TestAgreement:
    @pytest.mark.parametrize("module", [Tempered, Set])
    def test_a_number_that_moves_on_is_followed(self, tmp_path: Path, module: Any) -> None:
        options: dict[str, Any] = {"data": lambda: batches(40), "validation": 0, "module": module}
        fit = prepare("emulated", tmp_path, True, **options).run()
        assert fit.statistics.fallbacks == []
        assert fit.statistics.replayed > 20
        assert not examined("emulated", tmp_path, **options).capture.report.diagnosis.obstacles

    @pytest.mark.parametrize(
        ("module", "scope", "name"), [(TemperedLayer, "modules", "self.layer.scale: ")]
    )
    def test_a_number_that_moves_on_has_the_line_that_reads_it(
        self, tmp_path: Path, module: Any, scope: str, name: str
    ) -> None:
        options: dict[str, Any] = {"data": lambda: batches(40), "validation": 0, "module": module}
        capture = {"scope": scope, "on_failure": "eager"}
        fit = prepare("emulated", tmp_path, True, capture=capture, **options).run()
        said = fit.statistics.fallbacks[0]
        found = examined("emulated", tmp_path, capture=capture, **options).capture.report.diagnosis
        assert found is not None
        (row,) = found.obstacles
        assert name in said
        assert f"named at {row.file}:{row.line} in {row.function}" in said

    def test_a_submodule_that_is_refused_has_its_forward_as_line(self, tmp_path: Path) -> None:
        def binds(layer: Any) -> Any:
            before = getattr(layer, "scale", 0.0)
            layer.scale = layer.linear.bias.detach().exp() + before
            return layer.scale

        options: dict[str, Any] = {"module": partial(Layered, binds), "validation": 0}
        capture = {"scope": "modules", "on_failure": "eager"}
        fit = prepare("emulated", tmp_path, True, capture=capture, **options).run()
        (said,) = fit.statistics.fallbacks
        code = Layer.forward.__code__
        where = f"in the code of {code.co_filename}:{code.co_firstlineno} in forward"
        how = "in every call, and may have been read before"
        assert f"`scale` is set to another tensor {how}, {where}" in said

    def test_a_submodule_of_torch_is_not_said_to_fail_at_the_fit(self, tmp_path: Path) -> None:
        capture = {"scope": "modules", "on_failure": "eager"}
        fit = prepare("emulated", tmp_path, True, capture=capture, module=Averaging).run()
        (said,) = [one for one in fit.statistics.fallbacks if "`norm` runs eagerly" in one]
        assert "(aten._local_scalar_dense.default)\n  Fix: give" in said

    # The second names move one after the other.
    @pytest.mark.parametrize(
        ("scope", "data"), [("step", _named()), ("modules", _named()), ("step", _named(max))]
    )
    def test_names_in_the_batch_that_no_step_reads(
        self, backend: str, tmp_path: Path, scope: str, data: Any
    ) -> None:
        options: dict[str, Any] = {"data": data, "validation": 0}
        capture = {"scope": scope}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = prepare(backend, tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed > 0
        watched = examined(backend, tmp_path, capture=capture, **options)
        compare(eager, watched, replayed=False)
        found = watched.capture.report.diagnosis
        assert found is not None
        effects = {f.operator: f.effect for f in found.findings}
        left_out = {'batch["name"][0]': "left out unless it is read"}
        assert effects == (left_out if scope == "step" else {})
        assert found.obstacles == []

    @pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
    def test_names_in_the_batch_that_a_step_reads(self, backend: str, tmp_path: Path) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                numbers = [float(name[5:]) for name in batch["name"]]  # read
                return self.loss(batch) * torch.tensor(numbers, device=self.device).mean()

        options: dict[str, Any] = {"module": Reading, "data": _named(), "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        capture = {"on_failure": "eager"}
        fit = prepare(backend, tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed == 0
        watched = examined(backend, tmp_path, **options)
        compare(eager, watched, replayed=False)
        assert watched.capture.report.diagnosis is not None
        (row,) = watched.capture.report.diagnosis.obstacles
        assert (row.kind, row.operator) == ("batch-value", 'batch["name"][0]')
        assert (row.line, row.observed) == (line(Reading.training_step, "read"), "likewise 7 more")
        (said,) = fit.statistics.fallbacks
        assert f'batch["name"][0] is read at {row.file}:{row.line} in' in said

    @pytest.mark.parametrize("data", [_named(), _in_tuples])
    def test_a_name_in_the_batch_that_decides(self, tmp_path: Path, data: Any) -> None:
        (row,) = agreed(tmp_path, module=Sorting, data=data)
        assert (row.kind, row.line) == ("batch-value", line(Sorting.training_step, "read"))

    def test_names_that_come_back_are_graphs(self, backend: str, tmp_path: Path) -> None:
        data = _named(lambda i, j: i % 2)
        options: dict[str, Any] = {"module": Sorting, "data": data, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        compare(eager, prepare(backend, tmp_path, True, **options).run())
        watched = examined(backend, tmp_path, **options)
        compare(eager, watched, replayed=False)
        assert watched.capture.report.diagnosis is not None
        assert watched.capture.report.diagnosis.obstacles == []
        row = rows(watched, "batch-value")[0]
        assert row.effect == "further graph"
        assert row.line == line(Sorting.training_step, "read")

    @pytest.mark.parametrize(
        "read",
        [
            lambda n, loss: loss[:n].sum(),  # slice
            lambda n, loss: sum(loss.mean() for _ in range(n)),  # range
            lambda n, loss: loss.sum() * (0.5 * n),  # float
        ],
        ids=["slice", "range", "float"],
    )
    def test_numbers_in_the_batch_that_code_of_c_reads(
        self, backend: str, tmp_path: Path, read: Callable[[Any, Tensor], Any]
    ) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return read(batch["n"], (self.net(batch["x"]) ** 2).mean(-1))

        data = [{**batch, "n": (6, 4, 6, 4, 5)[i % 5]} for i, batch in enumerate(batches(40))]
        options: dict[str, Any] = {"module": Reading, "data": lambda: data, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        compare(eager, prepare(backend, tmp_path, True, **options).run())
        watched = examined(backend, tmp_path, capture={"warmup_steps": 4}, **options)
        compare(eager, watched, replayed=False)
        found = watched.capture.report.diagnosis
        assert found is not None
        (row,) = found.findings
        assert (row.kind, row.operator) == ("batch-value", 'batch["n"]')
        assert (row.effect, row.line) == ("further graph", read.__code__.co_firstlineno)

    def test_a_value_that_never_comes_back(self, backend: str, tmp_path: Path) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.loss(batch) * round(batch["x"].max().item(), 4)  # read

        fit = examined(backend, tmp_path, module=Reading, validation=0)
        (row,) = rows(fit, "changing-shape")
        assert row.effect == "eager step"
        number = line(Reading.training_step, "read")
        assert f"test_doctor.py:{number} in training_step" in row.observed
        capture = {"scope": "modules"}
        between = examined(backend, tmp_path, module=Reading, capture=capture, validation=0)
        assert rows(between, "changing-shape") == []
        assert [row.effect for row in rows(between, "host-read")] == ["stays eager between them"]

    @pytest.mark.parametrize("capture", [{}, {"backend": "auto"}], ids=["own", "auto"])
    @pytest.mark.parametrize("read", [_activations, _weights, _rounded, _changed])
    def test_what_only_the_device_has_is_one(
        self, backend: str, tmp_path: Path, read: Callable[..., Tensor], capture: dict[str, Any]
    ) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                return loss * (1.0 if read(self, batch).tolist() > -1e9 else 2.0)  # read

        fit = examined(backend, tmp_path, module=Reading, capture=capture, validation=0)
        found = rows(fit, "host-read")
        number = line(Reading.training_step, "read")
        assert [(row.line, row.effect) for row in found] == [(number, "eager step")]
