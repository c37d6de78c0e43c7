"""What must be as it was at the capture, next to the batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import attrgetter, getitem, gt, is_, itemgetter
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.device.rules import FILLED, MOVING_VALUE, Obstacle
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import named_at, site_in
from lightning_graphs.private.engine import tensor_hook_tables, tensor_hooks
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.generators import CapturedDropout, dropout_state_of
from lightning_graphs.private.torch import hook_tables, hooks_registered, step_hook_tables
from lightning_graphs.report.messages import listed
from lightning_graphs.values.guards import OF_TENSORS, change_words, is_list, is_number, is_tensor
from lightning_graphs.values.memory import AddressGuard
from lightning_graphs.values.signature import KERNEL_CHOICES, BackendFlags, Signature
from lightning_graphs.values.tree import held_in_containers, tensors_inside
from lightning_graphs.watch.host import HostReads
from lightning_graphs.watch.mechanism import Check, Instruction

# ------------------ Keys and checks

Values = tuple[tuple[str, Any], ...]
"""Names, and the value of each."""
_MODES = "train/eval mode of "


def moved_values(before: Values, now: Values) -> list[str]:
    """Describe changed values, a line each; two of them may have one name."""
    gone = dict((Counter(before) - Counter(now)).keys())
    new = Counter(now) - Counter(before)
    return [f"{name}: {change_words(gone[name], value)}" for name, value in new if name in gone]


def tensors_moved(before: Values, now: Values) -> list[str]:
    """Return the names bound to other tensors now; none if there are other names."""
    if [name for name, _ in before] != [name for name, _ in now]:
        return []
    pairs = [(n, a, b) for (n, a), (_, b) in zip(before, now, strict=True) if a != b]
    return [name for name, *both in pairs if all(map(is_tensor, both))]


def names_moved(before: Values, now: Values, is_kind: Callable[[Any], bool]) -> list[str]:
    """Return the names of values of one kind that are others now."""
    known = dict(before)
    pairs = ((name, known.get(name), value) for name, value in now)
    return [name for name, *both in pairs if all(map(is_kind, both)) and both[0] != both[1]]


class Phase(NamedTuple):
    """Which part of an accumulation window a micro-batch is."""

    zeroing: bool  # gradients are zeroed before its backward
    stepping: bool  # the optimizer steps after its backward
    window: int  # ``accumulate_grad_batches``: the loss is divided by it
    loader: int = 0  # index of the data loader among those of an evaluation

    def __str__(self) -> str:
        parts = ["first"] * self.zeroing + ["last"] * self.stepping
        return f"{' and '.join(parts) or 'inner'} micro-batch of {self.window}"


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """The state of the fit that a capture freezes."""

    phase: Phase  # part of the accumulation window
    # Name and value of what the optimizer's groups hold, but for the live learning rates
    hyper_parameters: Values
    training: tuple[bool, ...]  # the train/eval flag of every module
    # Of the plain attributes that captured steps have read, and of the trainer's clipping
    attributes: Values
    # Which of the optimizer's parameters have one from earlier steps, if the step reads it
    gradients: tuple[bool, ...]

    def diff(self, other: CaptureKey) -> list[str]:
        """Describe what changed, a line each; empty only when equal."""
        lines = []
        if self.phase.loader != other.phase.loader:
            lines.append(f"data loader: {self.phase.loader} -> {other.phase.loader}")
        elif self.phase != other.phase:
            lines.append(f"gradient accumulation: {self.phase} -> {other.phase}")
        if len(self.hyper_parameters) != len(other.hyper_parameters):
            lines.append("the optimizer's parameter groups changed")
        else:
            pairs = zip(self.hyper_parameters, other.hyper_parameters, strict=True)
            lines += [f"{name}: {a!r} -> {b!r}" for (name, a), (_, b) in pairs if a != b]
        if self.training != other.training:
            flips = sum(a != b for a, b in zip(self.training, other.training, strict=False))
            lines.append(f"{_MODES}{flips} module{'s' * (flips != 1)}")
        lines += moved_values(self.attributes, other.attributes)
        if self.gradients != other.gradients and self.phase == other.phase:
            lines.append("which parameters have gradients from earlier steps")
        return lines


def signature_in_words(signature: Signature) -> str:
    """Shorten a step's signature to its tensors, and its part in an accumulation window."""
    phase = conditions_of(signature).phase
    part = f"; {phase}" if phase.window != 1 else ""
    return tensors_in_words(signature) + part + (f"; loader {phase.loader}" if phase.loader else "")


def tensors_in_words(signature: Signature) -> str:
    """List the tensors of a call: ``x f32[32,128], y i64[32]``."""
    pairs = zip(signature.tensor_names, signature.specs, strict=True)
    return ", ".join(f"{_bare(n)} {spec.against(spec)}" for n, spec in pairs) or "no tensor"


def _bare(name: str) -> str:
    # A batch in a dictionary is known by its keys.
    path = name.removeprefix("batch")
    is_key = path[:2] in ("['", '["') and path[-2:] in ("']", '"]') and path.count("[") == 1
    return path[2:-2] if is_key else name


def key_changes(before: Signature, after: Signature) -> list[str]:
    """Describe what tells two captures apart, a line each."""
    lines = [line for line in before.diff(after) if not line.startswith("extra: ")]
    lines += conditions_of(before).diff(conditions_of(after)) + stored_changes(before, after)
    reads = [part for key in (before, after) for part in key.extra if isinstance(part, HostReads)]
    if any(line.startswith(_MODES) for line in lines):  # they say it of all modules at once
        lines = [line for line in lines if ".training: " not in line]
    return lines + (reads[0].changes(reads[1]) if len(reads) == 2 else [])


def stored_changes(before: Signature, after: Signature) -> list[str]:
    """Describe which values have changed that steps store and read, a line each."""
    stored = [part for key in (before, after) for part in key.extra if isinstance(part, Signature)]
    return stored[0].diff(stored[1]) if len(stored) == 2 else []


READ_OTHERWISE = Obstacle(
    "A graph has the values that a step reads on the host, and these are others in most batches.",
    "pad to a few fixed lengths; or compute with a mask of the lengths instead of packing, which "
    "keeps them on the device",
    kind="changing-shape",
)


def read_otherwise(
    before: Signature, after: Signature, _: Iterable[CodeType] = ()
) -> CaptureError | None:
    """Return the refusal of steps that read other values on the host; None of other steps."""
    reads = [part for key in (before, after) for part in key.extra if isinstance(part, HostReads)]
    if len(reads) < 2 or without_values(before) != without_values(after):
        return None
    found = reads[0].changes(reads[1])
    pairs = [p for p in zip(*(read.values for read in reads), strict=False) if p[0] != p[1]]
    are_real = all(type(value) is float for pair in pairs for value in pair)  # others come back
    if not found or not are_real or not site_in(found[0]).line:
        return None
    return READ_OTHERWISE.refused(found[0])


def moving(before: Signature, after: Signature, codes: Iterable[CodeType]) -> CaptureError | None:
    """Return the refusal of steps that find other values of user code; None of other steps."""
    moved = [line.removeprefix("structure: ") for line in _moved(before, after)]
    if not moved:
        return None
    if _LIST.match(moved[0]):
        return FILLED.refused(listed(moved) + named_at(moved[0], codes))
    return MOVING_VALUE.refused(listed(moved) + named_at(moved[0], codes))


_LIST = re.compile(r"\S+: (list|deque|set) of \d+ ")
"""The description of a list that steps compute with, and that has another length now."""


def numbers_moved(before: Signature, after: Signature) -> list[str]:
    """Return the names of numbers that user code finds to be others."""
    old, new = conditions_of(before).attributes, conditions_of(after).attributes
    return names_moved(old, new, is_number)


def _moved(before: Signature, after: Signature) -> list[str]:
    """Describe changed values of user code; empty if anything else changed as well."""
    old, new = conditions_of(before), conditions_of(after)
    same = replace(old, phase=new.phase, gradients=new.gradients, attributes=new.attributes)
    if replace(before, extra=(same,)) != replace(after, extra=(new,)):
        return []
    lines = replace(same, attributes=old.attributes).diff(new) + stored_changes(before, after)
    return [line for line in lines if not line.startswith(OF_LIBRARIES)]


def conditions_of(signature: Signature) -> CaptureKey:
    conditions: CaptureKey = signature.extra[0]  # type: ignore[assignment]
    return conditions


def without_values(signature: Signature) -> Hashable:
    """Return the part of a key without guarded values: shapes, phase, which gradients exist."""
    conditions = conditions_of(signature)
    return replace(signature, extra=(conditions.phase, conditions.gradients))


def each(get: Callable[[Any], Any], owners: Sequence[Any]) -> Callable[[], list[Any]]:
    """Make a function that reads something of each owner, for a check."""
    return lambda: list(map(get, owners))


def where_moved(check: Check, compute: Instruction) -> Instruction:
    """Make an instruction that computes if the check finds another value."""
    read, known = check

    def instruction() -> None:
        if read() != known:
            compute()

    return instruction


def in_turn(instructions: Sequence[Instruction]) -> Instruction | None:
    """Make one instruction of several; None of none."""
    if len(instructions) < 2:
        return next(iter(instructions), None)

    def instruction() -> None:
        for each in instructions:
            each()

    return instruction


class CodeOfModules:
    """The code that calls of modules in a tree run: classes, and instances' own forwards."""

    def __init__(self, roots: Iterable[nn.Module], *, graphed: bool = False) -> None:
        roots = list(roots)
        named = [item for root in roots for item in root.named_modules(prefix=type(root).__name__)]
        inside = [item for item in named if not (graphed and item[1] in roots)]
        self._names = [f"class of `{name}`" for name, _ in named]
        self._names += [f"forward of `{name}`" for name, _ in inside]
        self._modules = [module for _, module in named]
        self._tables = [vars(module) for _, module in inside]
        self.known = self.now()

    def now(self) -> list[Any]:
        """Return the class of each module, and the forward that an instance has itself."""
        return [*map(type, self._modules), *map(dict.get, self._tables, repeat("forward"))]

    def exchanged(self) -> str:
        """Describe what was exchanged since; empty if nothing was."""
        if (now := self.now()) == self.known:
            return ""
        found = zip(self._names, now, self.known, strict=True)
        return next(f"the {name} was exchanged" for name, a, b in found if a != b)


_NO_NUMBERS = frozenset({"params", "param_names", "initial_lr"})
_State = list[tuple[Any, dict[str, Any], list[Any]]]


def _hashable(value: Any) -> Any:
    """Return the value of an entry of a group as a part of a key."""
    if isinstance(value, dict):
        return dict, *((key, _hashable(held)) for key, held in value.items())
    if type(value) in (list, tuple):
        return tuple(map(_hashable, value))
    return (set, frozenset(value)) if isinstance(value, set) else value


class OptimizerGuard:
    """Notices other groups, other state and hooks of an optimizer whose step is captured."""

    def __init__(
        self,
        optimizer: Optimizer,
        live: Collection[str] = ("lr",),  # numbers of no capture's key
    ) -> None:
        self._optimizer = optimizer
        self.groups, self.state = optimizer.param_groups, optimizer.state
        self._epoch = -1
        self._count = len(self.groups)
        self._lists = [group["params"] for group in self.groups]
        self._lengths = list(map(len, self._lists))
        self._members = list(chain.from_iterable(self._lists))
        # Parameter, its state and what was in it at the last capture; one of each group among them
        self._known: _State | None = None
        self._further = 0  # entries of its state that are no parameter's
        self._witnesses: _State = []
        self._hooks = step_hook_tables(optimizer)
        # Groups, and names of what a capture freezes in them
        self._moving = frozenset(live) - {"lr"}
        live = _NO_NUMBERS.union(live)
        frozen = [(g, k) for g in self.groups for k in g if k not in live and not is_tensor(g[k])]
        self._frozen = [group for group, _ in frozen], [name for _, name in frozen]
        given = [g[k] for g, k in frozen]
        inside = chain.from_iterable(v for v in given if type(v) in (list, tuple))
        self._has_tables = any(isinstance(v, (dict, set)) for v in given)
        self._has_tables |= any(isinstance(v, (list, dict, set)) for v in inside)
        # Tensors in containers of its state, and in its attributes, at the last capture
        self._inside: list[Tensor] = []

    def numbers(self) -> Values:
        """Return names and values that a capture freezes in the groups; learning rates are live."""
        found = map(getitem, *self._frozen)
        if self._has_tables:
            values = list(map(_hashable, found))
        else:  # without a call for each
            values = [tuple(value) if type(value) is list else value for value in found]
        return tuple(zip(self._frozen[1], values, strict=True))

    def changed(self, epoch: int) -> str:
        """Why the graphs of its step are invalid; empty as long as they are valid."""
        if self.is_replaced(epoch):
            return "the optimizer's state or parameter groups were replaced"
        return "a step hook was registered on the optimizer" if any(self._hooks) else ""

    def is_replaced(self, epoch: int) -> bool:
        """Whether ``load_state_dict``, ``add_param_group`` or user code has exchanged its state.

        Such code exchanges the tensors of a whole group: within an epoch, one parameter of each
        group is compared for all.
        """
        optimizer = self._optimizer
        if (
            optimizer.param_groups is not self.groups
            or optimizer.state is not self.state
            or len(self.groups) != self._count
        ):
            return True
        lists = list(map(itemgetter("params"), self.groups))
        if (
            epoch == self._epoch
            and self._holds(self._witnesses)
            and all(map(is_, lists, self._lists))
            and list(map(len, lists)) == self._lengths
            and (self._known is None or len(self.state) == len(self._known) + self._further)
        ):
            return bool(self._inside) and self._has_others_inside()
        members = list(chain.from_iterable(lists))
        same = len(members) == len(self._members) and all(map(is_, members, self._members))
        if not (same and self._holds(self._known or [])) or self._has_others_inside():
            return True
        self._epoch = epoch
        if self._known is not None:  # a parameter that was unfrozen has made its own
            self.remember()
        return False

    def _holds(self, known: _State) -> bool:
        for parameter, state, values in known:
            if self.state.get(parameter) is not state or len(state) < len(values):
                return False
            if not all(map(is_, values, self._lasting(state) if self._moving else state.values())):
                return False
        return True

    def _tensors_inside(self) -> Iterator[Tensor]:
        """List the tensors that are held otherwise than as an entry of a parameter's state."""
        for key, state in self.state.items():
            if isinstance(state, dict):
                yield from tensors_inside([*held_in_containers(state.values())])
            elif key not in self._moving:
                yield from tensors_inside(state)
        for name, value in vars(self._optimizer).items():
            if name not in OF_TENSORS:
                yield from tensors_inside(value)

    def _has_others_inside(self) -> bool:
        found = [*self._tensors_inside()]
        known = self._inside
        return self._known is not None and not (
            len(found) == len(known) and all(map(is_, found, known))
        )

    def _lasting(self, state: dict[str, Any]) -> list[Any]:
        """List what is in a parameter's state, but for numbers that replays move."""
        return [value for key, value in state.items() if key not in self._moving]

    @property
    def is_captured(self) -> bool:
        """Whether a capture reads and writes these."""
        return self._known is not None

    def remember(self) -> None:
        """Remember the tensors of a capture: others in their place are a replacement."""
        entries = [(p, state) for p, state in self.state.items() if isinstance(state, dict)]
        self._known = [(p, state, self._lasting(state)) for p, state in entries]
        self._further = len(self.state) - len(entries)
        self._inside = [*self._tensors_inside()]
        firsts = {next(filter(self.state.__contains__, params), None) for params in self._lists}
        self._witnesses = [known for known in self._known if known[0] in firsts]


# ------------------ Replay guards

OF_LIBRARIES = ("gradient clipping", "DDP syncs buffers", *KERNEL_CHOICES)
"""Names among :meth:`ReplayGuards.attributes` that are no value of user code."""
_TRAINING = attrgetter("training")


class Facts(Protocol):
    """What was learned of the code of a fit."""

    reads: Any
    kept: Any  # gradients that user code sees
    places: Any  # where code stores something
    moved: list[str]  # what was found to keep changing


@dataclass(frozen=True, slots=True)
class ClientGuards:
    """What a client of the engine knows of the coming step."""

    phase: Callable[[], Phase]
    epoch: Callable[[], int]  # between two of them the optimizer's state may be exchanged
    flags: tuple[Callable[[], Any], Callable[[], Any]]  # for the first of :data:`OF_LIBRARIES`
    of_all: Sequence[tuple[Check, Callable[[], str]]]  # what makes all graphs invalid, and why


class ReplayGuards:
    """Reads the key of the coming step, and finds what makes all graphs of the fit invalid.

    It reads by tables of functions. A plan compares their results with those of its capture; if
    they differ, these functions give the reason as well.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[OptimizerGuard],  # those whose steps are in the graphs
        parameters: Sequence[Tensor],  # whose gradients of earlier steps the step may read
        facts: Facts,
        client: ClientGuards,
    ) -> None:
        self._facts = facts
        self._module = module
        self._client = client
        self._known: Values = ()  # what attributes were last
        self.look_again()
        self._modules = list(module.modules())
        self._optimized = parameters
        self._optimizers = optimizers
        self._numbers: Callable[[], Values] = self._numbers_of_all
        if len(optimizers) == 1:
            self._numbers = optimizers[0].numbers
        code, hooks, kept = CodeOfModules([module]), _Hooks(module), facts.kept
        # What makes all graphs invalid, and why; the first two take longest
        self._of_all: tuple[tuple[Check, Callable[[], str]], ...] = (
            ((self.are_in_place, True), self._moved),
            ((code.now, code.known), code.exchanged),
            ((hooks.have_changed, False), lambda: "a hook was registered or removed"),
            *client.of_all,
            ((self._optimizer_changed, ""), self._optimizer_changed),
            ((kept.holds, True), self._gradient_kept),
        )

    def look_again(self) -> None:
        self._guard = AddressGuard.of_module(self._module, exempt=self._facts.places.exempt)

    def reason_to_rebind(self, *, has_graphs: bool = True) -> str:
        """Why all graphs of the fit are invalid; empty as long as they are valid.

        Without graphs, tensors and code are not compared, which takes longest.
        """
        for (read, known), why in self._of_all[0 if has_graphs else 2 :]:
            if read() != known and (reason := why()):
                return reason
        return ""

    def are_in_place(self) -> bool:
        """Return whether tensors have the memory of the capture, or could be moved back there."""
        guard = self._guard
        return guard.holds() or (guard.bring_back() and guard.holds())

    def _moved(self) -> str:
        learned = self._facts.places.learn_moved(self._guard.moved())
        return "" if learned else self._guard.difference()

    def _optimizer_changed(self) -> str:
        for guard in self._optimizers:
            if reason := guard.changed(self._client.epoch()):
                return reason
        return ""

    def _numbers_of_all(self) -> Values:
        return tuple(chain.from_iterable(guard.numbers() for guard in self._optimizers))

    def _gradient_kept(self) -> str:
        kept = self._facts.kept
        kept.are_copied, kept.is_noticed = True, False
        return "a gradient of an earlier step is kept, and is copied now"

    # ------------------------------------------------------------------ what tells steps apart

    def are_as_in(self, known: CaptureKey) -> bool:
        """Whether attributes and other values that code reads are as they were at a capture."""
        return self.attributes() == known.attributes

    def conditions(self) -> CaptureKey:
        """Read what the coming step depends on next to its batch."""
        reads = self.attributes(), self._with_gradients()
        return CaptureKey(self._client.phase(), self._numbers(), self._are_training(), *reads)

    def checks(self, key: CaptureKey, *, reads_old: bool = True) -> tuple[Check, ...]:
        """Return what a plan with this key compares before its replays.

        Args:
            reads_old: The step may read gradients of earlier ones. Else it drops those that there
                were at the capture, and some of them may be missing.
        """
        gradients: Check = (self._with_gradients, key.gradients)
        if not reads_old:
            gradients = (lambda: any(map(gt, self._with_gradients(), key.gradients)), False)
        own, values = key.attributes[: len(OF_LIBRARIES)], key.attributes[len(OF_LIBRARIES) :]
        return (
            (self._client.phase, key.phase),
            (self._numbers, key.hyper_parameters),
            (self._are_training, key.training),
            *([gradients] if key.gradients else ()),
            (_same_values(self._facts.reads.now, values), True),
            (self._of_libraries, tuple(value for _, value in own)),
            *(check for check, _ in reversed(self._of_all)),
        )

    def _are_training(self) -> tuple[bool, ...]:
        return tuple(map(_TRAINING, self._modules))

    def _with_gradients(self) -> tuple[bool, ...]:
        """Find which parameters have gradients of earlier steps, if the step reads them."""
        zeroing, stepping, *_ = self._client.phase()
        if zeroing or not stepping or not self._optimized:
            return ()
        return tuple([p.grad is not None for p in self._optimized])

    def _of_libraries(self) -> tuple[Any, ...]:
        clipping, synced = self._client.flags
        return (clipping(), synced(), *BackendFlags.now())

    def attributes(self) -> Values:
        """Return names and present values of the attributes in the key."""
        values = self._facts.reads.now()
        if values is not self._known:
            before, self._known = self._known, values
            bound, filled = tensors_moved(before, values), names_moved(before, values, is_list)
            places = self._facts.places
            if (bound and places.learn_bound(bound)) or (filled and places.learn_named(filled)):
                self._facts.moved += [f"{name} keeps changing" for name in bound or filled]
                self._known = values = self._facts.reads.now()
        return (*zip(OF_LIBRARIES, self._of_libraries(), strict=True), *values)


def _same_values(read: Callable[[], Values], known: Values) -> Callable[[], bool]:
    """Make a check that values begin with known ones; what later captures read comes after them.

    The values are one object as long as none of them has changed.
    """
    latest: Values | None = None

    def holds() -> bool:
        nonlocal latest
        now = read()
        if now is not latest:
            if now[: len(known)] != known:
                return False
            latest = now
        return True

    return holds


class _Hooks:
    """The hooks on the modules and parameters of a fit, which a capture makes part of a graph."""

    def __init__(self, module: nn.Module) -> None:
        tables = (table for inner in module.modules() for table in hook_tables(inner))
        self._tables = [*{id(table): table for table in tables}.values()]
        self._parameters = list(module.parameters())
        self._known = self._now()
        of_tensors = (table for p in self._parameters for table in tensor_hook_tables(p))
        self._in_use: list[Any] = [table for table in (*self._tables, *of_tensors) if table]
        self._counts = list(map(len, self._in_use))
        self._number = hooks_registered()

    def _now(self) -> list[tuple[object, ...]]:
        return [*map(tuple, self._tables), *(tuple(tensor_hooks(p)) for p in self._parameters)]

    def have_changed(self) -> bool:
        """Whether any was registered or removed since; as a rule it is one comparison."""
        if list(map(len, self._in_use)) != self._counts:
            return True
        number = hooks_registered()
        if number == self._number:
            return False
        if self._now() != self._known:
            return True
        self._number = number
        return False


# ------------------ Recurrent layers

_PATIENCE = 2
"""How many steps in a row may begin with a new seed before one is captured nevertheless: a layer
that no step calls leaves it unused."""


def flattened_once() -> AbstractContextManager[None]:
    """Let recurrent layers stay where they are when they are flattened again.

    cuDNN wants their weights in one piece of memory. Models flatten them in each forward, as
    ``nn.DataParallel`` demands, and each time the weights move, which no graph can follow.
    """
    original = nn.RNNBase.flatten_parameters

    def flatten(layer: nn.RNNBase) -> None:
        if len({weight.untyped_storage().data_ptr() for weight in layer.parameters()}) > 1:
            original(layer)

    return replaced(nn.RNNBase, "flatten_parameters", flatten)


class NewSeeds:
    """Finds steps that seed cuDNN's random state again, so that they run eagerly.

    The seed is drawn from torch's generator when the first recurrent layer with dropout runs in the
    step; a replay does not draw it.
    """

    def __init__(self, device: torch.device, layers: Sequence[nn.RNNBase]) -> None:
        self._device = device
        self._layers = layers
        self._in_a_row = 0

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> NewSeeds | None:
        """Make one for the layers of a module; None if it has no recurrent ones."""
        layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
        return cls(device, layers) if layers else None

    def are_used_by_next_step(self) -> bool:
        """Whether the coming step has a new seed, unlike those after it, and is not captured."""
        state = dropout_state_of(self._device, self._layers)
        if state is None or state.now() is not None:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        return self._in_a_row <= _PATIENCE


def refuse_new_seeds(dropout: CapturedDropout | None) -> None:
    """Refuse a captured step that draws dropout if each step begins with a new seed."""
    if dropout is not None and not dropout.is_current():
        raise CaptureError(
            "A replay cannot seed the random state again from which cuDNN draws dropout between "
            "recurrent layers.",
            "a generator of torch's is set before each step, which makes torch seed that state",
            "set seeds once, before the fit",
        )


@dataclass(frozen=True, slots=True)
class Observers:
    """Names of the overridden hooks that run between two parts of a step."""

    before_backward: tuple[str, ...]  # they run after the forward pass and before the backward pass
    before_step: tuple[str, ...]  # they run after the backward pass and before the optimizer step
    own_zero_grad: bool  # the module decides by itself how gradients are zeroed

    def __bool__(self) -> bool:
        return bool(self.before_backward or self.before_step or self.own_zero_grad)


NO_OBSERVERS = Observers((), (), False)
"""No hook runs inside of a step."""
