"""Names for what is launched: the module path and the ``record_function`` ranges around it."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_graphs.core.arguments.tree import leaves_of
from lightning_graphs.core.private.torch import current_autograd_node

_LABEL = "lightning_graphs.scope"


def _label_unlabelled(value: object, scope: str) -> None:
    """Write ``scope`` on every autograd node behind ``value`` that has no label yet."""
    # torch declares `metadata`, a dict, as a method.
    pending: list[Any] = [tensor.grad_fn for tensor in leaves_of(value, Tensor)]
    while pending:
        node = pending.pop()
        if node is not None and _LABEL not in node.metadata:
            node.metadata[_LABEL] = scope
            pending.extend(parent for parent, _ in node.next_functions)


class ScopeStack:
    """Follows module calls and profiler ranges of the calling thread while it is entered.

    A backward operator gets the scope of the forward code whose gradient it computes: the autograd
    nodes of a module's output are labelled when the module returns.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._hooks.enter_context(register_module_forward_pre_hook(self._enter))
        self._hooks.enter_context(register_module_forward_hook(self._leave, always_call=True))

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._stack.clear()
        self._roots.clear()
        self._names.clear()

    def current(self) -> str:
        """The scope of an operator that is called now, such as ``Bert.encoder.layer.0``."""
        node: Any = current_autograd_node()
        if node is not None:
            scope = node.metadata.get(_LABEL, "")
            return f"{scope} (backward)".lstrip()
        return self._top()

    def note_range(self, func: object, args: tuple[Any, ...]) -> None:
        """Note that an operator of the profiler opens or closes a range."""
        if "enter" in str(func):
            self._push(str(args[0]))
        elif self._stack:
            self._stack.pop()

    def _top(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _push(self, name: str) -> None:
        """Open a scope; a path that continues the innermost one takes its place."""
        outer, _, inner = self._top().rpartition("/")
        if inner and name.startswith(inner + "."):
            inner = name
        else:
            outer, inner = self._top(), name
        self._stack.append(f"{outer}/{inner}" if outer else inner)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        _label_unlabelled(inputs, self._top())
        name = self._names.get(id(module))
        if name is None:
            root = type(module).__name__
            self._roots.append(module)
            for path, child in module.named_modules():
                self._names.setdefault(id(child), f"{root}.{path}" if path else root)
            name = self._names[id(module)]
        self._push(name)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        _label_unlabelled(output, self._top())
        if self._stack:
            self._stack.pop()
