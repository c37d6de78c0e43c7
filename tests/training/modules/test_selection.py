"""Which submodules a name, a pattern or a class means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_graphs.policy.options import OptionError
from lightning_graphs.regions.dispatch import select
from tests.training.fits import assert_nothing_left, prepare


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.tied = self.encoder.norm


def names(*patterns: str, exclude: Any = ()) -> list[str]:
    return list(select(Model(), patterns, exclude))


LAYERS = [f"encoder.layers.{i}" for i in range(3)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("backbone", ["backbone"]),
        ("encoder.layers.*", LAYERS),
        ("encoder.layers.[02]", [LAYERS[0], LAYERS[2]]),
        ("*.layers.1.inner", ["encoder.layers.1.inner"]),
        ("Layer", LAYERS),
        (f"{__name__}.Layer", LAYERS),
        ("torch.nn.modules.normalization.LayerNorm", ["encoder.norm"]),
    ],
)
def test_a_pattern_means_these(pattern: str, expected: list[str]) -> None:
    assert names(pattern) == expected


def test_several_patterns_select_in_the_order_of_the_model() -> None:
    assert names("backbone", "encoder.layers.*") == [*LAYERS, "backbone"]
    assert names("encoder.layers.*", "Layer") == LAYERS


@pytest.mark.parametrize("exclude", ["encoder.layers.1", "encoder.layers.[1]"])
def test_what_is_excluded_is_left_out(exclude: str) -> None:
    assert names("encoder.layers.*", exclude=[exclude]) == [LAYERS[0], LAYERS[2]]


def test_excluding_settles_what_would_be_inside_of_another() -> None:
    assert names("encoder.*", "Layer", exclude=["encoder.layers"]) == [*LAYERS, "encoder.norm"]


def test_the_modules_selected_are_those_of_the_model() -> None:
    model = Model()
    assert select(model, ["backbone", "Encoder"], ()) == {
        "encoder": model.encoder,
        "backbone": model.backbone,
    }


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [("backbon", "backbone"), ("encoder.layer.*", "encoder.layers"), ("Layers", "Layer")],
)
def test_a_pattern_that_matches_nothing_is_refused(pattern: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=rf"which matches none\n.*nearest names: .*{nearest}"):
        names(pattern)
    with pytest.raises(OptionError, match="exclude must name submodules or their classes"):
        names("backbone", exclude=[pattern])


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("encodr.layers.*", "encoder.layers.*"),
        ("encoder.layer.*.inner", "encoder.layers.*.inner"),
        ("backbon.*", "backbone.*"),
        ("layers.*", "encoder.layers.*"),
        ("Encodr", "Encoder"),
    ],
)
def test_the_likeliest_pattern_is_offered_first(pattern: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=rf"nearest names: {re.escape(nearest)}(,|$)"):
        names(pattern)


def test_of_a_module_and_its_ancestor_the_outer_one_is_graphed() -> None:
    assert names("encoder", "Layer") == ["encoder"]
    assert names("backbone.0", "backbone") == ["backbone"]
    assert names("Layer", "Linear") == [*LAYERS, "backbone.0"]


def test_what_is_excluded_inside_of_a_module_is_not_graphed_with_it() -> None:
    with pytest.raises(OptionError, match=r"with `encoder\.norm`, which is inside of `encoder`"):
        names("encoder", exclude=["encoder.norm"])


def test_a_class_name_means_all_classes_of_that_name() -> None:
    other = type("Layer", (nn.Linear,), {"__module__": "elsewhere"})
    model = Model()
    model.other = other(2, 2)
    assert list(select(model, ["Layer"], ())) == [*LAYERS, "other"]
    assert list(select(model, ["elsewhere.Layer"], ())) == ["other"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["nett"]}, "the nearest names: net"),
        ({"exclude": ["nett"]}, "exclude must name submodules"),
    ],
)
def test_a_fit_is_refused_before_its_first_step(
    backend: str, tmp_path: Path, options: Any, message: str
) -> None:
    fit = prepare(backend, tmp_path, True, capture={"scope": "modules", **options})
    with pytest.raises(OptionError, match=message):
        fit.run()
    assert fit.trainer.global_step == 0
    assert_nothing_left(fit)


def test_nothing_is_like_the_pattern() -> None:
    with pytest.raises(OptionError, match="the outermost ones are layers, norm"):
        select(Encoder(), ["qqqqqqqqq"], ())


def test_exclude_takes_out_everything() -> None:
    observed = r"got exclude=\['layers\.\*'\] for modules=\['layers\.0', 'layers\.1'\]"
    with pytest.raises(OptionError, match=observed):
        select(Encoder(), ["layers.0", "layers.1"], ["layers.*"])
