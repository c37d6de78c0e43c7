"""Python values in batches: those that a step does not read are none of a graph's business."""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.programs.table import Promises, row, table
from tests.programs.test_batches import packed
from tests.training.fits import Net, batches


class Named(NamedTuple):
    x: Tensor
    y: Tensor
    names: list[str]


@dataclass
class Sheet:
    x: Tensor
    y: Tensor
    source: str
    dates: dict[str, float]


class Encoding(UserDict[str, Any]):
    """As transformers' ``BatchEncoding``: a dict with a method ``to``, and more."""

    def __init__(self, data: dict[str, Any], origin: object = None) -> None:
        super().__init__(data)
        self.origin = origin

    def to(self, device: Any, **_: Any) -> Encoding:
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.data.items()}
        return Encoding(moved, self.origin)


class Store:
    """What a graph keeps its tensors in; it knows the graph."""

    def __init__(self, parent: Graph, values: dict[str, Any]) -> None:
        self.values = values
        self.parent = weakref.ref(parent)

    def to(self, device: Any) -> None:
        for key, value in self.values.items():
            self.values[key] = value.to(device) if isinstance(value, Tensor) else value


class Graph:
    """As PyG's ``Data``: its attributes are those of a store, which it moves."""

    def __init__(self, **values: Any) -> None:
        self._store = Store(self, values)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key not in self.__dict__["_store"].values:
            raise AttributeError(key)
        return self._store.values[key]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._store.values.items())

    @property
    def doubled(self) -> Tensor:
        """Found by way of the store, which asks its parent."""
        return self._store.parent().x * 2  # type: ignore[union-attr]

    def to(self, device: Any, **_: Any) -> Graph:
        self._store.to(device)
        return self


class Moving:
    """A batch with a method ``to`` and nothing special."""

    def __init__(self, x: Tensor, y: Tensor, path: str) -> None:
        self.x, self.y, self.path = x, y, path

    def to(self, device: Any, **_: Any) -> Moving:
        return Moving(self.x.to(device), self.y.to(device), self.path)


class Ident:
    """Some object."""

    def __init__(self, number: int) -> None:
        self.number = number


Batch = dict[str, Any]
Unpack = Callable[[Any], tuple[Tensor, Tensor]]


def by_key(b: Any) -> tuple[Tensor, Tensor]:
    return b["x"], b["y"]


def by_name(b: Any) -> tuple[Tensor, Tensor]:
    return b.x, b.y


def unpacked(b: Any) -> tuple[Tensor, Tensor]:
    x, y, _ = b
    return x, y


KINDS: dict[str, tuple[Callable[[Batch, int], Any], Unpack]] = {
    "paths": (lambda b, i: [b["x"], b["y"], [f"{i}-{j}.png" for j in range(8)]], unpacked),
    "path": (lambda b, i: (b["x"], b["y"], f"{i}.png"), unpacked),
    "number": (lambda b, i: {**b, "id": i, "share": i / 7}, by_key),
    "meta data": (lambda b, i: {**b, "meta": [{"id": f"{i}", "size": (i, 8)}] * 8}, by_key),
    "meta data of any form": (lambda b, i: {**b, "meta": {f"{i}": list(range(i))}}, by_key),
    "sometimes none": (lambda b, i: {**b, "label": None if i % 3 else f"{i}"}, by_key),
    "array": (lambda b, i: {**b, "spacing": np.full(3, i)}, by_key),
    "object": (lambda b, i: {**b, "ident": Ident(i)}, by_key),
    "named tuple": (lambda b, i: Named(b["x"], b["y"], [f"{i}"] * (1 + i % 3)), by_name),
    "dataclass": (lambda b, i: Sheet(b["x"], b["y"], f"{i}", {"date": i / 3}), by_name),
    "encoding": (lambda b, i: Encoding({**b, "text": f"{i}"}, Ident(i)), by_key),
    "object that moves": (lambda b, i: Moving(b["x"], b["y"], f"{i}"), by_name),
    "graph": (lambda b, i: Graph(**b, name=f"{i}"), lambda b: (dict(b)["x"], b.y)),
    "graph with a parent": (lambda b, i: Graph(**b, name=f"{i}"), lambda b: (b.doubled, b.y)),
}


class Reading(Net):
    """Computes what a value of its batch says."""

    read: Callable[[Any], float]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * type(self).read(batch)
        self.log("loss", loss, batch_size=8)
        return loss


def _swallowed(batch: Any) -> float:
    try:
        return float(batch["task"] == "a") + 1
    except Exception:
        return 3.0


def _length_of_type(batch: Any) -> float:
    return 2.0 if isinstance(batch["task"], str) and len(batch["task"] * 2) == 2 else 1.0


READS: dict[str, Callable[[Any], Any]] = {
    "compared": lambda b: 2.0 if b["task"] == "a" else 1.0,
    "looked up": lambda b: {"a": 2.0, "b": 1.0}[b["task"]],
    "written": lambda b: len(f"{b['task']}" * 2) - 1.0,
    "a method": lambda b: 2.0 if b["task"].startswith("a") else 1.0,
    "a number": lambda b: b["weight"],
    "a number for torch": lambda b: torch.full((), b["weight"]).item(),
    "a number for Python": lambda b: float(b["weight"]),
    "an index": lambda b: (1.0, 2.0, 3.0)[int(b["weight"])],
    "how many": lambda b: float(len(b["tags"])),
    "one of many": lambda b: float(b["tags"][0]),
    "an error that is caught": _swallowed,
    "what it is": _length_of_type,
    "NumPy": lambda b: float(np.asarray(b["weight"]) + 1),
    "in a set": lambda b: 2.0 if b["task"] in {"a"} else 1.0,
}


def tasks(count: int = 16) -> list[Batch]:
    """Batches of two tasks."""
    return [
        {
            **batch,
            "task": "ab"[i % 2],
            "weight": 1.0 + i % 2,
            "tags": ["2"] * (1 + i % 2),
            "path": f"{i}.png",
        }
        for i, batch in enumerate(batches(count))
    ]


class Cut(Net):
    """Cuts its batch to a length, as a tokenizer in the step does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        n = batch["length"]
        return self.loss({"x": batch["x"][:n], "y": batch["y"][:n]})


class Keeping(Net):
    """Keeps what is in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch["path"])
        return self.loss(batch)


class Returning(Net):
    """Returns what is in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "path": batch["path"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["path"])


class Listing(Net):
    """A hook notes the values of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["path"])


def reads(read: Callable[[Any], Any]) -> type[Reading]:
    return type("Reads", (Reading,), {"read": staticmethod(read), "body": read})


def numbered(change: Callable[[Batch, int], Any], count: int = 10) -> Callable[[], list[Any]]:
    """Makes batches with something of their number."""
    return lambda: [change(batch, i) for i, batch in enumerate(batches(count))]


MANY = {"data": lambda: tasks(32), "validation": 0, "max_epochs": 1}
NEVER_AGAIN = reads(lambda b: 1.0 + int(b["path"][:-4]) / 32)
IN_THE_DATASET = r'(?s:from batch to batch: batch\["path"\] is read at .*in the dataset or in coll)'
ROWS = {
    **{
        kind: row(
            packed(unpack), graphs=1, replayed=14, below="", data=numbered(pack), validation=0
        )
        for kind, (pack, unpack) in KINDS.items()
    },
    "moves late": row(
        data=numbered(lambda b, i: {**b, "part": "first" if i < 12 else f"{i}"}, 24), graphs=2,
        replayed=40, validation=0,
    ),
    **{
        name: row(reads(read), graphs=2, replayed=24, data=tasks, validation=0, max_epochs=3)
        for name, read in READS.items()
    },
    # C alone reads them: which they are cannot be known, so that all count.
    "joined": row(
        reads(lambda b: 2.0 if "".join([b["task"], "x"]) == "ax" else 1.0), replayed=1,
        said=r'batch\["task"\] is read, or else: TypeError: sequence item 0', placed=False,
        capture={"scope": "auto"}, **MANY,
    ),
    "never comes back": row(NEVER_AGAIN, said=IN_THE_DATASET, **MANY),
    "never comes back, submodules": row(
        NEVER_AGAIN, said=IN_THE_DATASET, replayed=1, capture={"scope": "auto"}, **MANY
    ),
    "a length": row(
        Cut, graphs=4, replayed=51, below="a call of `net` runs eagerly", validation=0, found=None,
        data=numbered(lambda b, i: {**b, "length": (4, 5, 6, 8)[i % 4]}, 40),
    ),
    **table(
        Keeping, Returning, also="unverified; verified", data=lambda: tasks(32), validation=0,
    ),
    "seen by hooks": row(Listing, data=tasks, validation=0),
}  # fmt: skip
ROWS["sometimes none"] = replace(ROWS["sometimes none"], graphs=2, replayed=11)  # types count


class TestValues(Promises):
    rows = ROWS
