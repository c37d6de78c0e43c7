"""Kinds of batches, and shapes that change."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_graphs.values.tree import leaves_of
from tests.training.examined import examined, rows
from tests.training.fits import (
    GradientTrace,
    Net,
    Trace,
    batches,
    compare,
    fit_twice,
    loader_of,
    prepare,
    warned,
)

Pair = namedtuple("Pair", ["x", "y"])
TOO_MANY = pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly. max_graphs")


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = "sample"


KINDS: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tensor": (
        lambda b: torch.cat([b["x"], b["y"][:, None].float()], 1),
        lambda b: (b[:, :8], b[:, 8].long()),
    ),
    "tuple": (lambda b: (b["x"], b["y"]), lambda b: (b[0], b[1])),
    "list": (lambda b: [b["x"], b["y"]], lambda b: (b[0], b[1])),
    "dict": (lambda b: b, lambda b: (b["x"], b["y"])),
    "namedtuple": (lambda b: Pair(b["x"], b["y"]), lambda b: (b.x, b.y)),
    "dataclass": (lambda b: Sample(b["x"], b["y"]), lambda b: (b.x, b.y)),
    "nested": (
        lambda b: {"in": [(b["x"], "text", 3), None], "out": {"y": b["y"], "n": 2.5, "ok": True}},
        lambda b: (b["in"][0][0], b["out"]["y"]),
    ),
    "same tensor twice": (
        lambda b: (b["x"], b["x"], b["y"]), lambda b: (0.5 * b[0] + 0.5 * b[1], b[2]),
    ),
    "transposed": (
        lambda b: {"x": b["x"].t().contiguous().t(), "y": b["y"]}, lambda b: (b["x"], b["y"]),
    ),
    "expanded": (
        lambda b: {"x": b["x"][:, :1].expand(-1, 8), "y": b["y"]}, lambda b: (b["x"], b["y"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_batch(backend: str, tmp_path: Path, kind: str) -> None:
    pack, unpack = KINDS[kind]

    class Packed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = unpack(batch)
            loss = nn.functional.cross_entropy(self.net(x), y)
            # Lightning cannot tell the batch size of every kind.
            self.log("loss", loss, batch_size=8)
            return loss

    compare(*fit_twice(backend, tmp_path, module=Packed, data=lambda: [pack(b) for b in batches()]))


@pytest.mark.filterwarnings("ignore:GraphCapture", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_tensors_that_are_not_strided(backend: str, tmp_path: Path, kind: str) -> None:
    """No step with such a batch is a graph; what submodules are given is dense."""

    def packed(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if kind == "sparse":
            return batch["x"].to_sparse(), batch["y"]
        return torch.nested.nested_tensor(list(batch["x"][:, None])), batch["y"]

    class Packed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0]
            x = x.to_dense() if kind == "sparse" else torch.nested.to_padded_tensor(x, 0.0)[:, 0]
            return self.loss({"x": x, "y": batch[1]})

    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Packed,
        data=lambda: [packed(b) for b in batches()],
        capture={"scope": "auto", "on_failure": "eager"},
        validation=0,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0


@pytest.mark.filterwarnings("ignore:GraphCapture", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("place", ["root", "submodule"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers(backend: str, tmp_path: Path, layout: torch.layout, place: str) -> None:
    """The adjacency of a graph network, which a hook weights anew."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.register_buffer("mix", torch.eye(8).to_sparse(layout=layout), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (self.mix @ x)

    class Graph(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = Mixing()
            if place == "root":
                self.register_buffer("mix", self.mixing.mix, persistent=False)
                self.mixing = nn.Linear(8, 8)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            x = self.mixing(batch["x"])
            return self.loss({**batch, "x": self.mix @ x if place == "root" else x})

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % 4 == 3:
                mix = self.mix if place == "root" else self.mixing.mix
                mix.copy_(1.5 * mix)

    options: dict[str, Any] = {"module": Graph, "validation": 0}
    options["capture"] = {"scope": "auto", "on_failure": "eager"}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0


def test_training_step_without_batch_idx(backend: str, tmp_path: Path) -> None:
    class Short(Net):
        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

    compare(*fit_twice(backend, tmp_path, module=Short))


def test_training_step_that_changes_its_batch(backend: str, tmp_path: Path) -> None:
    class Changing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["extra"] = batch.pop("x") * 2
            return nn.functional.cross_entropy(self.net(batch["extra"]), batch["y"])

    def data() -> Any:
        return DataLoader(batches(), batch_size=None, collate_fn=dict)

    eager, captured = fit_twice(backend, tmp_path, module=Changing, data=data)
    compare(eager, captured)


class SeesBatches(Trace):
    """Also looks at what the step has left of its batch."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note("batch", trainer, pl_module, batch)


class Masked(Net):
    """A learned token in place of some entries, and labels that do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        y[y == 2] = -100
        x[::2] = self.token
        return self.loss(batch)


class MixedUp(Net):
    """As the ``Mixup`` of timm."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        share = np.random.beta(0.4, 0.4)
        flipped = x.flip(0).mul_(1.0 - share)
        x.mul_(share).add_(flipped)
        logits = self.net(x)
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y.flip(0))


@pytest.mark.parametrize("module", [Masked, MixedUp])
def test_hooks_see_what_a_step_has_written_into_its_batch(
    backend: str, tmp_path: Path, module: type[Net]
) -> None:
    def data() -> Any:
        return DataLoader(batches(), batch_size=None, collate_fn=copy.deepcopy)

    eager, captured = fit_twice(backend, tmp_path, module=module, trace=SeesBatches, data=data)
    compare(eager, captured)


def test_tensors_of_a_batch_that_share_memory_are_not_written(backend: str, tmp_path: Path) -> None:
    class Shifted(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch["x"][1:], "before": batch["x"][:-1], "y": batch["y"][1:]}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["x"].mul_(2.0)
            batch["x"] = batch["x"] + batch["before"]
            return self.loss(batch)

    warned(backend, tmp_path, "memory.*training_step changes one of them in place", module=Shifted)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_combined_loader(backend: str, tmp_path: Path, mode: str) -> None:
    class Combined(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = [p for p in (batch.values() if "a" in batch else [batch]) if p is not None]
            return torch.stack([self.loss(part) for part in parts]).mean()

    def data() -> Any:
        loaders = {"a": loader_of(batches(5)), "b": loader_of(batches(7, size=4))}
        return CombinedLoader(loaders, mode)

    compare(*fit_twice(backend, tmp_path, module=Combined, data=data, max_epochs=4))


def test_shuffling_loader(backend: str, tmp_path: Path) -> None:
    class Pairs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss({"x": batch[0], "y": batch[1]})

    def data() -> Any:
        first, *rest = batches()
        x = torch.cat([first["x"], *(b["x"] for b in rest)])
        y = torch.cat([first["y"], *(b["y"] for b in rest)])
        return DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)

    compare(*fit_twice(backend, tmp_path, module=Pairs, data=data, max_epochs=4))


def lengths(*sizes: int) -> Callable[[], list[dict[str, Any]]]:
    """Batches of these numbers of samples."""

    def data() -> list[dict[str, Any]]:
        return [
            {key: value[:size] for key, value in batch.items()}
            for batch, size in zip(batches(len(sizes), size=32), sizes, strict=True)
        ]

    return data


@pytest.mark.parametrize("trace", [Trace, GradientTrace])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_last_batch_smaller(
    backend: str, tmp_path: Path, accumulate: int, trace: type[Trace]
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, data=lambda: batches(8, last=5), max_epochs=6, trace=trace,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    compare(eager, captured)
    assert any('batch["x"]' in change for change in captured.statistics.recaptures)


def test_several_lengths_get_a_graph_each(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, data=lengths(8, 16, 24, 8, 16, 24, 16, 8, 24, 8), max_epochs=4
    )
    compare(eager, captured)
    assert captured.statistics.captures == 3
    assert 'batch["x"]: f32[' in captured.statistics.recaptures[0]


@pytest.mark.parametrize(("min_repeats", "captures"), [(0, 2), (1, 2), (5, 1)])
def test_capture_after(backend: str, tmp_path: Path, min_repeats: int, captures: int) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, data=lengths(8, 8, 8, 8, 4), max_epochs=5,
        capture={"min_repeats": min_repeats},
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.captures == captures


def test_warmup_steps(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, capture={"warmup_steps": 7, "min_repeats": 0}, max_epochs=2
    )
    compare(eager, captured)
    assert (captured.statistics.eager, captured.statistics.replayed) == (7, 13)


@TOO_MANY
def test_no_graph_goes_for_one_that_is_used_no_more(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, data=lengths(4, 8, 4, 8, 12, 12, 4, 8, 12), max_epochs=4,
        capture={"max_graphs": 2, "min_repeats": 0},
    )  # fmt: skip
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 2
    assert captured.statistics.replayed == 23
    (reason,) = captured.statistics.fallbacks
    assert "max_graphs=2 allows no more graphs; raise it, or pad" in reason


@TOO_MANY
def test_a_graph_goes_for_one_that_is_used_much_more(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, data=lengths(4, 4, 8, *[12] * 40), max_epochs=1,
        capture={"max_graphs": 2, "min_repeats": 0, "warmup_steps": 1},
    )  # fmt: skip
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 3
    assert captured.statistics.replayed == 21


class Flipping(Net):
    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch % 2 == 0)


def test_train_and_eval_flips_during_training(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Flipping, max_epochs=5)
    compare(eager, captured)
    assert captured.statistics.captures == 2
    assert "train/eval mode of 1 module" in captured.statistics.recaptures[0]


class Noise(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("noise", self.net[3](torch.ones(16, device=loss.device)).sum())
        return loss


def test_dropout_differs_at_every_replay_and_a_seed_reproduces_it(
    backend: str, tmp_path: Path
) -> None:
    runs = [
        prepare(backend, tmp_path / str(i), True, module=Noise, seed=seed).run()
        for i, seed in enumerate((1, 1, 2))
    ]
    assert runs[0].csv == runs[1].csv
    assert runs[0].csv != runs[2].csv
    eager = prepare(backend, tmp_path, False, module=Noise).run()
    compare(eager, runs[0])
    column = eager.csv.splitlines()[0].split(",").index("noise")
    noise = [line.split(",")[column] for line in eager.csv.splitlines()[1:]]
    assert len(set(noise)) > 4


@dataclass
class Stamped:
    """A dataclass that has more than its fields."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.scale = float(self.x[0, 0] > 0) + 1.0

    @cached_property
    def mean(self) -> Tensor:
        """Computed when it is first asked for."""
        return self.x.mean()


class StampedDict(dict[str, Any]):
    """A dict with attributes."""

    def __init__(self, *given: Any, **items: Any) -> None:
        super().__init__(*given, **items)
        self.scale = float(self["x"][0, 0] > 0) + 1.0


class StampedUserDict(UserDict[str, Any]):
    """Another one."""

    def __init__(self, *given: Any, **items: Any) -> None:
        super().__init__(*given, **items)
        self.scale = float(self["x"][0, 0] > 0) + 1.0


class ItemsAreAttributes(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, *given: Any, **items: Any) -> None:
        super().__init__(*given, **items)
        self.__dict__ = self
        self["scale"] = float(self["x"][0, 0] > 0) + 1.0


class Scaled(Net):
    """Reads an attribute that is neither a field nor an item."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, Stamped):
            loss = super().loss({"x": batch.x - batch.mean, "y": batch.y})
        else:
            named = isinstance(batch, ItemsAreAttributes)
            loss = super().loss({"x": batch.x if named else batch["x"], "y": batch["y"]})
        return loss * batch.scale


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", [Stamped, StampedDict, StampedUserDict, ItemsAreAttributes])
def test_attributes_of_containers(
    backend: str, tmp_path: Path, kind: Callable[..., Any], verify: bool
) -> None:
    def data() -> list[Any]:
        return [kind(**batch) for batch in batches(16)]

    eager, captured = fit_twice(
        backend, tmp_path, module=Scaled, data=data, capture={"verify": verify}, validation=0
    )
    compare(eager, captured)
    assert captured.statistics.captures == 2


class Changing(Net):
    """Changes containers of its batch, and uses what it has put there."""

    change: Callable[[Any, int], object]

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.loaded: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        type(self).change(batch, batch_idx)
        leaves = [leaf.double().sum() for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
        factor = float(len(batch) + len(batch.get("meta", "")))
        return self.loss({"x": x, "y": y}) * factor + 1e-3 * torch.stack(leaves).sum()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.loaded = leaves_of(batch, Tensor)
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        moved = [any(x is t for t in self.loaded) for x in leaves_of(batch, Tensor)]
        self.seen.append(f"{batch} {moved}")


def nested_batches(count: int = 10) -> list[dict[str, Any]]:
    """Batches with containers and attributes in them, and with a value that differs."""
    return [
        {
            **batch,
            "meta": {"ids": [torch.ones(3)], "scale": 1.0, "pair": (torch.zeros(()), [2])},
            "path": f"{i}.png",
            "row": Row(torch.ones(2)),
            "last": deque([1, 2], maxlen=3),
            "sums": defaultdict(list, {"a": [torch.ones(1)]}),
            "order": OrderedDict(a=1, b=torch.ones(1)),
        }
        for i, batch in enumerate(batches(count))
    ]


@dataclass(slots=True)
class Row:
    """What is in a batch, in slots."""

    value: Any
    note: Any = None


BATCH_CHANGES: dict[str, Callable[[Any, int], object]] = {
    "adds": lambda b, i: b.update(extra=2.0),
    "adds a tensor": lambda b, i: b.update(extra={"twice": [b["x"] * 2, b["y"], 1.0]}),
    "removes": lambda b, i: b.pop("y"),
    "renames": lambda b, i: b.update(extra=b.pop("x")),
    "moves to the end": lambda b, i: b.update(x=b.pop("x")),
    "moves a container": lambda b, i: b.update(inner=b.pop("meta")["ids"]),
    "moves a value": lambda b, i: b.update(name=b.pop("path"), inner={"row": b["row"], "i": [i]}),
    "exchanges a tensor": lambda b, i: b.update(x=b["x"] * 2),
    "exchanges two": lambda b, i: b.update(x=b["y"], y=b["x"]),
    "exchanges a number": lambda b, i: b["meta"].update(scale=3.0),
    "a number of the trainer": lambda b, i: b.update(at=i * 2, none=None),
    "once in two steps": lambda b, i: b.update(odd=b["x"] + 1) if i % 2 else None,
    "a default": lambda b, i: b.setdefault("extra", [b["x"].sum()]).append(i),
    "of another order": lambda b, i: b["order"].move_to_end("a"),
    "of keys that come": lambda b, i: b["sums"]["b"].append(b["x"].mean()),
    "the last item": lambda b, i: b.popitem(),
    "all": lambda b, i: (b.clear(), b.update(extra=torch.ones(2, device=self_device(b)))),
    "appends": lambda b, i: b["meta"]["ids"].append(1),
    "puts in front": lambda b, i: b["meta"]["ids"].insert(0, b["x"].mean()),
    "a slice": lambda b, i: b["meta"]["ids"].__setitem__(slice(None), [b["x"].mean(), 1]),
    "turns round": lambda b, i: (b["meta"]["ids"].append(0), b["meta"]["ids"].reverse()),
    "empties": lambda b, i: b["meta"]["ids"].clear(),
    "in a tuple": lambda b, i: b["meta"]["pair"][1].append(b["x"].mean()),
    "exchanges a tuple": lambda b, i: b["meta"].update(pair=(b["x"].sum(), 1)),
    "a deque": lambda b, i: b["last"].extend([b["x"].mean(), 2.0]),
    "slots": lambda b, i: (setattr(b["row"], "value", b["x"].mean()), setattr(b["row"], "note", 1)),
}


def self_device(batch: Any) -> Any:
    """Where its tensors are."""
    return next((leaf.device for leaf in leaves_of(batch, Tensor)), torch.device("cpu"))


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("kind", BATCH_CHANGES)
def test_hooks_find_what_a_step_does_to_containers_of_its_batch(
    backend: str, tmp_path: Path, kind: str, scope: str
) -> None:
    module = type("Changes", (Changing,), {"change": staticmethod(BATCH_CHANGES[kind])})
    capture = {"scope": scope, "verify": 3 if scope == "step" else True}
    eager, captured = fit_twice(
        backend, tmp_path, module=module, data=nested_batches, validation=0, capture=capture
    )
    compare(eager, captured)
    assert captured.module.seen == eager.module.seen


class Info:
    """An object in a batch."""

    def __init__(self) -> None:
        self.uses = 0


NO_BATCH_CHANGES: dict[str, Callable[[Any, int], object]] = {
    "an attribute of an object": lambda b, i: setattr(b["info"], "uses", 1),
    "a set": lambda b, i: b["tags"].add("used"),
    "an object": lambda b, i: b.update(other=Info()),
}


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("kind", NO_BATCH_CHANGES)
def test_what_no_replay_does_to_its_batch_is_refused(
    backend: str, tmp_path: Path, kind: str
) -> None:
    def data() -> list[Any]:
        return [{**batch, "info": Info(), "tags": {"a"}} for batch in batches()]

    class Noting(Changing):
        change = staticmethod(NO_BATCH_CHANGES[kind])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(f"{list(batch)} {batch['tags']} {batch['info'].uses}")

    capture = {"on_failure": "eager"}
    fits = fit_twice(
        backend, tmp_path, module=Noting, data=data, validation=0, max_epochs=1, capture=capture
    )
    compare(*fits, replayed=False)
    assert fits[1].module.seen == fits[0].module.seen
    said = fits[1].statistics.fallbacks[0]
    found = re.search(r"training_step changes (batch\[[^ ,]*)", said)
    assert found is not None
    watched = examined(backend, tmp_path, module=Noting, data=data, validation=0)
    [row] = rows(watched, "python-state")
    assert (row.operator.partition(",")[0], row.effect) == (found[1], "eager step")


class LeavesAPrediction(Scaled):
    """Leaves an attribute and a field in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(f"{batch} {batch.prediction} {batch.x}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        batch.prediction = batch.x = loss.detach()
        return loss


@pytest.mark.parametrize("kind", [Stamped, StampedUserDict])
def test_a_step_that_leaves_attributes_in_its_batch_trains_the_same(
    backend: str, tmp_path: Path, kind: Callable[..., Any]
) -> None:
    def data() -> list[Any]:
        return [kind(**batch) for batch in batches(16)]

    eager, captured = fit_twice(
        backend, tmp_path, module=LeavesAPrediction, data=data, validation=0
    )
    compare(eager, captured)
    assert captured.module.found == eager.module.found
