"""Containers and objects that a call is given: what is inside, and what the call changes."""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.core import make_graphed_callables
from lightning_graphs.device.graph import BackendName
from lightning_graphs.errors import CaptureError, SignatureError
from lightning_graphs.values.guards import Constant


class Settings:
    """An object of its author's own class."""

    def __init__(self, device: torch.device) -> None:
        self.scale = 2.0
        self.mask = torch.ones(2, device=device)
        self.inner = SimpleNamespace(shift=[1.0, 0.0])


def scaled(x: Tensor, settings: Settings) -> Tensor:
    return (x * settings.scale + settings.inner.shift[0]) * settings.mask


def _other_scale(settings: Settings) -> None:
    settings.scale = 3.0


def _other_shift(settings: Settings) -> None:
    settings.inner.shift[0] = 4.0


def _one_more(settings: Settings) -> None:
    vars(settings)["more"] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_scale, r"args\[1\]\.scale: 2\.0 -> 3\.0"),
        (_other_shift, r"args\[1\]\.inner\.shift\[0\]: 1\.0 -> 4\.0"),
        (_one_more, r"args\[1\]: Settings of 3 .* -> Settings of 4 \(.*, \.more\)"),
    ],
)
def test_what_is_inside_of_an_object_is_a_constant(
    backend: BackendName, device: torch.device, change: Callable[[Settings], None], message: str
) -> None:
    x, settings = torch.ones(4, 2, device=device), Settings(device)
    graphed = make_graphed_callables(scaled, (x, settings), backend=backend)
    assert torch.equal(graphed(x * 2, settings), scaled(x * 2, settings))
    settings.mask.mul_(2)  # the same tensor: what is in it is read by every replay
    assert torch.equal(graphed(x, settings), scaled(x, settings))
    change(settings)
    with pytest.raises(SignatureError, match=r"got .*args\[1\]") as caught:
        graphed(x, settings)
    assert re.search(message, caught.value.observed)


def test_tensors_inside_of_an_object_are_inputs(backend: BackendName, device: torch.device) -> None:
    x, settings = torch.ones(4, 2, device=device), Settings(device)
    graphed = make_graphed_callables(scaled, (x, settings), backend=backend)
    settings.mask = settings.mask * 5
    assert torch.equal(graphed(x, settings), scaled(x, settings))


@pytest.mark.parametrize("value", [{1, 2}, np.array([1.0, 2.0]), SimpleNamespace(n=1)])
def test_constants_that_change_are_equal_as_long_as_they_have_not(value: Any) -> None:
    before, again = Constant.of(value), Constant.of(value)
    assert before == again
    assert hash(before) == hash(again)
    if isinstance(value, set):
        value.add(3)
    elif isinstance(value, np.ndarray):
        value[0] = 5.0
    else:
        value.n = 2
    assert before != Constant.of(value)


class Valued:
    """Equal by what it holds, as it says itself."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Valued) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def test_objects_that_compare_themselves_are_asked() -> None:
    assert Constant.of(Valued(1)) == Constant.of(Valued(1))
    assert Constant.of(Valued(1)) != Constant.of(Valued(2))


class Memory:
    """Remembers what it is given, as a cache of keys and values does."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None


def _append(x: Tensor, memory: Any) -> Tensor:
    memory.append(x * 2)
    return x + 1


def _put(x: Tensor, memory: Any) -> Tensor:
    memory["x"] = x * 2
    return x + 1


def _pop(x: Tensor, memory: Any) -> Tensor:
    return x + memory.pop()


def _store(x: Tensor, memory: Memory) -> Tensor:
    memory.last = x * 2
    return x + 1


def _store_inside(x: Tensor, memory: Memory) -> Tensor:
    memory.seen.append(x * 2)
    return x + 1


@pytest.mark.parametrize(
    ("function", "make", "name"),
    [
        (_append, list, r"changes args\[1\]"),
        (_append, deque, r"changes args\[1\]"),
        (_put, dict, r"changes args\[1\]"),
        (_pop, lambda: [1.0] * 16, r"changes args\[1\]"),
        (_store, Memory, r"changes args\[1\]"),
        (_store_inside, Memory, r"changes args\[1\]\.seen"),
    ],
)
def test_a_call_that_changes_what_it_is_given_is_refused(
    backend: BackendName,
    device: torch.device,
    function: Callable[..., Tensor],
    make: Callable[[], Any],
    name: str,
) -> None:
    x, memory = torch.ones(2, device=device), make()
    before = list(memory) if not isinstance(memory, Memory) else (memory.last, list(memory.seen))
    with pytest.raises(CaptureError, match=name) as refused:
        make_graphed_callables(function, (x, memory), backend=backend)
    assert "let the caller store it" in refused.value.remedy
    after = list(memory) if not isinstance(memory, Memory) else (memory.last, list(memory.seen))
    assert after == before


class SlottedMemory:
    """Remembers in a slot."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Tensor | None = None


def test_a_slot_that_is_changed_is_seen(backend: BackendName, device: torch.device) -> None:
    x, memory = torch.ones(2, device=device), SlottedMemory()
    with pytest.raises(CaptureError, match=r"changes args\[1\]\.last"):
        make_graphed_callables(_store, (x, memory), backend=backend)
    assert memory.last is None


class Odd:
    """Has an attribute for every name, and none where Python looks for it."""

    def __init__(self) -> None:
        self.values = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


def test_code_of_an_objects_own_is_not_asked(backend: BackendName, device: torch.device) -> None:
    x, odd = torch.ones(2, device=device), Odd()
    nested = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=odd))))
    graphed = make_graphed_callables(
        lambda x, odd, nested: x * odd.scale * nested.a.b.c.d.scale,
        (x, odd, nested),
        backend=backend,
    )
    assert graphed(x, odd, nested).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 1.0), (1, True), (0.0, -0.0), ({"a": None}, {"b": None}), ([1], [1, 2])],
)
def test_values_inside_are_compared_exactly(before: Any, after: Any) -> None:
    value = SimpleNamespace(held=before)
    then = Constant.of(value)
    value.held = after
    assert Constant.of(value) != then
    assert then.key.changes(Constant.of(value).key)  # type: ignore[attr-defined]
    value.held = before
    assert Constant.of(value) == then


def test_a_number_that_is_none_stays_the_same() -> None:
    value = SimpleNamespace(held=float("nan"))
    then = Constant.of(value)
    value.held = float("nan") * 1.0
    assert Constant.of(value) == then


def test_objects_that_compare_themselves_are_looked_into_as_well() -> None:
    value = Valued(1)
    then = Constant.of(value)
    value.value = 2
    assert Constant.of(value) != then


def test_a_class_whose_attribute_changes(backend: BackendName, device: torch.device) -> None:
    class Shared:
        scale = 2.0

    x, shared = torch.ones(2, device=device), Shared()
    graphed = make_graphed_callables(lambda x, s: x * s.scale, (x, shared), backend=backend)
    assert graphed(x, shared).tolist() == [2.0, 2.0]
    Shared.scale = 3.0
    with pytest.raises(SignatureError, match=r"args\[1\]\.scale: 2\.0 -> 3\.0"):
        graphed(x, shared)


def test_what_an_object_held_is_not_kept_alive() -> None:
    value = SimpleNamespace(mask=torch.ones(2))
    mask = weakref.ref(value.mask)
    known = Constant.of(value)
    value.mask = torch.zeros(2)
    assert mask() is None
    assert known != Constant.of(value)


def test_keyword_arguments_that_are_changed_are_named(
    backend: BackendName, device: torch.device
) -> None:
    x, memory = torch.ones(2, device=device), {"inner": [1]}

    def function(x: Tensor, *, memory: dict[str, list[int]]) -> Tensor:
        memory["inner"].append(1)
        return x + 1

    with pytest.raises(CaptureError, match=r"changes kwargs\[\"memory\"\]\['inner'\]"):
        make_graphed_callables(function, (x,), sample_kwargs={"memory": memory}, backend=backend)
    assert memory == {"inner": [1]}


class FindsItsInput(nn.Module):
    """Adds what user code has stored in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.left: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out + self.left[0]


def test_a_gradient_that_would_leave_the_call_another_way_is_refused(
    backend: BackendName, device: torch.device
) -> None:
    module, x = FindsItsInput().to(device), torch.ones(3, 2, device=device)
    before = nn.Parameter(torch.ones(2, device=device))
    module.left.append(before.exp())
    with pytest.raises(CaptureError, match="a tensor that Exp computed before the call"):
        make_graphed_callables(module, (x,), backend=backend)
    module.left[0] = module.left[0].detach()
    graphed = make_graphed_callables(module, (x,), backend=backend)
    assert torch.equal(graphed(x), module.linear(x) + module.left[0])


def test_a_leaf_that_is_found_in_an_attribute_gets_its_gradient(
    backend: BackendName, device: torch.device
) -> None:
    module, x = FindsItsInput().to(device), torch.ones(3, 2, device=device)
    leaf = nn.Parameter(torch.ones(2, device=device))
    module.left.append(leaf)
    graphed = make_graphed_callables(module, (x,), backend=backend)
    graphed(x).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 3.0]
