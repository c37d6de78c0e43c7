"""``capture``: a function that trains or evaluates, as graphs, which are timed and judged."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_graphs.device.cuda import joined_stream
from lightning_graphs.device.graph import BACKENDS, GraphPool
from lightning_graphs.errors import UnsupportedError
from lightning_graphs.loops.function_runner import (
    CallRecovery,
    EvaluationCalls,
    FunctionSteps,
    JudgedCalls,
    JudgedEvaluation,
    diagnosis_of,
    is_on_behalf_of_graphs,
    judge_optimizers,
)
from lightning_graphs.loops.program import CONFIGURATION, Program, ProgramWatch
from lightning_graphs.policy.options import OPTIONS, OptionError, Options
from lightning_graphs.policy.worth import CapturePolicy, MemoryBudget, StepTiming, Stopwatch
from lightning_graphs.private.distributed import ahead_of_destruction
from lightning_graphs.private.exchange import nothing
from lightning_graphs.private.torch import (
    is_newer_than_tested,
    makes_own_graphs,
    why_no_cuda_graphs,
)
from lightning_graphs.regions.conditions import flattened_once
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.judged import Findings, options_of_notes
from lightning_graphs.regions.lifecycle import EAGER
from lightning_graphs.regions.tolerance import Tolerance
from lightning_graphs.regions.tried import in_order
from lightning_graphs.regions.verify import Verifier
from lightning_graphs.report import Report, summary_line
from lightning_graphs.report.messages import LOG, Messages, Statistics
from lightning_graphs.values.tree import stepping
from lightning_graphs.watch.assertions import OpenAssertions
from lightning_graphs.watch.user_code import obstacle_in

P = ParamSpec("P")
R = TypeVar("R")

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


def capture(
    function: Callable[P, R],
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    warmup_steps: int = 3,
    min_repeats: int | None = None,
    max_graphs: int | None = None,
    on_failure: Literal["eager", "raise"] = "eager",
    backend: Literal["auto", "cuda", "emulated"] = "auto",
    verify: bool | int = True,
    memory: float | Literal["auto"] = "auto",
    only_if_faster: bool = True,
    overlap: bool = True,
    optimizer_kernel: Literal["fused", "own"] = "fused",
    annotate: bool = False,
    diagnose: bool = False,
) -> CapturedFunction[P, R]:
    """Capture a function of a training loop; call what is returned in its place.

    The first calls run eagerly. Then all that the function does on the device (forward, backward,
    clipping, optimizer step) becomes one graph, and a call copies its batch in and replays it.
    Values, gradients, parameters and the optimizer's state are those of eager calls. What cannot be
    captured runs eagerly, and a warning says why.

    Example::

        def train_step(batch):
            optimizer.zero_grad()
            loss = loss_of(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = lightning_graphs.capture(train_step, model, optimizer)
        for batch in loader:
            loss = step(batch)

    What a call returns belongs to the caller. Each value of a Python argument has a graph, as each
    shape has: ``step(batch, last=i % 4 == 3)`` has two. Learning rates may be scheduled outside of
    the function; graphs read the present ones.

    Args:
        function: It trains, or evaluates. It may be a method, a partial or a callable object.
        model: What it trains or calls: a module, or a list or dict of several.
        optimizer: What it steps: an optimizer, or a list or dict of several. None: it evaluates,
            and leaves gradients alone. An empty list: it computes gradients, and the loop steps.
        warmup_steps: Calls that run eagerly before the first capture.
        min_repeats: How often a signature (structure, shapes, dtypes) must have come back after the
            warm-up before it is captured. By default it is captured as soon as that is expected to
            pay, by measured times.
        max_graphs: How many signatures may have graphs at a time. By default memory is the limit.
        on_failure: ``"eager"``: what cannot be captured runs eagerly, with a warning. ``"raise"``:
            the first refusal raises.
        backend: ``"cuda"``, ``"emulated"`` (a rehearsal on the CPU), or ``"auto"``: CUDA if the
            model is there, inactive on a CPU.
        verify: Whether a captured call is also run eagerly, from the same state, and everything
            that both compute is compared. True: after each capture. A whole number K: also at every
            K-th call. False: never.
        memory: How much more GPU memory than eager calls may be taken, as a share of their peak;
            ``"auto"`` is 0.35.
        only_if_faster: True: nothing is captured that is not expected to pay off, and calls run
            eagerly again if replays turn out not to be faster. False: whatever comes back is
            captured.
        overlap: After some hundred replays, once these have saved ten times what it costs, a call
            is captured once more, with the gradients of weights and biases on a second stream of
            its graph, and the faster graph is kept. False: each graph stays in one stream.
        optimizer_kernel: ``"fused"``: Adam, AdamW and SGD run their fused kernels, whose results
            differ by rounding, unless they were made with ``fused=False`` or ``foreach=True``.
            ``"own"``: none is switched to its fused kernel; on a GPU Adam and AdamW run torch's
            ``capturable`` form, and all others the kernel that torch chooses.
        annotate: Note which submodule, operator and line launches each kernel of a graph:
            ``step.report.name_trace`` writes that into traces of ``torch.profiler``.
        diagnose: Capture nothing. Behind the first call, ``warmup_steps`` calls are observed, on a
            GPU or a CPU, and every obstacle is printed with the line and the remedy. It is
            ``step.report.diagnosis``.

    Raises:
        OptionError: an argument has an impossible value.
    """
    given = {name: value for name, value in locals().items() if name in OPTIONS}
    options = Options(scope="step", **given)
    if isinstance(function, CapturedFunction):
        function = function.function
    if not callable(function):
        raise OptionError(
            "The first argument of capture() must be a function, method or other callable.",
            f"got {function!r}",
            "write capture(train_step, model, optimizer)",
        )
    models = _named("model", model, nn.Module)
    optimizers = None if optimizer is None else _named("optimizer", optimizer, Optimizer)
    return CapturedFunction(function, models, optimizers, options)


_Kind = TypeVar("_Kind")


def _named(name: str, given: Any, kind: type[_Kind]) -> dict[str, _Kind]:
    """Name the objects of an argument.

    Raises:
        OptionError: One of them is none of this kind.
    """
    if isinstance(given, Mapping):
        found = {str(key): value for key, value in given.items()}
    elif isinstance(given, Sequence):
        found = {f"{name}{i}": value for i, value in enumerate(given)}
    else:
        found = {name: given}
    for key, value in found.items():
        inner = getattr(value, "optimizer", None)  # of a wrapper that a library has put around it
        if kind is Optimizer and isinstance(inner, Optimizer):
            found[key] = value = inner
        if not isinstance(value, kind):
            raise OptionError(
                f"{name} must be a {kind.__module__.partition('.')[0]} {kind.__name__}, or a list "
                "or dict of several.",
                f"got {type(value).__name__}",
                "write capture(train_step, model, optimizer)",
            )
    return found


class CapturedFunction(Generic[P, R]):
    """What :func:`capture` returns: call it in place of the function.

    Attributes:
        function: The function that was captured.
    """

    def __init__(
        self,
        function: Callable[P, R],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer] | None,
        options: Options,
    ) -> None:
        self.function = function
        self.options = options
        self._given = models, optimizers
        self._statistics = Statistics()
        self._calls: Calls | None = None
        self._eager = 0  # so many `eager` surround the present call
        self._name: str = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        calls = self._calls
        if calls is None:
            calls = self._begin()
        if self._eager or not calls.is_active:
            calls.goes_on_eagerly()
            self._statistics.ran_eagerly()
            return self.function(*args, **kwargs)
        returned: R = calls.call(args, kwargs)
        return returned

    def _begin(self) -> Calls:
        """Prepare, with the first call: models may be moved to their device until then."""
        parts = self._given, self.options, self._statistics
        self._calls = calls = Calls(self.function, self._name, *parts)
        return calls

    @property
    def report(self) -> Report:
        """What happened to the calls so far."""
        if self._calls is not None:
            self._calls.judge()
        return self._statistics.report()

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Run calls in the body eagerly."""
        self._eager += 1
        try:
            yield
        finally:
            self._eager -= 1

    def close(self) -> None:
        """Release the graphs, and hand the optimizers back; later calls run eagerly.

        It happens by itself once nothing refers to this object any more.

        Raises:
            Exception: What an assertion of the last calls has failed by.
        """
        if self._calls is not None:
            self._calls.settle()
            self._calls.close()

    def __del__(self) -> None:
        # No callback of a weak reference: it would keep an object alive that has both the function
        # and this one. At the end of the program :class:`Calls` sees to it
        calls = vars(self).get("_calls")
        if calls is not None and not sys.is_finalizing():
            calls.close()

    def __repr__(self) -> str:
        done = self._statistics
        return f"<captured {self._name}: {done.replayed} calls replayed, {done.eager} eager>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "A captured function cannot be copied or pickled, because graphs belong to one process "
            "and one model.",
            f"capture({self._name}) is copied or pickled",
            "copy or pickle the function and the model, and call capture() again",
        )


# ------------------ The calls of one function

_MANY = 10_000
"""Calls that are expected of a loop, whose end is not known."""
_LOOK = 64
"""After so many calls all ranks look together at the assertions of their replays."""


_Steps = TypeVar("_Steps", bound=FunctionSteps)
_alive: weakref.WeakSet[Calls] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Release all graphs while there is a device and a process group, at the end of the program."""
    for calls in [*_alive]:
        calls.close()


def _warn(text: str, stacklevel: int) -> None:
    # The level is that of rank_zero_warn, which has two frames more
    warnings.warn(text, stacklevel=stacklevel - 2)


class Calls:
    """Runs the calls of a function."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,  # of the function, in messages
        given: tuple[Mapping[str, nn.Module], Mapping[str, Optimizer] | None],
        options: Options,
        statistics: Statistics,
    ) -> None:
        models, optimizers = given
        stepped = [*dict.fromkeys(map(stepping, (optimizers or {}).values()))]
        self._open = contextlib.ExitStack()
        self._options, self._statistics = options, statistics
        self.program = Program(function, models, stepped)
        self._device = device = self.program.device
        self._watch = ProgramWatch(self.program, stepped, evaluates=optimizers is None)
        self._processes = self._watch.processes
        who = f"capture({name})"
        parts = statistics, options.min_repeats
        say, warn = (LOG.info, _warn) if self._processes.is_first else (nothing, nothing)
        self._messages = Messages(*parts, steps="calls", who=who, say=say, warn=warn)
        statistics.device = device.type
        self._steps: FunctionSteps | None = None
        self._stream: torch.cuda.Stream | None = None
        # No other device can be the current one
        self._is_only_gpu = device.type != "cuda" or torch.cuda.device_count() == 1
        self._timing: StepTiming | None = None
        self._assertions: OpenAssertions | None = None
        if self._may_begin(function):
            _alive.add(self)
            with nullcontext() if self._is_only_gpu else torch.cuda.device(device):
                self._begin(evaluates=optimizers is None)

    @property
    def is_active(self) -> bool:
        """Whether calls may be captured at all."""
        return self._steps is not None and not is_on_behalf_of_graphs()

    def _may_begin(self, function: Callable[..., Any]) -> bool:
        """Whether calls may be captured on this device; says why not.

        Raises:
            CaptureError: They may not, with ``on_failure="raise"``.
            OptionError: The backend is one of another device.
        """
        options, device, diagnoses = self._options, self._device, self._options.diagnose
        if options.backend not in ("auto", BACKENDS.get(device.type)):
            raise OptionError(
                "backend must be 'auto', 'cuda' for a model on a GPU or 'emulated' on the CPU.",
                f"got {options.backend!r} with a model on {device}",
                "write backend='auto', or move the model ahead of the first call",
            )
        if device.type == "cpu" and options.backend == "auto" and not diagnoses:
            self._messages.note("inactive on a CPU; backend='emulated' rehearses there")
            return False
        reason = obstacle_in(self.program) or ""
        if device.type not in BACKENDS:
            reason = f"it captures on NVIDIA GPUs, and the model is on {device}"
        elif device.type == "cuda" and (unsupported := why_no_cuda_graphs()):
            reason = unsupported
        elif torch.is_anomaly_enabled():
            reason = "detect_anomaly checks every operator on the host"
        elif makes_own_graphs(function):
            reason = "torch.compile(mode='reduce-overhead') has made graphs of its own"
        reason = reason or self._processes.why_not()
        if diagnoses:
            if self._processes.are_joint:
                reason = "diagnose=True captures in one process; start the program without torchrun"
            self._diagnosis = diagnosis_of(self.program, self._statistics, reason)
            return not reason
        if not reason:
            return True
        if options.on_failure == "raise":
            raise CONFIGURATION.refused(reason)
        self._messages.note(f"calls run eagerly: {reason}", CONFIGURATION.refused(reason))
        return False

    def _begin(self, *, evaluates: bool) -> None:
        options, statistics, device = self._options, self._statistics, self._device
        if options.diagnose:
            self._steps = self._judged(evaluates=evaluates)
            return
        backend = statistics.backend = BACKENDS[device.type]
        if is_newer_than_tested():
            newer = f"torch {torch.__version__} was not tested yet; public ways are used"
            self._messages.say(f"{self._messages.who}: {newer}")
        if backend == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._open.enter_context(in_order(self._watch.optimizers, device))
            statistics.device = torch.cuda.get_device_name(device)
        pool = GraphPool(stream=self._stream, keep_graphs=True, backend=backend)
        pool.annotates = options.annotate
        if self._stream is not None:
            with self._on_stream():
                self._processes.renew()
        budget = MemoryBudget(device, options.memory)
        pool.is_roomy = lambda: budget.is_roomy
        parts = options, statistics, self._messages, pool, budget
        self._steps = self._steps_of(EvaluationCalls if evaluates else FunctionSteps, *parts)
        self._stopwatch = Stopwatch(device)
        self._timing = StepTiming(statistics, self._stopwatch, manual=True)

    def _judged(self, *, evaluates: bool) -> FunctionSteps:
        """Make what judges calls, over a backend that undoes all captures."""
        from lightning_graphs.device.emulated import UndoingBackend

        options = self._options
        backend = UndoingBackend(self._device, is_rehearsal=options.backend == "emulated")
        pool = GraphPool(keep_graphs=True, backend=backend)
        silent = Messages(Statistics(), say=nothing, warn=nothing)
        budget = MemoryBudget(torch.device("cpu"))  # of a GPU nothing is kept
        parts = options_of_notes(options), Statistics(), silent, pool, budget
        steps = self._steps_of(JudgedEvaluation if evaluates else JudgedCalls, *parts)
        steps.told, steps.calls = self._statistics, options.warmup_steps
        steps.findings = Findings(self._diagnosis)
        given = self.program, backend.device_type, options.optimizer_kernel
        judge_optimizers(self._diagnosis, self._watch.optimizers, *given)
        return steps

    def _steps_of(
        self,
        kind: type[_Steps],
        options: Options,
        statistics: Statistics,
        messages: Messages,
        pool: GraphPool,
        budget: MemoryBudget,
    ) -> _Steps:
        """Make what runs calls, with graphs in a pool."""
        self._open.callback(pool.close)
        watch = self._watch
        self._ranks = ranks = self._processes.ranks()
        ranks.on_leave = self._leave
        self._open.callback(ranks.close)
        if not ranks.are_one:
            close = weakref.WeakMethod(self.close)
            self._open.enter_context(ahead_of_destruction(lambda: (close() or nothing)()))
        self._assertions = OpenAssertions(
            lambda: watch.calls,
            bool if ranks.are_one else lambda: watch.calls % _LOOK == 0,
            pool.backend.synchronize,
            ranks,
            updates=watch.optimizes_itself,
        )
        self._open.callback(self._assertions.release)
        context = TrainingContext(
            module=self.program,
            options=options,
            pool=pool,
            statistics=statistics,
            messages=messages,
            policy=CapturePolicy(options, statistics, lambda: _MANY),
            budget=budget,
            ranks=ranks,
            watch=watch,
            assertions=self._assertions,
            no_whole_step="",
        )
        tolerance = Tolerance(self._device.type, None)
        verifier = Verifier(options.verify, tolerance, budget, ranks, messages, lambda: watch.calls)
        raises = options.on_failure == "raise"
        recovery = CallRecovery(self.program, watch, statistics, budget, ranks, raises=raises)
        return kind(context, verifier, self._around, recovery)

    # ------------------------------------------------------------------ calls

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run, capture or replay a call."""
        steps, timing = self._steps, self._timing
        assert steps is not None, "the calls are active"
        given = self.program.arguments.given(args, kwargs)
        if not self._is_only_gpu:  # graphs, streams and events belong to the model's GPU
            with torch.cuda.device(self._device):
                return self._run(steps, given, args, kwargs)
        if timing is None:
            return steps.run(given, args, kwargs)
        return self._run(steps, given, args, kwargs)

    def goes_on_eagerly(self) -> None:
        """Let all ranks run a call eagerly, if they decide together."""
        if self.is_active and not self._ranks.are_one:
            self._ranks.agree(EAGER, False)

    def _run(
        self, steps: FunctionSteps, given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        timing = self._timing
        if timing is None:
            return steps.run(given, args, kwargs)
        timing.begin((given,))
        returned = steps.run(given, args, kwargs)
        timing.end()
        if timing.is_complete():
            self._timing = None
            self._conclude()
        return returned

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """Surround a call that is no replay: it runs on the stream of captures."""
        with flattened_once(), self._on_stream():
            yield

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        return joined_stream(self._device, self._stream)

    # ------------------------------------------------------------------ results

    def judge(self) -> bool:
        """Put into the report what the times say; whether graphs pay off as far as they do."""
        if self._timing is not None:
            self._timing.read()
        if self._steps is None or self._options.diagnose or not self._stopwatch.meaningful:
            return True
        return self._statistics.judge()

    def _conclude(self) -> None:
        """Say what the graphs gain, once the timing is complete; end them if they gain nothing."""
        pays = self.judge()
        who, verdict = self._messages.who, self._statistics.verdict
        self._messages.say(summary_line(self._statistics.report(), who))
        if not pays and self._options.only_if_faster:
            self._ranks.leave(f"calls run eagerly from now on: {verdict}")

    def _leave(self, reason: str) -> None:
        self._end()  # the present call goes on
        self._messages.note(reason)

    def settle(self) -> None:
        """Raise what an assertion of earlier replays has failed by, on this rank."""
        error = None if self._assertions is None else self._assertions.find()
        if error is not None:
            raise error

    def close(self) -> None:
        """Release the graphs, and hand the optimizers back; may be called again."""
        self._end()
        self._watch.given = None  # the arguments of the last call

    def _end(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
        self._open.close()
