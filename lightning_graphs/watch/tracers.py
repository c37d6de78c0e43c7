"""Stand-ins for Python values that a capture would freeze: they refuse to be used."""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import COUNTER, OLD_GRADIENTS, Obstacle, OnUse, refuse
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSiteFinder, is_library
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import version_of
from lightning_graphs.values.snapshot import PythonSnapshot
from lightning_graphs.values.tree import leaves_of

_HYPER_PARAMETERS = ("betas", "momentum", "dampening", "weight_decay", "eps")
OURS = "lightning_graphs."
_COMPILER = "torch._"  # its private packages, which ask whether there is a gradient


class Tracer(abc.ABC):
    """Stands for a value that a captured step does not have: passed on and logged, never used.

    It is no ``int`` or ``float``: C++ would read the value of one without asking.
    """

    @abc.abstractmethod
    def refuse(self) -> NoReturn:
        """Raise a :class:`CaptureError` that names the value."""

    @abc.abstractmethod
    def now(self) -> Any:
        """The value itself, at a replay."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __divmod__ = __rdivmod__ = __neg__ = __pos__ = __abs__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __bool__ = __index__ = __int__ = __float__ = __str__ = __repr__ = __format__ = _refuse
    __iter__ = __getitem__ = __len__ = __array__ = __array_ufunc__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # torch and copy ask whether there is such a protocol
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators of torch ask for it, and so none reads the value."""
        refuse_stand_ins((args, kwargs))
        return NotImplemented


class Disguised(Tracer):
    """To code that asks for its class it is the value."""

    _kind: type

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") == "abc":  # which asks for abstract classes
            frame = frame.f_back
        ours = frame.f_globals.get("__name__", "").startswith(OURS)
        return type(self) if ours else self._kind


class OpaqueTracer(Tracer):
    """A Python number that is another one at every step, while one step is captured."""

    def __init__(self, name: str, read: Callable[[], Any], obstacle: Obstacle = COUNTER) -> None:
        self.name, self._read, self._obstacle = name, read, obstacle

    def refuse(self) -> NoReturn:
        raise used(self._obstacle, self.name)

    def now(self) -> Any:
        return self._read()


def used(obstacle: Obstacle, name: str) -> CaptureError:
    """The error for a value that the user's line, which is being executed, uses."""
    return obstacle.refused_here(f"{name} is {'read' if obstacle is COUNTER else 'used'}")


def refuse_stand_ins(value: Any) -> None:
    """Refuse a value with something in it that a captured step does not have."""
    for leaf in leaves_of(value, Tracer):
        leaf.refuse()


def present(value: Any) -> Any:
    """A value with the present values of what stands for numbers in it."""
    return tree_map_only(Tracer, lambda stand_in: stand_in.now(), value)


Schedulers = Sequence[object]
"""Learning rate schedulers of torch, or others like them."""

NumberPlaces = Sequence[tuple[dict[str, Any], str, Any]]
"""Tables, a key of each, and what is to be there for a while."""


def rates_exchanged(
    schedulers: Schedulers, optimizer: Optimizer, rates: Sequence[Tensor] | None = None
) -> AbstractContextManager[None]:
    """While capturing, schedulers and parameter groups give these learning rates, a group each.

    What schedulers count by is nobody's to use, and no rate where there are none of these.
    """
    return numbers_exchanged(optimizer, number_places(schedulers, optimizer, rates))


def number_places(
    schedulers: Schedulers,
    optimizer: Optimizer,
    rates: Sequence[Tensor] | None = None,  # stand for learning rates, a group each
    # Makes the stand-in for a number, of its name and what gives it; ``rates`` then stand for
    # tensors only, and without them further numbers of each group move without another capture
    number: Callable[[str, Callable[[], Any]], Any] | None = None,
) -> NumberPlaces:
    """Where learning rates stand, and what schedulers count by, with a stand-in for each."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    make, groups = number or OpaqueTracer, optimizer.param_groups
    further = _HYPER_PARAMETERS if number is not None and rates is None else ()

    def rate(name: str, group: int, table: dict[str, Any], key: str, *index: int) -> Any:
        read = _reading(table, key, *index)
        if rates is not None and (number is None or isinstance(read(), Tensor)):
            return rates[group].detach()
        return make(_of_group(name, group), read)

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
        places.append((group, "lr", rate("the learning rate", i, group, "lr")))
        for key in further:
            name, value = _of_group(f"{key} of the optimizer", i), group.get(key)
            if type(value) in (int, float):
                places.append((group, key, make(name, _reading(group, key))))
            elif isinstance(value, (tuple, list)) and {*map(type, value)} <= {int, float}:
                names = [f"{name}[{k}]" if k else name for k in range(len(value))]
                numbers = tuple(make(n, _reading(group, key, k)) for k, n in enumerate(names))
                places.append((group, key, numbers))
    return places


def _of_group(name: str, index: int) -> str:
    return f"{name} (group {index})" if index else name


@contextlib.contextmanager
def numbers_exchanged(optimizer: Optimizer, places: NumberPlaces) -> Iterator[None]:
    """While capturing, these numbers and what parameter groups hold are nobody's to set."""
    tables = [("", table) for table in (*optimizer.param_groups, *(table for table, *_ in places))]
    before = PythonSnapshot(tables)
    tensors = [(key, v, version_of(v)) for _, key, v in places if isinstance(v, Tensor)]
    try:
        for table, key, value in places:
            table[key] = value
        given = PythonSnapshot(tables)
        yield
        moved = {change.key for change in given.changes()}
        moved |= {key for key, tensor, version in tensors if version_of(tensor) != version}
    finally:
        before.restore()
    if moved:
        raise CaptureError(
            "A replay runs no Python code, and cannot set values in the optimizer.",
            f"the step sets {', '.join(sorted(moved))} in param_groups",
            "set the value in on_train_batch_start or another hook, or with a scheduler",
        )


def _reading(table: dict[str, Any], key: str, *index: int) -> Callable[[], Any]:
    """Gives what a table holds, or an item of it, when it is asked."""
    return lambda: table[key][index[0]] if index else table[key]


@contextlib.contextmanager
def old_gradients_watched(
    on_use: OnUse = refuse,
    others: Iterable[Tensor] = (),  # those in attributes, and what stands for some of them
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

    def used(name: str) -> None:
        frame = sys._getframe(2)
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        computes_nothing = module.startswith((_COMPILER, OURS)) or code.co_name in harmless
        if not (computes_nothing and is_library(code.co_filename)):
            on_use(OLD_GRADIENTS, name, name, CallSiteFinder().here())

    watched = set(map(id, others))

    def read(tensor: Tensor) -> Any:
        if (name := name_of(tensor)) is not None:
            used(f".grad of {name} is read")
        return gradient.__get__(tensor)

    def write(tensor: Tensor, value: Tensor | None) -> None:
        if (name := name_of(tensor)) is not None:
            used(f".grad of {name} is set")
        gradient.__set__(tensor, value)

    def name_of(tensor: Tensor) -> str | None:
        if isinstance(tensor, Parameter):
            return "a parameter"
        return "a tensor in an attribute" if id(tensor) in watched else None

    with replaced(Tensor if watched else Parameter, "grad", property(read, write)):
        yield
