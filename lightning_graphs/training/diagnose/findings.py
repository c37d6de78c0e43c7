"""What the doctor knows beside the obstacles that a capture names itself."""

from __future__ import annotations

from lightning_graphs.core.obstacles import Obstacle

CONFIGURATION = Obstacle(
    "GraphCapture can capture on one device, under DDP or FSDP2, and without detect_anomaly.",
    "change that setting of the Trainer, or train without GraphCapture",
    kind="configuration",
    code='Trainer(strategy="ddp", detect_anomaly=False)',
)
NO_WHOLE_STEP = Obstacle(
    "A whole step can be captured only under automatic optimization, with one optimizer that calls "
    "the step once.",
    "leave the step as it is, if it needs that: scope='auto' and scope='modules' capture "
    "submodules; modules=[...] names them",
    kind="configuration",
    code='GraphCapture(scope="modules", modules=["generator", "discriminator"])',
)
NO_SUBMODULE = Obstacle(
    "Graphs of submodules need a step that calls one with parameters.",
    "leave scope='modules' out, which captures the whole step; or move the computation into a "
    "module that training_step calls",
    kind="configuration",
    code='GraphCapture(scope="step")',
)
OPTIMIZER = Obstacle(
    "An optimizer step can be captured only if it reads nothing on the host and calls no hooks.",
    "use an optimizer of torch.optim with a fused kernel, or one with capturable=True",
    kind="optimizer",
    code="return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)",
)
HOOK = Obstacle(
    "A graphed submodule cannot call hooks of the modules inside of it.",
    "leave the hook, if it is needed: the modules inside are captured; with scope='step' the step "
    "may have hooks",
    kind="hook",
    code='GraphCapture(scope="step")',
)
OBSERVER = Obstacle(
    "A hook that runs inside of a step parts it into two graphs.",
    "leave the hook, if it is needed there; otherwise move its code to on_train_batch_end",
    kind="observer",
    code="def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx): ...",
)
CHANGING_SHAPE = Obstacle(
    "A graph can replay only for batches of the shapes that it was captured with.",
    "pad to a few fixed lengths, and drop the short last batch",
    kind="changing-shape",
    code="DataLoader(data, batch_size=32, drop_last=True, collate_fn=pad_to_a_multiple)",
)
CHANGING_NUMBER = Obstacle(
    "A graph would freeze Python numbers that change, and branches that they choose.",
    "leave the number, if it is made of counters and learning rates alone, which replays follow; "
    "else make it a tensor that a hook fills, and choose between values with torch.where",
    kind="python-state",
    code='self.register_buffer("scale", torch.ones(()))  # in __init__\n'
    "self.scale.fill_(number)  # in on_train_batch_start",
)
