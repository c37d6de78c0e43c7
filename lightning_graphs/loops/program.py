"""What a captured function reaches, as client of the engine: models, optimizers, its own values."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_graphs.device import rules
from lightning_graphs.device.rules import Obstacle
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.loops.processes import Processes
from lightning_graphs.private.callsite import add_line, returned_by
from lightning_graphs.private.distributed import is_within_backward
from lightning_graphs.private.engine import backward_passes_noted
from lightning_graphs.regions.context import Client, StepRecorder
from lightning_graphs.values.guards import REALS, is_object
from lightning_graphs.values.memory import Given
from lightning_graphs.values.tree import item_label, leaves_of, parameters_of, stepping
from lightning_graphs.watch.environment import Effect, Environment, effects_watched
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.kept import CallAt, KeptCalls
from lightning_graphs.watch.late import LateCalls, LatePolicy, LateValue
from lightning_graphs.watch.reads import AttributeGuards, reached_by
from lightning_graphs.watch.user_code import Held, UserCode, function_of

# ------------------ Arguments


class Arguments:
    """Turns the arguments of a call into one value, and back.

    A single argument is that value; several are a dict, by the names of the parameters, and so is
    a single number, which may move from call to call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            parameters = [*inspect.signature(function).parameters.values()]
        except (TypeError, ValueError):  # of C
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = tuple(p.name for p in parameters if p.kind in positional)
        # So many must be given by position
        self._only = sum(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters)

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the value that stands for these arguments."""
        if len(args) == 1 and not kwargs and type(args[0]) not in REALS:
            return args[0]
        named = dict(zip(self._names, args, strict=False))
        named.update(kwargs)
        further = args[len(self._names) :]
        return Several(named, further) if further else Several(named)

    def call(self, function: Callable[..., Any], given: Any) -> Any:
        """Call a function with the arguments that such a value, or a copy of one, stands for."""
        if type(given) is not Several:
            return function(given)
        named = dict(given)
        further = named.pop(_FURTHER, ())
        count = len(self._names) if further else self._only
        first = [named.pop(name) for name in self._names[:count] if name in named]
        return function(*first, *further, **named)


_FURTHER = "*"
"""The key of arguments for which the function has no name."""


def argument_name(key: str) -> str:
    """Return the name of one of several arguments in signatures."""
    return f"batch{item_label(key)}"


class Several(dict[str, Any]):
    """Several arguments, by the names of the parameters."""

    def __init__(self, named: Mapping[str, Any], further: tuple[Any, ...] = ()) -> None:
        super().__init__(named)
        if further:
            self[_FURTHER] = further


# ------------------ The program


class Program(nn.Module):
    """Stands for the module that is trained: all that a captured function reaches is in it.

    Args:
        function: What users have given.
        models: Those that were given, by names.
        optimizers: Those that were given; none for an evaluation.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
    ) -> None:
        super().__init__()
        self.owners = _owners_of(function)
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.models = nn.ModuleDict()
        for name, model in models.items():
            self.models[name.replace(".", "_")] = model
        tensors = [*self.parameters(), *self.buffers()]
        tensors += parameters_of(*optimizers)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.arguments = Arguments(function)
        inner = inspect.unwrap(function_of(function))
        self.inner = inner = inner if inspect.isroutine(inner) else type(inner).__call__
        module: str = getattr(inner, "__module__", None) or "__main__"
        self.own = UserCode(self, module.partition(".")[0])
        self.schedulers: list[Any] = []
        self.scaler: torch.amp.GradScaler | None = None
        # The engine exchanges what is in them
        self._held_elsewhere: list[Any] = [*optimizers]
        self._look_around(inner)
        self._held_elsewhere += [*self.schedulers, *filter(None, [self.scaler])]

    def _look_around(self, function: Any) -> None:
        """Find modules, schedulers and a gradient scaler that the function names."""
        inside = set(map(id, self.modules()))
        others: dict[str, nn.Module] = {}
        for name, value in reached_by(self, function, self.own):
            if isinstance(value, nn.Module) and id(value) not in inside:
                inside.update(map(id, value.modules()))
                others[name] = value
            elif isinstance(value, (LRScheduler, ReduceLROnPlateau)):
                self.schedulers.append(value)
            elif isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                self.scaler = value
        self.others = nn.ModuleDict({n.replace(".", "_"): m for n, m in others.items()})

    @property
    def kinds(self) -> list[type]:
        """Classes whose method the function is, or that it was given."""
        return [one for one in self.owners if isinstance(one, type)]

    @property
    def watched(self) -> list[tuple[str, Any]]:
        """Objects whose attributes the function reads as modules' are read."""
        own = self.function  # a callable object is found as that
        names = (
            "self.function" if o is own else f"self.owners[{i}]" for i, o in enumerate(self.owners)
        )
        owners = [*zip(names, self.owners, strict=True)]
        return [(name, one) for name, one in owners if is_object(one)]


def _owners_of(function: Any) -> list[Any]:
    """List the object whose method a function is, and what a partial brings along."""
    if isinstance(function, MethodType):
        return [function.__self__]
    if isinstance(function, partial):
        return [*_owners_of(function.func), *function.args, *function.keywords.values()]
    return [] if inspect.isroutine(function) else [function]


# ------------------ The client


_OUTSIDE = "a backward pass goes through what was computed ahead of the call"


class ProgramWatch(Client):
    """A plain loop as client of the engine; its function runs its own backward passes."""

    watched: Sequence[tuple[str, Any]] = ()
    optimizers: Sequence[Optimizer] = ()
    accumulates = True  # a call may add to gradients of earlier ones
    stores_outside = True

    def __init__(
        self, program: Program, optimizers: Sequence[Optimizer], *, evaluates: bool
    ) -> None:
        self._program, self._evaluates = program, evaluates
        self.processes = Processes(program, evaluates=evaluates)
        self.own = program.own
        self.kept = KeptCalls(self.own)
        self.watched = program.watched
        self.optimizers = [*optimizers]
        # Here, since nothing of the program may be read in a call
        self._call = partial(program.arguments.call, program.function)
        self.run: Callable[..., Any] = self._run
        self.calls = 0
        self.given: Any = None  # stands for the arguments of the present call

    def _run(self, given: Any) -> Any:
        """Call the function.

        Raises:
            CaptureError: It returns what a backward pass behind the call could begin with, or runs
                one through what was computed ahead of the call.
        """
        with backward_passes_noted(partial(OUTSIDE.refuse_here, _OUTSIDE)) as passes:
            returned = self._call(given)
        if not passes and any(t.requires_grad for t in leaves_of(returned, Tensor)):
            error = HISTORY.refused("a tensor that requires gradients")
            add_line(error, "returned at", returned_by(self.function))
            raise error
        return returned

    @property
    def optimizes_itself(self) -> bool:
        """Whether the function trains: its own code does all of a step."""
        return not self._evaluates

    @property
    def function(self) -> Any:
        """The user's function."""
        found = self._program.function
        while isinstance(found, partial):
            found = found.func
        return found if inspect.isroutine(found) else type(found).__call__

    @property
    def schedulers(self) -> list[Any]:
        return self._program.schedulers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self._program.scaler

    @property
    def epoch(self) -> int:
        """The calls so far in units of 256: all of an optimizer's state is compared once a unit."""
        return self.calls >> 8

    @property
    def effects(self) -> list[Effect]:
        return []

    def arguments(self, given: Sequence[Any], number: Callable[..., Any]) -> Sequence[Any]:
        """Return the arguments next to the one that stands for all of them: there is none."""
        return given

    def number_now(self, key: str) -> Any:
        """Return the number that an argument of the present call is."""
        return self.given[key]

    def used_in(self, error: GraphError) -> list[str]:
        """Return the names of arguments whose use as a number was refused, as in ``n - 1``."""
        keys = [*self.given] if isinstance(self.given, Several) else []
        words = set(re.findall(r"\w+", error.observed.partition(" is ")[0]))
        return [argument_name(key) for key in keys if key in words]

    def environment(self, modules: Sequence[nn.Module] | None = None) -> Environment:
        found = Environment(self._program, self, modules=modules)
        for kind in self._program.kinds:
            found.outside.look_into(kind)
        return found

    def reading(
        self, reads: AttributeGuards, number: MakeNumber | None
    ) -> AbstractContextManager[None]:
        reads.called = self.kept.called
        return nullcontext()

    def calling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def recorder(self) -> StepRecorder:
        return ReadRecorder(self._program, self.kept, self.processes.wrappers)

    def learns(self) -> bool:
        return self.kept.learns()

    def keeps_back(self, error: CaptureError, reads: Sequence[CallAt]) -> bool:
        return not self.waits_for_gradients() and self.kept.learn(error, reads)

    def mute(self) -> MutedRecorder:
        return MutedRecorder(self.kept, self)

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Refuse steps of other optimizers in the body, and let it share no cast of autocast's."""
        torch.clear_autocast_cache()
        here = partial(self._refuse_others, threading.get_ident())
        hook = register_optimizer_step_pre_hook(here)  # of all threads
        try:
            with self.processes.unseen():
                yield
        finally:
            hook.remove()
            torch.clear_autocast_cache()

    def _refuse_others(self, thread: int, optimizer: Optimizer, *_: Any) -> None:
        is_known = any(stepping(optimizer) is known for known in self.optimizers)
        if not is_known and threading.get_ident() == thread:
            OPTIMIZER_NOT_GIVEN.stop_here(f"a step of {type(optimizer).__name__} is taken")

    def waits_for_gradients(self) -> bool:
        return any(map(is_within_backward, self.processes.wrappers))


# ------------------ What a call does on the host

# A plain loop logs what its function has returned. What the function reads on the host, only to
# return or to store it, each replay reads again, behind its graphs.

CHANGED_LATER = Obstacle(
    "A tensor that a captured function reads on the host, behind its graphs, must still have its "
    "value then.",
    "read a copy: tensor.clone().item()",
    kind="host-read",
    code="value = total.clone().item()",
)


class MutedRecorder(StepRecorder):
    """Of a run that is undone: calls that nothing has the result of are left out."""

    def __init__(self, kept: KeptCalls, program: ProgramWatch) -> None:
        self._kept = kept
        self._watching = partial(effects_watched, program, refuses=False)

    def recording(self, held: Held | None = None) -> AbstractContextManager[None]:
        return self._kept.left_out(self._watching)


class ReadRecorder(StepRecorder):
    """Keeps reads on the host back, and leaves in wrappers of DDP what the function leaves there.

    Args:
        program: The module that is trained.
        kept: Knows which reads are kept back.
        wrappers: Those of DDP; in them it stands whether buffers are sent next.
    """

    def __init__(self, program: Any, kept: KeptCalls, wrappers: Sequence[Any]) -> None:
        self._kept, self._wrappers = kept, wrappers
        state = (*program.parameters(), *program.buffers())
        self._late = LateCalls([], state, program.device.type, kept.copied)

    def recording(self, held: Held | None = None) -> AbstractContextManager[None]:
        return self._kept.exchanged(self._late.keep)

    def keeping(self, *, by_methods: bool) -> AbstractContextManager[object]:
        return self._kept.of_torch(self._late.keep, by_methods=by_methods)

    def keep(self, function: Callable[..., Any], given: Given, policy: LatePolicy) -> LateValue:
        """Keep a call back; see :data:`~lightning_graphs.watch.late.Keep`."""
        return self._late.keep(function, given, policy)

    def finish(self) -> None:
        for name in self._late.finish():
            self._kept.copy(name)
            raise CHANGED_LATER.refused(f"the tensor of {name} is changed in place")
        for ddp in self._wrappers:
            syncs = ddp.require_forward_param_sync
            self.at_end(partial(setattr, ddp, "require_forward_param_sync", syncs))

    def reissue(self) -> None:
        for call in self._late.all:
            call.reissue()


# ------------------ Obstacles, and remedies in the words of plain torch

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
    rules.HOST_READ: {
        "remedy": "compute with the value on the device (torch.where, masking, tensor "
        "arithmetic), or return the tensor, and read it after the call; what a function only "
        "returns or stores it may read",
        "code": f"{_BEHIND}total += loss.item()  # outside of it, every now and then",
    },
    rules.NOT_RECORDED: {
        "remedy": "keep the value on the device, or return the tensor, and read it behind the "
        "call; typical are .item(), .cpu(), boolean indexing, torch.tensor(...), a copy from "
        "pageable host memory",
        "code": f"{_BEHIND}total += loss.item()  # outside of it, every now and then",
    },
    rules.LINEAR_ALGEBRA: {
        "remedy": "use inv_ex, solve_ex, cholesky_ex or lu_factor_ex, which leave the check out; "
        "call svd, eigh, eig and matrix_exp outside of the captured function",
    },
    rules.CTC_LOSS: {
        "remedy": "compute the lengths from the batch alone, and pass targets of 64 bits; or call "
        "ctc_loss outside of the captured function",
    },
    rules.HOST_DATA: {
        "code": "weights = torch.tensor([1.0, 2.0], device=device)  # once, ahead of the loop",
    },
    rules.COMPILED: {
        "code": "step = capture(train_step, model, optimizer)  # with the model on a GPU"
    },
    rules.MOVED_STORAGE: {
        "code": 'self.register_buffer("memory", torch.zeros(size))  # in __init__ of the model\n'
        "self.memory[: len(x)].copy_(x)  # in forward",
    },
    rules.STORED: {
        "remedy": "return the value, and set the attribute after the call; change buffers in place",
        "code": f"{_BEHIND}self.calls += 1",
    },
    rules.STORED_OUTSIDE: {
        "remedy": "return the value, and set the variable after the call",
        "code": f"{_BEHIND}losses.append(loss)",
    },
    rules.SIDE_EFFECT: {
        "remedy": "return the value, and print, write or log it after the call",
        "code": f"{_BEHIND}print(loss.item())",
    },
    rules.DRAWN: {
        "remedy": "draw on the device (torch.rand(..., device=...)), or ahead of the call, and "
        "pass a tensor; replays can follow a number that the function only adds, multiplies or "
        "compares, or makes a tensor of; take batches from iterators in the loop, and pass them",
        "code": "share = torch.rand((), device=x.device)  # in place of random.random()",
    },
    rules.CLOCK: {
        "remedy": "only return or store what a function of `time` gives, or numbers that follow "
        "from it, which replays read again; compute or decide with it before the call, and pass a "
        "tensor",
        "code": "step(batch, torch.full((), time.monotonic() - began, device=device))",
    },
    rules.COUNTER: {
        "remedy": "make a tensor of the number, and pass that; replays can follow a counter that "
        "the function only adds, multiplies, divides or compares",
        "code": "step(batch, torch.full((), 1 / (1 + i), device=device))",
    },
    rules.OLD_GRADIENTS: {
        "remedy": "give capture() the optimizer of a function that trains; use gradients after "
        "its backward pass",
        "code": "step = capture(train_step, model, optimizer)",
    },
    rules.SCHEDULED: {
        "remedy": "step the scheduler in the loop, after the call",
        "code": f"{_BEHIND}scheduler.step()",
    },
    rules.BATCH_VALUE: {
        "remedy": "pass a tensor in place of a Python value that is another one in every call",
        "code": "step(batch, torch.full((), weight, device=device))",
    },
    rules.BATCH_CHANGED: {
        "remedy": "return the value, and put it into the batch after the call",
        "code": 'batch["info"].score = step(batch)',
    },
    rules.FILLED: {
        "remedy": "compute with the list after the call, or keep the last few entries in a deque",
        "code": "losses = deque(maxlen=10)  # outside of the function\n"
        "losses.append(loss.detach())  # in it",
    },
    rules.OPTIMIZER_SET: {
        "remedy": "set the value in the loop, or with a scheduler",
        "code": 'optimizer.param_groups[0]["weight_decay"] = 0.1  # ahead of the call',
    },
    rules.MOVING_VALUE: {
        "remedy": "make the value a tensor on the device, and fill or pass it ahead of the call",
        "code": "scale.fill_(number)  # a tensor that the function multiplies with",
    },
    rules.GRADIENTS_CHANGED: {
        "remedy": "give capture() the optimizer of a function that trains, or optimizer=[] if the "
        "loop steps it; in an evaluation use torch.autograd.grad(...), which returns gradients",
        "code": "step = capture(train_step, model, optimizer)",
    },
}
"""Rule of the engine -> the remedy and code that messages have in place of its own."""
