"""Chooses the submodules to capture, and stands in place of their forward."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lightning_graphs.errors import ArgumentElsewhereError, GraphError, ReplayError, SignatureError
from lightning_graphs.policy.options import OptionError, Options
from lightning_graphs.private.torch import (
    COMPILED_CALL,
    caches_weights,
    in_transform,
    is_compiled,
    is_compiled_in_place,
    module_hooks,
)
from lightning_graphs.regions.calls import (
    CallDiffers,
    CaptureConfig,
    GraphedCall,
    StepKind,
    capture_alone,
    enter,
    release,
)
from lightning_graphs.regions.lifecycle import Lifecycle, Region
from lightning_graphs.regions.observe import Observation, ObservedCall, StepObserver
from lightning_graphs.watch.user_code import bound_by_hooks, obstacle_in

# ------------------ Selection of modules

_WORK = 5
"""How many nodes of autograd are worth a graph of their own: on an H200 the graph of a LayerNorm,
which is one and a cast, takes 1.6 to 2 times as long, that of a Linear with its casts, 8, 0.6 to
0.8 times."""

_BOUND = "a hook of torch.nn.utils sets a weight again in each call"


class ModuleSelection:
    """The submodules that are graphed.

    With ``modules`` those that it names. Without, the largest ones whose code can be captured;
    if one is refused, the modules that it calls take its place. Each call has graphs of its own.
    """

    def __init__(self, root: nn.Module, options: Options) -> None:
        self._root = root
        self._refused: set[nn.Module] = set()
        self._shown: dict[Hashable, str] = {}
        self._keys: dict[Hashable, set[Hashable]] = {}
        self._looked_at: set[StepKind] = set()
        self._work = _WORK if options.by_times and not options.modules else 0
        self._named = select(root, options.modules or (), options.exclude)
        self._left_out = _all_matches(_submodules(root), options.exclude, "exclude")
        if self._left_out and not (self._named or _with_parameters(root, self._left_out)):
            raise OptionError(
                "exclude must leave a submodule that has parameters.",
                f"got exclude={list(options.exclude)!r}, and every other one is inside of these, "
                "around them, or has none",
                "exclude less, or leave GraphCapture out",
            )

    def candidates(self) -> Mapping[str, nn.Module]:
        """Return names and modules that a step may call as a graph, as they are now.

        Nothing inside of a compiled or scripted module is among them: that runs none of its Python.
        """
        inside = [m for m in self._root.modules() if m is not self._root]
        closed = [m for m in inside if is_compiled(m) or _is_scripted(m)]
        out = {inner for m in closed for inner in m.modules() if inner is not m or _is_scripted(m)}
        now = _submodules(self._root) if self._named else {}
        self._named = {name: now.get(name, module) for name, module in self._named.items()}
        named = self._named or _with_parameters(self._root, self._left_out)
        return {name: module for name, module in named.items() if module not in out}

    def learn(self, observation: Observation) -> bool:
        """Remember calls that no backward graph can serve; return whether there are any."""
        found = [call for call in observation.calls if call.obstacle]
        self._shown.update(((call.ordinal, call.key()), call.obstacle) for call in found)
        return bool(found)

    def wants_another(self, kind: StepKind, observation: Observation) -> bool:
        """Whether a second step of a kind must show which arguments keep their shapes."""
        is_new = kind not in self._looked_at
        self._looked_at.add(kind)
        return is_new and any(call.follows_values for call in observation.calls)

    def steady_part(self, observation: Observation) -> float:
        """Return the part of the work in calls whose arguments surely keep their shapes."""
        nodes = [call.nodes for call in observation.calls if call.nodes is not None]
        total = max(end for _, end in nodes) - min(start for start, _ in nodes) if nodes else 0
        calls = [c for c in self.calls(observation) if not c.follows_values and c.nodes is not None]
        return sum(call.work for call in calls) / total if total else 1.0

    def leave_out_unsteady(
        self, kind: StepKind, observation: Observation, note: Callable[[str], None]
    ) -> list[nn.Module]:
        """Leave out, for good, modules whose arguments change from step to step of one kind."""
        found: dict[nn.Module, str] = {}
        calls = [call for call in observation.calls if call.module not in self._refused]
        for call in calls:
            keys = self._keys.setdefault((kind, call.module, call.ordinal), set())
            keys.add(call.key())
            if call.follows_values and len(keys) > 1:
                found[call.module] = call.name
        # Among many experts some have arguments of equal shapes twice by chance.
        kin = {_kin(call) for call in calls if call.module in found}
        alike = (call for call in calls if call.follows_values)
        found |= {call.module: call.name for call in alike if _kin(call) in kin}
        if found:
            why = f" ({observation.shaped_by})" if observation.shaped_by else ""
            note(
                f"calls of {_in_short(found)} run eagerly: their arguments have other shapes in "
                f"each step{why}; give them a fixed shape, such as a capacity for each expert"
            )
            self._refused |= set(found)
        return list(found)

    def refuse(self, module: nn.Module) -> None:
        """Leave a module out for good; what it calls may take its place."""
        self._refused.add(module)

    def calls(self, observation: Observation) -> list[ObservedCall]:
        """List the calls to try, those without autograd among them, in the order of the step."""
        return self._worthwhile(self._largest(_inside(None, observation), observation))

    def first(self, observation: Observation, note: Callable[[str], None]) -> list[ObservedCall]:
        """List the calls to try first; say what stays eager, and why."""
        called = {call.module for call in observation.calls}
        for name, module in self._named.items():
            if module not in called:
                note(_left_out(name, _not_called(name, module)))
        for call in observation.calls:
            if call.shaped_by and not any(c.shaped_by for c in _inside(call, observation)):
                note(f"`{call.name}` and what calls it run eagerly: it {_shaped(call)}")
        bound: dict[str, dict[nn.Module, str]] = {}
        for call in observation.calls:
            for weight, new in bound_by_hooks(call.module).items():
                if "." not in weight:
                    bound.setdefault(new, {})[call.module] = call.name
        for new, layers in bound.items():
            note(f"calls of {_in_short(layers)} run eagerly: {_BOUND}; use {new}")
        found = {c: self._largest([c], observation) for c in _inside(None, observation)}
        calls = [call for inside in found.values() for call in inside]
        graphed = {call.module for call in calls}
        for call, inside in found.items():
            if inside or call.module in self._refused:
                continue
            reason = self._obstacle(call, observation)
            if call.module in graphed:
                note(f"a call of `{call.name}` stays eager: it {self._reason(call)}")
            elif not (call.shaped_by or reason == _BOUND):  # which are said of the innermost
                note(_left_out(call.name, reason))
        return self._worthwhile(calls)

    def _worthwhile(self, calls: list[ObservedCall]) -> list[ObservedCall]:
        """Drop calls that compute too little for a graph of their own, unless all do."""
        return [call for call in calls if call.work >= self._work] or calls

    def _largest(self, calls: Sequence[ObservedCall], observed: Observation) -> list[ObservedCall]:
        """List these calls; those that cannot be graphs are replaced by the calls they make."""
        found: list[ObservedCall] = []
        for call in calls:
            if call.module in self._refused or self._obstacle(call, observed) is not None:
                found += self._largest(_inside(call, observed), observed)
            else:
                found.append(call)
        return found

    def _obstacle(self, call: ObservedCall, observed: Observation) -> str | None:
        reason = _shaped(call) if call.shaped_by else self._reason(call)
        return _obstacle(call.module, observed) or (reason and f"it {reason}")

    def _reason(self, call: ObservedCall) -> str | None:
        return call.obstacle or self._shown.get((call.ordinal, call.key()))


def _inside(call: ObservedCall | None, observation: Observation) -> list[ObservedCall]:
    """List the calls that this one made itself; for None, those that no observed call made."""
    return [inner for inner in observation.calls if inner.parent is call]


def _in_short(modules: Mapping[nn.Module, str]) -> str:
    first, *others = modules.values()
    return f"`{first}` and {len(others)} others" if others else f"`{first}`"


def _kin(call: ObservedCall) -> Hashable:
    """Return what modules of a list share: names but for numbers, and shapes."""
    shapes = tuple(parameter.shape for parameter in call.module.parameters())
    return re.sub(r"\d+", "*", call.name), shapes


def _shaped(call: ObservedCall) -> str:
    return f"contains an operator whose output shape depends on values: {call.shaped_by}"


def _left_out(name: str, reason: str | None) -> str:
    return f"`{name}` is not graphed: {reason or 'no module in it can be'}"


def _not_called(name: str, module: nn.Module) -> str:
    """Why no observed step has called a module that was named."""
    if _is_scripted(module):
        return "it is scripted and takes no hooks; name the module that calls it"
    if type(module).forward is nn.Module.forward:
        kind = type(module).__name__
        return f'a {kind} has no forward(); name its children: modules=["{name}.*"]'
    return "no observed step calls it"


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _with_parameters(root: nn.Module, left_out: set[str]) -> dict[str, nn.Module]:
    """Find submodules with parameters, but for excluded ones and those inside or around them."""
    return {
        name: module
        for name, module in root.named_modules()
        if name
        and not any(o == name or is_inside(name, o) or is_inside(o, name) for o in left_out)
        and next(module.parameters(), None) is not None
    }


def _obstacle(module: nn.Module, observation: Observation) -> str | None:
    """Why no call of a module is a graph, in a sentence; None if one may be."""
    if any(call.recomputed for call in observation.calls if call.module is module):
        return "it is recomputed in the backward pass (activation checkpointing)"
    if (obstacle := obstacle_in(module)) is not None:
        return obstacle
    if bound_by_hooks(module):
        return _BOUND
    outside = not is_compiled_in_place(module)  # what that compiles has its own hooks inside
    for name, inner in module.named_modules():
        if module_hooks(inner) and not (inner is module and outside):
            where = f"on `{name}` inside of it" if name else "inside of what is compiled"
            return f"it has a hook {where}, which a replay would not call"
    return None


_LIKELY = 0.5
"""How much a name must be like what was written to be offered, from 0 to 1."""


def select(
    root: nn.Module, patterns: Sequence[str], exclude: Sequence[str]
) -> dict[str, nn.Module]:
    """Find the submodules that ``patterns`` name and ``exclude`` does not."""
    # A pattern is matched against qualified names, one part between dots at a time, so that
    # ``encoder.layers.*`` means the layers and not what is inside of them. One that matches no name
    # may be the name of a class, or its dotted path if several classes have that name. Of a
    # module and one in it the outer one is meant, which has the other in its graphs.
    named = _submodules(root)
    wanted = _all_matches(named, patterns, "modules")
    left_out = _all_matches(named, exclude, "exclude")
    found = wanted - left_out
    if wanted and not found:
        raise OptionError(
            "exclude must leave something of modules.",
            f"got exclude={list(exclude)!r} for modules={list(patterns)!r}",
            "leave out exclude, or name other modules",
        )
    chosen = [n for n in named if n in found and not any(is_inside(n, outer) for outer in found)]
    for outer in chosen:
        inner = next((name for name in left_out if is_inside(name, outer)), None)
        if inner is not None:
            raise OptionError(
                "exclude must name no submodule of a graphed module, which is graphed as a whole.",
                f"got exclude={list(exclude)!r} with `{inner}`, which is inside of `{outer}` of "
                f"modules={list(patterns)!r}",
                f"name the submodules of `{outer}` instead: modules=['{outer}.*']",
            )
    return {name: named[name] for name in chosen}


def is_inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")


def _submodules(root: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in root.named_modules() if name}


def _all_matches(named: dict[str, nn.Module], patterns: Sequence[str], option: str) -> set[str]:
    return set().union(*(_matches(named, pattern, option) for pattern in patterns))


def _matches(named: dict[str, nn.Module], pattern: str, option: str) -> set[str]:
    by_name = {name for name in named if _fits(name.split("."), pattern.split("."))}
    if by_name:
        return by_name
    kinds = {type(module) for module in named.values()}
    paths = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    classes = {kind for kind in kinds if pattern in (kind.__name__, paths[kind])}
    if classes:
        return {name for name, module in named.items() if type(module) in classes}
    alike = [re.sub(r"\b\d+\b", "*", name) for name in named]
    known = dict.fromkeys([*alike, *named, *sorted({kind.__name__ for kind in kinds})])
    near = difflib.get_close_matches(pattern, known, cutoff=_LIKELY)
    children = [name for name in named if "." not in name]
    raise OptionError(
        f"{option} must name submodules or their classes.",
        f"got {pattern!r}, which matches none",
        f"write one of the nearest names: {', '.join(near)}"
        if near
        else f"write another name; the outermost ones are {', '.join(children)}",
    )


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


# ------------------ Dispatch of calls

MOVED = "a parameter or buffer of a graphed module has changed its memory"
_NONE = object()
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
_UNKNOWN = "no step that was captured calls it so often, or in this order"


@dataclass(slots=True)
class DispatchState:
    """What all graphed modules of a fit share."""

    config: CaptureConfig  # of calls without autograd, which may be replayed in any order
    stepping: bool = False  # a training step's own code is running, and no backward pass
    stale: str = ""  # why graphs may be invalid; empty if none is
    astray: bool = False  # a call was not given the tensor that its graph reads in place
    replays: bool = False  # the present step has graphs
    has_replayed: bool = False  # a call of the present step was replayed
    missed: str = ""  # why a call of the present step found no graph; empty if all did
    observer: StepObserver | None = None  # sees every call; None outside of observed steps
    # Weights of the present step's eager calls, by ``id``, whose gradients graphs write themselves
    eager_weights: set[int] = field(default_factory=set)
    seeded: bool = False  # an eager call has seeded cuDNN's random state, others follow from it


def _written(graphed: GraphedCall | None) -> set[int]:
    """Return the ``id`` of weights whose gradients a call's graph writes itself."""
    backward = None if graphed is None else graphed.callable.backward_pass
    direct = None if backward is None else backward.direct
    return set() if direct is None else set(map(id, direct.parameters))


class ForwardDispatcher(Region[Arguments, GraphedCall]):
    """Stands for a module's ``forward``, or for what ``module.compile()`` has put around it.

    It is there while a step's own code runs and at no other time: in hooks between steps the module
    can be scripted, traced, exported, compiled, copied and pickled as its author made it.

    A call with a graph is a replay; others run the original. In a training step the n-th call of a
    graphed module under autograd is the n-th of its graphed calls. Calls without autograd need no
    backward pass and share graphs by signature: they are a region. The observer of a step sees
    every call. One dispatcher serves all observations and captures of a fit: compiled code that
    calls the module finds it again.
    """

    def __init__(self, name: str, module: nn.Module, state: DispatchState) -> None:
        self.graphed_calls: Sequence[GraphedCall | None] = ()  # graphs of the present step's calls
        self.is_graphed = False  # calls may have graphs
        self._label = name
        self._module = module
        self._attributes = vars(module)
        self._state = state
        self._calls = 0
        self._missing = ""
        self._alone = Lifecycle[Arguments, GraphedCall](self, state.config.context, None)
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

    def begin(self, graphed_calls: Sequence[GraphedCall | None]) -> None:
        """Begin a step with graphs for these calls."""
        self.graphed_calls = graphed_calls
        self._calls = 0
        self.install()

    def install(self) -> None:
        """Take the place of the module's forward; if that was exchanged, graphs are invalid."""
        before = self._place, self._own
        self._look()  # its class may be another one by now
        if not self.is_graphed or before == (self._place, self._own):
            self._attributes[self._place] = self
        else:
            self._state.stale = f"the forward of `{self._label}` was exchanged"

    def uninstall(self) -> None:
        """Give the place back; may be called again."""
        if not self.is_installed:
            return
        if self._own is None:
            del self._attributes[self._place]
        else:
            self._attributes[self._place] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Copy the original, bound to the copied module: a step may copy what it trains."""
        copied: Callable[..., Any] = copy.deepcopy(self._original, memo)
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it sees nothing of this but the original
            return self._original(*args, **kwargs)
        observer = self._state.observer
        if observer is not None:
            begun = observer.begin(self._label, self._module, self._original, args, kwargs)
        answer = self._answer(args, kwargs)
        if answer is _NONE:
            answer = self._original(*args, **kwargs)
        if observer is not None:
            observer.end(begun, answer)
        return answer

    def _answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Replay the call and return its output; ``_NONE`` for a call without a graph."""
        state = self._state
        if not self.is_graphed or not state.stepping:
            return _NONE
        if not torch.is_grad_enabled():
            is_eager = in_transform() or caches_weights(self._module)
            graphed = None if is_eager else self._alone.plan_for((args, kwargs))
            return _NONE if graphed is None else self._replayed(graphed, args, kwargs)
        index = self._calls
        self._calls = index + 1
        self._missing = _UNKNOWN
        is_known = index < len(self.graphed_calls)
        graphed = self.graphed_calls[index] if is_known else None
        if graphed is None and is_known:  # it was seen, and stays eager
            return _NONE
        if state.eager_weights and not state.eager_weights.isdisjoint(_written(graphed)):
            return _NONE
        if graphed is not None and not graphed.holds():
            self._missing = graphed.what_differs()
        # Out of order it would overwrite what a pending backward pass needs.
        elif graphed is not None and graphed.callable.place > graphed.callable.order.last:
            answer = self._replayed(graphed, args, kwargs)
            if answer is not _NONE:
                return answer
        # Autograd adds what eager calls give of a weight as one sum. It comes first, as if no call
        # were a graph, if they are the last ones with that weight.
        state.eager_weights |= _written(graphed)
        if state.replays and not (state.missed or state.stale or state.seeded):
            state.missed = f"a call of `{self._label}` runs eagerly: {self._missing}"
        return _NONE

    def _replayed(self, graphed: GraphedCall, args: tuple[Any, ...], kwargs: Any) -> Any:
        if graphed.callable.is_seeded():
            self._state.seeded = True
            return _NONE
        try:
            answer = graphed.callable.call(args, kwargs)
        except SignatureError as error:
            self._missing = str(error)
            # After a call without a graph the next one is given other tensors, which is no news.
            follows = bool(self._state.missed or self._state.stale or self._state.seeded)
            self._state.astray |= isinstance(error, ArgumentElsewhereError) and not follows
            return _NONE
        except ReplayError as error:
            if graphed.callable.bring_back():
                return self._replayed(graphed, args, kwargs)
            self._missing = str(error)
            if graphed.is_as_captured:
                self._state.stale = MOVED
            return _NONE
        graphed.uses += 1
        graphed.record.replays += 1
        self._state.has_replayed = True
        return answer

    # ------------------------------------------------------------------ calls without autograd

    def key(self, call: Arguments) -> Hashable:
        observed = self._observed(call)
        # What earlier captures have read: a value that never returns is not worth a graph.
        plans = self._alone.cache.plans()
        read = frozenset(item for graphed in plans for item in graphed.guards.reads.now())
        return observed.key(), observed.kernels, read

    def _observed(self, call: Arguments) -> ObservedCall:
        this = self._label, self._module, self._original
        return ObservedCall(*this, *call, self._state.config.pool.backend.device_type)

    def capture(self, call: Arguments, key: Any) -> GraphedCall:
        state = self._state
        # Modules inside of this one run eagerly in its capture.
        before, state.stepping = state.stepping, False
        try:
            with state.config.context.policy.spending():
                return capture_alone(self._observed(call), state.config)
        finally:
            state.stepping = before

    def enter(self, plan: GraphedCall, call: Arguments) -> None:
        enter([plan], self._state.config.context.statistics, "; without autograd")

    def refuse(self, error: GraphError) -> None:
        context = self._state.config.context
        if isinstance(error, CallDiffers) and context.options.on_failure == "raise":
            raise error
        context.messages.note(f"`{self._label}` runs eagerly without autograd", error)

    def discard(self, plan: GraphedCall) -> None:
        release([plan], self._state.config.context.statistics)

    def forget(self) -> None:
        """Release the graphs that are not a step's."""
        self.graphed_calls = ()
        self._alone.cache.clear()

    def remove(self) -> None:
        """Release the graphs, and restore the module's own forward; may be called again."""
        self.forget()
        self.is_graphed = False
        self.uninstall()
