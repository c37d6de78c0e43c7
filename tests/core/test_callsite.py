"""The user's line, as messages name it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_graphs import CaptureError
from lightning_graphs.core import BackendName, CUDAGraph, graph
from lightning_graphs.private.callsite import is_raised_by_user


def test_the_line_of_a_cell_is_named_as_in_the_notebooks_tracebacks(
    backend: BackendName, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {"/tmp/ipykernel_1/2345.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    body = "\ndef body(x):\n    return x.item()\n"
    for file, shown in (("/tmp/ipykernel_1/2345.py", "Cell In[3]"), ("/tmp/m.py", "/tmp/m.py")):
        names: dict[str, Any] = {}
        exec(compile(body, file, "exec"), names)
        captured = CUDAGraph(backend=backend)
        with pytest.raises(CaptureError) as caught, graph(captured):
            names["body"](torch.ones((), device=device))
        assert f"{shown}:3 in body" in str(caught.value)


def asserts() -> None:
    assert not torch.ones(())


def adds() -> None:
    torch.ones(2) + torch.ones(3)


def raises_from_torch() -> None:
    try:
        adds()
    except RuntimeError as error:
        raise ValueError from error


def calls_torch() -> None:
    torch.nn.functional.one_hot("1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "kind", "says", "is_users"),
    [
        (asserts, AssertionError, "assert not", True),
        (adds, RuntimeError, "size of tensor a", False),
        (raises_from_torch, ValueError, "^$", False),
        (calls_torch, TypeError, "one_hot", False),
    ],
)
def test_what_an_operator_raises_is_not_raised_by_the_users_code(
    code: Callable[[], None], kind: type[Exception], says: str, is_users: bool
) -> None:
    with pytest.raises(kind, match=says) as caught:
        code()
    assert is_raised_by_user(caught.value) is is_users
