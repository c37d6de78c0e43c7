"""Random generators around operators: watched while these run, and put back after them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload


class GeneratorWatch:
    """Tells operators that draw from a generator which something else than an operator has set.

    Args:
        generators: The generators.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = tuple(generators)
        self.begin()

    def begin(self) -> None:
        """Take the generators as they are now: whatever set them before is of no interest."""
        self._as_left = self._states()

    @contextlib.contextmanager
    def around(self, func: OpOverload) -> Iterator[bool]:
        """Watch an operator that the body runs.

        Yields:
            Whether it draws, and a generator was set since operators left it.
        """
        before = self._states()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        yield draws and not _equal(before, self._as_left)
        after = self._states()
        if draws or not _equal(before, after):
            self._as_left = after

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@contextlib.contextmanager
def same_random_numbers(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore torch's random generators of the CPU and of the tensors' GPUs."""
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    if torch.cuda.is_available() and not devices:
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices):
        yield
