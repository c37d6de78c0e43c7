"""Whose code it is: the user's, that of libraries, or what torch.compile has made."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import PurePath
from types import FrameType, MethodType
from typing import Any

from torch import nn

from lightning_graphs.private.callsite import is_library
from lightning_graphs.private.torch import (
    compiled_code_noticed,
    is_compiled,
    makes_own_graphs,
    module_hooks,
)

_INSTALLED = {"site-packages", "dist-packages"}
_NUMERIC = ("numpy", "scipy", "pandas")  # which take `float` for a type of numbers of their own
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def is_lightnings(definition: object, *files: str) -> bool:
    """Whether a class or function is defined in one of these files of Lightning.

    ``pytorch_lightning`` is the same code as ``lightning.pytorch`` under another name, with classes
    of its own.
    """
    module = getattr(definition, "__module__", None)
    return any(module == f"{library}.{file}" for library in _LIGHTNING for file in files)


def function_of(value: Any) -> Any:
    """The function behind a method, a property or a partial; other values as they are."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, partial):
        value = value.func
    return getattr(value, "__func__", value) if isinstance(value, _BOUND) else value


_BOUND = (MethodType, staticmethod, classmethod)


class UserCode:
    """Tells the code of a step's author from that of the libraries it uses.

    Installed packages are libraries, but for the one that the root module's class is from.
    """

    def __init__(self, root: nn.Module) -> None:
        kinds = (kind.__module__ for kind in type(root).__mro__)  # FSDP2 derives one of torch's
        self._package = next(n for n in kinds if "torch.distributed" not in n).partition(".")[0]
        self._standard = sysconfig.get_paths()["stdlib"]
        # Whether code of this file, in the module of this name, is the author's
        self.has: Callable[[str, str], bool] = cache(self._judge)
        # Whether a module is one of an installed package, but those that every step goes through
        self.has_installed: Callable[[str], bool] = cache(self._judge_installed)

    def _judge(self, file: str, name: str) -> bool:
        if file.startswith("<"):  # a notebook, or made by a dataclass or the like for a module
            if name not in sys.modules:
                return False
            file = getattr(sys.modules[name], "__file__", None) or file
        if is_library(file):
            return False
        if name.partition(".")[0] == self._package:
            return True
        path = os.path.normpath(file)
        return not (
            path.startswith(self._standard) or _INSTALLED.intersection(PurePath(path).parts)
        )

    def has_module(self, name: str) -> bool:
        """Whether a module that has been imported under this name is the author's."""
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:  # a notebook, unlike modules of C
            return name == "__main__"
        return self.has(file, name)

    def runs_in(self, frame: FrameType) -> bool:
        """Whether a frame runs the author's code."""
        return self.has(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))

    def _judge_installed(self, name: str) -> bool:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or is_library(file) or name.partition(".")[0] in _NUMERIC:
            return False
        return bool(_INSTALLED.intersection(PurePath(os.path.normpath(file)).parts))


def inside_of_compiled(root: nn.Module) -> set[nn.Module]:
    """The modules whose class compiled code checks; of the root, its compiled step is seen."""
    compiled = filter(is_compiled, root.modules())
    return {module for owner in compiled for module in owner.modules()} - {root}


_OWN_GRAPHS = (
    "is compiled to CUDA graphs of its own, which no graph can hold; write torch.compile(...) "
    "without mode, or mode='max-autotune-no-cudagraphs'"
)


def obstacle_in(module: nn.Module) -> str | None:
    """Why no graph can hold a module, or one inside of it, in a sentence; None if one can."""
    for owner in with_own_graphs(module):
        return f"`{owner}` {_OWN_GRAPHS}"
    return None


def with_own_graphs(module: nn.Module) -> Iterator[str]:
    """Qualified names of the submodules and attributes that ``torch.compile`` gave own graphs."""
    for name, inner in module.named_modules():
        if makes_own_graphs(inner):
            yield name or type(inner).__name__
            continue
        for attribute, value in vars(inner).items():
            if callable(value) and not isinstance(value, nn.Module) and makes_own_graphs(value):
                where = name if attribute == "_compiled_call_impl" else f"{name}.{attribute}"
                yield where.strip(".") or type(inner).__name__


def bound_by_hooks(root: nn.Module) -> dict[str, str]:
    """Weights that old hooks of ``torch.nn.utils`` bind anew in each call, and what to do.

    ``weight_norm``, ``spectral_norm`` and pruning set a plain attribute, ahead of the forward.
    """
    found: dict[str, str] = {}
    for path, inner in root.named_modules():
        for hook in module_hooks(inner):
            name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
            library, _, kind = type(hook).__module__.rpartition(".")
            if library == "torch.nn.utils" and name:
                new = "prune.remove" if kind == "prune" else f"parametrizations.{kind}"
                found[f"{path}.{name}".lstrip(".")] = f"{library}.{new}"
    return found


class CompiledCode:
    """Whether the steps of a fit call what ``torch.compile`` has made.

    Such code has no host half, checks the functions and classes that it was compiled with, and is
    compiled anew where these are others. What the rest of the process has compiled does not count.
    """

    runs = False

    def watching(self) -> AbstractContextManager[None]:
        """Look at the body, an eager step or the capture of one, until that is known."""
        return nullcontext() if self.runs else compiled_code_noticed(self._note)

    def _note(self) -> None:
        self.runs = True
