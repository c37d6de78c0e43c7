"""A loop of accelerate whose step is a CUDA graph; on a CPU it is rehearsed."""

import torch
from accelerate import Accelerator

import lightning_graphs

accelerator = Accelerator(gradient_accumulation_steps=2)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))


def train_step(x):
    with accelerator.accumulate(model):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


backend = "cuda" if torch.cuda.is_available() else "emulated"
step = lightning_graphs.capture(train_step, model, optimizer, backend=backend)
losses = [step(torch.randn(16, 8, device=accelerator.device)) for _ in range(40)]
print(step.report)
