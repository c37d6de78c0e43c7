"""The line that a message names is the author's true one, and it says whose code that is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSiteFinder, package_of, returned_by
from tests.training.fits import Fit, Net, compare, examined, fit_twice, line, rows

SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")
pytestmark = SAYS


MADE = object()


class ReturnsObject(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "made": MADE}  # returned


class ReturnsNothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if batch_idx != 5 else None  # returned


class ReturnsList(Net):
    """Its loss is in a list now and then."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 5:
            return None
        return loss


RETURNED: list[tuple[type[Net], str, str]] = [
    (ReturnsObject, "is a object, in which", "return the tensors in that object instead"),
    (ReturnsNothing, "got NoneType", "return a loss for most batches"),
]


def told(backend: str, root: Path, module: Any, scope: str = "step") -> Fit:
    """A fit with the callback that is equal to the one without, and has said something."""
    capture = {"scope": scope, "on_failure": "eager"}
    eager, captured = fit_twice(backend, root, module=module, capture=capture, validation=0)
    compare(eager, captured, replayed=False)
    return captured


@pytest.mark.parametrize("scope", ["step", "auto"])
@pytest.mark.parametrize(("module", "what", "remedy"), RETURNED)
def test_what_is_returned_is_named_with_the_line_of_the_return(
    backend: str, tmp_path: Path, module: type[Net], what: str, remedy: str, scope: str
) -> None:
    (said,) = told(backend, tmp_path, module, scope).statistics.fallbacks
    assert what in said
    here = line(module.training_step, "returned")
    assert f"returned at {__file__}:{here} in training_step: " in said
    assert remedy in said
    assert "use_cache" not in said


def test_of_several_returns_the_definition_is_named(backend: str, tmp_path: Path) -> None:
    (said,) = told(backend, tmp_path, ReturnsList).statistics.fallbacks
    assert f"{__file__}:{returned_by(ReturnsList.training_step).line} in training_step" in said
    assert returned_by(ReturnsList.training_step).source.startswith("def training_step")


@pytest.mark.parametrize(("module", "what", "remedy"), RETURNED[:1])
def test_the_doctor_says_the_same_of_what_is_returned(
    backend: str, tmp_path: Path, module: type[Net], what: str, remedy: str
) -> None:
    (row,) = rows(examined(backend, tmp_path, module=module), "contract")
    assert row.line == line(module.training_step, "returned")
    assert what in row.observed
    assert remedy in row.remedy


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float(gradient.sum() > 1e9) + gradient  # read


class ReadsInBackward(Net):
    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = Reading.apply(super().loss(batch))  # type: ignore[no-untyped-call]
        return loss


class HooksInBackward(Net):
    """A hook of torch reads in the backward pass: no line of the author's runs there."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        loss.register_hook(partial(torch._assert, message="a gradient of zero"))
        return loss


@pytest.mark.parametrize("module", [ReadsInBackward, HooksInBackward])
def test_no_message_has_a_question_mark_for_a_line(
    backend: str, tmp_path: Path, module: type[Net]
) -> None:
    (said,) = told(backend, tmp_path, module).statistics.fallbacks
    assert "?:0" not in said
    if module is ReadsInBackward:
        assert f":{line(Reading.backward, 'read')} in backward" in said
    else:
        step = returned_by(Net.training_step)
        where = f"in the backward pass, in the code of {step.file}:"
        assert f"no line of yours, {where}" in said


def test_an_unknown_line() -> None:
    described = CallSiteFinder().of_exception(ValueError()).describe()
    assert described == "no line of yours, in code of libraries"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed package whose loss reads on the host."""
    folder = tmp_path / "site-packages" / "foreign_losses"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "def checked(loss):\n    return loss if loss.tolist() < 1e9 else loss * 0\n"
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    import foreign_losses  # type: ignore[import-not-found]

    yield foreign_losses
    del sys.modules["foreign_losses"]


def test_code_of_an_installed_package_is_told_to_be_that(
    backend: str, tmp_path: Path, installed: ModuleType
) -> None:
    class Uses(Net):
        def loss(self, batch: Any) -> Tensor:
            checked: Tensor = installed.checked(super().loss(batch))
            return checked

    (said,) = told(backend, tmp_path / "fit", Uses).statistics.fallbacks
    assert ":2 in checked (of the installed package foreign_losses): return loss if" in said
    assert "for the authors of foreign_losses: as its user look for an option" in said
    (row,) = rows(examined(backend, tmp_path / "doctor", module=Uses), "host-read")
    assert "(of the installed package foreign_losses)" in row.place


def test_options_that_a_user_has_are_offered_for_code_of_a_package() -> None:
    where = "read at /lib/site-packages/foreign/a.py:3 in f (of the installed package foreign): x"
    assert package_of("/lib/site-packages/foreign/a.py") == "foreign"
    assert package_of("/lib/dist-packages/foreign.py") == "foreign"
    for own in ("/home/me/project/a.py", "/home/me/my-packages/a.py", "<stdin>"):
        assert package_of(own) == ""
    option = CaptureError("A rule.", where, "train in bfloat16 (precision='bf16-true')")
    code = CaptureError("A rule.", where, "write torch.where")
    assert str(option).endswith("(precision='bf16-true')")
    assert "that is for the authors of foreign" in str(code)
