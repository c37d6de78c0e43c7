"""Watches which attributes a step reads and sets: a replay runs no Python."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.core.arguments.contents import is_still
from lightning_graphs.core.arguments.values import HeldValues, is_plain, value_of_class
from lightning_graphs.core.callsite import is_library
from lightning_graphs.core.graphed import Stores
from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.core.private.torch import current_autograd_node
from lightning_graphs.exchange import Absence, bind, replaced
from lightning_graphs.training.guards.own_code import inside_of_compiled
from lightning_graphs.training.guards.walkers import OF_ALL_MODULES, held_in, held_in_value

_LIBRARIES = ("torch.nn.", "torch.ao.", "torch._dynamo.")
_LIVE_IN_LIBRARIES = frozenset(
    {"p", "momentum", "dropout", "label_smoothing", "margin", "negative_slope", "alpha", "beta"}
    | {"delta", "lambd", "threshold", "reduction", "ignore_index", "track_running_stats"}
    | {"min_val", "max_val", "value", "dim", "approximate", "log_target", "log_input", "full"}
    | {"blank", "zero_infinity", "max_norm", "norm_type"}
)

_METHODS = (FunctionType, staticmethod, classmethod)

STORED = Obstacle(
    "A replay runs no Python code, and cannot set the attribute.",
    "set the attribute in on_train_batch_end, from the values that training_step returns; change "
    "buffers in place",
    kind="python-state",
    code="def on_train_batch_end(self, outputs, batch, batch_idx):\n    self.calls += 1",
)
DRAWN = Obstacle(
    "A graph would freeze a random number, or another value, that the step draws on the host.",
    "only add, multiply, compare or log what is drawn, or make a tensor of it, in training_step, "
    "which replays follow; else draw on the device (torch.rand(..., device=...)), or in the data "
    "loader",
    kind="python-state",
    code="share = torch.rand((), device=self.device)  # in place of random.random()",
)


class AttributeReads(HeldValues):
    """Attributes of modules that captured steps have read, and those that they have set.

    A capture bakes them in. Their values are part of what a captured step depends on, so that a
    hook which anneals a weight or changes a dropout rate gets a graph for the new value. So is the
    absence of an attribute that was looked for in vain. A plain value that the code has set itself
    before it reads it is no such value: every replay sets it again (:meth:`stored`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[CodeType, None] = {}  # of the author's functions that ran
        self._kept: dict[int, Any] = {}
        self._unseen: list[tuple[str, nn.Module]] = []
        self._stored: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._paths: dict[int, str] = {}

    def read(self, words: Iterable[str]) -> None:
        """Look at what has these names in classes of objects, and in modules that are unseen."""
        super().read(words)
        for name, owner in self._unseen:
            for key in (vars(owner).keys() & words) - OF_ALL_MODULES:
                self.add(f"{name}.{key}", vars(owner).get, key, owner)

    def may_have_read(self, owner: object, key: Any) -> bool:
        """Whether code may have read an attribute, or an entry, before it has set it."""
        return id(owner) not in self._paths or self.has(owner, key)

    def keep(self, values: Iterable[Any]) -> None:
        """Keep alive what captured code may have found in caches of others."""
        self._kept.update((id(value), value) for value in values)

    def changed_outside(self, owners: Container[int]) -> list[str]:
        """Undo what code has changed in modules other than these, given by their ``id``."""
        names = []
        for (place, key), (owner, before) in self._stored.items():
            if place not in owners and not is_still(vars(owner).get(key, Absence.ABSENT), before):
                names.append(f"{key} of a {type(owner).__name__}")
                bind(vars(owner), key, before)
        return names

    def stored(self) -> Stores:
        """The attributes that code was watched to set since this was asked, if they are plain."""
        places = [(owner, key) for (_, key), (owner, _) in self._stored.items()]
        self._stored.clear()
        found = [(owner, key, vars(owner).get(key, self)) for owner, key in places]
        return tuple(store for store in found if is_plain(store[2]))

    @contextlib.contextmanager
    def watching(self, module: LightningModule) -> Iterator[None]:
        """Note what the body reads from the module and from submodules of its author's own.

        Their classes are exchanged for subclasses. Layers of torch cannot be, where compiled code
        checks their class; of theirs, the numbers that training is known to move are noted. What
        the body sets is noted of all of them.
        """
        self._thread = threading.get_ident()
        self._modules = {id(owner): owner for owner in module.modules()}
        closed, self._unseen = inside_of_compiled(module), []
        exchanged = []
        for name, owner in held_in(module):
            if not isinstance(owner, nn.Module) or _is_metric(type(owner)):
                continue
            if _author_of(type(owner)).startswith(_LIBRARIES):
                table = vars(owner)
                for key in _LIVE_IN_LIBRARIES & table.keys():
                    if isinstance(table[key], (bool, int, float, str)):
                        self.add(f"{name}.{key}", table.get, key, owner)
            elif owner in closed:
                self._unseen.append((name, owner))
            else:
                exchanged.append((owner, type(owner), name))
        self._paths = paths = {id(owner): name for owner, _, name in exchanged}
        watched = {kind: self._watched(kind, paths) for kind in {kind for _, kind, _ in exchanged}}
        try:
            for owner, kind, _ in exchanged:
                object.__setattr__(owner, "__class__", watched[kind])
            with self._stores_noted(module):
                yield
        finally:
            for owner, kind, _ in exchanged:
                object.__setattr__(owner, "__class__", kind)

    def _is_mine(self) -> bool:
        """Whether the step's own code is running: a backward pass on a GPU has another thread."""
        return threading.get_ident() == self._thread or current_autograd_node() is not None

    @contextlib.contextmanager
    def _stores_noted(self, root: nn.Module) -> Iterator[None]:
        """Note what is set in modules that there are already; metrics look after themselves."""
        modules = {id(module) for module in root.modules() if not _is_metric(type(module))}
        original: Any = nn.Module.__setattr__  # the only one that sees all of them

        def store(owner: nn.Module, key: str, value: Any) -> None:
            before = vars(owner).get(key, Absence.ABSENT)
            original(owner, key, value)
            if id(owner) in modules and key not in OF_ALL_MODULES and self._is_mine():
                self._stored.setdefault((id(owner), key), (owner, before))

        self._stored.clear()  # of code that was refused in the middle
        with replaced(nn.Module, "__setattr__", store):
            yield

    def _watched(self, kind: type, paths: Mapping[int, str]) -> type:
        own: Any = kind
        inherited = own.__getattribute__
        inherited_missing = own.__getattr__
        noted: set[tuple[int, str]] = set()

        def read(owner: Any, key: str) -> Any:
            value = inherited(owner, key)
            place = id(owner), key
            if key in OF_ALL_MODULES or place in noted:
                return value
            own = place in self._stored and is_plain(value)
            # A copy that the body makes has the watched class, too, and no path.
            if not own and place[0] in paths and self._is_mine():
                self._note(owner, kind, key, value, paths[place[0]])
                noted.add(place)
            return value

        def missing(owner: Any, key: str) -> Any:
            try:
                return inherited_missing(owner, key)  # finds parameters, buffers and submodules
            except AttributeError:
                asked_by_library = is_library(sys._getframe(1).f_code.co_filename)
                is_special = key.startswith("__") or key in OF_ALL_MODULES
                if id(owner) in paths and not (asked_by_library or is_special):
                    get = partial(_looked_up, vars(owner), vars(kind))
                    self.add(f"{paths[id(owner)]}.{key}", get, key, owner)
                raise

        watched: dict[str, Any] = {"__getattribute__": read, "__getattr__": missing}
        watched["__module__"] = kind.__module__
        return type(kind)(kind.__name__, (kind,), watched)

    def _note(self, owner: Any, kind: type, key: str, value: Any, path: str) -> None:
        table = object.__getattribute__(owner, "__dict__")
        of_class = value_of_class(kind, key)
        is_method = isinstance(of_class, _METHODS)
        is_everywhere = of_class is value_of_class(LightningModule, key)
        if key not in table and (is_everywhere or not (is_plain(of_class) or is_method)):
            return
        name = f"{path}.{'hparams' if key == '_hparams' else key}"
        # A method brings its module along, of which nothing else is read here.
        seen = dict(self._modules)
        inside = () if isinstance(value, nn.Module) else held_in_value(name, value, seen)
        for label in iterators_in(inside):  # before anything is taken from one
            raise DRAWN.refused_here(f"{label}, an iterator, is read")
        if key not in table and not is_method:
            self.add(name, partial(getattr, owner), key, owner)
        elif key in table and value is None:  # which a table without it gives as well
            self.add(name, partial(_looked_up, table, vars(kind)), key, owner)
        else:  # of a method, whether the instance has something else in its place
            self.add(name, table.get, key, owner)


def _is_metric(kind: type) -> bool:
    return any(base.__module__.startswith("torchmetrics.") for base in kind.__mro__)


def _author_of(kind: type) -> str:
    """Where the class is written: torch makes classes of parametrized modules itself."""
    written = (base for base in kind.__mro__ if base.__module__ != "torch.nn.utils.parametrize")
    return next(written).__module__


def iterators_in(held: Iterable[tuple[str, Any]]) -> list[str]:
    """The names of those among named values that are iterators, but for open files."""
    kinds = ((name, isinstance(v, Iterator) and not isinstance(v, io.IOBase)) for name, v in held)
    return [name for name, is_iterator in kinds if is_iterator]


def _looked_up(own: Mapping[str, Any], of_class: Mapping[str, Any], key: str) -> Any:
    """What is set in a module or its class: an exception for what is in neither costs too much."""
    return own.get(key, of_class.get(key, Absence.ABSENT))
