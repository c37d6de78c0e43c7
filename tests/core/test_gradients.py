"""Parameter gradients that a backward graph writes itself, against what autograd would leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_graphs.autograd.backward import (
    AliasedGradients,
    DirectGradients,
    GradientMemory,
    refuse_parameter_hooks,
)
from lightning_graphs.errors import CaptureError, ReplayError
from lightning_graphs.private.engine import without_hooks


def _parameters(device: torch.device) -> list[Parameter]:
    return [nn.Parameter(torch.zeros(size, device=device)) for size in (2, 3)]


def _values(parameters: list[Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


class Pass:
    """A backward graph of one kernel: it writes ``value`` times (1, 10) into the buffers."""

    def __init__(self, parameters: list[Parameter], used: tuple[bool, bool] = (True, True)) -> None:
        self.value = 1.0
        self._direct = DirectGradients(parameters, GradientMemory().of(parameters))
        self._direct.capture(
            [torch.ones_like(p) if use else None for p, use in zip(parameters, used, strict=True)]
        )
        buffers = self._direct.buffers
        self._factors = [f for f, use in zip((1.0, 10.0), used, strict=True) if use]
        self._buffers = buffers

    def run(self, value: float) -> None:
        self.value = value
        self._direct.refuse_hooks()
        with torch.no_grad():
            self._direct.replay(self._write)

    def _write(self) -> None:
        for buffer, factor in zip(self._buffers, self._factors, strict=True):
            buffer.fill_(self.value * factor)


def test_capture_writes_the_buffers_of_used_parameters(device: torch.device) -> None:
    parameters = _parameters(device)
    direct = DirectGradients(parameters, GradientMemory().of(parameters))
    direct.capture([None, torch.full((3,), 4.0, device=device)])
    assert [buffer.tolist() for buffer in direct.buffers] == [[4.0] * 3]
    assert _values(parameters) == [None, None]


def test_buffers_have_the_strides_of_the_parameters(device: torch.device) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2, device=device).t())
    direct = DirectGradients([parameter], GradientMemory().of([parameter]))
    assert direct.buffers[0].stride() == parameter.stride()
    assert not direct.buffers[0].requires_grad


def test_no_parameter_is_used(device: torch.device) -> None:
    parameters = _parameters(device)
    Pass(parameters, (False, False)).run(1.0)
    assert _values(parameters) == [None, None]


def test_accumulation_and_both_ways_of_zeroing(device: torch.device) -> None:
    parameters = _parameters(device)
    backward = Pass(parameters)
    for set_to_none in (True, False, True, False, False):
        for value, total in ((1.0, 1.0), (10.0, 11.0), (100.0, 111.0)):
            backward.run(value)
            assert _values(parameters) == [[total] * 2, [10 * total] * 3]
        for parameter in parameters:
            if set_to_none:
                parameter.grad = None
            else:
                assert parameter.grad is not None
                parameter.grad.zero_()


def test_an_unused_parameter_keeps_what_it_has(device: torch.device) -> None:
    parameters = _parameters(device)
    backward = Pass(parameters, (False, True))
    backward.run(2.0)
    assert _values(parameters) == [None, [20.0] * 3]
    parameters[0].grad = torch.full((2,), 7.0, device=device)
    backward.run(2.0)
    assert _values(parameters) == [[7.0] * 2, [40.0] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_foreign_gradient_is_added_to_in_place(device: torch.device, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(2, device=device, dtype=dtype))
    other = nn.Parameter(torch.zeros(3, device=device))
    parameter.grad = own = torch.full((2,), 5.0, device=device, dtype=dtype)
    backward = Pass([parameter, other])
    backward.run(1.0)
    backward.run(2.0)
    assert parameter.grad is own
    assert _values([parameter, other]) == [[8.0] * 2, [30.0] * 3]


def test_one_gradient_taken_away_between_passes(device: torch.device) -> None:
    parameters = _parameters(device)
    backward = Pass(parameters)
    backward.run(1.0)
    parameters[0].grad = None
    backward.run(2.0)
    parameters[1].grad = None
    backward.run(4.0)
    assert _values(parameters) == [[6.0] * 2, [40.0] * 3]


def test_two_passes_share_a_parameter(device: torch.device) -> None:
    parameters = _parameters(device)
    first, second = Pass(parameters), Pass(parameters)
    for scale in (1.0, 2.0):
        first.run(1.0)
        second.run(10.0)
        assert _values(parameters) == [[11.0 * scale] * 2, [110.0 * scale] * 3]


def test_a_hook_is_refused_before_anything_runs(device: torch.device) -> None:
    parameters = _parameters(device)
    backward = Pass(parameters)
    handle = parameters[1].register_hook(lambda gradient: gradient)
    with pytest.raises(ReplayError, match="registered on a parameter after the capture"):
        backward.run(1.0)
    assert _values(parameters) == [None, None]
    handle.remove()
    backward.run(1.0)
    assert _values(parameters) == [[1.0] * 2, [10.0] * 3]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_refused_by_name(device: torch.device, kind: str) -> None:
    weight, bias = _parameters(device)
    named: list[tuple[str, Tensor]] = [("weight", weight), ("bias", bias)]
    refuse_parameter_hooks(named)
    handle = getattr(bias, kind)(lambda _: None)
    with pytest.raises(CaptureError, match="`bias` has a gradient hook"):
        refuse_parameter_hooks(named)
    handle.remove()
    refuse_parameter_hooks(named)


def test_hooks_come_back_even_after_an_exception(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    handle = parameter.register_hook(lambda gradient: 10 * gradient)
    with without_hooks([parameter]):
        assert torch.autograd.grad(parameter.sum(), parameter)[0].tolist() == [1.0, 1.0]
    with pytest.raises(KeyError, match="inside"), without_hooks([parameter]):
        raise KeyError("inside")
    assert torch.autograd.grad(parameter.sum(), parameter)[0].tolist() == [10.0, 10.0]
    handle.remove()
    assert torch.autograd.grad(parameter.sum(), parameter)[0].tolist() == [1.0, 1.0]


class Aliasing:
    """A backward graph of three gradients, the second of which does not exist."""

    def __init__(self, device: torch.device) -> None:
        like = (torch.empty(2, 3, device=device).t(), torch.empty(5, device=device))
        self.static = [torch.zeros_like(t) for t in like]
        self.gradients = AliasedGradients([like[0], like[0], like[1]])
        self.gradients.capture([self.static[0], None, self.static[1]])

    def run(self, value: float) -> list[Tensor]:
        def backward() -> None:
            buffers = [buffer for buffer in self.gradients.buffers if buffer is not None]
            for i, buffer in enumerate(buffers):
                buffer.fill_(value + i)

        first, none, last = self.gradients.replay(backward)
        assert none is None
        assert first is not None
        assert last is not None
        assert first.stride() == (1, 3)
        return [first, last]


def _flat(gradients: list[Tensor]) -> list[float]:
    return [float(g.reshape(-1)[-1]) for g in gradients]


def test_gradients_that_no_code_holds_are_lent_without_a_copy(device: torch.device) -> None:
    aliasing = Aliasing(device)
    addresses = set()
    for value in (1.0, 5.0, 9.0):
        found = aliasing.run(value)
        assert _flat(found) == [value, value + 1]
        addresses.add(found[0].data_ptr())
        assert all(g.data_ptr() % 64 == 0 for g in found)
        del found
    assert len(addresses) == 1


@pytest.mark.parametrize("held", [0, 1])
def test_a_gradient_that_is_held_keeps_its_value(device: torch.device, held: int) -> None:
    aliasing = Aliasing(device)
    kept = aliasing.run(1.0)[held]
    alias = kept.view(-1)[:1] if kept.is_contiguous() else kept.detach()
    del kept
    for value in (5.0, 9.0):
        assert _flat(aliasing.run(value)) == [value, value + 1]
        assert alias.reshape(-1).tolist()[0] == 1.0 + held


def test_once_held_gradients_are_copies(device: torch.device) -> None:
    aliasing = Aliasing(device)
    kept = [aliasing.run(value) for value in (1.0, 5.0)]
    assert [_flat(g) for g in kept] == [[1.0, 2.0], [5.0, 6.0]]
    del kept
    one, other = aliasing.run(7.0), aliasing.run(8.0)
    assert one[0].data_ptr() != other[0].data_ptr()
    assert [_flat(one), _flat(other)] == [[7.0, 8.0], [8.0, 9.0]]


def _of_many_layouts(device: torch.device) -> list[Tensor]:
    drawn = [
        torch.randn(5, 7),
        torch.randn(7, 5).t(),
        torch.randn(100_003),  # some pieces, and a rest
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3).double(),
        torch.tensor(2.0),
        torch.randn(0, 3),
        torch.randn(6, 4)[:, :2],
        torch.randn(1, 8),
    ]
    return [tensor.to(device) for tensor in drawn]


@pytest.mark.parametrize("together", [True, False])
def test_gradients_of_every_layout_are_written_bit_by_bit(
    device: torch.device, together: bool
) -> None:
    gradients = _of_many_layouts(device)
    parameters = [nn.Parameter(torch.full_like(g, 9.0)) for g in gradients]
    parameters[0] = nn.Parameter(torch.full((7, 5), 9.0, device=device).t())  # strides differ
    sets = [list(range(len(gradients)))] if together else [[i] for i in range(len(gradients))]
    for chosen in sets:
        buffers = GradientMemory().of([parameters[i] for i in chosen])
        direct = DirectGradients([parameters[i] for i in chosen], buffers)
        direct.capture([gradients[i] for i in chosen])
        for i, buffer in zip(chosen, buffers, strict=True):
            assert buffer.stride() == parameters[i].data.clone().stride()
            assert torch.equal(buffer, gradients[i])


def test_layouts_are_those_of_the_capture(device: torch.device) -> None:
    """Which gradients exist, and with which strides, is known then only."""
    gradients = AliasedGradients([torch.empty(3, 2, device=device) for _ in range(2)])
    value = torch.arange(6.0, device=device).view(2, 3).t()
    gradients.capture([None, value])
    for _ in range(2):
        nothing, lent = gradients.replay(lambda: None)
        assert nothing is None
        assert lent is not None
        assert lent.stride() == (1, 3)
        assert torch.equal(lent, value)
        assert gradients.buffers[0] is None
        del lent
    assert not gradients.is_kept
