"""Before and after: what a capture leaves behind, copies, and reset."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.core import make_graphed_callables
from lightning_graphs.device.graph import BackendName
from lightning_graphs.errors import CaptureError, ReplayError
from tests.core.callables_support import (
    Net,
    assert_same,
    assert_same_state,
    both_ways,
    gradients_of,
    state_of,
    two_three_one,
)


@both_ways
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_the_capture(
    backend: BackendName, device: torch.device, param_grads: Any, fails: bool
) -> None:
    class Failing(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * y.sum().item() if fails else y

    net = Failing().to(device)
    net(torch.randn(6, 4, device=device)).sum().backward()
    state, gradients = state_of(net), gradients_of(net)
    addresses = [p.grad.data_ptr() for p in net.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if device.type == "cuda" else random
    sample = (torch.zeros(6, 4, device=device),)
    if fails:
        with pytest.raises(CaptureError, match=r"test_callables_lifetime\.py"):
            make_graphed_callables(net, sample, param_grads=param_grads, backend=backend)
        assert "forward" not in net.__dict__
    else:
        make_graphed_callables(net, sample, param_grads=param_grads, backend=backend)
    assert_same_state(net, state)
    assert_same(gradients_of(net), gradients)
    assert [p.grad.data_ptr() for p in net.parameters() if p.grad is not None] == addresses
    assert torch.equal(torch.get_rng_state(), random)
    if device.type == "cuda":
        assert torch.equal(torch.cuda.get_rng_state(), on_device)


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_after_an_exception_the_next_attempt_works(
    backend: BackendName, device: torch.device, where: str
) -> None:
    class Flaky(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.calls += 1
            if self.calls == (1 if where == "warm-up" else 4):
                raise KeyError("flaky")
            return y

    net, x = Flaky(0.0).to(device), torch.randn(6, 4, device=device)
    state = state_of(net)
    with pytest.raises(KeyError, match="flaky"):
        make_graphed_callables(net, (torch.zeros_like(x),), backend=backend)
    assert_same_state(net, state)
    assert "forward" not in net.__dict__
    graphed = make_graphed_callables(net, (torch.zeros_like(x),), backend=backend)
    eager = Net(0.0).to(device)
    eager.load_state_dict(state)
    assert torch.equal(graphed(x), eager(x))


def _deepcopied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [_deepcopied, _pickled, _saved])
def test_a_copy_is_the_original_module(
    backend: BackendName, device: torch.device, copied: Callable[[nn.Module], nn.Module]
) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(linear, (x,), backend=backend)
    twin = copied(graphed)
    assert isinstance(twin, nn.Linear)
    assert twin.forward.__func__ is nn.Linear.forward
    assert twin.forward.__self__ is twin
    with torch.no_grad():
        linear.weight.fill_(100.0)
        twin.weight.mul_(10)
    assert twin(x).item() == 51.0
    twin(torch.ones(7, 2, device=device)).sum().backward()
    assert twin.weight.grad is not None
    assert twin.weight.grad.tolist() == [[7.0, 7.0]]
    assert linear.weight.grad is None
    assert copy.deepcopy(twin)(x).item() == 51.0
    assert graphed(x).item() == 201.0


def test_a_copy_keeps_a_forward_that_was_set_on_the_instance(
    backend: BackendName, device: torch.device
) -> None:
    linear = two_three_one(device)
    linear.forward = lambda x: x * 42  # type: ignore[method-assign]
    x = torch.ones(1, 2, device=device, requires_grad=True)
    graphed = make_graphed_callables(linear, (x,), allow_unused_input=True, backend=backend)
    assert copy.deepcopy(graphed)(x).tolist() == [[42.0, 42.0]]
    graphed.forward.reset()
    assert linear(x).tolist() == [[42.0, 42.0]]


@both_ways
def test_reset(backend: BackendName, device: torch.device, param_grads: Any) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(linear, (x,), param_grads=param_grads, backend=backend)
    pending = graphed(x)
    forward = graphed.forward
    static = weakref.ref(forward.inputs.tensors[0])
    output = weakref.ref(forward.outputs.tensors[0])
    forward.reset()
    forward.reset()
    gc.collect()
    assert static() is None
    assert output() is None
    assert "forward" not in linear.__dict__
    assert linear(torch.ones(3, 2, device=device)).tolist() == [[6.0]] * 3
    assert forward(torch.ones(3, 2, device=device)).tolist() == [[6.0]] * 3
    with pytest.raises(ReplayError, match="cannot run its backward pass after reset"):
        pending.sum().backward()
    del pending
    again = make_graphed_callables(linear, (x,), param_grads=param_grads, backend=backend)
    again(2 * x).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[2.0, 2.0]]


def test_reset_of_one_leaves_the_others(backend: BackendName, device: torch.device) -> None:
    x = torch.ones(1, 2, device=device)
    first, second = make_graphed_callables(
        (two_three_one(device), two_three_one(device)), ((x,), (x,)), backend=backend
    )
    first.forward.reset()
    y = second(2 * x)
    assert y.item() == 11.0
    y.sum().backward()
    assert second.weight.grad.tolist() == [[2.0, 2.0]]


def test_graphing_twice_is_refused(backend: BackendName, device: torch.device) -> None:
    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(two_three_one(device), (x,), backend=backend)
    with pytest.raises(CaptureError, match=r"call .forward.reset\(\)"):
        make_graphed_callables(graphed, (x,), backend=backend)
    with pytest.raises(CaptureError, match="got a module twice"):
        make_graphed_callables((nn.Identity(),) * 2, ((x,), (x,)), backend=backend)


def test_a_function_leaves_the_modules_it_calls_as_they_were(
    backend: BackendName, device: torch.device
) -> None:
    net = Net().to(device)
    state = state_of(net)
    x = torch.randn(6, 4, device=device)
    graphed = make_graphed_callables(lambda x: net(x).sum(), (x,), backend=backend)
    assert_same_state(net, state)
    graphed(x)
    assert net.norm.num_batches_tracked.item() == 1


def test_a_parameter_written_by_its_forward_is_as_before(
    backend: BackendName, device: torch.device
) -> None:
    embedding = nn.Embedding(3, 2, max_norm=1.0, device=device)
    with torch.no_grad():
        embedding.weight.fill_(10.0)
    graphed = make_graphed_callables(
        embedding, (torch.tensor([0, 1], device=device),), backend=backend
    )
    assert embedding.weight.tolist() == [[10.0, 10.0]] * 3
    found = graphed(torch.tensor([1, 1], device=device))
    assert torch.allclose(found.norm(dim=1), torch.ones(2, device=device), atol=1e-5)
    assert embedding.weight[0].tolist() == [10.0, 10.0]


def test_an_attribute_changed_in_place_is_as_before_and_carried_on(
    backend: BackendName, device: torch.device
) -> None:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.carried = torch.zeros(2, device=device)

        def forward(self, x: Tensor) -> Tensor:
            self.carried.mul_(0.5).add_(x)
            return self.carried * 2

    x = torch.ones(2, device=device)
    graphed = make_graphed_callables(Carrying(), (x,), backend=backend)
    assert graphed.carried.tolist() == [0.0, 0.0]
    assert [graphed(x).tolist() for _ in range(2)] == [[2.0, 2.0], [3.0, 3.0]]


def test_a_graphed_module_inside_of_another_callable_is_refused(
    backend: BackendName, device: torch.device
) -> None:
    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(two_three_one(device), (x,), backend=backend)
    for outer in (nn.Sequential(graphed), lambda x: graphed(x)):
        with pytest.raises(CaptureError, match="cannot contain another one"):
            make_graphed_callables(outer, (x,), backend=backend)
    assert graphed(x).item() == 6.0


def test_a_lazy_module_is_refused_until_it_ran(backend: BackendName, device: torch.device) -> None:
    module, x = nn.LazyLinear(3, device=device), torch.ones(2, 4, device=device)
    with pytest.raises(CaptureError, match="`weight` is not initialized yet"):
        make_graphed_callables(module, (x,), backend=backend)
    expected = module(x).detach()
    assert torch.equal(make_graphed_callables(module, (x,), backend=backend)(x), expected)


@both_ways
def test_once_more_after_a_reset_with_outputs_kept(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    linear = two_three_one(device)
    x = torch.tensor([[1.0, 2.0]], device=device)
    kept = []
    for _ in range(2):
        for _ in range(2):  # eagerly: autograd's nodes belong to this stream, and live on
            kept.append(linear(x))
            linear(x).sum().backward()
        made = make_graphed_callables(
            linear, (torch.zeros_like(x),), param_grads=param_grads, backend=backend
        )
        linear.zero_grad()
        kept.append(made(x))
        made(x).sum().backward()
        assert linear.weight.grad is not None
        assert linear.weight.grad.tolist() == [[1.0, 2.0]]
        made.forward.reset()
    linear.zero_grad()
    kept[0].sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[1.0, 2.0]]
