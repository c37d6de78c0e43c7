"""A loop of accelerate whose step is a CUDA graph.

``python examples/accelerate_loop.py`` trains a small network on a GPU, and rehearses on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import lightning_graphs


def main(steps: int = 20) -> Any:
    """Train, and return the report."""
    accelerator = Accelerator()
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    backend: Any = "cuda" if accelerator.device.type == "cuda" else "emulated"
    step = lightning_graphs.capture(train_step, model, optimizer, backend=backend)
    for _ in range(steps):
        step(torch.randn(16, 8, device=accelerator.device))
    print(step.report)
    return step.report


if __name__ == "__main__":
    main()
