"""Python inside of graphed submodules: what it reads is watched, what it leaves is refused."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.programs.table import Promises, row
from tests.training.fits import Net, adamw, batches, named


class Gain(nn.Module):
    """A layer whose attributes and settings scale its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.25)
        self.gain = 1.0
        self.settings = {"shift": 0.0}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) * self.gain + self.settings["shift"]


class Gained(Net):
    layer: type[Gain] = Gain

    def __init__(self) -> None:
        super().__init__(adamw)
        self.net = self.layer()


class Change(Callback):
    """Changes an attribute at the beginning of the second epoch, or before every step."""

    def __init__(self, what: str, always: bool = False) -> None:
        self.what = what
        self.always = always

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.always and trainer.global_step != 10:
            return
        net = pl_module.net
        if self.what == "rate":
            net.dropout.p += 1 / 64
        elif self.what == "gain":
            net.gain += 1 / 64
        else:
            net.settings["shift"] += 1 / 64


NAMES = {
    "rate": "self.net.dropout.p: 0.25 -> 0.265625",
    "gain": "self.net.gain: 1.0 -> 1.015625",
    "setting": "self.net.settings['shift']: 0.0 -> 0.015625",
}


class TakingTurns(Callback):
    """Two or three values take turns, a step each."""

    def __init__(self, gains: list[float]) -> None:
        self.gains = gains

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.net.gain = self.gains[batch_idx % len(self.gains)]


class Hooking(Callback):
    """A hook on a parameter comes and goes, at other steps than the value changes."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.net.gain = [1.0, 1.5, 2.0][batch_idx % 3]
        if batch_idx % 7 == 0:
            self.hook = pl_module.net.linear.weight.register_hook(lambda g: g * 0.5)
        elif batch_idx % 7 == 4:
            self.hook.remove()


class Precise(Callback):
    """The precision of products changes, at other steps than the value does."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.net.gain = [1.0, 1.5, 2.0][batch_idx % 3]
        torch.set_float32_matmul_precision("highest" if batch_idx % 5 < 3 else "high")


class Remembering(Gain):
    """Reads the last entry of a list that grows at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gains[-1]


class Grown(Gained):
    layer = Remembering

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(self.net, Remembering)
        self.net.gains.append(1.0 + batch_idx / 64)


class Called(Gained):
    """Shows how often its layer was called."""

    @property
    def seen(self) -> int:
        return self.net.calls


class Counting(Gain):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Drawing(Gain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Scaled(nn.Linear):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Setting(Net):
    """The step sets what its submodules read, before it calls them or between two calls."""

    when = 0  # of the two

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(8, 8) for _ in range(3))
        for block in self.blocks:
            block.gain = 1.0

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for i, block in enumerate(self.blocks):
            if i == self.when:
                self.blocks[self.when].gain = 1.0 + (self.trainer.global_step >= 12)
            x = block(x)
        return super().loss({**batch, "x": x})


class SettingBetween(Setting):
    when = 2


class TakingASparseOne(nn.Linear):
    def forward(self, x: Tensor, sparse: Tensor) -> Tensor:
        return super().forward(x) + sparse.sum()


class GivenASparseOne(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = TakingASparseOne(8, 8)

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch["x"], torch.eye(3, device=self.device).to_sparse())
        return super().loss({**batch, "x": x})


class Growing(Net):
    """A submodule is added after the step that was observed, before its capture."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 6:
            self.net.append(nn.Identity())


TABLE = torch.ones(3)


class ReadingATable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE.to(x.device)


class WithATable(Net):
    """A hook puts another tensor in the place of a global one, which then is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), ReadingATable(16, 3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global TABLE
        if self.trainer.global_step in (0, 10):
            TABLE = torch.full((3,), 1.0 + self.trainer.global_step / 8, device=self.device)


class Attending(nn.Module):
    """Scaled dot-product attention of samples to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x)[None, None].chunk(3, dim=-1)
        found: Tensor = nn.functional.scaled_dot_product_attention(query, key, value)[0, 0]
        return found


class Choosing(Net):
    """Asks for a kernel of attention, for one of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attending(), Attending()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            hidden = self.first(batch["x"])
        return super().training_step({**batch, "x": self.second(hidden)}, batch_idx)


class Reading(nn.Module):
    """Computes with a switch, so that the loss tells which one a graph was captured under."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if torch.backends.cuda.math_sdp_enabled() else 2.0
        factor += torch.get_default_dtype().itemsize
        hidden: Tensor = self.linear(x) * factor
        return hidden


class Switching(Net):
    """Sets switches around a block from some batch on, with autograd and without."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Reading()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = torch.get_default_dtype()
        late = batch_idx >= 7
        torch.set_default_dtype(torch.float64 if batch_idx in (6, 8) else before)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if late else nullcontext():
                with torch.no_grad():
                    target = self.block(batch["x"])
                x = self.block(batch["x"]) + target
        finally:
            torch.set_default_dtype(before)
        return super().training_step({**batch, "x": x}, batch_idx)


def gained(kind: type[Gain]) -> type[Called]:
    return type("Module", (Called,), {"layer": kind, "body": kind})


@contextmanager
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


NET = named("net")
OFTEN = {"data": lambda: batches() * 6, "capture": NET, "found": None}
ROWS = {
    what: row(
        Gained, graphs=2, changes=(name,), capture=NET, validation=4, max_epochs=3,
        callbacks=lambda what=what: [Change(what)],
    )
    for what, name in NAMES.items()
}  # fmt: skip
ROWS |= {
    f"{what}, always": row(
        Gained, graphs=1, replayed=0, capture=NET, validation=4, found=None, placed=False,
        said="steps run eagerly: .* steps differ: " + re.escape(name.partition(": ")[0]),
        callbacks=lambda what=what: [Change(what, always=True)],
    )
    for what, name in NAMES.items()
}  # fmt: skip
# Each value is seen twice, observed, and captured when it comes back.
ROWS |= {
    f"{len({*gains})} of {len(gains)} in turn": row(
        Gained, graphs=len({*gains}), replayed=80 - 3 - 5 * len({*gains}), capture=NET, found=None,
        data=lambda: batches() * 4, callbacks=lambda gains=gains: [TakingTurns(gains)],
        resumes=False,
    )
    for gains in ([1.0, 1.5], [1.0, 1.5, 2.0], [1.0] * 5 + [2.0] * 5)
}  # fmt: skip
ROWS |= {
    "seldom": row(
        Gained, graphs=range(3), capture=NET, data=lambda: batches() * 8, max_epochs=1,
        callbacks=lambda: [TakingTurns([1.0] * 15 + [2.0])],
    ),
    "Hooking": row(Gained, callbacks=lambda: [Hooking()], max_epochs=1, **OFTEN),
    "Precise": row(Gained, callbacks=lambda: [Precise()], around=precision, max_epochs=1, **OFTEN),
    "Grown": row(Grown, said="self.net.gains", replayed=0, placed=False, **OFTEN),
    **{
        kind.__name__: row(
            gained(kind), said=said, replayed=1, data=lambda: batches(8), found=None,
            capture={"scope": "modules"},
            check=lambda fit: fit.statistics.modules == ["net.linear"],
        )
        for kind, said in (
            (Counting, "module's forward changes self.calls"),
            (Drawing, "draws from Python's random"),
        )
    },
    **{
        kind.__name__: row(
            kind, replayed=21, also="unverified", capture=named("blocks.*"), max_epochs=1,
            changes=(f"self.blocks.{kind.when}.gain: 1.0 -> 2.0",), data=lambda: batches(40),
            said=None,
        )
        for kind in (Setting, SettingBetween)
    },
    "GivenASparseOne": row(
        GivenASparseOne, said=r"a tensor of layout torch.sparse_coo as args\[1\]", replayed=0,
        capture=named("first", "net"), check=lambda fit: fit.statistics.modules == ["net"],
        found=None, placed=False,
    ),
    "Growing": row(
        Growing, said="submodules were added or removed in between", capture=NET, replayed=0,
        found=None, placed=False, validation=0,
    ),
    "WithATable": row(WithATable, changes=("TABLE",), capture={"verify": False}),
    "Choosing": row(
        Choosing, modules=("first", "second"),
        below="(?s:`first` is not graphed: it is made under switches.*kernels of attention)",
    ),
    "Switching": row(
        Switching, capture=named("block", "net", verify=False), said=None, replayed=1,
        check=lambda fit: fit.statistics.modules == ["block", "net"],
    ),
}  # fmt: skip


class TestPython(Promises):
    rows = ROWS
