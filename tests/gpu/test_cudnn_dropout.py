"""The random state from which cuDNN draws the dropout between recurrent layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_graphs import core
from lightning_graphs.private.generators import DropoutState, RandomState, dropout_state_of

pytestmark = [
    pytest.mark.gpu,
    # Copies of a layer have their weights in pieces of their own.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 4, 2, 1])
        found: Tensor = self.layer(pack_padded_sequence(x, lengths, batch_first=True))[0].data
        return found


class First(nn.Module):
    """What a recurrent layer gives at each step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]
        return found


def lstm() -> nn.Module:
    return nn.LSTM(8, 16, 3, dropout=0.5, batch_first=True).to(DEVICE)


def gru() -> nn.Module:
    return nn.GRU(8, 16, 2, dropout=0.3, batch_first=True, bidirectional=True).to(DEVICE)


def generator() -> torch.Generator:
    return torch.cuda.default_generators[0]


def test_a_look_at_the_state_leaves_no_trace() -> None:
    layer, x = lstm(), torch.randn(4, 5, 8, device=DEVICE)

    def drawn(looks: bool) -> list[Tensor]:
        torch.manual_seed(3)
        state = DropoutState(DEVICE)
        found = []
        for _ in range(3):
            assert not looks or (state.now() is None) == (not found)
            found.append(layer(x)[0].detach())
            found.append(torch.rand(4, device=DEVICE))
        return found

    plain, looked_at = drawn(False), drawn(True)
    assert all(map(torch.equal, plain, looked_at))
    assert not torch.equal(plain[0], plain[2])


@pytest.mark.parametrize("seeded", [False, True])
def test_a_restored_state_gives_the_same_masks(seeded: bool) -> None:
    layer, x = lstm(), torch.randn(4, 5, 8, device=DEVICE)
    layer(x)
    if seeded:  # the state is to be made again, and is so again after it was restored
        torch.manual_seed(5)
        torch.rand(2, device=DEVICE)
    kept = RandomState(DEVICE, [layer])
    place = generator().get_offset()
    runs = []
    for _ in range(3):
        runs.append([layer(x)[0].detach(), layer(x)[0].detach(), torch.rand(3, device=DEVICE)])
        kept.restore()
        assert generator().get_offset() == place
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))


def test_only_layers_that_draw_have_a_state() -> None:
    layer = lstm()
    assert dropout_state_of(DEVICE, [layer]) is not None
    assert dropout_state_of(DEVICE, [layer.eval()]) is None
    assert dropout_state_of(DEVICE, [nn.LSTM(8, 8, 2).to(DEVICE), nn.Dropout()]) is None
    assert dropout_state_of(DEVICE, [nn.LSTM(8, 8, 2, dropout=0.5)]) is None


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: First(lstm()),
    lambda: First(gru()),
    lambda: Packed(lstm()),
]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("seeds", [(), (2,), (1, 2, 4)])
def test_graphed_layers_draw_the_masks_of_eager_ones(
    make: Callable[[], nn.Module], seeds: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    layer = make()
    batches = [torch.randn(4, 5, 8, device=DEVICE) for _ in range(6)]

    def trained(module: Any) -> list[Tensor]:
        found = []
        torch.manual_seed(1)
        for i, x in enumerate(batches):
            if i in seeds:
                torch.manual_seed(i)
            module.zero_grad()
            output = module(x)
            output.square().mean().backward()
            found += [output.detach().clone(), *(p.grad.clone() for p in module.parameters())]
            found.append(torch.rand(2, device=DEVICE))
        return found

    eager = trained(copy.deepcopy(layer))
    graphed = core.make_graphed_callables(layer, (batches[0],))
    replays = 0
    replay = graphed.forward._replay_forward  # type: ignore[union-attr]

    def counted() -> None:
        nonlocal replays
        replays += 1
        replay()

    graphed.forward._replay_forward = counted  # type: ignore[union-attr]
    found = trained(graphed)
    assert all(map(torch.equal, eager, found))
    # The first call after a seed is an eager one, since it makes the state again.
    assert replays == len(batches) - len({0, *seeds})


def test_a_whole_step_by_hand_follows_the_state() -> None:
    torch.manual_seed(0)
    layer, x = lstm(), torch.randn(4, 5, 8, device=DEVICE)
    layer(x)
    state = DropoutState(DEVICE).now()
    assert state is not None
    begin = state.clone()
    eager = [layer(x)[0].detach().clone() for _ in range(4)]
    state.copy_(begin)
    captured = core.CUDAGraph()
    with core.graph(captured):
        output = layer(x)[0]
    assert captured.dropout is not None
    for expected in eager:
        assert captured.dropout.is_current()
        captured.replay()
        assert torch.equal(output, expected)


def test_a_state_made_anew_is_brought_back_to_the_graph() -> None:
    torch.manual_seed(0)
    layer, x = lstm(), torch.randn(4, 5, 8, device=DEVICE)
    layer(x)
    captured = core.CUDAGraph()
    with core.graph(captured):
        output = layer(x)[0]
    assert captured.dropout is not None
    torch.manual_seed(9)
    eager = [layer(x)[0].detach().clone() for _ in range(4)]
    torch.manual_seed(9)
    assert not captured.dropout.is_current()
    assert torch.equal(layer(x)[0], eager[0])
    for expected in eager[1:3]:
        assert captured.dropout.is_current()
        captured.replay()
        assert torch.equal(output, expected)
    assert torch.equal(layer(x)[0], eager[3])
