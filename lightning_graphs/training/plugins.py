"""What Lightning finds through the entry point ``lightning.pytorch.callbacks_factory``.

Lightning calls the factory for every trainer that anybody makes, so nothing is imported here
before it is known that graphs are asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback

VARIABLE = "LIGHTNING_GRAPHS"


def callbacks() -> list[Callback]:
    """The callback that the environment asks for; none without ``LIGHTNING_GRAPHS``.

    An empty value and ``0`` ask for none, ``1`` for :class:`~lightning_graphs.GraphCapture` with
    its defaults. Everything else says where its options are: ``graphs.yaml`` or ``graphs.json`` in
    a file, ``pyproject`` in ``[tool.lightning_graphs]`` of the working directory's
    ``pyproject.toml``, and ``scope: modules`` in the value itself, as YAML.

    Raises:
        OptionError: the value is none of these, or an option is unknown or impossible.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if value in ("", "0"):
        return []
    from lightning_graphs.training.config import options_of
    from lightning_graphs.training.environment import EnvironmentCapture

    return [options_of(value, VARIABLE).apply(EnvironmentCapture)]
