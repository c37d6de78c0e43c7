"""A loop of Fabric whose step is a CUDA graph; on a CPU it is rehearsed.

``python examples/fabric_loop.py``, or ``fabric run --strategy=ddp --devices=2
examples/fabric_loop.py`` for two GPUs.
"""

import torch
from lightning.fabric import Fabric

import lightning_graphs

fabric = Fabric(accelerator="auto", devices=1)
fabric.launch()
fabric.seed_everything(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), fused=True))


def train_step(x, last):
    with fabric.no_backward_sync(model, enabled=not last):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / 2
        fabric.backward(loss)
    if last:
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


backend = "cuda" if fabric.device.type == "cuda" else "emulated"
step = lightning_graphs.capture(train_step, model, optimizer, backend=backend)
losses = [step(torch.randn(16, 8, device=fabric.device), last=i % 2 == 1) for i in range(40)]
fabric.print(step.report)
