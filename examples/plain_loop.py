"""A plain training loop whose step and evaluation are CUDA graphs, without Lightning.

``python examples/plain_loop.py`` trains on a GPU, and rehearses on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_graphs


def main(epochs: int = 4) -> float:
    """Train a small classifier, and return its accuracy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    features = torch.randn(512, 16)
    labels = (features[:, :8].sum(1) > features[:, 8:].sum(1)).long()
    batches = [*zip(features.to(device).split(32), labels.to(device).split(32), strict=True)]

    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def count_hits(x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        return (model(x).argmax(-1) == y).sum()

    backend = "cuda" if device.type == "cuda" else "emulated"  # which rehearses on a CPU
    step = lightning_graphs.capture(train_step, model, optimizer, backend=backend)
    hits = lightning_graphs.capture(count_hits, model, backend=backend)
    accuracy = 0.0
    for epoch in range(epochs):
        losses = []
        for x, y in batches:
            losses.append(step(x, y))
            scheduler.step()
        accuracy = sum(hits(x, y).item() for x, y in batches) / len(features)
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}, accuracy {accuracy:.3f}")
    print(step.report)
    return accuracy


if __name__ == "__main__":
    main()
