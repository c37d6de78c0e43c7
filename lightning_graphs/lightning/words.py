"""What the engine is told of Lightning: remedies in its words, and whose code is a library's."""

from __future__ import annotations

from lightning_graphs.device.rules import (
    COLLECTIVE,
    COMPILED,
    CTC_LOSS,
    GROUPED,
    HOST_DATA,
    HOST_READ,
    LINEAR_ALGEBRA,
    MOVED_STORAGE,
    READ_IN_BACKWARD,
    speak,
)
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
}
"""Rule of the engine -> what messages say in place of its own remedy and code."""

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
_LOGGERS = ("tensorboard", "tensorboardX", "wandb", "mlflow", "neptune", "comet_ml")

speak(WORDS)
LIBRARIES.add((*_LIGHTNING, "torchmetrics"), _LOGGERS)
