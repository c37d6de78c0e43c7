"""The doctor: every obstacle with its line, and a fit that is what it is without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightning_graphs.report.diagnosis import Diagnosis, Finding
from tests.training.examined import examined, line, rows
from tests.training.fits import Net, Trace, TrainingContext, compare, prepare
from tests.training.leftovers import assert_nothing_left


def adagrad(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(module.parameters(), lr=2**-7)


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
        self.losses.append(loss.item())  # item
        if loss > 100:  # bool
            loss = loss * 2
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
        loss = loss + 1e-3 * (chosen + places + selected + kinds) + len(first)
        loss = loss + 1e-3 * (logits * weights * table * ramp).sum()
        loss = loss * len(str(batch_idx))  # batch_idx
        loss = loss / len(str(self.global_step))  # global_step
        loss = loss * (1 + batch_idx) + min(1.0, self.global_step / 7)
        self.calls += 1  # counter
        loss = loss * random.random() ** len(str(random.random()))  # random
        share = float(str(numpy.random.rand()))  # numpy.random
        loss = loss * share  # consequence
        loss = loss * self.schedule[batch_idx]  # list index
        own = torch.Generator(self.device).manual_seed(1)
        loss = loss + torch.rand((), generator=own, device=self.device)  # generator
        self.log("calls", self.calls)  # logged number
        self.log("loss", loss)
        return loss


@pytest.fixture
def many(backend: str, tmp_path: Path) -> TrainingContext:
    return examined(backend, tmp_path, module=Many)


# (kind, text of the line, operator in a rehearsal, operator on CUDA, part of remedy and code)
_SCALAR = "aten._local_scalar_dense.default"
EXPECTED = [
    ("host-read", "item", _SCALAR, _SCALAR, 'self.log("loss", loss)'),
    ("host-read", "bool", _SCALAR, _SCALAR, "torch.where(condition, a, b)"),
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
    ("python-state", "random", "random.random", "", "torch.rand(()"),
    ("python-state", "numpy.random", "numpy.random.rand", "", "torch.rand(()"),
    ("python-state", "consequence", "aten.mul.Tensor", "", "torch.where"),
    ("python-state", "list index", "aten.mul.Tensor", "", "self.scale.fill_(number)"),
    ("python-state", "logged number", "self.log('calls')", "", "log the tensor itself"),
    ("random-generator", "generator", "aten.rand.generator", "", "without generator="),
]


class TestManyObstacles:
    def test_every_obstacle_has_its_line_and_remedy(
        self, many: TrainingContext, backend: str
    ) -> None:
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

    def test_nothing_else_is_listed(self, many: TrainingContext, backend: str) -> None:
        known = {(kind, line(Many.training_step, text)) for kind, text, *_ in EXPECTED}
        known |= {("host-read", line(Many.training_step, "numpy")), ("optimizer", 0)}
        known |= {("data-dependent-shape", 0)}  # the backward pass of a boolean index
        assert many.capture.report.diagnosis is not None
        found = [f for f in many.capture.report.diagnosis.findings if f.kind != "optimizer"]
        assert {(f.kind, f.line) for f in found} <= known

    def test_each_row_counts_how_often(self, many: TrainingContext) -> None:
        number = line(Many.training_step, "item")
        assert [r.count for r in rows(many, "host-read") if r.line == number] == [3]
        assert [r.last_step for r in rows(many, "host-read") if r.line == number] == [3]

    def test_the_optimizer(self, many: TrainingContext) -> None:
        (row,) = rows(many, "optimizer")
        assert (row.operator, row.effect) == ("Adagrad", "eager optimizer step")
        assert row.function == "configure_optimizers"
        assert "Adagrad" in row.observed
        assert "torch.optim.AdamW" in row.code

    def test_rows_as_json(self, many: TrainingContext) -> None:
        found = many.capture.report.diagnosis
        assert found is not None
        read = json.loads(found.to_json())
        assert (read["steps"], read["obstacles"]) == (3, len(found.obstacles))
        assert Finding(**read["findings"][3]) == found.findings[3]
        assert len(read["findings"]) == len(found.findings)
        assert json.loads(many.capture.report.to_json())["diagnosis"] == read

    def test_the_report_shows_them(
        self, many: TrainingContext, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = many.capture.report
        report.show()
        assert capsys.readouterr().out.endswith(f"\n\n{report.diagnosis}\n")
        assert f" 0 captures, {len(report.diagnosis.obstacles)} obstacles, " in repr(report)

    def test_the_fit_is_what_it_is_without_the_doctor(
        self, many: TrainingContext, backend: str, tmp_path: Path
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

    def test_caches_that_the_first_step_fills_are_remarks(
        self, backend: str, tmp_path: Path
    ) -> None:
        class Caching(Net):
            scale: Any = None

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.scale is None:
                    self.scale = torch.ones(1, device=self.device) * 2
                    self.scale.item()
                return self.loss(batch) * self.scale.sum()

        fit = examined(backend, tmp_path, module=Caching)
        found = fit.capture.report.diagnosis
        assert found is not None
        assert {(f.kind, f.last_step) for f in found.findings} == {("host-read", 1)}
        assert found.obstacles == []
        assert "in the first step only" in str(found)


class TestLifecycle:
    def test_an_exception_shows_what_was_found_until_then(
        self, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Failing(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.loss(batch).item()
                if len(self.trainer.callbacks) > 0 and self.global_step == 1:
                    raise ValueError("in the second step")
                return self.loss(batch)

        fit = prepare(backend, tmp_path, True, module=Failing, capture={"diagnose": True})
        with pytest.raises(ValueError, match="in the second step"):
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
                loss.item()  # read
                return loss

        fit = examined(backend, tmp_path, module=Reading)
        printed = capsys.readouterr().out
        assert printed.rstrip() == str(fit.capture.report.diagnosis)
        number = line(Reading.training_step, "read")
        assert f"test_doctor.py:{number} in training_step: loss.item()  # read" in printed
        assert "(eager step, 3 times)" in printed
        assert "  Fix: keep the value on the device" in printed
        assert '    self.log("loss", loss)  # the tensor, without item()' in printed
