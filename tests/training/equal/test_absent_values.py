"""Attributes that are not there at a capture, and appear later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_graphs.watch.reads import AttributeGuards
from tests.training.fits import Net, compare, fit_twice
from tests.training.modules.test_equal import named


def by_hasattr(owner: Any) -> Any:
    return owner.boost if hasattr(owner, "boost") else 1.0


def by_default(owner: Any) -> Any:
    return getattr(owner, "boost", 1.0)


def by_exception(owner: Any) -> Any:
    try:
        return owner.boost
    except AttributeError:
        return 1.0


WAYS = [by_hasattr, by_default, by_exception]


class Layer(nn.Module):
    """A submodule that looks for an attribute of its own."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.look(self)


def looking(look: Callable[[Any], Any]) -> type[Net]:
    class Looking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * look(self)

    return Looking


def looking_inside(look: Callable[[Any], Any]) -> type[Net]:
    class LookingInside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = Layer(look)  # type: ignore[assignment]

    return LookingInside


class Change(Callback):
    """Changes something at the beginning of the second epoch, and of the third."""

    def __init__(self, *changes: Callable[[Any], object]) -> None:
        self.changes = changes

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if 0 < trainer.current_epoch <= len(self.changes):
            self.changes[trainer.current_epoch - 1](pl_module)


def set_boost(module: Any) -> None:
    module.boost = 3.0


def fits(backend: str, root: Path, module: Any, *changes: Any, **options: Any) -> Any:
    eager, captured = fit_twice(
        backend,
        root,
        module=module,
        callbacks=lambda: [Change(*changes)],
        validation=0,
        max_epochs=len(changes) + 1,
        **options,
    )
    compare(eager, captured)
    return captured.statistics


@pytest.mark.parametrize("look", WAYS)
def test_an_attribute_that_appears_gets_another_graph(
    backend: str, tmp_path: Path, look: Callable[[Any], Any]
) -> None:
    statistics = fits(backend, tmp_path, looking(look), set_boost)
    assert statistics.captures == 2
    assert statistics.recaptures == ["self.boost: absent -> 3.0"]


@pytest.mark.parametrize("look", WAYS)
def test_an_attribute_of_a_submodule_that_appears_gets_another_graph(
    backend: str, tmp_path: Path, look: Callable[[Any], Any]
) -> None:
    statistics = fits(backend, tmp_path, looking_inside(look), lambda m: set_boost(m.net))
    assert statistics.captures == 2
    assert statistics.recaptures == ["self.net.boost: absent -> 3.0"]


def test_an_attribute_of_a_graphed_submodule_that_appears_gets_other_graphs(
    backend: str, tmp_path: Path
) -> None:
    statistics = fits(
        backend,
        tmp_path,
        looking_inside(by_default),
        lambda m: set_boost(m.net),
        capture=named("net"),
    )
    assert statistics.captures == 2
    assert statistics.recaptures == ["self.net.boost: absent -> 3.0"]


def test_an_attribute_that_comes_moves_and_goes(backend: str, tmp_path: Path) -> None:
    def move(module: Any) -> None:
        module.boost = 5.0

    def remove(module: Any) -> None:
        del module.boost

    statistics = fits(backend, tmp_path, looking(by_default), set_boost, move, remove, set_boost)
    assert statistics.captures == 3  # what was known comes back


def test_an_attribute_that_was_none_and_goes(backend: str, tmp_path: Path) -> None:
    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.boost: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            factor = getattr(self, "boost", 3.0)
            return self.loss(batch) * (1.0 if factor is None else factor)

    statistics = fits(backend, tmp_path, Holding, lambda m: delattr(m, "boost"))
    assert statistics.captures == 2


def test_an_attribute_that_appears_in_the_class(backend: str, tmp_path: Path) -> None:
    statistics = fits(
        backend, tmp_path, lambda: looking(by_default)(), lambda m: set_boost(type(m))
    )
    assert statistics.recaptures == ["self.boost: absent -> 3.0"]


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_tensor_that_appears_where_none_was(backend: str, tmp_path: Path, kind: str) -> None:
    def register(module: Any) -> None:
        boost = torch.full((), 3.0, device=module.device)
        if kind == "buffer":
            module.register_buffer("boost", boost)
        else:
            module.boost = nn.Parameter(boost, requires_grad=False)

    assert fits(backend, tmp_path, looking(by_default), register).captures == 2


def test_an_attribute_that_a_property_misses(backend: str, tmp_path: Path) -> None:
    class Computing(Net):
        @property
        def boost(self) -> Any:
            return self.wanted

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * getattr(self, "boost", 1.0)

    statistics = fits(backend, tmp_path, Computing, lambda m: setattr(m, "wanted", 3.0))
    assert statistics.recaptures == ["self.wanted: absent -> 3.0"]


class Asked(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))


def noted(look: Callable[[Any], object]) -> list[str]:
    module, reads = Asked(), AttributeGuards()
    with reads.watching(module):
        look(module)
    return [name for name, _ in reads.now()]


def test_what_a_module_has_is_not_absent() -> None:
    assert noted(lambda m: (m.linear.weight, m.seen, m.linear)) == []


def test_only_the_step_s_own_questions_count() -> None:
    def by_torch(module: Any) -> None:
        with pytest.raises(AttributeError, match="nothing"):
            module.get_buffer("nothing")

    assert noted(by_torch) == []
    assert noted(lambda m: hasattr(m, "nothing")) == ["self.nothing"]


def test_a_miss_is_still_an_attribute_error() -> None:
    module, reads = Asked(), AttributeGuards()
    with reads.watching(module), pytest.raises(AttributeError, match=r"'Asked' .*'nothing'"):
        _ = module.nothing
