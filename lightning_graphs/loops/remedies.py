"""Remedies in the words of plain torch: for functions of loops that users write."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_graphs.device.rules import (
    BATCH_CHANGED,
    BATCH_VALUE,
    CLOCK,
    COMPILED,
    COUNTER,
    CTC_LOSS,
    DRAWN,
    FILLED,
    GRADIENTS_CHANGED,
    HOST_DATA,
    HOST_READ,
    LINEAR_ALGEBRA,
    MOVED_STORAGE,
    MOVING_VALUE,
    NOT_RECORDED,
    OLD_GRADIENTS,
    OPTIMIZER_SET,
    SCHEDULED,
    SIDE_EFFECT,
    STORED,
    STORED_OUTSIDE,
    Obstacle,
)

OPTIMIZER = Obstacle(
    "A captured function can step an optimizer that reads nothing on the host and calls no hooks.",
    "use an optimizer of torch.optim with a fused kernel, or one with capturable=True; or let the "
    "function compute gradients only (optimizer=[]), and call step() in the loop",
    kind="optimizer",
    code="optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
)
OPTIMIZER_NOT_GIVEN = Obstacle(
    "A captured function can step only the optimizers that capture() was given.",
    "give capture() every optimizer that the function steps",
    kind="optimizer",
    code="step = capture(train_step, [generator, critic], [of_generator, of_critic])",
)
HISTORY = Obstacle(
    "No backward pass after a captured call can begin with a tensor that the call returns.",
    "run the backward pass in the function, of which capture() is then given the optimizer, or "
    "optimizer=[]; else evaluate under torch.no_grad(), or return detached tensors",
    kind="autograd",
    code="@torch.no_grad()\ndef evaluate(batch): ...  # of which no gradients are wanted",
)

OUTSIDE = Obstacle(
    "A backward pass in a captured function goes through nothing from ahead of the call.",
    "compute the loss in the function: run the model there on what the loop has kept",
    kind="autograd",
    code="loss = -(Categorical(logits=policy(states)).log_prob(actions) * returns).sum()",
)

CONFIGURATION = Obstacle(
    "capture() can capture functions on one device, under DDP or FSDP2 (fully_shard) where several "
    "processes train together, and without anomaly detection.",
    "change that setting, or leave the function as it is",
    kind="configuration",
    code="torch.autograd.set_detect_anomaly(False)",
)

_BEHIND = "loss = step(batch)  # the captured function\n"

WORDS: Mapping[Obstacle, Mapping[str, str]] = {
    HOST_READ: {
        "remedy": "compute with the value on the device (torch.where, masking, tensor "
        "arithmetic), or return the tensor, and read it after the call; what a function only "
        "returns or stores it may read",
        "code": f"{_BEHIND}total += loss.item()  # outside of it, every now and then",
    },
    NOT_RECORDED: {
        "remedy": "keep the value on the device, or return the tensor, and read it behind the "
        "call; typical are .item(), .cpu(), boolean indexing, torch.tensor(...), a copy from "
        "pageable host memory",
        "code": f"{_BEHIND}total += loss.item()  # outside of it, every now and then",
    },
    LINEAR_ALGEBRA: {
        "remedy": "use inv_ex, solve_ex, cholesky_ex or lu_factor_ex, which leave the check out; "
        "call svd, eigh, eig and matrix_exp outside of the captured function",
    },
    CTC_LOSS: {
        "remedy": "compute the lengths from the batch alone, and pass targets of 64 bits; or call "
        "ctc_loss outside of the captured function",
    },
    HOST_DATA: {
        "code": "weights = torch.tensor([1.0, 2.0], device=device)  # once, ahead of the loop",
    },
    COMPILED: {"code": "step = capture(train_step, model, optimizer)  # with the model on a GPU"},
    MOVED_STORAGE: {
        "code": 'self.register_buffer("memory", torch.zeros(size))  # in __init__ of the model\n'
        "self.memory[: len(x)].copy_(x)  # in forward",
    },
    STORED: {
        "remedy": "return the value, and set the attribute after the call; change buffers in place",
        "code": f"{_BEHIND}self.calls += 1",
    },
    STORED_OUTSIDE: {
        "remedy": "return the value, and set the variable after the call",
        "code": f"{_BEHIND}losses.append(loss)",
    },
    SIDE_EFFECT: {
        "remedy": "return the value, and print, write or log it after the call",
        "code": f"{_BEHIND}print(loss.item())",
    },
    DRAWN: {
        "remedy": "draw on the device (torch.rand(..., device=...)), or ahead of the call, and "
        "pass a tensor; replays can follow a number that the function only adds, multiplies or "
        "compares, or makes a tensor of; take batches from iterators in the loop, and pass them",
        "code": "share = torch.rand((), device=x.device)  # in place of random.random()",
    },
    CLOCK: {
        "remedy": "only return or store what a function of `time` gives, or numbers that follow "
        "from it, which replays read again; compute or decide with it before the call, and pass a "
        "tensor",
        "code": "step(batch, torch.full((), time.monotonic() - began, device=device))",
    },
    COUNTER: {
        "remedy": "make a tensor of the number, and pass that; replays can follow a counter that "
        "the function only adds, multiplies, divides or compares",
        "code": "step(batch, torch.full((), 1 / (1 + i), device=device))",
    },
    OLD_GRADIENTS: {
        "remedy": "give capture() the optimizer of a function that trains; use gradients after "
        "its backward pass",
        "code": "step = capture(train_step, model, optimizer)",
    },
    SCHEDULED: {
        "remedy": "step the scheduler in the loop, after the call",
        "code": f"{_BEHIND}scheduler.step()",
    },
    BATCH_VALUE: {
        "remedy": "pass a tensor in place of a Python value that is another one in every call",
        "code": "step(batch, torch.full((), weight, device=device))",
    },
    BATCH_CHANGED: {
        "remedy": "return the value, and put it into the batch after the call",
        "code": 'batch["info"].score = step(batch)',
    },
    FILLED: {
        "remedy": "compute with the list after the call, or keep the last few entries in a deque",
        "code": "losses = deque(maxlen=10)  # outside of the function\n"
        "losses.append(loss.detach())  # in it",
    },
    OPTIMIZER_SET: {
        "remedy": "set the value in the loop, or with a scheduler",
        "code": 'optimizer.param_groups[0]["weight_decay"] = 0.1  # ahead of the call',
    },
    MOVING_VALUE: {
        "remedy": "make the value a tensor on the device, and fill or pass it ahead of the call",
        "code": "scale.fill_(number)  # a tensor that the function multiplies with",
    },
    GRADIENTS_CHANGED: {
        "remedy": "give capture() the optimizer of a function that trains, or optimizer=[] if the "
        "loop steps it; in an evaluation use torch.autograd.grad(...), which returns gradients",
        "code": "step = capture(train_step, model, optimizer)",
    },
}
"""Rule of the engine -> the remedy and code that messages have in place of its own."""
