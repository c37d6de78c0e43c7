"""A plain loop that runs twice, eagerly and with captured functions, and is compared by bits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lightning_graphs


class Eager:
    """Stands for a captured function in the loop that is compared."""

    report = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        yield


class Lab:
    """Where a loop gets its device, its data and its captured functions."""

    def __init__(self, backend: str, device: torch.device, options: Any = None) -> None:
        self.backend, self.device = backend, device
        self.options = options  # of ``capture``; None: functions run eagerly
        self.steps: list[Any] = []
        self.given: list[Any] = []

    def capture(self, function: Any, model: Any, optimizer: Any = None, **options: Any) -> Any:
        self.given += tree_leaves([model, optimizer])
        if self.options is None:
            return Eager(function)
        given = {"on_failure": "raise", "only_if_faster": False, **options, **self.options}
        step = lightning_graphs.capture(function, model, optimizer, backend=self.backend, **given)
        self.steps.append(step)
        return step

    def batches(self, count: int = 16, size: int = 16) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(count):
            x = torch.randn(size, 8, generator=generator)
            y = torch.randint(0, 3, (size,), generator=generator)
            yield {"x": x.to(self.device), "y": y.to(self.device)}

    def net(self, dropout: float = 0.25) -> nn.Module:
        parts = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(dropout)]
        return nn.Sequential(*parts, nn.Linear(16, 3)).to(self.device)

    def state(self) -> list[Any]:
        """All that the loop has left in what it gave to ``capture``."""
        found: list[Any] = []
        for one in self.given:
            if isinstance(one, nn.Module):
                found += [one.state_dict(), [p.grad for p in one.parameters()]]
            elif one is not None:
                found.append(one.state_dict())
        return found

    @property
    def replayed(self) -> int:
        return sum(step.report.replayed for step in self.steps)

    def assert_replayed(self, expected: int | str) -> None:
        """Assert for each function that so many calls were replayed, or that this was said."""
        for report in [step.report for step in self.steps]:
            if isinstance(expected, int):
                assert report.replayed >= expected, report
            else:
                assert any(re.search(expected, said) for said in report.fallbacks), report


def assert_same(reference: Any, found: Any) -> None:
    """Assert that two trees have the same values, tensors to the last bit."""
    expected, values = tree_leaves(reference), tree_leaves(found)
    assert len(expected) == len(values)
    for left, right in zip(expected, values, strict=True):
        if isinstance(left, Tensor):
            assert left.dtype == right.dtype
            assert left.device == right.device
            assert torch.equal(left, right) or (left.isnan() & right.isnan()).all()
        elif left is not right:
            assert left == right


def twice(loop: Callable[[Lab], Any], backend: str, device: torch.device, **options: Any) -> Lab:
    """Run a loop eagerly and with captured functions, and compare what it returns and leaves."""
    found = []
    for given in (None, options):
        lab = Lab(backend, device, given)
        torch.manual_seed(0)
        returned = loop(lab)
        found.append((returned, lab.state(), torch.get_rng_state(), torch.rand(2, device=device)))
    assert_same(*found)
    return lab
