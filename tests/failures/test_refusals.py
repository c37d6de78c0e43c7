"""What cannot be captured: the fit goes on eagerly with a warning, or raises when asked to.

| in the way                        | on_failure="eager" | on_failure="raise" |
| --------------------------------- | ------------------ | ------------------ |
| an unsupported operator           | step, modules      | step, modules      |
| a value read on the host          | step, modules      | step, modules      |
| no memory for the capture         | step, modules      | step, modules      |
| the code raises in a capture only | step, modules      | step, modules      |

With "eager" the values are eager's. With "raise" the fit ends before the step that was to be
captured, with everything as it was, and a second fit without it gives eager's values.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.device.graph import is_current_stream_capturing
from lightning_graphs.errors import GraphError
from tests.failures.support import SCOPES, Mishap, assert_nothing_lost
from tests.training.fits import Net, compare, fit_twice, prepare


class Unsupported(nn.Module):
    """The shape of what it computes with depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x[x > 0].numel() / x.numel()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().tolist() > 0 else x  # no fork, as item() would be


class Large(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return x


class Unwilling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if is_current_stream_capturing():
            raise Mishap("on purpose")
        return x


# The layer, and what its refusal says.
LINE = r"(?s:.*)test_refusals\.py:\d+"
OBSTACLES: dict[str, tuple[type[nn.Module], str]] = {
    "unsupported operator": (Unsupported, rf"(?=(?s:.*)(nonzero|index|x > 0)){LINE}"),
    "host read": (Reading, rf"(?=(?s:.*)(tolist|local_scalar)){LINE}"),
    "no memory": (Large, r"needs memory of its own(?s:.*)allocate 2 GiB"),
    "raises": (Unwilling, "on purpose"),
}


def with_layer(layer: type[nn.Module]) -> Any:
    class Obstructed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(layer())

    return Obstructed


# Of submodules it is also said that none is left.
@pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly:UserWarning")
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_eager_steps(backend: str, tmp_path: Path, scope: dict[str, Any], obstacle: str) -> None:
    layer, said = OBSTACLES[obstacle]
    capture = {**scope, "on_failure": "eager"}
    with pytest.warns(UserWarning, match=rf"runs? eagerly: (?s:.*)({said})"):
        eager, captured = fit_twice(backend, tmp_path, module=with_layer(layer), capture=capture)
    compare(eager, captured, replayed=False)
    assert captured.statistics.fallbacks
    assert_nothing_lost(eager, captured)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_raising(backend: str, tmp_path: Path, scope: dict[str, Any], obstacle: str) -> None:
    layer, said = OBSTACLES[obstacle]
    eager, captured = (
        prepare(backend, tmp_path, graphs, module=with_layer(layer), capture=scope)
        for graphs in (False, True)
    )
    own = obstacle == "raises" and scope == SCOPES["step"]
    with pytest.raises(Mishap if own else GraphError, match=said):
        captured.run()
    done = captured.trainer.global_step
    assert 5 <= done <= 12  # a head, and what may come late, are tried first
    eager.trainer.fit_loop.epoch_loop.max_steps = done
    eager.run()
    assert_nothing_lost(eager, captured)
    # The next fit.
    again = [
        prepare(backend, tmp_path / "again", graphs, capture=scope) for graphs in (False, True)
    ]
    for one, before in zip(again, (eager, captured), strict=True):
        one.module.net[0].load_state_dict(before.module.net[0].state_dict())
        one.run()
    compare(*again)


if torch.cuda.is_available():

    @pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly:UserWarning")
    def test_a_device_without_memory(tmp_path: Path, scope: dict[str, Any]) -> None:
        """The allocator itself refuses: the graph's memory would go beyond the process's share."""

        class Full(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                if is_current_stream_capturing():
                    total = torch.cuda.get_device_properties(x.device).total_memory
                    return x + torch.empty(2 * total, dtype=torch.uint8, device=x.device)[0]
                return x

        capture = {**scope, "on_failure": "eager"}
        with pytest.warns(UserWarning, match=r"needs memory of its own(?s:.*)Tried to"):
            fits = fit_twice("cuda", tmp_path, module=with_layer(Full), capture=capture)
        compare(*fits, replayed=False)
        assert_nothing_lost(*fits)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("obstacle", ["no memory", "raises"])
def test_of_a_refused_capture_no_tensor_is_kept(
    backend: str, tmp_path: Path, obstacle: str
) -> None:
    layer, _ = OBSTACLES[obstacle]
    shape, kept = (7, 3, 5), []

    class Noting(with_layer(layer)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = batch["x"].new_ones(shape)
            return super().training_step(batch, batch_idx) + 0.0 * hidden.sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            gc.collect()  # frames of what was raised are garbage at most
            held = (o for o in gc.get_objects() if isinstance(o, Tensor))
            kept.append(sum(tensor.shape == shape for tensor in held))

    capture = {"scope": "step", "on_failure": "eager"}
    fit = prepare(backend, tmp_path, True, module=Noting, capture=capture, validation=0)
    fit.run()
    assert fit.statistics.replayed == 0
    assert len(kept) == 20
    assert kept[-1] == 0, kept
