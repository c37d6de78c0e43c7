"""A loop of several processes, by DDP or by FSDP2, whose step is a CUDA graph on each of them.

``torchrun --nproc-per-node=2 examples/torchrun_loop.py [--fsdp]``; on a CPU it is rehearsed.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_graphs

is_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if is_cuda else "gloo")
device = torch.device("cuda", dist.get_rank()) if is_cuda else torch.device("cpu")
if is_cuda:
    torch.cuda.set_device(device)

torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
model = model.to(device)
model = fully_shard(model) if "--fsdp" in sys.argv else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


backend = "cuda" if is_cuda else "emulated"
step = lightning_graphs.capture(train_step, model, optimizer, backend=backend)
torch.manual_seed(1 + dist.get_rank())  # other batches on each rank
losses = [step(torch.randn(16, 8, device=device)) for _ in range(40)]
if dist.get_rank() == 0:
    print(step.report)
dist.destroy_process_group()
