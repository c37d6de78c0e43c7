"""Stands in place of a graphed module's ``forward``, and decides for each call who answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_graphs.errors import (
    ArgumentElsewhereError,
    GraphError,
    ReplayError,
    SignatureError,
)
from lightning_graphs.private.torch import COMPILED_CALL, in_transform, is_compiled_in_place
from lightning_graphs.regions.calls import (
    CaptureConfig,
    GraphedCall,
    capture_alone,
    enter,
    release,
)
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.lifecycle import Lifecycle, Region
from lightning_graphs.regions.observe import ObservedCall, StepObserver
from lightning_graphs.regions.verified import CallDiffers

MOVED = "a parameter or buffer of a graphed module has changed its memory"
_NONE = object()
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
_UNKNOWN = "no step that was captured calls it so often, or in this order"


@dataclass(slots=True)
class DispatchState:
    """What all graphed modules of a fit share."""

    fit: TrainingContext
    means: CaptureConfig  # of calls without autograd, which may be replayed in any order
    stepping: bool = False  # a training step's own code is running, and no backward pass
    evaluating: bool = False  # a validation step's is, and it shall have graphs
    stale: str = ""  # why no graph may be right any longer; empty if all may
    astray: bool = False  # a call was not given the tensor that its graph reads in place
    replays: bool = False  # the present step has graphs
    has_replayed: bool = False  # a call of the present step was replayed
    missed: str = ""  # why a call of the present step found no graph; empty if all did
    observer: StepObserver | None = None  # is told of every call; None where nobody is
    seeded: bool = False  # a call made cuDNN's random state anew, eagerly; others follow from it


class ForwardDispatcher(Region[Arguments, GraphedCall]):
    """Stands for a module's ``forward``, or for what ``module.compile()`` has put around it.

    It is there while a step's own code runs and at no other time: in hooks between steps the module
    can be scripted, traced, exported, compiled, copied and pickled as its author made it.

    A call with a graph is a replay; others run the original. In a training step the n-th call of a
    graphed module under autograd has the n-th of its sites. Calls without autograd need no backward
    and share graphs by signature: they are a region. The observer of a step sees every call. One
    dispatcher serves all observations and captures of a fit: compiled code that calls the module
    knows it again.
    """

    def __init__(self, name: str, module: nn.Module, stage: DispatchState) -> None:
        self.sites: Sequence[GraphedCall | None] = ()  # graphs of the present step's calls
        self.is_graphed = False  # calls may have graphs
        self._label = name
        self._module = module
        self._attributes = vars(module)
        self._stage = stage
        self._calls = 0
        self._missing = ""
        self._alone = Lifecycle[Arguments, GraphedCall](self, stage.fit, None)
        self._look()

    def _look(self) -> None:
        self._place = COMPILED_CALL if is_compiled_in_place(self._module) else "forward"
        # What the module itself has in its place, unlike its class; None for nothing.
        self._own: Callable[..., Any] | None = self._attributes.get(self._place)
        self._original: Callable[..., Any] = getattr(self._module, self._place)
        self.__wrapped__ = self._original  # inspect.signature shows the original's arguments

    @property
    def is_installed(self) -> bool:
        return self._attributes.get(self._place) is self

    def begin(self, sites: Sequence[GraphedCall | None]) -> None:
        """Begin a step with graphs for these calls."""
        self.sites = sites
        self._calls = 0
        self.install()

    def install(self) -> None:
        """Take the place of the module's own; with another one there, no graph is right."""
        before = self._place, self._own
        self._look()  # its class may be another one by now
        if not self.is_graphed or before == (self._place, self._own):
            self._attributes[self._place] = self
        else:
            self._stage.stale = f"the forward of `{self._label}` was exchanged"

    def uninstall(self) -> None:
        """Give the place back; may be called again."""
        if not self.is_installed:
            return
        if self._own is None:
            del self._attributes[self._place]
        else:
            self._attributes[self._place] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The original, bound to the copied module: a step may copy what it trains."""
        copied: Callable[..., Any] = copy.deepcopy(self._original, memo)
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it sees nothing of this but the original
            return self._original(*args, **kwargs)
        observer = self._stage.observer
        if observer is not None:
            begun = observer.begin(self._label, self._module, self._original, args, kwargs)
        answer = self._answer(args, kwargs)
        if answer is _NONE:
            answer = self._original(*args, **kwargs)
        if observer is not None:
            observer.end(begun, answer)
        return answer

    def _answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a replay returns; nothing for a call that has none."""
        stage = self._stage
        if not self.is_graphed or not (stage.stepping or stage.evaluating):
            return _NONE
        if not torch.is_grad_enabled():
            site = None if in_transform() else self._alone.plan_for((args, kwargs))
            return _NONE if site is None else self._replayed(site, args, kwargs)
        if not stage.stepping:
            return _NONE
        index = self._calls
        self._calls = index + 1
        self._missing = _UNKNOWN
        site = self.sites[index] if index < len(self.sites) else None
        if site is None and index < len(self.sites):  # a call that was seen, and stays eager
            return _NONE
        if site is not None and not site.holds():
            self._missing = site.what_differs()
        # Out of order it would overwrite what a pending backward pass needs.
        elif site is not None and site.graphed.is_next:
            answer = self._replayed(site, args, kwargs)
            if answer is not _NONE:
                return answer
        if stage.replays and not (stage.missed or stage.stale or stage.seeded):
            stage.missed = f"a call of `{self._label}` runs eagerly: {self._missing}"
        return _NONE

    def _replayed(self, site: GraphedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if site.graphed.is_seeded():
            self._stage.seeded = True
            return _NONE
        try:
            answer = site.graphed.call(args, kwargs)
        except SignatureError as error:
            self._missing = str(error)
            # After a call without a graph the next one is given other tensors, which is no news.
            follows = bool(self._stage.missed or self._stage.stale or self._stage.seeded)
            self._stage.astray |= isinstance(error, ArgumentElsewhereError) and not follows
            return _NONE
        except ReplayError as error:
            if site.graphed.bring_back():
                return self._replayed(site, args, kwargs)
            self._missing = str(error)
            if site.is_as_captured:
                self._stage.stale = MOVED
            return _NONE
        site.uses += 1
        site.record.replays += 1
        self._stage.has_replayed = True
        return answer

    # ------------------------------------------------------------------ calls without autograd

    def key(self, call: Arguments) -> Hashable:
        observed = self._observed(call)
        # What earlier captures have read: a value that never returns is not worth a graph.
        plans = self._alone.cache.plans()
        read = frozenset(item for site in plans for item in site.baked.reads.now())
        return observed.key(), observed.kernels, read

    def _observed(self, call: Arguments) -> ObservedCall:
        this = self._label, self._module, self._original
        return ObservedCall(*this, *call, self._stage.means.pool.backend.device_type)

    def capture(self, call: Arguments, key: Any) -> GraphedCall:
        stage = self._stage
        # Modules inside of this one answer by themselves.
        before = stage.stepping, stage.evaluating
        stage.stepping = stage.evaluating = False
        try:
            return capture_alone(self._observed(call), stage.means)
        finally:
            stage.stepping, stage.evaluating = before

    def enter(self, plan: GraphedCall, call: Arguments) -> None:
        enter([plan], self._stage.fit.statistics, "; without autograd")

    def refuse(self, error: GraphError) -> None:
        fit = self._stage.fit
        if isinstance(error, CallDiffers) and fit.options.on_failure == "raise":
            raise error
        fit.messages.note(f"`{self._label}` runs eagerly without autograd", error)

    def discard(self, plan: GraphedCall) -> None:
        release([plan], self._stage.fit.statistics)

    def forget(self) -> None:
        """Release the graphs that are not a step's."""
        self.sites = ()
        self._alone.cache.clear()

    def remove(self) -> None:
        """Have no graphs any longer, and give the module its own back; may be called again."""
        self.forget()
        self.is_graphed = False
        self.uninstall()
