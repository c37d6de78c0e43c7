"""Blocks as graphs of their own (``scope="modules"``) against whole steps and torch's function.

Every fit trains the same model from the same seed under Lightning, in this process: eager, as whole
steps (whose bare replay is the floor), with all blocks graphed by ``GraphCapture``, with the same
blocks graphed by ``torch.cuda.make_graphed_callables``, and with the submodules that
``GraphCapture(scope="modules")`` chooses by itself, which are larger. Losses are compared in the
run that is timed. Fits of graphed blocks run in turn, several times, and the fastest counts
(``step.py`` says why); the usual time stands behind it. What a new shape costs is the time of the
step in which its graphs are captured, less that of an ordinary one; it is compared with one call of
torch's function for the same blocks.

How low a step can be is shown by fits in which the same graphs are launched by autograd nodes that
do and check nothing else: what they take above the floor is the CPU's time around the launches.

One key is logged, and there is no progress bar; with ``--bar`` there is one, and two keys.

    python benchmarks/modules.py [--rows mlp,gpt2,resnet50,vit] [--rounds 3] [--bar] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning
import step
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_graphs import GraphCapture
from lightning_graphs.autograd.graphed import GraphedCallable
from lightning_graphs.regions.dispatch import DispatchState, select
from lightning_graphs.values.tree import leaves_of, substitute

BLOCKS = {
    "mlp": "net.net.*",
    "gpt2": "net.net.transformer.h.*",
    "resnet50": "net.net.layer*.*",
    "vit": "net.net.blocks.*",
}
LIMIT, TORCH_LIMIT, NEW_SHAPE_LIMIT = 1.15, 1.0, 1.2


class TensorsOnly(nn.Module):
    """A block behind a signature that torch's function accepts: tensors in, tensors out."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.block, self.call, self.original = block, (args, kwargs), block.forward

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = substitute(self.call, tensors)
        return self.original(*args, **kwargs)

    def install(self) -> None:
        """Let calls of the block take this way."""
        vars(self.block)["forward"] = lambda *args, **kwargs: self(*_tensors((args, kwargs)))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


class TorchsGraphs(Callback):
    """Graphs the named blocks with torch's function, on what a step has called them with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.capture_ms = 0.0
        self._calls: dict[str, tuple[Any, Any]] = {}
        self._handles: list[Any] = []

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == step.WARMUP - 5:
            for name, block in select(module, [self.pattern], ()).items():
                keep = partial(self._keep, name)
                self._handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
        elif batch_idx == step.WARMUP - 4:
            while self._handles:
                self._handles.pop().remove()
            self._graph(module)

    def _keep(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        tree = (args, kwargs)
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in _tensors(tree)]
        self._calls[name] = substitute(tree, leaves)

    def _graph(self, module: LightningModule) -> None:
        shims = [TensorsOnly(module.get_submodule(n), *call) for n, call in self._calls.items()]
        samples = tuple(tuple(_tensors(call)) for call in self._calls.values())
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            torch.cuda.make_graphed_callables(tuple(shims), samples, allow_unused_input=True)
        torch.cuda.synchronize()
        self.capture_ms = (time.perf_counter() - start) * 1e3
        for shim in shims:
            shim.install()


class Rebuilding(Callback):
    """Notes how long the step takes in which a new shape's graphs are captured."""

    def __init__(self, graphs: GraphCapture) -> None:
        self.graphs = graphs
        self.capture_ms: list[float] = []
        self._captures = 0
        self._started = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self._started = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        torch.cuda.synchronize()
        if self.graphs._statistics.captures > self._captures:
            self._captures = self.graphs._statistics.captures
            self.capture_ms.append((time.perf_counter() - self._started) * 1e3)


class Launch(torch.autograd.Function):
    """A block's graphs in an autograd node, on arguments and gradients that are where they were."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedCallable, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.graphed = graphed
        graphed.forward_graph.replay()
        return graphed.outputs.tensors[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        backward = ctx.graphed.backward_pass
        target = backward.output_gradients.buffers[0]
        if gradient.data_ptr() != target.data_ptr():
            target.copy_(gradient)
        backward.graph.replay()
        direct = backward.direct
        for parameter, buffer in zip(direct.parameters, direct.buffers, strict=True):
            parameter.grad = buffer
        buffers = backward.handed.buffers
        return None, None, buffers[0].data if buffers else None


class LaunchesAlone(Callback):
    """Exchanges graphed blocks, of one argument and one output, for :class:`Launch`."""

    def __init__(self, graphs: GraphCapture) -> None:
        self.graphs = graphs

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == step.WARMUP - 2:
            assert self.graphs._handler is not None
            for forward in self.graphs._handler.runner._graphs._graphed.values():
                (graphed_call,) = forward.graphed_calls  # one call in a step
                forward._answer = self._launch(graphed_call.callable, forward._state)

    @staticmethod
    def _launch(graphed: GraphedCallable, state: DispatchState) -> Callable[..., Any]:
        assert len(graphed.outputs.tensors) == 1
        anchor = torch.empty(0, device="cuda", requires_grad=True)
        target = None if graphed.aliased_inputs else graphed.inputs.tensors[0].detach()

        def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state.has_replayed = True  # else the graphs would be dropped as useless
            x = args[0]
            if target is not None:
                with torch.no_grad():
                    target.copy_(x)
            return graphed.outputs._build((Launch.apply(graphed, anchor, x),))

        return answer


class HostReads(Callback):
    """Finds the lines of one step, before the timed ones, that wait for the GPU.

    Code between the blocks runs as it is. Where it reads a value, the CPU cannot run ahead.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._watch = ExitStack()

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == step.WARMUP - 2:
            self._warnings = self._watch.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self._watch.callback(torch.cuda.set_sync_debug_mode, "default")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == step.WARMUP - 2:
            self._watch.close()
            reads = [w for w in self._warnings if "synchronizing CUDA operation" in str(w.message)]
            self.lines = [f"{Path(read.filename).name}:{read.lineno}" for read in reads]


def measure(row: str, rounds: int, bar: bool) -> dict[str, Any]:
    """All fits of one row."""
    fit = partial(step.fit, row, bar=bar)
    always: dict[str, Any] = {"on_failure": "raise", "only_if_faster": False}
    chosen = {"scope": "modules", "modules": [BLOCKS[row]], **always}
    eager = fit()
    floor = fit(GraphCapture(scope="step", **always))["floor"]
    own_choice = GraphCapture(scope="modules", **always)
    by_itself = fit(own_choice)
    reads, fits, torchs_fits, launches_fits = HostReads(), [], [], []
    captures: list[float] = []
    torchs_captures: list[float] = []
    for i in range(rounds):
        torchs = TorchsGraphs(BLOCKS[row])
        torchs_fits.append(fit(callbacks=[torchs]))
        torchs_captures.append(torchs.capture_ms)
        watch = [reads] if i == 0 else []
        fits.append(fit(GraphCapture(**chosen), callbacks=watch))
        launched = GraphCapture(**chosen, verify=False)
        launches_fits.append(fit(launched, callbacks=[LaunchesAlone(launched)]))
        two_shapes = GraphCapture(**chosen, verify=False)  # what is timed is the capture
        rebuilding = Rebuilding(two_shapes)
        fit(two_shapes, callbacks=[rebuilding], signatures=2)
        captures += rebuilding.capture_ms
    fastest = itemgetter("ms")
    theirs, blocks, launches = (
        min(found, key=fastest) for found in (torchs_fits, fits, launches_fits)
    )
    return {
        "row": row,
        "eager_ms": eager["ms"],
        "floor_ms": floor,
        "blocks_ms": blocks["ms"],
        "blocks_usual_ms": statistics.median(found["usual_ms"] for found in fits),
        "launches_ms": launches["ms"],
        "torch_ms": theirs["ms"],
        "ratio": blocks["ms"] / floor,
        "to_torch": blocks["ms"] / theirs["ms"],
        "own_choice": own_choice.report.modules,
        "own_choice_ms": by_itself["ms"],
        "own_choice_ratio": by_itself["ms"] / floor,
        "host_reads": reads.lines,
        "new_shape_ms": min(captures) - blocks["ms"],
        "torch_capture_ms": min(torchs_captures),
        "largest_loss_difference": _largest_difference(eager, [*fits, *launches_fits, by_itself]),
        "torch_loss_difference": _largest_difference(eager, torchs_fits),
    }


def _largest_difference(eager: dict[str, Any], fits: list[dict[str, Any]]) -> float:
    pairs = (zip(eager["losses"], fit["losses"], strict=True) for fit in fits)
    return max(abs(a - b) for pair in pairs for a, b in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(BLOCKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bar", action="store_true", help="with a progress bar and two keys")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.")
        return
    step.be_quiet()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lightning "
        f"{lightning.__version__}, bf16-mixed, fused AdamW, "
        + ("prog_bar=True, two logged keys" if options.bar else "one logged key"),
        flush=True,
    )
    results = []
    for row in options.rows.split(","):
        result = measure(row, options.rounds, options.bar)
        results.append(result)
        new, torchs = result["new_shape_ms"], result["torch_capture_ms"]
        print(
            f"{row:>9}: eager {result['eager_ms']:.3f} ms, blocks {result['blocks_ms']:.3f} "
            f"(usually {result['blocks_usual_ms']:.3f}), floor {result['floor_ms']:.3f}, "
            f"torch's {result['torch_ms']:.3f}, launches alone {result['launches_ms']:.3f}; "
            f"ratio {result['ratio']:.3f} {_verdict(result['ratio'], LIMIT)}, "
            f"to torch's {result['to_torch']:.3f} {_verdict(result['to_torch'], TORCH_LIMIT)}; "
            f"own choice ({', '.join(result['own_choice'])}) {result['own_choice_ms']:.3f}, "
            f"ratio {result['own_choice_ratio']:.3f}; "
            f"a new shape costs {new:.0f} ms, torch's function {torchs:.0f} ms; "
            f"ratio {new / torchs:.2f} {_verdict(new / torchs, NEW_SHAPE_LIMIT)}; "
            f"host reads in a step: {', '.join(result['host_reads']) or 'none'}; "
            f"largest loss difference {result['largest_loss_difference']:.1e}, "
            f"torch's {result['torch_loss_difference']:.1e}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def _verdict(figure: float, limit: float) -> str:
    return f"{'PASS' if figure <= limit else 'FAIL'} (limit {limit})"


if __name__ == "__main__":
    main()
