"""What the engine is told of Lightning: remedies in its words, and whose code is a library's."""

from __future__ import annotations

from lightning_graphs.device.rules import (
    BATCH_CHANGED,
    CLOCK,
    COLLECTIVE,
    COMPILED,
    COUNTER,
    CTC_LOSS,
    DRAWN,
    FILLED,
    GROUPED,
    HOST_DATA,
    HOST_READ,
    LINEAR_ALGEBRA,
    MOVED_STORAGE,
    OLD_GRADIENTS,
    READ_IN_BACKWARD,
    SIDE_EFFECT,
    STORED,
    STORED_OUTSIDE,
    speak,
)
from lightning_graphs.errors import USER_OPTIONS
from lightning_graphs.private.callsite import LIBRARIES

WORDS = {
    HOST_READ: {
        "code": 'self.log("loss", loss)  # the tensor, without item()\n'
        "loss = torch.where(condition, a, b)  # in place of an if",
    },
    LINEAR_ALGEBRA: {
        "remedy": "use inv_ex, solve_ex, cholesky_ex or lu_factor_ex, which leave the check out; "
        "for svd, eigh, eig and matrix_exp use scope='modules', and call them between submodules",
    },
    CTC_LOSS: {
        "remedy": "compute the lengths from the batch alone, and pass targets of 64 bits; or use "
        "scope='modules', and call ctc_loss between submodules",
    },
    HOST_DATA: {
        "code": 'self.register_buffer("weights", torch.tensor([1.0, 2.0]))  # in __init__\n'
        "loss = losses @ self.weights  # in training_step",
    },
    COLLECTIVE: {
        "remedy": "call the collective outside of the submodule, or capture the whole step "
        "(scope='step')",
        "code": 'self.log("loss", loss, sync_dist=True)  # in place of all_reduce(loss)',
    },
    COMPILED: {"code": "GraphCapture()  # on a GPU, where the compiled module is captured"},
    MOVED_STORAGE: {
        "code": 'self.register_buffer("memory", torch.zeros(size))  # in __init__\n'
        "self.memory[: len(x)].copy_(x)  # in training_step",
    },
    READ_IN_BACKWARD: {
        "remedy": "use operators whose backward pass reads nothing: exp, sum and cumsum of "
        "logarithms in place of prod and cumprod, torch.where in place of masked_fill with a "
        "trained value; or leave that line to code between submodules (scope='modules')",
    },
    GROUPED: {
        "remedy": "train weights in bfloat16 (precision='bf16-true'): torch multiplies those of "
        "all experts in one kernel, which reads nothing on the host",
        "code": 'Trainer(precision="bf16-true")',
    },
    STORED: {
        "remedy": "set the attribute in on_train_batch_end, from the values that training_step "
        "returns; change buffers in place",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n    self.calls += 1",
    },
    STORED_OUTSIDE: {
        "remedy": "set the variable in on_train_batch_end, from the values that training_step "
        "returns",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        "    LOSSES.append(outputs['loss'])  # what training_step returns",
    },
    SIDE_EFFECT: {
        "remedy": "move that code to on_train_batch_end, with what training_step returns; "
        "self.log may stay",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        "    print(outputs['loss'])  # what training_step returns",
    },
    DRAWN: {
        "remedy": "only add, multiply, compare or log what is drawn, or make a tensor of it, in "
        "training_step, which replays follow; else draw on the device (torch.rand(..., "
        "device=...)), or in the data loader",
    },
    CLOCK: {
        "remedy": "only log or store what a function of `time` gives, or numbers that follow from "
        "it, in training_step, which replays read anew; compute or decide with it in a hook",
        "code": "def on_train_batch_start(self, batch, batch_idx):\n"
        "    self.share.fill_(time.monotonic() - self.began)  # a buffer, for the step",
    },
    COUNTER: {
        "remedy": "only add, multiply, divide, compare or log counters in training_step, which "
        "replays follow; move other code that needs the value to a hook, or make the value a "
        "tensor that a hook fills",
        "code": 'self.register_buffer("scale", torch.ones(()))  # in __init__\n'
        "self.scale.fill_(1.0 / (1 + batch_idx))  # in on_train_batch_start",
    },
    OLD_GRADIENTS: {
        "remedy": "clip with Trainer(gradient_clip_val=...), which is captured; use and log "
        "gradients in on_before_optimizer_step, and keep what the next step needs of them in a "
        "buffer",
        "code": "def on_before_optimizer_step(self, optimizer):\n"
        "    norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)\n"
        '    self.log("norm", norm)\n'
        "    self.norm.copy_(norm)  # a buffer, for the next step",
    },
    BATCH_CHANGED: {
        "remedy": "return the value from training_step, and use it in on_train_batch_end",
        "code": "def on_train_batch_end(self, outputs, batch, batch_idx):\n"
        '    batch["info"].score = outputs["score"]  # what training_step returns',
    },
    FILLED: {
        "remedy": "compute with the list in on_train_batch_end, or keep the last few entries in a "
        "deque",
        "code": "self.last = deque(maxlen=10)  # in __init__\n"
        "self.last.append(loss.detach())  # in training_step",
    },
}
"""Rule of the engine -> what messages say in place of its own remedy and code."""

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
_LOGGERS = ("tensorboard", "tensorboardX", "wandb", "mlflow", "neptune", "comet_ml")

speak(WORDS)
LIBRARIES.step = "training_step"
USER_OPTIONS.extend(("GraphCapture(", "Trainer("))
LIBRARIES.add((*_LIGHTNING, "torchmetrics"), _LOGGERS)
