"""What must be as it was at the capture, beside the batch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_graphs.autograd.nodes import cast_together, has_python_nodes, leaves_behind
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.cudnn import CapturedDropout, dropout_state_of
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import has_gradient_hooks
from lightning_graphs.values.guards import in_words, is_tensor
from lightning_graphs.values.signature import Signature
from lightning_graphs.watch.user_code import is_lightnings

# ------------------ Everything besides the batch that a captured step depends on

Values = tuple[tuple[str, Any], ...]


def moved_values(before: Values, now: Values) -> list[str]:
    """What changed among named values, a line each; two of them may have one name."""
    gone = dict((Counter(before) - Counter(now)).keys())
    new = Counter(now) - Counter(before)
    return [f"{name}: {in_words(gone[name], value)}" for name, value in new if name in gone]


def tensors_moved(before: Values, now: Values) -> list[str]:
    """The names under which there are other tensors now, where all names are the same."""
    if [name for name, _ in before] != [name for name, _ in now]:
        return []
    pairs = [(n, a, b) for (n, a), (_, b) in zip(before, now, strict=True) if a != b]
    return [name for name, *both in pairs if all(map(is_tensor, both))]


@dataclass(frozen=True, slots=True)
class Phase:
    """Which part of an accumulation window a micro-batch is."""

    zeroing: bool  # gradients are zeroed before its backward
    stepping: bool  # the optimizer steps after its backward
    window: int  # ``accumulate_grad_batches``: the loss is divided by it

    def __str__(self) -> str:
        parts = ["zeroing"] * self.zeroing + ["stepping"] * self.stepping
        return f"{' and '.join(parts) or 'neither zeroing nor stepping'}, window of {self.window}"


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """The state of the fit that a capture freezes."""

    phase: Phase  # part of the accumulation window
    # Name and value of what the optimizer's groups hold, but for the live learning rates
    hyper_parameters: Values
    training: tuple[bool, ...]  # the train/eval flag of every module
    # Of the plain attributes that captured steps have read, and of the trainer's clipping
    attributes: Values
    # Which of the optimizer's parameters have one from earlier steps, where the step reads it
    gradients: tuple[bool, ...]

    def holds(self, now: CaptureKey) -> bool:
        """Whether what was captured under these may run now.

        What other captures have read since, which comes last, is no matter.
        """
        return (
            self.phase == now.phase
            and self.hyper_parameters == now.hyper_parameters
            and self.training == now.training
            and self.gradients == now.gradients
            and self.attributes == now.attributes[: len(self.attributes)]
        )

    def diff(self, other: CaptureKey) -> list[str]:
        """What changed, a line each; empty only when equal."""
        lines = []
        if self.phase != other.phase:
            lines.append(f"accumulation: {self.phase} -> {other.phase}")
        if len(self.hyper_parameters) != len(other.hyper_parameters):
            lines.append("the optimizer's parameter groups changed")
        else:
            pairs = zip(self.hyper_parameters, other.hyper_parameters, strict=True)
            lines += [f"{name}: {a!r} -> {b!r}" for (name, a), (_, b) in pairs if a != b]
        if self.training != other.training:
            flips = sum(a != b for a, b in zip(self.training, other.training, strict=False))
            lines.append(f"train/eval mode of {flips} module(s)")
        lines += moved_values(self.attributes, other.attributes)
        if self.gradients != other.gradients:
            lines.append("which parameters have gradients from earlier steps")
        return lines


def signature_in_words(signature: Signature) -> str:
    """A step's signature, short: its tensors, and its part in an accumulation window."""
    phase = conditions_of(signature).phase
    return tensors_in_words(signature) + (f"; {phase}" if phase.window != 1 else "")


def tensors_in_words(signature: Signature) -> str:
    """The tensors of a call: ``x f32[32,128], y i64[32]``."""
    pairs = zip(signature.tensor_names, signature.specs, strict=True)
    return ", ".join(f"{_bare(n)} {spec.against(spec)}" for n, spec in pairs) or "no tensor"


def _bare(name: str) -> str:
    # A batch in a dictionary is known by its keys.
    path = name.removeprefix("batch")
    is_key = path[:2] in ("['", '["') and path[-2:] in ("']", '"]') and path.count("[") == 1
    return path[2:-2] if is_key else name


def differences(before: Signature, after: Signature) -> list[str]:
    """What tells two captures apart, a line each, for a person to read."""
    lines = [line for line in before.diff(after) if not line.startswith("extra: ")]
    return lines + conditions_of(before).diff(conditions_of(after))


def conditions_of(signature: Signature) -> CaptureKey:
    conditions: CaptureKey = signature.extra[0]  # type: ignore[assignment]
    return conditions


# ------------------ Recurrent layers: their weights stay in place, and a seed lets cuDNN make its

_PATIENCE = 2
"""How many steps in a row may begin with a new seed before one is captured all the same: a layer
that no step calls leaves it unused."""


@contextlib.contextmanager
def flattened_once() -> Iterator[None]:
    """Let recurrent layers stay where they are when they are flattened again.

    cuDNN wants their weights in one piece of memory. Models flatten them in each forward, as
    ``nn.DataParallel`` demands, and each time the weights move, which no graph can follow.
    """
    original = nn.RNNBase.flatten_parameters

    def flatten(layer: nn.RNNBase) -> None:
        if len({weight.untyped_storage().data_ptr() for weight in layer.parameters()}) > 1:
            original(layer)

    with replaced(nn.RNNBase, "flatten_parameters", flatten):
        yield


class NewSeeds:
    """Tells which steps make cuDNN's random state anew, so that they run eagerly.

    The state is seeded by a number of torch's generator, which the step draws where its first
    recurrent layer with dropout runs: no replay draws it there.
    """

    def __init__(self, device: torch.device, layers: Sequence[nn.RNNBase]) -> None:
        self._device = device
        self._layers = layers
        self._in_a_row = 0

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> NewSeeds | None:
        """None for a module without recurrent layers."""
        layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
        return cls(device, layers) if layers else None

    def are_used_by_next_step(self) -> bool:
        """Whether the coming step is no example of those after it, and is not to be captured."""
        state = dropout_state_of(self._device, self._layers)
        if state is None or state.now() is not None:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        return self._in_a_row <= _PATIENCE


def refuse_new_seeds(dropout: CapturedDropout | None) -> None:
    """Refuse a captured step that draws dropout where each step begins with a new seed."""
    if dropout is not None and not dropout.is_current():
        raise CaptureError(
            "A replay cannot make the random state anew from which cuDNN draws the dropout between "
            "recurrent layers.",
            "a generator of torch's is set before each step, which makes torch seed that state",
            "set seeds once, before the fit",
        )


# ------------------ Finds the hooks that run within a step: its graph is cut where they look

_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")

_BASES = ("callbacks.callback", "core.hooks", "core.module", "plugins.precision.precision")


@dataclass(frozen=True, slots=True)
class Observers:
    """Names of the overridden hooks that run between two parts of a step."""

    before_backward: tuple[str, ...]  # they run after the forward pass and before the backward pass
    before_step: tuple[str, ...]  # they run after the backward pass and before the optimizer step
    own_zero_grad: bool  # the module decides by itself how gradients are zeroed

    @classmethod
    def of(cls, trainer: Trainer, module: LightningModule) -> Observers:
        before = _observers(trainer, module, _BEFORE_BACKWARD)
        after = _observers(trainer, module, _BEFORE_STEP)
        # Who looks before the backward pass may also move what the optimizer step reads.
        return cls(before, after or before, overrides(module, "optimizer_zero_grad"))


def moves_batches_itself(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the user's own code runs while a batch is moved to the device.

    It may read what the running step writes, so it must wait for the step.
    """
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
    return any(overrides(owner, hook) for owner in owners for hook in hooks)


def overrides(instance: object, method: str) -> bool:
    """Whether anything but Lightning's base classes defines the method."""
    if method in vars(instance):
        return True
    own = getattr(type(instance), method, None)
    return own is not None and not is_lightnings(own, *_BASES)


def _observers(
    trainer: Trainer, module: LightningModule, hooks: tuple[str, ...]
) -> tuple[str, ...]:
    owners = [*trainer.callbacks, module]  # type: ignore[attr-defined]
    pairs = ((owner, hook) for hook in hooks for owner in owners if overrides(owner, hook))
    return tuple(f"{type(owner).__name__}.{hook}" for owner, hook in pairs)


def is_backward_unseen(trainer: Trainer, module: LightningModule, loss: Tensor) -> bool:
    """Whether nobody sees ``.grad`` in the backward pass: autograd's own operators alone run."""
    return (
        not overrides(module, "backward")
        and not overrides(trainer.precision_plugin, "backward")
        and not has_python_nodes([loss], compiled=False)
        and not any(map(has_gradient_hooks, leaves_behind([loss])))
    )


def cast_unseen(
    trainer: Trainer, module: LightningModule, loss: Tensor
) -> AbstractContextManager[None]:
    """Around a backward pass that nobody sees, on one device: cast gradients together.

    Those that wait for their cast are not in ``.grad`` yet.
    """
    is_alone = is_lightnings(type(trainer.strategy), "strategies.single_device") and not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )
    if not (is_alone and is_backward_unseen(trainer, module, loss)):
        return contextlib.nullcontext()
    return cast_together([loss], [p for p in module.parameters() if p.requires_grad])
