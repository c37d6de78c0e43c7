"""Kinds of batches, and shapes that change."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_graphs.values.tree import leaves_of
from tests.programs.table import Promises, of_sizes, row
from tests.training.fits import Net, Trace, batches, loader_of

Pair = namedtuple("Pair", ["x", "y"])


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


def packed(unpack: Callable[[Any], tuple[Tensor, Tensor]]) -> type[Net]:
    class Packed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = unpack(batch)
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, batch_size=8)  # Lightning cannot tell that of every kind
            return loss

    return Packed


NOT_STRIDED = {  # no step with such a batch is a graph; what submodules are given is dense
    "sparse": (lambda b: (b["x"].to_sparse(), b["y"]), lambda b: (b[0].to_dense(), b[1])),
    "nested tensor": (
        lambda b: (torch.nested.nested_tensor(list(b["x"][:, None])), b["y"]),
        lambda b: (torch.nested.to_padded_tensor(b[0], 0.0)[:, 0], b[1]),
    ),
}


class Mixing(nn.Module):
    """The adjacency of a graph network."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mix", torch.eye(8).to_sparse(layout=layout), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.mix @ x)


class OfSubmodule(Net):
    """A hook sets the weights of a sparse buffer again."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.mixing = Mixing(layout)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.mixing(batch["x"])})

    def sparse(self) -> Any:
        return self.mixing.mix

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 3:
            self.sparse().copy_(1.5 * self.sparse())


class OfRoot(OfSubmodule):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__(layout)
        self.register_buffer("mix", self.mixing.mix, persistent=False)
        self.mixing = nn.Linear(8, 8)  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.mix @ batch["x"]}, batch_idx)

    def sparse(self) -> Any:
        return self.mix


class Short(Net):
    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)


class Renaming(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["extra"] = batch.pop("x") * 2
        return nn.functional.cross_entropy(self.net(batch["extra"]), batch["y"])


class Shifted(Net):
    """Tensors of its batch share memory, and are written."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch["x"][1:], "before": batch["x"][:-1], "y": batch["y"][1:]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["x"].mul_(2.0)
        batch["x"] = batch["x"] + batch["before"]
        return self.loss(batch)


class Combined(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [p for p in (batch.values() if "a" in batch else [batch]) if p is not None]
        return torch.stack([self.loss(part) for part in parts]).mean()


def combined(mode: str) -> Any:
    loaders = {"a": loader_of(batches(5)), "b": loader_of(batches(7, size=4))}
    return CombinedLoader(loaders, mode)


class Pairs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({"x": batch[0], "y": batch[1]})


def shuffled() -> Any:
    x, y = (torch.cat([batch[key] for batch in batches()]) for key in ("x", "y"))
    return DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)


def copied_anew(collate: Any = copy.deepcopy) -> Any:
    """A loader whose batches are not those of the epoch before."""
    return DataLoader(batches(), batch_size=None, collate_fn=collate)


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


class CutAndMixed(Net):
    """Writes a part of its batch in place, if it draws so on the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"]
        if np.random.rand() < 0.5:
            x[:, 1:3] = x[torch.randperm(x.size(0)).to(self.device), 1:3]
        return super().training_step(batch, batch_idx)


class MixedUp(Net):
    """As the ``Mixup`` of timm."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        share = np.random.beta(0.4, 0.4)
        flipped = x.flip(0).mul_(1.0 - share)
        x.mul_(share).add_(flipped)
        logits = self.net(x)
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y.flip(0))


class Flipping(Net):
    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch % 2 == 0)


class Noise(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("noise", self.net[3](torch.ones(16, device=loss.device)).sum())
        return loss


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


class Info:
    """An object in a batch."""

    def __init__(self) -> None:
        self.uses = 0


class Noting(Changing):
    """Notes what is known of an object."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(f"{list(batch)} {batch['tags']} {batch['info'].uses}")


NO_BATCH_CHANGES: dict[str, Callable[[Any, int], object]] = {
    "an attribute of an object": lambda b, i: setattr(b["info"], "uses", 1),
    "a set": lambda b, i: b["tags"].add("used"),
    "an object": lambda b, i: b.update(other=Info()),
}


class LeavesAPrediction(Scaled):
    """Leaves an attribute and a field in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(f"{batch} {batch.prediction} {batch.x}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        batch.prediction = batch.x = loss.detach()
        return loss


def changing(base: type[Changing], change: Callable[[Any, int], object]) -> type[Changing]:
    return type("Changes", (base,), {"change": staticmethod(change), "body": change})


def noise(fit: Any) -> set[str]:
    """What dropout has made of ones, in each step."""
    head, *lines = (line.split(",") for line in fit.csv.splitlines())
    return {line[head.index("noise")] for line in lines}


def of(pack: Callable[[Any], Any], count: int = 10) -> Any:
    """Makes batches of a kind."""
    return lambda: [pack(batch) for batch in batches(count)]


WINDOWS = "by threes; clipped"
ROWS = {
    **{kind: row(packed(unpack), data=of(pack)) for kind, (pack, unpack) in KINDS.items()},
    **{
        kind: row(
            packed(unpack), said=None, replayed=1, capture={"scope": "auto"}, validation=0,
            data=of(pack), ignored="The PyTorch API of nested tensors",
        )
        for kind, (pack, unpack) in NOT_STRIDED.items()
    },
    **{
        f"{layout} {kind.__name__}": row(
            partial(kind, layout), said=None, replayed=1, capture={"scope": "auto"}, validation=0,
            ignored="Sparse CSR tensor support",
        )
        for layout in (torch.sparse_coo, torch.sparse_csr) for kind in (OfRoot, OfSubmodule)
    },
    "without batch_idx": row(Short),
    "renamed": row(Renaming, data=partial(copied_anew, dict)),
    "masked": row(Masked, trace=SeesBatches, data=copied_anew),
    "mixed up": row(MixedUp, trace=SeesBatches, data=copied_anew),
    "cut and mixed": row(
        CutAndMixed, trace=SeesBatches, data=copied_anew, max_epochs=3, also="unverified; cut",
    ),
    "shared memory": row(
        Shifted, said="memory.*training_step changes one of them in place",
        placed=False, found="rule remedy",
    ),
    **{
        mode: row(Combined, data=partial(combined, mode), max_epochs=4)
        for mode in ("min_size", "max_size_cycle", "max_size")
    },
    "shuffled": row(Pairs, data=shuffled, max_epochs=4),
    "a smaller last batch": row(
        data=lambda: batches(8, last=5), max_epochs=6, also=WINDOWS, changes=('batch["x"]',),
    ),
    "several lengths": row(
        data=of_sizes(8, 16, 24, 8, 16, 24, 16, 8, 24, 8), max_epochs=4, graphs=3, found=None,
        changes=('batch["x"]: f32[', 'batch["x"]: f32['),
    ),
    **{
        f"min_repeats={least}": row(
            data=of_sizes(8, 8, 8, 8, 4), max_epochs=5, capture={"min_repeats": least},
            graphs=graphs,
        )
        for least, graphs in ((0, 2), (1, 2), (5, 1))
    },
    "warmup_steps": row(
        capture={"warmup_steps": 7, "min_repeats": 0},
        check=lambda fit: (fit.statistics.eager, fit.statistics.replayed) == (7, 13),
    ),
    "no graph goes for one that is used no more": row(
        data=of_sizes(4, 8, 4, 8, 12, 12, 4, 8, 12), max_epochs=4, graphs=2, replayed=23,
        capture={"max_graphs": 2, "min_repeats": 0}, placed=False,
        said="max_graphs=2 allows no more graphs; raise it, or pad",
    ),
    "a graph goes for one that is used much more": row(
        data=of_sizes(4, 4, 8, *[12] * 40), max_epochs=1, graphs=3, replayed=21,
        capture={"max_graphs": 2, "min_repeats": 0, "warmup_steps": 1}, said="max_graphs",
        placed=False,
    ),
    "train and eval": row(
        Flipping, max_epochs=5, graphs=2, changes=("train/eval mode of 1 module",)
    ),
    "dropout": row(Noise, check=lambda fit: len(noise(fit)) > 4),
    **{
        kind.__name__: row(
            Scaled, data=of(lambda b, kind=kind: kind(**b), 16), graphs=2, also="unverified",
            validation=0, found=None,
        )
        for kind in (Stamped, StampedDict, StampedUserDict, ItemsAreAttributes)
    },
    **{
        f"leaves a prediction in {kind.__name__}": row(
            LeavesAPrediction, data=of(lambda b, kind=kind: kind(**b), 16), validation=0,
            found=None,
        )
        for kind in (Stamped, StampedUserDict)
    },
    **{
        kind: row(
            changing(Changing, change), capture={"verify": 3}, below="", data=nested_batches,
            validation=0,
        )
        for kind, change in BATCH_CHANGES.items()
    },
    **{
        kind: row(
            changing(Noting, change), said=r"training_step changes batch\[", validation=0,
            found="rule remedy", placed=False, max_epochs=1,
            data=of(lambda b: {**b, "info": Info(), "tags": {"a"}}),
        )
        for kind, change in NO_BATCH_CHANGES.items()
    },
}  # fmt: skip


class TestBatches(Promises):
    rows = ROWS
