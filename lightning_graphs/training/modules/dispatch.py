"""What stands in place of a graphed module's ``forward``: for each call it decides who answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import nn

from lightning_graphs.core.cache import PlanCache
from lightning_graphs.core.kernel_choice import KernelChoice
from lightning_graphs.core.signature import Modes, Signature
from lightning_graphs.core.torch_private import in_transform
from lightning_graphs.core.values import value_of_class
from lightning_graphs.errors import (
    ArgumentElsewhereError,
    CaptureError,
    ReplayError,
    SignatureError,
)
from lightning_graphs.training.investment import Investment
from lightning_graphs.training.modules.capture import Means, capture_alone
from lightning_graphs.training.modules.checking import CallChecks, CallDiffers
from lightning_graphs.training.modules.observed_call import ObservedCall
from lightning_graphs.training.modules.sites import Baked, CallRefused, Site, enter
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Statistics

_NONE = object()
_MOVED = "a value that its code reads has changed within the step"
_SWITCHED = "the step has set switches of torch otherwise: "
_UNKNOWN = "no step that was captured calls it so often, or in this order"
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(slots=True)
class Stage:
    """What all graphed modules of a fit share.

    Attributes:
        options: The callback's options.
        means: For captures of calls without autograd, which may be replayed in any order.
        statistics: Where decisions are counted and said.
        checks: Compares new graphs with the modules' own code.
        investment: Decides what is worth a capture.
        stepping: A training step's own code is running, and no backward pass.
        stale: A parameter has moved: no graph may be right any longer.
        astray: A call was not given the tensor that its graph reads in place.
        elsewhere: Finds graphs for a call (the n-th of a module) that the present ones do not fit,
            and goes on with them; None while a step runs eagerly.
        missed: Why a call of the present step found no graph; empty if all did.
    """

    options: Options
    means: Means
    statistics: Statistics
    checks: CallChecks
    investment: Investment
    stepping: bool = False
    stale: bool = False
    astray: bool = False
    elsewhere: Callable[[nn.Module, int, Arguments], Site | None] | None = None
    missed: str = ""


class GraphedForward:
    """Stands for ``module.forward``: a call with a graph is replayed, others run the original.

    In a training step the n-th call of the module under autograd has the n-th of its sites. Calls
    without autograd need no backward and share graphs by signature.

    Args:
        name: Qualified name of the module.
        module: The module.
        stage: Shared with the other modules of the fit.

    Attributes:
        sites: Graphs of the present step's calls.
    """

    def __init__(self, name: str, module: nn.Module, stage: Stage) -> None:
        self._own: Callable[..., Any] | None = vars(module).get("forward")
        self.__wrapped__ = module.forward  # inspect.signature shows its arguments
        self.sites: Sequence[Site | None] = ()
        self._name = name
        self._module = module
        self._stage = stage
        self._calls = 0
        self._missing = ""
        self._without_autograd: PlanCache[Signature, tuple[Site, Baked]] = PlanCache(
            stage.investment, _replays, self._release, capacity=stage.options.max_graphs
        )
        vars(module)["forward"] = self

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own ``forward``: an instance's, or that of its class as it is now."""
        kind = type(self._module)
        return self._own or value_of_class(kind, "forward").__get__(self._module, kind)

    def begin(self, sites: Sequence[Site | None]) -> None:
        """Begin a step with these graphs."""
        self.sites = sites
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the module."""
        stage = self._stage
        if torch.is_grad_enabled():
            if stage.stepping:
                return self._answer_in_step(args, kwargs)
        elif stage.stepping or stage.options.eval_graphs:
            return self._answer_without_autograd(args, kwargs)
        return self.original(*args, **kwargs)

    def _answer_in_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        index = self._calls
        self._calls = index + 1
        self._missing = _UNKNOWN
        answer: Any = _NONE
        if index < len(self.sites):
            site = self.sites[index]
            if site is None:  # a call that was seen, and stays eager
                return self.original(*args, **kwargs)
            kernels = KernelChoice.now()
            if kernels != site.call.kernels:
                self._missing = _SWITCHED + ", ".join(site.call.kernels.changes(kernels))
            elif not site.is_current:
                self._missing = _MOVED
            # Out of order it would overwrite what a pending backward pass needs.
            elif site.graphed.is_next:
                answer = self._replayed(site, args, kwargs)
        elsewhere = self._stage.elsewhere
        if answer is _NONE and elsewhere is not None and not self._stage.stale:
            site = elsewhere(self._module, index, (args, kwargs))
            if site is not None:
                answer = self._replayed(site, args, kwargs)
            else:
                self._stage.missed = f"a call of `{self._name}` runs eagerly: {self._missing}"
        return self.original(*args, **kwargs) if answer is _NONE else answer

    def _replayed(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            answer = site.graphed(*args, **kwargs)
        except SignatureError as error:
            self._missing = str(error)
            # After a call without a graph the next one is given other tensors, which is no news.
            follows = bool(self._stage.missed) or self._stage.stale
            self._stage.astray |= isinstance(error, ArgumentElsewhereError) and not follows
            return _NONE
        except ReplayError as error:
            self._missing = str(error)
            self._stage.stale |= site.is_as_captured
            return _NONE
        site.record.replays += 1
        return answer

    def _answer_without_autograd(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if in_transform():
            return self.original(*args, **kwargs)
        plans = self._without_autograd.plans()
        fits = (s for s, baked in plans if s.accepts(args, kwargs) and baked.is_current)
        site = next(fits, None) or self._captured_without_autograd(args, kwargs)
        answer = _NONE if site is None else self._replayed(site, args, kwargs)
        return self.original(*args, **kwargs) if answer is _NONE else answer

    def _captured_without_autograd(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Site | None:
        stage = self._stage
        device_type = stage.means.pool.backend.device_type
        call = ObservedCall.now(self._name, self._module, args, kwargs, device_type)
        modes = Modes.current(device_type)
        # What earlier captures have read: a value that never returns is not worth a graph.
        plans = self._without_autograd.plans()
        read = frozenset(item for _, baked in plans for item in baked.now())
        extra = (call.training, call.frozen, call.kernels, read)
        try:
            signature, _ = Signature.of(args, kwargs, modes=modes, extra=extra)
            if not self._without_autograd.is_due(signature):
                return None
            baked = Baked(stage.means.root, stage.means.own)
            try:
                with baked.watched([self._module]):
                    site = capture_alone(call, stage.means, baked)
                self._verify(site)
            except (CallRefused, CallDiffers):
                self._without_autograd.refuse(signature)
                raise
        except (CaptureError, CallDiffers) as error:
            if isinstance(error, CallDiffers) and stage.options.on_failure == "raise":
                raise
            stage.statistics.note(f"`{self._name}` runs eagerly without autograd: {error}")
            return None
        enter([site], stage.statistics, "; without autograd")
        self._without_autograd.add(replace(signature, extra=(*extra, baked.values)), (site, baked))
        return site

    def _verify(self, site: Site) -> None:
        try:
            self._stage.checks.check_site(site)
        except BaseException:
            site.release(self._stage.statistics)
            raise

    def _release(self, plan: tuple[Site, Baked]) -> None:
        plan[0].release(self._stage.statistics)

    def forget(self) -> None:
        """Release every graph."""
        self.sites = ()
        self._without_autograd.clear()

    def remove(self) -> None:
        """Give the module its own ``forward`` back; may be called again."""
        self.forget()
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._own is not None:
                vars(self._module)["forward"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The original, bound to the copied module, which no graph knows."""
        copied: Callable[..., Any] = copy.deepcopy(self.original, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is the original; whoever loads it needs nothing of this package."""
        return getitem, ([self.original], 0)


def _replays(plan: tuple[Site, Baked]) -> int:
    return plan[0].record.replays


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's own ``forward``, whether or not something stands in its place."""
    forward = module.forward
    return forward.original if isinstance(forward, GraphedForward) else forward
