"""Numbers inside of a graph: found by their marks, and rewritten between replays."""

from __future__ import annotations

import copy
import ctypes
import itertools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_graphs.core import CUDAGraph, graph
from lightning_graphs.core.constants import constants_of_cuda, marks
from lightning_graphs.errors import ReplayError, UnsupportedError
from tests.core.test_driver import INVALID, OK, Status


def test_marks_are_numbers_that_nobody_else_has() -> None:
    found = marks(300)
    assert len({*found, *map(float, torch.tensor(found))}) == 600  # none is a float32
    assert all(0.5 < mark < 0.75 for mark in found)


class Update:
    """One weight under fused SGD with momentum, captured with marks, and its eager twin."""

    def __init__(self, backend: str, device: torch.device, keep_graph: bool = True) -> None:
        self.rate = torch.tensor(0.25, device=device, dtype=_rate_type(device))
        weight = nn.Parameter(torch.linspace(-1, 1, 8, device=device))
        self.optimizer = self._made(weight)
        self.eager = self._made(nn.Parameter(weight.detach().clone()))
        self.weight = weight
        for one in (self.optimizer, self.eager):
            one.param_groups[0]["params"][0].grad = torch.full_like(weight, 0.5)
            one.step()
        group = self.optimizer.param_groups[0]
        group["momentum"], group["weight_decay"] = marks(2)
        self.graph = CUDAGraph(keep_graph, backend=backend)  # type: ignore[arg-type]
        with graph(self.graph):
            self.optimizer.step()

    def _made(self, weight: nn.Parameter) -> torch.optim.SGD:
        return torch.optim.SGD([weight], lr=self.rate, momentum=0.5, fused=True)

    def step_eagerly(self, momentum: float, decay: float) -> torch.Tensor:
        self.eager.param_groups[0].update(momentum=momentum, weight_decay=decay)
        self.eager.step()
        expected: torch.Tensor = self.eager.param_groups[0]["params"][0].detach()
        return expected


def _rate_type(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cuda" else torch.float64


def test_written_numbers_are_computed_with(backend: str, device: torch.device) -> None:
    update = Update(backend, device)
    momentum, decay = update.graph.constants(marks(2))
    assert (momentum.places, decay.places) == (1, 1)
    for i in range(4):
        momentum.write(0.875 - 0.125 * i)
        decay.write(0.25 * i)
        update.graph.replay()
        assert torch.equal(update.weight, update.step_eagerly(0.875 - 0.125 * i, 0.25 * i))


def test_a_number_keeps_its_value_until_it_is_written(backend: str, device: torch.device) -> None:
    update = Update(backend, device)
    momentum, decay = update.graph.constants(marks(2))
    momentum.write(0.75)
    decay.write(0.0)
    for _ in range(2):
        update.graph.replay()
        assert torch.equal(update.weight, update.step_eagerly(0.75, 0.0))


def test_instantiating_brings_back_what_was_captured(backend: str, device: torch.device) -> None:
    update = Update(backend, device)
    momentum, decay = update.graph.constants(marks(2))
    momentum.write(0.75)
    decay.write(0.0)
    update.graph.instantiate()
    update.graph.replay()
    assert torch.equal(update.weight, update.step_eagerly(*marks(2)))


def test_each_graph_has_its_own(backend: str, device: torch.device) -> None:
    update = Update(backend, device)
    other = CUDAGraph(keep_graph=True, backend=update.graph.backend.name)
    with graph(other):
        update.optimizer.step()
    for one, values in ((update.graph, (0.75, 0.25)), (other, (0.5, 0.125))):
        for constant, value in zip(one.constants(marks(2)), values, strict=True):
            constant.write(value)
    for one, values in ((update.graph, (0.75, 0.25)), (other, (0.5, 0.125))) * 2:
        one.replay()
        assert torch.equal(update.weight, update.step_eagerly(*values))


def test_a_number_that_is_not_there_has_no_place(backend: str, device: torch.device) -> None:
    update = Update(backend, device)
    (absent,) = update.graph.constants([0.123456789])
    assert absent.places == 0
    absent.write(0.5)
    for constant, value in zip(update.graph.constants(marks(2)), (0.5, 0.0), strict=True):
        constant.write(value)
    update.graph.replay()
    assert torch.equal(update.weight, update.step_eagerly(0.5, 0.0))


def test_constants_need_the_template(backend: str, device: torch.device) -> None:
    update = Update(backend, device, keep_graph=False)
    with pytest.raises(ReplayError, match=r"constants\(\) needs the template"):
        update.graph.constants(marks(2))
    with pytest.raises(ReplayError, match="needs a finished capture"):
        CUDAGraph(keep_graph=True, backend=update.graph.backend.name).constants(marks(2))


# ---------------------------------------------------------------- against stand-ins for the driver

TEMPLATE, EXECUTABLE = 1, 9
FIRST, SECOND = marks(2)
_FUNCTIONS = itertools.count(100)


class Kernel:
    """A kernel node whose arguments lie in memory, as the driver keeps them."""

    def __init__(self, *arguments: Any, kern: int = 0, packed: bool = False) -> None:
        self.arguments = arguments
        self.kept = [copy.copy(argument) for argument in arguments]
        self._pointers = (ctypes.c_void_p * len(self.kept))(*map(ctypes.addressof, self.kept))
        self.address = 0 if packed else ctypes.addressof(self._pointers)
        self.kern = kern
        self.func = 0 if kern else next(_FUNCTIONS)

    def params(self) -> SimpleNamespace:
        return SimpleNamespace(
            func=self.func, kern=self.kern, kernelParams=self.address, owner=self
        )


def doubles_and_pointers(*doubles: float, single: float = 0.0) -> list[Any]:
    metadata = (ctypes.c_uint64 * 40)(*range(40))
    pointer = ctypes.c_uint64(0x7F1369F6D760)
    numbers = [ctypes.c_double(value) for value in (1.0, *doubles, 0.0)]
    return [metadata, pointer, *numbers, ctypes.c_bool(True), ctypes.c_float(single)]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def put(*kernels: Kernel, version: int = 13000) -> list[Any]:
        submitted: list[Any] = []
        module: Any = ModuleType("cuda.bindings.driver")
        sizes = {(k.kern or k.func): [ctypes.sizeof(a) for a in k.arguments] for k in kernels}

        def info(function: int, index: int) -> tuple[Any, ...]:
            known = sizes[function]
            return (OK, 8 * index, known[index]) if index < len(known) else (INVALID, None, None)

        def set_params(graph_exec: int, node: int, params: Any) -> tuple[Any, ...]:
            assert graph_exec == EXECUTABLE
            pointers = (ctypes.c_void_p * len(params.owner.arguments)).from_address(
                params.kernelParams
            )
            types = [type(argument) for argument in params.owner.arguments]
            found = [t.from_address(p) for t, p in zip(types, pointers, strict=True)]
            submitted.append((node, [f.value for f in found[2:]], list(found[0]), found[1].value))
            return (OK,)

        module.cuDriverGetVersion = lambda: (OK, version)
        module.cuGraphGetNodes = lambda _, n: (OK, [*range(len(kernels) + 1)][:n], len(kernels) + 1)
        module.cuGraphNodeGetType = lambda node: (
            OK,
            Status(0, "CU_GRAPH_NODE_TYPE_" + ("KERNEL" if node < len(kernels) else "MEMSET")),
        )
        module.cuGraphKernelNodeGetParams = lambda node: (OK, kernels[node].params())
        module.cuFuncGetParamInfo = module.cuKernelGetParamInfo = info
        module.cuGraphExecKernelNodeSetParams = set_params
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
        return submitted

    return put


@pytest.mark.parametrize("kern", [0, 7])
def test_arguments_of_kernels_are_rewritten(install: Callable[..., list[Any]], kern: int) -> None:
    other = Kernel(ctypes.c_uint64(65536), ctypes.c_double(0.3))
    both = Kernel(*doubles_and_pointers(FIRST, SECOND), kern=kern)
    one = Kernel(*doubles_and_pointers(SECOND, 0.0))
    submitted = install(other, both, Kernel(packed=True), one)
    first, second = constants_of_cuda(TEMPLATE, EXECUTABLE, [FIRST, SECOND])
    assert (first.places, second.places) == (1, 2)
    first.write(0.9)
    rest = (list(range(40)), 0x7F1369F6D760)
    assert submitted == [(1, [1.0, 0.9, SECOND, 0.0, True, 0.0], *rest)]
    second.write(0.01)
    assert submitted[1:] == [
        (1, [1.0, 0.9, 0.01, 0.0, True, 0.0], *rest),
        (3, [1.0, 0.01, 0.0, 0.0, True, 0.0], *rest),
    ]
    # The template's own arguments are the driver's.
    assert both.kept[3].value == FIRST


@pytest.mark.parametrize(
    "arguments",
    [
        doubles_and_pointers(FIRST, 1 - FIRST),
        doubles_and_pointers(FIRST, single=FIRST),
        doubles_and_pointers(FIRST, -0.25),
    ],
)
def test_numbers_that_may_be_computed_from_a_mark_are_refused(
    install: Callable[..., list[Any]], arguments: list[Any]
) -> None:
    install(Kernel(*arguments))
    with pytest.raises(UnsupportedError, match=r"only where nothing was computed from it"):
        constants_of_cuda(TEMPLATE, EXECUTABLE, [FIRST, SECOND])


def test_rewriting_needs_a_driver_that_tells_sizes(install: Callable[..., list[Any]]) -> None:
    install(version=12030)
    with pytest.raises(UnsupportedError, match=r"CUDA 12\.4 or newer(.|\n)*CUDA 12\.3"):
        constants_of_cuda(TEMPLATE, EXECUTABLE, [FIRST])


def test_another_failure_of_the_driver_is_told(
    install: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Kernel(*doubles_and_pointers(FIRST)))
    broken = (Status(801, "CUDA_ERROR_NOT_SUPPORTED"), None, None)
    monkeypatch.setattr(
        sys.modules["cuda.bindings.driver"], "cuFuncGetParamInfo", lambda *_: broken
    )
    with pytest.raises(UnsupportedError, match=r"cuFuncGetParamInfo(.|\n)*NOT_SUPPORTED"):
        constants_of_cuda(TEMPLATE, EXECUTABLE, [FIRST])
