"""The one environment of user code under watch: of a captured step or call, or an observed step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_graphs.device.generators import Generators
from lightning_graphs.device.rules import DRAWN, STORED, STORED_OUTSIDE, OnUse, refuse
from lightning_graphs.values.snapshot import PythonSnapshot
from lightning_graphs.watch.object_graph import UnregisteredTensors, iter_objects
from lightning_graphs.watch.reads import AttributeGuards, GlobalReads
from lightning_graphs.watch.refusals import Effect, effects_watched
from lightning_graphs.watch.tracers import old_gradients_watched
from lightning_graphs.watch.user_code import UserCode

AsRead = Callable[[str, Callable[[], Any]], Any]
"""What a counter is read as, of its name and what gives the value."""


class Client(Protocol):
    """Watches the program that runs a region: its counters, loggers and learning rates."""

    own: UserCode
    """Tells user code from that of libraries."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier steps are added to."""

    @property
    def effects(self) -> Iterable[Effect]:
        """What prints and logs for user code."""

    def reading(
        self, on_use: OnUse, reads: AttributeGuards | None, number: AsRead | None
    ) -> AbstractContextManager[None]:
        """Watch what the body reads of the program."""

    def calling(self) -> AbstractContextManager[None]:
        """Refuse what the body, a capture of calls of modules, has to leave to code around it."""


class Environment:
    """What user code may read and change besides the tensors that it is given.

    It is made before the code runs, by one walk through the module tree. A capture refuses what no
    replay can do, and undoes it; the doctor notes it, and the code goes on: that is ``on_use``.

    Args:
        root: The module that is trained.
        client: Watches the program around the region.
        modules: Those whose code runs; all of ``root`` by default.
        on_use: Refuses or notes what code under watch does; see :data:`OnUse`.
        seen: Random generators whose draws are seen elsewhere; see :class:`Generators`.
    """

    def __init__(
        self,
        root: Any,
        client: Client,
        *,
        modules: Sequence[nn.Module] | None = None,
        on_use: OnUse = refuse,
        seen: Iterable[Any] | None = None,
    ) -> None:
        self._root = root
        self._client = client
        self._on_use = on_use
        self.held = list(iter_objects(root))
        self.generators = Generators(self.held, root.device, seen=seen)
        self.loose = UnregisteredTensors(root, self.held)  # tensors that no module has in a table
        self.in_attributes = self.loose.tensors  # those that modules hold
        code = root if modules is None else nn.ModuleList(modules)
        held = self.held if modules is None else None
        self.outside = GlobalReads(code, client.own, self.generators.add, self.loose.add, held=held)

    @property
    def leaves(self) -> list[Any]:
        """Tensors in attributes of modules that get gradients as parameters do."""
        return [t for t in self.in_attributes if t.requires_grad and t.is_leaf]

    @contextlib.contextmanager
    def reading(
        self, reads: AttributeGuards | None = None, number: AsRead | None = None
    ) -> Iterator[None]:
        """Let ``reads`` learn what the body reads of modules and of the program around it."""
        attributes = contextlib.nullcontext() if reads is None else reads.watching(self._root)
        with attributes, self._client.reading(self._on_use, reads, number):
            yield

    def old_gradients(self, others: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        """Meet uses of ``.grad`` of parameters, of tensors in attributes, and of others."""
        watched = [*self.in_attributes, *others]
        return old_gradients_watched(self._on_use, watched, accumulates=self._client.accumulates)

    @contextlib.contextmanager
    def calling(self, reads: AttributeGuards) -> Iterator[None]:
        """Let ``reads`` learn what the body reads, a capture of calls of modules."""
        with self.reading(reads), self.old_gradients(), self._client.calling():
            yield

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Follow the functions that the body calls, and watch what they do outside of Python."""
        client = self._client
        with self.outside.followed(), effects_watched(client.own, self._on_use, client.effects):
            yield

    @contextlib.contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Refuse what the body, code under capture, does or stores outside of its module; undo it.

        Args:
            what: The code, for messages.
        """

        def refuse_stored(names: Sequence[str]) -> None:
            raise STORED_OUTSIDE.refused(f"{what} changes {self.outside.listed(names)}")

        with self.outside.contents.left(refuse_stored):
            try:
                with self.acting():
                    yield
            finally:
                self.outside.empty_caches()

    @contextlib.contextmanager
    def refusing_in(
        self, module: nn.Module, attributes: PythonSnapshot, reads: AttributeGuards
    ) -> Iterator[None]:
        """Refuse code of the body, a captured call, that acts on anything but tensors; undo it.

        Args:
            module: The module that is called.
            attributes: What it held before.
            reads: Learns what the body sets.
        """
        try:
            with self.refusing("the module's forward"):
                yield
        finally:
            changed = reads.changed_outside(set(map(id, module.modules())))
            if inside := attributes.changed():
                changed += inside
                attributes.restore()
            if drawn := self.generators.drawn():
                self.generators.restore()
        for names, obstacle, does in ((changed, STORED, "changes"), (drawn, DRAWN, "draws from")):
            if names:
                raise obstacle.refused(f"the module's forward {does} {self.outside.listed(names)}")
