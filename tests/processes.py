"""Processes that tests start."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

ROOT = Path(__file__).parents[1]
SECONDS = 300
"""How long a script may take."""

# What the server has imported; the last of them is what the tests of several ranks import.
_IMPORTED = [
    "torch",
    "lightning.pytorch",
    "lightning_graphs.lightning.callback",
    "tests.training.fsdp_fits",
]


def in_one_chunk(call: Callable[..., _T], *args: Any) -> _T:
    """Call a function with so much stack ahead that Python gets no more of it meanwhile.

    Python takes its stack from the system in chunks of 16 KiB, and gives one back as soon as the
    last frame in it returns: a loop whose calls begin at the end of a chunk takes most of its time
    for that. A chunk is at least as large as its first frame.
    """
    return call(*args)


in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=2**15 + 2**10)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that imports this checkout, and what this one imports."""
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([known] if known else [])])
    return {**os.environ, "PYTHONPATH": path, **variables}


def forks() -> Any:
    """Makes processes from one that has done nothing but import, which takes them seconds."""
    # A process that was forked from one with CUDA in use could not use it: the server has none.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def run_script(path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``python path *arguments`` does and prints, without its imports.

    Args:
        path: The script.
        arguments: Its flags.
        variables: Of its environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = [Path(folder, name) for name in ("stdout", "stderr")]
        process = forks().Process(target=_script, args=(path, arguments, variables, written))
        process.start()
        process.join(SECONDS)
        process.kill()
        process.join()
        texts = [one.read_text(encoding="utf-8") for one in written]
        return subprocess.CompletedProcess([str(path)], process.exitcode or 0, *texts)


def _script(
    path: Path, arguments: tuple[str, ...], variables: dict[str, str], written: list[Path]
) -> None:
    for file, descriptor in zip(written, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    in_one_chunk(runpy.run_path, str(path), {}, "__main__")
