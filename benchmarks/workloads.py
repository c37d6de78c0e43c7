"""The models of the benchmarks and the ways to run their training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Lab
from torch import Tensor, nn

WARMUP, CHECKED = 3, 8


class Mlp(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(depth)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


class Classifier(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


class Transformer(nn.Module):
    def __init__(self, net: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.net = net
        self.names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.net(**dict(zip(self.names, tensors, strict=True))).loss


class Gpt2(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=width // 64,
            vocab_size=vocabulary,
            use_cache=False,
            attn_implementation="sdpa",
            bos_token_id=0,
            eos_token_id=0,
        )
        self.net = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        loss: Tensor = self.net(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        return loss


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=4,
            vocab_size=vocabulary,
            use_cache=False,
        )
        self.net = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=tokens, labels=tokens).loss
        return loss


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*split, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Sends each token to one of several networks: as many rows as the router says, each time."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            (rows,) = (chosen == i).nonzero(as_tuple=True)
            found = expert(tokens[rows]) * weight[rows, None]
            mixed = mixed.index_add(0, rows, found.to(mixed.dtype))
        return mixed.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self, layers: int, width: int, experts: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), part)
            for _ in range(layers)
            for part in (Attention(width, 4), Experts(width, experts))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = x + part(x)
        scores = self.head(x)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())


class Residual(nn.Module):
    """A block of a U-Net: two convolutions, between which the time of the noise is added."""

    def __init__(self, before: int, width: int, time: int) -> None:
        super().__init__()
        norm = nn.GroupNorm(8, before), nn.GroupNorm(8, width)
        self.first = nn.Sequential(norm[0], nn.SiLU(), nn.Conv2d(before, width, 3, padding=1))
        self.second = nn.Sequential(norm[1], nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.time, self.skip = nn.Linear(time, width), nn.Conv2d(before, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(x) + self.time(time)[..., None, None]
        return self.skip(x) + self.second(h)


class Denoiser(nn.Module):
    """A U-Net of three resolutions, with attention at the lowest, that predicts noise (DDPM)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths, time, steps = (width, 2 * width, 4 * width), 4 * width, 1000
        self.embed = nn.Sequential(
            nn.Embedding(steps, width), nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time)
        )
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        down = zip((width, *widths), widths, strict=False)
        self.down = nn.ModuleList(Residual(before, after, time) for before, after in down)
        self.middle, self.attention = Residual(time, time, time), Attention(time, 4, causal=False)
        up = zip(reversed(widths), (2 * width, width, width), strict=True)
        self.up = nn.ModuleList(Residual(2 * before, after, time) for before, after in up)
        self.register_buffer("kept", torch.linspace(0.9999, 0.0001, steps))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        step = torch.randint(len(self.kept), (len(x),), device=x.device)
        kept = self.kept[step, None, None, None]
        time = self.embed(step)
        h, shorter = self.begin(kept.sqrt() * x + (1 - kept).sqrt() * noise), []
        for block in self.down:
            h = block(h, time)
            shorter.append(h)
            h = nn.functional.avg_pool2d(h, 2)
        h = self.middle(h, time)
        mixed = self.attention(h.flatten(2).transpose(1, 2)).transpose(1, 2)
        h = h + mixed.unflatten(2, h.shape[2:])
        for block in self.up:
            h = nn.functional.interpolate(h, scale_factor=2.0)
            h = block(torch.cat([h, shorter.pop()], 1), time)
        return nn.functional.mse_loss(self.end(h), noise)


@dataclass(frozen=True)
class Workload:
    """A model that returns its loss, and how to draw a batch for it on the CPU."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def mlp(lab: Lab) -> Workload:
    depth, width, batch = (2, 16, 8) if lab.dry else (12, 512, 256)
    return Workload(
        f"MLP {depth}x{width}, batch {batch}",
        lambda: Mlp(depth, width),
        lambda: (torch.randn(batch, width), torch.randint(0, 10, (batch,))),
    )


def gpt2(lab: Lab) -> Workload:
    layers, width, vocabulary, shape = (2, 64, 64, (2, 8)) if lab.dry else (12, 384, 8192, (4, 256))

    def batch() -> tuple[Tensor, ...]:
        # A padded position: without one, transformers drops the mask in eager code, not in a
        # capture, and both would run other attention kernels with other random numbers.
        mask = torch.ones(shape, dtype=torch.long)
        mask[0, -1] = 0
        return torch.randint(0, vocabulary, shape), mask

    name = f"GPT-2 {layers}x{width}, {shape[0]}x{shape[1]} tokens"
    return Workload(name, lambda: Gpt2(layers, width, vocabulary), batch)


class Eager:
    """The training step that the others must equal: bf16 autocast, fused capturable AdamW."""

    def __init__(self, lab: Lab, workload: Workload) -> None:
        torch.manual_seed(0)
        self.lab = lab
        with lab.device:
            self.model = workload.model().train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True, capturable=True
        )
        batches = [workload.batch() for _ in range(4)]
        self.batches = [tuple(t if lab.dry else t.pin_memory() for t in b) for b in batches]
        self.steps = 0

    def batch(self) -> tuple[Tensor, ...]:
        pinned = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        return tuple(t.to(self.lab.device, non_blocking=True) for t in pinned)

    def backward(self, batch: Sequence[Tensor]) -> Tensor:
        with torch.autocast(self.lab.device.type, torch.bfloat16, cache_enabled=False):
            loss: Tensor = self.model(*batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    def __call__(self) -> Tensor:
        loss = self.backward(self.batch())
        self.optimizer.step()
        return loss

    def first_losses(self) -> list[float]:
        torch.manual_seed(1)
        return [self().item() for _ in range(CHECKED)]


class Graphed(Eager):
    """The model through make_graphed_callables, the optimizer eager."""

    def __init__(self, lab: Lab, workload: Workload, api: Any, **how: Any) -> None:
        super().__init__(lab, workload)
        self.api, self.pool = api, api.new_pool()
        sample = tuple(t.to(lab.device) for t in self.batches[0])
        with torch.autocast(lab.device.type, torch.bfloat16, cache_enabled=False):
            self.model = api.callables(self.model, sample, self.pool, **how)


class GraphedTwice(Graphed):
    """Direct gradients, and the optimizer step as a graph of its own in the same pool."""

    def __call__(self) -> Tensor:
        if self.steps < WARMUP:
            return super().__call__()
        if self.steps == WARMUP:  # its state exists and the gradients are the graph's buffers
            self.update = self.api.new_graph()
            with self.api.capture(self.update, self.pool):
                self.optimizer.step()
        loss = self.backward(self.batch())
        self.update.replay()
        return loss


class WholeStep(Eager):
    """Forward, backward and optimizer step as one graph; its bare replay is the floor."""

    def __call__(self) -> Tensor:
        if self.steps < WARMUP:
            with self.lab.side_stream():
                return super().__call__()
        batch = self.batch()
        if self.steps == WARMUP + 1:
            self.optimizer.zero_grad(set_to_none=True)
            self.static = [t.clone() for t in batch]
            self.graph = self.lab.ours.new_graph()
            with self.lab.ours.capture(self.graph):
                self.loss = self.backward(self.static)
                self.optimizer.step()
        torch._foreach_copy_(self.static, list(batch))
        self.graph.replay()
        return self.loss
