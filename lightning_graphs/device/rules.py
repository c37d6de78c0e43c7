"""Tells what CUDA refuses inside of a capture, from the operator and its arguments."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import walk_stack, walk_tb
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from lightning_graphs.errors import CODE, REFUSED, CaptureError, CaptureStopped, stop
from lightning_graphs.private.callsite import CallSiteFinder, frames_of_region
from lightning_graphs.private.generators import generator_identity
from lightning_graphs.private.torch import in_forward_mode

aten = torch.ops.aten


@dataclass(slots=True, eq=False)
class Obstacle:
    """A reason why something cannot be captured."""

    rule: str  # what capture demands, in one sentence
    remedy: str  # what to write instead
    kind: str  # a short name that programs can rely on
    code: str = ""  # the remedy as a line or two of code
    rehearsal: bool = False  # it stands in the way of a rehearsal only, and not on a GPU

    def __post_init__(self) -> None:
        CODE[self.remedy] = self.code
        OBSTACLES.setdefault(self.rule, self)

    def refused(self, observed: str) -> CaptureError:
        """Return the error for an observed use."""
        return CaptureError(self.rule, observed, self.remedy)

    def refused_here(self, what: str) -> CaptureError:
        """Return the error for a use by the user's current line."""
        return self.refused(f"{what} at {CallSiteFinder().of_refusal().describe()}")

    def refuse(self, observed: str) -> None:
        """Refuse an observed use; see :func:`refuse`."""
        refuse(self.refused(observed))

    def refuse_here(self, what: str) -> None:
        """Refuse a use by the user's current line; see :func:`refuse`."""
        refuse(self.refused_here(what))

    def stop_here(self, what: str) -> NoReturn:
        """Refuse a use by the user's current line, which cannot go on; see :func:`stop`."""
        stop(self.refused_here(what))


OBSTACLES: dict[str, Obstacle] = {}
"""Rule -> its obstacle."""
_noting: list[bool] = []


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Let captures in the body note what they refuse, and the captured code go on if it can."""
    _noting.append(True)
    try:
        yield
    finally:
        _noting.pop()


def are_noted() -> bool:
    """Return whether refusals are noted."""
    return bool(_noting)


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Raise the refusal that has stopped the code of the body."""
    try:
        yield
    except CaptureStopped as stop:
        raise stop.refusal from stop.__cause__


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Let a refusal of the body, which captured code calls, stop that code; see :func:`stop`."""
    try:
        yield
    except CaptureError as error:
        stop(error)


@contextlib.contextmanager
def refusals() -> Iterator[list[CaptureError]]:
    """Collect the refusals that the body makes, also those that captured code catches."""
    refused: list[CaptureError] = []
    REFUSED.append(refused)
    try:
        with stopped():
            yield refused
    finally:
        REFUSED.pop()
        refused.clear()  # their tracebacks hold frames, and what the captured code holds


def refuse(error: CaptureError) -> None:
    """Refuse what captured code does: end it, or return if that is noted and the code can go on."""
    if not _noting:
        stop(error)
    error.is_noted = True
    traceback: types.TracebackType | None = None
    for frame in frames_of_region(sys._getframe(1)):
        traceback = types.TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
    error.__traceback__ = traceback


_IN_WORDS = dict.fromkeys(
    ("aten._local_scalar_dense.default", "aten.is_nonzero.default"), "item(), float() or an if"
)


def worded(operator: str) -> str:
    """Name an operator as user code calls it, where the two differ."""
    words = _IN_WORDS.get(operator)
    return operator if words is None else f"{words} ({operator})"


def as_operator(words: str) -> str:
    """Return the operator that was named in words; other words are returned."""
    return next((operator for operator in _IN_WORDS if worded(operator) == words), words)


HOST_READ = Obstacle(
    "A capture cannot read a value on the host, because the GPU has not computed it yet.",
    "keep the value on the device (torch.where, masking, tensor arithmetic), or read it outside "
    "of the captured code",
    kind="host-read",
    code="total += loss.detach()  # the tensor, without item()\n"
    "loss = torch.where(condition, a, b)  # in place of an if",
)
NOT_RECORDED = Obstacle(
    "A capture cannot contain an operation that CUDA refuses to record.",
    "move the operation out of the captured code; typical ones are .item(), .cpu(), print of a "
    "tensor, boolean indexing, torch.tensor(...), a copy from pageable host memory",
    kind="host-read",
    code=HOST_READ.code,
)
AFTERMATH = "previous error during capture"
"""What CUDA says in a capture that something refused has ended, and user code has caught that."""
DYNAMIC_SHAPE = Obstacle(
    "A capture cannot contain an operator whose output shape depends on values.",
    "use a fixed shape: torch.where or masked_fill instead of boolean indexing, nonzero or unique",
    kind="data-dependent-shape",
    code="loss = torch.where(mask, losses, 0.0).sum() / mask.sum()  # for losses[mask].mean()",
)
LINEAR_ALGEBRA = Obstacle(
    "A capture cannot contain a function of torch.linalg that checks its result on the host.",
    "use inv_ex, solve_ex, cholesky_ex or lu_factor_ex, which leave the check out; call svd, eigh, "
    "eig and matrix_exp outside of the captured code",
    kind="host-read",
    code="inverse = torch.linalg.inv_ex(x).inverse  # in place of torch.linalg.inv(x)",
)
CTC_LOSS = Obstacle(
    "A capture cannot contain ctc_loss, which reads the input and target lengths on the host.",
    "compute the lengths from the batch alone, and pass targets of 64 bits; or call "
    "ctc_loss outside of the captured code",
    kind="host-read",
    code='loss = F.ctc_loss(log_probs, targets.long(), lengths, (batch["labels"] > 0).sum(-1))',
)
HOST_DATA = Obstacle(
    "A capture cannot build a tensor from Python numbers or NumPy data, which is a copy from "
    "pageable host memory.",
    "create the tensor once outside of the captured code (register_buffer), or use torch.full, "
    "torch.zeros, torch.arange on the device",
    kind="host-data",
    code='self.register_buffer("weights", torch.tensor([1.0, 2.0]))  # in __init__\n'
    "loss = losses @ self.weights  # in the captured code",
)
HOST_COPY = Obstacle(
    "A capture cannot move a tensor from the CPU to the device, which is a copy from pageable host "
    "memory.",
    "make the tensor on the device, keep it there in a buffer, or pass it in with the batch",
    kind="host-copy",
    code="positions = torch.arange(n, device=self.device)  # in place of torch.arange(n).to(...)\n"
    'self.register_buffer("table", table)  # in __init__, for what stays the same',
)
CONTROL_FLOW = Obstacle(
    "A capture cannot contain torch.cond and the like, because the host chooses the branch.",
    "compute both ways and choose with torch.where, or loop in Python a fixed number of times",
    kind="control-flow",
    code="loss = torch.where(condition, a, b)  # in place of torch.cond",
)
COLLECTIVE = Obstacle(
    "A graphed submodule cannot call collectives, because each rank replays it by itself.",
    "call the collective outside of the submodule, or capture the whole step",
    kind="collective",
    code="torch.distributed.all_reduce(loss)  # after the call of the submodule",
)
UNREGISTERED_GENERATOR = Obstacle(
    "A capture cannot draw from a random generator that is not registered with its graph.",
    "draw from the default generator, without generator=; with core.CUDAGraph, call "
    "graph.register_generator_state(generator) before the capture",
    kind="random-generator",
    code="noise = torch.randn_like(x)  # without generator=",
)
COMPILED = Obstacle(
    "The emulated backend cannot see the kernels of a torch.compile'd function.",
    "rehearse the original module (torch.compiler.set_stance('force_eager') is not enough), and "
    "capture the compiled one on a GPU",
    kind="compiled",
    code="graph = core.CUDAGraph()  # on a GPU, where the compiled module is captured",
    rehearsal=True,
)
UNSUPPORTED_LAYOUT = Obstacle(
    "The emulated backend can capture dense strided tensors only.",
    "convert sparse, nested or quantized tensors outside of the captured code",
    kind="layout",
    code="x = x.to_dense()  # in the data loader",
    rehearsal=True,
)
SET_GENERATOR = Obstacle(
    "A capture cannot set or rewind a random generator, because replays draw new numbers from it.",
    "set the seed outside of the captured code; give torch.utils.checkpoint "
    "preserve_rng_state=False, and no dropout in what it recomputes",
    kind="random-generator",
    code="checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)",
)
MOVED_STORAGE = Obstacle(
    "A capture cannot resize or replace the memory of a tensor that existed before it.",
    "allocate the tensor at its final size outside of the captured code, and write to it in place",
    kind="moved-memory",
    code='self.register_buffer("memory", torch.zeros(size))  # in __init__\n'
    "self.memory[: len(x)].copy_(x)  # in the captured code",
)
REBOUND = Obstacle(
    "A graphed callable must change the tensors of its modules in place, because a replay sets no "
    "attributes.",
    "write `self.x.copy_(new)` instead of `self.x = new`, or return the new tensor",
    kind="python-state",
    code='self.register_buffer("last", torch.zeros(size))  # in __init__\n'
    "self.last.copy_(x)  # in forward, for self.last = x",
)

READ_BEFORE = Obstacle(
    "A captured call must bind an attribute to its new tensor before captured code reads it.",
    REBOUND.remedy,
    kind="python-state",
    code=REBOUND.code,
)

CACHED_WEIGHTS = Obstacle(
    "A capture must not begin inside of torch.nn.utils.parametrize.cached(), because a replay "
    "would read weights that are gone when it ends.",
    "write `with parametrize.cached():` inside of the step",
    kind="python-state",
    code="with parametrize.cached():  # in the step\n    logits = self.net(x) + self.net(-x)",
)

# ------------------ Python code

STORED = Obstacle(
    "A replay runs no Python code, and cannot set the attribute.",
    "set the attribute after the captured code, from the values that it returns; change buffers "
    "in place",
    kind="python-state",
)
STORED_OUTSIDE = Obstacle(
    "A replay runs no Python code, and cannot set global or enclosing variables or attributes of "
    "classes.",
    "set the variable after the captured code, from the values that it returns",
    kind="python-state",
)
SIDE_EFFECT = Obstacle(
    "A replay runs no Python code, cannot read or write files, and can print and call loggers only "
    "behind its graph.",
    "move that code after the captured code, with what it returns",
    kind="python-state",
)
DRAWN = Obstacle(
    "A graph would freeze a random number, or another value, that the step draws on the host.",
    "draw on the device (torch.rand(..., device=...)), or in the data loader; replays can follow a "
    "number that is only added, multiplied or compared, or made a tensor",
    kind="python-state",
    code="share = torch.rand((), device=self.device)  # in place of random.random()",
)
CLOCK = Obstacle(
    "A graph would freeze a clock.",
    "compute and decide with times outside of the captured code, which may store them: every "
    "replay reads the clock again for that",
    kind="python-state",
)
COUNTER = Obstacle(
    "A graph would freeze a counter, or another number that changes from step to step.",
    "make the value a tensor that is filled ahead of the captured code; replays can follow a "
    "counter that is only added, multiplied, divided or compared",
    kind="python-state",
)
OLD_GRADIENTS = Obstacle(
    "A captured step cannot use gradients before its backward pass, because those of the step "
    "before are set aside.",
    "use gradients after the backward pass, and keep what the next step needs of them in a buffer",
    kind="python-state",
)
SCHEDULED = Obstacle(
    "A replay steps a scheduler at its end, after all steps of the scheduler's optimizer.",
    "step the scheduler at the end of the step; one that takes a value, in a hook",
    kind="python-state",
)
USED_BEHIND = Obstacle(
    "An optimizer step that runs eagerly behind the graph must be the last use of its parameters.",
    "take the step at the end of the captured code, and do what follows it outside of that; or use "
    "an optimizer that graphs can step",
    kind="optimizer",
)
OPTIMIZER_SET = Obstacle(
    "A replay runs no Python code, and cannot set values in the optimizer.",
    "set the value outside of the captured code, or with a scheduler",
    kind="python-state",
    code='optimizer.param_groups[0]["weight_decay"] = 0.1  # ahead of the captured code',
)
MOVING_VALUE = Obstacle(
    "A graph would freeze an attribute or a global variable, which keeps changing.",
    "keep the value in a tensor, which is filled ahead of the captured code",
    kind="python-state",
    code="scale.fill_(number)  # a tensor that the captured code multiplies with",
)
GRADIENTS_CHANGED = Obstacle(
    "A captured step of an evaluation cannot change the gradients of parameters.",
    "use torch.autograd.grad(...), which returns gradients",
    kind="python-state",
    code="(gradient,) = torch.autograd.grad(score, x)  # in place of score.backward()",
)
CHANGING_SHAPE = Obstacle(
    "A graph can replay only for batches of the shapes that it was captured with.",
    "pad to a few fixed lengths, and drop the short last batch",
    kind="changing-shape",
    code="DataLoader(data, batch_size=32, drop_last=True, collate_fn=pad_to_a_multiple)",
)
BATCH_CHANGED = Obstacle(
    "A replay can put tensors and plain values into dicts, lists and dataclasses of its batch, and "
    "change no other objects there.",
    "return the value, and use it after the captured code",
    kind="python-state",
)
BATCH_VALUE = Obstacle(
    "A graph would freeze a Python value of the batch, which differs from batch to batch.",
    "make a tensor of what the step needs of the value, in the dataset or in collate_fn",
    kind="batch-value",
    code="def collate(samples):\n"
    "    batch = default_collate(samples)\n"
    '    batch["weight"] = torch.tensor([weight_of(path) for path in batch["path"]])\n'
    "    return batch",
)
FILLED = Obstacle(
    "A captured step can fill a list, but cannot compute with the list.",
    "compute with the list after the captured code, or keep the last few entries in a deque",
    kind="python-state",
)

READ_IN_BACKWARD = replace(
    HOST_READ,
    remedy="use operators whose backward pass reads nothing: exp, sum and cumsum of logarithms in "
    "place of prod and cumprod, torch.where in place of masked_fill with a trained value; or leave "
    "that line outside of the captured code",
    code="y = torch.where(mask, self.token, x)  # in place of x.masked_fill(mask, self.token)",
)
TANGENTS = Obstacle(
    "A rehearsal cannot contain forward-mode autograd (jvp, jacfwd, hessian) through normalization "
    "layers, whose tangents torch computes otherwise where operators are watched.",
    "use reverse mode (torch.func.vjp, jacrev), or capture the code on a GPU",
    kind="forward-mode",
    code="jacobian = torch.func.jacrev(self.net)(x)  # in place of jacfwd",
    rehearsal=True,
)

WITH_OTHER_TANGENTS = frozenset(
    {"prod", "layer_norm", "group_norm", "instance_norm", "batch_norm", "native_layer_norm"}
    | {"native_group_norm", "native_batch_norm", "_native_batch_norm_legit"}
)
"""Functions with another formula in forward mode where a dispatch mode is on; see below."""

_READS_BACKWARD: Mapping[str, Callable[[Any], bool]] = {
    "ProdBackward0": lambda node: node._saved_self.dim() > 0,
    "ProdBackward1": lambda node: node._saved_self.dim() > 0,
    "CumprodBackward0": lambda node: _accumulates(node._saved_self, node._saved_dim),
    "MaskedFillBackward1": lambda node: node.next_functions[1][0] is not None,
    "LinalgDetBackward0": lambda node: torch.is_grad_enabled(),
}
"""Nodes of autograd whose backward pass reads values on the host, and when it does.

Where a dispatch mode is on, it takes another formula that reads none, and rounds otherwise:
``areAnyTensorSubclassLike`` in torch/csrc/autograd/FunctionsManual.cpp.
"""
WITH_TWO_FORMULAS = frozenset(_READS_BACKWARD)
OF_TWO_FORMULAS = frozenset(
    {aten.prod.default, aten.prod.dim_int, aten.cumprod.default, aten._linalg_det.default}
    | {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.cumprod_.default}
)
"""The operators that these nodes are for."""


def has_other_tangents(function: Any) -> bool:
    """Return whether a function computes tangents that differ under a dispatch mode."""
    return getattr(function, "__name__", "") in WITH_OTHER_TANGENTS and in_forward_mode()


def name_of_node(node: object) -> str:
    """Return torch's name of the operator whose backward pass an autograd node is."""
    return type(node).__name__.partition("Backward")[0]


def _accumulates(tensor: Tensor, dim: int) -> bool:
    return tensor.dim() > 0 and tensor.numel() > 1 and tensor.shape[_signed(dim)] > 1


def _signed(number: int) -> int:
    """Return the signed value of a number that torch stores signed and shows unsigned."""
    return number - 2**64 if number >= 2**63 else number


def reads_in_backward(node: object) -> bool:
    """Return whether an autograd node, about to run or running, reads values on the host."""
    rule = _READS_BACKWARD.get(type(node).__name__)
    return rule is not None and rule(node)


_LOOKED_AT = frozenset(
    {aten._linalg_check_errors.default, aten._linalg_svd.default, aten._linalg_eigh.default}
    | {aten.linalg_eig.default, aten._linalg_eigvals.default, aten.linalg_matrix_exp.default}
    | {aten.linalg_pinv.atol_rtol_tensor}
)
"""See ``_linalg_check_errors`` and ``mexp`` in aten/src/ATen/native."""

INDEXING = frozenset(
    {aten.index.Tensor, aten._unsafe_index.Tensor}
    | {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)
"""Operators whose second argument is a list of indices; a boolean one is a hidden ``nonzero``."""

MOVES_STORAGE = (aten.set_, aten.resize_, aten.resize_as_)
"""Operators that give a tensor other memory."""


@dataclass(slots=True, eq=False)
class Remedy:
    """The remedy for a library function that cannot be captured."""

    remedy: str
    code: str

    def __post_init__(self) -> None:
        CODE[self.remedy] = self.code


IS_CAUSAL = Remedy(
    "say whether the mask is causal, which torch else reads from the mask: is_causal=True or False "
    "(of a decoder tgt_is_causal, of nn.Transformer src_is_causal and tgt_is_causal)",
    "y = self.encoder(x, mask=self.mask, is_causal=True)",
)
MOMENTUM = Remedy(
    "give the BatchNorm a momentum: with None torch reads num_batches_tracked on the host",
    "nn.BatchNorm1d(64, momentum=0.1)",
)
GROUPED = Remedy(
    "train weights in bfloat16: torch multiplies those of all experts in one kernel, which reads "
    "nothing on the host",
    "model.to(torch.bfloat16)",
)
CLASSES = Remedy(
    "pass num_classes, which one_hot reads from the largest value otherwise",
    "codes = F.one_hot(labels, num_classes=10)",
)
NESTED = Remedy(
    "let the encoder make no nested tensors of padded batches, whose sizes are on the host: "
    "enable_nested_tensor=False, or encoder.use_nested_tensor = False",
    "nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)",
)
TIMES = Remedy(
    "record events around the step: those inside are nodes of the graph, and have no time",
    "begin.record(); train_step(batch); end.record()",
)
_OF_LAYERS = os.path.join("torch", "nn", "modules", "")
_NESTED = aten._nested_tensor_from_mask_left_aligned, aten._nested_tensor_from_mask
_CAUSES: dict[tuple[str, str], Remedy] = {
    ("torch/nn/modules/transformer.py", "_detect_is_causal_mask"): IS_CAUSAL,
    ("torch/nn/modules/batchnorm.py", "forward"): MOMENTUM,
    ("torch/cuda/streams.py", "elapsed_time"): TIMES,
    ("transformers/integrations/moe.py", "_grouped_mm"): GROUPED,
    ("transformers/integrations/moe.py", "_grouped_mm_fallback"): GROUPED,
}
"""End of a file's path, and the function in it that reads."""


def know_cause(file: str, function: str, remedy: Remedy) -> None:
    """Take a remedy where this function, in a file whose path ends so, does what is refused."""
    _CAUSES[file, function] = remedy


_BY_ITSELF: dict[tuple[Any, str], str] = {}
"""What rules say without the words of a client."""


def speak(words: Mapping[Any, Mapping[str, str]]) -> None:
    """Replace ``remedy`` and ``code`` of rules and remedies by a client's words."""
    given = _texts(words)
    for spoken, field in given:
        _BY_ITSELF.setdefault((spoken, field), getattr(spoken, field))
    _set(given)


@contextlib.contextmanager
def speaking(words: Mapping[Any, Mapping[str, str]]) -> Iterator[None]:
    """Let rules speak a client's words in the body, and no words of another one."""
    said = {**_BY_ITSELF, **_texts(words)}
    before = {(spoken, field): getattr(spoken, field) for spoken, field in said}
    try:
        _set(said)
        yield
    finally:
        _set(before)


def _texts(words: Mapping[Any, Mapping[str, str]]) -> dict[tuple[Any, str], str]:
    return {(spoken, field): text for spoken, own in words.items() for field, text in own.items()}


def _set(texts: Mapping[tuple[Any, str], str]) -> None:
    for (spoken, field), text in texts.items():
        setattr(spoken, field, text)
    for spoken, _ in texts:
        CODE[spoken.remedy] = spoken.code


def may_follow_values(error: BaseException | None) -> bool:
    """Return whether a refusal may be about a data-dependent shape; CUDA does not say."""
    return isinstance(error, CaptureError) and error.rule in (DYNAMIC_SHAPE.rule, NOT_RECORDED.rule)


def with_known_remedy(obstacle: Obstacle) -> Obstacle:
    """Return the obstacle with the remedy for the library function that this thread runs."""
    found = _remedy_for([frame for frame, _ in walk_stack(sys._getframe(1))][::-1])
    return obstacle if found is None else replace(obstacle, remedy=found.remedy, code=found.code)


def known_remedy(error: BaseException, otherwise: str) -> str:
    """Return the remedy for the library function that raised an error."""
    found = _remedy_for([frame for frame, _ in walk_tb(error.__traceback__)])
    return otherwise if found is None else found.remedy


def _remedy_for(frames: Sequence[types.FrameType]) -> Remedy | None:
    """Return the remedy for what frames run, of which the last one was called last."""
    codes = [frame.f_code for frame in frames]
    layers = [code for code in codes if _OF_LAYERS in code.co_filename]
    if layers[-1:] == [nn.TransformerEncoder.forward.__code__]:
        return NESTED  # the function that makes them is in C, and this one calls it
    return next(filter(None, map(_remedy_of, reversed(codes))), None)


def _remedy_of(code: types.CodeType) -> Remedy | None:
    path = code.co_filename.replace(os.sep, "/")
    for (file, function), remedy in _CAUSES.items():
        if code.co_name == function and path.endswith(file):
            return remedy
    return None


def _copy_obstacle(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Obstacle | None:
    """Return the obstacle to a copy between host and device; pinned memory is legal both ways."""
    if func is aten.copy_.default:
        target, source = args[:2]
        assert isinstance(target, Tensor)
        pinned = target.device.type == "cpu" and target.is_pinned()
        target_type = target.device.type
    else:
        source, target = args[0], kwargs.get("device")
        pinned = kwargs.get("non_blocking") is True  # torch allocates pinned memory then
        target_type = target.type if isinstance(target, torch.device) else ""
    assert isinstance(source, Tensor)
    if source.numel() == 0:
        return None
    if source.device.type == "cpu" and target_type not in ("cpu", "meta", ""):
        return None if source.is_pinned() else HOST_COPY
    if source.device.type != "cpu" and target_type == "cpu":
        return None if pinned else HOST_READ
    return None


def _boolean_index(
    func: OpOverload, args: Sequence[object], is_constant: Callable[[Tensor], bool]
) -> bool:
    indices = args[1]
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
    """Return the reason why CUDA would refuse this operator in a capture, or None."""
    if func in _LOOKED_AT:
        return LINEAR_ALGEBRA
    if func.overloadpacket in _NESTED:
        return replace(HOST_READ, remedy=NESTED.remedy, code=NESTED.code)
    if func.overloadpacket is aten._ctc_loss:
        return None if func is aten._ctc_loss.default else CTC_LOSS
    if func is aten.is_nonzero.default or torch.Tag.data_dependent_output in func.tags:
        return HOST_READ
    if func in INDEXING:
        return DYNAMIC_SHAPE if _boolean_index(func, args, is_constant) else None
    if func is aten.repeat_interleave.Tensor:
        return None if kwargs.get("output_size") is not None else DYNAMIC_SHAPE
    if torch.Tag.dynamic_output_shape in func.tags:
        return DYNAMIC_SHAPE
    if func.overloadpacket in MOVES_STORAGE:
        return MOVED_STORAGE
    if func in (aten._to_copy.default, aten.copy_.default):
        return _copy_obstacle(func, args, kwargs)
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator) and generator_identity(generator) not in map(
        generator_identity, generators
    ):
        return UNREGISTERED_GENERATOR
    return None


def _builds_from_host_data(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    """A 0-d tensor of the CPU enters kernels as a constant: legal.

    Tensors in a list are read, one number after the other.
    So is an empty one: torch copies nothing then (``copy_impl`` in aten/src/ATen/native/Copy.cpp).
    """
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, Tensor) or (isinstance(data, (list, tuple)) and not data):
        return None
    if isinstance(data, (list, tuple)) and any(isinstance(item, Tensor) for item in data):
        return HOST_READ
    scalar = isinstance(data, (bool, int, float, complex))
    on_host = kwargs.get("device") in (None, "cpu")  # in a rehearsal, too, if it is named
    return None if scalar and on_host else HOST_DATA


def _moves_to_host(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    asked = "cpu" in [a for a in args[1:] if isinstance(a, str)] or kwargs.get("device") == "cpu"
    return HOST_READ if asked else None


def _reads_lengths(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    lengths = (*args[2:4], kwargs.get("input_lengths"), kwargs.get("target_lengths"))
    return CTC_LOSS if any(isinstance(given, Tensor) for given in lengths) else None


def _reads_packed(args: Sequence[object], kwargs: Mapping[str, object]) -> Obstacle | None:
    """A packed sequence has its lengths on the host, where recurrent layers read them."""
    lengths = args[1] if len(args) > 1 else None
    return HOST_READ if isinstance(lengths, Tensor) and lengths.dtype is torch.int64 else None


RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions of recurrent layers."""

_Rule = Callable[[Sequence[object], Mapping[str, object]], Obstacle | None]
FUNCTION_RULES: Mapping[str, _Rule] = {
    "to": _moves_to_host,
    "ctc_loss": _reads_lengths,
    **dict.fromkeys(("_pack_padded_sequence", "_pad_packed_sequence"), _reads_packed),
    **dict.fromkeys(RECURRENT, _reads_packed),
    **dict.fromkeys(WITH_OTHER_TANGENTS, lambda *_: TANGENTS if in_forward_mode() else None),
    "prod": lambda *_: HOST_READ if in_forward_mode() else None,
    **dict.fromkeys(("tensor", "as_tensor", "asarray"), _builds_from_host_data),
    **dict.fromkeys(("new_tensor", "from_numpy", "frombuffer"), lambda args, kwargs: HOST_DATA),
    **dict.fromkeys(
        ("numpy", "tolist", "__array__", "__repr__", "__dlpack__", "cpu"),
        lambda args, kwargs: HOST_READ,
    ),
}
"""Python functions that the dispatcher never shows, or shows too late to tell what they are."""
