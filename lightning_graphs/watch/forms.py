"""Operators of torch that accept numbers which are other ones in each replay.

For a tensor of 32 or 64 bits most kernels have the number in the tensor's own type, wherever they
get it from. For smaller ones those that multiply compute in 32 bits; those that add round the
number first on a CPU. CUDA divides by a number of the host by multiplying with its inverse.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_graphs.device.rules import COUNTER, HOST_READ, Obstacle
from lightning_graphs.private.exchange import exchanged, standing_in
from lightning_graphs.private.torch import PLAIN_TENSORS
from lightning_graphs.values.guards import REALS
from lightning_graphs.values.memory import empty_as
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.tracers import NumberUses, ScalarTracer

MakeNumber = Callable[[str, Callable[[], Any]], Any]
"""Makes the tracer for a number, given its name and what reads it."""


class Numbers(NumberUses):
    """The numbers in a capture, as operators that get their tracers ask for them.

    These are all read of the device; a capture that follows numbers of the host has more.
    """

    def number(self, name: str, read: Callable[[], Any], obstacle: Obstacle = COUNTER) -> Any:
        """Return what code gets for a number of the host that changes: it is not followed."""
        return read()

    def form_of(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
        """Return how to compute a torch call with tracers; None if unsupported."""
        return form_of(function, args, kwargs, self.device)

    def tensor_of(self, number: ScalarTracer, dtype: torch.dtype) -> Tensor:
        """Return a number in a tensor, which replays have written where the graph reads it."""
        if (own := number.in_graph(dtype)) is None:
            number.refuse()
            HOST_READ.stop_here("a number of the host meets one of the device")
        return own

    def read_only(self, name: str, *tensors: Tensor) -> None:
        """Refuse the capture at its end if it has written to one of these, numbers of the host."""


Form = Callable[[Numbers], Any]
"""Computes what an operator does, with its numbers on the device."""


def form_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, device: torch.device
) -> Form | None:
    """Return how to compute a torch call with tracers on this device; None if unsupported."""
    name, further = getattr(function, "__name__", ""), kwargs or {}
    if any(tensor.device != device for tensor in leaves_of((args, further), Tensor)):
        return None
    if of_single(name) is not None:
        return lambda _: one_by_one(name, args, further)
    make = _FORMS.get(name)
    if make is None:
        return None
    try:
        return make(device if name in _FACTORIES else function, *args, **further)
    except TypeError:  # it has other arguments
        return None


_FACTORIES = ("full", "arange")

# ------------------ Numbers for operators

_SMALL = (torch.bfloat16, torch.float16)
_LARGE = (torch.float32, torch.float64)
_FLOATS = (*_LARGE, *_SMALL)
_KNOWN = {*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_NEAR_ZERO = 1e-7
"""Of what is not nearer, no type makes a zero: which sign that has depends on the kernel."""


def _is_tensor(value: Any, dtypes: Any = _KNOWN) -> bool:
    return type(value) in PLAIN_TENSORS and value.dtype in dtypes


def _is_number(value: Any) -> bool:
    return isinstance(value, ScalarTracer) and isinstance(value.value, REALS)


def plain_value(operand: Any) -> Any:
    """Return the value that a number has in the capture; what is no tracer is returned."""
    return operand.value if isinstance(operand, ScalarTracer) else operand


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

    def compute(given: Numbers) -> Tensor:
        number = other.computed(f"1 / ({other.name})", inverse, other) if is_product else other
        found: Tensor = operate(x.to(wide), given.tensor_of(number, wide))
        if wide == result:
            return found
        return x.copy_(found) if in_place else found.to(result)

    return compute


def inverse(number: float) -> float:
    """Return what CUDA multiplies with where it divides by a number."""
    return 1 / number if number else math.copysign(math.inf, number)


def _number_by_tensor(function: Any, input: Any, other: Any) -> Form | None:
    if not (_is_tensor(input, _FLOATS) and _is_number(other)):
        return None

    def divide(given: Numbers) -> Any:  # as torch's own does
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
    is_small = _is_tensor(other, _SMALL) and _is_tensor(input, _LARGE)
    if is_small and input.shape == other.shape:
        other = other.to(input.dtype)  # exact, and as the kernel itself reads it
    if not _are_alike(input, other):
        return None
    if input.dtype in _SMALL:
        return _in_32_bits(function, input, other, alpha=alpha)
    is_difference = function.__name__.startswith("sub")
    add = Tensor.addcmul_ if _is_in_place(function) else Tensor.addcmul

    def combine(given: Numbers) -> Any:
        factor = given.tensor_of(alpha, input.dtype)
        return add(input, other, -factor if is_difference else factor)

    return combine


def _product_added(
    function: Any, input: Any, tensor1: Any, tensor2: Any, value: Any = 1
) -> Form | None:
    """Form of ``addcmul``, ``addcdiv``: CUDA multiplies what is added, a CPU its first operand."""
    if not (_is_number(value) and _are_alike(input, tensor1) and _are_alike(input, tensor2)):
        return None
    if input.dtype in _SMALL:
        return _in_32_bits(function, input, tensor1, tensor2, value=value)
    divides = "addcdiv" in function.__name__
    add: Any = Tensor.addcmul_ if _is_in_place(function) else Tensor.addcmul
    join: Any = Tensor.add_ if _is_in_place(function) else Tensor.add

    def combine(given: Numbers) -> Any:
        factor = given.tensor_of(value, input.dtype)
        if input.is_cuda:
            return add(input, tensor1 / tensor2 if divides else tensor1 * tensor2, factor)
        scaled = tensor1 * factor
        return join(input, scaled / tensor2) if divides else add(input, scaled, tensor2)

    return combine


def _in_32_bits(function: Any, input: Any, *tensors: Any, **number: Any) -> Form | None:
    """Form of a function over floats of 16 bits that CUDA computes in 32, and rounds once."""
    if not input.is_cuda or torch.is_grad_enabled():
        return None
    name = function.__name__.removesuffix("_")
    form = _FORMS[name](getattr(torch, name), *[x.float() for x in (input, *tensors)], **number)
    if form is None:
        return None
    if not _is_in_place(function):
        return lambda given: form(given).to(input.dtype)
    return lambda given: input.copy_(form(given))


def _interpolated(function: Any, input: Any, end: Any, weight: Any) -> Form | None:
    x = input
    if not (_are_alike(x, end) and _is_number(weight)):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or end.requires_grad):
        return None  # a gradient is multiplied with one minus the number, rounded otherwise
    if x.dtype in _LARGE:
        return lambda given: function(x, end, given.tensor_of(weight, x.dtype))

    def lerp(given: Numbers) -> Any:
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

    def clamped(given: Numbers) -> Any:
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

    def fill(given: Numbers) -> Tensor:
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

    def choose(given: Numbers) -> Any:
        memory = given.tensor_of(number, tensor.dtype)
        return torch.where(condition, *((memory, y) if tensor is y else (x, memory)))

    return choose


def _set(function: Any, input: Any, index: Any, value: Any) -> Form | None:
    if leaves_of(index, ScalarTracer) or _filled(function, input, value) is None:
        return None
    if _is_tensor(index, {torch.bool}):  # as many of them as there are would be read on the host
        mask = index.reshape(index.shape + (1,) * (input.dim() - index.dim()))
        return _masked(Tensor.masked_fill_, input, mask, value)  # Python drops what it returns
    return lambda given: function(input, index, given.tensor_of(value, input.dtype))


def _full(here: torch.device, size: Any, fill_value: Any, **options: Any) -> Form | None:
    if not (_is_number(fill_value) and _is_made_here(here, options.get("device"))):
        return None
    options.setdefault("dtype", torch.full((), fill_value.value).dtype)
    return _made(partial(torch.empty, size, **options), fill_value)


def _is_made_here(here: torch.device, target: Any) -> bool:
    """Return whether ``device=target`` means this device: ``"cpu"`` and none mean the host."""
    if not isinstance(target, (torch.device, str, int)) or target == "cpu":
        return False
    found = torch.device(target)
    return found.type == here.type and found.index in (None, here.index)


def _made(make: Callable[[], Tensor], number: Any) -> Form | None:
    """Form of a factory: a new tensor that is full of a number."""
    if not _is_number(number):
        return None

    def fill(given: Numbers) -> Tensor:
        tensor = make()
        if not _fits(tensor, number):
            number.refuse()
        with torch.no_grad():
            return tensor.fill_(given.tensor_of(number, tensor.dtype))

    return fill


def fill_part(tensor: Tensor, index: Any, number: float) -> bool:
    """Fill a part of a tensor without one that torch would make of the number; False if not."""
    parts = index if type(index) is tuple else (index,)
    if isinstance(index, Tensor) and index.dtype is torch.bool:  # so does torch's own kernel
        further = (1,) * (tensor.dim() - index.dim())
        tensor.masked_fill_(index.reshape(index.shape + further), number)
    elif all(part is None or part is ... or type(part) in (int, slice) for part in parts):
        tensor[index].fill_(number)
    else:
        return False
    return True


def tensor_of_numbers(
    given: Numbers, data: Any, *, device: Any = None, dtype: Any = None, **others: Any
) -> Tensor | None:
    """Make the tensor of the device that code makes of numbers by its own words, or none.

    Kernels fill it: CUDA refuses copies from Python to its memory in a capture.
    """
    if any(others.values()) or not _is_made_here(given.device, device):
        return None
    is_list = type(data) in (list, tuple)
    items = [*data] if is_list else [data]
    kinds = {type(plain_value(item)) for item in items}
    if not items or not kinds <= {int, float}:
        return None
    dtype = dtype or (torch.get_default_dtype() if float in kinds else torch.int64)
    with torch.no_grad():
        found = [
            given.tensor_of(item, dtype).clone()
            if isinstance(item, ScalarTracer)
            else torch.full((), item, dtype=dtype, device=given.device)
            for item in items
        ]
        return torch.stack(found) if is_list else found[0]


# ------------------ An index


def _indexed(function: Any, input: Any, index: Any) -> Form | None:
    """Form of indexing a table by a number alone, for which torch asks no function mode."""
    if not (_is_tensor(input) and input.dim() and _is_number(index)):
        return None
    if not (_takes_places(input, (index,)) and -len(input) <= index.value < len(input)):
        return None
    return lambda given: part_of(given, function, input, index)


PARTS = frozenset({Tensor.__getitem__, Tensor.__setitem__})
"""Functions that get and set parts of tensors, as function modes see them."""


def part_of(
    given: Numbers, own: Callable[..., Any], tensor: Tensor, index: Any, *value: Any
) -> Any:
    """Get or set a part of a tensor; one that moves (``x[ptr : ptr + n]``) by places on the device.

    What is got is a copy, which may not be written. Where the bare numbers are needed after all,
    torch asks for them.
    """
    parts = index if type(index) is tuple else (index,)
    is_here = any(map(_moves, parts)) and tensor.device == given.device
    if not (is_here and _takes_places(tensor, parts, *value)):
        return own(tensor, index, *value)
    places = [_place(given, part, size) for part, size in zip(parts, tensor.shape, strict=False)]
    moving = [dim for dim, place in enumerate(places) if _is_place(place)]
    if not moving:
        return own(tensor, tuple(places), *value)
    if value:
        return _set_part(given, tensor, places, *value)
    found = tensor
    for dim in moving:
        found = found.index_select(dim, places[dim].reshape(-1))
        places[dim] = slice(None) if isinstance(parts[dim], slice) else 0
    found = found[tuple(places)]
    numbers = [(part.start, part.stop) if isinstance(part, slice) else part for part in parts]
    view = tensor[tuple(map(_now, parts))]
    if not view.is_contiguous():  # kernels add up in the order of strides
        found = empty_as(view).copy_(found)
    (name, *_) = (number.name for number in leaves_of(numbers, ScalarTracer))
    given.read_only(f"{name}, an index into a tensor that the step writes,", tensor, found)
    return found


def _set_part(given: Numbers, tensor: Tensor, places: Sequence[Any], new: Any) -> None:
    """Write a part; not by ``tensor[index]``, since torch reads a single place on the host."""
    if _is_number(new):
        new = given.tensor_of(new, tensor.dtype)
    elif not isinstance(new, Tensor):
        new = torch.full((), new, dtype=tensor.dtype, device=tensor.device)
    around = tensor[tuple(slice(None) if _is_place(place) else place for place in places)]
    indices = [place if _is_place(place) else None for place in places if type(place) is not int]
    torch.ops.aten.index_put_.default(around, indices, new.to(tensor.dtype))


def _is_place(part: Any) -> bool:
    return isinstance(part, Tensor)


def _now(part: Any) -> Any:
    """Return a part of an index with its present numbers."""
    if isinstance(part, slice):
        return slice(*map(_now, (part.start, part.stop, part.step)))
    return plain_value(part)


def _moves(part: Any) -> bool:
    """Return whether a part of an index has a number in it that is followed."""
    if isinstance(part, slice):
        return any(isinstance(number, ScalarTracer) for number in (part.start, part.stop))
    return isinstance(part, ScalarTracer)


def _takes_places(tensor: Tensor, parts: Sequence[Any], *value: Any) -> bool:
    """Return whether places on the device can stand for numbers in an index."""
    tensors = [t for t in (tensor, *value) if isinstance(t, Tensor)]
    has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if has_gradient or not _is_tensor(tensor) or len(parts) > tensor.dim():
        return False
    if tensor.is_inference():  # nothing tells of writes to it
        return False
    if any(t.device != tensor.device for t in tensors):
        return False
    if any(_is_number(new) and not _fits(tensor, new) for new in value):
        return False
    entries = [part for part in parts if isinstance(part, ScalarTracer)]
    slices = [part for part in parts if isinstance(part, slice) and _moves(part)]
    if any(type(number.value) is not int for number in entries) or (entries and slices):
        return False
    return len(slices) < 2 and all(isinstance(part, (int, slice, ScalarTracer)) for part in parts)


def _place(given: Numbers, part: Any, size: int) -> Any:
    """Return a part of an index, or the place of each of its elements on the device."""
    if isinstance(part, ScalarTracer):
        number: Any = part
        if not (number >= -size and number < size):
            part.refuse()
        return given.tensor_of(number % size, torch.int64)
    if not _moves(part):
        return part
    begin = 0 if part.start is None else part.start
    end = size if part.stop is None else part.stop
    if part.step not in (None, 1) or not (begin >= 0 and end >= begin and end <= size):
        return part  # torch asks for the bare numbers
    count = end - begin
    if isinstance(count, ScalarTracer):
        count = count.guarded()
    if not isinstance(begin, ScalarTracer):
        return slice(begin, begin + count)
    first = given.tensor_of(begin, torch.int64)
    return torch.arange(count, device=first.device) + first


def _ranged(
    here: torch.device, start: Any, end: Any = None, step: Any = 1, **options: Any
) -> Form | None:
    """Form of ``torch.arange(ptr, ptr + n)``: a fixed count of numbers, from a live one on."""
    numbers = [number.value for number in (start, end) if _is_number(number)]
    is_whole = step == 1 and all(type(number) is int for number in numbers)
    is_whole &= type(end) is int or _is_number(end)
    if not (_is_number(start) and is_whole and _is_made_here(here, options.get("device"))):
        return None
    if options.pop("dtype", torch.int64) is not torch.int64:
        return None

    def count_on(given: Numbers) -> Tensor:
        count: Any = end - start
        first = given.tensor_of(start, torch.int64)
        return torch.arange(count.guarded(), dtype=torch.int64, **options).add_(first)

    return count_on


# ------------------ Lists of tensors

_EACH = "_foreach_"


def _quotient(divide: Callable[..., Any], input: Any, other: Any) -> Any:
    """Divide as kernels over lists do by numbers in a list, of which they take no inverse."""
    form = _multiplied(divide, input, other) if isinstance(other, ScalarTracer) else None
    return divide(input, other) if form is None else form(other.numbers)


def _at_once(name: str, tensors: Any, numbers: Any) -> Callable[[], Any] | None:
    """Return what multiplies or divides all tensors by one number; None if there are several.

    A kernel over lists gives the same bits with a number on the device as with a list of numbers.
    """
    found = numbers if isinstance(numbers, (list, tuple)) else [numbers]
    if not all(map(_is_number, found)) or len({number.name for number in found}) != 1:
        return None
    number, dtype = found[0], tensors[0].dtype
    if dtype not in _LARGE or not all(_is_tensor(tensor, {dtype}) for tensor in tensors):
        return None
    return lambda: getattr(torch, name)(tensors, number.numbers.tensor_of(number, dtype))


_OTHERWISE: dict[str, Callable[..., Any]] = {
    "maximum": torch.clamp_min,
    "maximum_": Tensor.clamp_min_,
    "minimum": torch.clamp_max,
    "minimum_": Tensor.clamp_max_,
}


def of_single(name: str) -> Callable[..., Any] | None:
    """Return what a function over lists does with the items of each; None of other functions."""
    if not name.startswith(_EACH):
        return None
    single = name.removeprefix(_EACH)
    found: Callable[..., Any] | None
    found = getattr(Tensor if single.endswith("_") else torch, single, None)
    return found


def one_by_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function over lists for the items of each list; numbers among them may be tracers."""
    single, values = of_single(name), [*args, *kwargs.values()]
    assert single is not None, "it is one"
    short = name.removeprefix(_EACH)
    if short in _OTHERWISE and leaves_of([*args[1:2]], ScalarTracer):
        single = _OTHERWISE[short]
    divides = short.startswith("div") and isinstance(args[1], (list, tuple))
    if divides:
        single = partial(_quotient, Tensor.div_ if short.endswith("_") else Tensor.div)
    if (divides or short.startswith("mul")) and (at_once := _at_once(name, *args[:2])):
        return at_once()
    named = [*kwargs]
    if short.startswith("addc") and len(args) == 4:
        named = ["value", *named]
    lists = [value if isinstance(value, (list, tuple)) else None for value in values]
    count = next(len(items) for items in lists if items is not None)
    found = []
    for i in range(count):
        given = [v if items is None else items[i] for v, items in zip(values, lists, strict=True)]
        place = len(given) - len(named)
        found.append(single(*given[:place], **dict(zip(named, given[place:], strict=True))))
    return None if short.endswith("_") else found


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
    **dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_"), _product_added),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked),
    "__rdiv__": _number_by_tensor,
    **dict.fromkeys(("clamp_min", "clamp_min_"), lambda f, input, min: _clamped(f, input, min)),
    **dict.fromkeys(("clamp_max", "clamp_max_"), lambda f, x, max: _clamped(f, x, None, max)),
    "where": _chosen,
    "fill_": _filled,
    "__setitem__": _set,
    "__getitem__": _indexed,
    "full": _full,
    "arange": _ranged,
    "full_like": lambda _, x, fill_value, **o: _made(partial(torch.empty_like, x, **o), fill_value),
    "new_full": lambda _, x, size, fill_value, **o: _made(
        partial(x.new_empty, size, **o), fill_value
    ),
}


# ------------------ Functions of Python


def bounds_followed(modules: Iterable[str]) -> AbstractContextManager[None]:
    """Let ``max`` and ``min`` in these modules give numbers that stay followed.

    To Python these are comparisons: a number that has reached its bound is a constant then, and
    so is what code computes of it.
    """

    def bounding(function: Callable[..., Any]) -> Callable[..., Any]:
        def bound(_: FrameType, *args: Any, **kwargs: Any) -> Any:
            numbers = [arg for arg in args if isinstance(arg, ScalarTracer)]
            are_plain = len(numbers) + sum(type(arg) in REALS for arg in args) == len(args)
            if kwargs or not (numbers and are_plain) or any(n.is_of_device for n in numbers):
                return function(*args, **kwargs)
            found = numbers[0].applied(function, args)
            if isinstance(found, ScalarTracer):  # code may have its bound bare
                found.stays |= any(type(arg) in REALS and arg == found.value for arg in args)
            return found

        return standing_in(function, bound)

    found = [(f.__name__, bounding(f)) for f in (max, min)]
    return exchanged([(sys.modules[module], *each) for module in modules for each in found])
