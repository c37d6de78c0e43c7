"""What is known of a fit before its steps run: for captures, and in words of the doctor."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.device.rules import COMPILED, Obstacle
from lightning_graphs.private.callsite import definition_of, is_library
from lightning_graphs.private.torch import is_compiled, module_hooks
from lightning_graphs.regions.conditions import Observers
from lightning_graphs.regions.optimizer import capture_obstacle
from lightning_graphs.report.diagnosis import Diagnosis, Effect
from lightning_graphs.watch.user_code import is_lightnings, obstacle_in

CONFIGURATION = Obstacle(
    "GraphCapture can capture on one device, under DDP or FSDP2, and without detect_anomaly.",
    "change that setting of the Trainer, or train without GraphCapture",
    kind="configuration",
    code='Trainer(strategy="ddp", detect_anomaly=False)',
)
NO_WHOLE_STEP = Obstacle(
    "A whole step can be captured only under automatic optimization, with one optimizer that calls "
    "the step once.",
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
CHANGING_SHAPE = Obstacle(
    "A graph can replay only for batches of the shapes that it was captured with.",
    "pad to a few fixed lengths, and drop the short last batch",
    kind="changing-shape",
    code="DataLoader(data, batch_size=32, drop_last=True, collate_fn=pad_to_a_multiple)",
)
CHANGING_NUMBER = Obstacle(
    "A graph would freeze Python numbers that change, and branches that they choose.",
    "leave the number, if it is made of counters and learning rates alone, which replays follow; "
    "else make it a tensor that a hook fills, and choose between values with torch.where",
    kind="python-state",
    code='self.register_buffer("scale", torch.ones(()))  # in __init__\n'
    "self.scale.fill_(number)  # in on_train_batch_start",
)


_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")

_BASES = ("callbacks.callback", "core.hooks", "core.module", "plugins.precision.precision")


def observers_of(trainer: Trainer, module: LightningModule) -> Observers:
    """The overridden hooks of callbacks and of the module."""
    before = _observers(trainer, module, _BEFORE_BACKWARD)
    after = _observers(trainer, module, _BEFORE_STEP)
    # Who looks before the backward pass may also move what the optimizer step reads.
    return Observers(before, after or before, overrides(module, "optimizer_zero_grad"))


def moves_batches_itself(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the user's own code runs while a batch is moved to the device.

    It may read what the running step writes, so it must wait for the step.
    """
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
    return any(overrides(owner, hook) for owner in owners for hook in hooks)


def overrides(instance: object, method: str) -> bool:
    """Whether anything but Lightning's base classes defines the method."""
    if method in vars(instance):
        return True
    own = getattr(type(instance), method, None)
    return own is not None and not is_lightnings(own, *_BASES)


def _observers(
    trainer: Trainer, module: LightningModule, hooks: tuple[str, ...]
) -> tuple[str, ...]:
    owners = [*trainer.callbacks, module]  # type: ignore[attr-defined]
    pairs = ((owner, hook) for hook in hooks for owner in owners if overrides(owner, hook))
    return tuple(f"{type(owner).__name__}.{hook}" for owner, hook in pairs)


def why_no_whole_step(trainer: Trainer, module: LightningModule) -> str:
    """Why the steps of a fit are no whole graphs, in one sentence; empty if they may be."""
    if (obstacle := obstacle_in(module)) is not None:
        return obstacle
    if not module.automatic_optimization:
        return "the module optimizes manually, and scope='step' needs automatic optimization"
    if len(trainer.optimizers) != 1:
        return f"scope='step' needs one optimizer, and there are {len(trainer.optimizers)}"
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        return "LBFGS calls the training step several times for each update"
    return ""


def judge_fit(
    diagnosis: Diagnosis,  # what is found is added to it
    trainer: Trainer,
    reason: str,  # why the fit is not captured at all; or empty
    no_whole_step: str,  # why its steps are no whole graphs; or empty
    only_submodules: bool,  # they become graphs
    rehearsal: bool,  # on the emulated backend
) -> None:
    """Note what stands in the way of every step of a fit."""
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
        if why := capture_obstacle(module, optimizer, target, trainer.precision_plugin):
            add(OPTIMIZER, name, configured, observed=why, effect=effect)
    for path, child in module.named_modules():
        if rehearsal and is_compiled(child):
            add(COMPILED, path or "self")
        for hook in module_hooks(child) if only_submodules else ():
            if not is_library((site := definition_of(hook)).file):
                add(HOOK, f"hook of {path or 'self'}", site, effect="further graph")
    observers = observers_of(trainer, module)
    owners = [*trainer.callbacks, module]  # type: ignore[attr-defined]
    for name in dict.fromkeys((*observers.before_backward, *observers.before_step)):
        kind, _, method = name.rpartition(".")
        owner = next(owner for owner in owners if type(owner).__name__ == kind)
        add(OBSERVER, name, definition_of(getattr(owner, method)), effect="further graph")
