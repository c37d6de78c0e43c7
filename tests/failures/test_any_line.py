"""KeyboardInterrupt between any two lines of a capture, not only in the user's code."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lightning.pytorch import Callback

from tests.failures.support import forwards_are_their_own
from tests.training.fits import assert_nothing_left, compare, prepare

# Where a capture changes what others see: the policies, and who owns graphs.
_FOLDERS = tuple(
    f"/lightning_graphs/{name}/"
    for name in ("lightning", "loops", "regions", "watch", "policy", "report")
)
_FILES = (
    "device/graph.py",
    "autograd/callables.py",
    "device/emulated.py",
    "device/cuda.py",
)


class Interruption(Callback):
    """Raises KeyboardInterrupt before the n-th line that runs of those files, from step 5 on.

    Not before a ``with``, which runs once more as it is left, and not as an ``__exit__`` begins:
    the rest of it would not run, and nothing that is written in Python could mend that.
    """

    def __init__(self, line: int) -> None:
        self._left = line
        self.armed = False
        self.happened = False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.armed = trainer.global_step >= 5

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        watched = path.endswith(_FILES) or any(folder in path for folder in _FOLDERS)
        return self._line if watched and not self.happened else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._left -= self.armed and event == "line"
        if self._left < 0 and not self.happened:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            in_exit = frame.f_code.co_name == "__exit__"
            if not (in_exit or line.lstrip().startswith("with ")):
                self.happened = True
                raise KeyboardInterrupt
        return self._line


@pytest.mark.usefixtures("tracing_as_before")
@pytest.mark.parametrize("line", [100, 700, 1500, 2500, 4000, 6000])
def test_an_interrupt_leaves_nothing_behind(
    backend: str, tmp_path: Path, scope: dict[str, Any], line: int
) -> None:
    interruption = Interruption(line)
    captured = prepare(
        backend, tmp_path, True, capture=scope, callbacks=lambda: [interruption], validation=0
    )
    sys.settrace(interruption)
    with pytest.raises(SystemExit, match=r"^1$"):
        captured.run()
    sys.settrace(None)
    assert interruption.happened
    assert_nothing_left(captured)
    forwards_are_their_own(captured.module)
    again = prepare(backend, tmp_path / "again", True, capture=scope, validation=0)
    compare(prepare(backend, tmp_path, False, validation=0).run(), again.run())
