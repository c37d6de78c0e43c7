"""Signatures: what they tell apart, how they say it, and that the compiled check agrees."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_graphs.errors import CaptureError, SignatureError
from lightning_graphs.values.guards import Constant
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.signature import CallPlan, Modes, Signature
from lightning_graphs.values.tree import TensorSpec, substitute

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    image: Any
    label: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Any
    derived: Any = field(init=False, default=3)


class Tagged(Tensor):
    """A tensor subclass, which a static input cannot stand for."""


class Tracked(Tensor):
    """A tensor with operators of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def tagged(tag: str) -> Tensor:
    tensor = torch.zeros(3).as_subclass(Tagged)
    tensor.tag = tag
    return tensor


_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
_CONSTANTS = st.none() | st.booleans() | st.integers(0, 2) | st.floats() | st.text(max_size=2)


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from(_DTYPES)))
    layout = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
    if layout == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    elif layout == "sliced" and shape:
        tensor = tensor[..., ::2]
    elif layout == "expanded":
        tensor = tensor.expand(2, *shape)
    elif tensor.dtype.is_floating_point:
        tensor.requires_grad_(draw(st.booleans()))
    return tensor


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mapping = st.dictionaries(st.text(max_size=2) | st.integers(0, 2), children, max_size=3)
    several = st.lists(children, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        several.map(deque),
        mapping,
        mapping.map(OrderedDict),
        mapping.map(lambda d: defaultdict(list, d)),
        st.builds(Pair, children, children),
    )


_REGISTERED_TREES = st.recursive(_tensors() | _CONSTANTS, _containers, max_leaves=6)
_TREES = st.recursive(
    _tensors() | _CONSTANTS,
    lambda children: (
        _containers(children)
        | st.builds(Sample, children, children)
        | st.builds(Frozen, children)
        # An empty one of a class of which no other was seen does not tell where its items are
        | st.dictionaries(st.text(max_size=2), children, min_size=1, max_size=2).map(UserDict)
        | st.builds(BaseModelOutput, last_hidden_state=_tensors())
    ),
    max_leaves=6,
)
_ARGS = st.lists(_TREES, max_size=3).map(tuple)
_KWARGS = st.dictionaries(st.sampled_from(["mask", "scale"]), _TREES)


def _sign(*args: Any, **kwargs: Any) -> Signature:
    return Signature.of(args, kwargs)[0]


def _same_objects(found: list[Tensor] | None, expected: list[Tensor]) -> bool:
    return found is not None and list(map(id, found)) == list(map(id, expected))


@given(_REGISTERED_TREES)
def test_tensor_leaves_are_those_of_pytree(tree: Any) -> None:
    expected = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert _same_objects(Signature.of((tree,), {})[1], expected)


@given(_ARGS, _KWARGS)
def test_a_rebuilt_call_has_the_signature_and_fits_the_plan(args: Any, kwargs: Any) -> None:
    signature, tensors = Signature.of(args, kwargs)
    again_args, again_kwargs = substitute((args, kwargs), tensors)
    again, again_tensors = Signature.of(again_args, again_kwargs)

    assert again == signature
    assert hash(again) == hash(signature)
    assert signature.diff(again) == []
    assert _same_objects(again_tensors, tensors)
    plan = CallPlan(signature)
    assert _same_objects(plan.match(again_args, again_kwargs), tensors)
    assert _same_objects(plan.tensors(args, kwargs), tensors)


@settings(max_examples=200)
@given(_ARGS, _KWARGS, _ARGS, _KWARGS)
def test_the_plan_accepts_exactly_the_equal_signatures(a: Any, ka: Any, b: Any, kb: Any) -> None:
    first, second = Signature.of(a, ka)[0], Signature.of(b, kb)[0]
    equal = first == second
    assert (CallPlan(first).match(b, kb) is not None) is equal
    assert (first.diff(second) == []) is equal


@given(_tensors(), _tensors())
def test_the_plan_tells_single_tensors_apart_by_their_specs(a: Tensor, b: Tensor) -> None:
    equal = TensorSpec.of(a) == TensorSpec.of(b)
    assert (CallPlan(_sign(a)).match((b,), {}) is not None) is equal


_X = torch.zeros(32, 128)
_MISMATCHES = {
    "shape": (_X, torch.zeros(17, 128), 'batch["x"]: f32[32,128] -> f32[17,128]'),
    "rank": (_X, torch.zeros(128), 'batch["x"]: f32[32,128] -> f32[128]'),
    "scalar": (_X, torch.zeros(()), 'batch["x"]: f32[32,128] -> f32[]'),
    "dtype": (_X, _X.bfloat16(), 'batch["x"]: f32[32,128] -> bf16[32,128]'),
    "stride": (
        _X,
        torch.zeros(128, 32).t(),
        'batch["x"]: f32[32,128] stride (128,1) -> f32[32,128] stride (1,32)',
    ),
    "gradient": (
        _X,
        torch.zeros(32, 128, requires_grad=True),
        'batch["x"]: f32[32,128] -> f32[32,128] requires_grad',
    ),
    "none": (_X, None, 'batch["x"]: f32[32,128] -> None'),
    "constant": (3, 4, 'batch["x"]: 3 -> 4'),
    "bool for int": (1, True, 'batch["x"]: 1 -> True'),
    "float for int": (1, 1.0, 'batch["x"]: 1 -> 1.0'),
    "signed zero": (0.0, -0.0, 'batch["x"]: 0.0 -> -0.0'),
    "object": (
        SimpleNamespace(a=1),
        SimpleNamespace(a=2),
        'batch["x"].a: 1 -> 2',
    ),
    "set": ({1}, {2}, 'batch["x"]: frozenset({1}) -> frozenset({2})'),
    "length": ([1], [1, 2], 'structure: batch["x"]: list of 1 ([0]) -> list of 2 ([0], [1])'),
    "kind": ([1], (1,), 'structure: batch["x"]: list of 1 ([0]) -> tuple of 1 ([0])'),
    "keys": ({"a": 1}, {"b": 1}, 'structure: batch["x"]: dict of 1 (["a"]) -> dict of 1 (["b"])'),
    "leaf": ([1], 1, 'structure: batch["x"]: list of 1 ([0]) -> a leaf'),
    "registered": (deque([1], 2), deque([1], 3), 'structure: batch["x"]: <class '),
}


@pytest.mark.parametrize("case", _MISMATCHES)
def test_a_mismatch_names_its_leaf(case: str) -> None:
    before, after, line = _MISMATCHES[case]
    signature, _ = Signature.of(({"x": before}, 0), {}, names=("batch", "batch_idx"))
    plan = CallPlan(signature)
    assert plan.match(({"x": after}, 0), {}) is None
    with pytest.raises(SignatureError, match="the signature of its capture") as caught:
        plan.tensors(({"x": after}, 0), {})
    assert caught.value.observed.startswith(f"got {line}")
    assert caught.value.remedy


def test_every_difference_has_a_line() -> None:
    plan = CallPlan(_sign(torch.zeros(2), 3, mask=[1]))
    with pytest.raises(SignatureError, match=r"got args\[0\]: .* \.\.\.\n  Fix: ") as caught:
        plan.tensors((torch.zeros(3), 4), {"mask": [2]})
    lines = [line.strip() for line in caught.value.observed.splitlines()]
    assert all(line in caught.value.full for line in lines)
    assert lines == [
        "got args[0]: f32[2] -> f32[3]",
        "args[1]: 3 -> 4",
        'kwargs["mask"][0]: 1 -> 2',
    ]


@pytest.mark.parametrize(
    ("args", "kwargs", "line"),
    [
        ((1,), {"a": 1}, r"args: tuple of 2 .* -> tuple of 1"),
        ((1, 2), {}, r'kwargs: dict of 1 \(\["a"\]\) -> dict of 0'),
        ((1, 2), {"b": 1}, r"kwargs: dict of 1"),
    ],
)
def test_arguments_must_be_the_same_ones(args: Any, kwargs: Any, line: str) -> None:
    with pytest.raises(SignatureError, match=line):
        CallPlan(_sign(1, 2, a=1)).tensors(args, kwargs)


def test_leaf_names_are_what_a_user_would_write() -> None:
    call = ({"x": [1, Pair(2, Sample(3))]}, 4, {5: (6,)})
    signature, _ = Signature.of(call, {"mask": BaseModelOutput(_X)}, names=("batch",))
    assert signature.names == (
        'batch["x"][0]',
        'batch["x"][1].left',
        'batch["x"][1].right.image',
        'batch["x"][1].right.label',
        "args[1]",
        "args[2][5][0]",
        'kwargs["mask"]["last_hidden_state"]',
    )
    assert signature.tensor_names == signature.names[-1:]


def test_specs_read_well() -> None:
    assert str(TensorSpec.of(torch.zeros(2, 3, dtype=torch.uint8))) == "u8[2,3]"
    assert str(TensorSpec.of(torch.zeros(2, 3).t())) == "f32[3,2] stride (1,3)"
    assert str(TensorSpec.of(torch.zeros(2, requires_grad=True))) == "f32[2] requires_grad"
    assert str(TensorSpec.of(torch.zeros(0, 3).t())) == "f32[3,0]"
    cuda = TensorSpec((2,), (1,), torch.float16, torch.device("cuda", 0), False)
    assert str(cuda) == "f16[2] on cuda:0"
    cpu = TensorSpec((2,), (1,), torch.float16, torch.device("cpu"), False)
    assert (cpu.against(cuda), cuda.against(cpu)) == ("f16[2] on cpu", "f16[2] on cuda:0")


def test_constants_are_equal_by_type_and_value() -> None:
    assert Constant.of(math.nan) == Constant.of(float("nan"))
    assert len({Constant.of(v) for v in (1, True, 1.0, "1", 0.0, -0.0, None, False)}) == 8
    shared = {1, 2}
    assert Constant.of(shared) == Constant.of(shared)
    assert CallPlan(_sign(shared)).match((shared,), {}) == []
    assert CallPlan(_sign(math.nan)).match((float("nan"),), {}) == []


_REFUSED = {
    "a tensor of layout torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "a lazily conjugated view": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "a lazily negated view": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
    "a meta tensor": lambda: torch.zeros(3, device="meta"),
    "test_signature.Tracked": lambda: torch.zeros(3).as_subclass(Tracked),
    "test_signature.Tagged with the attributes 'tag'": lambda: tagged("a"),
    "torch.nn.parameter.UninitializedParameter": lambda: torch.nn.UninitializedParameter(),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_special_tensors_are_refused_by_name(kind: str) -> None:
    tensor = _REFUSED[kind]()
    with pytest.raises(CaptureError, match=rf'got .*{kind} as kwargs\["x"\]'):
        _sign(x=tensor)
    dtype = tensor.dtype
    plan = CallPlan(_sign(x=torch.zeros(3, 3) if tensor.is_sparse else torch.zeros(3, dtype=dtype)))
    assert plan.match((), {"x": tensor}) is None
    with pytest.raises(SignatureError, match=rf'got .*{kind} as kwargs\["x"\]'):
        plan.tensors((), {"x": tensor})


def test_a_class_without_operators_of_its_own_is_a_part_of_the_spec() -> None:
    given = torch.zeros(3).as_subclass(Tagged)
    plan = CallPlan(_sign(given))
    assert plan.match((torch.ones(3).as_subclass(Tagged),), {}) is not None
    assert plan.match((torch.ones(3),), {}) is None
    assert CallPlan(_sign(torch.zeros(3))).match((given,), {}) is None
    assert str(TensorSpec.of(given)) == "Tagged f32[3]"
    (buffer,) = StaticInputs([given]).tensors
    assert type(buffer) is Tagged


def test_a_packed_sequence_is_known_by_its_lengths() -> None:
    x = torch.zeros(4, 3, 2)
    call, other = (
        (pack_padded_sequence(x, torch.tensor(lengths), batch_first=True),)
        for lengths in ([3, 2, 2, 1], [3, 3, 1, 1])
    )
    assert call[0].data.shape == other[0].data.shape
    plan = CallPlan(Signature.of(call, {}, host_values=True)[0])
    assert plan.match(call, {}) is not None
    with pytest.raises(
        SignatureError, match=r"batch_sizes: i64\[3\] of \[4, 3, 1\] -> .* \[4, 2, 2\]"
    ):
        plan.tensors(other, {})
    many = pack_padded_sequence(torch.zeros(1, 5000, 1), torch.tensor([5000]), batch_first=True)
    with pytest.raises(CaptureError, match=r"got i64\[5000\] as args\[0\].batch_sizes"):
        Signature.of((many,), {}, host_values=True)


def test_parameters_and_buffers_are_plain_tensors() -> None:
    plan = CallPlan(_sign(torch.zeros(2, requires_grad=True), torch.zeros(2)))
    call = (torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2)))
    assert _same_objects(plan.match(call, {}), list(call))


def test_aliases_are_part_of_the_signature() -> None:
    x, y, z = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    signature = _sign(x, y, x.view(2))
    assert signature.aliases == (0, 1, 0)
    plan = CallPlan(signature)
    assert plan.match((z, x, z), {}) is not None
    with pytest.raises(SignatureError, match=r"args\[2\]: the same tensor as args\[0\] -> a tens"):
        plan.tensors((x, y, z), {})
    with pytest.raises(SignatureError, match=r"args\[1\]: a tensor of its own -> the same tensor"):
        plan.tensors((x, x, x), {})


def test_leaves_with_gradients_of_their_own_are_no_aliases() -> None:
    x = torch.zeros(2, requires_grad=True)
    other = x.detach().requires_grad_()
    assert _sign(x, other, x).aliases == (0, 1, 0)
    plan = CallPlan(_sign(x, x))
    assert plan.match((other, other), {}) is not None
    assert plan.match((x, other), {}) is None


def test_empty_tensors_are_no_aliases() -> None:
    x = torch.zeros(0)
    assert _sign(x, x).aliases == (0, 1)
    assert CallPlan(_sign(x, x)).match((x, torch.zeros(0)), {}) is not None


def test_modes_are_compared() -> None:
    x = torch.zeros(2)
    plan, lax = CallPlan(_sign(x)), CallPlan(_sign(x), check_modes=False)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(SignatureError, match="autocast: off -> bfloat16"):
            plan.tensors((x,), {})
        inside = CallPlan(_sign(x))
        assert lax.match((x,), {}) is not None
    with torch.autocast("cpu", torch.float16), pytest.raises(SignatureError, match="-> float16"):
        inside.tensors((x,), {})
    with torch.no_grad(), pytest.raises(SignatureError, match="grad mode: on -> off"):
        plan.tensors((x,), {})
    with (
        torch.inference_mode(),
        pytest.raises(SignatureError, match="grad mode: on -> off \\.\\.\\.\n") as caught,
    ):
        plan.tensors((x,), {})
    assert "inference mode: off -> on" in caught.value.observed
    assert Modes.current("cpu") == Modes(True, False, None, False)


def test_extra_is_compared() -> None:
    train, evaluate = (Signature.of((), {}, extra=(phase,))[0] for phase in ("train", "eval"))
    assert train != evaluate
    assert train.diff(evaluate) == ["extra: ('train',) -> ('eval',)"]
    assert CallPlan(train).tensors((), {}) == []


def test_substitute_keeps_kinds_and_leaves_originals_alone() -> None:
    factory = defaultdict(list, x=torch.zeros(1))
    tree = [factory, Frozen(torch.zeros(1)), BaseModelOutput(torch.zeros(1)), Pair(1, None)]
    ones = [torch.ones(1) for _ in range(3)]
    copy = substitute(tree, ones)
    assert copy[0].default_factory is list
    assert copy[0]["x"] is ones[0]
    assert copy[1].value is ones[1]
    assert copy[2].last_hidden_state is ones[2]
    assert copy[3] == Pair(1, None)
    assert list(map(type, copy)) == list(map(type, tree))
    assert factory["x"].item() == tree[1].value.item() == tree[2].last_hidden_state.item() == 0
