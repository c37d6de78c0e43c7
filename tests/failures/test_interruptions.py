"""Exceptions and signals at every phase of a captured fit.

| at / what             | exception           | SIGINT     | SIGTERM    |
| --------------------- | ------------------- | ---------- | ---------- |
| warm-up               | forward, backward   | forward    | forward    |
| sighting              | forward, backward   | forward    | forward    |
| observation (modules) | forward, backward   | forward    | forward    |
| capture               | forward, backward   | forward    | forward    |
| verification          | forward, backward   | forward    | forward    |
| replay                | hooks, code between | the same   | the same   |

Each cell is a test for each scope. The fit ends as the eager one does, with the same weights and
optimizer; nothing of the graphs stays; the same trainer fits again, and gives eager's values.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_graphs.errors import GraphError
from lightning_graphs.watch.user_code import CompiledCode
from tests.failures.support import (
    SCOPES,
    STEPS,
    Mishap,
    assert_nothing_lost,
    raise_mishap,
    run_again,
    tripping,
)
from tests.training.fits import Net, batches, compare, prepare

# Call of the module's code without the callback, and with it: three warm-up steps, two sightings;
# then whole steps are captured and run eagerly for verification, or one more step is observed, and
# submodules are captured and run so. Beside compiled code, a capture has a warm-up of its own.
COMPILED = "warm-up of a capture"
PHASES = {
    "step": {
        "warm-up": (2, 2),
        "sighting": (4, 4),
        "capture": (6, 6),
        "verification": (6, 7),
    },
    "modules": {
        "warm-up": (2, 2),
        "sighting": (4, 4),
        "observation": (6, 6),
        COMPILED: (7, 7),
        "capture": (7, 7),
        "verification": (7, 8),
    },
}
CELLS = [(scope, phase) for scope, phases in PHASES.items() for phase in phases]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


# What happens, what ends the fit, and its message.
ENDS: dict[str, tuple[Callable[[], None], type[BaseException], str]] = {
    "exception": (raise_mishap, Mishap, "on purpose"),
    "SIGINT": (interrupt, SystemExit, "^1$"),
    "SIGTERM": (terminate, SIGTERMException, "^$"),
}


KINDS = [*((end, "forward") for end in ENDS), ("exception", "backward")]


@pytest.mark.parametrize(("end", "where"), KINDS)
@pytest.mark.parametrize(("scope", "phase"), CELLS)
def test_at_each_phase(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scope: str,
    phase: str,
    end: str,
    where: str,
) -> None:
    monkeypatch.setattr(CompiledCode, "runs", phase == COMPILED)
    action, kind, match = ENDS[end]
    calls = PHASES[scope][phase]
    eager, captured = tripping(
        backend, tmp_path, SCOPES[scope], eager=calls[0], captured=calls[1], action=action,
        where=where,
    )  # fmt: skip
    with pytest.raises(kind, match=match):
        eager.run()
    in_capture = kind is Mishap and scope == "modules" and "capture" in phase
    # Of submodules the refusal names the call; what their code raised is its cause.
    with pytest.raises(GraphError if in_capture else kind, match=match):
        captured.run()
    assert_nothing_lost(eager, captured)
    assert captured.module.net[1].trip.calls >= calls[1]
    run_again(eager, captured)
    assert captured.csv == eager.csv
    assert captured.statistics.fallbacks == []
    assert captured.statistics.replayed > 0
    if where == "forward":  # Lightning has counted an eager backward pass that raised
        compare(eager, captured)


HOOKS = [
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_train_epoch_end",
    "on_save_checkpoint",
]  # fmt: skip
# Exceptions in hooks of whole steps: tests/training/lifecycle/test_exceptions.py.
HOOKED = [("modules", "exception"), ("modules", "SIGINT"), ("modules", "SIGTERM"),
          ("step", "SIGTERM")]  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("scope", "end"), HOOKED)
def test_in_a_hook_at_replay(backend: str, tmp_path: Path, scope: str, end: str, hook: str) -> None:
    action, kind, match = ENDS[end]

    class Hooked(Net):
        happened = False

    def once(self: Any, *_: Any) -> None:
        if not self.happened and (self.trainer.global_step >= 8 or hook == "on_save_checkpoint"):
            self.happened = True
            action()

    setattr(Hooked, hook, once)
    eager, captured = (
        prepare(
            backend, tmp_path, graphs, module=Hooked, capture=SCOPES[scope],
            data=lambda: batches(STEPS), enable_checkpointing=True,
        )
        for graphs in (False, True)
    )  # fmt: skip
    for one in (eager, captured):
        with pytest.raises(kind, match=match):
            one.run()
        assert one.module.happened
    assert captured.statistics.replayed > 0
    assert_nothing_lost(eager, captured)
    run_again(eager, captured)
    compare(eager, captured)


@pytest.mark.parametrize("end", ENDS)
def test_in_code_between_graphs(backend: str, tmp_path: Path, end: str) -> None:
    action, kind, match = ENDS[end]

    class Between(Net):
        happened = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == 9 and not self.happened:
                self.happened = True
                action()
            return loss

    eager, captured = (
        prepare(backend, tmp_path, graphs, module=Between, capture=SCOPES["modules"])
        for graphs in (False, True)
    )
    for one in (eager, captured):
        with pytest.raises(kind, match=match):
            one.run()
    assert captured.statistics.replayed > 0
    assert_nothing_lost(eager, captured)
    run_again(eager, captured)
    compare(eager, captured)
