"""Functions of torch that look at values on a CPU only, as they run where it stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """With a number of classes, a GPU's kernels look for themselves whether it is large enough.

    See ``one_hot`` in aten/src/ATen/native/Onehot.cpp.
    """
    if num_classes < 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    zeros = tensor.new_zeros((*tensor.shape, num_classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


REHEARSED: Mapping[Any, Callable[..., Any]] = {torch.nn.functional.one_hot: _one_hot}
