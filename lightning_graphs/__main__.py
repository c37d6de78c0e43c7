"""``python -m lightning_graphs``: runs the ``lightning-graphs`` command."""

from __future__ import annotations

import sys

from lightning_graphs.cli import main

if __name__ == "__main__":
    sys.exit(main())
