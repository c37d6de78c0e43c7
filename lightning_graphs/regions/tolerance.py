"""By how much a replay may differ from the eager run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_graphs.values.tree import in_parts

_OF_NOISE = 4.0
"""How many times the difference of two eager runs a replay may differ. Both are draws from one
distribution, and norms of many elements hardly scatter: a replay beyond it is no such draw."""

_NOISE_IN_ROUNDINGS = 8.0
"""Up to how many roundings the difference of two eager runs counts. Kernels whose order is not
fixed round otherwise in each run; what differs by more was computed from something else."""

_OF_GRADIENTS = 2.0**-4
"""How large the terms of one gradient may be that cancel, relative to all gradients together."""

_OF_UPDATE = 0.5
"""Which part of an update may differ if the gradient before it already differed by rounding.
A step that was left out, or taken twice, is off by a whole one."""

_MOSTLY_ROUNDING = 2.0**-4
"""From which relative difference on a gradient is called rounding and nothing else."""

_ROUNDING = {
    torch.float64: 2.0**-40,
    torch.float32: 2.0**-17,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
"""Relative rounding of a sum of products: 64 units in the last place of float32, since sums over
many terms may be ordered otherwise, and one unit of the short formats, whose products kernels add
up in float32."""

_TF32 = 2.0**-10
"""Relative rounding of float32 on a GPU, whose kernels may round factors to TF32's 10 bits."""

_AT_A_TIME = 2**26
"""Bytes of tensors that are looked at together; a look takes up to three times as many."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are apart."""

    # The Euclidean norm of the difference; infinite if one of them alone is not finite
    norm: float
    largest: float  # the largest difference of two elements


NONE = Difference(0.0, 0.0)


def differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Difference]:
    """Measure how far pairs of tensors are apart; equal elements, NaN included, are not."""
    found = [NONE if _are_alike(*pair) else Difference(math.inf, math.inf) for pair in pairs]
    alike = [i for i, (pair, apart) in enumerate(zip(pairs, found, strict=True)) if apart is NONE]
    for part in _together([pairs[i][0] for i in alike]):
        both = [pairs[alike[i]] for i in part]
        apart = torch._foreach_sub([_wide(a) for a, _ in both], [_wide(b) for _, b in both])
        measured = [*torch._foreach_norm(apart), *torch._foreach_norm(apart, math.inf)]
        values = torch.stack(measured).tolist()
        for i, pair, *each in zip(part, both, values, values[len(part) :], strict=False):
            # Infinite and absent numbers may be equal
            found[alike[i]] = Difference(*each) if math.isfinite(each[0]) else _difference(*pair)
    return found


def _are_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _difference(a: Tensor, b: Tensor) -> Difference:
    left, right = _wide(a), _wide(b)
    same = (left == right) | (left.isnan() & right.isnan())
    apart = torch.where(same, 0.0, left - right).abs().nan_to_num_(nan=math.inf)
    return Difference(float(torch.linalg.vector_norm(apart)), float(apart.max()))


def sizes(tensors: Sequence[Tensor]) -> list[float]:
    """Return the Euclidean norms of the finite elements."""
    found = [0.0] * len(tensors)
    for part in _together(tensors):
        norms = torch.stack(torch._foreach_norm([_wide(tensors[i]) for i in part])).tolist()
        for i, norm in zip(part, norms, strict=True):
            found[i] = norm if math.isfinite(norm) else _size(tensors[i])
    return found


def _size(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor).nan_to_num(0.0, 0.0, 0.0)))


def _together(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield which tensors are looked at together: each such look waits for the device once."""
    parts = in_parts(tensors, lambda _: _AT_A_TIME)
    full = ([i for i in part if tensors[i].numel()] for part in parts)
    return filter(None, full)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to values in which differences neither overflow nor vanish."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    if dense.dtype in (torch.float16, torch.bfloat16):
        return dense.float()
    return dense if dense.dtype is torch.float32 else dense.double()


class Tolerance:
    """The rule by which a replay is accepted whose bits are not those of the eager step.

    It is asked only if bits differ. A correct replay has other bits for one of two reasons. Kernels
    that add up with atomics round differently in every run, eager or not: two eager runs show by
    how much. And a library may choose another algorithm while it is captured, which rounds
    differently, each time in one way.

    So a replay may differ by one rounding, plus four times what two eager runs differ. A rounding
    is that of the coarsest arithmetic in the step, relative to the tensor. A gradient may also
    differ by a sixteenth of a rounding relative to all gradients together: one that vanishes in
    exact arithmetic (of a bias before a normalization) is the rounding of terms that cancel. Eager
    runs that differ by more than eight roundings depend on something that is no part of the state,
    and that a replay froze: beyond that their difference does not count. Differences are Euclidean
    norms over a tensor: a largest element scatters from run to run, a norm hardly does.

    What an optimizer computes from a gradient that was not bit-equal may differ by half of the
    update: Adam divides by the gradient's own size, and rounding may turn around the update of an
    element that is nearly zero. After a gradient that is only rounding, it is not judged.
    """

    def __init__(self, device_type: str, arithmetic: torch.dtype | None) -> None:
        self._device_type = device_type
        self._least = _ROUNDING[arithmetic] if arithmetic is not None else 0.0

    def allowed(
        self, dtype: torch.dtype, size: float, noise: float, gradients: float = 0.0
    ) -> float:
        """Return the norm by which a replay may differ from an eager result of this size."""
        rounding = self._rounding(dtype) * (size + _OF_GRADIENTS * gradients)
        return _OF_NOISE * min(noise, _NOISE_IN_ROUNDINGS * rounding) + rounding

    def allowed_of_update(
        self, dtype: torch.dtype, size: float, noise: float, update: float
    ) -> float:
        """Return the norm by which a result may differ whose gradient was not bit-equal."""
        return _OF_NOISE * noise + self._rounding(dtype) * size + _OF_UPDATE * update

    def is_rounding(self, size: float, apart: Difference) -> bool:
        """Whether a gradient is only rounding: an accepted replay has an unrelated one."""
        return apart.norm > _MOSTLY_ROUNDING * size

    def _rounding(self, dtype: torch.dtype) -> float:
        if dtype.is_complex:
            dtype = dtype.to_real()
        if not dtype.is_floating_point:
            return 0.0
        own = _ROUNDING.get(dtype, 0.0)
        if dtype is torch.float32 and self._device_type == "cuda":
            own = _TF32
        return max(own, self._least)
