"""What others see of a module while its parts are graphed: names, states, copies, pickles."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from tests.training.fits import (
    Fit,
    assert_nothing_left,
    batches,
    close,
    compare,
    fit_twice,
    named,
    prepare,
)
from tests.training.modules.test_equal import Blocks

CAPTURE = named("net", "blocks.*")


class Look(Callback):
    """Copies the module at the end of the fit's last batch."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != 20:
            return
        x = batch["x"]
        module = pl_module.blocks[0]
        self.found = {
            "attributes": sorted(vars(module)),
            "state": list(pl_module.state_dict()),
            "modules": [name for name, _ in pl_module.named_modules()],
            "parameters": [name for name, _ in pl_module.named_parameters()],
            "buffers": [name for name, _ in pl_module.named_buffers()],
            "printed": repr(pl_module),
            "copy": outcome(copy.deepcopy(pl_module), x),
            "pickle": outcome(pickle.loads(pickle.dumps(pl_module.blocks)), x),
            "saved": outcome(saved(pl_module.blocks), x),
            "mentions": b"lightning_graphs" in pickle.dumps(pl_module.net),
        }


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def outcome(module: Any, x: Any) -> Any:
    """What a copy computes in eval mode, with changed weights of its own."""
    module.eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    if isinstance(module, Blocks):
        return module.loss({"x": x, "y": torch.zeros(len(x), dtype=torch.long, device=x.device)})
    hidden = x.repeat(1, 2)
    for block in module:
        hidden = block(hidden, scale=hidden.std())["hidden"][0]
    return hidden.sum()


def test_code_does_not_see_that_a_module_is_graphed(backend: str, tmp_path: Path) -> None:
    fits = fit_twice(
        backend, tmp_path, module=Blocks, capture=CAPTURE, callbacks=lambda: [Look()], validation=0
    )
    compare(*fits)
    eager, captured = (looked(fit) for fit in fits)
    assert not captured["mentions"]
    close(captured, eager, 0.0, "found")


def looked(fit: Fit) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in fit.trainer.callbacks if isinstance(c, Look)).found  # type: ignore[attr-defined]
    return found


def test_copies_and_pickles_run_without_graphs(backend: str, tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copying(Look):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            copies.append(copy.deepcopy(pl_module.blocks))

    fit = prepare(
        backend,
        tmp_path,
        True,
        module=Blocks,
        capture=CAPTURE,
        callbacks=lambda: [Copying()],
        validation=0,
    ).run()
    own, other = fit.module.blocks[0], copies[-1][0]
    assert other.inner.weight is not own.inner.weight
    assert other.forward.__self__ is other
    assert "forward" not in vars(own)


def averaging(kind: str) -> Callback:
    if kind == "stochastic":
        return StochasticWeightAveraging(swa_lrs=2**-8, swa_epoch_start=1, annealing_epochs=1)
    from lightning.pytorch.callbacks import WeightAveraging

    return WeightAveraging(avg_fn=lambda old, new, _: old * 0.75 + new * 0.25)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("kind", ["stochastic", "exponential"])
def test_averaged_copies(backend: str, tmp_path: Path, kind: str) -> None:
    fits = fit_twice(
        backend,
        tmp_path,
        module=Blocks,
        capture={**CAPTURE, "evaluation": False},  # the loss reads a value
        callbacks=lambda: [averaging(kind)],
        data=lambda: batches(6),
        max_epochs=4,
    )
    compare(*fits)
    assert_nothing_left(fits[1])


def test_a_module_with_a_forward_of_its_own_keeps_it(backend: str, tmp_path: Path) -> None:
    class Patched(Blocks):
        """A library has exchanged the forward of a layer."""

        def __init__(self) -> None:
            super().__init__()
            head = self.head
            head.forward = doubled(head.forward)

    fits = fit_twice(backend, tmp_path, module=Patched, capture=named("head"), validation=0)
    compare(*fits)
    assert vars(fits[1].module.head)["forward"].__name__ == "twice"


def doubled(forward: Any) -> Any:
    def twice(x: Any) -> Any:
        return forward(x) * 2

    return twice


class Adapting(Blocks):
    """Each step copies what it trains, and computes something with the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[nn.Module] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.copies = [copy.deepcopy(self.blocks)]
        self.log("adapted", outcome(self.copies[0], batch["x"]))
        return super().training_step(batch, batch_idx)


def test_copies_that_a_step_makes(backend: str, tmp_path: Path) -> None:
    """In steps that are observed, too."""
    fits = fit_twice(backend, tmp_path, module=Adapting, capture=CAPTURE)
    compare(*fits)
    (copied,) = fits[1].module.copies
    assert copied[0].forward.__self__ is copied[0]
