"""Recurrent layers: their weights stay in place, and a seed lets cuDNN make its state anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.core.private.cudnn import CapturedDropout, dropout_state_of
from lightning_graphs.errors import CaptureError
from lightning_graphs.exchange import replaced

_PATIENCE = 2
"""How many steps in a row may begin with a new seed before one is captured all the same: a layer
that no step calls leaves it unused."""


@contextlib.contextmanager
def flattened_once() -> Iterator[None]:
    """Let recurrent layers stay where they are when they are flattened again.

    cuDNN wants their weights in one piece of memory. Models flatten them in each forward, as
    ``nn.DataParallel`` demands, and each time the weights move, which no graph can follow.
    """
    original = nn.RNNBase.flatten_parameters

    def flatten(layer: nn.RNNBase) -> None:
        if len({weight.untyped_storage().data_ptr() for weight in layer.parameters()}) > 1:
            original(layer)

    with replaced(nn.RNNBase, "flatten_parameters", flatten):
        yield


class NewSeeds:
    """Tells which steps make cuDNN's random state anew, so that they run eagerly.

    The state is seeded by a number of torch's generator, which the step draws where its first
    recurrent layer with dropout runs: no replay draws it there.
    """

    def __init__(self, module: LightningModule, layers: Sequence[nn.RNNBase]) -> None:
        self._module = module
        self._layers = layers
        self._in_a_row = 0

    @classmethod
    def of(cls, module: LightningModule) -> NewSeeds | None:
        """None for a module without recurrent layers."""
        layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
        return cls(module, layers) if layers else None

    def are_used_by_next_step(self) -> bool:
        """Whether the coming step is no example of those after it, and is not to be captured."""
        state = dropout_state_of(self._module.device, self._layers)
        if state is None or state.now() is not None:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        return self._in_a_row <= _PATIENCE


def refuse_new_seeds(dropout: CapturedDropout | None) -> None:
    """Refuse a captured step that draws dropout where each step begins with a new seed."""
    if dropout is not None and not dropout.is_current():
        raise CaptureError(
            "A replay cannot make the random state anew from which cuDNN draws the dropout between "
            "recurrent layers.",
            "a generator of torch's is set before each step, which makes torch seed that state",
            "set seeds once, before the fit",
        )
