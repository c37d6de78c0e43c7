"""Whether a replay computes what eager code does: run both ways from one state, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_graphs.core.fingerprints import Fingerprint, Fingerprinter
from lightning_graphs.errors import VerificationError
from lightning_graphs.training.differences import (
    NONE,
    Difference,
    Result,
    Tolerance,
    difference,
    size,
)
from lightning_graphs.training.memory import MemoryBudget
from lightning_graphs.training.ranks import ONE_RANK, Ranks

_RULE = "A replay computes what the eager step computes, to the bit or within its rounding."
_REMEDY = (
    "look for Python values that the step reads, that change between steps and that nobody can see "
    "(a context variable, the state of a library, a file): make them tensors or attributes"
)
_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True, slots=True)
class BothWays:
    """A part of a step that can be run eagerly, and as graphs.

    Attributes:
        eager: Runs it eagerly; what it computed and changed, in place.
        replayed: Replays it; the same results under the same names.
        restore: Puts the state back from which both start.
        moved: How far, as a Euclidean norm, a tensor of the state is from where it started.
    """

    eager: Callable[[], list[Result]]
    replayed: Callable[[], list[Result]]
    restore: Callable[[], None]
    moved: Callable[[Tensor], float] = lambda _: 0.0


class Agreement:
    """Compares an eager run with a replay.

    The eager run comes first and leaves a fingerprint of every result. Where the bits of a replay
    from the same state differ, it runs eagerly once or twice more and replays once more, now with
    copies of what differs, and asks the tolerance.

    Args:
        tolerance: How much a replay may differ.
        budget: Says where there is no room for copies.
        where: Opens the message of a mismatch: ``at step 5``.
        say: Told, once for each check, what could not be compared.
        ranks: All of them run as often, and agree.
    """

    def __init__(
        self,
        tolerance: Tolerance,
        budget: MemoryBudget,
        where: str,
        say: Callable[[str], None],
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._ranks = ranks
        self._tolerance = tolerance
        self._budget = budget
        self._where = where
        self._say = say

    def require(self, ways: BothWays) -> None:
        """Compare; the state is left as one of the runs made it.

        Raises:
            VerificationError: names the first result that differs.
        """
        prints = Fingerprinter()
        expected = ways.eager()
        names = [result.name for result in expected]
        known = prints.of([result.value for result in expected])
        del expected
        ways.restore()
        found = ways.replayed()
        self._ranks.together(partial(self.require_names, names, [r.name for r in found]))
        now = prints.of([result.value for result in found])
        del found
        differing = {n for n, a, b in zip(names, known, now, strict=True) if a != b}
        if self._ranks.any(bool(differing)):
            ways.restore()
            self._require_values(ways, differing, (prints, names, known))

    def _require_values(
        self,
        ways: BothWays,
        differing: set[str],
        first: tuple[Fingerprinter, list[str], list[Fingerprint]],
    ) -> None:
        """Ask the rule about the tensors whose bits differ."""
        prints, names, known = first
        again = ways.eager()
        now = prints.of([result.value for result in again])
        steady = [r.name for r in again] == names and now == known
        held = {r.name: r.value.detach().clone() for r in self._fitting(again, differing)}
        if len(held) < len(differing):
            self._say("not every tensor was verified: no memory for copies")
        updates = {r.name: ways.moved(r.value) for r in again if r.name in held and r.gradient}
        gradients = math.hypot(*(size(r.value) for r in again if r.is_gradient))
        del again
        noise: dict[str, Difference] = {}
        if self._ranks.any(not steady):
            ways.restore()
            third = ways.eager()
            noise = {r.name: difference(r.value, held[r.name]) for r in third if r.name in held}
            del third
        ways.restore()
        results, rule = ways.replayed(), self._tolerance

        def judge() -> None:
            unjudged = set()
            for result in results:
                eager = held.get(result.name)
                if eager is None or result.gradient in unjudged:
                    continue
                apart = difference(result.value, eager)
                runs = noise.get(result.name, NONE)
                if result.gradient in differing:
                    allowed = rule.allowed_of_update(eager, runs.norm, updates[result.name])
                else:
                    of_all = gradients if result.is_gradient else 0.0
                    allowed = rule.allowed(eager, runs.norm, of_all)
                if not apart.norm <= allowed:
                    raise self.mismatch(result.name, apart, runs)
                if result.is_gradient and rule.is_rounding(eager, apart):
                    unjudged.add(result.name)

        self._ranks.together(judge)

    def _fitting(self, results: Sequence[Result], wanted: set[str]) -> Iterator[Result]:
        """The first of the wanted results, with as much memory left free as their copies take."""
        needed = 0
        for result in results:
            if result.name in wanted:
                needed += result.value.numel() * result.value.element_size()
                if not self._budget.has_room(needed):
                    return
                yield result

    def require_names(self, eager: Sequence[str], replayed: Sequence[str]) -> None:
        """Refuse a result that only one of the two ways has.

        Raises:
            VerificationError: names it.
        """
        for name in (*eager, *replayed):
            if name not in eager or name not in replayed:
                way = "the eager step" if name in eager else "the replay"
                raise VerificationError(_RULE, f"{self._where}, only {way} has {name}", _REMEDY)

    def mismatch(self, name: str, apart: Difference, eager: Difference) -> VerificationError:
        """The error that names a result.

        Args:
            name: Its name.
            apart: How far the replay is from the eager run.
            eager: How far two eager runs are apart.
        """
        observed = (
            f"{self._where}, {name} differs by up to {apart.largest:.3g}; two eager runs differ "
            f"by up to {eager.largest:.3g}"
        )
        return VerificationError(_RULE, observed, _REMEDY)


def tolerance_of(trainer: Trainer) -> Tolerance:
    """The rule for whole steps of a fit, in its arithmetic."""
    precision = str(trainer.precision_plugin.precision)
    return Tolerance(trainer.strategy.root_device.type, _ARITHMETIC.get(precision))
