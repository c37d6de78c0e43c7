"""Capture has no effect on the world, and a replay is the step: value by value against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs import ReplayError
from lightning_graphs.core import BackendName, CUDAGraph, graph, graph_pool_handle
from lightning_graphs.device.graph import get_backend

STEPS = 20
WARM_UPS = 3


class Perceptron(nn.Module):
    """BatchNorm and dropout: running statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 3, 2))[0][:, -1])


class Step:
    """A training step over static inputs."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        *,
        clip: bool = False,
        bf16: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = make_optimizer(model.parameters())
        # torch warns of eager steps of a capturable optimizer, and every warning is an error here.
        self.optimizer._warned_capturable_if_run_uncaptured = True
        device = next(model.parameters()).device
        self.x = torch.zeros(8, 6, device=device)
        self.y = torch.zeros(8, dtype=torch.long, device=device)
        self._clip, self._bf16 = clip, bf16

    def feed(self, batch: int) -> None:
        generator = torch.Generator().manual_seed(batch)
        self.x.copy_(torch.randn(8, 6, generator=generator))
        self.y.copy_(torch.randint(3, (8,), generator=generator))

    def __call__(self) -> tuple[Tensor, ...]:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.x.device.type, torch.bfloat16, self._bf16, cache_enabled=False):
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        norm = [nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)] if self._clip else []
        self.optimizer.step()
        return (loss.detach(), *norm)

    def state(self) -> list[Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *moments]
        return [t.detach().cpu().clone() for t in tensors if isinstance(t, Tensor)]


def _adamw(device: torch.device) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    capturable = device.type == "cuda"
    return lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, capturable=capturable)


def _sgd(device: torch.device) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    return lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, foreach=True)


def _warmed(step: Step, backend: BackendName) -> Step:
    torch.manual_seed(11)
    with get_backend(backend).side_stream():
        for batch in range(WARM_UPS):
            step.feed(1000 + batch)
            step()
        step.optimizer.zero_grad(set_to_none=True)
    return step


def _assert_same(found: list[Tensor], expected: list[Tensor], backend: BackendName) -> None:
    """Bit for bit where both sides ran the same kernels for certain; else within tolerance."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if backend == "emulated" else {}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize(
    ("make_model", "make_optimizer", "clip", "bf16"),
    [
        pytest.param(Perceptron, _adamw, False, False, id="mlp-adamw"),
        pytest.param(Perceptron, _sgd, False, False, id="mlp-sgd"),
        pytest.param(Perceptron, _adamw, True, False, id="mlp-clip"),
        pytest.param(Perceptron, _adamw, True, True, id="mlp-clip-bf16"),
        pytest.param(Recurrent, _adamw, False, False, id="lstm-adamw"),
    ],
)
def test_training_equals_eager(
    backend: BackendName,
    device: torch.device,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[
        [torch.device], Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    ],
    clip: bool,
    bf16: bool,
) -> None:

    def warmed() -> Step:
        torch.manual_seed(0)
        model = make_model().to(device)
        return _warmed(Step(model, make_optimizer(device), clip=clip, bf16=bf16), backend)

    eager, graphed = warmed(), warmed()
    before = graphed.state()
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        static = graphed()
    for name, (found, expected) in enumerate(zip(graphed.state(), before, strict=True)):
        assert torch.equal(found, expected), f"capture changed tensor {name} of the state"

    expected_values: list[Tensor] = []
    torch.manual_seed(42)
    for batch in range(STEPS):
        eager.feed(batch)
        expected_values += [v.cpu() for v in eager()]
    found_values: list[Tensor] = []
    torch.manual_seed(42)
    for batch in range(STEPS):
        graphed.feed(batch)
        captured.replay()
        found_values += [v.cpu().clone() for v in static]
    _assert_same(found_values, expected_values, backend)
    _assert_same(graphed.state(), eager.state(), backend)
    assert len({round(v.item(), 6) for v in found_values}) > STEPS // 2


class TestTheWorld:
    def test_capture_changes_nothing(self, backend: BackendName, device: torch.device) -> None:
        step = _warmed(Step(Perceptron().to(device), _sgd(device)), backend)
        step.feed(1)
        before = [*step.state(), step.x.cpu(), step.y.cpu()]
        torch.manual_seed(3)
        expected = torch.rand(5, device=device)
        torch.manual_seed(3)
        with graph(CUDAGraph(backend=backend)):
            step()
            step.x.zero_()
        after = [*step.state(), step.x.cpu(), step.y.cpu()]
        assert all(map(torch.equal, after, before))
        assert torch.equal(torch.rand(5, device=device), expected)

    def test_a_step_runs_once_a_replay(self, backend: BackendName, device: torch.device) -> None:
        counter = torch.zeros((), dtype=torch.long, device=device)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            counter += 1
        for expected in range(1, 4):
            captured.replay()
            assert counter.item() == expected

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
    def test_a_missing_replay_shows(self, dtype: torch.dtype) -> None:
        x = torch.ones(3, dtype=dtype)
        with graph(CUDAGraph(backend="emulated")):
            y = x * 2
        assert y.isnan().all()

    def test_a_missing_replay_shows_in_integers_and_booleans(self) -> None:
        x = torch.ones(3)
        with graph(CUDAGraph(backend="emulated")):
            y, z = x.long(), x > 2
            w = x.to(torch.uint8)
        assert y.tolist() == [torch.iinfo(torch.long).min] * 3
        assert z.tolist() == [True] * 3
        assert w.tolist() == [255] * 3

    def test_memory_behind_two_storages_is_restored(self) -> None:
        x = torch.zeros(3).numpy()
        first, second = torch.from_numpy(x), torch.from_numpy(x)
        with graph(CUDAGraph(backend="emulated")):
            first.add_(1)
            second.add_(1)
        assert first.tolist() == [0.0] * 3

    def test_version_counters_stay_at_a_replay(
        self, backend: BackendName, device: torch.device
    ) -> None:
        """On CUDA autograd does not know of replays: what it saved may be refilled and used."""
        x = torch.full((3,), 2.0, device=device, requires_grad=True)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            y = (x * x).exp()
        captured.replay()
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        torch.testing.assert_close(gradient, 4 * x.detach().square().exp())


class TestReplay:
    def test_dropout_draws_fresh_numbers_bit_equal_to_eager(
        self, backend: BackendName, device: torch.device
    ) -> None:
        x = torch.ones(256, device=device)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            y = torch.dropout(x, 0.5, True)
        torch.manual_seed(9)
        replayed = []
        for _ in range(10):
            captured.replay()
            replayed.append(y.cpu().clone())
        torch.manual_seed(9)
        eager = [torch.dropout(x, 0.5, True).cpu() for _ in range(10)]
        assert all(map(torch.equal, replayed, eager))
        assert len({tuple(values.tolist()) for values in replayed}) == 10

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_modes_at_capture_and_at_replay(
        self,
        backend: BackendName,
        device: torch.device,
        mode: Callable[[], torch.autograd.grad_mode.no_grad],
    ) -> None:
        weight = torch.ones(4, 4, device=device, requires_grad=True)
        x = torch.ones(4, device=device)
        weight @ x  # cuBLAS makes its handle outside of the capture
        captured = CUDAGraph(backend=backend)
        with graph(captured), mode():
            y = weight @ x
            y += 1
        x.fill_(2.0)
        captured.replay()
        assert y.tolist() == [9.0] * 4
        x.fill_(3.0)
        with mode(), torch.autocast(device.type, torch.bfloat16):
            captured.replay()
        assert y.tolist() == [13.0] * 4

    def test_writes_through_views(self, backend: BackendName, device: torch.device) -> None:
        x = torch.arange(6.0, device=device)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            y = x * 1
            y.view(2, 3)[1].mul_(10)
            y.as_strided((3,), (2,)).add_(1)
            x.view(3, 2).t()[0].zero_()
        assert x.cpu().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        captured.replay()
        assert y.cpu().tolist() == [1.0, 1.0, 3.0, 30.0, 41.0, 50.0]
        assert x.cpu().tolist() == [0.0, 1.0, 0.0, 3.0, 0.0, 5.0]

    def test_integer_and_zero_size_tensors(
        self, backend: BackendName, device: torch.device
    ) -> None:
        x = torch.arange(4, device=device)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            y = torch.cat([x[:0], x + 1])
            z = x[:0] * 2
        captured.replay()
        assert y.tolist() == [1, 2, 3, 4]
        assert z.shape == (0,)

    def test_state_made_inside_starts_anew_at_every_replay(
        self, backend: BackendName, device: torch.device
    ) -> None:
        """Why an optimizer is warmed up: momentum that is born in the graph never accumulates."""
        weight = nn.Parameter(torch.zeros(1, device=device))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            weight.sum().backward()
            optimizer.step()
        for _ in range(3):
            captured.replay()
        assert weight.tolist() == [-3.0]

    def test_gradients_accumulate_into_buffers_from_before(
        self, backend: BackendName, device: torch.device
    ) -> None:
        weight = nn.Parameter(torch.ones(2, device=device))
        weight.grad = torch.zeros(2, device=device)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            (weight * 3).sum().backward()
        assert weight.grad.tolist() == [0.0, 0.0]
        for _ in range(2):
            captured.replay()
        assert weight.grad.tolist() == [6.0, 6.0]

    def test_a_backward_captured_before_the_forward_was_replayed(
        self, backend: BackendName, device: torch.device
    ) -> None:
        table = nn.Embedding(4, 2).to(device)
        x = torch.ones(3, device=device)
        pool = graph_pool_handle(backend=backend)
        forward, backward = CUDAGraph(backend=backend), CUDAGraph(backend=backend)
        with graph(forward, pool=pool):
            y = table((x * 2).long())
        with graph(backward, pool=pool):
            (gradient,) = torch.autograd.grad(y.sum(), table.weight)
        forward.replay()
        backward.replay()
        assert gradient[:, 0].cpu().tolist() == [0.0, 0.0, 3.0, 0.0]
        x.fill_(0.5)
        forward.replay()
        backward.replay()
        assert gradient[:, 0].cpu().tolist() == [0.0, 3.0, 0.0, 0.0]

    def test_replay_of_a_changed_shape_is_refused(self) -> None:
        x = torch.ones(4)
        captured = CUDAGraph(keep_graph=True, backend="emulated")
        with graph(captured):
            x.sum(0, keepdim=True)
        operations = captured._captured.recording.operations  # type: ignore[attr-defined]
        operations[0].args = (operations[0].args[0], [0], False)
        with pytest.raises(ReplayError, match="return the shapes"):
            captured.replay()
