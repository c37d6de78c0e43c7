"""The ``lightning-graphs`` command: versions, what works on this machine, and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Sequence

_PACKAGES = ("torch", "lightning", "cuda-python")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the environment, given the command line without the program's name; the exit code."""
    # Read from the package itself, which also runs from a checkout that is not installed.
    own = str(sys.modules["lightning_graphs"].__version__)
    parser = argparse.ArgumentParser(
        prog="lightning-graphs",
        description="Show versions, and what of lightning-graphs works on this machine: captures "
        "on a GPU, rehearsals on the CPU, names of kernels. What does not work has its reason and "
        "its fix. The command changes nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {own}")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    options = parser.parse_args(arguments)
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions["lightning-graphs"] = own
    versions.update((package, _version_of(package)) for package in _PACKAGES)
    abilities = {
        "capture on a GPU": _outcome(_capture),
        "rehearsal": (True, 'GraphCapture(backend="emulated") on the CPU'),
        "kernel names": _outcome(_kernel_names),
    }
    if options.json:
        found = [{"name": name, "works": w, "details": d} for name, (w, d) in abilities.items()]
        print(json.dumps({"versions": versions, "abilities": found}, indent=2))
        return 0
    for name, version in versions.items():
        print(f"{name:18}{version}")
    print()
    for name, (works, details) in abilities.items():
        print(f"{name:18}{'yes' if works else 'no'}: {details}")
    return 0


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _outcome(check: Callable[[], str]) -> tuple[bool, str]:
    """Run a check; return whether it raised nothing, and its text or that of the error."""
    from lightning_graphs.errors import GraphError

    try:
        return True, check()
    except GraphError as error:
        said = [(error.observed or error.rule).rstrip("."), error.remedy]
        return False, "; ".join(filter(None, said))
    except (ImportError, RuntimeError, ValueError) as error:
        return False, str(error)


def _capture() -> str:
    import torch

    from lightning_graphs.device.graph import get_backend

    if torch.version.cuda is not None and not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__}, torch.cuda.is_available() is False: no NVIDIA driver "
            "or GPU is visible; use backend='emulated' to rehearse on the CPU"
        )
    get_backend("cuda")
    return ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))


def _kernel_names() -> str:
    from lightning_graphs.device import inspect as driver

    driver.require_driver((12, 3), "naming the kernels of a graph")
    version = "{}.{}".format(*driver.driver_version())
    return f"inspect() names kernels through {driver.driver().__name__}, a driver of CUDA {version}"


if __name__ == "__main__":
    sys.exit(main())
