"""``parameter.data = ...`` in captured code, for parameters that an optimizer steps.

Graphs need the memory of these where it is. So what they are set to is copied there. That is the
same as long as nothing else refers to the memory that would have been left, or uses the other.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn import Parameter

from lightning_graphs.device.rules import STORED
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen
from lightning_graphs.private.callsite import LIBRARIES
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import (
    has_memory,
    is_strided,
    memory_of,
    storage_reference,
    storage_uses,
)
from lightning_graphs.watch.mechanism import Mechanism


class SetData:
    """Sets the data of some parameters in place, while captured code runs.

    Args:
        parameters: Those that optimizers step.
        module: Its other parameters, and buffers, may share memory with them.
        loose: So may tensors that it holds in attributes.
    """

    def __init__(
        self, parameters: Iterable[Tensor], module: nn.Module, loose: Iterable[Tensor]
    ) -> None:
        own = {p for p in parameters if isinstance(p, Parameter) and p.requires_grad}
        tensors = {*own, *module.parameters(), *module.buffers(), *loose}
        sharing = Counter(memory_of(t) for t in tensors if has_memory(t))
        self._own = [
            p for p in own if is_strided(p) and sharing[memory_of(p)] == 1 and _is_whole(p)
        ]
        self._uses: dict[int, int] = {}  # of the memory of each, as the code begins
        # What parameters were set to: whether it is alive, by the identity of its memory
        self._given: dict[int, Callable[[], UntypedStorage | None]] = {}
        self._watch = contextlib.ExitStack()

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Do so in the body; refuse there what uses the memory that a parameter was set to."""
        data: Any = Tensor.data
        self._given.clear()
        self._uses = {id(p): storage_uses(p.untyped_storage()) for p in self._own}

        def write(parameter: Any, value: Any) -> None:
            if not self._take(parameter, data.__get__(parameter), value):
                data.__set__(parameter, value)

        with replaced(Parameter, "data", property(data.__get__, write)), self._watch:
            yield

    def mechanism(self) -> Mechanism | None:
        """Let a verification's eager step set them in place, too, if the step does so."""
        return Mechanism(repeated=self.setting) if self._given else None

    def refuse_kept(self, kept: Iterable[Tensor]) -> None:
        """Refuse a step that leaves, or returns, what it has set parameters to."""
        if any(self._is_given(tensor) for tensor in (kept if self._given else ())):
            raise STORED.refused(
                f"{LIBRARIES.step} keeps what it has set `.data` of a parameter to"
            )

    def _take(self, parameter: Any, now: Tensor, value: Any) -> bool:
        """Copy a value to a parameter; False if that is not the same as setting its data."""
        uses = self._uses.get(id(parameter))
        if uses is None or type(value) not in (Tensor, Parameter) or not is_strided(value):
            return False
        kind = [(t.dtype, t.device, t.shape, t.stride()) for t in (now, value)]
        if kind[0] != kind[1]:
            return False
        if memory_of(value) == memory_of(now):
            return bool(value.data_ptr() == now.data_ptr())
        if storage_uses(now.untyped_storage()) > uses + 1:  # by the name here
            return False
        if not self._given:
            self._watch.enter_context(OperatorsSeen(self._see))
        with torch.no_grad():
            now.copy_(value)
        self._given[memory_of(value)] = storage_reference(value.untyped_storage())
        return True

    def _see(self, call: OperatorCall, _: Any) -> None:
        if any(map(self._is_given, call.inputs)):
            raise STORED.refused_here("what `.data` of a parameter was set to is used")

    def _is_given(self, tensor: Tensor) -> bool:
        alive = self._given.get(memory_of(tensor)) if has_memory(tensor) else None
        return alive is not None and alive() is not None


def _is_whole(parameter: Tensor) -> bool:
    """Return whether a parameter has all of its memory, and no flat one has it."""
    return parameter.untyped_storage().nbytes() == parameter.nbytes
