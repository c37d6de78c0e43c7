"""Options: wrong values raise when the callback is made, and say what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_graphs import GraphCapture
from lightning_graphs.errors import GraphError, UnsupportedError
from lightning_graphs.policy.options import OptionError
from tests.training.fits import assert_nothing_left, compare, fit_twice, prepare

WRONG: list[tuple[str, Any, str]] = [
    ("scope", "everything", "scope must be one of"),
    ("backend", "tpu", "backend must be one of 'auto', 'cuda', 'emulated'"),
    ("on_failure", "ignore", "on_failure must be one of 'eager', 'raise'"),
    ("optimizer_kernel", "foreach", "optimizer_kernel must be one of 'fused', 'own'"),
    ("warmup_steps", 0, "warmup_steps must be a whole number of at least 1"),
    ("warmup_steps", 2.0, "warmup_steps must be a whole number"),
    ("warmup_steps", True, "warmup_steps must be a whole number"),
    ("min_repeats", -1, "min_repeats must be a whole number of at least 0"),
    ("max_graphs", 0, "max_graphs must be a whole number of at least 1"),
    ("max_graphs", "8", "write max_graphs=1 or more"),
    ("verify", 0, "verify must be True, False, or a whole number"),
    ("verify", "of", "verify must be True, False, or a whole number"),
    (
        "memory",
        -0.5,
        "memory must be 'auto' or a number of at least 0, got -0.5: ",
    ),
    ("memory", "1.0", "write memory=0.35"),
    ("memory", True, "memory must be 'auto' or a number"),
    ("modules", "encoder", r"must be a list .*\n  Fix: write modules=\['encoder'\]$"),
    ("exclude", 3, r"must be a list .*\n  Fix: write exclude=\['encoder.layers.\*'\]$"),
    ("modules", [], r"modules must name a submodule, got \[\]\n  Fix: leave modules out"),
    ("evaluation", "yes", "\n  Fix: write evaluation=True or evaluation=False$"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_value_raises_at_construction(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        GraphCapture(**{name: value})
    assert isinstance(caught.value, GraphError)
    assert caught.value.observed.startswith(f"got {value!r}")


def test_a_wrong_value_takes_two_lines() -> None:
    with pytest.raises(ValueError, match="warmup_steps") as caught:
        GraphCapture(warmup_steps=0)
    assert str(caught.value) == (
        "warmup_steps must be a whole number of at least 1, got 0: eager steps make the "
        "optimizer's state\n  Fix: write warmup_steps=1 or more"
    )


def test_options_are_keyword_only() -> None:
    for value, option in (("step", "scope"), ("cuda", "backend"), (3, "scope")):
        said = rf"positional argument {value!r}\n  Fix: write GraphCapture\({option}={value!r}\)"
        with pytest.raises(TypeError, match=said):
            GraphCapture(value)


def test_defaults() -> None:
    options = GraphCapture().options
    assert (options.warmup_steps, options.min_repeats, options.max_graphs) == (3, None, None)
    assert (options.on_failure, options.backend) == ("eager", "auto")


def test_a_name_that_was_never_one() -> None:
    with pytest.raises(TypeError, match=r"argument 'max_graph'\n  Fix: write 'max_graphs'"):
        GraphCapture(max_graph=3)


class TestNoOptionIsIgnored:
    def test_exclude_beside_whole_steps(self) -> None:
        with pytest.raises(OptionError, match=r"exclude must be left .*, got \['net'\]") as caught:
            GraphCapture(scope="step", exclude=["net"])
        assert "scope='modules'" in caught.value.remedy

    def test_exclude_asks_for_graphs_of_submodules(self, backend: str, tmp_path: Path) -> None:
        capture = {"scope": "auto", "exclude": ["net.0"]}
        eager, captured = fit_twice(backend, tmp_path, capture=capture)
        compare(eager, captured)
        assert captured.statistics.modules == ["net.1", "net.4"]

    def test_exclude_with_a_typo(self, backend: str, tmp_path: Path) -> None:
        fit = prepare(backend, tmp_path, True, capture={"scope": "auto", "exclude": ["nett"]})
        with pytest.raises(OptionError, match=r"'nett', which matches none\n.*nearest names: net"):
            fit.run()
        assert_nothing_left(fit)

    def test_exclude_of_everything(self, backend: str, tmp_path: Path) -> None:
        fit = prepare(backend, tmp_path, True, capture={"scope": "auto", "exclude": ["net"]})
        with pytest.raises(OptionError, match=r"exclude must leave .*, got exclude=\['net'\], and"):
            fit.run()
        assert_nothing_left(fit)

    def test_log_metrics_without_a_logger(self, backend: str, tmp_path: Path) -> None:
        capture = {"log_metrics": True}
        fit = prepare(backend, tmp_path, True, capture=capture, logger=False, max_epochs=1)
        with pytest.warns(UserWarning, match="log_metrics=True logs nothing: .*no logger$"):
            fit.run()
        assert fit.statistics.fallbacks == []

    def test_two_in_one_trainer(self, backend: str, tmp_path: Path) -> None:
        second = GraphCapture(backend=backend)  # type: ignore[arg-type]
        fit = prepare(backend, tmp_path, True, callbacks=lambda: [second])
        with pytest.raises(OptionError, match="one GraphCapture") as caught:
            fit.run()
        assert "2 of them" in caught.value.observed
        assert_nothing_left(fit)

    def test_a_backend_of_another_device(self, tmp_path: Path) -> None:
        fit = prepare("cuda", tmp_path, True, accelerator="cpu")
        with pytest.raises(OptionError, match=r"got 'cuda' with a trainer on cpu\n.*gpu"):
            fit.run()
        assert_nothing_left(fit)

    def test_fabric_is_told_that_it_needs_a_trainer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Where the package is installed, Fabric(...) is refused itself: see test_environment.py.
        no_plugins = "lightning.fabric.fabric._load_external_callbacks"
        monkeypatch.setattr(no_plugins, lambda _: [])
        fabric = Fabric(accelerator="cpu", devices=1, callbacks=[GraphCapture()])
        module = nn.Linear(2, 2)
        with pytest.raises(UnsupportedError, match="Trainer") as caught:
            fabric.setup(module)
        assert "lightning_graphs.capture(" in caught.value.remedy
        fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters()))
        with pytest.raises(UnsupportedError, match="Trainer"):
            optimizer.step()  # type: ignore[union-attr]
