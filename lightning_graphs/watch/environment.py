"""The one environment of user code under watch, and what it refuses: effects, stores, errors."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import signal
import sys
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, ModuleType
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.device.rules import (
    AFTERMATH,
    CACHED_WEIGHTS,
    CLOCK,
    DRAWN,
    OLD_GRADIENTS,
    OPTIMIZER_SET,
    SIDE_EFFECT,
    STORED,
    STORED_OUTSIDE,
    are_noted,
    refusals,
    stopped,
)
from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    first_line,
    in_one_line,
    is_out_of_memory,
    no_room,
    stop,
)
from lightning_graphs.private.callsite import (
    LIBRARIES,
    OURS,
    CallSite,
    CallSiteFinder,
    frames_from,
    is_library,
)
from lightning_graphs.private.engine import current_autograd_node
from lightning_graphs.private.exchange import Absence, exchanged, replaced, standing_in
from lightning_graphs.private.generators import Generators
from lightning_graphs.private.torch import (
    caches_weights,
    module_hooks,
    modules_in,
    subclasses_unasked,
    version_of,
)
from lightning_graphs.values.guards import OF_TENSORS, REALS
from lightning_graphs.values.memory import Given
from lightning_graphs.values.snapshot import Change, PythonSnapshot
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.reads import AttributeGuards, GlobalReads
from lightning_graphs.watch.tracers import Nothing, OpaqueTracer, ScalarTracer, Tracer
from lightning_graphs.watch.user_code import (
    IN_C,
    UnregisteredTensors,
    UserCode,
    asking,
    function_of,
    iter_objects,
    optimizers_of,
)

_CALLS = (
    *("builtins.print", "builtins.open", "io.open", "sys.stdout.write", "sys.stderr.write"),
    *("logging.Logger.handle", "rich.console.Console.print", "rich.console.Console.log"),
    *("torch.save", "torch.profiler.profile.step"),
    *("queue.Queue.put", "queue.Queue.get", "threading.Thread.start", "threading.Condition.notify"),
    *("wandb.log", "mlflow.log_metric", "mlflow.log_metrics"),
)
_OF_OPTIMIZERS = OF_TENSORS.union({"step", "_opt_called", "_warned_capturable_if_run_uncaptured"})
"""Attributes of optimizers that other parts guard, or that torch sets in each step."""
_NAMES = {"builtins.print": "print", "builtins.open": "open", "io.open": "open"}  # pathlib calls it
_NAMES["logging.Logger.handle"] = "a logger of Python"
_OF_NOW = ("sys.stdout.write", "sys.stderr.write", "threading.Thread.start")
"""What no replay can do again: a stream may be another one later, and a thread starts once."""
_ANYWHERE = ("open", *(path for path in _CALLS if path.startswith(("queue.", "threading."))))
"""What user code does by functions of any library: events and executors start and wake threads."""
LOGGERS = ("logger", "loggers")  # properties that read other ``logger`` properties
_PASSING_ON = ("logging", "pathlib", "lightning_utilities", "rich", "tqdm")
"""Packages that print, write and log on behalf of their callers."""

_RANK_ZERO = ".rank_zero"  # modules of Lightning that do so as well
# What reads attributes for others, to watch them
_WATCHERS = ("lightning_graphs.watch.", "lightning_graphs.lightning.trainer")

Effect = tuple[Any, str, str]
"""What user code is seen to use: an object or class, a name in it, and a name for messages."""


class Client(Protocol):
    """Watches the program that runs a region: its counters, loggers and learning rates."""

    own: UserCode
    """Tells user code from that of libraries."""

    @property
    def watched(self) -> Iterable[tuple[str, Any]]:
        """Objects that are no modules, but read and written by the code as these are, by name."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier steps are added to."""

    @property
    def effects(self) -> Iterable[Effect]:
        """List functions that print and log for user code."""

    @property
    def stores_outside(self) -> bool:
        """Whether replays may store to globals and enclosing variables, as to attributes."""

    def reading(
        self, reads: AttributeGuards, number: MakeNumber | None
    ) -> AbstractContextManager[None]:
        """Watch what the body reads of the program."""

    def calling(self) -> AbstractContextManager[None]:
        """Refuse what captured module calls, the body, must leave to the step around them."""

    @property
    def ddp(self) -> Any:
        """The wrapper whose reducer sums gradients over ranks; None if there is none."""
        return None

    @abstractmethod
    def declines(self, frame: FrameType) -> bool:
        """Whether a read that a frame makes is kept back, though a replay could repeat it ahead."""

    @abstractmethod
    def keeps_effect(self, frame: FrameType, function: Callable[..., Any], given: Given) -> Any:
        """Keep back a call that prints or logs; None if it is none of those."""

    def copies_on_host(self, batch: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the host's copy of each tensor in a batch; None if it has none."""
        return [tensor if tensor.device.type == "cpu" else None for tensor in batch]


class Environment:
    """What user code may read and change next to its tensor arguments.

    It is made before the code runs, by one walk through the module tree. A capture refuses what no
    replay can do, and undoes it.

    Args:
        root: The module that is trained.
        client: Watches the program around the region.
        modules: Those whose code runs; all of ``root`` by default.
    """

    def __init__(
        self, root: Any, client: Client, *, modules: Sequence[nn.Module] | None = None
    ) -> None:
        self._root = root
        self._client = client
        self.held = list(iter_objects(root))
        self.generators = Generators(self.held, root.device)
        self.loose = UnregisteredTensors(root, self.held)
        self.in_attributes = self.loose.tensors  # those that modules hold
        self.small = [*map(ref, self.loose.small)]  # of these, while they live
        code = root if modules is None else nn.ModuleList(modules)
        held = self.held if modules is None else None
        self.outside = GlobalReads(
            code, client.own, self.generators.add_outside, self.loose.add, held=held
        )
        self.outside.on_act = partial(refuse_act, client.own, self._holds)

    def _holds(self, value: Any) -> bool:
        """Return whether something that outlives the code refers to an object."""
        return self.outside.has(value) or any(held is value for _, held in self.held)

    @property
    def leaves(self) -> list[Any]:
        """Tensors in module attributes that receive gradients."""
        return [t for t in self.in_attributes if t.requires_grad and t.is_leaf]

    @contextlib.contextmanager
    def reading(self, reads: AttributeGuards, number: MakeNumber | None = None) -> Iterator[None]:
        """Record in ``reads`` what the body reads in modules and in the program around it."""
        attributes = reads.watching(self._root, self._client.watched, self.held)
        with attributes, self._client.reading(reads, number):
            yield

    def old_gradients(self, others: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        """Watch uses of ``.grad`` in the body: parameters, tensors in attributes, and others."""
        watched = [*self.in_attributes, *others]
        return old_gradients_watched(watched, accumulates=self._client.accumulates)

    @contextlib.contextmanager
    def calling(self, reads: AttributeGuards) -> Iterator[None]:
        """Record in ``reads`` what captured module calls, the body, read."""
        with self.reading(reads), self.old_gradients(), self._client.calling():
            yield

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Follow functions that the body calls, and watch their effects outside of Python."""
        client = self._client
        kept = self._held_by_optimizers().changes_undone(self._refuse_kept)
        with self.outside.followed(), effects_watched(client), kept:
            yield

    def _held_by_optimizers(self) -> PythonSnapshot:
        """Take a snapshot of the attributes of optimizers, also of those with hooks (K-FAC)."""
        found, modules = PythonSnapshot(), modules_in(self._root)
        hooks = (getattr(hook, "__self__", None) for m in modules for hook in module_hooks(m))
        hooked = [one for one in hooks if isinstance(one, Optimizer)]
        for owner in {id(one): one for one in (*optimizers_of(self._root), *hooked)}.values():
            for key, value in vars(owner).items():
                if key in _OF_OPTIMIZERS or isinstance(value, (nn.Module, Optimizer)):
                    continue
                found.add_place(f"{type(owner).__name__}.{key}", vars(owner), key)
                found.add(f"{type(owner).__name__}.{key}", value)
        return found

    def _refuse_kept(self, names: Sequence[str]) -> None:
        raise STORED.refused(f"{LIBRARIES.step} changes {self.outside.listed(names)}")

    @contextlib.contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Refuse what the body, code under capture, does or stores outside of its module; undo it.

        Args:
            what: The code, for messages.
        """

        def refuse_stored(names: Sequence[str]) -> None:
            raise STORED_OUTSIDE.refused(f"{what} changes {self.outside.listed(names)}")

        undone: AbstractContextManager[None] = contextlib.nullcontext()
        if not self._client.stores_outside:
            undone = self.outside.contents.changes_undone(refuse_stored)
        with undone:
            try:
                with self.acting():
                    yield
            finally:
                self.outside.empty_caches()

    @contextlib.contextmanager
    def refusing_in(
        self, module: nn.Module, attributes: PythonSnapshot, reads: AttributeGuards
    ) -> Iterator[None]:
        """Refuse code of the body, a captured call, that acts on anything but tensors; undo it.

        Args:
            module: The module that is called.
            attributes: What it held before.
            reads: Learns what the body sets.
        """
        try:
            with self.refusing("the module's forward"):
                yield
        finally:
            changed = reads.changed_outside(set(map(id, module.modules())))
            if inside := attributes.changed():
                changed += inside
                attributes.restore()
            if drawn := self.generators.drawn():
                self.generators.restore()
        for names, obstacle, does in ((changed, STORED, "changes"), (drawn, DRAWN, "draws from")):
            if names:
                raise obstacle.refused(f"the module's forward {does} {self.outside.listed(names)}")


def effects_watched(client: Client, *, refuses: bool = True) -> AbstractContextManager[None]:
    """Watch for prints, opened files, Python's loggers and further effects, in this thread.

    Only lines of user code count: libraries warn and log on their own account. What is refused is
    not done; what is kept back every replay does behind its graphs.

    Args:
        client: Keeps them back.
        refuses: All others are refused, and not done.
    """

    def used(what: str, frame: FrameType, function: Callable[..., Any], given: Given) -> Any:
        kept = None if what in _OF_NOW else client.keeps_effect(frame, function, given)
        if kept is not None:
            return kept
        if not refuses:
            return None
        SIDE_EFFECT.refuse(_used_at(what, frame))
        return Nothing()

    def user(what: str, frame: FrameType) -> FrameType | None:
        if what in _ANYWHERE:
            return asking(client.own, frame)
        acting = next((f for f in frames_from(frame) if not _passes_on(f)), None)
        return acting if acting is not None and client.own.runs_in(acting) else None

    present = [*client.effects, *_present()]
    return exchanged(
        (owner, name, _watched(getattr(owner, name), partial(user, what), partial(used, what)))
        for owner, name, what in present
    )


def _used_at(what: str, frame: FrameType) -> str:
    return f"{what} is used at {CallSite.of(frame.f_code, frame.f_lineno).describe()}"


def _present() -> Iterator[Effect]:
    """List effects of Python and of those known packages that are imported."""
    for path in _CALLS:
        module, *outer, name = path.split(".")
        owner = functools.reduce(lambda o, n: getattr(o, n, None), outer, sys.modules.get(module))
        if hasattr(owner, "__dict__") and hasattr(owner, name):  # some programs have no console
            yield owner, name, _NAMES.get(path, path)


def _watched(
    original: Any, user: Callable[[FrameType], FrameType | None], used: Callable[..., Any]
) -> Any:
    """Wrap a function or property so that it reports the frame of user code that it acts for."""
    is_property = isinstance(original, property)
    function = original.fget if is_property else original

    def watched(frame: FrameType, *args: Any, **kwargs: Any) -> Any:
        by = user(frame)
        acts = not is_property or function(*args)  # without a logger, nothing is done with it
        instead = used(by, function, (args, kwargs)) if by and acts else None
        return function(*args, **kwargs) if instead is None else instead

    instead = standing_in(function, watched)
    return property(instead, original.fset) if is_property else instead


def _passes_on(frame: FrameType) -> bool:
    """Return whether a frame acts on behalf of its caller."""
    module: str = frame.f_globals.get("__name__", "")
    is_library = module.partition(".")[0] in _PASSING_ON or module.endswith(_RANK_ZERO)
    watches = module.startswith(_WATCHERS) and module != __name__
    return is_library or watches or frame.f_code.co_name in LOGGERS


_PUBLIC = {"posix": "os", "nt": "os", "_posixsubprocess": "subprocess"}


def refuse_act(
    own: UserCode, is_held: Callable[[Any], bool], frame: FrameType, function: Any
) -> None:
    """Refuse what a frame is about to call if that acts for user code, outside of Python's values.

    Of files in memory those that are held: others have gone when the step ends.
    """
    owner, name = function.__self__, function.__name__
    kinds = [] if isinstance(owner, ModuleType) else type(owner).__mro__
    modules = [kind.__module__ for kind in kinds] or [owner.__name__]
    if not any(name in IN_C.get(module, ()) for module in modules):
        return
    if type(owner) in (io.StringIO, io.BytesIO) and not is_held(owner):
        return
    if (user := asking(own, frame)) is not None:
        what = type(owner).__name__ if kinds else _PUBLIC.get(modules[0], modules[0].strip("_"))
        stop(SIDE_EFFECT.refused(_used_at(f"{what}.{name}", user)))


class RaisedInCapture(CaptureError):
    """Captured code raised an error, which is ``__cause__``."""


def _is_of_signal(error: BaseException) -> bool:
    """Return whether a handler of a signal has raised this, and not the code that it was in."""
    handlers = [function_of(signal.getsignal(number)) for number in signal.valid_signals()]
    calls = (one if hasattr(one, "__code__") else type(one).__call__ for one in handlers if one)
    codes = {getattr(call, "__code__", None) for call in calls}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


@contextlib.contextmanager
def code_captured(what: str) -> Iterator[None]:
    """Turn every error of the body, the capture of the named code, into a refusal.

    What is refused stays refused where an `except` in the captured code goes on without it: in an
    eager step, and so in a replay, there would have been nothing to go on from.
    """
    if caches_weights():
        raise CACHED_WEIGHTS.refused("the cache is on")
    with refusals() as refused:
        try:
            with stopped():
                yield
            if refused:
                refused[0].others = [*refused]
                raise refused[0]
        except GraphError as error:
            first = are_noted() or AFTERMATH in str(error)
            if first and refused and isinstance(error, CaptureError):
                refused[0].others = [*refused]
                raise refused[0] from error
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and _is_of_signal(error):
                raise
            if is_out_of_memory(error):
                raise no_room(what, first_line(error)) from error
            if refused:  # by a handler in the captured code
                refused[0].others = [*refused]
                raise refused[0] from error
            site = CallSiteFinder().of_exception(error)
            raise RaisedInCapture(
                f"{what} must run without an error.",
                f"{in_one_line(error)}, at {site.describe()}",
                "correct the line, if it raises in an eager step, too; else only pass on or log "
                "the value: some, such as those of metrics, are not there during a capture",
            ) from error


# ------------------ Numbers and gradients of the optimizer

_HYPER_PARAMETERS = ("betas", "momentum", "dampening", "weight_decay", "eps")
_COMPILER = "torch._"  # its private packages, which ask whether there is a gradient

Schedulers = Sequence[object]
"""Learning rate schedulers of torch, or others like them."""

NumberPlaces = Sequence[tuple[dict[str, Any], str, Any]]
"""Tables, a key of each, and its temporary value."""


def rates_exchanged(
    schedulers: Schedulers, optimizer: Optimizer, rates: Sequence[Tensor] | None = None
) -> AbstractContextManager[None]:
    """While capturing, give these learning rates, one a group, to schedulers and groups.

    User code may not use the counters of schedulers, nor rates if none are given.
    """
    return numbers_exchanged(optimizer, number_places(schedulers, optimizer, rates))


def number_places(
    schedulers: Schedulers,
    optimizer: Optimizer,
    rates: Sequence[Tensor] | None = None,  # stand for learning rates, a group each
    # ``rates`` then stand for tensors only, and without them further numbers of each group move
    # without another capture
    number: MakeNumber | None = None,
    index: int = 0,  # of the optimizer
) -> NumberPlaces:
    """List the tables of learning rates and of scheduler counters, with a tracer for each."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    make, groups = number or OpaqueTracer, optimizer.param_groups
    further = _HYPER_PARAMETERS if number is not None and rates is None else ()

    def rate(name: str, group: int, table: dict[str, Any], key: str, *item: int) -> Any:
        read = _reading(table, key, *item)
        if rates is not None and (number is None or isinstance(read(), Tensor)):
            given = rates[group]
            return given.detach() if isinstance(given, Tensor) else given
        return make(_of_group(name, group, index), read)

    for n, scheduler in enumerate(schedulers):
        table = vars(scheduler)
        owner = f"scheduler {n}" if n else "a scheduler"
        for key in ("last_epoch", "_step_count"):
            if key in table:
                places.append((table, key, make(f"{key} of {owner}", _reading(table, key))))
        if table.get("optimizer") is optimizer and "_last_lr" in table:
            name = f"the learning rate of {owner}"
            known = range(len(table["_last_lr"]))  # a group may have been added since its last step
            last = [rate(name, i, table, "_last_lr", i) for i in known]
            places.append((table, "_last_lr", last))
    for i, group in enumerate(groups):
        if "lr" in group:
            places.append((group, "lr", rate("the learning rate", i, group, "lr")))
        for key in further:
            name, value = _of_group(f"{key} of the optimizer", i, index), group.get(key)
            if type(value) in REALS:
                places.append((group, key, make(name, _reading(group, key))))
            elif isinstance(value, (tuple, list)) and {*map(type, value)} <= {int, float}:
                names = [f"{name}[{k}]" if k else name for k in range(len(value))]
                numbers = tuple(make(n, _reading(group, key, k)) for k, n in enumerate(names))
                places.append((group, key, numbers))
    return places


def _of_group(name: str, group: int, optimizer: int) -> str:
    found = [f"{what} {i}" for what, i in (("optimizer", optimizer), ("group", group)) if i]
    return f"{name} ({', '.join(found)})" if found else name


@contextlib.contextmanager
def numbers_exchanged(
    optimizer: Optimizer, places: NumberPlaces, follows: Callable[[Change], bool] = lambda _: False
) -> Iterator[None]:
    """While capturing, refuse to set these numbers and entries of parameter groups.

    Those are not refused that replays follow.
    """
    groups = [("", group) for group in optimizer.param_groups]
    inside = {id(group) for group in optimizer.param_groups}

    def held() -> PythonSnapshot:
        # Of schedulers these numbers alone: other entries, as a method in their place, are none of
        # ours
        found = PythonSnapshot(groups)
        for table, key, _ in places:
            if id(table) not in inside:
                found.add_place(key, table, key)
                found.add(key, table[key])
        return found

    before = held()
    tensors = [(key, v, version_of(v)) for _, key, v in places if isinstance(v, Tensor)]
    try:
        for table, key, value in places:
            table[key] = value
        given = held()
        yield
        changes = itertools.filterfalse(follows, given.changes())
        moved = {c.name if c.key is Absence.ABSENT else c.key for c in changes}
        moved |= {key for key, tensor, version in tensors if version_of(tensor) != version}
    finally:
        before.restore()
    if moved:
        raise OPTIMIZER_SET.refused(f"the step sets {', '.join(sorted(moved))} in param_groups")


def _reading(table: dict[str, Any], key: str, *index: int) -> Callable[[], Any]:
    """Return a reader of a table's entry, or of an item in that."""
    return (lambda: table[key][index[0]]) if index else TableReader(table, key)


class TableReader:
    """Reads an entry of a table: as it was ahead of a replay that sets it."""

    def __init__(self, table: dict[str, Any], key: str) -> None:
        self.table, self.key = table, key
        self.before: Any = Absence.ABSENT  # within such a replay

    def __call__(self) -> Any:
        return self.table[self.key] if self.before is Absence.ABSENT else self.before


class Settings:
    """Numbers of parameter groups that captured code sets ahead of the update.

    A replay sets them ahead of its graphs.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[int, str], tuple[dict[str, Any], str, Callable[[], Any]]] = {}
        self._entries: list[TableReader] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def reads(self, places: NumberPlaces) -> None:
        """Let the tracers in these places read what is there ahead of a replay."""
        reads = (value._read for *_, value in places if isinstance(value, Tracer))
        self._entries += [read for read in reads if isinstance(read, TableReader)]

    def follow(self, change: Change) -> bool:
        """Let replays set an entry; False if they have no such value."""
        table, key, value = change.table, change.key, change.now
        is_number = type(value) is ScalarTracer and value.obstacle is not CLOCK
        if key not in ("lr", *_HYPER_PARAMETERS) or not (is_number or type(value) in REALS):
            return False
        read = value.now if is_number else lambda: value
        self._all[id(table), key] = table, key, read
        return True

    def apply(self) -> None:
        """Set them, ahead of the graphs."""
        self.end()
        values = [read() for *_, read in self._all.values()]
        for entry in self._entries:
            if (id(entry.table), entry.key) in self._all:
                entry.before = entry.table[entry.key]
        for (table, key, _), value in zip(self._all.values(), values, strict=True):
            table[key] = value

    def end(self) -> None:
        for entry in self._entries:
            entry.before = Absence.ABSENT


@contextlib.contextmanager
def old_gradients_watched(
    others: Iterable[Tensor] = (),  # tensors in attributes, and copies of some of them
    *,
    accumulates: bool = False,  # gradients of earlier steps are added to
) -> Iterator[None]:
    """While capturing a forward pass, refuse to use ``.grad`` of parameters and attributes.

    It is set aside there. An eager step finds the gradients of the step before. No library reads
    one by itself in a forward pass: where clipping or a norm does, the author's code calls it.
    """
    gradient: Any = Tensor.grad
    # A loss may move its network at each call: it is there already. Every step zeroes after its
    # forward pass, which takes nothing away unless gradients are accumulated.
    harmless = {"_apply"} if accumulates else {"_apply", "zero_grad"}

    thread = threading.get_ident()

    def used(name: str) -> None:
        if threading.get_ident() != thread and current_autograd_node() is None:  # another fit
            return
        frame = sys._getframe(2)
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        computes_nothing = module.startswith((_COMPILER, OURS)) or code.co_name in harmless
        if not (computes_nothing and is_library(code.co_filename)):
            OLD_GRADIENTS.refuse_here(name)

    watched = set(map(id, others))

    def read(tensor: Tensor) -> Any:
        if (name := name_of(tensor)) is not None:
            used(f".grad of {name} is read")
        with subclasses_unasked():  # a subclass would ask here again
            return gradient.__get__(tensor)

    def write(tensor: Tensor, value: Tensor | None) -> None:
        if (name := name_of(tensor)) is not None:
            used(f".grad of {name} is set")
        with subclasses_unasked():
            gradient.__set__(tensor, value)

    def name_of(tensor: Tensor) -> str | None:
        if isinstance(tensor, Parameter):
            return "a parameter"
        return "a tensor in an attribute" if id(tensor) in watched else None

    # Not of Parameter: those of a tensor subclass are none to Python
    with replaced(Tensor, "grad", property(read, write)):
        yield
