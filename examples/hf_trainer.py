"""Hugging Face's Trainer, with one CUDA graph for its training step; on a CPU it is rehearsed."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lightning_graphs


class GraphedTrainer(Trainer):
    step = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.step is None:
            backend = "cuda" if torch.cuda.is_available() else "emulated"
            self.step = lightning_graphs.capture(super().training_step, model, [], backend=backend)
        return self.step(model, inputs, num_items_in_batch)


data = [{"input_ids": torch.randint(100, (16,)), "labels": i % 2} for i in range(320)]
config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
model = BertForSequenceClassification(config)
options = TrainingArguments(max_steps=40, logging_steps=1, report_to=[], save_strategy="no")
trainer = GraphedTrainer(model, options, train_dataset=data)
trainer.train()
print(trainer.step.report)
