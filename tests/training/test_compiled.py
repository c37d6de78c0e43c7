"""Compiled code: captured in the default mode, refused where it makes graphs of its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_graphs import CaptureError
from lightning_graphs.training.uncapturable import with_own_graphs
from tests.training.fits import Net, compare, fit_twice, prepare

# What torch says while it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OWN = "is compiled to CUDA graphs of its own, which no graph can hold; write torch.compile"


class Holder(nn.Module):
    """Compiled parts in every form, with a mode each."""

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.wrapped = torch.compile(nn.Linear(2, 2), mode=mode)
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.inner[0].compile(mode=mode)
        self.function = torch.compile(torch.nn.functional.gelu, mode=mode)
        self.plain = torch.nn.functional.gelu


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_other_modes_make_no_graphs(mode: str | None) -> None:
    assert list(with_own_graphs(Holder(mode))) == []


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_those_that_make_graphs_are_named(mode: str) -> None:
    assert sorted(with_own_graphs(Holder(mode))) == ["function", "inner.0", "wrapped"]


class Reducing(Net):
    """Its network is compiled to graphs of its own; nothing runs compiled in these tests."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Linear(2, 2), mode="reduce-overhead")


@pytest.mark.parametrize("scope", ["step", "auto", "modules"])
def test_reduce_overhead_is_refused_with_the_remedy(
    backend: str, tmp_path: Path, scope: str
) -> None:
    options: dict[str, Any] = {
        "module": Reducing,
        "capture": {"scope": scope, "on_failure": "eager"},
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fits = fit_twice(backend, tmp_path, **options)
    compare(*fits, replayed=False)
    if scope == "step":
        assert any(OWN in str(w.message) for w in said)
        assert fits[1].statistics.replayed == 0
    else:  # the other submodules have graphs
        assert fits[1].statistics.replayed > 0


def test_reduce_overhead_raises_where_asked_to(backend: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"`compiled` is compiled to CUDA graphs of its own"):
        prepare(backend, tmp_path, True, module=Reducing, capture={"scope": "step"}).run()


class InPlace(Net):
    """A submodule that is compiled in place: the compiler looks into the hooks around it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.block.compile(backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)


@pytest.mark.filterwarnings("ignore")  # the compiler looks into hooks and graphs, and says so
def test_a_submodule_that_is_compiled_in_place(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "modules", "modules": ["block", "net"]}
    eager, captured = fit_twice(backend, tmp_path, module=InPlace, capture=capture)
    compare(eager, captured)
    assert captured.statistics.modules == ["block", "net"]
