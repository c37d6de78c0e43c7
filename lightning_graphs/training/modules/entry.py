"""What a call of a module runs, exchanged while a step's own code runs and at no other time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_graphs.core.private.torch import COMPILED_CALL, is_compiled_in_place


class Entry:
    """Stands for a module's ``forward``, or for what ``module.compile()`` has put around it.

    In hooks between steps nobody finds it: there the module can be scripted, traced, exported,
    compiled, copied and pickled as its author made it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = vars(module)
        self._look()

    def _look(self) -> None:
        self._name = COMPILED_CALL if is_compiled_in_place(self._module) else "forward"
        # What the module itself has in its place, unlike its class; None for nothing.
        self.own: Callable[..., Any] | None = self._attributes.get(self._name)
        self._compiled = self._attributes.get(COMPILED_CALL)
        self.original: Callable[..., Any] = getattr(self._module, self._name)  # what it stands for
        self.__wrapped__ = self.original  # inspect.signature shows the original's arguments

    @property
    def is_as_found(self) -> bool:
        """Whether nobody has exchanged, or compiled, what the module has there."""
        attributes = self._attributes
        return (
            attributes.get(self._name) is self.own
            and attributes.get(COMPILED_CALL) is self._compiled
        )

    def install(self) -> None:
        self._look()
        self._attributes[self._name] = self

    def uninstall(self) -> None:
        """Give the place back; may be called again."""
        if self._attributes.get(self._name) is not self:
            return
        if self.own is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The original, bound to the copied module: a step may copy what it trains."""
        copied: Callable[..., Any] = copy.deepcopy(self.original, memo)
        return copied


def original_call(module: nn.Module) -> Callable[..., Any]:
    """What a call of the module runs by itself, whatever stands in its place."""
    call = getattr(module, COMPILED_CALL if is_compiled_in_place(module) else "forward")
    while isinstance(call, Entry):
        call = call.original
    return call  # type: ignore[no-any-return]
