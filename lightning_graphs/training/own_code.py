"""Whose code it is: that of a step's author, or that of the libraries it uses."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import PurePath

from lightning.pytorch import LightningModule

from lightning_graphs.core.callsite import CallSiteFinder

_INSTALLED = {"site-packages", "dist-packages"}
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def is_lightnings(definition: object, *files: str) -> bool:
    """Whether a class or function is defined in one of these files of Lightning.

    ``pytorch_lightning`` is the same code as ``lightning.pytorch`` under another name, with classes
    of its own.

    Args:
        definition: The class or function.
        files: Such as ``"core.module"``.
    """
    module = getattr(definition, "__module__", None)
    return any(module == f"{library}.{file}" for library in _LIGHTNING for file in files)


class OwnCode:
    """Tells the code of a step's author from that of the libraries it uses.

    Installed packages are libraries, but for the one that the root module's class is from.

    Args:
        root: The root module.
    """

    def __init__(self, root: LightningModule) -> None:
        self._package = type(root).__module__.partition(".")[0]
        self._finder = CallSiteFinder()
        self._standard = sysconfig.get_paths()["stdlib"]
        self._verdicts: dict[tuple[str, str], bool] = {}

    def has(self, file: str, name: str) -> bool:
        """Whether code of this file, in the module of this name, is the author's."""
        if (file, name) not in self._verdicts:
            self._verdicts[file, name] = self._judge(file, name)
        return self._verdicts[file, name]

    def _judge(self, file: str, name: str) -> bool:
        if self._finder.is_library(file):
            return False
        if name.partition(".")[0] == self._package:
            return True
        return not (
            file.startswith(self._standard) or _INSTALLED.intersection(PurePath(file).parts)
        )

    def has_module(self, name: str) -> bool:
        """Whether a module that has been imported under this name is the author's."""
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:  # a notebook, unlike modules of C
            return name == "__main__"
        return self.has(file, name)
