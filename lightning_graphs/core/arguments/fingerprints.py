"""Tells whether tensors are the same to the last bit, without keeping a copy of them."""

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


def fingerprints_of(tensors: Sequence[Tensor], *, together: bool = False) -> list[Fingerprint]:
    """Of each tensor what is equal for equal bits, and otherwise different; whatever its strides.

    The elements, read as integers, are multiplied by odd numbers that depend on their place and
    added up, modulo 2**64, which does not depend on the order. One element that changed always
    shows; several go unseen with a probability of about 2**-64. There is one wait a device.

    Together, small ones have one fingerprint for as many as are looked at at a time.
    """
    factors: dict[torch.device, Tensor] = {}
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    owners: dict[torch.device, list[list[int]]] = defaultdict(list)
    for whose, words in _pieces(tensors, together):
        device, size = words.device, words.numel()
        if device not in factors or factors[device].numel() < size:
            factors[device] = (torch.arange(1, size + 1, device=device) * _FACTOR) | 1
        sums[device].append((words * factors[device][:size]).sum())
        owners[device].append(whose)
    found: list[list[int]] = [[] for _ in tensors]
    for device, scalars in sums.items():
        for whose, value in zip(owners[device], torch.stack(scalars).tolist(), strict=True):
            for i in whose:
                found[i].append(value)
    return [tuple(values) for values in found]


def _words(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().reshape(-1)  # whose bits are what it shows
    return flat.contiguous().view(_INTEGERS[flat.element_size()])


def _pieces(tensors: Sequence[Tensor], together: bool) -> Iterator[tuple[list[int], Tensor]]:
    """Words, as many as are looked at at a time, and whose they are; copies are made one by one."""
    small: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    taken: dict[tuple[torch.device, torch.dtype], int] = defaultdict(int)
    for i, tensor in enumerate(tensors):
        words, size = _words(tensor), _CHUNK[tensor.device.type]
        if not together or words.numel() >= size:
            for piece in words.split(size):
                yield [i], piece
            continue
        kind = words.device, words.dtype
        if taken[kind] + words.numel() > size:
            yield _side_by_side(small.pop(kind))
            taken[kind] = 0
        small[kind].append((i, words))
        taken[kind] += words.numel()
    yield from map(_side_by_side, small.values())


def _side_by_side(group: Sequence[tuple[int, Tensor]]) -> tuple[list[int], Tensor]:
    return [i for i, _ in group], torch.cat([words for _, words in group])
