"""A transformers encoder fine-tuned with Lightning, with and without captured training steps.

It learns to tell from a dozen lines of code which package of Python's standard library they come
from, or to classify the texts of a CSV file. Both fits start from the same seed; a table at the end
shows whether they agree and, on a GPU, what a step costs.

    python examples/finetune_classifier.py
    python examples/finetune_classifier.py --model bert-base-uncased --data reviews.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.comparison import EXIT_STATUS, Comparison, add_flags, compare, on_gpu, run, say
from helpers.stdlib_corpus import Corpus, Examples, from_csv, standard_library
from helpers.tensors import InMemory, Rows
from lightning.pytorch import LightningModule
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class Classifier(LightningModule):
    """An ordinary module: nothing in it knows of graphs."""

    def __init__(self, model: torch.nn.Module, labels: int, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        # Checking the labels of every batch would read them on the host.
        metric = partial(MulticlassAccuracy, labels, average="micro", validate_args=False)
        self.train_accuracy, self.val_accuracy = metric(), metric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.train_accuracy(output.logits, batch["labels"])
        self.log("loss", output.loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.val_accuracy(self.model(**batch).logits, batch["labels"])
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def encode(examples: Examples, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Rows:
    """Tokenized texts, padded to one length."""
    encoded = tokenizer(
        examples.texts,
        padding="max_length",
        truncation=True,
        max_length=sequence_length,
        return_tensors="pt",
    )
    # Transformers takes a mask of four dimensions as it is. A flat one it reads on the host in
    # every step, to leave it out of batches without padding; a captured step cannot do that.
    encoded["attention_mask"] = encoded["attention_mask"][:, None, None, :].bool()
    return Rows(**encoded, labels=torch.tensor(examples.labels))


def tokenizer_of(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A word-piece tokenizer in BERT's manner, made from the texts: nothing is downloaded."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def make_model(name: str | None, labels: int, config: Mapping[str, int]) -> torch.nn.Module:
    """The encoder with a classification head: pretrained, or a BERT with random weights."""
    if name is not None:
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=labels)
    return BertForSequenceClassification(BertConfig(num_labels=labels, **config))


def small_or_base(gpu: bool) -> dict[str, int]:
    """BERT-base where a GPU trains it, otherwise what a CPU trains in seconds."""
    if gpu:
        return {"vocab_size": 8192}
    return {
        "vocab_size": 4096,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    }


def train(
    options: argparse.Namespace,
    *,
    adapt: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    learning_rate: float | None = None,
) -> Comparison:
    """Trains twice, as the flags say.

    Args:
        options: The flags of :func:`flags`.
        adapt: Changes the model before it is trained.
        learning_rate: Highest rate of the schedule; by default one that suits the whole model.
    """
    gpu = on_gpu(options)
    corpus: Corpus = (
        from_csv(options.data) if options.data else standard_library(600 if gpu else 250)
    )
    config = small_or_base(gpu)
    if options.model is None:
        tokenizer: PreTrainedTokenizerBase = tokenizer_of(corpus.train.texts, config["vocab_size"])
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    length = 128 if gpu else 64
    parts = [encode(part, tokenizer, length) for part in (corpus.train, corpus.validation)]
    say(
        f"{len(parts[0])} texts to train on, {len(parts[1])} to validate on, "
        f"{len(corpus.names)} labels: {', '.join(corpus.names[:10])}"
    )
    random_weights = 1e-4 if gpu else 1e-3
    rate = learning_rate or (random_weights if options.model is None else 5e-5)
    labels = len(corpus.names)

    def make_module() -> Classifier:
        model = make_model(options.model, labels, config)
        return Classifier(model if adapt is None else adapt(model), labels, rate)

    return compare(
        make_module,
        lambda: InMemory(*parts, options),
        options,
    )


def flags(
    description: str = "Fine-tune a text classifier with and without captured training steps.",
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"{description} {EXIT_STATUS}")
    parser.add_argument(
        "--model",
        metavar="NAME_OR_PATH",
        help="a transformers encoder (default: BERT with random weights, no download)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="CSV",
        help="texts of one's own, columns text and label (default: the standard library's code)",
    )
    add_flags(parser)
    return parser


def main() -> int:
    return run(flags(), train)


if __name__ == "__main__":
    sys.exit(main())
