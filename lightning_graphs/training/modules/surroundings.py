"""What of Python the captures of a step must leave as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.errors import CaptureError
from lightning_graphs.training.generators import Generators
from lightning_graphs.training.loose_tensors import LooseTensors
from lightning_graphs.training.modules.sites import Baked
from lightning_graphs.training.own_code import OwnCode
from lightning_graphs.training.python_state import DRAWN, STORED, Attributes
from lightning_graphs.training.side_effects import SideEffects

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the captures of a step have in common, whichever module they are of."""

    generators: Generators  # of Python and NumPy
    effects: SideEffects  # what is done outside of modules
    loose: LooseTensors  # tensors that no module has in a table
    baked: Baked  # watches what the captures read and set

    @classmethod
    def of(cls, root: LightningModule, own: OwnCode, baked: Baked) -> Surroundings:
        """The surroundings of the calls that a step of this module makes."""
        generators, loose = Generators(root), LooseTensors(root)
        baked.outside.tell(generators.add, loose.add)
        return cls(generators, SideEffects(root.trainer, own), loose, baked)

    def left_alone(
        self,
        run: Callable[[], Result],
        module: nn.Module,
        attributes: Attributes,
    ) -> Result:
        """Run a part of a capture; refuse code that acts on anything but tensors."""
        try:
            with self.effects.refused(self.baked.outside, "its forward"):
                result = run()
        finally:
            changed = self.baked.changed_outside(set(map(id, module.modules())))
            if inside := attributes.changed():
                changed += inside
                attributes.restore()
            if drawn := self.generators.drawn():
                self.generators.restore()
        if changed:
            names = ", ".join(changed[:3])
            raise CaptureError(STORED.rule, f"its forward changes {names}", STORED.remedy)
        if drawn:
            observed = f"its forward draws from {', '.join(drawn)}"
            raise CaptureError(DRAWN.rule, observed, DRAWN.remedy)
        return result
