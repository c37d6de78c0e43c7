"""Operators that are given functions (flex_attention, cond): seen through, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from lightning_graphs.watch.host_trace import HostTracer
from tests.training.fits import Net, compare, examined, line, prepare, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*without torch.compile:UserWarning")


def _biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - (q - k).abs() / 8


class Attending(Net):
    """On a CPU there is no backward pass through ``flex_attention``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"]).float()
        heads = logits.detach()[None, None].repeat(1, 2, 1, 6)
        seen = flex_attention(heads, heads, heads, score_mod=_biased)[0, 0, :, :3]
        return nn.functional.cross_entropy(logits + seen, batch["y"])


class Choosing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        with torch.no_grad():
            scale = torch.cond(loss > 1, torch.sin, torch.cos, (loss.detach(),))  # branch
        return loss * scale


class ChoosingWithGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return torch.cond(loss > 1, torch.sin, torch.cos, (loss,))  # branch


# torch's compiler asks for it where branches have gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
class TestHigherOrderOperators:
    def test_the_doctor_sees_nothing_but_a_rehearsal_in_the_way_of_flex_attention(
        self, backend: str, tmp_path: Path
    ) -> None:
        eager = prepare(backend, tmp_path, False, module=Attending).run()
        fit = examined(backend, tmp_path, module=Attending)
        refused = {row.kind for row in fit.capture.report.diagnosis.findings}
        assert refused == ({"compiled"} if backend == "emulated" else set())
        compare(eager, fit, replayed=False)

    @pytest.mark.parametrize("module", [Choosing, ChoosingWithGradients])
    def test_the_doctor_names_a_branch(self, backend: str, tmp_path: Path, module: Any) -> None:
        eager = prepare(backend, tmp_path, False, module=module).run()
        fit = examined(backend, tmp_path, module=module)
        row, *of_backward = rows(fit, "control-flow")
        assert row.line == line(module.training_step, "branch")
        assert len(of_backward) == (module is ChoosingWithGradients)
        compare(eager, fit, replayed=False)

    @pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
    @pytest.mark.parametrize("module", [Attending, Choosing, ChoosingWithGradients])
    @pytest.mark.parametrize("scope", ["step", "modules"])
    def test_a_capture_goes_on_or_is_refused_in_a_sentence(
        self, backend: str, tmp_path: Path, module: Any, scope: str
    ) -> None:
        eager = prepare(backend, tmp_path, False, module=module).run()
        fit = prepare(
            backend, tmp_path, True, module=module, capture={"scope": scope, "on_failure": "eager"}
        ).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.captures or fit.statistics.fallbacks
        assert not any("no rule registered" in why for why in fit.statistics.fallbacks)

    # torch 2.11 imports its compiler here, and with it a class that it calls deprecated
    @pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
    def test_recording_the_host_program_spoils_no_later_call(self, device: torch.device) -> None:
        """torch compiles these operators by itself, also in eager code, but not in a mode."""
        torch._dynamo.reset()
        x = torch.randn(1, 2, 8, 18, device=device)

        def called() -> tuple[Tensor, Tensor]:
            seen = flex_attention(x, x, x, score_mod=_biased)
            return seen, torch.cond(x.new_ones(()) > 2, torch.sin, torch.cos, (x,))

        with HostTracer(device, [], [], 1 << 10, []):
            recorded = called()
        for now, before in zip(called(), recorded, strict=True):
            assert torch.equal(now, before)
