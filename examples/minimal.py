"""The least that it takes: a LightningModule, a trainer, and one more callback.

On a GPU the training step becomes one CUDA graph. On a CPU the same is rehearsed, for correctness.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_graphs import GraphCapture


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


L.seed_everything(0)
x = torch.randn(4096, 32)
data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=64, shuffle=True)

graphs = GraphCapture(backend="auto" if torch.cuda.is_available() else "emulated")
trainer = L.Trainer(
    max_epochs=2, devices=1, logger=False, enable_checkpointing=False, callbacks=[graphs]
)
trainer.fit(Classifier(), data)

print(f"loss {trainer.callback_metrics['loss']:.3f}")
print(graphs.report.replayed, "steps replayed,", graphs.report.eager, "eager")
