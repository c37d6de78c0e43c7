"""What CUDA refuses inside a capture, told from the operator and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_graphs.core.torch_private import generator_identity

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why an operator cannot be captured.

    Attributes:
        rule: What capture demands, in one sentence.
        remedy: What to write instead.
    """

    rule: str
    remedy: str


HOST_READ = Obstacle(
    "A capture cannot read a value on the host: the GPU has not computed it yet.",
    "keep the value on the device (torch.where, masking, tensor arithmetic), or read it outside "
    "of the captured code",
)
DYNAMIC_SHAPE = Obstacle(
    "A capture cannot contain an operator whose output shape depends on values.",
    "use a fixed shape: torch.where or masked_fill instead of boolean indexing, nonzero or unique",
)
HOST_DATA = Obstacle(
    "A capture cannot build a tensor from Python numbers or NumPy data: that is a copy from "
    "pageable host memory.",
    "create the tensor once outside of the captured code (register_buffer), or use torch.full, "
    "torch.zeros, torch.arange on the device",
)
UNREGISTERED_GENERATOR = Obstacle(
    "A capture must know every random generator that it draws from.",
    "call graph.register_generator_state(generator) before the capture",
)
COMPILED = Obstacle(
    "The emulated backend cannot see the kernels of a torch.compile'd function: it would "
    "rehearse other arithmetic than the one that runs.",
    "rehearse the uncompiled module (torch.compiler.set_stance('force_eager') does not suffice, "
    "pass the original), and capture the compiled one on a GPU",
)
UNSUPPORTED_LAYOUT = Obstacle(
    "A capture can be rehearsed with dense strided tensors only.",
    "convert sparse, nested, quantized or subclassed tensors outside of the captured code",
)
UNDECLARED_MUTATION = Obstacle(
    "A rehearsed operator must declare in its schema every argument that it writes.",
    "name the argument in mutates_args of torch.library.custom_op",
)
SET_GENERATOR = Obstacle(
    "A capture cannot set or rewind a random generator: replays draw fresh numbers from it.",
    "seed outside of the captured code; torch.utils.checkpoint needs preserve_rng_state=False, and "
    "no dropout inside what it recomputes",
)
MOVED_STORAGE = Obstacle(
    "A capture cannot resize or replace the memory of a tensor that existed before it.",
    "allocate the tensor at its final size outside of the captured code and write to it in place",
)

_INDEXING: dict[OpOverload, int] = {
    aten.index.Tensor: 1,
    aten.index_put.default: 1,
    aten.index_put_.default: 1,
    aten._index_put_impl_.default: 1,
    aten._unsafe_index.Tensor: 1,
}
"""Operator -> position of its list of indices. A boolean index is a hidden ``nonzero``."""

_MOVES_STORAGE = frozenset(
    {
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor,
        aten.set_.source_Tensor_storage_offset,
        aten.resize_.default,
        aten.resize_as_.default,
    }
)


def _boolean_index(
    func: OpOverload, args: Sequence[object], is_constant: Callable[[Tensor], bool]
) -> bool:
    indices = args[_INDEXING[func]]
    assert isinstance(indices, Sequence)
    boolean = [i for i in indices if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
    if not boolean:
        return False
    # ``x[mask] = number`` is a masked_fill in torch's own kernel: one mask, a value of the host
    # (``canDispatchToMaskedFill`` in aten/src/ATen/native/TensorAdvancedIndexing.cpp).
    if "put" not in func.name() or len([i for i in indices if i is not None]) > 1:
        return True
    values, accumulate = args[2], args[3] if len(args) > 3 else False
    fills = isinstance(values, Tensor) and values.numel() == 1 and is_constant(values)
    return accumulate is True or not fills


def operator_obstacle(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    generators: Collection[torch.Generator],
    is_constant: Callable[[Tensor], bool],
) -> Obstacle | None:
    """The reason why CUDA would refuse this operator in a capture, or None.

    Args:
        func: The operator as the dispatcher sees it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        generators: The random generators that were registered with the graph.
        is_constant: Tells of a tensor whether it was made of a Python number.
    """
    if func is aten.is_nonzero.default or torch.Tag.data_dependent_output in func.tags:
        return HOST_READ
    if func in _INDEXING:
        return DYNAMIC_SHAPE if _boolean_index(func, args, is_constant) else None
    if func is aten.repeat_interleave.Tensor:
        return None if kwargs.get("output_size") is not None else DYNAMIC_SHAPE
    if torch.Tag.dynamic_output_shape in func.tags:
        return DYNAMIC_SHAPE
    if func in _MOVES_STORAGE:
        return MOVED_STORAGE
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator) and generator_identity(generator) not in map(
        generator_identity, generators
    ):
        return UNREGISTERED_GENERATOR
    return None


def _builds_from_host_data(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    """A 0-d tensor without a device stays on the CPU and enters kernels as a constant: legal."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, Tensor):
        return None
    scalar = isinstance(data, (bool, int, float, complex))
    return None if scalar and kwargs.get("device") is None else HOST_DATA


def _moves_to_host(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    asked = "cpu" in [a for a in args[1:] if isinstance(a, str)] or kwargs.get("device") == "cpu"
    return HOST_READ if asked else None


def _host_read(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    return HOST_READ


def _host_data(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    return HOST_DATA


FUNCTION_RULES: Mapping[
    str, Callable[[Sequence[object], Mapping[str, object]], Obstacle | None]
] = {
    "numpy": _host_read,
    "tolist": _host_read,
    "__array__": _host_read,
    "__repr__": _host_read,
    "__dlpack__": _host_read,
    "cpu": _host_read,
    "to": _moves_to_host,
    "tensor": _builds_from_host_data,
    "as_tensor": _builds_from_host_data,
    "asarray": _builds_from_host_data,
    "new_tensor": _host_data,
    "from_numpy": _host_data,
    "frombuffer": _host_data,
}
"""Python functions that the dispatcher never shows, or shows too late to tell what they are."""
