"""What stands in place of a graphed module's ``forward``: for each call it decides who answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_graphs.core.arguments.signature import KernelChoice, Modes, Signature
from lightning_graphs.core.private.torch import in_transform
from lightning_graphs.errors import (
    ArgumentElsewhereError,
    CaptureError,
    ReplayError,
    SignatureError,
)
from lightning_graphs.training.costs.cache import PlanCache
from lightning_graphs.training.fit import Fit
from lightning_graphs.training.modules.capture import Means, capture_alone
from lightning_graphs.training.modules.checking import CallChecks, CallDiffers
from lightning_graphs.training.modules.entry import Entry
from lightning_graphs.training.modules.observation import ObservedCall
from lightning_graphs.training.modules.sites import Baked, CallRefused, Site, enter

MOVED = "a parameter or buffer of a graphed module has changed its memory"
_NONE = object()
_CHANGED = "a value that its code reads has changed within the step"
_SWITCHED = "the step has set switches of torch otherwise: "
_UNKNOWN = "no step that was captured calls it so often, or in this order"
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(slots=True)
class Stage:
    """What all graphed modules of a fit share."""

    fit: Fit
    means: Means  # for captures of calls without autograd, which may be replayed in any order
    checks: CallChecks  # compares new graphs with the modules' own code
    stepping: bool = False  # a training step's own code is running, and no backward pass
    evaluating: bool = False  # a validation step's is, and it shall have graphs
    stale: str = ""  # why no graph may be right any longer; empty if all may
    astray: bool = False  # a call was not given the tensor that its graph reads in place
    # Finds graphs for a call (the n-th of a module) that the present ones do not fit, and goes on
    # with them; None while a step runs eagerly.
    elsewhere: Callable[[nn.Module, int, Arguments], Site | None] | None = None
    missed: str = ""  # why a call of the present step found no graph; empty if all did
    # Another captured step makes the call that found none: it is no reason to search.
    foreseen: bool = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let modules answer by themselves while the body captures one that has them inside."""
        before = self.stepping, self.evaluating
        self.stepping = self.evaluating = False
        try:
            yield
        finally:
            self.stepping, self.evaluating = before


class GraphedForward(Entry):
    """Lets a call with a graph be a replay; others run the original.

    In a training step the n-th call of the module under autograd has the n-th of its sites. Calls
    without autograd need no backward and share graphs by signature.
    """

    def __init__(self, name: str, module: nn.Module, stage: Stage) -> None:
        super().__init__(module)
        self.sites: Sequence[Site | None] = ()  # graphs of the present step's calls
        self._label = name
        self._stage = stage
        self._calls = 0
        self._missing = ""
        self._without_autograd: PlanCache[Signature, tuple[Site, Baked]] = PlanCache(
            stage.fit.investment,
            self._release,
            capacity=stage.fit.options.max_graphs,
            uses=_replays,
        )

    def begin(self, sites: Sequence[Site | None]) -> None:
        self.sites = sites
        self._calls = 0
        self.install()

    def install(self) -> None:
        """Take the place of the module's own; with another one there, no graph is right."""
        if self.is_as_found:
            super().install()  # its class may be another one by now
        else:
            self._look()
            self._stage.stale = f"the forward of `{self._label}` was exchanged"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it sees nothing of this but the original
            return self.original(*args, **kwargs)
        stage = self._stage
        if torch.is_grad_enabled():
            if stage.stepping:
                return self._answer_in_step(args, kwargs)
        elif stage.stepping or stage.evaluating:
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
                self._missing = _CHANGED
            # Out of order it would overwrite what a pending backward pass needs.
            elif site.graphed.is_next:
                answer = self._replayed(site, args, kwargs)
        elsewhere = self._stage.elsewhere
        if answer is _NONE and elsewhere is not None and not self._stage.stale:
            site = elsewhere(self._module, index, (args, kwargs))
            if site is not None:
                answer = self._replayed(site, args, kwargs)
            elif not (self._stage.missed or self._stage.foreseen):  # others follow from it
                self._stage.missed = f"a call of `{self._label}` runs eagerly: {self._missing}"
        return self.original(*args, **kwargs) if answer is _NONE else answer

    def _replayed(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            answer = site.graphed(*args, **kwargs)
        except SignatureError as error:
            self._missing = str(error)
            # After a call without a graph the next one is given other tensors, which is no news.
            follows = bool(self._stage.missed or self._stage.stale)
            self._stage.astray |= isinstance(error, ArgumentElsewhereError) and not follows
            return _NONE
        except ReplayError as error:
            self._missing = str(error)
            if site.is_as_captured:
                self._stage.stale = MOVED
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
        call = ObservedCall.now(self._label, self._module, args, kwargs, device_type)
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
                with stage.aside():
                    with baked.watched([self._module]):
                        site = capture_alone(call, stage.means, baked)
                    self._verify(site)
            except CallRefused:
                self._without_autograd.refuse(signature)
                raise
        except CaptureError as error:
            if isinstance(error, CallDiffers) and stage.fit.options.on_failure == "raise":
                raise
            stage.fit.statistics.note(f"`{self._label}` runs eagerly without autograd", error)
            return None
        enter([site], stage.fit.statistics, "; without autograd")
        self._without_autograd.add(replace(signature, extra=(*extra, baked.values)), (site, baked))
        return site

    def _verify(self, site: Site) -> None:
        try:
            self._stage.checks.check_site(site)
        except BaseException:
            site.release(self._stage.fit.statistics)
            raise

    def _release(self, plan: tuple[Site, Baked]) -> None:
        plan[0].release(self._stage.fit.statistics)

    def forget(self) -> None:
        self.sites = ()
        self._without_autograd.clear()

    def remove(self) -> None:
        """Release every graph and give the module its own back; may be called again."""
        self.forget()
        self.uninstall()


def _replays(plan: tuple[Site, Baked]) -> int:
    return plan[0].record.replays
