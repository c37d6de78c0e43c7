"""A small GPT-2 that learns Python from batches of several lengths, with and without graphs.

The texts are the top-level blocks of Python's standard library. Those of a similar length share a
batch, and the tokenizer pads every batch to a multiple of ``--bucket`` tokens: a few shapes come
back again and again, and each of them gets a graph. The tokenizer is made on the spot, so nothing
is downloaded.

    python examples/variable_length_lm.py
    python examples/variable_length_lm.py --bucket 16 --longest 256
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from helpers.comparison import EXIT_STATUS, Comparison, add_flags, compare, on_gpu, run, say
from helpers.stdlib_corpus import top_level_blocks
from helpers.tensors import Batch
from lightning.pytorch import LightningDataModule, LightningModule
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics.classification import MulticlassAccuracy
from transformers import GPT2Config, GPT2LMHeadModel

IGNORED = -100
"""Label of a position that has no next token to predict."""

PADDING = "<pad>"

TOKENS_PER_LINE = 8
"""Few enough that most texts are not cut off."""


class LanguageModel(LightningModule):
    """An ordinary module: nothing in it knows of graphs."""

    def __init__(self, config: GPT2Config, learning_rate: float) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(config)
        self.learning_rate = learning_rate
        self.accuracy = MulticlassAccuracy(
            config.vocab_size, average="micro", ignore_index=IGNORED, validate_args=False
        )

    def forward(self, batch: Batch) -> Tensor:
        # Padding is on the right, and no token attends to what comes after it: no mask is needed.
        return self.model(batch["tokens"]).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(
            self(batch).flatten(0, 1), batch["next_tokens"].flatten(), ignore_index=IGNORED
        )
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.accuracy(self(batch).flatten(0, 1), batch["next_tokens"].flatten())
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Buckets(Sampler[list[int]]):
    """Batches of texts whose padded lengths are equal, in a new order for every epoch.

    Args:
        lengths: Padded length of each text.
        batch_size: Texts in a batch. What is left over in a bucket waits for the next epoch: a
            batch of another size would be one more shape.
        seed: Decides the order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        self._buckets = {
            length: [i for i, other in enumerate(lengths) if other == length]
            for length in sorted(set(lengths))
        }
        self._batch_size = batch_size
        self._draw = random.Random(seed)

    def __len__(self) -> int:
        return sum(len(bucket) // self._batch_size for bucket in self._buckets.values())

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        for bucket in self._buckets.values():
            self._draw.shuffle(bucket)
            whole = len(bucket) - len(bucket) % self._batch_size
            batches += [bucket[i : i + self._batch_size] for i in range(0, whole, self._batch_size)]
        self._draw.shuffle(batches)
        return iter(batches)


class Encoded(Dataset[Batch]):
    """Texts that are tokenized and padded when their batch is due."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer = texts, tokenizer

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, indices: list[int]) -> Batch:
        encoded = self._tokenizer.encode_batch([self._texts[i] for i in indices])
        tokens = torch.tensor([one.ids for one in encoded])
        padded = torch.tensor([one.attention_mask for one in encoded]) == 0
        next_tokens = tokens.masked_fill(padded, IGNORED).roll(-1, dims=1)
        next_tokens[:, -1] = IGNORED
        return {"tokens": tokens, "next_tokens": next_tokens}


class Blocks(LightningDataModule):
    """Loaders over both parts; the order of the batches depends on the seed alone."""

    def __init__(
        self,
        train: list[str],
        validation: list[str],
        tokenizer: Tokenizer,
        options: argparse.Namespace,
    ) -> None:
        super().__init__()
        self._train, self._validation = train, validation
        self._tokenizer = tokenizer
        self._options = options

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._train)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._validation)

    def _loader(self, texts: list[str]) -> DataLoader[Batch]:
        options = self._options
        buckets = Buckets(padded_lengths(texts, self._tokenizer), options.batch_size, options.seed)
        # A sampler of batches that Lightning can share out between devices.
        return DataLoader(
            Encoded(texts, self._tokenizer),
            batch_size=None,
            sampler=buckets,
            pin_memory=on_gpu(options),
        )


def tokenizer_of(texts: list[str], vocabulary: int, bucket: int, longest: int) -> Tokenizer:
    """Byte pairs in GPT-2's manner, made from the texts, padded to multiples of ``bucket``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(longest)
    tokenizer.enable_padding(
        pad_id=tokenizer.token_to_id(PADDING), pad_token=PADDING, pad_to_multiple_of=bucket
    )
    return tokenizer


def padded_lengths(texts: list[str], tokenizer: Tokenizer) -> list[int]:
    """Length of each text in tokens when it is padded by itself."""
    return [len(tokenizer.encode(text).ids) for text in texts]


def config_of(options: argparse.Namespace) -> GPT2Config:
    """GPT-2's usual depth where a GPU trains it, otherwise what a CPU trains in seconds."""
    width, depth, vocabulary = (384, 12, 4096) if on_gpu(options) else (64, 2, 1024)
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=options.longest,
        n_embd=width,
        n_layer=depth,
        n_head=width // 32,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,  # keys and values are kept for generating text, not for training
    )


def train(options: argparse.Namespace) -> Comparison:
    """Trains twice, as the flags say."""
    lines = options.longest // TOKENS_PER_LINE
    texts, held_out = top_level_blocks(4000 if on_gpu(options) else 800, lines, options.seed)
    config = config_of(options)
    tokenizer = tokenizer_of(texts, config.vocab_size, options.bucket, options.longest)
    shapes = Counter(padded_lengths(texts, tokenizer))
    listed = ", ".join(f"{count} of {length}" for length, count in sorted(shapes.items()))
    say(f"{len(texts)} texts to train on, padded lengths: {listed} tokens")
    return compare(
        lambda: LanguageModel(config, 6e-4 if on_gpu(options) else 3e-3),
        lambda: Blocks(texts, held_out, tokenizer, options),
        options,
        max_graphs=options.max_graphs,
    )


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a language model on texts of many lengths with and without captured "
        f"training steps. {EXIT_STATUS}"
    )
    flag = parser.add_argument
    flag("--bucket", type=int, default=32, help="pad to a multiple of so many (default: 32)")
    flag("--longest", type=int, default=128, help="tokens of a text at most (default: 128)")
    flag("--max-graphs", type=int, default=8, help="shapes with a graph at a time (default: 8)")
    add_flags(parser)
    parser.set_defaults(batch_size=16)
    return parser


def main() -> int:
    return run(flags(), train)


if __name__ == "__main__":
    sys.exit(main())
