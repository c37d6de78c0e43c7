"""Runs a part of a step eagerly and as graphs, from one state, and compares the results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_graphs.core.arguments.fingerprints import fingerprints_of
from lightning_graphs.core.arguments.snapshot import Result, Snapshot
from lightning_graphs.core.callsite import stacklevel_of_user
from lightning_graphs.errors import VerificationError, first_line
from lightning_graphs.training.costs.memory import is_out_of_memory
from lightning_graphs.training.fit import Fit
from lightning_graphs.training.verify.differences import NONE, Tolerance, difference, size
from lightning_graphs.training.verify.written import WrittenMemory

_Computed = TypeVar("_Computed")

_RULE = "A replay must compute what the eager step computes, to the bit or within its rounding."
_REMEDY = (
    "look for Python values that the step reads and that change out of sight (a context variable, "
    "the state of a library, a file), and make them tensors or attributes"
)
_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True, slots=True)
class BothWays:
    """A part of a step that can be run eagerly, and as graphs."""

    eager: Callable[[], list[Result]]  # runs it eagerly; what it computed and changed, in place
    replayed: Callable[[], list[Result]]  # replays it; the same results under the same names
    take: Callable[[], Snapshot]  # of the state from which both start
    written: WrittenMemory | None = None  # what both write beside that; None for nothing
    spare: Sequence[Tensor] = ()  # memory that is overwritten before it is read again


class Agreement:
    """Decides which steps are verified, and compares a part of one with its replay.

    The first time, an eager run before all others shows what memory is written, and is undone. The
    eager run that is compared leaves a fingerprint of every result. Where the bits of a replay
    from the same state differ, it runs eagerly twice more and replays once more, now with copies of
    what differs, and asks the :class:`~differences.Tolerance`.
    Afterwards everything is as before. Hooks do not run, logs do not reach Lightning and metrics
    are not updated. What the step does to the world outside of module, optimizer and generators (a
    file that it writes) it does once more for each run.
    """

    def __init__(self, fit: Fit) -> None:
        self.root, self.budget, self.ranks = fit.module, fit.budget, fit.ranks
        self._statistics = fit.statistics
        verify = fit.options.verify
        self.is_on = verify is not False
        self.every = 0 if isinstance(verify, bool) else verify
        self._said: set[str] = set()
        # What code writes beside its state, by what tells how it goes but for shapes
        self.written: defaultdict[Hashable, WrittenMemory] = defaultdict(WrittenMemory)
        precision = str(fit.trainer.precision_plugin.precision)
        self._tolerance = Tolerance(self.root.device.type, _ARITHMETIC.get(precision))

    @property
    def is_due(self) -> bool:
        """Whether graphs that were verified before are verified again in this step."""
        return self.every > 0 and self.root.global_step % self.every == 0

    def compare(self, ways: BothWays, what: str, tolerance: Tolerance | None = None) -> None:
        """Compare both ways, or say that there was no memory for it."""
        self._statistics.comparisons += 1
        try:
            kept = self.ranks.together(ways.take)
            try:
                # FSDP2 frees and fills all parameters anew
                if ways.written is not None and not self.ranks.whole_steps_only:
                    shown = partial(self._unreduced, ways.eager)
                    ways.written.keep_with(kept, shown, ways.spare, self._run)
                self._require(ways, kept, tolerance or self._tolerance)
            finally:
                kept.restore()
                del kept
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._say(what, first_line(error))
        finally:
            if self.root.device.type == "cuda":
                torch.cuda.empty_cache()  # of the eager run and the copy of the state

    def _unreduced(self, way: Callable[[], object]) -> None:
        """Run it without a reduction over ranks, which would write all of DDP's buckets."""
        ddp = self.ranks.ddp
        with nullcontext() if ddp is None else ddp.no_sync():
            way()

    def _run(self, way: Callable[[], _Computed]) -> _Computed:
        return self.ranks.together(way, exchanges=True)

    def _require(self, ways: BothWays, kept: Snapshot, tolerance: Tolerance) -> None:
        expected = self._run(ways.eager)
        names = [result.name for result in expected]
        known = fingerprints_of([result.value for result in expected], together=True)
        del expected
        kept.restore()
        found = self._run(ways.replayed)
        self.ranks.together(partial(self._require_names, names, [r.name for r in found]))
        now = fingerprints_of([result.value for result in found], together=True)
        del found
        differing = {n for n, a, b in zip(names, known, now, strict=True) if a != b}
        if self.ranks.any(bool(differing)):
            kept.restore()
            self._require_values(ways, kept, differing, tolerance)

    def _require_values(
        self,
        ways: BothWays,
        kept: Snapshot,
        differing: set[str],  # and what shares a fingerprint with these
        rule: Tolerance,
    ) -> None:
        again = self._run(ways.eager)
        held = {r.name: r.value.detach().clone() for r in again if r.name in differing}
        updates = {
            r.name: difference(r.value, kept.saved(r.value).to(r.value.device)).norm
            for r in again
            if r.name in held and r.gradient
        }
        gradients = math.hypot(*(size(r.value) for r in again if r.is_gradient))
        del again
        kept.restore()
        third = self._run(ways.eager)
        noise = {r.name: difference(r.value, held[r.name]) for r in third if r.name in held}
        del third
        kept.restore()
        results = self._run(ways.replayed)

        def judge() -> None:
            changed, unjudged = set(), set()
            for result in results:
                eager = held.get(result.name)
                if eager is None or result.gradient in unjudged:
                    continue
                apart = difference(result.value, eager)
                runs = noise.get(result.name, NONE)
                if result.gradient in changed:
                    allowed = rule.allowed_of_update(eager, runs.norm, updates[result.name])
                else:
                    of_all = gradients if result.is_gradient else 0.0
                    allowed = rule.allowed(eager, runs.norm, of_all)
                if apart.norm != 0.0:
                    changed.add(result.name)
                if not apart.norm <= allowed:
                    raise VerificationError(
                        _RULE,
                        f"{self._where}, {result.name} differs by up to {apart.largest:.3g}; two "
                        f"eager runs differ by up to {runs.largest:.3g}",
                        _REMEDY,
                    )
                if result.is_gradient and rule.is_rounding(eager, apart):
                    unjudged.add(result.name)

        self.ranks.together(judge)

    def _require_names(self, eager: Sequence[str], replayed: Sequence[str]) -> None:
        ways = (("the eager step", eager, replayed), ("the replay", replayed, eager))
        for way, names, others in ways:
            known = set(others)
            for name in names:
                if name not in known:
                    raise VerificationError(_RULE, f"{self._where}, only {way} has {name}", _REMEDY)

    @property
    def _where(self) -> str:
        return f"at step {self.root.global_step}"

    def _say(self, line: str, reason: str) -> None:
        """Warn, once in a fit for each line, that there was no memory for a check."""
        if line not in self._said:
            self._said.add(line)
            rank_zero_warn(f"GraphCapture: {line}: {reason}", stacklevel=stacklevel_of_user())
