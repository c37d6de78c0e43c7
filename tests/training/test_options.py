"""Options: wrong values raise when the callback is made, and say what to write."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_graphs import GraphCapture
from lightning_graphs.errors import GraphError

WRONG: list[tuple[str, Any, str]] = [
    ("scope", "everything", "scope is one of"),
    ("backend", "tpu", "backend is one of 'auto', 'cuda', 'emulated'"),
    ("on_failure", "ignore", "on_failure is one of 'eager', 'raise'"),
    ("warmup_steps", 0, "warmup_steps is a whole number of at least 1"),
    ("warmup_steps", 2.0, "warmup_steps is a whole number"),
    ("warmup_steps", True, "warmup_steps is a whole number"),
    ("capture_after", -1, "capture_after is a whole number of at least 0"),
    ("max_graphs", 0, "max_graphs is a whole number of at least 1"),
    ("max_graphs", "8", "write max_graphs=1 or more"),
    ("memory", -0.5, "memory is a part of the peak of eager steps, or 'auto'"),
    ("memory", "1.0", "write memory=0.35"),
    ("memory", True, "memory is a part of the peak"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_value_raises_at_construction(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        GraphCapture(**{name: value})
    assert isinstance(caught.value, GraphError)
    assert f"{name}={value!r}" in caught.value.observed


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        GraphCapture("step")  # type: ignore[call-arg, misc]


def test_defaults() -> None:
    options = GraphCapture().options
    assert (options.warmup_steps, options.capture_after, options.max_graphs) == (3, None, None)
    assert (options.on_failure, options.backend) == ("eager", "auto")
