"""Hugging Face's Trainer with captured training steps; its loop steps the optimizer as ever.

``python examples/hf_trainer.py`` trains a small BERT on a GPU, and rehearses on a CPU.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lightning_graphs


class GraphedTrainer(Trainer):
    """Forward and backward pass are one graph; clipping, optimizer and schedule stay outside."""

    step: Any = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.step is None:
            backend = "cuda" if torch.cuda.is_available() else "emulated"
            run = super().training_step
            self.step = lightning_graphs.capture(run, model, [], backend=backend)
        return self.step(model, inputs, num_items_in_batch)


def main(steps: int = 20) -> Any:
    """Train, and return the report."""
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    config.update({"intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 32})
    data = [{"input_ids": torch.randint(100, (16,)), "labels": i % 2} for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(folder, max_steps=steps, report_to=[], save_strategy="no")
        given.dataloader_pin_memory = torch.cuda.is_available()
        model = BertForSequenceClassification(config)
        trainer = GraphedTrainer(model=model, args=given, train_dataset=data)
        trainer.train()
    print(trainer.step.report)
    return trainer.step.report


if __name__ == "__main__":
    main()
