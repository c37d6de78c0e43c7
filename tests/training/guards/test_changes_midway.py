"""What is changed in the middle of a fit, where eager training would just go on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from tests.training.fits import Net, compare, fit_twice

Change = Callable[[Any, Any], object]


class At(Callback):
    """Makes a change after the eighth batch."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 8:
            self.change(trainer, pl_module)


def _forward_hook(trainer: Any, module: Any) -> None:
    module.net[2].register_forward_hook(lambda _, __, output: output * 0.5)


def _gradient_hook(trainer: Any, module: Any) -> None:
    module.net[4].weight.register_hook(lambda gradient: gradient * 0.5)


def _fresh_moments(trainer: Any, module: Any) -> None:
    for state in trainer.optimizers[0].state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _no_state(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].state.clear()


def _fewer_parameters(trainer: Any, module: Any) -> None:
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    for parameter in group["params"][-2:]:
        del optimizer.state[parameter]
    group["params"] = group["params"][:-2]


def _hook_of_all_modules(trainer: Any, module: Any) -> None:
    def halve(inner: Any, _: Any, output: Any) -> Any:
        return output * 0.5 if inner is module.net[2] else None

    module.on_fit_end = nn.modules.module.register_module_forward_hook(halve).remove


def _another_layer(trainer: Any, module: Any) -> None:
    layer = module.net[4] = nn.Linear(16, 3, device=module.device)
    optimizer = trainer.optimizers[0]
    members = optimizer.param_groups[0]["params"]
    for old, new in zip(members[-2:], layer.parameters(), strict=True):
        optimizer.state[new] = optimizer.state.pop(old)
    members[-2:] = layer.parameters()


CHANGES: dict[str, Change] = {
    "hook of all modules": _hook_of_all_modules,
    "another layer": _another_layer,
    "forward hook": _forward_hook,
    "gradient hook": _gradient_hook,
    "fresh moments": _fresh_moments,
    "no state": _no_state,
    "fewer parameters": _fewer_parameters,
}


# A module with a hook inside of it is graphed no longer, with a sentence.
@pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("change", CHANGES)
def test_change(backend: str, tmp_path: Path, change: str, scope: str) -> None:
    fits = fit_twice(
        backend,
        tmp_path,
        module=Net,
        callbacks=lambda: [At(CHANGES[change])],
        capture={"scope": scope},
        max_epochs=3,
    )
    compare(*fits, replayed=False)
    assert fits[1].statistics.replayed > 0


def _halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


HOOKS: dict[str, Change] = {
    "of a module": lambda net, times: net[2].register_forward_hook(lambda *given: times(given[2])),
    "of a parameter": lambda net, times: net[4].weight.register_hook(times),
    "of a gradient": lambda net, _: net[4].weight.register_post_accumulate_grad_hook(_halve),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_is_taken_off(backend: str, tmp_path: Path, hook: str) -> None:
    class HookTakenOff(Net):
        def __init__(self) -> None:
            super().__init__()
            self.handle: Any = HOOKS[hook](self.net, lambda value: value * 0.5)

    def change(trainer: Any, module: Any) -> None:
        module.handle.remove()

    fits = fit_twice(
        backend, tmp_path, module=HookTakenOff, callbacks=lambda: [At(change)], max_epochs=3
    )
    compare(*fits)
