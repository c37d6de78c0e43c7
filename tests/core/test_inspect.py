"""Inspection without a GPU: recordings, figures, differences, names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_graphs.device.inspect import GraphInfo, GraphNode, diff, from_recording, inspect
from lightning_graphs.private.torch import demangle

FILL = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4E"
    "NS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
)


@dataclass
class Op:
    """The least that counts as a recorded operator."""

    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    nbytes: int = 0
    scope: str = ""
    site: str = "train.py:12"
    line: str = "train.py:12"


def chain(names: Sequence[str], kind: str = "kernel") -> GraphInfo:
    nodes = tuple(GraphNode(index, kind, name) for index, name in enumerate(names))
    return GraphInfo("cuda", nodes, tuple((at, at + 1) for at in range(len(names) - 1)))


class TestFromRecording:
    def test_nodes_carry_kind_bytes_and_scope(self) -> None:
        info = from_recording(
            [
                Op("aten.zeros.default", writes=(1,), nbytes=64),
                Op("aten.copy_.default", reads=(0, 1), writes=(1,), nbytes=64, scope="net.fc"),
                Op("aten._to_copy.default", reads=(1,), writes=(2,), nbytes=32),
                Op("aten.fill_.Scalar", reads=(2,), writes=(2,), nbytes=32),
                Op("aten.mm.default", reads=(1, 2), writes=(3,), nbytes=256),
                Op("mine.copy_.default", reads=(3,), writes=(4,), nbytes=8),
            ]
        )
        kinds = ["memset", "memcpy", "memcpy", "memset", "kernel", "kernel"]
        assert [node.kind for node in info.nodes] == kinds
        assert info.backend == "emulated"
        assert info.counts == {"kernel": 2, "memcpy": 2, "memset": 2}
        assert info.kernels == {"aten.mm.default": 1, "mine.copy_.default": 1}
        assert (info.bytes_copied, info.bytes_set) == (96, 96)
        assert [info.nodes[0].scope, info.nodes[1].scope] == ["train.py:12", "net.fc"]

    def test_read_after_write(self) -> None:
        info = from_recording([Op("w", writes=(1,)), Op("r", reads=(1,)), Op("r", reads=(1,))])
        assert info.edges == ((0, 1), (0, 2))

    def test_write_after_read_waits_for_the_readers_only(self) -> None:
        info = from_recording(
            [
                Op("w", writes=(1,)),
                Op("r", reads=(1,), writes=(2,)),
                Op("r", reads=(1,), writes=(3,)),
                Op("w", writes=(1,)),
            ]
        )
        assert info.edges == ((0, 1), (0, 2), (1, 3), (2, 3))

    def test_write_after_write(self) -> None:
        info = from_recording([Op("w", writes=(1,)), Op("w", writes=(1,)), Op("w", writes=(1,))])
        assert info.edges == ((0, 1), (1, 2))

    def test_edges_implied_by_a_chain_are_left_out(self) -> None:
        info = from_recording(
            [
                Op("a", writes=(1,)),
                Op("b", reads=(1,), writes=(2,)),
                Op("c", reads=(1, 2), writes=(3,)),
            ]
        )
        assert info.edges == ((0, 1), (1, 2))

    def test_operators_on_separate_storages_are_independent(self) -> None:
        info = from_recording([Op("a", reads=(0,), writes=(n,)) for n in range(1, 5)])
        assert info.edges == ()

    @given(
        st.lists(
            st.tuples(
                st.sets(st.integers(0, 4), max_size=3), st.sets(st.integers(0, 4), max_size=2)
            ),
            max_size=12,
        )
    )
    def test_conflicting_operators_are_ordered_and_no_others(
        self, accesses: list[tuple[set[int], set[int]]]
    ) -> None:
        info = from_recording([Op("op", tuple(r), tuple(w)) for r, w in accesses])
        size = len(accesses)

        def closure(edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
            reached = [{b for a, b in edges if a == node} for node in range(size)]
            for node in reversed(range(size)):
                reached[node] |= {far for near in reached[node] for far in reached[near]}
            return {(a, b) for a in range(size) for b in reached[a]}

        conflicts = {
            (a, b)
            for b in range(size)
            for a in range(b)
            if accesses[a][1] & (accesses[b][0] | accesses[b][1]) or accesses[a][0] & accesses[b][1]
        }
        assert closure(set(info.edges)) == closure(conflicts)


class TestFigures:
    def test_empty(self) -> None:
        info = GraphInfo("cuda", (), ())
        assert (info.counts, info.kernels) == ({}, {})
        assert info.summary() == "cuda graph: 0 nodes, 0 edges\n  empty"

    def test_kernels_come_in_descending_order(self) -> None:
        info = chain(["a", "b", "b", "c", "b", "c"])
        assert list(info.kernels.items()) == [("b", 3), ("c", 2), ("a", 1)]

    def test_summary(self) -> None:
        nodes = (
            GraphNode(0, "memcpy", "memcpy H to D", 4096),
            GraphNode(1, "kernel", "void ns::add<int>(int)"),
            GraphNode(2, "kernel", "void ns::add<int>(int)"),
            GraphNode(3, "memset", "memset", 12),
        )
        info = GraphInfo("cuda", nodes, ((0, 1), (1, 2), (2, 3)))
        assert info.summary().splitlines() == [
            "cuda graph: 4 nodes, 3 edges",
            "  2 kernel, 1 memcpy (4,096 bytes), 1 memset (12 bytes)",
            "       2 x add",
        ]

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("void cutlass::Kernel2<cutlass_80_wmma>(cutlass_80_wmma::Params)", "Kernel2"),
            ("void at::(anonymous namespace)::cat<int, f(a)::{lambda(long)#1}>(int)", "cat"),
            ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
            ("aten.mm.default", "aten.mm.default"),
        ],
    )
    def test_summary_shortens_names(self, name: str, short: str) -> None:
        assert chain([name]).summary().splitlines()[-1] == f"       1 x {short}"

    def test_inspect_asks_the_graph(self) -> None:
        info = chain(["a"])

        class Captured:
            def inspection(self) -> GraphInfo:
                return info

        assert inspect(Captured()) is info


class TestDiff:
    def test_equal(self) -> None:
        difference = diff(chain(["a", "b"]), chain(["a", "b"]))
        assert not difference
        assert difference.first is None
        assert str(difference) == "the captures are equal"

    @pytest.mark.parametrize(
        ("field", "value", "was"),
        [
            ("kind", "memset", "kernel"),
            ("name", "z", "b"),
            ("bytes", 8, 0),
            ("grid", (4, 1, 1), None),
            ("block", (32, 1, 1), None),
            ("scope", "net", ""),
        ],
    )
    def test_first_divergent_field(self, field: str, value: object, was: object) -> None:
        a = chain(["a", "b", "c"])
        b = replace(a, nodes=(a.nodes[0], replace(a.nodes[1], **{field: value}), a.nodes[2]))
        difference = diff(a, b)
        assert difference
        assert difference.first is not None
        first = difference.first
        assert (first.index, first.field, first.left, first.right) == (1, field, was, value)
        assert f"first divergence: node 1, {field}: {was!r} -> {value!r}" in str(difference)

    def test_shorter_capture(self) -> None:
        difference = diff(chain(["a", "b", "b"]), chain(["a"]))
        assert difference.first is not None
        assert str(difference.first) == "node 1, node: 'b' -> None"
        assert difference.counts == {"kernel": (3, 1)}
        assert difference.kernels == {"b": (2, 0)}
        assert difference.missing_edges == ((0, 1), (1, 2))

    def test_edges_alone(self) -> None:
        a = chain(["a", "b", "c"])
        difference = diff(a, replace(a, edges=((0, 1), (0, 2))))
        assert difference
        assert difference.first is None
        assert (difference.missing_edges, difference.extra_edges) == (((1, 2),), ((0, 2),))
        assert str(difference) == "missing edges: 1 -> 2\nextra edges: 0 -> 2"

    def test_backends(self) -> None:
        a = chain(["a"])
        first = diff(a, replace(a, backend="emulated")).first
        assert str(first) == "backend: 'cuda' -> 'emulated'"


class TestNames:
    def test_demangle(self) -> None:
        name = demangle(FILL)
        assert name.startswith(
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
        )

    @pytest.mark.parametrize("name", ["ampere_sgemm_128x64_tn", "triton_poi_fused_add_0", "_Zbad"])
    def test_what_is_not_mangled_stays(self, name: str) -> None:
        assert demangle(name) == name
