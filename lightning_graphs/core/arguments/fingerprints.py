"""Whether tensors are the same to the last bit, without keeping a copy of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 20}
"""Elements at a time: what a CPU keeps in its cache, and what keeps a GPU busy. A fingerprint needs
32 MiB beside the tensors at most."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio: its multiples are spread over all integers."""

Fingerprint = tuple[int, ...]


class Fingerprinter:
    """Makes fingerprints: equal for equal bits, and otherwise different.

    The elements, read as integers, are multiplied by odd numbers that depend on their place and
    added up, modulo 2**64, which does not depend on the order. One element that changed always
    shows; several go unseen with a probability of about 2**-64.
    """

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def of(self, tensors: Sequence[Tensor]) -> list[Fingerprint]:
        """The fingerprint of each tensor's values, whatever its strides; one wait a device."""
        sums: dict[torch.device, list[Tensor]] = defaultdict(list)
        owners: dict[torch.device, list[int]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            for words in _words(tensor).split(_CHUNK[tensor.device.type]):
                sums[tensor.device].append((words * self._of_place(words)).sum())
                owners[tensor.device].append(i)
        found: list[list[int]] = [[] for _ in tensors]
        for device, scalars in sums.items():
            values: list[int] = torch.stack(scalars).tolist()
            for i, value in zip(owners[device], values, strict=True):
                found[i].append(value)
        return [tuple(values) for values in found]

    def _of_place(self, words: Tensor) -> Tensor:
        known = self._factors.get(words.device)
        if known is None or known.numel() < words.numel():
            places = torch.arange(1, words.numel() + 1, device=words.device)
            known = self._factors[words.device] = (places * _FACTOR) | 1
        return known[: words.numel()]


def _words(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    # A lazily conjugated or negated tensor has other bits than it shows.
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])
