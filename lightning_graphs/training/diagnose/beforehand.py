"""What the doctor sees of a fit around its steps: of the trainer, and of what they call."""

from __future__ import annotations

import json
from dataclasses import replace

from lightning.pytorch import Trainer
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_graphs.core.callsite import definition_of, is_library
from lightning_graphs.core.obstacles import COMPILED
from lightning_graphs.core.private.torch import is_compiled, module_hooks
from lightning_graphs.reporting.diagnosis import Diagnosis, Effect
from lightning_graphs.training.diagnose import findings
from lightning_graphs.training.guards.hooks import Observers
from lightning_graphs.training.step.optimizers import capture_obstacle


class CallsOfSubmodules:
    """Whether steps call anything of which a graph could be made in ``scope="modules"``."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._are_any = False

    def watching(self) -> RemovableHandle:
        """Look at the calls of every module while this handle is entered."""
        return register_module_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, _: object) -> None:
        if not self._are_any:
            has_parameters = next(module.parameters(), None) is not None
            self._are_any = has_parameters and module is not self._root

    def judge(self, diagnosis: Diagnosis) -> None:
        if diagnosis.steps and not self._are_any:
            diagnosis.add(findings.NO_SUBMODULE, "scope='modules'")


def judge_fit(
    diagnosis: Diagnosis,  # what is found is added to it
    trainer: Trainer,
    reason: str,  # why the fit is not captured at all; or empty
    no_whole_step: str,  # why its steps are no whole graphs; or empty
    *,
    only_submodules: bool,  # they become graphs
    rehearsal: bool,  # on the emulated backend
) -> None:
    """Note what stands in the way of every step of a fit."""
    module, add = trainer.lightning_module, diagnosis.add
    if reason:
        add(findings.CONFIGURATION, "Trainer", observed=reason)
    if no_whole_step and not only_submodules:
        add(findings.NO_WHOLE_STEP, "scope='step'", observed=no_whole_step)
    elif no_whole_step:
        because = f"the whole step cannot be one, because {no_whole_step}"
        names = json.dumps([name for name, _ in module.named_children()])
        code = f'GraphCapture(scope="modules", modules={names})'
        obstacle = replace(findings.NO_WHOLE_STEP, code=code)
        add(obstacle, "GraphCapture", observed=because, effect="submodules become graphs")
    configured = definition_of(module.configure_optimizers)
    for optimizer in trainer.optimizers:
        name, target = type(optimizer).__name__, "cpu" if rehearsal else "cuda"
        effect: Effect = "eager optimizer step"
        if why := capture_obstacle(module, optimizer, target, trainer.precision_plugin):
            add(findings.OPTIMIZER, name, configured, observed=why, effect=effect)
    for path, child in module.named_modules():
        if rehearsal and is_compiled(child):
            add(COMPILED, path or "self")
        for hook in module_hooks(child) if only_submodules else ():
            if not is_library((site := definition_of(hook)).file):
                add(findings.HOOK, f"hook of {path or 'self'}", site, effect="further graph")
    observers = Observers.of(trainer, module)
    owners = [*trainer.callbacks, module]  # type: ignore[attr-defined]
    for name in dict.fromkeys((*observers.before_backward, *observers.before_step)):
        kind, _, method = name.rpartition(".")
        owner = next(owner for owner in owners if type(owner).__name__ == kind)
        add(findings.OBSERVER, name, definition_of(getattr(owner, method)), effect="further graph")
