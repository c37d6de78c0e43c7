"""Dotted names of before: entry points of installed packages and saved configurations hold them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Moved(ModuleType):
    """A module that has moved; the real one is imported when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = import_module(self.__name__.replace(".training.", ".lightning."))
        return getattr(module, name)


for _name in ("callback", "options", "plugins"):
    sys.modules[f"{__name__}.{_name}"] = _Moved(f"{__name__}.{_name}")
