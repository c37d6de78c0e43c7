"""What ``lightning-graphs env`` prints: versions, and which parts work on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that works on this machine or does not.

    Attributes:
        name: What it is.
        works: Whether it works.
        details: What was found, or why it does not work and what to do.
    """

    name: str
    works: bool
    details: str


_PACKAGES = ("torch", "lightning", "cuda-python", "rich", "matplotlib")


def show_environment(options: argparse.Namespace) -> None:
    """Print it, with ``options.json`` as JSON."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    # Of the package itself: it also runs from a checkout that nobody has installed.
    versions["lightning-graphs"] = sys.modules["lightning_graphs"].__version__
    versions.update((package, _version_of(package)) for package in _PACKAGES)
    abilities = _abilities()
    if options.json:
        print(
            json.dumps(
                {"versions": versions, "abilities": [asdict(a) for a in abilities]}, indent=2
            )
        )
        return
    for name, version in versions.items():
        print(f"{name:18}{version}")
    print()
    for ability in abilities:
        print(f"{ability.name:18}{'yes' if ability.works else 'no'}: {ability.details}")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _abilities() -> list[Ability]:
    import torch

    from lightning_graphs.core import driver

    def gpu() -> str:
        from lightning_graphs.core.backend import get_backend

        if torch.version.cuda is not None and not torch.cuda.is_available():
            raise ValueError(
                f"torch {torch.__version__}, torch.cuda.is_available() is False: no NVIDIA driver "
                "or GPU is visible; use backend='emulated' to rehearse on the CPU"
            )
        get_backend("cuda")
        return ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))

    def bindings() -> str:
        return str(driver.driver().__name__)

    def driver_version() -> str:
        return "CUDA {}.{}".format(*driver.driver_version())

    def kernel_names() -> str:
        driver.require_driver((12, 3), "naming the kernels of a graph")
        return "inspect() names kernels, and annotations say which module launched them"

    def live_numbers() -> str:
        driver.require_driver((12, 4), "rewriting a number inside of a graph")
        return "momentum and betas that a scheduler moves stay inside of the graph"

    def cli() -> str:
        import jsonargparse

        return f"jsonargparse {jsonargparse.__version__}"

    abilities = [
        _ability("versions", _minimum_versions),
        _ability("capture on a GPU", gpu),
        _ability("rehearsal", lambda: 'GraphCapture(backend="emulated") on the CPU'),
        _ability("cuda-python", bindings),
        _ability("driver", driver_version),
        _ability("kernel names", kernel_names),
        _ability("live numbers", live_numbers),
        _ability("doctor --config", cli),
    ]
    return _each_reason_once(abilities)


def _each_reason_once(abilities: list[Ability]) -> list[Ability]:
    """Refer to the ability that lacks for the same reason, further up."""
    first = {ability.details: ability.name for ability in reversed(abilities)}
    return [
        ability
        if ability.works or first[ability.details] == ability.name
        else Ability(ability.name, False, f"see {first[ability.details]}")
        for ability in abilities
    ]


def _ability(name: str, check: Callable[[], str]) -> Ability:
    from lightning_graphs.errors import GraphError

    try:
        return Ability(name, True, check())
    except GraphError as error:
        reason = "; ".join(filter(None, [(error.observed or error.rule).rstrip("."), error.remedy]))
    except (ImportError, RuntimeError, ValueError) as error:
        reason = str(error)
    return Ability(name, False, reason)


def _minimum_versions() -> str:
    """Compare with what the package itself requires."""
    from packaging.requirements import Requirement

    met: list[str] = []
    unmet: list[str] = []
    for text in importlib.metadata.requires("lightning-graphs") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version_of(requirement.name)
        allowed = version != "not installed" and requirement.specifier.contains(
            version, prereleases=True
        )
        wanted = f"{requirement.name}{requirement.specifier}"
        if allowed:
            met.append(wanted)
        else:
            unmet.append(f"{wanted} is required, found: {version}")
    if unmet:
        raise ValueError("; ".join(unmet))
    return ", ".join(met)
