"""Fits under a cap on the GPU's memory train as without the callback, and how much a fit takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SCOPES = ("step", "modules")
CAPS = (1.02, 1.05, 1.10, 1.25, 1.5)
ROOMY = {"step": 1.25, "modules": 1.5}
"""From which cap on there are graphs: submodules are observed first, with all their arguments."""
STEPS = 12
WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 768, 8, 12, 16_384, 512


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.between(x))


class Language(LightningModule):
    """About 80 million parameters: 1.3 GB of state, and more than that of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.losses: list[float] = []
        self.held = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if batch_idx == STEPS - 1:
            torch.cuda.empty_cache()
            self.held = torch.cuda.memory_reserved()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2**-13, fused=True)


def fit(scope: str, cap: int, validations: int) -> dict[str, Any]:
    """Fit in this process; what it gave, and the most memory that it took.

    Args:
        scope: Of the callback; empty without it.
        cap: Bytes that the process may take; 0 for all.
        validations: Batches of each of two validations.
    """
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    seed_everything(1, verbose=False)
    if cap:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total)
    module = Language()
    data = torch.randint(VOCABULARY, (STEPS * 16, LENGTH)).split(16)
    capture = GraphCapture(scope=scope or "step", only_if_faster=False)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            precision="bf16-mixed",
            callbacks=[capture] if scope else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
            num_sanity_val_steps=0,
            limit_val_batches=validations,
            val_check_interval=STEPS // 2,
        )
        loader = DataLoader(list(data), batch_size=None)
        trainer.fit(module, loader, loader if validations else None)
    evaluated = capture.report.evaluation.get("validation_step")
    sums = [float(p.detach().double().sum()) for p in module.parameters()]
    return {
        "losses": module.losses,
        "parameters": sums,
        "random": [torch.get_rng_state().sum().item(), torch.cuda.get_rng_state().sum().item()],
        "peak": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "held": module.held,
        "replayed": capture._statistics.replayed if scope else 0,
        "evaluated": evaluated.replayed if evaluated else 0,
        "said": [*capture._statistics.fallbacks, *(evaluated.fallbacks if evaluated else ())],
    }


def elsewhere(scope: str = "", cap: float = 0.0, validations: int = 0) -> dict[str, Any]:
    """The same in a process of its own, whose memory is its own."""
    arguments = [scope, str(int(cap)), str(validations)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if run.returncode:
        return {"error": run.stderr[-4000:]}
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def fits() -> dict[tuple[str, float], dict[str, Any]]:
    """By scope and cap what each fit gave; at ``("", 0.0)`` the one without the callback."""
    eager = elsewhere()
    kinds = [(scope, cap) for scope in SCOPES for cap in (0.0, *CAPS)]
    # The caps are the only limit: together they take half of what other processes leave free.
    free, _ = torch.cuda.mem_get_info()
    with ThreadPoolExecutor(max(1, free // (3 * eager["peak"]))) as pool:
        found = pool.map(lambda kind: elsewhere(kind[0], kind[1] * eager["peak"]), kinds)
        return {("", 0.0): eager, **dict(zip(kinds, found, strict=True))}


Fits = dict[tuple[str, float], dict[str, Any]]


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_fit_trains_at_any_cap(fits: Fits, scope: str, cap: float) -> None:
    eager, captured = fits["", 0.0], fits[scope, cap]
    assert "error" not in captured, captured["error"]
    for kind in ("losses", "parameters", "random"):
        assert captured[kind] == eager[kind], kind
    assert captured["peak"] <= cap * eager["peak"]
    assert len(captured["said"]) <= 2, captured["said"]
    if cap >= ROOMY[scope]:
        assert captured["replayed"] > 0, captured["said"]


@pytest.mark.parametrize("scope", SCOPES)
def test_how_much_a_fit_takes(fits: Fits, scope: str) -> None:
    eager, captured = fits["", 0.0], fits[scope, 0.0]
    assert "error" not in captured, captured["error"]
    assert captured["losses"] == eager["losses"]
    assert captured["replayed"] > 0, captured["said"]
    ratios = {kind: captured[kind] / eager[kind] for kind in ("peak", "allocated")}
    print(scope, {kind: round(ratio, 3) for kind, ratio in ratios.items()})
    assert ratios["allocated"] <= 1.35, ratios


def test_graphs_of_validations_lie_in_memory_of_training() -> None:
    eager, without, captured = elsewhere("", 0, 12), elsewhere("step"), elsewhere("step", 0, 12)
    for one in (eager, without, captured):
        assert "error" not in one, one["error"]
    assert captured["losses"] == eager["losses"]
    assert captured["evaluated"] > 8, captured["said"]
    print({kind: round(captured[kind] / eager[kind], 3) for kind in ("peak", "held")})
    assert captured["held"] <= without["held"] + 0.10 * eager["peak"]


if __name__ == "__main__":
    print(json.dumps(fit(sys.argv[1], *map(int, sys.argv[2:]))))
