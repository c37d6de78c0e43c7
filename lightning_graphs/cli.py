"""The ``lightning-graphs`` command: versions and what works here, and saved reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DONE, BAD_INPUT = 0, 2
"""Exit codes."""

READER_GONE = 141
"""Exit code where the output is read no further, as in ``| head``: that of other programs there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; without arguments it prints the environment.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        The exit code: 0, or 2 on bad input.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer is written at exit, and would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-graphs",
        description="CUDA graphs for PyTorch Lightning.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    parser.set_defaults(run=_environment, json=False)
    commands = parser.add_subparsers(metavar="command")

    env = commands.add_parser(
        "env", allow_abbrev=False, help="versions, and what works here and why not (default)",
        description="Prints versions, and which parts of lightning-graphs work on this machine.",
    )  # fmt: skip
    env.add_argument("--json", action="store_true", help="print JSON")

    inspect = commands.add_parser(
        "inspect", allow_abbrev=False, help="show a saved report",
        description="Shows a report that report.to_json() wrote.",
    )  # fmt: skip
    inspect.add_argument("report", type=Path, help="the JSON file")
    inspect.set_defaults(run=_inspect)
    return parser


def _version() -> str:
    # Of the package itself: it also runs from a checkout that nobody has installed.
    return str(sys.modules["lightning_graphs"].__version__)


def _inspect(options: argparse.Namespace) -> int:
    from lightning_graphs.errors import GraphError
    from lightning_graphs.reporting import Report

    try:
        Report.from_json(options.report.read_text(encoding="utf-8")).show()
    except (GraphError, OSError, UnicodeDecodeError) as error:
        print(f"lightning-graphs inspect: {options.report}: {error}", file=sys.stderr)
        return BAD_INPUT
    return DONE


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


def _environment(options: argparse.Namespace) -> int:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions["lightning-graphs"] = _version()
    versions.update((package, _version_of(package)) for package in _PACKAGES)
    abilities = _abilities()
    if options.json:
        found = {"versions": versions, "abilities": [asdict(a) for a in abilities]}
        print(json.dumps(found, indent=2))
        return DONE
    for name, version in versions.items():
        print(f"{name:18}{version}")
    print()
    for ability in abilities:
        print(f"{ability.name:18}{'yes' if ability.works else 'no'}: {ability.details}")
    return DONE


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

    abilities = [
        _ability("versions", _minimum_versions),
        _ability("capture on a GPU", gpu),
        _ability("rehearsal", lambda: 'GraphCapture(backend="emulated") on the CPU'),
        _ability("cuda-python", bindings),
        _ability("driver", driver_version),
        _ability("kernel names", kernel_names),
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
