"""The contract that both backends fulfil."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch

from lightning_graphs.device.inspect import GraphInfo
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.cudnn import CapturedDropout

BackendName = Literal["auto", "cuda", "emulated"]
PoolHandle = tuple[int, int]


class CapturedGraph(Protocol):
    """One graph of one backend, under :class:`~lightning_graphs.core.CUDAGraph`.

    The methods mean what torch documents for ``torch.cuda.CUDAGraph``. Capture has no effect on the
    world: afterwards every tensor that existed before, and every random generator, is as it was.
    """

    dropout: CapturedDropout | None  # cuDNN's random state, where the graph draws from it

    def capture_begin(
        self, pool: PoolHandle | None, mode: str, annotate: bool, check_liveness: bool
    ) -> None: ...

    def capture_end(self) -> None: ...

    def abandon(self) -> None:
        """Leave a capture that failed: the allocator, generators and modes are as before."""

    def instantiate(self) -> None: ...

    def replay(self) -> None: ...

    def reset(self) -> None: ...

    def pool(self) -> PoolHandle: ...

    def keep_template(self) -> None:
        """Keep the template of the coming capture, as with ``keep_graph=True``."""

    def debug_dump(self, debug_path: str) -> None: ...

    def raw_cuda_graph(self) -> int: ...

    def raw_cuda_graph_exec(self) -> int: ...

    def register_generator_state(self, generator: torch.Generator) -> None: ...

    def inspection(self) -> GraphInfo: ...

    def node_counts(self) -> Mapping[str, int]:
        """Nodes by kind; empty where they cannot be counted."""
        return self.inspection().counts


class Backend(abc.ABC):
    """What a process needs of a backend outside of a single graph; a CPU needs no streams."""

    name: Literal["cuda", "emulated"]
    device_type: Literal["cuda", "cpu"]

    @abc.abstractmethod
    def new_graph(self, keep_graph: bool) -> CapturedGraph: ...

    @abc.abstractmethod
    def new_pool(self) -> PoolHandle: ...

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream (CUDA) or thread (emulated) is being captured."""

    def default_capture_stream(self, last: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
        """The current device's stream for captures; the last one that was used, if it is there."""
        return None

    def capture_stream(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Make ``stream`` current; restore afterwards. It may be entered several times."""
        return nullcontext()

    def side_stream(self) -> AbstractContextManager[object]:
        """A fresh stream that waits for the current one, which waits for it afterwards."""
        return nullcontext()

    def prepare_capture(self) -> None:  # noqa: B027
        """Synchronize and free cached memory, so that the graph's pool has room."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait for the device."""

    def refusal(self, error: BaseException | None) -> CaptureError | None:
        """The device's own refusal of an operation inside a capture, with the user's line."""
        return None
