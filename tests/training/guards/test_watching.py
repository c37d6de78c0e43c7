"""What watching a step notes of its module, and that it changes nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.watch.environment import old_gradients_watched
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.user_code import functions_followed
from tests.training.fits import prepare


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


def test_values_are_described_again_only_after_a_change() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.settings = {"scale": 1.0, "seen": [0]}

    module, reads = Module(), AttributeGuards()
    with reads.watching(module):
        assert module.settings["scale"] == 1.0
    before = reads.now()
    assert reads.now() is before
    module.settings["seen"].append(1)
    assert "self.settings['seen'][1]" in dict(reads.now())


def test_large_arrays_are_compared_by_identity_and_objects_one_by_one() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.large = numpy.zeros(65537, dtype=numpy.uint8)
            self.objects = numpy.array([None, 2])

    module, reads = Module(), AttributeGuards()
    with reads.watching(module):
        _ = module.large, module.objects
    before = reads.now()
    module.large[0] = 1
    assert reads.now() is before
    module.objects[0] = 1
    now = reads.now()
    assert [name for name, _ in set(now) - set(before)] == ["self.objects[0]"]
    module.objects[0] = None
    assert reads.now() == before
    module.large = module.large.copy()
    assert reads.now() != before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # while torch imports its compiler
def test_the_compiler_may_ask_whether_there_is_a_gradient() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with old_gradients_watched():
        compiled = torch.compile(layer, backend="eager")(x)
    assert torch.equal(compiled, layer(x))


def test_methods_of_c_that_want_their_class_are_followed() -> None:
    """Those of compiled patterns crash CPython where they are bound without it."""
    found: list[object] = []
    pattern = re.compile("a")
    seen = functions_followed(lambda _: None, lambda _, f: found.append(f), lambda *_: True)
    with seen:
        pattern.match("a")
    assert pattern.match in found


def test_gradients_are_readable_after_a_capture(backend: str, tmp_path: Path) -> None:
    fit = prepare(backend, tmp_path, True, max_epochs=1).run()
    assert fit.statistics.captures == 1
    assert "grad" not in vars(nn.Parameter)
