"""The switches by which torch's operators choose their kernels: a capture keeps what was chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_graphs.core.torch_private import attention_switches

_flash, _efficient, _cudnn, _math = attention_switches


class KernelChoice(NamedTuple):
    """What all threads have in common, and neither autocast nor grad mode tells.

    Attributes:
        attention: Whether flash, memory-efficient, cuDNN's and plain attention may be used, as
            ``torch.nn.attention.sdpa_kernel`` sets it.
    """

    products: str  # the precision of float32 products, as torch names it
    attention: tuple[bool, bool, bool, bool]
    deterministic: bool  # whether algorithms must be deterministic
    dtype: torch.dtype  # the default data type

    @classmethod
    def now(cls) -> KernelChoice:
        """The switches as they are."""
        return cls(
            torch.get_float32_matmul_precision(),
            (_flash(), _efficient(), _cudnn(), _math()),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )

    def changes(self, to: KernelChoice) -> list[str]:
        """The names of what is different in another choice, for a person to read."""
        triples = zip(NAMES, self, to, strict=True)
        return [name for name, before, after in triples if before != after]


NAMES = (
    "precision of float32 products",
    "kernels of attention",
    "deterministic algorithms",
    "default dtype",
)
"""What messages call the switches, in the order of the fields."""
