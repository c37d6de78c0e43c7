"""Objects and containers that steps and submodules are given, and that change or are changed."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.training.fits import Net, adamw, batches, compare, fit_twice
from tests.training.modules.test_equal import named


class Context:
    """Settings that code hands from place to place."""

    def __init__(self, device: torch.device) -> None:
        self.scale = 1.0
        self.mask = torch.ones(16, device=device)
        self.seen: list[Tensor] = []

    def later(self) -> None:
        """Other settings, for the second half of a fit."""
        self.scale = 3.0
        self.mask = self.mask * 0.5


class Block(nn.Module):
    """A layer that is given a context."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.keeps = keeps

    def forward(self, x: Tensor, context: Context) -> Tensor:
        hidden = self.linear(x) * context.scale * context.mask
        if self.keeps:
            context.seen.append(hidden)
        return hidden


class Settings(Net):
    """Hands a block the same context in every step; half-way it holds other values."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(16, 3)
        self.settings: list[Context] = []

    def context(self) -> Context:
        """The context of all steps."""
        if not self.settings:
            self.settings.append(Context(self.device))
        return self.settings[0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 10:
            self.context().later()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.block(batch["x"], self.context())
        return nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("capture", [{"scope": "step"}, named("block")])
def test_an_object_whose_values_change(
    backend: str, tmp_path: Path, capture: dict[str, Any], verify: bool
) -> None:
    capture = {**capture, "verify": verify}
    eager, captured = fit_twice(backend, tmp_path, module=Settings, capture=capture, validation=0)
    compare(eager, captured)
    assert captured.statistics.captures == 2
    assert len(captured.statistics.recaptures) == 1


class GivenInBatches(Settings):
    """Finds the context in the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.block(batch["x"], batch["context"])
        return nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "context": self.context()}


def test_an_object_in_the_batch_whose_values_change(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=GivenInBatches, validation=0)
    compare(eager, captured)
    assert captured.statistics.captures == 2
    (change,) = captured.statistics.recaptures
    assert 'batch["context"].scale: 1.0 -> 3.0' in change


class Counter:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.count = 0


class CountedInTheBatch(Net):
    """Counts in an object of the batch, where hooks find it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["counter"].count += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_step_that_stores_in_an_object_of_its_batch_runs_eagerly(
    backend: str, tmp_path: Path
) -> None:
    counters: list[Counter] = []

    def data() -> list[dict[str, Any]]:
        counters.append(Counter())
        return [{**batch, "counter": counters[-1]} for batch in batches()]

    capture = {"on_failure": "eager", "min_repeats": 0}
    eager, captured = fit_twice(
        backend, tmp_path, module=CountedInTheBatch, data=data, capture=capture, validation=0
    )
    compare(eager, captured, replayed=False)
    assert re.search(
        r"training_step changes batch\[\"counter\"\]", captured.statistics.fallbacks[0]
    )
    assert [counter.count for counter in counters] == [20, 20]
    assert captured.statistics.replayed == 0


class Collected(Net):
    """Blocks put their hidden values into a list or an object that the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(keeps=True)
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        context = Context(self.device)
        hidden = self.block(batch["x"], context)
        loss = nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])
        extra: list[Tensor] = [seen.square().mean() for seen in context.seen]
        return sum(extra, loss)


class BlockOfList(Block):
    """Leaves its hidden values in the list that it is given."""

    def forward(self, x: Tensor, context: Any) -> Tensor:
        hidden: Tensor = self.linear(x)
        context["hidden"].append(hidden)
        return hidden


class CollectedInList(Collected):
    """The list is in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.block = BlockOfList()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        context: dict[str, list[Tensor]] = {"hidden": []}
        hidden = self.block(batch["x"], context)
        loss = nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])
        return sum([seen.square().mean() for seen in context["hidden"]], loss)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize(
    ("kind", "name"), [(Collected, r"args\[1\]\.seen"), (CollectedInList, r"args\[1\]\['hidden'\]")]
)
def test_a_submodule_that_leaves_values_in_its_arguments_runs_eagerly(
    backend: str, tmp_path: Path, kind: type[Collected], name: str
) -> None:
    capture = {**named("block"), "on_failure": "eager"}
    eager, captured = fit_twice(backend, tmp_path, module=kind, capture=capture, validation=0)
    compare(eager, captured, replayed=False)
    reason = captured.statistics.fallbacks[0]
    assert re.search(f"`block` runs eagerly: .*: the call changes {name}", reason)


class Remembering(LightningModule):
    """A small GPT-2 as it comes, with its cache of keys and values."""

    def __init__(self, *, use_cache: bool, frozen: bool) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8, use_cache=use_cache,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.gpt = GPT2LMHeadModel(config)
        for name, parameter in self.gpt.named_parameters():
            parameter.requires_grad_(not frozen or "mlp" in name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.gpt(input_ids=batch["y"][None], labels=batch["y"][None]).loss
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_fill_a_cache_run_eagerly(
    backend: str, tmp_path: Path, frozen: bool, verify: bool
) -> None:
    capture = {**named("gpt.transformer.h.*"), "on_failure": "eager", "verify": verify}
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Remembering(use_cache=True, frozen=frozen),
        capture=capture,
        validation=0,
    )
    compare(eager, captured, replayed=False)
    assert "config.use_cache = False" in captured.statistics.fallbacks[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_without_a_cache_they_are_captured(backend: str, tmp_path: Path, frozen: bool) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Remembering(use_cache=False, frozen=frozen),
        capture=named("gpt.transformer.h.*"),
        validation=0,
    )
    compare(eager, captured)


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_cache_inside_of_a_whole_step_is_captured(
    backend: str, tmp_path: Path, use_cache: bool
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Remembering(use_cache=use_cache, frozen=False),
        validation=0,
    )
    compare(eager, captured)


class Stream:
    """An endless stream of factors, in an object of its author's."""

    def __init__(self) -> None:
        self.factors = itertools.cycle([1.0, 2.0, 3.0])

    def next(self) -> float:
        """The next factor."""
        return next(self.factors)


class Streaming(Net):
    """Takes a factor from a stream in every step."""

    def __init__(self, held: Callable[[], Any], take: Callable[[Any], float]) -> None:
        super().__init__()
        self.stream, self.take = held(), take

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.take(self.stream)


STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "in an object": (Stream, Stream.next),
    "in a list": (lambda: [itertools.cycle([1.0, 2.0, 3.0])], lambda held: next(held[0])),
    "in a dict": (lambda: {"a": iter([1.0, 2.0] * 20)}, lambda held: next(held["a"])),
}


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("place", STREAMS)
def test_an_iterator_inside_of_something_is_refused(
    backend: str, tmp_path: Path, place: str, verify: bool
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Streaming(*STREAMS[place]),
        capture={"on_failure": "eager", "verify": verify},
        validation=0,
    )
    compare(eager, captured, replayed=False)
    assert re.search("self.stream.*, an iterator, is read", captured.statistics.fallbacks[0])


class GivenAModule(nn.Module):
    """A block that is given another module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        hidden: Tensor = other(self.linear(x))
        return hidden


class OwnLayer(nn.Linear):
    """A layer of a class of one's own."""


class HandsAModule(Net):
    """Hands a registered module to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = GivenAModule(), OwnLayer(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"], self.other)}, batch_idx)


def test_a_module_as_an_argument(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=HandsAModule, capture=named("block"), validation=0
    )
    compare(eager, captured)
    assert captured.statistics.graphs[0].replays > 0


class Numbered(Net):
    """Two blocks are told their number by one object."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 3)
        self.down = nn.Linear(16, 8)
        self.context: list[Context] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.context:
            self.context.append(Context(self.device))
        context = self.context[0]
        context.scale = 1.0
        hidden = self.down(self.blocks[0](batch["x"], context))
        context.scale = 2.0
        hidden = self.blocks[1](hidden, context)
        return nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_an_object_that_changes_within_the_step(backend: str, tmp_path: Path) -> None:
    capture = {**named("blocks.*"), "on_failure": "eager"}
    eager, captured = fit_twice(backend, tmp_path, module=Numbered, capture=capture, validation=0)
    compare(eager, captured, replayed=False)
    found = {graph.scope: graph.replays for graph in captured.statistics.graphs}
    assert found["module blocks.0"] == 0 < found["module blocks.1"]


def values_made_anew() -> dict[str, Any]:
    return {
        "rows": slice(0, 4),
        "range": range(2),
        "share": Fraction(1, 4),
        "place": Path("/tmp") / "runs",
        "every": datetime.timedelta(minutes=1),
        "scale": partial(torch.mul, other=0.5),
        "weights": np.array([1.0, 2.0]),
        "nested": [{"device": torch.device("cpu"), "size": torch.Size([2])}],
    }


class SetAnew(Net):
    """A hook sets an attribute to an equal value ahead of each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.settings = values_made_anew()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        settings = self.settings
        rows = batch["x"][settings["rows"]] * float(settings["share"])
        return self.loss(batch) + settings["scale"](self.net(rows)).mean() * len(settings["range"])


def test_an_attribute_that_is_set_anew_with_an_equal_value(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=SetAnew)
    compare(eager, captured)
    assert captured.statistics.captures == 1


class OtherTensor(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.given = [torch.full((3,), float(batch_idx), device=self.device)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (self.net(batch["x"]) * self.given[0]).mean()


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_no_reason_has_an_address_in_it(backend: str, tmp_path: Path) -> None:
    capture = {"on_failure": "eager"}
    eager, captured = fit_twice(backend, tmp_path, module=OtherTensor, capture=capture)
    compare(eager, captured, replayed=False)
    said = " ".join(captured.statistics.fallbacks)
    assert "self.given[0]: another Tensor float32[3]" in said
    assert " at 0x" not in said


class Sized(Net):
    """Makes its tables anew where the batch has another size, as temporal fusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.mask, self.given = -1, torch.zeros(1), torch.zeros(1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.given = torch.full((3,), float(batch_idx), device=self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (size := len(batch["x"])) != self.size:
            self.mask = torch.tril(torch.ones(size, size, device=self.device))
            self.size = size
        mixed = self.mask @ self.net(batch["x"]) * self.given
        return self.loss(batch) + mixed.square().mean()


def test_tensors_of_attributes_that_are_made_anew(backend: str, tmp_path: Path) -> None:
    """They are inputs of the step from the second graph on."""
    options: dict[str, Any] = {"data": lambda: batches(10, last=5), "max_epochs": 6}
    eager, captured = fit_twice(backend, tmp_path, module=Sized, **options)
    compare(eager, captured)
    assert captured.statistics.captures <= 6  # however many epochs
    assert captured.statistics.replayed > 36
    assert torch.equal(captured.module.mask, eager.module.mask)
