"""Batches that are objects, as libraries make them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_graphs.errors import CaptureError
from lightning_graphs.private.torch import of_class
from lightning_graphs.watch.batch import OfHost
from tests.programs.table import Promises, copied, row
from tests.training.fits import Net, batches


class Store(MutableMapping[str, Any]):
    """A mapping that keeps its items in an attribute, and refers to what it is a part of."""

    def __init__(self, parent: Any, items: dict[str, Any]) -> None:
        self._mapping = items
        self._parent = weakref.ref(parent)
        self._count = len(items["x"])
        self._names = [f"{items['x'][0, 0]:.6f}"]

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)


class Graph:
    """As PyTorch Geometric has them: items are attributes, and methods count and move them."""

    def __init__(self, **items: Any) -> None:
        vars(self)["_store"] = Store(self, items)

    def __getattr__(self, key: str) -> Any:
        if key in vars(self).get("_store", ()):
            return self._store[key]
        raise AttributeError(key)

    def __setattr__(self, key: str, value: Any) -> None:
        self._store[key] = value

    @property
    def count(self) -> int:
        return self._store._count

    @property
    def whole(self) -> bool:
        return self._store._parent() is self

    def to(self, device: Any, **_: Any) -> Graph:
        for key, value in self._store.items():
            self._store[key] = value.to(device) if hasattr(value, "to") else value
        return self

    def __deepcopy__(self, memo: Any) -> Graph:
        return type(self)(**copy.deepcopy(self._store._mapping, memo))


class Registered(MutableMapping[str, Any]):
    """As TensorDict: torch knows it as a container, and its rows are what it iterates over."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items
        self._size = torch.Size([8])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return Registered({name: value[key] for name, value in self._items.items()})
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._size[0]

    def to(self, device: Any, **_: Any) -> Registered:
        return Registered({name: value.to(device) for name, value in self._items.items()})


pytree.register_pytree_node(
    Registered,
    lambda value: ([*value._items.values()], [*value._items]),
    lambda values, keys: Registered(dict(zip(keys, values, strict=True))),
)


class Bag:
    """An object that nothing moves but the module's own hook."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.parts = {"weights": [torch.ones(8)]}

    @property
    def count(self) -> int:
        return len(self.x)


class Scaled(Bag):
    """An object with numbers that stay on the host, of which code uses one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.scale, self.slices = 1.0 + x[0, 0].abs(), {"x": y.cumsum(0)}


class Linked(Bag):
    """An object that is inside of itself."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.first = [self]


class Labelled(NamedTuple):
    """A tuple with methods."""

    x: Tensor
    y: Tensor
    scale: float = 2.0

    @property
    def count(self) -> int:
        return len(self.x)

    def scaled(self) -> Tensor:
        return self.x * self.scale


Made = make_dataclass("Made", [("x", Tensor), ("y", Tensor)], namespace={"count": 8})


class Signal(Tensor):
    """A tensor with a method, and with torch's operators."""

    def doubled(self) -> Tensor:
        return self * 2.0


class Boxes(Signal):
    """A tensor with an attribute."""

    scale = 1.0


class Tracked(Tensor):
    """As MetaTensor of MONAI: operators of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor):
    """As LabelTensor of PINA: methods that want an attribute, which results of torch's lack."""

    def requires_grad_(self, mode: bool = True) -> Named:
        made = super().requires_grad_(mode)
        made.labels = self.labels  # type: ignore[attr-defined,has-type]
        return made


class Kept(Net):
    """Keeps what it was given and what it made of it, and looks at both in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.last: Any = None
        self.held: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.read(batch)
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        self.log("loss", loss, batch_size=8)
        return loss

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.x, batch.y

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if not isinstance(batch, (Bag, SimpleNamespace)):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        batch.x, batch.y = batch.x.to(device), batch.y.to(device)
        if isinstance(batch, Bag):
            batch.parts["weights"] = [batch.parts["weights"][0].to(device)]
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kinds = [type(value).__name__ for value in (outputs["loss"], batch, self.last)]
        last = self.last.x if isinstance(self.last, Labelled) else self.last
        self.held.append(last)
        held = copied(self.held[-4:])  # of earlier steps, too
        self.seen.append([kinds, held, copied(self.items(batch))])

    def items(self, batch: Any) -> Any:
        return [
            tensor.sum() for tensor in pytree.tree_leaves(vars(batch)) if isinstance(tensor, Tensor)
        ]


class OfGraphs(Kept):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch = batch.to(self.device)
        batch.x = batch.x * batch.count
        batch.extra = batch.x.mean(0)
        self.last = batch.extra
        return batch.x * (2.0 if batch.whole else 1.0), batch.y

    def items(self, batch: Any) -> Any:
        return [(key, value.sum()) for key, value in batch._store.items()]


class OfRegistered(Kept):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch["z"] = batch["x"] * len(batch)
        self.last = batch["z"]
        return batch["z"], batch["y"]

    def items(self, batch: Any) -> Any:
        return [(key, value.sum()) for key, value in batch._items.items()]


class OfBags(Kept):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        (weights,) = batch.parts["weights"]
        batch.parts["weights"].append(batch.x.mean(0))
        batch.z = batch.x * weights * batch.count
        self.last = batch.z
        return batch.z, batch.y


class OfScaled(Kept):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.last = batch.x * batch.scale
        return self.last, batch.y


class OfTuples(Kept):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.last = batch
        return batch.scaled() / batch.count, batch.y

    def items(self, batch: Any) -> Any:
        return [batch.x.sum()]


class OfSignals(Kept):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert type(batch["x"]) is Signal
        self.last = batch["x"] + 1.0
        return batch["x"].doubled(), batch["y"]

    def items(self, batch: Any) -> Any:
        return [type(batch["x"]).__name__, batch["x"].sum()]


class OfBoxes(OfSignals):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = batch["x"] * batch["x"].scale  # read
        return x, batch["y"]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["x"].scale = 2.0  # which a copy to a GPU has lost
        return batch


class OfTracked(OfSignals):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["x"], batch["y"]


class OfNamed(OfTracked):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["x"].labels = ["x"]
        return batch


def of(pack: Callable[..., Any]) -> Callable[[], Any]:
    """Batches that are made again in each epoch."""

    def collate(batch: dict[str, Tensor]) -> Any:
        return pack(**{key: value.clone() for key, value in batch.items()})

    return lambda: DataLoader(batches(10), batch_size=None, collate_fn=collate)  # type: ignore[arg-type]


def signal(kind: type[Tensor]) -> Callable[..., Any]:
    return lambda x, y: {"x": x.as_subclass(kind), "y": y}


SERVED = {
    "graph": (OfGraphs, Graph),
    # A metaclass makes the class of its batches, in the standard library's name
    "graph of a class made at run time": (OfGraphs, type("Made", (Graph,), {"__module__": "abc"})),
    "registered": (OfRegistered, lambda x, y: Registered({"x": x, "y": y})),
    "object": (OfBags, Bag),
    "numbers of the host": (OfScaled, Scaled),
    "namespace": (Kept, lambda x, y: SimpleNamespace(x=x, y=y)),
    "dataclass made at run time": (Kept, Made),
    "tuple with methods": (OfTuples, Labelled),
    "tensors of a class": (OfSignals, signal(Signal)),
}
ROWS = {
    **{
        name: row(module, data=of(pack), validation=0, below="", also="by threes; clipped")
        for name, (module, pack) in SERVED.items()
    },
    "inside of itself": row(OfBags, data=of(Linked), validation=0, said=None, found=None),
    "tensors with attributes": row(
        OfBoxes, data=of(signal(Boxes)), validation=0, found="rule remedy line", placed=False,
        said=r"got a .*Boxes with the attributes 'scale' as batch\[\"x\"\]",
    ),
    "tensors with operators": row(
        OfTracked, data=of(signal(Tracked)), validation=0, found="rule remedy line",
        placed=False, said=r"got a .*Tracked as batch\[\"x\"\]",
        below=r"`net` is not graphed: it is given a .*Tracked as args\[0\] at .*as_subclass",
    ),
    "tensors with methods": row(
        OfNamed, data=of(signal(Named)), validation=0, found="rule remedy line",
        placed=False, said=r"got a .*Named as batch\[\"x\"\]",
        below=r"`net` is not graphed: it is given a .*Named as args\[0\] at .*as_subclass",
    ),
}  # fmt: skip


class TestBatchObjects(Promises):
    rows = ROWS


def test_a_tensor_of_the_host_may_be_asked_for_its_shape() -> None:
    tensor = of_class(OfHost, torch.ones(2, 3))
    assert (tensor.shape, len(tensor), tensor.device.type) == ((2, 3), 2, "cpu")
    uses: list[Callable[[Tensor], Any]] = [
        Tensor.tolist,
        torch.detach,
        lambda given: given.T,
        lambda given: torch.ones(3) * given,
        lambda given: torch.cat([torch.ones(1, 3), given]),
    ]
    for use in uses:
        with pytest.raises(CaptureError, match="uses a tensor of the host in the batch"):
            use(tensor)
