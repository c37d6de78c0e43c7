"""What a graphed callable returns, rebuilt around the tensors of a replay."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_graphs.errors import CaptureError
from lightning_graphs.values.memory import OutputPlan

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    value: Any
    note: str


def _differentiable(value: float) -> Tensor:
    return torch.full((2,), value, requires_grad=True) * 1


_CONTAINERS: dict[str, Any] = {
    "tensor": torch.ones(2),
    "tuple": (torch.ones(2), torch.zeros(3)),
    "list": [torch.ones(2), None, 3, "text", 1.5, torch.float16],
    "nested": {"a": [torch.ones(2), {"b": (torch.zeros(1), True)}]},
    "ordered": OrderedDict(z=torch.ones(2), a=torch.zeros(1)),
    "namedtuple": Point(torch.ones(2), None),
    "frozen dataclass": Frozen(torch.ones(2), "note"),
    "model output": BaseModelOutput(last_hidden_state=torch.ones(2)),
    "nothing": None,
    "no tensor": (1, "a"),
    "empty tensor": torch.empty(0, 3),
    "scalar": torch.tensor(4),
}


def _assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_equal(found[key], expected[key])
    elif isinstance(expected, (tuple, list)):
        for a, b in zip(found, expected, strict=True):
            _assert_equal(a, b)
    elif isinstance(expected, Frozen):
        _assert_equal((found.value, found.note), (expected.value, expected.note))
    else:
        assert found == expected


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", _CONTAINERS)
def test_the_value_comes_back(kind: str, static: bool) -> None:
    value = _CONTAINERS[kind]
    plan = OutputPlan(value, static=static)
    assert plan.requiring_grad == []
    found = plan.hand_out()
    _assert_equal(found, value)
    if isinstance(value, (list, dict)):
        assert found is not value
    if isinstance(value, Tensor) and value.numel():
        assert (found.data_ptr() == value.data_ptr()) is static


def test_copies_keep_dtype_and_special_values() -> None:
    values = (
        torch.tensor([True, False]),
        torch.tensor([float("inf"), float("nan"), -0.0]),
        torch.tensor([complex(float("inf"), 0.0)]),
        torch.tensor([2**62, -1]),
        torch.tensor([1, 255], dtype=torch.uint8),
    )
    for copy, value in zip(OutputPlan(values, static=False).hand_out(), values, strict=True):
        assert copy.dtype is value.dtype
        assert copy.view(torch.uint8).tolist() == value.view(torch.uint8).tolist()


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:], lambda t: t.detach()])
def test_outputs_in_the_memory_of_the_state_are_handed_out_themselves(view: Any) -> None:
    state, computed = torch.arange(4.0), torch.ones(2)
    plan = OutputPlan((view(state), computed), static=False, state=lambda: [state])
    found, copied = plan.hand_out()
    found.add_(1)
    copied.add_(1)
    assert torch.equal(found, view(state))
    assert not torch.equal(state, torch.arange(4.0))
    assert torch.equal(computed, torch.ones(2))


def test_each_call_hands_out_the_values_of_its_moment() -> None:
    static = torch.zeros(2)
    plan, alias = OutputPlan(static, static=False), OutputPlan(static, static=True)
    static.fill_(1.0)
    kept, seen = plan.hand_out(), alias.hand_out()
    static.fill_(2.0)
    assert kept.tolist() == [1.0, 1.0]
    assert seen.tolist() == [2.0, 2.0]


def test_differentiable_outputs_take_their_places_among_the_plain_ones() -> None:
    first, plain, second = _differentiable(1.0), torch.full((2,), 5.0), _differentiable(2.0)
    plan = OutputPlan({"a": first, "b": [plain, 3], "c": second}, static=False)
    assert plan.requiring_grad == [first, second] or all(
        a is b for a, b in zip(plan.requiring_grad, (first, second), strict=True)
    )
    assert [t.tolist() for t in plan.differentiable()] == [[1.0, 1.0], [2.0, 2.0]]
    given = (torch.full((2,), 10.0), torch.full((2,), 20.0))
    found = plan.hand_out(given)
    assert found["a"] is given[0]
    assert found["c"] is given[1]
    assert found["b"][0].tolist() == [5.0, 5.0]
    assert found["b"][0].data_ptr() != plain.data_ptr()
    assert found["b"][1] == 3


def test_without_a_recorded_backward_nothing_requires_grad() -> None:
    found = OutputPlan((_differentiable(1.0), torch.ones(1)), static=False).hand_out()
    assert [t.requires_grad for t in found] == [False, False]


def test_finish_capture_lets_go_of_the_autograd_graph() -> None:
    plan = OutputPlan(_differentiable(1.0), static=True)
    assert plan.requiring_grad[0].grad_fn is not None
    plan.finish_capture()
    assert plan.requiring_grad == []
    assert plan.hand_out().grad_fn is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"y": object()}, r'output\["y"\] is a object'),
        ([torch.ones(1), {1, 2}], r"output\[1\] is a set"),
        (nn.Identity(), "output is a Identity"),
        ((lambda: None,), r"output\[0\] is a function"),
    ],
)
def test_objects_in_which_tensors_could_hide_are_refused(value: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        OutputPlan(value, static=False)
