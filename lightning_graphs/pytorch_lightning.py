"""For programs that ``import pytorch_lightning``: the same callback as one of its callbacks.

``lightning.pytorch`` and ``pytorch_lightning`` are one code under two names, with a ``Callback``
class each. The command line and the types of the latter accept its own class only.
"""

from __future__ import annotations

import pytorch_lightning

from lightning_graphs.lightning.callback import GraphCapture as _GraphCapture


class GraphCapture(_GraphCapture, pytorch_lightning.Callback):  # type: ignore[misc]
    __doc__ = _GraphCapture.__doc__
