"""Which submodules the user has named, by name pattern or by class."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_graphs.training.options import OptionError

_LIKELY = 0.5
"""How much a name must be like what was written to be offered, from 0 to 1."""


def select(
    root: nn.Module, patterns: Sequence[str], exclude: Sequence[str]
) -> dict[str, nn.Module]:
    """The submodules that ``patterns`` name and ``exclude`` does not."""
    # A pattern is matched against qualified names, one part between dots at a time, so that
    # ``encoder.layers.*`` means the layers and not what is inside of them. One that matches no name
    # may be the name of a class, or its dotted path where several classes have that name. Of a
    # module and one in it the outer one is meant, which has the other in its graphs.
    named = _submodules(root)
    wanted = _all_matches(named, patterns, "modules")
    left_out = _all_matches(named, exclude, "exclude")
    found = wanted - left_out
    if wanted and not found:
        raise OptionError(
            "exclude must leave something of modules.",
            f"got exclude={list(exclude)!r} for modules={list(patterns)!r}",
            "leave out exclude, or name other modules",
        )
    chosen = [name for name in named if name in found]
    chosen = [name for name in chosen if not any(is_inside(name, outer) for outer in chosen)]
    for outer in chosen:
        inner = next((name for name in left_out if is_inside(name, outer)), None)
        if inner is not None:
            raise OptionError(
                "exclude must name no submodule of a graphed module, which is graphed as a whole.",
                f"got exclude={list(exclude)!r} with `{inner}`, which is inside of `{outer}` of "
                f"modules={list(patterns)!r}",
                f"name the submodules of `{outer}` instead: modules=['{outer}.*']",
            )
    return {name: named[name] for name in chosen}


def excluded(root: nn.Module, patterns: Sequence[str]) -> set[str]:
    """The names of the submodules that ``exclude`` means where nothing is selected by name."""
    return _all_matches(_submodules(root), patterns, "exclude")


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is a part of another one, by their qualified names."""
    return name.startswith(f"{outer}.")


def _submodules(root: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in root.named_modules() if name}


def _all_matches(named: dict[str, nn.Module], patterns: Sequence[str], option: str) -> set[str]:
    return set().union(*(_matches(named, pattern, option) for pattern in patterns))


def _matches(named: dict[str, nn.Module], pattern: str, option: str) -> set[str]:
    by_name = {name for name in named if _fits(name.split("."), pattern.split("."))}
    if by_name:
        return by_name
    kinds = {type(module) for module in named.values()}
    paths = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    classes = {kind for kind in kinds if pattern in (kind.__name__, paths[kind])}
    if classes:
        return {name for name, module in named.items() if type(module) in classes}
    alike = [re.sub(r"\b\d+\b", "*", name) for name in named]
    known = dict.fromkeys([*alike, *named, *sorted({kind.__name__ for kind in kinds})])
    near = difflib.get_close_matches(pattern, known, cutoff=_LIKELY)
    children = [name for name in named if "." not in name]
    raise OptionError(
        f"{option} must name submodules or their classes.",
        f"got {pattern!r}, which matches none",
        f"write one of the nearest names: {', '.join(near)}"
        if near
        else f"write another name; the outermost ones are {', '.join(children)}",
    )


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))
