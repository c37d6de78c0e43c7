"""The doctor: observes real steps, and lists everything that hinders their capture."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from types import CodeType
from typing import Any

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import (
    CLOCK,
    COLLECTIVE,
    DRAWN,
    DYNAMIC_SHAPE,
    HOST_COPY,
    HOST_DATA,
    HOST_READ,
    OLD_GRADIENTS,
    READ_BEFORE,
    STORED,
    STORED_OUTSIDE,
    Obstacle,
    has_known_remedy,
)
from lightning_graphs.errors import CaptureError
from lightning_graphs.lightning import words as findings
from lightning_graphs.lightning.evaluation_runner import EvaluationWatch, remedy_for
from lightning_graphs.lightning.later import NotedCalls
from lightning_graphs.lightning.logs import LOGGED_NUMBER, LoggedNumbers
from lightning_graphs.lightning.manual import ScheduleWatch
from lightning_graphs.lightning.private import takes_no_closure
from lightning_graphs.lightning.ranks import COLLECTIVE_ALONE
from lightning_graphs.lightning.strategy import (
    StrategyCalls,
    calls_of,
    copies_on_host,
    intercepted,
)
from lightning_graphs.lightning.trainer import TrainerWatch
from lightning_graphs.policy.options import Options
from lightning_graphs.private.callsite import (
    CallSite,
    CallSiteFinder,
    calls_observed,
    definition_of,
    frames_from,
    returned_by,
    site_naming,
)
from lightning_graphs.private.exchange import TURN, replaced
from lightning_graphs.private.generators import PythonGenerator
from lightning_graphs.private.torch import (
    announced_as_cuda_capture,
    current_autograd_node,
    deepcopies_cloned,
    is_compiled,
)
from lightning_graphs.regions.evaluation import outside_inference_mode
from lightning_graphs.regions.step import refuse_iterator
from lightning_graphs.report.diagnosis import Diagnosis, Effect
from lightning_graphs.values.memory import tensors_returned
from lightning_graphs.values.signature import Modes, Signature
from lightning_graphs.values.snapshot import PythonSnapshot
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.assertions import Question, truths_exchanged
from lightning_graphs.watch.batch import BatchValues
from lightning_graphs.watch.choices import NotedChoices
from lightning_graphs.watch.environment import Environment, clocks_exchanged
from lightning_graphs.watch.mirrors import reads_noted
from lightning_graphs.watch.noted import (
    BatchReads,
    BatchValue,
    Call,
    Noted,
    NotedNumbers,
    NotedValue,
    Observer,
    are_live,
    changes,
    parts_of,
)
from lightning_graphs.watch.places import place_of, trained_parameters
from lightning_graphs.watch.reads import ReadsInCalls, iterators_in
from lightning_graphs.watch.tracers import (
    SETTERS,
    DrawingFunction,
    calls_followed,
    drawing_functions,
    drawn_by,
    draws_exchanged,
)
from lightning_graphs.watch.user_code import (
    CompiledCode,
    UnregisteredTensors,
    bound_by_hooks,
    iter_objects,
)

_SCALAR = "aten._local_scalar_dense.default"  # by which a branch reads the device
_BETWEEN: Effect = "stays eager between them"


class Doctor:
    """Observes the first training steps of a fit, which run eagerly and train as without it.

    It takes the place of the strategy's methods until :meth:`finish`.

    Args:
        options: The callback's options; ``warmup_steps`` steps are observed.
        reason: Why the fit is not captured at all; empty if it may be.
        no_whole_step: Why its steps are no whole graphs; empty if they may be.
    """

    def __init__(
        self,
        trainer: Trainer,
        watch: TrainerWatch,
        calls: StrategyCalls,
        options: Options,
        reason: str,
        no_whole_step: str,
    ) -> None:
        self.diagnosis = Diagnosis()
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self._calls = calls
        self._all = options.warmup_steps
        self._rehearsal = options.backend == "emulated"
        no_whole_step = "" if options.by_submodules else no_whole_step
        falls_back = bool(no_whole_step) and options.scope != "step"
        self._only_submodules = options.by_submodules or falls_back
        self._calls_any = False  # a submodule that could be a graph
        self._bound = ReadsInCalls(module)
        self._compiled = CompiledCode()
        self._compiled.runs = any(map(is_compiled, module.modules()))  # as far as is known
        self._between: set[CallSite] = set()
        self._active = self._finished = False
        device = trainer.strategy.root_device
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        self._sites = sites = CallSiteFinder()
        self._observer = Observer(self._note, self._look, generators, sites, self._rehearsal)
        self._watch = watch
        told = functools.partial(self._note, _SCALAR, HOST_READ)
        self._choices = NotedChoices(device, self._observer.looking_away, told)
        self._step = definition_of(self._watch.function)
        self._returned = returned_by(self._watch.function)
        self._numbers = NotedNumbers(self._used, follow=not self._only_submodules)
        known = self._observer, self._numbers, self.diagnosis, self._all
        self._later = NotedCalls(self._watch.metrics, self._watch.kept, *known)
        self._logs = LoggedNumbers(
            self._is_live,
            self._observer.looking_away,
            lambda metric: self._later.metric_logged(metric, sites.here()),
        )
        self._schedules = ScheduleWatch(self._used, sites, self._observer.looking_away)
        self._drawn: set[str] = set()
        self._following: set[tuple[str, str]] = set()  # files and functions; see `_followed`
        self._drawing_functions: set[DrawingFunction] = set()  # have drawn
        self._functions: set[DrawingFunction] = set()  # are called by replays
        self._values = BatchValues(self._watch.function)
        self._reads = BatchReads(self._observer, sites)
        self._signatures: list[Signature] = []
        # Path that a step took -> the calls of the last step on it, and its index
        self._earlier: dict[Hashable, tuple[list[Call], int]] = {}
        self._before: tuple[PythonSnapshot, ...] = ()  # the state before the last step
        self._has_moved = False  # a value in it changed, in a step or between two
        given = reason, no_whole_step, self._only_submodules, self._rehearsal
        findings.judge_fit(self.diagnosis, trainer, *given, options.optimizer_kernel)
        self._methods = intercepted(trainer.strategy, self)

    def finish(self) -> None:
        """Give the strategy back and print what was found; may be called again."""
        if self._finished:
            return
        self._finished = True
        self._methods.close()
        self._later.finish()
        changing = {} if self._is_followed else self._logs.changing
        for name, site in changing.items():
            if (site.file, site.function) in self._following:
                continue
            self.diagnosis.add(LOGGED_NUMBER, f"self.log({name!r})", site)
        if not self._only_submodules:
            self._reads.judge(self.diagnosis, self._values.unread, self._step)
        elif self.diagnosis.steps and not self._calls_any:
            self.diagnosis.add(findings.NO_SUBMODULE, "scope='modules'")
        known = {(signature.specs, signature.extra) for signature in self._signatures}
        if len(known) == len(self._signatures) > 2:
            change = "; ".join(self._signatures[-2].diff(self._signatures[-1]))
            self.diagnosis.add(findings.CHANGING_SHAPE, "batch", observed=change[:400])
        is_told = self.diagnosis.kind == "training" or self.diagnosis.findings
        if self._trainer.is_global_zero and is_told:
            print(self.diagnosis)

    # ------------------------------------------------------------------ strategy methods

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Observe a step; after the last one, finish and run the step unobserved."""
        if self.diagnosis.steps == self._all:
            self.finish()
            return self._calls.training_step(*args, **kwargs)
        self.diagnosis.steps += 1
        self._later.begin()
        batch, *rest = args
        self._numbers.begin()
        watched = self._watch.arguments(rest, self._numbers.number)
        # The observer sees what torch draws.
        self._has_moved |= any(any(held.changes()) for held in self._before)
        around = self._watch.environment(on_use=self._met, seen=())
        around.outside.on_clock = functools.partial(self._used, CLOCK)
        around.outside.on_iterator = functools.partial(self._used, DRAWN)
        attributes = PythonSnapshot(around.held)
        self._before = attributes, around.outside.contents
        self._observer.begin(self._judge_batch(batch))
        compiled = CompiledCode()
        with TURN, compiled.watching(), self._watching(around), self._reads.of_step(batch) as noted:
            returned = self._run(self._calls.training_step, noted, *watched, **kwargs)
        self._compiled = compiled
        self._judge_state(attributes, around)
        self._judge_returned(returned)
        self._compare()
        return tree_map_only(NotedValue, lambda noted: noted.value, returned)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Observe a backward pass, but not the hooks around it."""
        if self._active or self._finished:
            return self._calls.backward(closure_loss, optimizer, *args, **kwargs)
        plugin = self._trainer.precision_plugin
        backward = plugin.backward

        def observed(*args: Any, **kwargs: Any) -> Any:
            with self._observing():
                return self._run(backward, *args, **kwargs)

        with replaced(plugin, "backward", observed):
            return self._calls.backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Let the strategy step: the optimizer's obstacles are known without observation."""
        steps = takes_no_closure(closure)
        self._schedules.behind(optimizer)
        with self._observer.looking_away() if steps else contextlib.nullcontext():
            return self._calls.optimizer_step(optimizer, closure, model, **kwargs)

    @calls_observed
    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what is observed; it bounds the frames that are searched for user code."""
        return function(*args, **kwargs)

    # ------------------------------------------------------------------ watching

    @contextlib.contextmanager
    def _observing(self) -> Iterator[None]:
        self._active = True
        try:
            # Libraries that ask whether a capture runs leave out what it refuses.
            with (
                announced_as_cuda_capture(),
                truths_exchanged(self._asked),
                self._observer,
            ):
                yield
        finally:
            self._active = False

    @contextlib.contextmanager
    def _watching(self, around: Environment) -> Iterator[None]:
        """Watch a whole ``training_step``, except for its calls of loggers and metrics."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._logs.watching(self._module))
            stack.enter_context(self._later.watching())
            reads = self._bound if self._only_submodules else None
            stack.enter_context(around.reading(reads, self._numbers.number))
            stack.enter_context(around.old_gradients())
            if not self._only_submodules:
                stack.enter_context(deepcopies_cloned())
            stack.enter_context(draws_exchanged(self._drawing, self._functions))
            if not self._compiled.runs:
                stack.enter_context(calls_followed())
                clock = functools.partial(self._numbers.number, obstacle=CLOCK)
                stack.enter_context(clocks_exchanged(self._watch.own, clock))
            if not self._only_submodules:
                named = ((f"self.{n}", b) for n, b in self._module.named_buffers())
                stack.enter_context(reads_noted(named, self._followed))
                stack.enter_context(self._schedules.watching(self._watch.schedulers))
            if self._only_submodules:
                stack.enter_context(register_module_forward_pre_hook(self._look_at_call))
                hook = register_module_forward_hook(self._bound.leave, always_call=True)
                stack.enter_context(hook)
            stack.enter_context(self._observing())
            stack.enter_context(self._later.of_torch())
            stack.enter_context(around.acting())
            yield

    def _followed(self, code: CodeType) -> AbstractContextManager[None]:
        """Note code that reads a number which the state holds, as replays do on the host.

        A library function that is known for what it makes of one is not followed.
        """
        if has_known_remedy(code):
            return contextlib.nullcontext()
        self._following.add((code.co_filename, code.co_name))
        return self._observer.looking_away()

    def _asked(self, asked: Question) -> Any:
        """Answer code that asks for a truth, or compares a number, only to raise or to choose."""
        if self._observer.silent or current_autograd_node() is not None:
            return None
        with self._observer.looking_away():
            return asked.answer(self._module.device, self._choices.note)

    def _look_at_call(self, module: nn.Module, given: object) -> None:
        self._bound.enter(module, given)
        if not self._calls_any and module is not self._module:
            self._calls_any = next(module.parameters(), None) is not None

    @property
    def _traces_host(self) -> bool:
        return not (self._only_submodules or self._compiled.runs)

    @property
    def _is_inside(self) -> bool:
        """Whether the forward of a submodule runs now, not the code between submodules."""
        run, frames = Doctor._run.__code__, frames_from(sys._getframe(1))
        step = takewhile(lambda frame: frame.f_code is not run, frames)
        owners = (f.f_locals.get("self") for f in step if f.f_code.co_name == "forward")
        return any(isinstance(o, nn.Module) and o is not self._module for o in owners)

    @property
    def _effect(self) -> Effect:
        return _BETWEEN if self._only_submodules and not self._is_inside else "eager step"

    def _note(self, operator: str, obstacle: Obstacle, site: CallSite) -> None:
        if obstacle is HOST_COPY and any(f.kind == HOST_DATA.kind for f in self.diagnosis.at(site)):
            return  # one remedy mends both
        if obstacle is COLLECTIVE and not (self._only_submodules and self._is_inside):
            return  # a part of whole steps
        if self._active and not self._only_submodules:
            run = Doctor._run.__code__
            stack = [*takewhile(lambda f: f.f_code is not run, frames_from(sys._getframe(1)))]
            if self._later.postpones((operator, obstacle, site), stack):
                return
        made = obstacle in (HOST_COPY, HOST_DATA) and current_autograd_node() is None
        effect, where = self._effect, ""
        if (made or self._observer.answered) and self._traces_host:
            if obstacle is DRAWN:
                return  # replays draw, too
            effect = "runs ahead of the graph"
        elif not site.line:
            effect, where = "eager step", "in the backward pass"
        self.diagnosis.add(obstacle, operator, site, observed=where, effect=effect)

    def _look(self, function: Any, args: Any, kwargs: Any) -> list[float]:
        """Look at a call of torch; return the numbers in it that stay live in a replay."""
        for value in parts_of((args, kwargs), BatchValue):
            value.read()
        numbers = parts_of((args, kwargs), Noted)
        call, device = (function, args, kwargs), self._module.device
        live = numbers and are_live(call, device, ahead=self._traces_host)
        if live and not self._only_submodules:
            return [number.value for number in numbers]
        for number in numbers:
            number.bare()
        if self._only_submodules and not self._is_inside:
            self._between.add(self._sites.here())
        return []

    def _is_live(self, number: Any) -> bool:
        """Tell whether a captured step would log the present number: a counter or a rate."""
        groups = (g for optimizer in self._trainer.optimizers for g in optimizer.param_groups)
        return self._numbers.is_live(number) or any(number is group["lr"] for group in groups)

    def _used(self, obstacle: Obstacle, name: str, site: CallSite | None = None) -> None:
        if self._later.is_used(name):
            return
        if obstacle is DRAWN and self._traces_host and self._drawing_functions - self._functions:
            self._functions |= self._drawing_functions  # replays call them: so does the next step
        elif self._active and not self._observer.silent:
            self.diagnosis.add(obstacle, name, site or self._sites.here(), effect=self._effect)

    def _met(self, obstacle: Obstacle, name: str, _: str, site: CallSite) -> None:
        # Of manual optimization only graphs of submodules have other gradients than an eager step.
        by_hand = not self._module.automatic_optimization
        is_old = by_hand and not (self._only_submodules and self._is_inside)
        if not (is_old and obstacle is OLD_GRADIENTS):
            self._used(obstacle, name, site)

    def _drawing(
        self, name: str, function: Callable[..., Any], generator: PythonGenerator
    ) -> Callable[..., Any]:
        """Make what takes the place of a function that draws, with tracers as results."""

        def draw(*args: Any, **kwargs: Any) -> Any:
            given = tree_map_only(Noted, attrgetter("value"), (args, kwargs))
            once = functools.partial(drawn_by, function, *given)
            value = once()
            value = value.item() if isinstance(value, numpy.generic) else value
            if self._active and not self._observer.silent and not name.endswith(SETTERS):
                self._drawing_functions.update(drawing_functions(generator))
                self._drawn.add(generator.name)
                if not self._traces_host or value is None:  # which is drawn in place
                    self._used(DRAWN, name)
                else:
                    return self._numbers.drawn(name, generator, once, value)
            return value

        return draw

    # ------------------------------------------------------------------ judging

    def _judge_batch(self, batch: Any) -> list[Tensor]:
        """Take a batch's signature; return its tensors of which the host has a copy."""
        tensors: list[Tensor] = []
        with self._refusals_noted("batch", self._step):
            refuse_iterator(batch)
            modes = Modes.current(self._trainer.strategy.root_device.type)
            signature, tensors = self._values.signature(batch, modes)
            self._signatures.append(signature)
        copies = copies_on_host(self._trainer, tensors)
        return [t for t, copy in zip(tensors, copies, strict=True) if copy is not None]

    def _judge_returned(self, returned: Any) -> None:
        self._observer.tell_used(leaves_of(returned, Tensor), "it is returned")
        loss = None
        if self._module.automatic_optimization:
            with self._refusals_noted("training_step", self._returned):
                loss = self._watch.loss_of(returned)
                if not (self._only_submodules or leaves_of(returned, Noted)):
                    tensors_returned(returned)

        self._choices.judge(None if self._only_submodules else loss)

    @contextlib.contextmanager
    def _refusals_noted(self, what: str, site: CallSite) -> Iterator[None]:
        try:
            yield
        except CaptureError as error:
            obstacle = Obstacle(error.rule, error.remedy, kind="contract")
            site = self._values.taken_at if what == "batch" and self._values.taken_at else site
            self.diagnosis.add(obstacle, what, site, observed=error.observed)

    def _judge_state(self, attributes: PythonSnapshot, around: Environment) -> None:
        """Judge the side effects of a step in Python."""
        outside = around.outside
        # Lightning itself sets the second in toggle_optimizer.
        metrics = (f"self.{name}." for name, _ in self._watch.metrics.apart())
        ours = ("self._metric_attributes", "self._param_requires_grad_state", *metrics)
        trained, whole = trained_parameters(self._trainer.optimizers), not self._only_submodules
        found = []
        for change in attributes.changes():
            stored = whole and place_of(change, attributes, trained)  # by replays, too
            if not (stored or change.name.startswith(ours)):
                bound_anew = isinstance(change.now, Tensor) and not whole
                if not (bound_anew and self._bound.is_served(change.owner, change.key)):
                    found.append((READ_BEFORE if bound_anew else STORED, change.name))
        found += [(STORED_OUTSIDE, name) for name in outside.contents.changed()]
        iterators = iterators_in(around.held)
        found += [(DRAWN, n) for n in iterators if n.rpartition(".")[2] in outside.words]
        bound = bound_by_hooks(self._module)
        for obstacle, name in found:
            site = named if (named := site_naming(name, outside.codes)).line else self._step
            in_step = self._only_submodules and site.function == "training_step"
            if new := bound.get(name.removeprefix("self.")):
                remedy = "use what replaces this hook of torch.nn.utils, and sets no attribute"
                obstacle, in_step = replace(STORED, remedy=remedy, code=f"{new}(layer)"), False
            self.diagnosis.add(obstacle, name, site, effect=_BETWEEN if in_step else "eager step")
        for name in sorted({*around.generators.drawn()} - self._drawn):  # its line is not known
            self.diagnosis.add(DRAWN, name, self._step)
        self._later.judge()

    @property
    def _is_followed(self) -> bool:
        """Whether only counters and rates can explain numbers that differ between steps."""
        hindered = any(finding.effect == "eager step" for finding in self.diagnosis.findings)
        other = self._has_moved or self._drawn or self._values.unread
        return not (other or hindered or self._only_submodules)

    def _compare(self) -> None:
        """Report numbers that differ from those of an earlier step on the same path."""
        if len(self._signatures) < self.diagnosis.steps:
            return
        answers = self._observer.answers if self._traces_host else ()
        signature = replace(self._signatures[-1], extra=tuple(answers))
        self._signatures[-1], calls = signature, [*self._observer.calls]
        dynamic = any(f.kind == DYNAMIC_SHAPE.kind for f in self.diagnosis.findings)
        way = signature.specs, signature.extra, tuple(self._numbers.outcomes), self._reads.way
        is_followed = self._is_followed
        before, step = self._earlier.get(way, (calls, -1))
        for change in changes(before, calls):
            site = change.site
            consequence = dynamic and change.whole
            others = [f for f in self.diagnosis.at(site) if f.operator != change.operator]
            backward = self._only_submodules and not site.line  # its forward has a line
            followed = is_followed and not change.whole  # C code reads whole ones
            state = change.whole and (site.file, site.function) in self._following
            known = consequence or others or backward or followed or state
            known = known or site in self._later.sites
            if not (known or self._reads.unseen(step, site)):
                effect = _BETWEEN if site in self._between else "eager step"
                row = findings.CHANGING_NUMBER, change.operator, site
                self.diagnosis.add(*row, observed=change.what, effect=effect)
        if self.diagnosis.steps > 1 or self._all < 3:  # the first step fills caches
            self._earlier[way] = calls, self.diagnosis.steps - 1


class EvaluationDoctor(Doctor):
    """Observes the first steps of an evaluation; its findings are told if there are any.

    The steps run outside of inference mode, in which operators of torch are not seen one by one.

    Args:
        name: The method of strategy and module, one of
            :data:`~lightning_graphs.lightning.evaluation_runner.EVALUATIONS`.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, options: Options, name: str
    ) -> None:
        self._name, strategy = name, trainer.strategy
        self._evaluation = EvaluationWatch(trainer, module, name)
        calls = replace(calls_of(strategy), training_step=getattr(strategy, name))
        whole = replace(options, scope="step", modules=None, exclude=())
        super().__init__(trainer, self._evaluation, calls, whole, "", "")
        self._methods.close()
        self._methods.enter_context(replaced(strategy, name, self.training_step))
        self.diagnosis.findings.clear()  # those are of training
        self.diagnosis.kind = name.removesuffix("_step")

    def finish(self) -> None:
        """Give the strategy back and print what was found; may be called again."""
        super().finish()
        self._name_hooks()

    def _note(self, operator: str, obstacle: Obstacle, site: CallSite) -> None:
        if obstacle is COLLECTIVE and self._calls_of_own(site):
            obstacle = COLLECTIVE_ALONE
        super()._note(operator, obstacle, site)

    def _calls_of_own(self, site: CallSite) -> bool:
        """Whether a step of one of several ranks calls a collective, and not DDP or ``log``."""
        return self._trainer.world_size > 1 and bool(site.line)

    def _name_hooks(self) -> None:
        for finding in self.diagnosis.findings:
            finding.remedy = remedy_for(self._name, finding.remedy)
            finding.code = remedy_for(self._name, finding.code)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Observe a step; after the last one, finish and run the step unobserved."""
        self._evaluation.given = args
        module = self._module
        held = UnregisteredTensors(module, iter_objects(module)).tensors
        known = (*module.parameters(), *module.buffers(), *held)
        if any(tensor.is_inference() for tensor in known):  # they can be written in it alone
            self.finish()
        if self._finished:
            return self._calls.training_step(*args, **kwargs)
        with outside_inference_mode():
            # A batch that was moved to a GPU was made in that mode
            own = [t.clone() if t.is_inference() else t for t in leaves_of(args, Tensor)]
            returned = super().training_step(*substitute(args, own), **kwargs)
        self._name_hooks()
        return returned

    def _judge_returned(self, returned: Any) -> None:
        """Judge nothing but objects: replays return values of the batch and counters, too."""
        if not (leaves_of(returned, Noted) or leaves_of(returned, BatchValue)):
            with self._refusals_noted(self._name, self._returned):
                tensors_returned(returned)
