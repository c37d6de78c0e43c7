"""Private corners of torch's autograd: its nodes, and the passes through them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_graphs.core.private.torch import node_has_hooks

_PLAIN = (Tensor, nn.Parameter)


def _nothing(*_: object) -> None:
    """Stands for functions that torch lacks."""


@contextlib.contextmanager
def stale_gradient_nodes_tolerated() -> Iterator[None]:
    """Let a backward pass run on our stream though the user's autograd graph lives on another.

    A parameter has one AccumulateGrad node, of the stream of the first graph that is still alive.
    From 2.13 on torch can be told to use the capture stream all the same, and privately tells
    whether the user has said so; its warning (2.9) is about streams that we chose.
    """
    graph = torch.autograd.graph
    override = getattr(graph, "set_override_stale_capture_stream", _nothing)
    warn = getattr(graph, "set_warn_on_accumulate_grad_stream_mismatch", _nothing)
    before = bool(getattr(torch._C, "_override_stale_capture_stream", _nothing)())
    override(True)
    warn(False)
    try:
        yield
    finally:
        override(before)
        warn(True)


def renew_gradient_nodes(leaves: Iterable[Tensor]) -> None:
    """Let the next graph of autograd make AccumulateGrad nodes of its own for leaves on a GPU.

    Up to 2.12 torch cannot be told to run old ones on the capture stream, and where one belongs to
    the default stream CUDA refuses the capture. torch lets go of a leaf's node where its ``data``
    changes its dtype (``VariableHooks::set_data``); what holds the old node keeps it. Nodes that
    carry hooks stay: the reducer of DDP puts some on them that nothing tells of.
    """
    graph, distributed = torch.autograd.graph, torch.distributed
    if hasattr(graph, "set_override_stale_capture_stream") or not torch.cuda.is_available():
        return
    if distributed.is_available() and distributed.is_initialized():
        return
    for leaf in leaves:
        fits = leaf.is_cuda and leaf.is_leaf and leaf.requires_grad and not leaf.is_inference()
        if not fits or type(leaf) not in _PLAIN or node_has_hooks(leaf):
            continue
        data, other = leaf.data, torch.float16 if leaf.dtype != torch.float16 else torch.float32
        leaf.data = data.new_empty(0, dtype=other)
        leaf.data = data


def leaves_alive() -> Iterator[Tensor]:
    """Every tensor that Python knows of and that may be a leaf of autograd."""
    yield from [found for found in gc.get_objects() if type(found) in _PLAIN]
