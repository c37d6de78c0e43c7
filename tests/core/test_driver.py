"""The driver calls against a stand-in for the bindings, in the shapes of CUDA 12 and 13."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_graphs.device import inspect as driver
from lightning_graphs.errors import GraphError, UnsupportedError

GRAPH, STREAM = 1, 77
FILL = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4E"
    "NS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
)


class Status(int):
    """A driver status: an integer with a name, as the bindings' enumerations are."""

    def __new__(cls, value: int, name: str) -> Status:
        status = super().__new__(cls, value)
        status.name = name
        return status

    name: str


OK = Status(0, "CUDA_SUCCESS")
INVALID = Status(1, "CUDA_ERROR_INVALID_VALUE")


class Unreadable:
    """Edge data: freed memory in some bindings, so that any look at it is an error."""

    def __iter__(self) -> Any:
        raise AssertionError("edge data was read")


def kernel_params(**changes: int) -> SimpleNamespace:
    dims = {f"{what}Dim{axis}": 1 for what in ("grid", "block") for axis in "XYZ"}
    return SimpleNamespace(**(dims | {"kern": 0, "func": 0} | changes))


TYPES = {
    10: "MEMCPY",
    11: "GRAPH",
    12: "MEMSET",
    13: "MEM_ALLOC",
    20: "KERNEL",
    21: "KERNEL",
}
NODES = [10, 11, 12, 13, 20, 21]
EDGES = [(10, 11), (11, 12), (10, 13), (12, 20), (20, 21)]
PARAMS = {
    20: kernel_params(kern=5, gridDimX=8, blockDimX=128),
    21: kernel_params(func=6, gridDimY=3, blockDimZ=4),
}


def bindings(major: int, version: int = 12090, capturing: int = 1) -> ModuleType:
    """A stand-in for ``cuda.bindings.driver`` that knows one small graph."""
    module: Any = ModuleType("cuda.bindings.driver")
    copy = SimpleNamespace(WidthInBytes=16, Height=4, Depth=0, srcMemoryType=1, dstMemoryType=2)

    def edges(graph: int, count: int = 0) -> tuple[Any, ...]:
        assert graph == GRAPH
        pairs = EDGES[:count]
        return OK, [a for a, _ in pairs], [b for _, b in pairs], Unreadable(), len(EDGES)

    def capture_info(stream: int) -> tuple[Any, ...]:
        assert stream == STREAM
        return OK, Status(capturing, f"STATUS_{capturing}"), 9, GRAPH, [], Unreadable(), 0

    module.cuDriverGetVersion = lambda: (OK, version)
    module.cuGraphGetNodes = lambda graph, count: (OK, NODES[:count], len(NODES))
    module.cuGraphNodeGetType = lambda node: (
        OK,
        Status(0, "CU_GRAPH_NODE_TYPE_" + TYPES[node]),
    )
    module.cuGraphKernelNodeGetParams = lambda node: (OK, PARAMS[node])
    module.cuKernelGetName = lambda kern: (OK, {5: FILL.encode()}[kern])
    module.cuFuncGetName = lambda func: (OK, {6: b"sgemm_tn"}[func])
    module.cuGraphMemcpyNodeGetParams = lambda node: (OK, copy)
    module.cuGraphMemsetNodeGetParams = lambda node: (
        OK,
        SimpleNamespace(elementSize=4, width=25, height=1),
    )
    module.cuGraphMemAllocNodeGetParams = lambda node: (OK, SimpleNamespace(bytesize=512))
    if major == 12:
        module.cuGraphGetEdges_v2 = edges
        module.cuStreamGetCaptureInfo_v3 = capture_info
        module.cuGraphGetEdges = module.cuStreamGetCaptureInfo = _lossy
    else:
        module.cuGraphGetEdges = edges
        module.cuStreamGetCaptureInfo = capture_info
    return module


def _lossy(*_: object) -> tuple[Any, ...]:
    return (Status(402, "CUDA_ERROR_LOSSY_QUERY"),)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(*args: int, **kwargs: int) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings(*args, **kwargs))

    return put


def _no_driver() -> tuple[Any, ...]:
    raise RuntimeError("Failed to dlopen libcuda.so.1")


@pytest.mark.parametrize("major", [12, 13])
class TestBothShapes:
    def test_from_cuda(self, install: Callable[..., None], major: int) -> None:
        install(major)
        info = driver.from_cuda(GRAPH, [*[("", "")] * 4, ("net.fc", "")])
        assert info.backend == "cuda"
        assert [(node.index, node.kind, node.bytes) for node in info.nodes] == [
            (0, "memcpy", 64),
            (1, "child", 0),
            (2, "memset", 100),
            (3, "alloc", 512),
            (4, "kernel", 0),
            (5, "kernel", 0),
        ]
        assert [node.name for node in info.nodes[:4]] == [
            "memcpy H to D",
            "graph",
            "memset",
            "mem_alloc",
        ]
        assert info.nodes[5].name == "sgemm_tn"
        assert (info.nodes[4].grid, info.nodes[4].block) == ((8, 1, 1), (128, 1, 1))
        assert (info.nodes[5].grid, info.nodes[5].block) == ((1, 3, 1), (1, 1, 4))
        assert info.nodes[0].grid is None
        assert info.edges == ((0, 1), (0, 3), (1, 2), (2, 4), (4, 5))
        assert info.counts == {"kernel": 2, "memcpy": 1, "memset": 1, "child": 1, "alloc": 1}
        assert (info.bytes_copied, info.bytes_set) == (64, 100)
        assert info.nodes[4].name.startswith("void at::native::vectorized_elementwise_kernel<4")
        assert (info.nodes[4].scope, info.nodes[5].scope) == ("net.fc", "")

    def test_capture_frontier(self, install: Callable[..., None], major: int) -> None:
        install(major)
        assert driver.capture_frontier(STREAM) == (GRAPH, 6)

    @pytest.mark.parametrize("status", [0, 2])
    def test_frontier_of_a_stream_that_does_not_capture(
        self, install: Callable[..., None], major: int, status: int
    ) -> None:
        install(major, capturing=status)
        with pytest.raises(GraphError, match=f"capture status is STATUS_{status}"):
            driver.capture_frontier(STREAM)


class TestErrors:
    def test_a_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bindings = SimpleNamespace(cuCall=lambda *result: result)
        monkeypatch.setattr(driver, "driver", lambda: bindings)
        assert driver._call("cuCall", OK, 4) == 4
        assert driver._call("cuCall", OK, 4, 5) == (4, 5)
        with pytest.raises(GraphError, match=r"cuCall .*: CUDA_ERROR_INVALID_VALUE"):
            driver._call("cuCall", INVALID, None)

    def test_driver_version(self, install: Callable[..., None]) -> None:
        install(13, version=13020)
        assert driver.driver_version() == (13, 2)
        driver.require_driver((13, 2), "Reading node ids")
        with pytest.raises(
            UnsupportedError, match=r"Reading node ids needs .* CUDA 13\.3 (.|\n)*CUDA 13\.2"
        ):
            driver.require_driver((13, 3), "Reading node ids")

    def test_reading_needs_a_driver_that_names_kernels(self, install: Callable[..., None]) -> None:
        install(12, version=12020)
        with pytest.raises(UnsupportedError, match=r"CUDA 12\.3 or newer(.|\n)*CUDA 12\.2"):
            driver.from_cuda(GRAPH)

    def test_no_driver(self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        install(13)
        monkeypatch.setattr(sys.modules["cuda.bindings.driver"], "cuDriverGetVersion", _no_driver)
        with pytest.raises(UnsupportedError, match=r"needs an NVIDIA driver(.|\n)*dlopen libcuda"):
            driver.driver_version()

    @pytest.mark.parametrize(
        ("cuda", "wanted"), [("13.0", ">=13,<14"), ("12.9", ">=12,<13"), (None, ">=12.9,<14")]
    )
    def test_no_bindings(
        self, monkeypatch: pytest.MonkeyPatch, cuda: str | None, wanted: str
    ) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(UnsupportedError, match=f'pip install "cuda-python{wanted}"'):
            driver.driver()
