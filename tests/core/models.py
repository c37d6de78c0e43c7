"""Small models of public libraries, with random weights, and their training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

Batch = dict[str, Tensor]
BATCH, LENGTH, VOCABULARY, CLASSES = 4, 12, 64, 3


class LSTMClassifier(nn.Module):
    """Two LSTM layers with dropout between them; logits from the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.25, batch_first=True)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits f32[batch, classes] of tokens i64[batch, length]."""
        sequence, _ = self.lstm(self.embedding(input_ids))
        return self.head(self.dropout(sequence[:, -1]))


class ConvNet(nn.Module):
    """A ResNet with BatchNorm in every block, and dropout before its classifier."""

    def __init__(self) -> None:
        super().__init__()
        config = ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            layer_type="basic",
            num_labels=CLASSES,
        )
        self.net = ResNetForImageClassification(config)
        self.net.classifier.insert(1, nn.Dropout(0.25))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits f32[batch, classes] of images f32[batch, 3, height, width]."""
        return self.net(pixel_values=pixel_values).logits


def _bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        attn_implementation="sdpa",
    )
    return BertForSequenceClassification(config)


def _gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config)


def _padded_tokens(generator: torch.Generator) -> Batch:
    lengths = torch.randint(LENGTH // 2, LENGTH, (BATCH, 1), generator=generator)
    return {
        "input_ids": _tokens(generator),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
    }


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (BATCH,), generator=generator)


def _bert_batch(generator: torch.Generator) -> Batch:
    return {**_padded_tokens(generator), "labels": _classes(generator)}


def _gpt2_batch(generator: torch.Generator) -> Batch:
    batch = _padded_tokens(generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _image_batch(generator: torch.Generator) -> Batch:
    images = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"pixel_values": images, "target": _classes(generator)}


def _lstm_batch(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "target": _classes(generator)}


@dataclass(frozen=True)
class Case:
    """A model and the batches that it learns from.

    Attributes:
        build: Makes the model from the current seed.
        batch: Draws one batch on the CPU. ``target``, where there is one, is for a loss outside of
            the model; all other entries are keyword arguments of the model.
        cudnn: Whether cuDNN computes it on a GPU. Not the LSTM: cuDNN keeps a random state of its
            own for the dropout between layers, which ``torch.manual_seed`` does not set, so that
            not even two eager runs in one process are equal.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    cudnn: bool = True

    def batches(self, count: int, device: torch.device) -> list[Batch]:
        """The same ``count`` batches at every call."""
        generator = torch.Generator().manual_seed(1)
        drawn = [self.batch(generator) for _ in range(count)]
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in drawn]


CASES = {
    "bert": Case(_bert, _bert_batch),
    "gpt2": Case(_gpt2, _gpt2_batch),
    "convnet": Case(ConvNet, _image_batch),
    "lstm": Case(LSTMClassifier, _lstm_batch, cudnn=False),
}


class Training:
    """One training run of a case from a fixed seed; every method is eager code.

    Args:
        case: What learns from what.
        device: Where.
        bf16: Forward under bf16 autocast, its cache off as graphs need it.
    """

    def __init__(self, case: Case, device: torch.device, *, bf16: bool = False) -> None:
        torch.manual_seed(0)
        self.device = device
        self.bf16 = bf16
        self.model = case.build().to(device).train()
        # Fused and capturable in eager runs, too: other variants order their arithmetic otherwise.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=2e-3, weight_decay=0.1, fused=True, capturable=True
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False
        )

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, clipping and optimizer step; the loss, a 0-d tensor."""
        with self.autocast():
            loss = self._loss(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()

    def _loss(self, target: Tensor | None = None, **inputs: Tensor) -> Tensor:
        outputs = self.model(**inputs)
        if target is None:
            return outputs.loss
        return nn.functional.cross_entropy(outputs, target)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def values(self) -> dict[str, Tensor]:
        """Clones of every parameter, gradient, buffer and optimizer state."""
        values: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            values[name] = parameter
            if parameter.grad is not None:
                values[f"gradient of {name}"] = parameter.grad
            state: dict[str, Any] = self.optimizer.state[parameter]
            values |= {f"{key} of {name}": value for key, value in state.items()}
        values |= dict(self.model.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in values.items()}


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A stream of its own on a GPU, as warm-up needs it; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)
