"""Low-rank adapters of peft on a frozen encoder, with and without captured training steps.

The task is that of ``finetune_classifier.py``: to tell from a dozen lines of code which package of
Python's standard library they come from. The encoder stays as it is; the adapters in its layers and
the new head learn, so the graph holds the gradients and updates of those alone.

    python examples/lora_finetune.py
    python examples/lora_finetune.py --model bert-base-uncased --rank 16
"""

from __future__ import annotations

import argparse
import sys

from finetune_classifier import flags as classifier_flags
from finetune_classifier import train as train_classifier
from helpers.comparison import Comparison, run, say
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn

ADAPTED = ("query", "key", "value", "dense", "word_embeddings")
"""Layers that get an adapter, wherever their names end so."""


def adapted(encoder: nn.Module, rank: int) -> nn.Module:
    """The encoder, frozen, with adapters of this rank in each layer and a head that learns."""
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.1,
        target_modules=list(ADAPTED),
        modules_to_save=["classifier"],
    )
    model = get_peft_model(encoder, config)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{learning:,} of {sum(p.numel() for p in model.parameters()):,} parameters learn")
    return model


def train(options: argparse.Namespace) -> Comparison:
    """Trains twice, as the flags say."""
    return train_classifier(
        options,
        adapt=lambda encoder: adapted(encoder, options.rank),
        learning_rate=options.learning_rate,
    )


def flags() -> argparse.ArgumentParser:
    parser = classifier_flags(
        "Fine-tune adapters on a text classifier with and without captured training steps."
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: 8)")
    parser.add_argument(
        "--learning-rate", type=float, default=3e-3, help="highest rate (default: 3e-3)"
    )
    parser.set_defaults(epochs=2)
    return parser


def main() -> int:
    return run(flags(), train)


if __name__ == "__main__":
    sys.exit(main())
