"""Static inputs, address guards and snapshots, compared value by value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_graphs.errors import ReplayError
from lightning_graphs.values.memory import AddressGuard, StaticInputs, clone_all
from lightning_graphs.values.signature import CallPlan, Signature
from lightning_graphs.values.snapshot import Snapshot

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
_LAYOUTS = ("plain", "permuted", "sliced", "expanded", "windows")


def _filled(shape: tuple[int, ...], dtype: torch.dtype, layout: str, first: int) -> Tensor:
    """A tensor of distinct values where its dtype allows; equal arguments give equal strides."""

    def values(*sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        return torch.arange(first, first + count).remainder(251).to(dtype).reshape(sizes)

    if layout == "permuted":
        return values(*reversed(shape)).permute(tuple(reversed(range(len(shape)))))
    if layout == "sliced" and shape:
        return values(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
    if layout == "expanded":
        return values(*shape).expand(3, *shape)
    if layout == "windows":
        return values(7).unfold(0, 3, 1)
    return values(*shape)


@st.composite
def _calls(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves of two calls with equal specs, equal aliases and different values."""
    first, second = [], []
    for index in range(draw(st.integers(0, 5))):
        if first and draw(st.booleans()) and draw(st.booleans()):
            same = draw(st.integers(0, len(first) - 1))
            first.append(first[same])
            second.append(second[same])
            continue
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype, layout = draw(st.sampled_from(_DTYPES)), draw(st.sampled_from(_LAYOUTS))
        grad = dtype.is_floating_point and draw(st.booleans())
        for leaves, start in ((first, 100 * index), (second, 100 * index + 57)):
            leaves.append(_filled(shape, dtype, layout, start).requires_grad_(grad))
    return first, second


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _spoil(tensors: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            storage.fill_(1 if tensor.dtype is torch.bool else 85)


@settings(max_examples=200)
@given(_calls())
def test_buffers_have_the_signature_and_take_the_values(
    calls: tuple[list[Tensor], list[Tensor]],
) -> None:
    first, second = calls
    references = [t.detach().clone() for t in second]
    inputs = StaticInputs(first)

    assert Signature.of(inputs.tensors, {})[0] == Signature.of(first, {})[0]
    assert CallPlan(Signature.of(first, {})[0]).match(inputs.tensors, {}) is not None
    assert _equal(inputs.tensors, first)
    own = {t.untyped_storage().data_ptr() for t in inputs.tensors if t.numel()}
    assert own.isdisjoint(t.untyped_storage().data_ptr() for t in first)

    addresses = [t.data_ptr() for t in inputs.tensors]
    _spoil([t for t in inputs.tensors if t.numel()])
    inputs.copy_in(second)
    assert _equal(inputs.tensors, references)
    assert _equal(second, references)
    assert [t.data_ptr() for t in inputs.tensors] == addresses
    assert all(t.is_leaf and t.grad_fn is None for t in inputs.tensors)


def test_results_of_autograd_are_copied_without_their_graph() -> None:
    source = torch.ones(3, requires_grad=True) * 2
    inputs = StaticInputs([source])
    (buffer,) = inputs.tensors
    inputs.copy_in([source * 3])
    assert buffer.is_leaf
    assert buffer.requires_grad
    assert buffer.tolist() == [6.0, 6.0, 6.0]


def test_aliases_share_a_buffer() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    inputs = StaticInputs([x, y, x.view(2)])
    assert inputs.tensors[0] is inputs.tensors[2]
    assert inputs.tensors[0] is not inputs.tensors[1]


def test_buffers_that_a_capture_has_added_a_loss_to_are_filled() -> None:
    """As of ``total = torch.tensor([0.0]); total += loss`` whose first line runs in a head."""
    inputs = StaticInputs([torch.zeros(1), torch.zeros(2)])
    total, weight = inputs.tensors[0], torch.ones(1, requires_grad=True)
    total += weight
    assert total.requires_grad
    inputs.copy_in([torch.full((1,), 3.0), torch.ones(2)])
    assert total.item() == 3.0
    total.backward()
    assert weight.grad is not None


def test_a_leaf_in_its_place_is_not_copied() -> None:
    inputs = StaticInputs([torch.zeros(2), torch.zeros(2)])
    inputs.tensors[0].fill_(5)
    version = inputs.tensors[0]._version
    inputs.copy_in([inputs.tensors[0].detach(), torch.full((2,), 7.0)])
    assert inputs.tensors[0]._version == version
    assert [t.tolist() for t in inputs.tensors] == [[5.0, 5.0], [7.0, 7.0]]


def test_buffers_may_change_places() -> None:
    inputs = StaticInputs([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    first, second = inputs.tensors
    inputs.copy_in([second, first])
    assert [first.tolist(), second.tolist()] == [[3.0, 4.0], [1.0, 2.0]]


def test_a_part_of_a_buffer_is_read_before_it_is_overwritten() -> None:
    inputs = StaticInputs([torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2)])
    whole, part = inputs.tensors
    inputs.copy_in([torch.tensor([7.0, 8.0, 9.0]), whole[1:]])
    assert whole.tolist() == [7.0, 8.0, 9.0]
    assert part.tolist() == [2.0, 3.0]


def test_buffers_made_under_inference_mode_serve_outside() -> None:
    with torch.inference_mode():
        inputs = StaticInputs([torch.zeros(2)])
    assert not inputs.tensors[0].is_inference()
    inputs.copy_in([torch.ones(2)])
    assert inputs.tensors[0].tolist() == [1.0, 1.0]


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))


def _swap_weight(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(3, 3))


def _assign_state(model: nn.Sequential) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _move(model: nn.Sequential) -> None:
    model[1].weight.data = torch.zeros(3)


def _remove_bias(model: nn.Sequential) -> None:
    model[1].bias = None


def _add_bias(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.zeros(3))


def _delete_buffer(model: nn.Sequential) -> None:
    del model[1].running_mean


def _freeze(model: nn.Sequential) -> None:
    model[1].weight.requires_grad_(False)


def _replace_module(model: nn.Sequential) -> None:
    model[1] = nn.BatchNorm1d(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_swap_weight, r"parameter `net\.0\.weight` was replaced since capture"),
        (_assign_state, r"parameter `net\.0\.weight` was replaced since capture"),
        (_move, r"parameter `net\.1\.weight` moved since capture"),
        (_remove_bias, r"parameter `net\.1\.bias` was replaced since capture"),
        (_add_bias, r"parameter `net\.0\.bias` was replaced since capture"),
        (_delete_buffer, r"buffer `net\.1\.running_mean` was removed since capture"),
        (_freeze, r"`net\.1\.weight` changed since capture: requires_grad is now False"),
        (_replace_module, r"submodule `net\.1` was replaced since capture"),
    ],
)
def test_a_guarded_module_names_what_changed(change, message: str) -> None:
    model = _block()
    guard = AddressGuard.of_module(model, prefix="net.")
    guard.check()
    change(model)
    with pytest.raises(ReplayError, match=message) as caught:
        guard.check()
    assert "capture again" in caught.value.remedy


def test_changes_in_place_are_no_moves() -> None:
    model = _block()
    guard = AddressGuard.of_module(model)
    model(torch.randn(4, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    guard.check()
    guard.check()


def test_tied_parameters_are_watched_in_every_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    guard = AddressGuard.of_module(model)
    model[1].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(ReplayError, match=r"parameter `1\.weight` was replaced"):
        guard.check()


def test_guarded_tensors_keep_their_names() -> None:
    tensors = {name: torch.zeros(2) for name in ("first", "second")}
    named = {f"gradient `{name}`": tensor for name, tensor in tensors.items()}
    guard = AddressGuard([("", named)])
    guard.check()
    tensors["second"].data = torch.zeros(2)
    with pytest.raises(ReplayError, match="gradient `second` moved since capture"):
        guard.check()


def test_what_data_exchanges_is_brought_back_with_its_values() -> None:
    model = nn.Linear(2, 3)
    guard = AddressGuard.of_module(model)
    at = [parameter.data_ptr() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter.data, 1.0 + parameter.dim())
    assert guard.bring_back()
    guard.check()
    assert [parameter.data_ptr() for parameter in model.parameters()] == at
    assert model.weight.tolist() == [[3.0, 3.0]] * 3
    assert model.bias.tolist() == [2.0] * 3


def _kept(tensor: Tensor) -> Any:
    tensor.data = kept = torch.ones(2)
    return kept


def _keeping(tensor: Tensor) -> Any:
    before = tensor.data
    tensor.data = torch.ones(2)
    return before


def _of_another_kind(tensor: Tensor) -> None:
    tensor.data = torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize("move", [_kept, _keeping, _of_another_kind])
def test_memory_that_somebody_else_sees_is_left_where_it_is(move: Any) -> None:
    tensor = torch.zeros(2)
    guard = AddressGuard([("", {"tensor": tensor})])
    kept = move(tensor)
    at = tensor.data_ptr()
    assert not guard.bring_back()
    assert tensor.data_ptr() == at
    with pytest.raises(ReplayError, match="moved since capture"):
        guard.check()
    del kept


def test_a_guard_of_nothing_accepts() -> None:
    AddressGuard([]).check()


@given(_calls())
def test_a_snapshot_brings_values_back_in_place(calls: tuple[list[Tensor], list[Tensor]]) -> None:
    tensors, _ = calls
    references = [t.detach().clone() for t in tensors]
    addresses = [t.data_ptr() for t in tensors]
    versions = [t._version for t in tensors]
    snapshot = Snapshot(tensors)
    # Twice: what was saved must survive a restoration.
    for _ in range(2):
        _spoil(tensors)
        snapshot.restore()
        assert _equal(tensors, references)
    assert [t.data_ptr() for t in tensors] == addresses
    assert [t._version for t in tensors] == versions


@pytest.mark.parametrize("room", [0, 40, 60, math.inf])
def test_a_snapshot_goes_to_the_host_as_far_as_there_is_no_room(
    device: torch.device, room: float
) -> None:
    tensors = [torch.arange(8.0, device=device), torch.arange(4.0, device=device)]
    snapshot = Snapshot(tensors, room=lambda _: room)
    for tensor in tensors:
        tensor.fill_(-1.0)
    on_device = [snapshot.saved(tensor).device.type == device.type for tensor in tensors]
    if device.type != "cpu":  # of 32 and 16 bytes
        assert on_device == {0: [False, False], 40: [True, False]}.get(room, [True, True])  # type: ignore[call-overload]
    for tensor in tensors:
        assert torch.equal(snapshot.saved(tensor).cpu(), torch.arange(float(len(tensor))))
    snapshot.restore()
    for tensor in tensors:
        assert torch.equal(tensor.cpu(), torch.arange(float(len(tensor))))


def test_many_tensors_go_to_the_host_together(device: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors = [torch.arange(n).to(device, dtypes[n % 4]) for n in range(1, 40)]
    tensors.append(torch.arange(2**23, device=device))  # more than is gathered at once
    known = [tensor.clone() for tensor in tensors]
    snapshot = Snapshot(tensors, room=lambda _: 0)
    for tensor in tensors:
        tensor.zero_()
    for tensor, value in zip(tensors, known, strict=True):
        assert torch.equal(snapshot.saved(tensor), value.cpu())
    snapshot.restore()
    assert all(map(torch.equal, tensors, known))


def test_a_snapshot_covers_views_and_parameters() -> None:
    flat = torch.arange(6.0)
    parameter = nn.Parameter(flat[:4].view(2, 2))
    snapshot = Snapshot([parameter, flat[2:]])
    with torch.no_grad():
        parameter.mul_(-1)
        flat.add_(100)
    snapshot.restore()
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert parameter.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_snapshot_refuses_a_tensor_that_moved_and_puts_it_back() -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    snapshot = Snapshot([first, second])
    address = second.data_ptr()
    first.fill_(5.0)
    second.data = torch.ones(3)
    with pytest.raises(ReplayError, match=r"tensor 1 of shape \(3,\) moved since the snapshot"):
        snapshot.restore()
    assert (first.tolist(), second.tolist()) == ([0.0, 0.0], [0.0, 0.0, 0.0])
    assert second.data_ptr() == address


def test_a_snapshot_tells_the_saved_values_of_views(device: torch.device) -> None:
    whole = torch.arange(12.0, device=device)
    views = [whole.view(3, 4).t(), whole[2:7:2], whole.view(torch.int32)[1:3], whole[:0]]
    snapshot = Snapshot([whole])
    before = [view.clone() for view in views]
    whole.fill_(-1.0)
    for view, known in zip(views, before, strict=True):
        assert torch.equal(snapshot.saved(view), known)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "bool", "complex64"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("old_torch", [False, True])
def test_copies_are_exact_and_keep_strides(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    count: int,
    old_torch: bool,
) -> None:
    if old_torch:
        monkeypatch.delattr(torch, "_foreach_clone", raising=False)
    values = torch.tensor([[-0.0, 1e-40, 3.0], [float("inf"), -float("inf"), 0.1]])
    tensors = [values.to(device, getattr(torch, dtype)).t() for _ in range(count)]
    for tensor, copy in zip(tensors, clone_all(tensors), strict=True):
        assert copy.data_ptr() != tensor.data_ptr()
        assert (copy.stride(), copy.dtype) == (tensor.stride(), tensor.dtype)
        assert torch.equal(copy, tensor)
        if tensor.is_floating_point():
            assert torch.equal(torch.signbit(copy), torch.signbit(tensor))
