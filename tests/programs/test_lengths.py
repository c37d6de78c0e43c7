"""Lengths and counts in the batch, which code reads on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from tests.programs.table import Promises, row, table
from tests.training.fits import Net, batches

FEW = [[4, 4, 4, 4, 4, 3, 2, 1], [4, 4, 3, 3, 3, 3, 2, 2], [4, 3, 4, 2, 4, 4, 1, 4]]
"""The last ones are the first in another order."""


def sequences(lengths: list[list[int]], count: int = 15, width: int = 2) -> list[dict[str, Any]]:
    """Batches of eight sequences, of up to four pairs of numbers."""
    return [
        {
            "x": batch["x"].view(8, -1, width),
            "y": batch["y"],
            "n": torch.tensor(lengths[i % len(lengths)]),
        }
        for i, batch in enumerate(batches(count))
    ]


class Sequences(Net):
    """A recurrent layer over sequences of different lengths."""

    layer: type[nn.RNNBase] = nn.LSTM
    width = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(4)
        self.recurrent = self.layer(self.width, 4, batch_first=True)
        self.net[0], self.net[3] = nn.Linear(4, 16), nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.layer_norm(self.encoded(batch["x"], batch["n"]))
        loss = nn.functional.cross_entropy(self.net(x), batch["y"])
        self.log("loss", loss)
        return loss

    def encoded(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        hidden: Tensor = self.recurrent(packed)[1][0][-1]
        return hidden


class Longer(Sequences):
    width = 1


class InAnyOrder(Sequences):
    layer = nn.GRU

    def encoded(self, x: Tensor, lengths: Tensor) -> Tensor:
        how: dict[str, Any] = {"batch_first": True, "enforce_sorted": False}
        hidden: Tensor = self.recurrent(pack_padded_sequence(x, lengths.cpu(), **how))[1][-1]
        return hidden


class Padded(Sequences):
    """As pytorch-forecasting encodes what may be empty, and unpacks it."""

    def encoded(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.min() >= 0
        some = lengths.where(lengths > 0, torch.ones_like(lengths))
        how: dict[str, Any] = {"batch_first": True, "enforce_sorted": False}
        found = self.recurrent(pack_padded_sequence(x, some.cpu(), **how))[0]
        hidden, counts = pad_packed_sequence(found, batch_first=True)
        places = torch.arange(hidden.shape[1], device=x.device)
        mask = places < counts.to(x.device)[:, None]
        return (hidden * mask[:, :, None]).sum(1) / lengths[:, None]


class AsList(Sequences):
    def encoded(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, sorted(lengths.tolist())[::-1], batch_first=True)
        hidden: Tensor = self.recurrent(packed)[1][0][-1]
        return hidden


class Longest(Sequences):
    def encoded(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        mask = torch.arange(longest, device=x.device) < lengths[:, None]
        return (self.recurrent(x[:, :longest])[0] * mask[:, :, None]).sum(1)


class Counted(Sequences):
    """As PyTorch Geometric counts the graphs of a batch."""

    def encoded(self, x: Tensor, lengths: Tensor) -> Tensor:
        count = int(lengths.max()) + 1
        sums = x.new_zeros(count, 4).index_add(0, lengths, self.recurrent(x)[0][:, -1])
        return sums[lengths]


class Repeated(Sequences):
    """As N-HiTS repeats a level by a number that it makes a tensor of."""

    def encoded(self, x: Tensor, lengths: Tensor) -> Tensor:
        level = x[:, :1].mean(2).repeat_interleave(torch.tensor(4, device=x.device), dim=1)
        rows = torch.repeat_interleave(torch.arange(8, device=x.device), lengths)
        return level + self.recurrent(x)[0][rows].mean((0, 1))


class Unpacked(Sequences):
    """Its batches are packed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        packed, y = batch
        loss = nn.functional.cross_entropy(self.net(self.recurrent(packed)[1][0][-1]), y)
        self.log("loss", loss, batch_size=8)
        return loss


class WithBoxes(Net):
    """Has a list of boxes for each sample, of which the modules know nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.net(batch["x"])
        pairs = zip(found, batch["boxes"], strict=True)
        loss = torch.stack([(one - boxes).abs().mean() for one, boxes in pairs]).mean()
        self.log("loss", loss, batch_size=8)
        return loss


def boxes() -> list[dict[str, Any]]:
    """Batches whose numbers of boxes hardly come back."""
    generator = torch.Generator().manual_seed(5)

    def some() -> list[Tensor]:
        counts = torch.randint(1, 6, (8,), generator=generator).tolist()
        return [torch.randn(count, 3, generator=generator) for count in counts]

    return [{"x": batch["x"], "boxes": some()} for batch in batches(160)]


def packed() -> list[Any]:
    """Of as many numbers each, but of other lengths."""
    found = sequences([[4, 4, 4, 4, 4, 3, 2, 1], [4, 4, 4, 4, 3, 3, 3, 1]])
    return [(pack_padded_sequence(b["x"], b["n"], batch_first=True), b["y"]) for b in found]


def of_any_lengths() -> Any:
    """A loader whose lengths never come back."""
    generator = torch.Generator().manual_seed(2)

    def collate(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        order = torch.randint(1, 9, (8,), generator=generator).sort(descending=True).values
        return {**batch, "n": order}

    data: Any = sequences(FEW, 64, width=1)
    return DataLoader(data, batch_size=None, collate_fn=collate)


def sized(*lengths: list[int]) -> Callable[[], Any]:
    return lambda: sequences([*lengths])


LEFT: dict[str, Any] = {"validation": 0, "max_epochs": 3}
ROWS = {
    **table(Sequences, AsList, data=sized(*FEW[:2]), graphs=2, replayed=36, **LEFT),
    # Of the same lengths in another order a graph needs no other shape.
    **table(InAnyOrder, Padded, data=sized(*FEW), graphs=2, replayed=36, **LEFT),
    **table(Longest, Counted, data=sized(*FEW), graphs=1, replayed=36, **LEFT),
    **table(Repeated, data=sized(*FEW[:2]), graphs=2, replayed=36, **LEFT),
    **table(Unpacked, data=packed, graphs=2, replayed=36, **LEFT),
    "of any lengths": row(
        Longer, data=of_any_lengths, validation=0, max_epochs=1, found=None, replayed=1,
        said=r"others in most batches: .* is read on the host at (?s:.*)pad to a few fixed",
    ),
    # No shape of a batch comes back, but those of the modules' arguments do.
    **table(
        WithBoxes, data=boxes, validation=0, max_epochs=1, said="came back often enough",
        placed=False, found=None, replayed=60, also="auto; modules, verified",
        capture={"scope": "auto"},
    ),
}  # fmt: skip


class TestLengths(Promises):
    rows = ROWS
