"""Functions of torch that look at values on a CPU only, as they run where it stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """With a number of classes, a GPU's kernels look for themselves whether it is large enough.

    See ``one_hot`` in aten/src/ATen/native/Onehot.cpp.
    """
    if num_classes < 0:
        return functional.one_hot(tensor, num_classes)
    zeros = tensor.new_zeros((*tensor.shape, num_classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The table of lengths for a mean is written out of sight; a GPU gets a copy of it."""
    means = reduction == "mean" and not isinstance(target_lengths, Tensor)
    given = (log_probs, targets, input_lengths, target_lengths, blank)
    losses = functional.ctc_loss(*given, "none" if means else reduction, zero_infinity)
    if not means:
        return losses
    return (losses / torch.stack([losses.new_full((), max(1, n)) for n in target_lengths])).mean()


REHEARSED: Mapping[Any, Callable[..., Any]] = {
    functional.one_hot: _one_hot,
    functional.ctc_loss: _ctc_loss,
}
