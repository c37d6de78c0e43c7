"""Inspection without a GPU: recordings, JSON, folding, figures, differences, names."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_graphs.core.inspect import (
    KINDS,
    GraphInfo,
    GraphNode,
    demangle,
    diff,
    from_recording,
    inspect,
    short_name,
)
from lightning_graphs.core.topology import Item, fold, representatives, topological_order
from lightning_graphs.errors import GraphError

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


def chain(names: Sequence[str], kind: str = "kernel") -> GraphInfo:
    nodes = tuple(GraphNode(index, kind, name) for index, name in enumerate(names))
    return GraphInfo("cuda", nodes, tuple((at, at + 1) for at in range(len(names) - 1)))


def spelled_out(items: Sequence[Item], tokens: Sequence[Hashable]) -> list[Hashable]:
    result: list[Hashable] = []
    for item in items:
        if isinstance(item, int):
            result.append(tokens[item])
        else:
            result.extend(spelled_out(item.body, tokens) * item.count)
    return result


@st.composite
def graphs(draw: st.DrawFn) -> GraphInfo:
    size = draw(st.integers(0, 12))
    text = st.text(alphabet='aZ0 .:<>"\\\\\\n\u00e9\u2713', max_size=8)
    triple = st.none() | st.tuples(*[st.integers(1, 2**31 - 1)] * 3)
    nodes = tuple(
        GraphNode(
            index,
            draw(st.sampled_from(KINDS)),
            draw(text),
            draw(st.integers(0, 2**40)),
            draw(triple),
            draw(triple),
            draw(text),
        )
        for index in range(size)
    )
    pairs = [(a, b) for b in range(size) for a in range(b)]
    edges = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return GraphInfo(draw(st.sampled_from(["cuda", "emulated"])), nodes, tuple(sorted(edges)))


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
        assert (info.depth, info.width) == (1, 4)

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
        assert (info.depth, info.width, info.counts, info.kernels) == (0, 0, {}, {})
        assert info.summary() == "cuda graph: 0 nodes, 0 edges, depth 0, width 0\n  empty"

    def test_chain(self) -> None:
        info = chain(["a"] * 7)
        assert (info.depth, info.width) == (7, 1)

    def test_fork_and_join(self) -> None:
        # 0 forks to 1, 2 and the pair 3 -> 4; all join in 5.
        edges = ((0, 1), (0, 2), (0, 3), (1, 5), (2, 5), (3, 4), (4, 5))
        info = replace(chain(["k"] * 6), edges=edges)
        assert (info.depth, info.width) == (4, 3)

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
            "cuda graph: 4 nodes, 3 edges, depth 4, width 1",
            "  2 kernel, 1 memcpy (4.0 KiB), 1 memset (12 B)",
            "       2 x add",
        ]

    def test_inspect_asks_the_graph(self) -> None:
        info = chain(["a"])

        class Captured:
            def inspection(self) -> GraphInfo:
                return info

        assert inspect(Captured()) is info


class TestJson:
    @given(graphs())
    def test_round_trip(self, info: GraphInfo) -> None:
        assert GraphInfo.from_json(json.loads(json.dumps(info.to_json()))) == info

    @pytest.mark.parametrize(
        ("change", "observed"),
        [
            ({"edges": [[0, 9]]}, "an edge leads to a node that is not there"),
            ({"edges": [[-1, 0]]}, "an edge leads to a node that is not there"),
            ({"edges": [[0]]}, "not enough values"),
            ({"nodes": [{"kind": "kernel"}]}, "KeyError: 'index'"),
            ({"nodes": 3}, "TypeError"),
        ],
    )
    def test_other_data_is_refused(self, change: dict[str, object], observed: str) -> None:
        data = chain(["a", "b"]).to_json() | change
        with pytest.raises(GraphError, match=observed):
            GraphInfo.from_json(data)

    def test_misnumbered_and_unknown_nodes_are_refused(self) -> None:
        data = chain(["a", "b"]).to_json()
        data["nodes"][1]["index"] = 5
        with pytest.raises(GraphError, match="not numbered from 0"):
            GraphInfo.from_json(data)
        data["nodes"][1]["kind"] = "kernal"
        with pytest.raises(GraphError, match="unknown kind 'kernal'"):
            GraphInfo.from_json(data)


class TestFolding:
    LAYER = ("norm", "qkv", "attend", "proj", "add", "norm", "up", "gelu", "down", "add")

    def test_twelve_layers_become_one(self) -> None:
        names = ["embed", *self.LAYER * 12, "head", "loss"]
        first, layers, *rest = fold(names)
        assert first == 0
        assert not isinstance(layers, int)
        assert (layers.count, layers.start, layers.period) == (12, 1, 10)
        assert layers.body == tuple(range(1, 11))
        assert rest == [121, 122]

    def test_block_that_begins_as_it_ends(self) -> None:
        (only,) = fold("bab" * 12)
        assert not isinstance(only, int)
        assert (only.count, only.body) == (12, (0, 1, 2))

    def test_repeats_inside_repeats(self) -> None:
        (outer,) = fold("xaaay" * 4)
        assert not isinstance(outer, int)
        before, inner, after = outer.body
        assert not isinstance(inner, int)
        assert (outer.count, before, inner.count, inner.start, after) == (4, 0, 3, 1, 4)

    @given(st.lists(st.integers(0, 2), max_size=60))
    def test_spelled_out_it_is_the_sequence_again(self, tokens: list[int]) -> None:
        items = fold(tokens)
        assert spelled_out(items, tokens) == tokens
        stands_for = representatives(items, len(tokens))
        assert [tokens[at] for at in stands_for] == tokens
        assert all(stands_for[at] == at for at in stands_for)

    @pytest.mark.parametrize("distinct", [1, 2, 9, 5000])
    def test_five_thousand_nodes(self, distinct: int) -> None:
        tokens = [at * at % 7919 % distinct for at in range(5000)]
        assert Counter(spelled_out(fold(tokens), tokens)) == Counter(tokens)

    def test_order_departs_from_the_numbering_only_where_it_must(self) -> None:
        assert topological_order(4, [(0, 1), (1, 3)]) == [0, 1, 2, 3]
        assert topological_order(4, [(3, 1), (0, 2)]) == [0, 2, 3, 1]


class TestDot:
    def test_folded_drawing(self) -> None:
        info = chain(["embed", *TestFolding.LAYER * 12, "head"])
        dot = info.to_dot()
        assert dot.count('label="x12"') == 1
        labels = re.findall(r'n\d+ \[label="(.*?)"', dot)
        assert labels == ["embed", *TestFolding.LAYER, "head"]
        # Into the block, through it, back to its start, and out of it.
        assert "n0 -> n1;" in dot
        assert "n10 -> n1 [style=dashed, constraint=false];" in dot
        assert "n10 -> n121;" in dot
        assert dot.count("->") == 12

    def test_single_repeated_node_needs_no_frame(self) -> None:
        dot = chain(["a", "b", "b", "b"]).to_dot()
        assert re.findall(r'label="(.*?)"', dot) == ["a", "b x3"]
        assert "n1 -> n1 [style=dashed, constraint=false];" in dot

    def test_unfolded_drawing_shows_every_node(self) -> None:
        dot = chain(["a", *"bc" * 12]).to_dot(fold=False)
        assert "cluster" not in dot
        assert len(re.findall(r"n\d+ \[label", dot)) == 25
        assert dot.count("->") == 24

    def test_labels(self) -> None:
        node = GraphNode(0, "memcpy", 'a "quoted" \\ name', 2048, scope="net.fc")
        dot = GraphInfo("cuda", (node,), ()).to_dot()
        assert r'label="a \"quoted\" \\ name\n2.0 KiB\nnet.fc"' in dot
        assert "shape=cds" in dot


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
        assert short_name(name) == "vectorized_elementwise_kernel"

    @pytest.mark.parametrize("name", ["ampere_sgemm_128x64_tn", "triton_poi_fused_add_0", "_Zbad"])
    def test_what_is_not_mangled_stays(self, name: str) -> None:
        assert demangle(name) == name
        assert short_name(name) == name

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("void cutlass::Kernel2<cutlass_80_wmma>(cutlass_80_wmma::Params)", "Kernel2"),
            ("void at::(anonymous namespace)::cat<int, f(a)::{lambda(long)#1}>(int)", "cat"),
            ("void f<decltype((int)0->x), (int)4>(A<B<int> >)", "f"),
            ("aten.mm.default", "aten.mm.default"),
            ("memcpy H to D", "memcpy H to D"),
            ("", ""),
        ],
    )
    def test_short_name(self, name: str, short: str) -> None:
        assert short_name(name) == short
