"""When a captured step casts gradients together: where nobody can see that they come later.

Gradients that wait for their cast are not in ``.grad`` yet. In a backward pass of nothing but
autograd's own operators nobody looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_graphs.core.autograd_graph import cast_together, has_python_nodes, leaves_behind
from lightning_graphs.core.torch_private import has_gradient_hooks, hooks_registered
from lightning_graphs.training.observers import overrides
from lightning_graphs.training.own_code import OwnCode, is_lightnings

_TO_NODES = frozenset({"next_functions", "get_gradient_edge"})
"""Names in code that may put hooks on the nodes of gradients, of which torch tells nobody."""


class StepCasts:
    """Decides for each capture of a whole step whether gradients are cast together."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._has_hooks = False

    @cached_property
    def _is_plain(self) -> bool:
        """Looked at once there is a capture: to read all code takes its time."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        kinds = map(type, [*self._module.modules(), *callbacks])
        return (
            is_lightnings(type(self._trainer.strategy), "strategies.single_device")
            and not (torch.distributed.is_available() and torch.distributed.is_initialized())
            and not overrides(self._module, "backward")
            and not overrides(self._trainer.precision_plugin, "backward")
            and _TO_NODES.isdisjoint(OwnCode(self._module).words_of(kinds))
        )

    @contextlib.contextmanager
    def watched_forward(self) -> Iterator[None]:
        """Around the forward pass: notice hooks that it registers."""
        before = hooks_registered()
        yield
        self._has_hooks = hooks_registered() != before

    def together(self, loss: Tensor) -> AbstractContextManager[None]:
        """Around the backward pass of this loss."""
        if not self._is_unseen(loss):
            return contextlib.nullcontext()
        return cast_together([loss], [p for p in self._module.parameters() if p.requires_grad])

    def _is_unseen(self, loss: Tensor) -> bool:
        return (
            self._is_plain
            and not self._has_hooks
            and not has_python_nodes([loss])
            and not any(map(has_gradient_hooks, leaves_behind([loss])))
        )
