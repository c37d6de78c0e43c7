"""The switches by which torch's operators choose their kernels: a capture keeps what was chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.backends import cuda


class KernelChoice(NamedTuple):
    """What all threads have in common, and neither autocast nor grad mode tells.

    Attributes:
        products: The precision of float32 products, as torch names it.
        attention: Whether flash, memory-efficient, cuDNN's and plain attention may be used, as
            ``torch.nn.attention.sdpa_kernel`` sets it.
        deterministic: Whether algorithms must be deterministic.
    """

    products: str
    attention: tuple[bool, bool, bool, bool]
    deterministic: bool

    @classmethod
    def now(cls) -> KernelChoice:
        """The switches as they are."""
        attention = (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )
        return cls(
            torch.get_float32_matmul_precision(),
            attention,
            torch.are_deterministic_algorithms_enabled(),
        )

    def changes(self, to: KernelChoice) -> list[str]:
        """The names of what is different in another choice, for a person to read."""
        triples = zip(NAMES, self, to, strict=True)
        return [name for name, before, after in triples if before != after]


NAMES = ("precision of float32 products", "kernels of attention", "deterministic algorithms")
"""What messages call the switches, in the order of the fields."""
