"""Whether tensors are the same to the last bit, without keeping a copy of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

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

    def of(self, tensors: Sequence[Tensor], *, together: bool = False) -> list[Fingerprint]:
        """The fingerprint of each tensor's values, whatever its strides; one wait a device.

        Together, small ones have one fingerprint for as many as are looked at at a time.
        """
        pieces: dict[torch.device, list[tuple[list[int], Tensor]]] = defaultdict(list)
        small: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            words, size = _words(tensor), _CHUNK[tensor.device.type]
            if together and words.numel() < size:
                small[words.device, words.dtype].append((i, words))
            else:
                pieces[words.device] += [([i], piece) for piece in words.split(size)]
        for (device, _), found in small.items():
            pieces[device] += _groups(found, _CHUNK[device.type])
        values: list[list[int]] = [[] for _ in tensors]
        for of_device in pieces.values():
            sums = [(words * self._of_place(words)).sum() for _, words in of_device]
            for (owners, _), value in zip(of_device, torch.stack(sums).tolist(), strict=True):
                for i in owners:
                    values[i].append(value)
        return [tuple(found) for found in values]

    def _of_place(self, words: Tensor) -> Tensor:
        known = self._factors.get(words.device)
        if known is None or known.numel() < words.numel():
            places = torch.arange(1, words.numel() + 1, device=words.device)
            known = self._factors[words.device] = (places * _FACTOR) | 1
        return known[: words.numel()]


def _words(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if dense.is_conj() or dense.is_neg():  # it has other bits than it shows
        dense = dense.resolve_conj().resolve_neg()
    flat = dense.reshape(-1)
    return flat.contiguous().view(_INTEGERS[flat.element_size()])


def _groups(found: Sequence[tuple[int, Tensor]], size: int) -> Iterator[tuple[list[int], Tensor]]:
    """These words, as many side by side as are looked at at a time; and whose they are."""
    owners: list[int] = []
    words: list[Tensor] = []
    room = size
    for i, own in found:
        if own.numel() > room:
            yield owners, torch.cat(words)
            owners, words, room = [], [], size
        owners.append(i)
        words.append(own)
        room -= own.numel()
    yield owners, torch.cat(words)
