"""Finds what a part of a step writes beside the state that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, UntypedStorage

from lightning_graphs.device.undo import WriteWatch
from lightning_graphs.errors import GraphError
from lightning_graphs.policy.budget import is_out_of_memory
from lightning_graphs.private.callsite import is_raised_by_user
from lightning_graphs.private.torch import storage_reference
from lightning_graphs.values.memory import bytes_of, storage_address
from lightning_graphs.values.snapshot import Snapshot


class WrittenMemory:
    """Memory that runs of one part of a step write, and that no walk from its module finds.

    An optimizer that a hook steps holds such, and so does a C extension. The dispatcher shows it in
    a run whose values are neither compared nor kept; kernels outside of torch are not shown.
    """

    def __init__(self) -> None:
        self._found: list[Callable[[], UntypedStorage | None]] | None = None

    def keep_with(
        self,
        kept: Snapshot,
        run: Callable[[], object],
        spare: Iterable[Tensor] = (),  # whose values nothing needs
        # Runs something on all ranks
        together: Callable[[Callable[[], object]], object] = lambda run: run(),
    ) -> None:
        """Let what is kept have it, too; the first time it is found by a run."""
        if self._found is not None:
            storages = [storage for find in self._found if (storage := find()) is not None]
            kept.add(Snapshot(map(bytes_of, storages)))
            return
        watch = WriteWatch({*kept.addresses, *map(storage_address, spare)})
        kept.add(watch)

        def watched() -> None:
            try:
                with watch:
                    run()
            except Exception as error:
                is_known = isinstance(error, GraphError) or is_out_of_memory(error)
                if is_known or is_raised_by_user(error):
                    raise
                # What the watching has caused does not come again, and all else does

        try:
            together(watched)
        finally:
            kept.restore()
        self._found = list(map(storage_reference, watch.found()))
