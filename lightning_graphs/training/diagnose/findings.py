"""What the doctor knows beside the obstacles that a capture names itself."""

from __future__ import annotations

from lightning_graphs.core.obstacles import Obstacle

CONFIGURATION = Obstacle(
    "GraphCapture captures on one device, under DDP or FSDP2, and without a check of every "
    "operator on the host.",
    "change that, or train without GraphCapture",
    kind="configuration",
    code='Trainer(strategy="ddp", detect_anomaly=False)',
)
NO_WHOLE_STEP = Obstacle(
    "A whole step becomes a graph where Lightning optimizes by itself, with one optimizer that "
    "calls the step once.",
    "nothing, if that is needed: scope='auto' and scope='modules' make graphs of the submodules; "
    "modules=[...] names them",
    kind="configuration",
    code='GraphCapture(scope="modules", modules=["generator", "discriminator"])',
)
OPTIMIZER = Obstacle(
    "The step of an optimizer is captured where it neither reads its state on the host nor calls "
    "hooks.",
    "use an optimizer of torch.optim with a fused kernel, or one with capturable=True",
    kind="optimizer",
    code="return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)",
)
HOOK = Obstacle(
    "A replay of a submodule calls no hook that is inside of it.",
    "nothing, if it is needed: the modules inside become graphs; a whole step may have hooks",
    kind="hook",
    code='GraphCapture(scope="step")',
)
OBSERVER = Obstacle(
    "A hook that looks into a step runs between two graphs.",
    "nothing, if it is needed; otherwise look from on_train_batch_end",
    kind="observer",
    code="def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx): ...",
)
CHANGING_SHAPE = Obstacle(
    "A graph is captured for a batch signature that comes back.",
    "pad to a few fixed lengths, and drop the short last batch",
    kind="changing-shape",
    code="DataLoader(data, batch_size=32, drop_last=True, collate_fn=pad_to_a_multiple)",
)
CHANGING_NUMBER = Obstacle(
    "A captured step runs no Python code: the numbers and branches that it computes stand still.",
    "nothing, if counters and learning rates alone make the number, which a captured step follows; "
    "else make it a tensor that a hook fills, and choose between values with torch.where",
    kind="python-state",
    code='self.register_buffer("scale", torch.ones(()))  # in __init__\n'
    "self.scale.fill_(number)  # in on_train_batch_start",
)
