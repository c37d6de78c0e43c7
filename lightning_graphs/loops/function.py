"""``capture``: a function that trains or evaluates, as graphs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_graphs.errors import UnsupportedError
from lightning_graphs.loops.session import Calls
from lightning_graphs.policy.options import OptionError, Options
from lightning_graphs.report import Report
from lightning_graphs.report.messages import Statistics

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
    overlap: bool = False,
    optimizer_kernel: Literal["fused", "own"] = "fused",
    annotate: bool = False,
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

    What a call returns belongs to the caller. Python values among the arguments are a part of what
    a graph is for, as shapes are: ``step(batch, last=i % 4 == 3)`` has a graph for each of both.
    Learning rates may be scheduled outside of the function; graphs read the present ones.

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
        overlap: True: after some hundred replays a call is captured once more, with the gradients
            of weights and biases on a second stream of its graph, and the faster graph is kept.
        optimizer_kernel: ``"fused"``: Adam, AdamW and SGD run their fused kernels, whose results
            differ by rounding, unless they were made with ``fused=False`` or ``foreach=True``.
            ``"own"``: every optimizer keeps the kernel that torch chooses for it.
        annotate: Note which submodule, operator and line launches each kernel of a graph:
            ``step.report.name_trace`` writes that into traces of ``torch.profiler``.

    Raises:
        OptionError: an argument has an impossible value.
    """
    options = Options(
        scope="step",
        warmup_steps=warmup_steps,
        min_repeats=min_repeats,
        max_graphs=max_graphs,
        on_failure=on_failure,
        backend=backend,
        verify=verify,
        memory=memory,
        only_if_faster=only_if_faster,
        overlap=overlap,
        optimizer_kernel=optimizer_kernel,
        annotate=annotate,
    )
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
