"""What a capture refuses, with the operator and the user's line, and what it takes beside that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_graphs import CaptureError
from lightning_graphs.core import BackendName, CUDAGraph, graph
from lightning_graphs.device.trace import OperatorMode
from lightning_graphs.private.torch import announced_as_cuda_capture, capture_unseen, run_kernel

# One a line: the line of the lambda is the line that the message must name.
ILLEGAL: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().numpy(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "print": lambda x: str(x),
    "equal": lambda x: torch.equal(x, x + 1),
    "nonzero": lambda x: torch.nonzero(x),
    "where of one": lambda x: torch.where(x > 0),
    "boolean index": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x),
    "assign device value by mask": lambda x: x.clone().index_put_((x > 1,), x[0]),
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "as_tensor": lambda x: torch.as_tensor(np.ones(2), device=x.device),
    "list index": lambda x: x[[0, 2]],
    "one_hot without classes": lambda x: torch.nn.functional.one_hot(x.long()),
}

LEGAL: dict[str, Callable[[Tensor], Tensor]] = {
    "assign by mask": lambda x: _assigned(x, x > 1),
    "assign by mask, second dimension": lambda x: _assigned_columns(x.view(2, 2)),
    "where": lambda x: torch.where(x > 1, x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 1, 7.0),
    "full": lambda x: torch.full((4,), 3.0, device=x.device) + x,
    "arange": lambda x: torch.arange(4, device=x.device) * x,
    "scalar tensor": lambda x: x * torch.tensor(3.0),
    "index by tensor": lambda x: x[torch.arange(2, device=x.device)],
    "slices": lambda x: x[1:3].clone(),
    "topk": lambda x: x.topk(2).values,
    "nonzero of a fixed size": lambda x: torch.nonzero_static(x > 1, size=4),
    "empty": lambda x: torch.cat([x[:0] * 2, x * 2]),
    "complex": lambda x: torch.view_as_real(_complex(x).conj() @ _complex(x).mT.conj()),
    "complex, imaginary part": lambda x: (x + 1j * x).conj().imag * 2,
    "as_strided": lambda x: x.clone().as_strided((3, 2), (1, 1)) * 2,
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long().abs(), num_classes=8).float(),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
}


def _assigned(x: Tensor, mask: Tensor) -> Tensor:
    y = x.clone()
    y[mask] = 0.0
    return y


def _assigned_columns(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, x[0] > 0] = 9.0
    return y


def _complex(x: Tensor) -> Tensor:
    return torch.complex(x, x + 1).view(2, 2)


def _refused(backend: BackendName, body: Callable[[], object]) -> str:
    captured = CUDAGraph(backend=backend)
    with pytest.raises(CaptureError, match="capture") as caught, graph(captured):
        body()
    return str(caught.value)


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(backend: BackendName, device: torch.device, name: str) -> None:
    x = torch.arange(4.0, device=device)
    body = ILLEGAL[name]
    message = _refused(backend, lambda: body(x))
    line = body.__code__.co_firstlineno
    assert f"{__file__}:{line} in <lambda>" in message
    assert message.splitlines()[1].startswith("  Fix: ")
    # The refusal spoils nothing: the same graph object and the same memory go on.
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        y = x * 2
    captured.replay()
    assert y.cpu().tolist() == [0.0, 2.0, 4.0, 6.0]


def test_what_was_refused_stays_so_where_code_catches_it(
    backend: BackendName, device: torch.device
) -> None:
    x, y = torch.ones(2, device=device), torch.zeros(2, device=device)

    def body() -> None:
        with contextlib.suppress(Exception):
            y.fill_(x.sum().item())
        y.add_(x)

    assert "Fix: " in _refused(backend, body)
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        z = x * 2
    captured.replay()
    assert z.cpu().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", LEGAL)
def test_legal(backend: BackendName, device: torch.device, name: str) -> None:
    body = LEGAL[name]
    x = torch.arange(4.0, device=device)
    body(x)
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        y = body(x)
    for start in (1.0, -2.0):
        x.copy_(torch.arange(start, start + 4))
        captured.replay()
        assert torch.equal(y, body(x))
        assert x.cpu().tolist() == [start, start + 1, start + 2, start + 3]


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("item", "item(), float() or an if (aten._local_scalar_dense.default)"),
        ("tolist", "tolist"),
        ("nonzero", "aten.nonzero.default"),
        ("boolean index", "aten.index.Tensor"),
        ("tensor", "tensor"),
        ("equal", "aten.equal.default"),
    ],
)
def test_the_emulated_backend_names_the_operator(name: str, operator: str) -> None:
    x, body = torch.arange(4.0), ILLEGAL[name]
    message = _refused("emulated", lambda: body(x))
    where = f"{__file__}:{body.__code__.co_firstlineno} in <lambda>"
    assert f": {operator} at {where}" in message


@pytest.mark.parametrize("name", ["inv", "cholesky", "solve"])
def test_linear_algebra_that_checks_itself_on_the_host(name: str) -> None:
    """What it computes is looked at on the host; what ends with ``_ex`` leaves that out."""
    x = torch.eye(2) * 3
    function, unchecked = getattr(torch.linalg, name), getattr(torch.linalg, f"{name}_ex")
    given = (x, x) if name == "solve" else (x,)
    message = _refused("emulated", lambda: function(*given))
    assert ": aten._linalg_check_errors.default at" in message
    captured = CUDAGraph(backend="emulated")
    with graph(captured):
        y = unchecked(*given)[0]
    x.mul_(2)
    captured.replay()
    assert torch.equal(y, function(*given))


@pytest.mark.parametrize("name", ["svd", "eigh", "eigvals", "matrix_exp", "pinv", "matrix_rank"])
def test_linear_algebra_that_waits_for_the_host(name: str) -> None:
    message = _refused("emulated", lambda: getattr(torch.linalg, name)(torch.eye(2)))
    assert "a function of torch.linalg" in message


def test_ctc_loss() -> None:
    x, lengths = torch.zeros(4, 2, 3).log_softmax(-1), torch.full((2,), 4)
    loss = lambda: torch.nn.functional.ctc_loss(x, torch.ones(2, 2).long(), lengths, lengths // 2)  # noqa: E731
    assert "A capture cannot contain ctc_loss" in _refused("emulated", loss)


def test_an_operator_is_seen_from_within() -> None:
    """So are the tables that ``ctc_loss`` copies to a GPU."""
    seen: list[str] = []

    class Inside(OperatorMode):
        sees_functions = False

        def operator(self, call: Any) -> Any:
            seen.append(call.func.name())
            if "_ctc_loss" not in call.func.name():
                return call.run()
            with self.seeing_further():
                return run_kernel(call.func, call.args[0].device, *call.args, **call.kwargs)

    x = torch.randn(4, 2, 3).log_softmax(-1).requires_grad_()
    given = torch.ones(2, 2).long(), [4, 4], [2, 1]
    loss = lambda: torch.nn.functional.ctc_loss(x, *given)  # noqa: E731
    eager = torch.autograd.grad(loss(), x)
    with Inside():
        within = torch.autograd.grad(loss(), x)
    assert torch.equal(*eager, *within)
    forward, backward = map(seen.index, ("aten::_ctc_loss", "aten::_ctc_loss_backward"))
    assert "aten::empty.memory_format" in seen[forward + 1 :][:3]
    assert "aten::full_like" in seen[backward + 1 :][:3]


def test_numpy_is_refused_on_the_emulated_backend() -> None:
    """On CUDA ``numpy()`` of a device tensor is a TypeError, captured or not."""
    x = torch.ones(3)
    assert "numpy at " in _refused("emulated", lambda: x.numpy())
    assert "__array__ at " in _refused("emulated", lambda: np.asarray(x))


def test_constants_of_the_host_cannot_be_written_in_place() -> None:
    def body() -> Tensor:
        total = torch.tensor(0.0)
        total += torch.ones(1).sum()
        return total

    assert "aten.add_.Tensor at " in _refused("emulated", body)


def test_memory_from_before_cannot_grow() -> None:
    out = torch.empty(0)
    x = torch.ones(4)
    assert "aten.add.out at " in _refused("emulated", lambda: torch.add(x, x, out=out))
    assert "aten.resize_.default at " in _refused("emulated", lambda: x.resize_(8))
    assert x.tolist() == [1.0] * 4


def test_a_checkpoint_that_rewinds_the_generator(
    backend: BackendName, device: torch.device
) -> None:
    weight = torch.ones(4096, device=device, requires_grad=True)

    def body() -> torch.Tensor:
        dropped = checkpoint(lambda w: torch.dropout(w, 0.5, True) * w, weight, use_reentrant=False)
        return torch.autograd.grad(dropped.sum(), weight)[0]

    if backend == "emulated":
        assert "generator" in _refused(backend, body).lower()
        return
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        gradient = body()
    for _ in range(2):
        captured.replay()
        # Dropped twice the same way: 0, or 2 * 2 * w. Two different masks would give 2 as well.
        assert gradient.unique().tolist() == [0.0, 4.0]


def test_a_checkpoint_without_random_numbers_is_captured(
    backend: BackendName, device: torch.device
) -> None:
    weight = torch.full((8,), 2.0, device=device, requires_grad=True)
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        cubes = checkpoint(
            lambda w: w * w * w, weight, use_reentrant=False, preserve_rng_state=False
        )
        (gradient,) = torch.autograd.grad(cubes.sum(), weight)
    captured.replay()
    assert gradient.cpu().tolist() == [12.0] * 8


@pytest.mark.parametrize(
    ("module", "heard"), [("torch.optim.adamw", False), ("torch.nn", True), ("library", False)]
)
def test_who_asks_for_a_capture_of_cuda_hears_one_answer(
    monkeypatch: pytest.MonkeyPatch, module: str, heard: bool
) -> None:
    """Of a rehearsal within which libraries are told of none: torch's optimizers refuse one."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    names: dict[str, Any] = {"__name__": module, "torch": torch}
    exec("def ask(): return torch.cuda.is_current_stream_capturing()", names)
    with announced_as_cuda_capture(), capture_unseen([]):
        assert names["ask"]() is heard
