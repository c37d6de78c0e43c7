"""Optimizers: which are captured, what happens to the others, and what they hold afterwards."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_graphs.regions.optimizer import CapturableOptimizer, capture_obstacle
from tests.training.fits import (
    FullTrace,
    GradientTrace,
    Net,
    Trace,
    batches,
    compare,
    fit_twice,
    prepare,
    warned,
)

RATE = 2**-6
INFO = logging.getLogger("lightning.pytorch.utilities.rank_zero")

FUSED: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda p: optim.Adam(p, lr=RATE, fused=True),
    "Adam with amsgrad": lambda p: optim.Adam(p, lr=RATE, amsgrad=True, fused=True),
    "Adam with weight decay": lambda p: optim.Adam(p, lr=RATE, weight_decay=0.5, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=RATE, fused=True),
    "AdamW maximizing": lambda p: optim.AdamW(p, lr=RATE, maximize=True, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=RATE, fused=True),
    "SGD with momentum": lambda p: optim.SGD(p, lr=RATE, momentum=0.75, fused=True),
    "SGD with dampening": lambda p: optim.SGD(
        p, lr=RATE, momentum=0.75, dampening=0.25, weight_decay=0.125, fused=True
    ),
    "SGD with nesterov": lambda p: optim.SGD(p, lr=RATE, momentum=0.75, nesterov=True, fused=True),
}

OTHERS = [
    "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
]  # fmt: skip


def in_scope(scope: str) -> dict[str, Any]:
    """The options of a fit whose whole step, or network, is captured."""
    return {"capture": {"scope": scope, **({"modules": ["net"]} if scope == "modules" else {})}}


def made(optimizer: Callable[[Any], Any]) -> Callable[[], Net]:
    return lambda: Net(lambda module: optimizer(module.parameters()))


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizer_is_captured_bit_for_bit(backend: str, tmp_path: Path, name: str) -> None:
    compare(*fit_twice(backend, tmp_path, module=made(FUSED[name])))


@pytest.mark.parametrize(
    ("kind", "options"),
    # A large eps: the bias before BatchNorm has no gradient but rounding errors, for Adam to scale.
    [(optim.Adam, {"eps": 2**-8}), (optim.AdamW, {"eps": 2**-8}), (optim.SGD, {"momentum": 0.5})],
)
def test_optimizer_is_made_fused_and_given_back(
    backend: str, tmp_path: Path, kind: Any, options: dict[str, float]
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=made(lambda p: kind(p, lr=RATE, **options))
    )
    compare(eager, captured, tolerance=1e-4)
    group = captured.trainer.optimizers[0].param_groups[0]
    assert group["fused"] is None
    assert group["foreach"] is None


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizer(backend: str, tmp_path: Path, name: str, trace: type[Trace]) -> None:
    module = made(lambda p: getattr(optim, name)(p, lr=RATE))
    eager = prepare(backend, tmp_path, False, module=module, trace=trace).run()
    captured = prepare(backend, tmp_path, True, module=module, trace=trace)
    if backend == "cuda" and "capturable" in captured.module.configure_optimizers().defaults:
        compare(eager, captured.run(), tolerance=1e-4)
        return
    counts = name not in ("Adadelta", "RMSprop", "Rprop")  # hooks might move what it counts
    if trace is Trace or not counts:
        compare(eager, captured.run())
        return
    with pytest.warns(UserWarning, match=f"the optimizer step runs eagerly: .*{name}"):
        captured.run()
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 8
    assert len(captured.statistics.fallbacks) == 1


class Own(optim.Optimizer):
    """An optimizer of user code: a step in operators of torch, parameter by parameter."""

    def __init__(self, params: Any, update: Callable[..., None], **numbers: Any) -> None:
        super().__init__(params, {"lr": RATE, **numbers})
        self.update = update

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.update(p, p.grad, self.state[p], group)
        return loss


def signs(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    p.data.sub_(g.sign(), alpha=group["lr"])


def lion(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    average = state.setdefault("exp_avg", torch.zeros_like(p))
    p.mul_(1 - group["lr"] * group["decay"])
    p.add_(average.clone().mul_(0.9).add(g, alpha=0.1).sign_(), alpha=-group["lr"])
    average.mul_(0.99).add_(g, alpha=0.01)


def lars(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    ratio = p.norm() / (g.norm() + 2**-4)
    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
    momentum.mul_(0.75).add_(g * torch.where(ratio > 0, ratio, 1.0))
    p.add_(momentum, alpha=-group["lr"])


def muon(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    momentum = state.setdefault("momentum_buffer", torch.zeros_like(g))
    momentum.lerp_(g, 0.25)
    x = momentum.reshape(len(momentum), -1)
    x = x / (x.norm() + 2**-4)
    for _ in range(3):
        gram = x @ x.T
        x = 1.5 * x - 0.5 * gram @ x
    p.add_(x.reshape(p.shape), alpha=-group["lr"])


def counted(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["count"] = state.get("count", 0) + 1
    p.add_(g, alpha=-group["lr"] / state["count"])


def attributed(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    group["k"] += 1
    p.add_(g, alpha=-group["lr"] / group["k"])


def adam(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Bias corrections of a counter, as most optimizers outside of torch compute them."""
    state["step"] = state.get("step", 0) + 1
    mean = state.setdefault("mean", torch.zeros_like(p))
    square = state.setdefault("square", torch.zeros_like(p))
    mean.mul_(0.9).add_(g, alpha=0.1)
    square.mul_(0.99).addcmul_(g, g, value=0.01)
    corrections = 1 - 0.9 ** state["step"], math.sqrt(1 - 0.99 ** state["step"])
    denominator = (square.sqrt() / corrections[1]).add_(2**-8)
    p.addcdiv_(mean, denominator, value=-group["lr"] / corrections[0])


def rectified(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    p.sub_(g if state["step"] > 12 else g.sign(), alpha=group["lr"])


def measured(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    p.add_(g, alpha=-group["lr"] / (1 + float(g.abs().max())))


def renewed(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["average"] = state.get("average", torch.zeros_like(p)) * 0.5 + g
    p.add_(state["average"], alpha=-group["lr"])


def listed(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    history = state.setdefault("history", [torch.zeros_like(p)])
    history[0] = history[0] * 0.5 + g
    p.add_(history[0], alpha=-group["lr"])


@pytest.mark.parametrize(
    ("update", "scope"),
    [
        *((each, "step") for each in (signs, lion, lars, muon, renewed, listed)),
        (renewed, "modules"),
    ],
)
def test_an_optimizer_of_user_code_is_captured(
    backend: str, tmp_path: Path, update: Any, scope: str
) -> None:
    """Its groups may have tables, as those of timm's AdaBelief; it may bind its state anew."""
    numbers: dict[str, Any] = {"decay": 0.25, "buffer": [[None, None], [None, None]]}
    options = {"module": made(lambda p: Own(p, update, **numbers)), **in_scope(scope)}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured)
    assert captured.statistics.fallbacks == []


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_an_optimizer_that_computes_on_the_host(backend: str, tmp_path: Path, scope: str) -> None:
    options = {"module": made(lambda p: Own(p, measured, k=0)), **in_scope(scope)}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.warns(UserWarning, match="the optimizer step runs eagerly: .*Own: "):
        captured.run()
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 10


class Ahead(Own):
    """Moves the parameters ahead of its one call of the closure, unseen by torch's versions."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)
        return super().step(closure)


class Scaled(Own):
    """Scales its rate by the loss, if it is given a closure."""

    def step(self, closure: Any = None) -> Any:
        rate: Any = RATE
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            rate = RATE * loss.detach()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * rate)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("optimizer", [Ahead, Scaled])
def test_a_closure_that_is_not_called_first_and_only(
    backend: str, tmp_path: Path, optimizer: Any, scope: str
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=made(lambda p: optimizer(p, lion, decay=0.25)), **in_scope(scope)
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 5
    assert "does not call its closure once" in "".join(captured.statistics.fallbacks)


def test_an_optimizer_of_user_code_whose_state_is_replaced(backend: str, tmp_path: Path) -> None:
    """Graphs are made again, after a step that shows how it takes its closure."""

    class Rewinding(Net):
        def on_train_epoch_start(self) -> None:
            optimizer = self.trainer.optimizers[0]
            if self.current_epoch == 1:
                optimizer.load_state_dict(optimizer.state_dict())

        def configure_optimizers(self) -> Any:
            return Own(self.parameters(), lion, decay=0.25)

    eager, captured = fit_twice(backend, tmp_path, module=Rewinding, max_epochs=4)
    compare(eager, captured)


def numbered(update: Any, **numbers: Any) -> Callable[[], Net]:
    """An optimizer of user code whose learning rate moves in every step."""

    def configured(module: nn.Module) -> Any:
        optimizer = Own(module.parameters(), update, **numbers)
        moving = optim.lr_scheduler.ExponentialLR(optimizer, 0.75)
        return [optimizer], [{"scheduler": moving, "interval": "step"}]

    return lambda: Net(configured)


LIVE: dict[str, Callable[[], Net]] = {
    "lion": numbered(lion, decay=0.25),
    "lars": numbered(lars),
    "muon": numbered(muon),
    "in the state": numbered(counted),
    "in a group": numbered(attributed, k=0),
    "adam": numbered(adam),
    "standing rate": made(lambda p: Own(p, adam)),
    "of torch": lambda: Net(
        lambda m: (
            [o := optim.SGD(m.parameters(), RATE, 0.75, foreach=True)],
            [{"scheduler": optim.lr_scheduler.ExponentialLR(o, 0.75), "interval": "step"}],
        )
    ),
}


@pytest.mark.parametrize("verify", [True, False, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("name", LIVE)
def test_numbers_that_a_step_of_user_code_reads_and_moves(
    backend: str, tmp_path: Path, name: str, scope: str, accumulate: int, verify: Any
) -> None:
    """One graph has them all, as whole step or by itself."""
    eager, captured = fit_twice(
        backend, tmp_path, module=LIVE[name], max_epochs=4, accumulate_grad_batches=accumulate,
        capture={**in_scope(scope)["capture"], "verify": verify},
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.captures <= 2 * accumulate


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")
@pytest.mark.parametrize("trace", [GradientTrace, FullTrace])
@pytest.mark.parametrize("name", LIVE)
def test_numbers_that_may_move_between_two_graphs(
    backend: str, tmp_path: Path, name: str, trace: type[Trace]
) -> None:
    """Hooks run between the graphs of a step: such numbers are not followed."""
    eager, captured = fit_twice(backend, tmp_path, module=LIVE[name], trace=trace)
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 5
    assert captured.statistics.fallbacks != []


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")
@pytest.mark.parametrize("scope", ["step", "modules"])
def test_a_way_that_a_number_decides(backend: str, tmp_path: Path, scope: str) -> None:
    """Each way has a graph, of the whole step or of the update by itself."""
    options = {"module": made(lambda p: Own(p, rectified)), "max_epochs": 3, **in_scope(scope)}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured)
    assert captured.statistics.replayed > 5


def ahead(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state.setdefault("step", 7)
    adam(p, g, state, group)


class ByHand(Net):
    """Two optimizers of user code with other counts, which the step calls itself, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.automatic_optimization, self.times = False, times

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers() * self.times:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [Own(self.net[:4].parameters(), adam), Own(self.net[4].parameters(), ahead)]


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("times", [1, 2])
def test_numbers_of_optimizers_that_a_step_calls(backend: str, tmp_path: Path, times: int) -> None:
    capture = {"on_failure": "eager"}
    eager, captured = fit_twice(backend, tmp_path, module=lambda: ByHand(times), capture=capture)
    compare(eager, captured, replayed=times == 1)
    assert "is called twice in one step" in "".join(captured.statistics.fallbacks) or times == 1


class Annealed(Own):
    """Reads an attribute that a hook moves."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, signs)
        self.factor = 1.0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(self.factor)
        return loss


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_attributes_of_an_optimizer_are_guarded(backend: str, tmp_path: Path, scope: str) -> None:
    class Moving(Net):
        def on_train_epoch_start(self) -> None:
            self.trainer.optimizers[0].factor = 1.0 - self.current_epoch / 8

        def configure_optimizers(self) -> Any:
            return Annealed(self.parameters())

    options = {"module": Moving, "max_epochs": 4, **in_scope(scope)}
    compare(*fit_twice(backend, tmp_path, **options))


class Resetting(Net):
    """Numbers of the state are set by a hook: of one parameter, and of all."""

    def __init__(self) -> None:
        super().__init__(lambda m: Own(m.parameters(), adam))

    def on_train_epoch_start(self) -> None:
        states = [*self.trainer.optimizers[0].state.values()]
        for state in states[:1] if self.current_epoch == 1 else states:
            state["step"] = 0


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_numbers_that_hooks_set_meanwhile(backend: str, tmp_path: Path, scope: str) -> None:
    options = {"module": Resetting, "max_epochs": 4, **in_scope(scope)}
    compare(*fit_twice(backend, tmp_path, **options), replayed=False)


CYCLES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 2**-5, total_steps=20),
    "CyclicLR": lambda o: optim.lr_scheduler.CyclicLR(o, 2**-8, 2**-5, step_size_up=4),
}


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("name", CYCLES)
def test_momentum_that_a_scheduler_cycles(
    backend: str, tmp_path: Path, name: str, scope: str
) -> None:
    def optimizers(module: Any) -> Any:
        optimizer = optim.SGD(module.parameters(), RATE, 0.75, fused=False)
        return [optimizer], [{"scheduler": CYCLES[name](optimizer), "interval": "step"}]

    options: dict[str, Any] = {"module": lambda: Net(optimizers), **in_scope(scope)}
    eager = prepare(backend, tmp_path, False, **options).run()
    compare(eager, prepare(backend, tmp_path, True, **options).run())


def test_step_hooks_are_called(backend: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def hooked(parameters: Any) -> Any:
        optimizer = FUSED["AdamW"](parameters)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    eager = prepare(backend, tmp_path, False, module=made(hooked)).run()
    captured = prepare(backend, tmp_path, True, module=made(hooked))
    with pytest.warns(UserWarning, match="AdamW has step hooks"):
        captured.run()
    compare(eager, captured, replayed=False)
    assert len(calls) == 40


def test_step_hooks_that_come_later_are_called(backend: str, tmp_path: Path) -> None:
    calls: list[int] = []

    class Late(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 8:
                self.trainer.optimizers[0].register_step_post_hook(lambda *_: calls.append(1))

    eager = prepare(backend, tmp_path, False, module=Late).run()
    expected, calls[:] = len(calls), []
    captured = prepare(backend, tmp_path, True, module=Late)
    with pytest.warns(UserWarning, match="AdamW has step hooks"):
        captured.run()
    compare(eager, captured, replayed=False)
    assert (len(calls), expected) == (12, 12)


def test_hyper_parameters_in_a_list_are_seen_moving(backend: str, tmp_path: Path) -> None:
    class Moving(Net):
        def on_train_epoch_start(self) -> None:
            for group in self.trainer.optimizers[0].param_groups:
                group["betas"] = [0.9 - 0.2 * self.current_epoch, 0.99]

    eager = prepare(backend, tmp_path, False, module=Moving).run()
    captured = prepare(backend, tmp_path, True, module=Moving).run()
    compare(eager, captured)


NUMBERS: dict[str, Callable[[float], Any]] = {
    "betas": lambda x: (0.5 + x, 0.9 + x / 8),
    "eps": lambda x: 2**-8 * (1 + x),
    "weight_decay": lambda x: max(0.0, x - 0.125),
    "momentum": lambda x: 0.5 + x,
    "dampening": lambda x: x,
}


def moving(name: str, hook: str, steps: Container[int]) -> Callable[[], Net]:
    """Every number of every group moves in this hook, before or after these steps."""

    class Moving(Net):
        def move(self, *_: Any) -> None:
            if self.trainer.global_step not in steps:
                return
            for i, group in enumerate(self.trainer.optimizers[0].param_groups):
                for key in NUMBERS.keys() & group.keys():
                    if key != "momentum" or group[key] != 0:
                        group[key] = NUMBERS[key]((self.trainer.global_step + i) % 4 / 16)

    def optimizers(module: Any) -> Any:
        return FUSED[name](
            [{"params": module.net[:2].parameters()}, {"params": module.net[4].parameters()}]
        )

    setattr(Moving, hook, Moving.move)
    return lambda: Moving(optimizers)


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_before_zero_grad", "on_before_optimizer_step"]
)
@pytest.mark.parametrize("name", ["AdamW", "SGD with dampening"])
def test_numbers_that_move_twice_are_not_frozen(
    backend: str, tmp_path: Path, name: str, hook: str, scope: str
) -> None:
    module = moving(name, hook, {6, 9})
    eager, captured = fit_twice(backend, tmp_path, module=module, **in_scope(scope))
    compare(eager, captured)


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")
@pytest.mark.parametrize(
    ("method", "key", "said"),
    [
        ("backward", "lr", "the step sets lr in param_groups"),
        ("backward", "weight_decay", "the step sets weight_decay in param_groups"),
        ("training_step", "lr", ""),
        ("training_step", "weight_decay", "moves weight_decay time and again"),
    ],
)
def test_numbers_that_the_step_itself_moves(
    backend: str, tmp_path: Path, method: str, key: str, said: str
) -> None:
    """They are followed if it begins with them."""

    class Own(Net):
        def move(self, *args: Any) -> Any:
            self.trainer.optimizers[0].param_groups[0][key] *= 0.75
            return getattr(Net, method)(self, *args)

    setattr(Own, method, Own.move)
    if said:
        warned(backend, tmp_path, said, module=Own)
    else:
        compare(*fit_twice(backend, tmp_path, module=Own))


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step"])
@pytest.mark.parametrize("name", FUSED)
def test_numbers_that_keep_moving_leave_the_graph(
    backend: str, tmp_path: Path, name: str, hook: str, scope: str
) -> None:
    """The optimizer step is eager after the third move; everything else stays in its graph."""
    options: dict[str, Any] = {"module": moving(name, hook, range(99)), **in_scope(scope)}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options)
    said = "the optimizer step runs eagerly: a scheduler or a hook moves .*every 20 steps"
    with pytest.warns(UserWarning, match=said):
        captured.run()
    compare(eager, captured, replayed=False)
    assert len(captured.statistics.fallbacks) == 1
    assert captured.statistics.replayed > 10


@pytest.mark.parametrize("option", [{"foreach": True}, {"fused": False}])
def test_implementation_asked_for_by_the_user(
    backend: str, tmp_path: Path, option: dict[str, bool]
) -> None:
    """A GPU runs its capturable form."""
    eager, captured = fit_twice(
        backend, tmp_path, module=made(lambda p: optim.AdamW(p, lr=RATE, **option))
    )
    compare(eager, captured, tolerance=1e-4 if backend == "cuda" else 0.0)


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_an_optimizer_keeps_its_own_kernel(
    backend: str, tmp_path: Path, kind: Any, scope: str
) -> None:
    """That of AdamW is torch's capturable form on a GPU."""
    capture = {**in_scope(scope)["capture"], "optimizer_kernel": "own"}
    options: dict[str, Any] = {"module": made(lambda p: kind(p, lr=RATE)), "capture": capture}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options)
    rounds = kind is optim.AdamW and backend == "cuda"
    compare(eager, captured.run(), tolerance=1e-4 if rounds else 0.0)
    assert captured.capture.report.fused == ()


class Extra(Net):
    """Has one more parameter.

    Args:
        dtype: Of it; one of whole numbers is frozen, and a complex one is a factor of the loss.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(lambda m: optim.AdamW(m.parameters(), lr=RATE))
        self.extra = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=dtype.is_complex)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * self.extra.real.mean() if self.extra.is_complex() else loss


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_parameters_of_whole_numbers_leave_the_step_fused(
    backend: str, tmp_path: Path, scope: str
) -> None:
    captured = prepare(
        backend, tmp_path, True, module=lambda: Extra(torch.uint8), **in_scope(scope)
    ).run()
    assert captured.statistics.fused == ["AdamW"]
    assert captured.statistics.fallbacks == []


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # by the trace of a fit
@pytest.mark.parametrize("scope", ["step", "modules"])
def test_complex_parameters_leave_the_kernel_as_it_is(
    backend: str, tmp_path: Path, scope: str
) -> None:
    options: dict[str, Any] = {"module": lambda: Extra(torch.complex64), **in_scope(scope)}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured, tolerance=1e-4 if backend == "cuda" else 0.0)
    assert captured.statistics.fused == []


def test_learning_rate_given_as_a_tensor(backend: str, tmp_path: Path) -> None:
    def optimizers(module: Any) -> Any:
        rate = torch.tensor(RATE, device=module.device)
        optimizer = optim.AdamW(module.parameters(), lr=rate, fused=True)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    compare(*fit_twice(backend, tmp_path, module=lambda: Net(optimizers), max_epochs=3))


def test_several_parameter_groups(backend: str, tmp_path: Path) -> None:
    def optimizers(module: Any) -> Any:
        groups = [
            {"params": module.net[0].parameters(), "lr": 2**-5, "weight_decay": 0.25},
            {"params": module.net[1].parameters(), "lr": 2**-8, "betas": (0.5, 0.75)},
            {"params": module.net[4].parameters(), "name": "head"},
        ]
        return optim.AdamW(groups, lr=2**-7, fused=True)

    compare(*fit_twice(backend, tmp_path, module=lambda: Net(optimizers), gradient_clip_val=0.25))


class Partial(Net):
    """One layer frozen, another never used."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.unused = nn.Linear(2, 2)


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_frozen_and_unused_parameters(
    backend: str, tmp_path: Path, trace: type[Trace], accumulate: int
) -> None:
    compare(
        *fit_twice(
            backend, tmp_path, module=Partial, trace=trace, accumulate_grad_batches=accumulate
        )
    )


class TwoHeads(Net):
    """Each kind of batch uses a head of its own, so the other one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.heads[batch["head"]](self.net(batch["x"]))
        return nn.functional.cross_entropy(logits, batch["y"])


def with_heads(order: str) -> Callable[[], list[dict[str, Any]]]:
    def data() -> list[dict[str, Any]]:
        return [{**b, "head": h} for b, h in zip(batches(len(order)), order, strict=True)]

    return data


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_parameters_that_get_a_gradient_at_times(
    backend: str, tmp_path: Path, trace: type[Trace], accumulate: int
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=TwoHeads, trace=trace, max_epochs=6, validation=0,
        accumulate_grad_batches=accumulate, gradient_clip_val=2**-4,
        data=with_heads("abbaabababba"),
    )  # fmt: skip
    compare(eager, captured)


def test_parameters_outside_of_the_optimizer(backend: str, tmp_path: Path) -> None:
    def optimizers(module: Any) -> Any:
        return optim.AdamW(module.net[4].parameters(), lr=RATE, fused=True)

    for trace in (Trace, GradientTrace):
        root = tmp_path / trace.__name__
        compare(*fit_twice(backend, root, module=lambda: Net(optimizers), trace=trace))


def test_unfreezing_during_training_recaptures(backend: str, tmp_path: Path) -> None:
    class Thawing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)

    eager, captured = fit_twice(backend, tmp_path, module=Thawing, max_epochs=3)
    compare(eager, captured)
    assert captured.statistics.captures == 2
    assert "net.0.weight" in captured.statistics.recaptures[0]


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=2**-9)


def test_parameter_group_added_by_a_finetuning_callback(backend: str, tmp_path: Path) -> None:
    def optimizers(module: Any) -> Any:
        used = [p for p in module.parameters() if p.requires_grad]
        optimizer = optim.AdamW(used, lr=RATE, fused=True)
        # It knows of the new group once it has stepped.
        return [optimizer], [optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)]

    eager, captured = fit_twice(
        backend, tmp_path, module=lambda: Net(optimizers), callbacks=lambda: [Thaw()], max_epochs=4
    )
    compare(eager, captured)
    assert len(captured.trainer.optimizers[0].param_groups) == 2


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_a_hook_that_changes_or_removes_gradients(backend: str, tmp_path: Path, hook: str) -> None:
    class Meddling(Net):
        def meddle(self, *_: Any) -> None:
            step = self.trainer.global_step
            self.net[0].weight.grad.mul_(0.5)
            self.net[4].weight.grad = self.net[4].weight.grad * 2
            if step % 4 == 0:
                self.net[4].bias.grad = None

    setattr(Meddling, hook, Meddling.meddle)
    compare(*fit_twice(backend, tmp_path, module=Meddling, max_epochs=3))


def test_optimizer_state_loaded_during_training(backend: str, tmp_path: Path) -> None:
    class Rewinding(Net):
        def on_train_epoch_start(self) -> None:
            optimizer = self.trainer.optimizers[0]
            if self.current_epoch == 1:
                self.state = optimizer.state_dict()
            if self.current_epoch == 2:
                optimizer.load_state_dict(self.state)

    eager, captured = fit_twice(backend, tmp_path, module=Rewinding, max_epochs=4)
    compare(eager, captured)


class Sharpness(optim.SGD):
    """Calls its closure twice: at the weights, and at the worst ones nearby."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        weights = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        moves = [0.5 * p.grad.clone() for p in weights]
        with torch.no_grad():
            torch._foreach_add_(weights, moves)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        super().step()
        return loss


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("scope", ["auto", "step", "modules"])
def test_a_closure_that_is_called_twice(
    backend: str, tmp_path: Path, scope: str, accumulated: int
) -> None:
    class Sharp(Net):
        def configure_optimizers(self) -> Any:
            return Sharpness(self.parameters(), lr=0.1)

    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Sharp,
        capture={"scope": scope, "on_failure": "eager"},
        accumulate_grad_batches=accumulated,
    )
    assert captured.statistics.replayed > 0
    compare(eager, captured, replayed=False)


@pytest.mark.parametrize("added", [False, True])
def test_state_that_is_replaced_between_two_graphs(
    backend: str, tmp_path: Path, added: bool
) -> None:
    class Replacing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(torch.ones(1))

        def on_after_backward(self) -> None:
            optimizer = self.trainer.optimizers[0]
            if self.global_step == 10:
                if added:
                    optimizer.add_param_group({"params": [self.late]})
                else:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        def configure_optimizers(self) -> Any:
            return optim.AdamW(self.net.parameters(), lr=0.01, fused=True)

    compare(*fit_twice(backend, tmp_path, module=Replacing))


class FreshMoments(Net):
    """Before the step with this number, puts new moments in the place of those of the last bias."""

    def __init__(self, step: int) -> None:
        super().__init__(lambda m: optim.AdamW(m.parameters(), lr=RATE, fused=True))
        self.step = step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.step:
            state = self.trainer.optimizers[0].state[self.net[4].bias]
            state["exp_avg"] = torch.ones_like(state["exp_avg"])


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_state_of_one_parameter_is_looked_at_when_an_epoch_begins(
    backend: str, tmp_path: Path, scope: str
) -> None:
    module, capture = lambda: FreshMoments(10), {"scope": scope}
    compare(*fit_twice(backend, tmp_path, module=module, capture=capture, max_epochs=3))


@pytest.mark.parametrize("groups", [1, 5])
def test_learning_rates_reach_the_device_in_two_operators_at_most(groups: int) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    optimizer = optim.AdamW([{"params": [w], "lr": 0.1 * i} for i, w in enumerate(weights)])
    capturable = CapturableOptimizer(optimizer, torch.device("cpu"))
    for step in range(3):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.3 / (i + step + 1)
        with Operators() as operators:
            rates = capturable.live_rates()
        assert [rate.item() for rate in rates] == [g["lr"] for g in optimizer.param_groups]
        assert 0 < len(operators.names) <= 2
        with Operators() as operators:
            capturable.refresh()
        assert operators.names == []


class Operators(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["step", "auto"])
@pytest.mark.parametrize("fused", [None, True])
def test_a_fused_kernel_that_no_code_asked_for_is_said_once(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, fused: bool | None, scope: str
) -> None:
    class Default(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if scope == "auto":
                loss.item()  # so that submodules are captured after all
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused)

    with caplog.at_level(logging.INFO, logger=INFO.name):
        capture = {"scope": scope, "on_failure": "eager"}
        prepare(backend, tmp_path, True, module=Default, capture=capture).run()
    said = [
        r.getMessage() for r in caplog.records if "fused kernel, which rounds" in r.getMessage()
    ]
    assert len(said) == (fused is None)


class SparseEmbedding(Net):
    """Gradients of another size in every step, which torch's fused kernels refuse."""

    def __init__(self) -> None:
        super().__init__(lambda module: optim.SGD(module.parameters(), lr=RATE))
        self.embedding = nn.Embedding(3, 8, sparse=True)

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "x": batch["x"] + self.embedding(batch["y"])})


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_sparse_gradients_leave_the_optimizer_as_it_is(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "auto", "on_failure": "eager"}
    eager, captured = fit_twice(backend, tmp_path, module=SparseEmbedding, capture=capture)
    compare(eager, captured, replayed=False)
    said = "`embedding` has sparse gradients, whose memory changes in every step"
    assert any(said in line for line in captured.statistics.fallbacks)
    assert captured.statistics.replayed > 0  # of the submodules


@pytest.mark.parametrize(("dtype", "is_captured"), [(torch.float32, True), (torch.float64, False)])
def test_rates_of_32_bits_step_no_parameters_of_64(dtype: torch.dtype, is_captured: bool) -> None:
    net = nn.Linear(2, 2, dtype=dtype)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind(net.parameters(), lr=0.1)
        obstacle = capture_obstacle(net, optimizer, "cuda")
        assert (obstacle is None) == is_captured
        assert is_captured or "float64" in str(obstacle)


PLAIN: dict[str, Callable[[Any], Any]] = {
    "SGD with momentum": lambda p: optim.SGD(p, lr=RATE, momentum=0.75),
    "SGD with nesterov": lambda p: optim.SGD(p, lr=RATE, momentum=0.75, nesterov=True),
    "SGD with dampening": lambda p: optim.SGD(
        p, lr=RATE, momentum=0.75, dampening=0.25, weight_decay=0.125
    ),
    "SGD": lambda p: optim.SGD(p, lr=RATE),
    "AdamW": lambda p: optim.AdamW(p, lr=torch.tensor([RATE]), eps=2**-8),
    "Adam with amsgrad": lambda p: optim.Adam(p, lr=RATE, amsgrad=True, eps=2**-8),
}


class Joining(TwoHeads):
    """Parameters of one group have state from different steps on."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self._optimizers = lambda module: optimizer(module.groups())
        self.start()

    def start(self) -> None:
        """What is frozen as the fit begins."""

    def groups(self) -> Any:
        """The parameters of the optimizer, or its groups."""
        return self.parameters()


class Unfreezing(Joining):
    def start(self) -> None:
        self.net[4].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[4].requires_grad_(True)


class OtherGroups(Joining):
    def groups(self) -> Any:
        head = {"params": [*self.heads.parameters()], "lr": RATE / 2, "weight_decay": 0.25}
        return [{"params": [*self.net.parameters()]}, head]


class AddsAGroup(Joining):
    def start(self) -> None:
        self.heads.requires_grad_(False)

    def groups(self) -> Any:
        return self.net.parameters()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.heads.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [*self.heads.parameters()]})


class LosesState(Joining):
    """As one that resumes from a checkpoint that knows fewer parameters."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            optimizer = self.trainer.optimizers[0]
            known = copy.deepcopy(optimizer.state_dict())
            known["state"].pop(0, None)
            optimizer.load_state_dict(known)


class Turned(Joining):
    """Gradients that a hook lays out otherwise; kernels that go through memory mix them up."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for head in self.heads.values():
            if head.weight.grad is not None:
                head.weight.grad = (2 * head.weight.grad.t()).contiguous().t()


class SparseCall(Joining):
    """Sparse gradients of a function, which no module tells of."""

    def start(self) -> None:
        self.table = nn.Parameter(torch.ones(3, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = nn.functional.embedding(batch["y"], self.table, sparse=True)
        return super().training_step({**batch, "x": batch["x"] + x}, batch_idx)


JOINING = [Joining, Unfreezing, OtherGroups, AddsAGroup, LosesState, Turned]
TAKE_SPARSE = ["SGD with momentum", "SGD with nesterov", "SGD"]


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["auto", "modules"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [*itertools.product(JOINING, PLAIN), *itertools.product([SparseCall], TAKE_SPARSE)],
)
def test_an_exchanged_kernel_takes_what_the_users_own_takes(
    backend: str, tmp_path: Path, kind: type[Joining], name: str, scope: str
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=lambda: kind(PLAIN[name]), max_epochs=3, validation=0,
        data=with_heads("aabababb"), capture={"scope": scope, "on_failure": "eager"},
    )  # fmt: skip
    compare(eager, captured, replayed=False, tolerance=1e-4)
    assert captured.statistics.replayed > 5


def test_one_graph_steps_the_parameters_of_one_device() -> None:
    weights = [nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta")]
    obstacle = capture_obstacle(nn.Linear(2, 2), optim.AdamW(weights), "cpu")
    assert obstacle == "parameters are on cpu and meta, and a graph runs on one device"


class Heads(Net):
    """One head after the other is trained: by a branch, by an attribute, or by thawing it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.way, self.head = way, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.way == "an attribute":
            self.head = batch_idx // 4
        if self.way == "thawed":
            self.net[0].requires_grad_(self.global_step > 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        head = (0 if batch_idx < 4 else 1) if self.way == "a branch" else self.head
        return nn.functional.cross_entropy(self.heads[head](self.net(batch["x"])), batch["y"])


@pytest.mark.parametrize("scope", ["step", "auto", "modules"])
@pytest.mark.parametrize("way", ["a branch", "an attribute", "thawed"])
def test_parameters_without_state_are_waited_for(
    backend: str, tmp_path: Path, way: str, scope: str
) -> None:
    """The capture that finds none is made again once an eager step has made it."""
    given = in_scope(scope)
    given["capture"] = {**given.get("capture", {}), "scope": scope, "min_repeats": 0}
    options: dict[str, Any] = {"module": lambda: Heads(way), "max_epochs": 4, **given}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured)
    assert captured.statistics.replayed >= 34
