"""The batch of a capture: its containers are copies, its tensors static inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_graphs.core.arguments import held_in_all
from lightning_graphs.core.contents import Contents
from lightning_graphs.core.torch_private import version_of
from lightning_graphs.core.tree import flatten
from lightning_graphs.errors import CaptureError


@contextlib.contextmanager
def batch_left(batch: Any) -> Iterator[None]:
    """Refuse what the body, a capture, writes into the objects and tensors of its own batch.

    Objects are no copies, so that what it changes in them is undone. Containers are: what it does
    to them is told, since hooks get those of the data loader in a replay.

    Raises:
        CaptureError: names what it has changed.
    """
    before: list[tuple[str, Any]] = []
    flatten(batch, "batch", before)
    versions = [(name, leaf, version_of(leaf)) for name, leaf in before if isinstance(leaf, Tensor)]
    objects = [(name, leaf) for name, leaf in before if not isinstance(leaf, Tensor)]
    with Contents(held_in_all(objects)).left(_refuse):
        yield
    for name, tensor, version in versions:
        if version_of(tensor) != version:
            raise CaptureError(
                "A captured step reads a copy of the batch: hooks do not see what it writes there.",
                f"training_step changes {name} in place",
                "make a new tensor: x = x + 1, not x += 1",
            )
    after: list[tuple[str, Any]] = []
    flatten(batch, "batch", after)
    if changed := {(n, id(x)) for n, x in before} ^ {(n, id(x)) for n, x in after}:
        rank_zero_info(
            f"GraphCapture: training_step changes {min(changed)[0]}: hooks see the batch as it was "
            "loaded, where the step is replayed"
        )


def _refuse(names: str) -> None:
    raise CaptureError(
        "A captured step runs no Python code: what it stores in objects of the batch would stand "
        "still.",
        f"training_step changes {names}",
        "return it, and store it in on_train_batch_end",
    )
