"""The ``lightning-graphs`` command: versions, what works on this machine, and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

_PACKAGES = ("torch", "lightning", "cuda-python", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the environment.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        The exit code.
    """
    # Of the package itself: it also runs from a checkout that nobody has installed.
    own = str(sys.modules["lightning_graphs"].__version__)
    parser = argparse.ArgumentParser(
        prog="lightning-graphs", description=__doc__.partition(": ")[2], allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {own}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions["lightning-graphs"] = own
    versions.update((package, _version_of(package)) for package in _PACKAGES)
    abilities = _abilities()
    if options.json:
        found = {"versions": versions, "abilities": [ability._asdict() for ability in abilities]}
        print(json.dumps(found, indent=2))
        return 0
    for name, version in versions.items():
        print(f"{name:18}{version}")
    print()
    for ability in abilities:
        print(f"{ability.name:18}{'yes' if ability.works else 'no'}: {ability.details}")
    return 0


class Ability(NamedTuple):
    """Something that works on this machine, or why it does not and what to do."""

    name: str
    works: bool
    details: str


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _abilities() -> list[Ability]:
    import torch

    from lightning_graphs.core.backends import driver
    from lightning_graphs.core.backends.backend import get_backend
    from lightning_graphs.errors import GraphError

    def gpu() -> str:
        if torch.version.cuda is not None and not torch.cuda.is_available():
            raise ValueError(
                f"torch {torch.__version__}, torch.cuda.is_available() is False: no NVIDIA driver "
                "or GPU is visible; use backend='emulated' to rehearse on the CPU"
            )
        get_backend("cuda")
        return ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))

    def kernel_names() -> str:
        driver.require_driver((12, 3), "naming the kernels of a graph")
        return "inspect() names kernels, and annotations say which module launched them"

    checks: dict[str, Callable[[], str]] = {
        "versions": _minimum_versions,
        "capture on a GPU": gpu,
        "rehearsal": lambda: 'GraphCapture(backend="emulated") on the CPU',
        "cuda-python": lambda: str(driver.driver().__name__),
        "driver": lambda: "CUDA {}.{}".format(*driver.driver_version()),
        "kernel names": kernel_names,
    }
    found: list[Ability] = []
    reasons: dict[str, str] = {}
    for name, check in checks.items():
        try:
            found.append(Ability(name, True, check()))
            continue
        except GraphError as error:
            said = [(error.observed or error.rule).rstrip("."), error.remedy]
            reason = "; ".join(filter(None, said))
        except (ImportError, RuntimeError, ValueError) as error:
            reason = str(error)
        first = reasons.setdefault(reason, name)
        found.append(Ability(name, False, reason if first == name else f"see {first}"))
    return found


def _minimum_versions() -> str:
    """Compare with what the package itself requires."""
    from packaging.requirements import Requirement

    required = map(Requirement, importlib.metadata.requires("lightning-graphs") or [])
    needed = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    found = {r: _version_of(r.name) for r in needed}
    unmet = [
        f"{r.name}{r.specifier} is required, found: {version}"
        for r, version in found.items()
        if version == "not installed" or not r.specifier.contains(version, prereleases=True)
    ]
    if unmet:
        raise ValueError("; ".join(unmet))
    return ", ".join(f"{r.name}{r.specifier}" for r in needed)
