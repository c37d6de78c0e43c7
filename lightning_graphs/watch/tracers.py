"""Tracers for Python values while code is captured, and the operators that accept them.

These ask for a bare number. While code is watched, a tracer gets the call instead.

For a tensor of 32 or 64 bits most kernels have the number in the tensor's own type, wherever they
get it from. For smaller ones those that multiply compute in 32 bits; those that add round the
number first on a CPU. CUDA divides by a number of the host by multiplying with its inverse.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import COUNTER, OLD_GRADIENTS, Obstacle, OnUse, refuse
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSiteFinder, frames_from, is_library
from lightning_graphs.private.exchange import Member, exchanged, replaced
from lightning_graphs.private.torch import version_of
from lightning_graphs.values.snapshot import PythonSnapshot
from lightning_graphs.values.tree import leaves_of

# ------------------ Tracers that refuse every use

_HYPER_PARAMETERS = ("betas", "momentum", "dampening", "weight_decay", "eps")
OURS = "lightning_graphs."
_COMPILER = "torch._"  # its private packages, which ask whether there is a gradient


class Tracer(abc.ABC):
    """Tracer for a value that a captured step does not have: passed on and logged, never used.

    It is no ``int`` or ``float``: C++ would read the value of one without asking.
    """

    @abc.abstractmethod
    def refuse(self) -> NoReturn:
        """Raise a :class:`CaptureError` that names the value."""

    @abc.abstractmethod
    def now(self) -> Any:
        """Return the present value, at a replay."""

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
        """Refuse torch operators, which ask for this method before they read the value."""
        refuse_tracers((args, kwargs))
        return NotImplemented


class Disguised(Tracer):
    """Tracer whose ``__class__`` is the value's."""

    _kind: type

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") == "abc":  # which asks for abstract classes
            frame = frame.f_back
        ours = frame.f_globals.get("__name__", "").startswith(OURS)
        return type(self) if ours else self._kind


class OpaqueTracer(Tracer):
    """Tracer for a Python number that changes with every step."""

    def __init__(self, name: str, read: Callable[[], Any], obstacle: Obstacle = COUNTER) -> None:
        self.name, self._read, self._obstacle = name, read, obstacle

    def refuse(self) -> NoReturn:
        raise used(self._obstacle, self.name)

    def now(self) -> Any:
        return self._read()


def used(obstacle: Obstacle, name: str) -> CaptureError:
    """Return the error for a value that the user's current line uses."""
    return obstacle.refused_here(f"{name} is {'read' if obstacle is COUNTER else 'used'}")


def refuse_tracers(value: Any) -> None:
    """Refuse a value with a tracer in it."""
    for leaf in leaves_of(value, Tracer):
        leaf.refuse()


def present(value: Any) -> Any:
    """Replace the tracers in a value by their present values."""
    return tree_map_only(Tracer, lambda stand_in: stand_in.now(), value)


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
    # Makes the tracer for a number, given its name and reader; ``rates`` then stand for
    # tensors only, and without them further numbers of each group move without another capture
    number: Callable[[str, Callable[[], Any]], Any] | None = None,
) -> NumberPlaces:
    """List the tables of learning rates and of scheduler counters, with a tracer for each."""
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
    """While capturing, refuse to set these numbers and entries of parameter groups."""
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
    """Return a reader of a table's entry, or of an item in that."""
    return lambda: table[key][index[0]] if index else table[key]


@contextlib.contextmanager
def old_gradients_watched(
    on_use: OnUse = refuse,
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


# ------------------ Traced operators and conversions

# ------------------ Python functions


class TracedValue(abc.ABC):
    """Base of tracers for numbers with which code under watch computes."""

    value: Any
    """What it is in this step."""

    @abc.abstractmethod
    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Apply a function to arguments, one of which is this tracer."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Functions of NumPy."""
        if method != "__call__" or kwargs:
            return NotImplemented
        return self.applied(ufunc, inputs)

    def __array_function__(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Functions of NumPy that are made of others."""
        return self.__array_ufunc__(function, "__call__", *args, **kwargs)


Conversion = tuple[str, type]
"""A module's name, and ``float`` or ``int``."""

DrawingFunction = tuple[str, str, str]
"""The name of a module, of a function in it, and of the generator that this draws from."""


def calls_followed(conversions: Collection[Conversion] = ()) -> AbstractContextManager[None]:
    """Let ``math`` and these functions accept tracers, unseen by compiled code."""
    converting = ((sys.modules[m], kind.__name__, _CONVERSIONS[kind]) for m, kind in conversions)
    return exchanged([*_OF_MATH, *converting])


def _following(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for argument in args:
            if isinstance(argument, TracedValue):
                return argument.applied(function, args)
        return function(*args, **kwargs)

    return call


_OF_MATH: list[Member] = [
    (math, name, _following(function))
    for name, function in vars(math).items()
    if callable(function) and not name.startswith("__")
]


def _conversion(kind: Any) -> type:
    """Replacement for ``float`` or ``int`` in a module; torch does not know it as a dtype."""
    following = _following(kind)

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return following(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value.value if isinstance(value, TracedValue) else value, kind)

        def __eq__(cls, other: object) -> bool:
            return other is kind or other is cls

        def __hash__(cls) -> int:
            return hash(kind)

    return Meta(kind.__name__, (kind,), {FOR_A_WHILE: True})


FOR_A_WHILE = "_stands_for_a_while"
"""Attribute that marks functions and classes which a capture exchanges while it runs."""

_CONVERSIONS: dict[type, type] = {kind: _conversion(kind) for kind in (float, int)}


def is_exchanged(value: Any) -> bool:
    """Return whether a value temporarily replaces ``float``, ``int`` or a function."""
    return isinstance(value, (FunctionType, type)) and FOR_A_WHILE in vars(value)


def constants_around() -> Iterator[Any]:
    """Return the constants in the code of running user functions."""
    for frame in frames_from(sys._getframe(1)):
        if not is_library(frame.f_code.co_filename):
            yield from frame.f_code.co_consts


# ------------------ Torch operators


class Given(Protocol):
    """Provides the numbers of a captured step to operators."""

    def tensor_of(self, number: Any, dtype: torch.dtype) -> Tensor:
        """Return a 0-d tensor that every replay fills with the present value."""

    def read_only(self, name: str, *tensors: Tensor) -> None:
        """Refuse the step, naming a number, if it writes to one of these tensors later."""


Form = Callable[[Given], Any]
"""Computes what an operator does, with its numbers on the device."""


def form_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, device: torch.device
) -> Form | None:
    """Return how to compute a torch call with tracers on this device; None if unsupported."""
    name, further = getattr(function, "__name__", ""), kwargs or {}
    if any(tensor.device != device for tensor in leaves_of((args, further), Tensor)):
        return None
    if name in _FOREACH:
        return _one_by_one(_FOREACH[name], args, further, device)
    make = _FORMS.get(name)
    if make is None:
        return None
    try:
        return make(device if name == "full" else function, *args, **further)
    except TypeError:  # it has other arguments
        return None


# ------------------ Numbers for operators

_SMALL = (torch.bfloat16, torch.float16)
_LARGE = (torch.float32, torch.float64)
_FLOATS = (*_LARGE, *_SMALL)
_KNOWN = {*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_NEAR_ZERO = 1e-7
"""Of what is not nearer, no type makes a zero: which sign that has depends on the kernel."""


def _is_tensor(value: Any, dtypes: Any = _KNOWN) -> bool:
    return type(value) in (Tensor, Parameter) and value.dtype in dtypes


def _is_number(value: Any) -> bool:
    return isinstance(value, TracedValue) and isinstance(value.value, (int, float))


def _are_alike(x: Any, y: Any) -> bool:
    return _is_tensor(x, _FLOATS) and _is_tensor(y, {x.dtype}) and x.shape == y.shape


def _fits(tensor: Tensor, number: Any) -> bool:
    """Return whether a number's value in a tensor's dtype is certain."""
    is_whole = tensor.dtype is torch.int64 and type(number.value) is int
    return is_whole or tensor.dtype in _FLOATS


def _is_in_place(function: Any) -> bool:
    return bool(function.__name__.endswith("_") and not function.__name__.endswith("__"))


# ------------------ A tensor and a number


def _binary(
    function: Any,
    input: Any,
    other: Any,
    *,
    small: str,  # where floats of 16 bits are computed in 32: "cuda", "everywhere", "nowhere"
    quotient: bool = False,
) -> Form | None:
    if not (_is_tensor(input) and _is_number(other)):
        return None
    x, dtype = input, torch.result_type(input, other.value)
    if quotient and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    in_place = _is_in_place(function)
    result, wide = dtype, dtype
    if dtype in _SMALL and small in (x.device.type, "everywhere"):
        wide = torch.float32
    if in_place and x.dtype != wide:
        if x.dtype not in _SMALL or (torch.is_grad_enabled() and x.requires_grad):
            return None
        function = getattr(Tensor, function.__name__.removesuffix("_"))
    if result not in _SMALL and wide not in (*_LARGE, torch.int64):
        return None
    is_product = quotient and x.is_cuda
    operate: Any = getattr(Tensor, "mul_" if in_place else "mul") if is_product else function

    def compute(given: Given) -> Tensor:
        number = other.computed(f"1 / ({other.name})", _inverse, other) if is_product else other
        found: Tensor = operate(x.to(wide), given.tensor_of(number, wide))
        if wide == result:
            return found
        return x.copy_(found) if in_place else found.to(result)

    return compute


def _inverse(number: float) -> float:
    return 1 / number if number else math.copysign(math.inf, number)


def _number_by_tensor(function: Any, input: Any, other: Any) -> Form | None:
    if not (_is_tensor(input, _FLOATS) and _is_number(other)):
        return None

    def divide(given: Given) -> Any:  # as torch's own does
        product = _multiplied(Tensor.mul, input.reciprocal(), other)
        return None if product is None else product(given)

    return divide


_computed = partial(_binary, small="cuda")
_compared = partial(_binary, small="nowhere")
_multiplied = partial(_binary, small="everywhere")
_divided = partial(_multiplied, quotient=True)


def _rest(function: Any, input: Any, other: Any) -> Form | None:
    return _computed(function, input, other) if _is_tensor(input, _LARGE) else None


def _added(function: Any, input: Any, other: Any, *, alpha: Any = 1) -> Form | None:
    if not _is_number(alpha):
        return _computed(function, input, other) if alpha == 1 else None
    if not (_are_alike(input, other) and input.dtype in _LARGE):
        return None
    is_difference = function.__name__.startswith("sub")
    add = Tensor.addcmul_ if _is_in_place(function) else Tensor.addcmul

    def combine(given: Given) -> Any:
        factor = given.tensor_of(alpha, input.dtype)
        return add(input, other, -factor if is_difference else factor)

    return combine


def _interpolated(function: Any, input: Any, end: Any, weight: Any) -> Form | None:
    x = input
    if not (_are_alike(x, end) and _is_number(weight)):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or end.requires_grad):
        return None  # a gradient is multiplied with one minus the number, rounded otherwise
    if x.dtype in _LARGE:
        return lambda given: function(x, end, given.tensor_of(weight, x.dtype))

    def lerp(given: Given) -> Any:
        found = x.float().lerp(end.float(), given.tensor_of(weight, torch.float32))
        return x.copy_(found) if _is_in_place(function) else found.to(x.dtype)

    return lerp


def _clamped(function: Any, input: Any, min: Any = None, max: Any = None) -> Form | None:
    if not _is_tensor(input, _LARGE) or any(isinstance(b, Tensor) for b in (min, max)):
        return None
    bounds = [(key, b) for key, b in (("min", min), ("max", max)) if b is not None]
    if any(abs(b.value) <= _NEAR_ZERO for _, b in bounds if _is_number(b)):
        return None
    clamp: Any = Tensor.clamp_ if _is_in_place(function) else Tensor.clamp

    def clamped(given: Given) -> Any:
        found = input
        for key, bound in bounds:
            if _is_number(bound):
                if not abs(bound) > _NEAR_ZERO:  # by the outcome of a guard it is so
                    bound.refuse()
                bound = given.tensor_of(bound, input.dtype)
            found = clamp(found, **{key: bound})
        return found

    return clamped


# ------------------ Tensors full of a number


def _filled(function: Any, input: Any, value: Any) -> Form | None:
    if not (_is_tensor(input) and _is_number(value) and _fits(input, value)):
        return None
    return lambda given: function(input, given.tensor_of(value, input.dtype))


def _masked(function: Any, input: Any, mask: Any, value: Any) -> Form | None:
    """Form of ``masked_fill``, which itself reads its number on the host."""
    if _filled(function, input, value) is None or not _is_tensor(mask, {torch.bool}):
        return None

    def fill(given: Given) -> Tensor:
        found = torch.where(mask, given.tensor_of(value, input.dtype), input)
        return input.copy_(found) if _is_in_place(function) else found

    return fill


def _chosen(function: Any, first: Any, second: Any, other: Any) -> Form | None:
    """Form of ``torch.where(condition, x, y)``, or ``x.where(condition, y)``."""
    is_method = not _is_tensor(first, {torch.bool})
    condition, x, y = (second, first, other) if is_method else (first, second, other)
    tensor, number = (y, x) if _is_number(x) else (x, y)
    if not (_is_tensor(tensor) and _is_number(number) and _fits(tensor, number)):
        return None

    def choose(given: Given) -> Any:
        memory = given.tensor_of(number, tensor.dtype)
        return torch.where(condition, *((memory, y) if tensor is y else (x, memory)))

    return choose


def _set(function: Any, input: Any, index: Any, value: Any) -> Form | None:
    if leaves_of(index, TracedValue) or _filled(function, input, value) is None:
        return None
    if _is_tensor(index, {torch.bool}):  # as many of them as there are would be read on the host
        mask = index.reshape(index.shape + (1,) * (input.dim() - index.dim()))
        return _masked(Tensor.masked_fill_, input, mask, value)  # Python drops what it returns
    return lambda given: function(input, index, given.tensor_of(value, input.dtype))


def _full(here: torch.device, size: Any, fill_value: Any, **options: Any) -> Form | None:
    target = options.get("device")
    if target in (None, "cpu") or torch.device(target).type != here.type:
        return None  # it is made on the host
    if not _is_number(fill_value):
        return None
    options.setdefault("dtype", torch.full((), fill_value.value).dtype)
    return _made(partial(torch.empty, size, **options), fill_value)


def _made(make: Callable[[], Tensor], number: Any) -> Form | None:
    """Form of a factory: a new tensor that is full of a number."""
    if not _is_number(number):
        return None

    def fill(given: Given) -> Tensor:
        tensor = make()
        if not _fits(tensor, number):
            number.refuse()
        with torch.no_grad():
            return tensor.fill_(given.tensor_of(number, tensor.dtype))

    return fill


# ------------------ An index


def _indexed(function: Any, input: Any, index: Any) -> Form | None:
    """Form of indexing a table: a copy of an entry, unless the table is written."""
    if not (_is_tensor(input) and input.dim() and _is_number(index)):
        return None
    size, is_whole = len(input), type(index.value) is int
    has_gradient = torch.is_grad_enabled() and input.requires_grad
    if has_gradient or not (is_whole and -size <= index.value < size):
        return None

    def entry(given: Given) -> Any:
        if not (index >= -size and index < size):
            index.refuse()
        place = given.tensor_of(index % size, torch.int64)
        found = input.index_select(0, place.reshape(1)).squeeze(0)
        given.read_only(f"{index.name}, an index into a tensor that the step writes,", input, found)
        return found

    return entry


# ------------------ Lists of tensors


def _one_by_one(
    single: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Form | None:
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    forms = [
        form_of(single, (*tensors, *args[len(lists) :]), kwargs, device)
        for tensors in zip(*lists, strict=False)
    ]
    if any(form is None for form in forms):
        return None
    return lambda given: [form(given) for form in forms if form is not None] and None


_FOREACH = {
    "_foreach_mul_": Tensor.mul_,
    "_foreach_add_": Tensor.add_,
    "_foreach_sub_": Tensor.sub_,
    "_foreach_lerp_": Tensor.lerp_,
}
_FORMS: dict[str, Callable[..., Form | None]] = {
    **dict.fromkeys(("mul", "mul_", "multiply", "multiply_"), _multiplied),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract", "subtract_"), _added),
    **dict.fromkeys(("div", "div_", "divide", "divide_"), _divided),
    **dict.fromkeys(("true_divide", "true_divide_"), _divided),
    **dict.fromkeys(("__rsub__", "rsub"), _computed),
    **dict.fromkeys(("remainder", "fmod"), _rest),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _compared),
    **dict.fromkeys(("less", "less_equal", "greater", "greater_equal", "not_equal"), _compared),
    **dict.fromkeys(("clamp", "clamp_", "clip", "clip_"), _clamped),
    **dict.fromkeys(("lerp", "lerp_"), _interpolated),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked),
    "__rdiv__": _number_by_tensor,
    "clamp_min": lambda f, input, min: _clamped(f, input, min),
    "clamp_max": lambda f, input, max: _clamped(f, input, None, max),
    "where": _chosen,
    "fill_": _filled,
    "__setitem__": _set,
    "__getitem__": _indexed,
    "full": _full,
    "full_like": lambda _, x, fill_value, **o: _made(partial(torch.empty_like, x, **o), fill_value),
    "new_full": lambda _, x, size, fill_value, **o: _made(
        partial(x.new_empty, size, **o), fill_value
    ),
}
