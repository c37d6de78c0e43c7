"""What a step computes on the host: constants, draws of the CPU's generator, branches on them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from tests.programs.table import Promises, table
from tests.training.fits import Net, batches, compare, fit_twice


class Plain(Net):
    """No draws on the device: on a CPU one generator serves both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Identity()
        self.table = torch.arange(3.0)

    def scale(self, x: Tensor) -> Tensor | float:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = {**batch, "x": batch["x"] * self.scale(batch["x"])}
        return super().training_step(batch, batch_idx)


class ANumber(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.tensor(1.5, device=x.device)


class Numbers(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0] * 4, device=x.device)


class WrittenInPlace(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0] * 4, device=x.device).add_(x.detach().mean())


class NewTensor(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return x.new_tensor([1, 2] * 4)


class ATable(Plain):
    """As relative positions are made: computed on the host, moved in every step."""

    def scale(self, x: Tensor) -> Tensor:
        places = torch.arange(8)[:, None] - torch.arange(8)[None, :]
        return places.abs().to(x.device)[x.shape[0] % 8].to(x.dtype) + 1.0


class Draw(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rand((8,), device="cpu").to(x.device)


class ADrawnNumber(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rand((), device="cpu") + 0.5


class DrawnPlaces(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return x[torch.randperm(x.shape[0], device="cpu").to(x.device)].detach()


class DrawnFromItsOwn(Plain):
    """A generator of the module's, as programs have it that draw the same noise each time."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def scale(self, x: Tensor) -> Tensor:
        return torch.rand((8,), generator=self.generator).to(x.device) + 0.5


class FilledInPlace(Plain):
    def scale(self, x: Tensor) -> Tensor:
        noise = torch.zeros(8, device="cpu")
        noise.uniform_(0.5, 1.5)
        noise[2] = 1.0
        return noise.to(x.device)


class NeverDropped(Plain):
    """A ``layerdrop`` of nought, as most configurations have it."""

    rate = 0.0

    def scale(self, x: Tensor) -> float:
        return 1.0 if torch.rand([], device="cpu") < self.rate else 2.0


class Dropped(NeverDropped):
    rate = 0.25


class Drawn(Plain):
    """With ``item()``, and with a number that no step has twice: only the branch is compared."""

    def scale(self, x: Tensor) -> float:
        return 2.0 if torch.rand((), device="cpu").mul(2).gt(1.9).item() else 1.0


class Copied(Plain):
    """As metrics copy the defaults of their states, of which a step makes some again."""

    def scale(self, x: Tensor) -> Tensor:
        default = torch.tensor(2.0, device="cpu")
        made = copy.deepcopy({"losses": default, "again": default, "rows": x * 1.0})
        assert made["losses"] is made["again"] is not default
        return made["losses"].to(x.device) + made["rows"].mean() * 0.1


class AMask(Plain):
    """As transformers asks whether a mask may be dropped: it may, but for the first element."""

    def scale(self, x: Tensor) -> Tensor | float:
        mask = x.new_ones(x.shape, dtype=torch.bool)
        mask = torch.cat([mask, (x > -1e9)], dim=1)
        return 2.0 if mask.all() else mask.float().mean()


class Lengths(Plain):
    def scale(self, x: Tensor) -> float:
        lengths = (x[:, :3] > -1e9).sum(1)
        return float(lengths.max().item()) / 3


class Places(Plain):
    def scale(self, x: Tensor) -> Tensor:
        places = (x[0] > -1e9).nonzero()[:, 0]
        return x[0, places].detach()


class WrittenPlaces(Plain):
    """As Longformer writes a number where nothing is attended to."""

    def scale(self, x: Tensor) -> Tensor:
        rows, columns = (x[:, :3] > -1e9).nonzero(as_tuple=True)
        written = x.detach().clone()
        written[rows, columns] = 0.5
        return written


class WrittenWithGradients(Plain):
    """The backward pass writes zeros where the host's number was written."""

    def scale(self, x: Tensor) -> Tensor:
        rows, columns = (x[:, :3] > -1e9).nonzero(as_tuple=True)
        written = x * self.net[0].weight.mean()
        written[rows, columns] = 0.5
        written[rows, columns + 1] = torch.tensor(0.25)
        written[rows[:2]] = 2
        written[[0, 3], columns[:2]] = 1.0
        written.index_put_(indices=(rows[1:3],), values=written[:1, :1].clone())
        return written.index_put_((rows, columns + 2), torch.tensor(0.125))


class Unique(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super(Plain, self).training_step(batch, batch_idx)
        return loss * (batch["y"] * 0 + 5).unique().numel()


class Counted(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.bincount((x[:, 0] > 0).long(), minlength=3).float()[1]


class Shifted(Plain):
    """As labels are shifted to the right, with an assertion."""

    def scale(self, x: Tensor) -> float:
        shifted = x.new_zeros(x.shape, dtype=torch.long)
        shifted[:, 1:] = (x[:, :-1] > -1e9).long()
        shifted.masked_fill_(shifted == -100, 0)
        assert torch.all(shifted >= 0).item()
        return 2.0


class WrittenOnTheHost(Plain):
    def scale(self, x: Tensor) -> Tensor:
        table = torch.zeros((2, 8), device="cpu")
        row = table[1]
        row[2:] = torch.rand((6,), device="cpu")
        return table.to(x.device).sum(0) + 1.0


class IndexedByNumbers(Plain):
    def scale(self, x: Tensor) -> Tensor:
        chosen = x[range(8), np.arange(8)[::-1].copy()] + x[np.array([True] * 8), [0, 1] * 4]
        return x[:, [-2]].detach() + x[torch.arange(8).flip(0)] + chosen[:, None]


class OldConstructors(Plain):
    """As older programs make tensors."""

    def scale(self, x: Tensor) -> Tensor:
        weights = torch.Tensor([0.5, 1.0] * 4).to(x.device)
        weights = weights + torch.FloatTensor(np.linspace(0, 1, 8)).to(x.device)
        return x[torch.LongTensor([0, 0, *range(6)]).to(x.device)] * weights


class FilledByTheDevice(Plain):
    """A table of the host takes what the device computes, next to a number of the batch."""

    def scale(self, x: Tensor) -> Tensor:
        rows = torch.zeros(8, 1)
        rows[:] = self.net[0](x).detach().mean(1, keepdim=True)
        return rows.to(x.device) * int((x > 0).sum())


class ConstantMask(Plain):
    """As contrastive losses take the positive pairs out of all similarities."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super(Plain, self).training_step(batch, batch_idx)
        hidden = self.net[0](batch["x"])
        similar, pairs = hidden @ hidden.t(), torch.eye(8, dtype=torch.bool, device=loss.device)
        similar.masked_fill_(pairs, -9e15)
        pairs = pairs.roll(4, 0)
        loss = loss - similar[pairs].mean()
        loss = loss + similar[pairs[2], 1:3].sum() + similar[[1], pairs[2]].sum()
        off = ~torch.eye(8, device=loss.device).bool()  # as Barlow Twins and VICReg have it
        similar[off] *= 0.5
        above = torch.ones(8, 4, device=loss.device).repeat(1, 2).triu(1) == 1
        return loss + similar[off & above].square().mean()


class Global(Plain):
    """As Longformer asks whether any token attends to all."""

    def scale(self, x: Tensor) -> float:
        attends = torch.zeros_like(x, dtype=torch.long)
        attends[:, 0] = 1
        attends[..., 1:3] = 0.0
        attends = (x > -1e9).long() * (attends + 1)
        mask = torch.where(attends > 0, torch.tensor(0.0, device=x.device), -1e9)
        mask[attends == 2] = 1e9
        return 2.0 if (mask > 0).flatten().any().item() else 1.0


class AsList(Plain):
    def scale(self, x: Tensor) -> float:
        return float(sum((x[:, 0] > -1e9).tolist())) / 8


class Spoken(Plain):
    """A loss of aligned sequences: ``ctc_loss`` reads lengths and makes tables of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super(Plain, self).training_step(batch, batch_idx)
        hidden = self.net[0](batch["x"]).reshape(8, 4, 4).log_softmax(-1)
        return loss + self.spoken(hidden, batch["y"])

    def spoken(self, log_probs: Tensor, labels: Tensor) -> Tensor:
        lengths = torch.full((4,), 8, dtype=torch.long, device="cpu")
        targets = labels.view(4, 2) + 1
        return functional.ctc_loss(log_probs, targets, lengths, torch.full_like(lengths, 2))


class SpokenWithPadding(Spoken):
    """As transformers does it, where what is padded is less than nought."""

    def spoken(self, log_probs: Tensor, labels: Tensor) -> Tensor:
        labels = (labels - 4).where(torch.arange(8, device=labels.device) % 3 == 0, labels)
        labels = labels.view(4, 2) + 1
        assert not labels.max() >= 4
        mask = torch.ones_like(log_probs[..., 0], dtype=torch.long)
        lengths = torch.div(mask.sum(0) - 1, 1, rounding_mode="floor") + 1
        kept = labels > 0
        targets = labels.masked_select(kept)
        with torch.backends.cudnn.flags(enabled=False):
            return functional.ctc_loss(
                log_probs, targets, lengths, kept.sum(-1), reduction="sum", zero_infinity=True
            )


class SpokenAtLength(Spoken):
    """About one batch in four has other lengths."""

    def spoken(self, log_probs: Tensor, labels: Tensor) -> Tensor:
        targets = labels.view(4, 2) + 1
        first = 1 + (labels[:4].sum() > 2).long()
        lengths = torch.ones_like(targets[:, 0]) * first
        return nn.CTCLoss()(log_probs, targets, lengths + 6, lengths)


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        (rows,) = (x[:, 0] > 0).nonzero(as_tuple=True)
        return x.index_add(0, rows, x[rows])


class SpokenAndChosen(Spoken):
    """Submodules are captured, but for one: what it chooses is looked for, operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = nn.Sequential(nn.Linear(8, 8), Positive())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.chosen(batch["x"])}, batch_idx)


class Chosen(Plain):
    """A loss of some rows; about one batch in six has a row that is left out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super(Plain, self).training_step(batch, batch_idx)
        hidden, chosen = self.net[0](batch["x"]), batch["x"][:, 0] > 2.0
        masked = hidden * 2.0
        masked[chosen] = 0.5
        masked[~chosen] = self.net[0].weight[:, 0]
        return loss + hidden[~chosen].mean() + hidden[chosen, 1:3].sum() + masked.square().mean()


class ABranch(Plain):
    """About one batch in six has another number of positive values in its first column."""

    def scale(self, x: Tensor) -> float:
        return 2.0 if (x[:, 0] > 0).sum() > 5 else 1.0


class Kept(Plain):
    """A number of the host outlives the step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.shares: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = torch.rand(1, device="cpu")
        factor = torch.tensor([2.0], device=self.device) * share.to(self.device)
        return {"loss": self.loss({**batch, "x": batch["x"] * factor}), **self.keep(share)}

    def keep(self, share: Tensor) -> dict[str, Any]:
        self.share = share
        return {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.share))


class Returned(Kept):
    def keep(self, share: Tensor) -> dict[str, Any]:
        return {"share": share}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["share"]))


class Appended(Kept):
    def keep(self, share: Tensor) -> dict[str, Any]:
        self.shares.append(share)
        return {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.shares[-1]))


class KeptAndUsed(Plain):
    def scale(self, x: Tensor) -> Tensor:
        self.kept = torch.rand((8,), device="cpu")
        return self.kept.to(x.device)


class ReturnedAndRead(Plain):
    def scale(self, x: Tensor) -> float:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, noise = super().training_step(batch, batch_idx), torch.rand((8,), device="cpu")
        return {"loss": loss if noise[0] < 2.0 else 2.0 * loss, "noise": noise}


class AsNumbers(Plain):
    def scale(self, x: Tensor) -> float:
        return float(sum(torch.rand((2,), device="cpu").tolist()))


class ReadOfTheDevice(Plain):
    def scale(self, x: Tensor) -> float:
        return 2.0 if x.mean().item() > 0 else 1.0


class TheLargest(Plain):
    """A real number that the host could compute, and that no batch has again."""

    def scale(self, x: Tensor) -> float:
        largest = x.abs().max().item()
        return 1.0 / (1.0 + abs(largest)) if largest > 0.0 else 1.0


class TheFirst(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 2.0 if batch["x"][0, 0].item() > 0.0 else loss


class Means(Plain):
    """Numbers of the device in a tensor that is made there."""

    def scale(self, x: Tensor) -> Tensor:
        return torch.tensor([column.mean().item() for column in x.T], device=x.device)


class MeansOnTheHost(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.tensor([column.mean().item() for column in x.T]).to(x.device)


class AFullRow(Plain):
    def scale(self, x: Tensor) -> Tensor:
        return torch.full((8,), x.mean().item()).to(x.device)


class Sown(Plain):
    """Noise of the host from the same seed in each step, behind the first use of a parameter."""

    def noise(self) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * (1.0 + self.noise().to(loss.device).abs().mean())


class SownGlobally(Sown):
    def noise(self) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.randn(8)


class DrawnTwice(Sown):
    """What comes later draws the same numbers."""

    def noise(self) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return torch.randn(8)


class Recomputed(Sown):
    """A checkpoint draws once more in the backward pass, and gets the same numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def noisy(loss: Tensor) -> Tensor:
            return loss * torch.rand([]).to(loss.device)

        return torch.utils.checkpoint.checkpoint(noisy, self.loss(batch), use_reentrant=False)


class RecomputedWithoutDraws(Sown):
    """A checkpoint sets the generator, and puts it back; other lines draw."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (2.0 if torch.rand([]) < 0.0 else 1.0)
        return torch.utils.checkpoint.checkpoint(torch.sin, loss, use_reentrant=False)


class PutBack(Sown):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def noise(self) -> Tensor:
        before = self.generator.get_state()
        noise = torch.randn(8, generator=self.generator)
        self.generator.set_state(before)
        return noise


class DrawnOn(PutBack):
    def noise(self) -> Tensor:
        return torch.randn(8, generator=self.generator)


class SownAhead(Sown):
    """Ahead of the graph it is sown as in an eager step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = self.noise().to(batch["x"].device)
        return self.loss({**batch, "x": batch["x"] + noise})


class ChosenByTheHost(Plain):
    """Numbers of the host that kernels read in place, but for some, in backward passes, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net(batch["x"]).abs() + 1.0
        loss = (x ** torch.tensor(2.5) * torch.tensor(0.25)).mean()
        return loss + torch.where(x > 1.5, torch.tensor(0.5), x).mean() / torch.tensor(3.0)


class FilledOnTheHost(Plain):
    """A tensor of the host gets what the device has: each step waits."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        totals = torch.zeros(2)
        totals[0] = 1.0
        totals[1] = loss.detach()  # read
        self.log("total", totals.sum().to(loss.device))
        return loss


class FilledOnTheDevice(Plain):
    """Made on the host and moved, or made where the device is the default."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        with torch.device(loss.device):
            totals = [torch.zeros(2)]
        totals += [torch.zeros(2).to(loss.device), torch.zeros(2).type_as(loss)]
        totals += [torch.zeros(2).double().to(loss)]
        for total in totals:
            total[0] = loss.detach()
        return loss + torch.stack(totals).sum()


class Positives(Plain):
    """Counts of its batch, of which hardly two are alike: it divides by each, and adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count = int((batch["x"] > 0).sum())
        if count == 0:
            return None
        self.seen += count
        self.log("seen", float(self.seen))
        return self.loss(batch) * 8.0 / count


class PositivesOfRows(Plain):
    """A count, next to a length that is needed bare."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = 6 + batch["y"].max().item()
        count = (batch["x"] > 0).sum().item()
        return self.loss({key: value[:rows] for key, value in batch.items()}) / max(count, 1)


class RelativeLengths(Plain):
    """Real numbers of the batch that become whole ones, of which there are few."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        shares = (batch["y"].float() + 1.0) / 3.0
        rows = int((shares * len(shares))[:2].max().item())
        return self.loss({key: value[:rows] for key, value in batch.items()})


class ReadOfAParameter(Plain):
    def scale(self, x: Tensor) -> float:
        return 2.0 if (self.net[0].weight > 10).any() else 1.0


class ReadOfWhatWasWritten(Plain):
    """The device alone knows what is written."""

    def scale(self, x: Tensor) -> float:
        mask = x > 0
        mask[:, 0] = self.net[0].weight[0, 0] > 10
        return 2.0 if mask.any() else 1.0


SERVED = [
    Copied,
    ANumber, Numbers, WrittenInPlace, NewTensor, ATable, Draw, ADrawnNumber, DrawnPlaces,
    DrawnFromItsOwn, NeverDropped, AMask, Lengths, Places, WrittenPlaces,
    WrittenWithGradients, Unique, Counted, AsList,
    Shifted, Global, IndexedByNumbers, OldConstructors, ConstantMask, Spoken, SpokenWithPadding,
]  # fmt: skip
TWELVE = {"data": lambda: batches(12)}
ROWS = (
    table(*SERVED, graphs=1, **TWELVE)
    | table(
        Dropped, Drawn, ABranch, SpokenAtLength, Chosen, data=lambda: batches(40), max_epochs=2,
        graphs=range(1, 3), replayed=51,
    )
    # torch 2.11 hands out an alias of what dispatch modes see made, and they are refused.
    | table(FilledInPlace, WrittenOnTheHost, said=None, graphs=range(2), **TWELVE)
    # Ahead of the graph they run as they are.
    | table(Kept, Returned, Appended, ReadOfTheDevice, found=None, validation=0, **TWELVE)
    | table(ReturnedAndRead, said=".", placed=False, found=None, **TWELVE)
    | table(TheFirst, graphs=range(1, 3), **TWELVE)
    | table(TheLargest, Means, MeansOnTheHost, AFullRow, found=None, **TWELVE)
    | table(Sown, SownGlobally, DrawnTwice, PutBack, said="set or rewind", **TWELVE)
    | table(
        Recomputed,
        said="set or rewind|CUDA refuses to record",
        placed=False,
        found=None,
        **TWELVE,
    )
    | table(DrawnOn, SownAhead, RecomputedWithoutDraws, found=None, **TWELVE)
    | table(Positives, graphs=1, also="verified", **TWELVE)
    | table(PositivesOfRows, said=None, graphs=range(11), **TWELVE)
    | table(RelativeLengths, graphs=range(1, 4), **TWELVE)
    | table(ReadOfAParameter, ReadOfWhatWasWritten, **TWELVE)  # the host waits for the answer
    | table(FilledOnTheHost, FilledByTheDevice, said="writes to a tensor of the host", **TWELVE)
    | table(FilledOnTheDevice, ChosenByTheHost, graphs=1, **TWELVE)
    # In a rehearsal its tensor is one of the device.
    | table(KeptAndUsed, said=None, **TWELVE)
    # Numbers that never come back are not captured for ever.
    | table(AsNumbers, said=None, graphs=range(11), data=lambda: batches(40))
)  # fmt: skip


class TestHost(Promises):
    rows = ROWS


class OfTheCPUAlone(Plain):
    """Names no device: CUDA refuses such weights, and a CPU takes them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = torch.tensor([1.0, 2.0, 0.5])
        loss = functional.cross_entropy(self.net(batch["x"]), batch["y"], weight, reduction="none")
        drawn = torch.from_numpy(np.random.beta(0.4, 0.4, 8).astype(np.float32))
        return (drawn * loss).mean() + functional.nll_loss(loss[:, None], weight=weight[:1],
            target=torch.tensor([0] * 8))  # fmt: skip


@pytest.mark.parametrize("verify", [False, True])
def test_a_rehearsal_keeps_tensors_of_numbers_for_the_backward_pass(
    tmp_path: Path, verify: bool
) -> None:
    found = fit_twice("emulated", tmp_path, module=OfTheCPUAlone, capture={"verify": verify})
    compare(*found)
