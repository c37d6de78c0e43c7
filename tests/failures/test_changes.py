"""What changes under a captured fit, and values that are no numbers.

| what changes in mid-training                      | scopes                      |
| ------------------------------------------------- | --------------------------- |
| a parameter's memory                              | step, modules, part         |
| ``load_state_dict(assign=True)``                  | step, modules, part         |
| a layer is frozen, or unfrozen                    | step, modules, part         |
| a parameter group is added, parameters taken out  | step, modules, part         |
| the optimizer is replaced                         | step, modules, part         |
| the trainer's precision, the parameters' dtype    | step, modules, part         |
| precision of float32 products, attention kernels  | step                        |
| a NaN loss, infinite gradients                    | step, modules, part         |

"part": one layer is a graph and another one, which changes as well, is not.
Every fit gives eager's values to the last bit, and has graphs before the change and after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn, optim

from tests.failures.support import assert_nothing_lost
from tests.training.fits import Net, batches, compare, fit_twice, prepare, said_of_rates, sgd

CHANGED_AT = 12
Change = Callable[[Any, Any], None]


class Changing(Callback):
    """Changes something once, before a step."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == CHANGED_AT:
            self._change(trainer, pl_module)


def move_first(_: Any, module: Any) -> None:
    weight = module.net[0].weight
    weight.data = weight.data.clone() * 2


def move_last(_: Any, module: Any) -> None:
    bias = module.net[4].bias
    bias.data = bias.data.clone() + 1


def assign(trainer: Any, module: Any) -> None:
    """New parameters take the old ones' place, and the optimizer is told of them."""
    state = {name: value.clone() * 0.5 for name, value in module.state_dict().items()}
    state["net.1.num_batches_tracked"] = module.net[1].num_batches_tracked.clone()
    module.load_state_dict(state, assign=True)
    optimizer = trainer.optimizers[0]
    old = optimizer.param_groups[0]["params"]
    for before, after in zip(old, module.parameters(), strict=True):
        optimizer.state[after] = optimizer.state.pop(before)
    optimizer.param_groups[0]["params"] = list(module.parameters())


def assign_only(_: Any, module: Any) -> None:
    """The optimizer keeps the old parameters: the new ones stand still, in eager steps too."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def freeze_first(_: Any, module: Any) -> None:
    module.net[0].requires_grad_(False)


def freeze_last(_: Any, module: Any) -> None:
    module.net[4].requires_grad_(False)


def add_group(trainer: Any, module: Any) -> None:
    module.net[4].bias.data.mul_(0.5)
    trainer.optimizers[0].add_param_group({"params": [module.extra], "lr": 2**-6})


def replace_optimizer(trainer: Any, module: Any) -> None:
    trainer.strategy.optimizers = [sgd(module)]


def replace_same_kind(trainer: Any, module: Any) -> None:
    trainer.strategy.optimizers = [copy.deepcopy(trainer.optimizers[0])]
    for mine, parameter in zip(
        trainer.optimizers[0].param_groups[0]["params"], module.parameters(), strict=True
    ):
        trainer.optimizers[0].state[parameter] = trainer.optimizers[0].state.pop(mine)
    trainer.optimizers[0].param_groups[0]["params"] = list(module.parameters())


def take_out(trainer: Any, module: Any) -> None:
    """Some parameters are not trained any longer."""
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    for parameter in group["params"][:2]:
        del optimizer.state[parameter]
    group["params"] = group["params"][2:]


def change_precision(trainer: Any, module: Any) -> None:
    plugin = MixedPrecision("bf16-mixed", module.device.type)
    trainer.strategy.precision_plugin = plugin


def cast(_: Any, module: Any) -> None:
    module.double()


class Casting(Net):
    """Takes the batch in whatever precision the parameters have."""

    def __init__(self, optimizers: Any = None) -> None:
        super().__init__(optimizers or plain_sgd)

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch["x"].to(self.net[0].weight.dtype)
        return nn.functional.cross_entropy(self.net(x).float(), batch["y"])


def plain_sgd(module: Any) -> optim.Optimizer:
    return optim.SGD(module.parameters(), lr=2**-5, fused=True)


class Growing(Net):
    """Has a parameter that the optimizer gets later."""

    def __init__(self) -> None:
        super().__init__(lambda m: optim.AdamW(m.net.parameters(), lr=2**-7, fused=True))
        self.extra = nn.Parameter(torch.ones(()))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.extra


class Thawing(Net):
    """Frozen in part from the beginning on."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.net[layer].requires_grad_(False)


STEP = {"scope": "step"}
INSIDE = {"scope": "modules", "modules": ["net"]}
PART = {"scope": "modules", "modules": ["net.0"]}  # net.4 is outside of the graphs
CELLS: dict[str, tuple[Any, Change, dict[str, Any]]] = {}
for _scope, _capture in {"step": STEP, "modules": INSIDE, "part": PART}.items():
    CELLS |= {
        f"{name}, {_scope}": (module, change, _capture)
        for name, (module, change) in {
            "first layer moved": (Net, move_first),
            "last layer moved": (Net, move_last),
            "state assigned": (Net, assign),
            "state assigned without the optimizer": (Net, assign_only),
            "first layer frozen": (Net, freeze_first),
            "last layer frozen": (Net, freeze_last),
            "first layer thawed": (
                lambda: Thawing(0),
                lambda _, module: module.requires_grad_(True),
            ),
            "last layer thawed": (
                lambda: Thawing(4),
                lambda _, module: module.requires_grad_(True),
            ),
            "group added": (Growing, add_group),
            "parameters taken out": (Net, take_out),
            "optimizer replaced": (Net, replace_optimizer),
            "optimizer replaced by its like": (Net, replace_same_kind),
            "precision changed": (Net, change_precision),
            "dtype changed": (Casting, cast),
        }.items()
    }


# torch sets an attribute against this warning where an optimizer is made, and not on its copies.
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.filterwarnings("ignore:.*optimizer step runs eagerly. parameters are float64")
@pytest.mark.parametrize("cell", CELLS)
def test_change(backend: str, tmp_path: Path, cell: str) -> None:
    module, change, capture = CELLS[cell]
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=module,
        capture={**capture, "only_if_faster": False},
        callbacks=lambda: [Changing(change)],
        max_epochs=4,
    )
    compare(eager, captured, said=said_of_rates(captured))
    assert captured.statistics.replayed > 12  # before the change seven at most
    assert_nothing_lost(eager, captured)


class Hooked(Net):
    """Its optimizer has a step hook, which no graph would call."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.handle = optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")
def test_what_kept_the_optimizer_eager_goes(backend: str, tmp_path: Path) -> None:
    """It stays eager: that is found while it steps."""

    def change(trainer: Any, module: Any) -> None:
        module.handle.remove()
        move_first(trainer, module)

    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Hooked,
        capture=STEP,
        callbacks=lambda: [Changing(change)],
        max_epochs=3,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 12
    assert "step" not in vars(captured.trainer.optimizers[0])


@pytest.fixture
def _kernels_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cuda.enable_flash_sdp(True)


SWITCHES: dict[str, Callable[[], None]] = {
    "precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "kernels of attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
}


@pytest.mark.usefixtures("_kernels_as_before")
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("scope", ["step", "modules"])
def test_switches_that_choose_kernels(
    backend: str, tmp_path: Path, scope: str, switch: str
) -> None:
    def change(trainer: Any, _: Any) -> None:
        SWITCHES[switch]()

    torch.set_float32_matmul_precision("highest")
    capture = STEP if scope == "step" else {"scope": "modules", "modules": ["net"]}
    captured = prepare(
        backend, tmp_path, True, capture=capture, callbacks=lambda: [Changing(change)]
    )
    captured.run()
    assert captured.statistics.captures == 2
    (said,) = captured.statistics.recaptures
    assert switch in said


class Unlogged(Net):
    """NaN in the progress bar is not equal to itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class Steep(Unlogged):
    """A finite loss, whose gradient is infinite where ``slope`` is zero."""

    def loss(self, batch: Any) -> torch.Tensor:
        bias = self.net[4].bias
        return super().loss(batch) + ((bias - bias.detach()).sum() + batch["slope"]).sqrt()


def undefined() -> list[dict[str, Any]]:
    data = batches(10)
    for batch in data[4::5]:
        batch["x"][0, 0] = float("nan")
    return data


def infinite() -> list[dict[str, Any]]:
    return [b | {"slope": torch.tensor(float(i % 5 != 4))} for i, b in enumerate(batches(10))]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("capture", [STEP, INSIDE, PART], ids=["step", "modules", "part"])
@pytest.mark.parametrize(
    ("module", "data"), [(Unlogged, undefined), (Steep, infinite)], ids=["NaN loss", "inf gradient"]
)
def test_values_that_are_no_numbers(
    backend: str, tmp_path: Path, module: Any, data: Any, capture: Any, clip: float | None
) -> None:
    fits = fit_twice(
        backend,
        tmp_path,
        module=module,
        capture=capture,
        data=data,
        gradient_clip_val=clip,
        validation=0,
    )
    compare(*fits)
    assert not all(p.isfinite().all() for p in fits[0].module.parameters())
    assert_nothing_lost(*fits)
