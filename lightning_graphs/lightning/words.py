"""Lightning's words for the engine's rules, and what rules out captures for a whole fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.device import rules
from lightning_graphs.device.rules import Obstacle, speak
from lightning_graphs.errors import USER_OPTIONS
from lightning_graphs.lightning.private import counts_manual_steps, overrides
from lightning_graphs.private.callsite import LIBRARIES, definition_of, is_library
from lightning_graphs.private.torch import is_compiled, module_hooks
from lightning_graphs.regions.conditions import Observers
from lightning_graphs.regions.optimizer import Kernel, capture_obstacle, scaler_of
from lightning_graphs.regions.own_gradients import why_not_behind
from lightning_graphs.report.diagnosis import Diagnosis, Effect
from lightning_graphs.watch.user_code import obstacle_in

# ------------------ Remedies in Lightning's words

_OF_A_READ = (
    'self.log("loss", loss)  # the tensor, without item()\n'
    "loss = torch.where(condition, a, b)  # in place of an if"
)
WORDS = {
    rules.HOST_READ: {"code": _OF_A_READ},
    rules.NOT_RECORDED: {"code": _OF_A_READ},
    rules.LINEAR_ALGEBRA: {
        "remedy": "use inv_ex, solve_ex, cholesky_ex or lu_factor_ex, which leave the check out; "
        "for svd, eigh, eig and matrix_exp use scope='modules', and call them between submodules",
    },
    rules.CTC_LOSS: {
        "remedy": "compute the lengths from the batch alone, and pass targets of 64 bits; or use "
        "scope='modules', and call ctc_loss between submodules",
    },
    rules.HOST_DATA: {
        "code": 'self.register_buffer("weights", torch.tensor([1.0, 2.0]))  # in __init__\n'
        "loss = losses @ self.weights  # in training_step",
    },
    rules.COLLECTIVE: {
        "remedy": "call the collective outside of the submodule, or capture the whole step "
        "(scope='step')",
        "code": 'self.log("loss", loss, sync_dist=True)  # in place of all_reduce(loss)',
    },
    rules.COMPILED: {"code": "GraphCapture()  # on a GPU, where the compiled module is captured"},
    rules.MOVED_STORAGE: {
        "code": 'self.register_buffer("memory", torch.zeros(size))  # in __init__\n'
        "self.memory[: len(x)].copy_(x)  # in training_step",
    },
    rules.READ_IN_BACKWARD: {
        "remedy": "use operators whose backward pass reads nothing: exp, sum and cumsum of "
        "logarithms in place of prod and cumprod, torch.where in place of masked_fill with a "
        "trained value; or leave that line to code between submodules (scope='modules')",
    },
    rules.TIMES: {
        "remedy": "record events in hooks: those inside of the step are nodes of the graph, and "
        "have no time",
        "code": "def on_train_batch_start(self, batch, batch_idx):\n"
        "    self.begin.record()  # and self.end in on_train_batch_end",
    },
    rules.GROUPED: {
        "remedy": "train weights in bfloat16 (precision='bf16-true'): torch multiplies those of "
        "all experts in one kernel, which reads nothing on the host",
        "code": 'Trainer(precision="bf16-true")',
    },
    rules.STORED: {
        "remedy": "set the attribute in on_train_batch_end, from the values that training_step "
        "returns; change buffers in place",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n    self.calls += 1",
    },
    rules.STORED_OUTSIDE: {
        "remedy": "set the variable in on_train_batch_end, from the values that training_step "
        "returns",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        "    LOSSES.append(outputs['loss'])  # what training_step returns",
    },
    rules.SIDE_EFFECT: {
        "remedy": "move that code to on_train_batch_end, with what training_step returns; "
        "self.log may stay",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        "    print(outputs['loss'])  # what training_step returns",
    },
    rules.DRAWN: {
        "remedy": "draw on the device (torch.rand(..., device=...)), or in the data loader; "
        "replays can follow a number that training_step only adds, multiplies, compares or logs, "
        "or makes a tensor of",
    },
    rules.CLOCK: {
        "remedy": "compute and decide with times in a hook; training_step may log and store them: "
        "every replay reads the clock again for that",
        "code": "def on_train_batch_start(self, batch, batch_idx):\n"
        "    self.share.fill_(time.monotonic() - self.began)  # a buffer, for the step",
    },
    rules.COUNTER: {
        "remedy": "move code that needs the value to a hook, or make the value a tensor that a "
        "hook fills; replays can follow a counter that training_step only adds, multiplies, "
        "divides, compares or logs",
        "code": 'self.register_buffer("scale", torch.ones(()))  # in __init__\n'
        "self.scale.fill_(1.0 / (1 + batch_idx))  # in on_train_batch_start",
    },
    rules.OLD_GRADIENTS: {
        "remedy": "clip with Trainer(gradient_clip_val=...), which is captured; use and log "
        "gradients in on_before_optimizer_step, and keep what the next step needs of them in a "
        "buffer",
        "code": "def on_before_optimizer_step(self, optimizer):\n"
        "    norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)\n"
        '    self.log("norm", norm)\n'
        "    self.norm.copy_(norm)  # a buffer, for the next step",
    },
    rules.SCHEDULED: {
        "remedy": "call its step at the end of training_step; that of a scheduler which takes a "
        "value, in on_train_epoch_end",
        "code": "def on_train_epoch_end(self):\n"
        '    self.lr_schedulers().step(self.trainer.callback_metrics["loss"])',
    },
    rules.BATCH_CHANGED: {
        "remedy": "return the value from training_step, and use it in on_train_batch_end",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        '    batch["info"].score = outputs["score"]  # what training_step returns',
    },
    rules.OPTIMIZER_SET: {
        "remedy": "set the value in on_train_batch_start or another hook, or with a scheduler",
        "code": "def on_train_batch_start(self, batch, batch_idx):\n"
        '    self.optimizers().param_groups[0]["weight_decay"] = 0.1',
    },
    rules.MOVING_VALUE: {
        "remedy": "keep the value in a buffer that a hook fills: register_buffer(...) in __init__, "
        "and fill_(...) on it in on_train_batch_start",
        "code": 'self.register_buffer("scale", torch.ones(()))  # in __init__\n'
        "self.scale.fill_(number)  # in on_train_batch_start",
    },
    rules.GRADIENTS_CHANGED: {
        "remedy": "use torch.autograd.grad(...), which returns gradients; or write evaluation=False"
    },
    rules.FILLED: {
        "remedy": "compute with the list in on_train_batch_end, or keep the last few entries in a "
        "deque",
        "code": "self.last = deque(maxlen=10)  # in __init__\n"
        "self.last.append(loss.detach())  # in training_step",
    },
}
"""Rule of the engine -> the remedy and code that messages have in place of its own."""

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
_LOGGERS = ("tensorboard", "tensorboardX", "wandb", "mlflow", "neptune", "comet_ml")

speak(WORDS)
LIBRARIES.step = "training_step"
USER_OPTIONS.extend(("GraphCapture(", "Trainer("))
LIBRARIES.add((*_LIGHTNING, "torchmetrics"), _LOGGERS)


# ------------------ Obstacles of a whole fit

CONFIGURATION = Obstacle(
    "GraphCapture can capture on one device, under DDP or FSDP2, and without detect_anomaly.",
    "change that setting of the Trainer, or train without GraphCapture",
    kind="configuration",
    code='Trainer(strategy="ddp", detect_anomaly=False)',
)
NO_WHOLE_STEP = Obstacle(
    "A whole step can be captured only with optimizers that graphs can step and that call it once.",
    "leave the step as it is, if it needs that: scope='auto' and scope='modules' capture "
    "submodules; modules=[...] names them",
    kind="configuration",
    code='GraphCapture(scope="modules", modules=["generator", "discriminator"])',
)
NO_SUBMODULE = Obstacle(
    "Graphs of submodules need a step that calls one with parameters.",
    "leave scope='modules' out, which captures the whole step; or move the computation into a "
    "module that training_step calls",
    kind="configuration",
    code='GraphCapture(scope="step")',
)
OPTIMIZER = Obstacle(
    "An optimizer step can be captured only if it reads nothing on the host and calls no hooks.",
    "use an optimizer of torch.optim with a fused kernel, or one with capturable=True",
    kind="optimizer",
    code="return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)",
)
HOOK = Obstacle(
    "A graphed submodule cannot call hooks of the modules inside of it.",
    "leave the hook, if it is needed: the modules inside are captured; with scope='step' the step "
    "may have hooks",
    kind="hook",
    code='GraphCapture(scope="step")',
)
OBSERVER = Obstacle(
    "A hook that runs inside of a step parts it into two graphs.",
    "leave the hook, if it is needed there; otherwise move its code to on_train_batch_end",
    kind="observer",
    code="def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx): ...",
)
_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")

# Those that Lightning calls within a step that optimizes manually
_CALLED_BY_HAND = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def observers_of(trainer: Trainer, module: LightningModule) -> Observers:
    """Find the overridden hooks of callbacks and of the module."""
    known = (
        _CALLED_BY_HAND if not module.automatic_optimization else _BEFORE_BACKWARD + _BEFORE_STEP
    )
    before = _observers(trainer, module, [hook for hook in _BEFORE_BACKWARD if hook in known])
    after = _observers(trainer, module, [hook for hook in _BEFORE_STEP if hook in known])
    # A hook that runs before the backward pass may also change what the optimizer step reads.
    return Observers(before, after or before, overrides(module, "optimizer_zero_grad"))


def moves_batches_itself(trainer: Trainer, module: LightningModule) -> bool:
    """Tell whether user code runs while a batch is moved to the device.

    Such code may read what the running step writes, so the move must wait for the step.
    """
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
    return any(overrides(owner, hook) for owner in owners for hook in hooks)


def _observers(trainer: Trainer, module: LightningModule, hooks: Sequence[str]) -> tuple[str, ...]:
    owners: list[Any] = [*trainer.callbacks]  # type: ignore[attr-defined]
    if module.automatic_optimization:  # else its hooks are a part of the step
        owners.append(module)
    pairs = ((owner, hook) for hook in hooks for owner in owners if overrides(owner, hook))
    return tuple(f"{type(owner).__name__}.{hook}" for owner, hook in pairs)


def why_no_whole_step(trainer: Trainer, module: LightningModule, kernel: Kernel) -> str:
    """Why the steps of a fit are no whole graphs, in one sentence; empty if they may be.

    ``kernel`` is the option ``optimizer_kernel``.
    """
    if (obstacle := obstacle_in(module)) is not None:
        return obstacle
    if not module.automatic_optimization:
        return _why_not_by_hand(trainer, module, kernel)
    if len(trainer.optimizers) != 1:
        return f"scope='step' needs one optimizer, and there are {len(trainer.optimizers)}"
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        return "LBFGS calls the training step several times for each update"
    return ""


def _why_not_by_hand(trainer: Trainer, module: LightningModule, kernel: Kernel) -> str:
    """Why the steps of a module that optimizes manually are no whole graphs."""
    if trainer.world_size > 1:
        return "the module optimizes manually, which whole steps of several ranks do not allow"
    if not counts_manual_steps(trainer):
        return "the module optimizes manually, and this version of Lightning counts in another way"
    if not trainer.optimizers:
        return "the module optimizes manually, without an optimizer of Lightning's"
    observers = observers_of(trainer, module)
    for hook in (*observers.before_backward, *observers.before_step):
        return f"the module optimizes manually, and {hook} looks into its step"
    target, scaler = trainer.strategy.root_device.type, scaler_of(trainer.precision_plugin)
    for optimizer in trainer.optimizers:
        if capture_obstacle(module, optimizer, target, kernel) and (
            why := why_not_behind(module, optimizer, scaler)
        ):
            return f"the module optimizes manually, and its optimizer cannot be captured: {why}"
    return ""


def judge_fit(
    diagnosis: Diagnosis,  # gets the findings
    trainer: Trainer,
    reason: str,  # why the fit is not captured at all; empty if it may be
    no_whole_step: str,  # why its steps are no whole graphs; empty if they may be
    only_submodules: bool,  # graphs are of submodules
    rehearsal: bool,  # on the emulated backend
    kernel: Kernel,  # the option ``optimizer_kernel``
) -> None:
    """Add to a diagnosis what hinders every step of a fit."""
    module, add = trainer.lightning_module, diagnosis.add
    if reason:
        add(CONFIGURATION, "Trainer", observed=reason)
    if no_whole_step and not only_submodules:
        add(NO_WHOLE_STEP, "scope='step'", observed=no_whole_step)
    elif no_whole_step:
        because = f"the whole step cannot be one, because {no_whole_step}"
        names = json.dumps([name for name, _ in module.named_children()])
        code = f'GraphCapture(scope="modules", modules={names})'
        obstacle = replace(NO_WHOLE_STEP, code=code)
        add(obstacle, "GraphCapture", observed=because, effect="submodules become graphs")
    configured = definition_of(module.configure_optimizers)
    for optimizer in trainer.optimizers:
        name, target = type(optimizer).__name__, "cpu" if rehearsal else "cuda"
        effect: Effect = "eager optimizer step"
        if why := capture_obstacle(module, optimizer, target, kernel):
            add(OPTIMIZER, name, configured, observed=why, effect=effect)
    for path, child in module.named_modules():
        if rehearsal and is_compiled(child):
            add(rules.COMPILED, path or "self")
        for hook in module_hooks(child) if only_submodules else ():
            if not is_library((site := definition_of(hook)).file):
                add(HOOK, f"hook of {path or 'self'}", site, effect="further graph")
    observers = observers_of(trainer, module)
    owners = [*trainer.callbacks, module]  # type: ignore[attr-defined]
    for name in dict.fromkeys((*observers.before_backward, *observers.before_step)):
        kind, _, method = name.rpartition(".")
        owner = next(owner for owner in owners if type(owner).__name__ == kind)
        add(OBSERVER, name, definition_of(getattr(owner, method)), effect="further graph")
