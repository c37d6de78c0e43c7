"""Optimizers of torch and of packages: whose step is in the graph, is it right, else why?

Each row trains a small network three times from the same weights: twice eagerly, once eagerly with
the kernels that graphs choose (`fused`, or `capturable`), and once with graphs. A row says whether
the update was in the graph, whether every loss and parameter are those of the eager fit with the
same kernels to the last bit, and what the report says if the step ran eagerly.

The exit status is 1 unless every row that repeats itself is equal, and none crashed.

    python benchmarks/optimizers.py [--rows NAME,NAME] [--moving] [--json PATH] [--page PATH]

``--moving`` gives all a learning rate that moves in every step. ``--page`` puts the table between
the marks of a page; ``--read`` takes the rows of a JSON file in place of a measurement:

    python benchmarks/optimizers.py --page docs/optimizers.md

``--tiny`` rehearses it on the CPU and the emulated backend.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import step
import torch
import zoo
from harness import Lab, describe_environment
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn, optim
from torch.nn import functional as F
from zoo import Found, Losses, Outcome

from lightning_graphs import GraphCapture

STEPS = 24
Make = Callable[[Any], Any]


def _of_timm(name: str) -> Make:
    def make(parameters: Any) -> Any:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(parameters, opt=name, lr=2**-7, weight_decay=2**-6)

    return make


def _of_transformers(**how: Any) -> Make:
    def make(parameters: Any) -> Any:
        from transformers.optimization import Adafactor

        return Adafactor(parameters, **how)

    return make


def _of_package(package: str, name: str, **how: Any) -> Make:
    def make(parameters: Any) -> Any:
        optimizer = getattr(import_module(package), name)(parameters, **{"lr": 2**-7, **how})
        if hasattr(optimizer, "train"):  # schedule-free ones evaluate other weights
            optimizer.train()
        return optimizer

    return make


TORCH = [
    "Adam", "AdamW", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "LBFGS", "NAdam",
    "RAdam", "RMSprop", "Rprop",
]  # fmt: skip
TIMM = [
    "adabelief", "adahessian", "adamp", "adan", "adopt", "kron", "lamb", "laprop", "lars", "lion",
    "lookahead_sgd", "madgrad", "mars", "muon", "novograd", "rmsproptf", "sgdp", "sgdw",
]  # fmt: skip
PACKAGES = {
    "adamp": ["AdamP", "SGDP"],
    "adan_pytorch": ["Adan"],
    "came_pytorch": ["CAME"],
    "dadaptation": ["DAdaptAdam", "DAdaptSGD"],
    "lion_pytorch": ["Lion"],
    "madgrad": ["MADGRAD"],
    "optimi": ["AdamW", "Ranger", "StableAdamW"],
    "prodigyopt": ["Prodigy"],
    "pytorch_optimizer": [
        "ADOPT", "Dash", "LaProp", "Lamb", "PNM", "Ranger", "SCION", "SOAP", "SPAM",
        "ScalableShampoo", "Tiger", "Yogi",
    ],
    "schedulefree": ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"],
    "torch_optimizer": ["Lamb", "NovoGrad", "RAdam", "SWATS", "Shampoo"],
}  # fmt: skip
ROWS: dict[str, Make] = {
    **{n: lambda p, n=n: getattr(optim, n)(p, lr=2**-7) for n in TORCH},  # type: ignore[misc]
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=2**-7, foreach=True),
    "SGD with momentum": lambda p: optim.SGD(p, lr=2**-7, momentum=0.9),
    "transformers: Adafactor": _of_transformers(),
    "transformers: Adafactor with a rate": _of_transformers(lr=2**-7, relative_step=False),
    **{f"timm: {name}": _of_timm(name) for name in TIMM},
    **{f"{p}: {name}": _of_package(p, name) for p, names in PACKAGES.items() for name in names},
}


class Module(LightningModule):
    """A small network; ``kernel`` sets what its optimizer has for graphs."""

    moves = False  # its learning rate moves in every step

    def __init__(self, make: Make, kernel: Callable[[Any], None]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.make, self.kernel = make, kernel

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        self.kernel(optimizer)
        if not self.moves:
            return optimizer
        moving = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": moving, "interval": "step"}]


def _own(_: Any) -> None:
    """Keep the optimizer as it was made."""


def _for_graphs(optimizer: Any) -> None:
    """Let it run the kernels that graphs let it run."""
    fused = isinstance(optimizer, optim.Adam | optim.AdamW | optim.SGD)
    for group in optimizer.param_groups:
        if not type(optimizer).step.__module__.startswith("torch.optim"):
            return
        if fused and not group.get("foreach"):
            group["fused"] = True
        elif "capturable" in group and next(iter(group["params"])).is_cuda:
            group["capturable"] = True


def fit(
    make: Make, lab: Lab, kernel: Callable[[Any], None], graphs: GraphCapture | None = None
) -> Outcome:
    """Train once; the optimizer has the kernels that ``kernel`` chooses."""
    seed_everything(1, verbose=False)
    module, losses = Module(make, kernel), Losses()
    random = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(8, 16, generator=random), torch.randn(8, 4, generator=random))
        for _ in range(STEPS)
    ]
    trainer = Trainer(
        accelerator="cpu" if lab.dry else "gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, *([] if graphs is None else [graphs])],
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return Outcome(torch.stack(losses.losses), {k: v.cpu() for k, v in module.state_dict().items()})


def measure(name: str, lab: Lab) -> Found:
    """All fits of one row."""
    found: Found = {"row": name}
    backend = "emulated" if lab.dry else "auto"
    graphs = GraphCapture(only_if_faster=False, backend=backend)  # type: ignore[arg-type]
    try:
        first, second = (fit(ROWS[name], lab, _for_graphs) for _ in range(2))
        own = fit(ROWS[name], lab, _own)
    except Exception as error:
        return {**found, "scope": "unavailable", **zoo.failure(error, lab)}
    try:
        captured = fit(ROWS[name], lab, _own, graphs)
    except Exception as error:
        return {**found, "scope": "crashed", **zoo.failure(error, lab)}
    fallbacks = graphs.report.fallbacks
    why = zoo.reason(fallbacks)
    # Where the update is eager it keeps the user's own kernel
    expected = own if fallbacks else first
    return {
        **found,
        "scope": zoo.scope_of(graphs, STEPS),
        "update": "eager" if fallbacks else "in the graph",
        "why": why.replace("the optimizer step runs eagerly: ", ""),
        "replayed": graphs.report.replayed,
        "repeatable": not second.differs(first) and bool(first.losses.isfinite().all()),
        "differs": captured.differs(expected),
        "difference": captured.difference(own),
    }


def table(rows: Sequence[Found]) -> str:
    """A Markdown table."""
    lines = ["| optimizer | update | equal to the bit | why |", "| --- | --- | --- | --- |"]
    for row in rows:
        equal = "" if "differs" not in row else row["differs"] or "yes"
        cells = row["row"], row.get("update", row["scope"]), equal, row["why"].replace("|", "/")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


MARKS = "<!-- optimizers -->", "<!-- end of optimizers -->"


def put_into(page: Path, text: str) -> None:
    """Write a text between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise SystemExit(f"{page} has no marks {' and '.join(MARKS)}")
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", help="names, commas between (default: all)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write a table to this file")
    parser.add_argument("--page", type=Path, help="put the table between the marks of this page")
    parser.add_argument("--read", type=Path, help="take rows of this file, of --json")
    parser.add_argument("--moving", action="store_true", help="move learning rates in each step")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    if options.read is not None:
        known = json.loads(options.read.read_text())
        put_into(options.page, f"{known['environment']}\n\n{table(known['rows'])}")
        return 0
    Module.moves = options.moving
    if not (options.tiny or torch.cuda.is_available()):
        print("This benchmark needs a GPU; --tiny rehearses it on the CPU.")
        return 0
    step.be_quiet()
    warnings.filterwarnings("ignore")
    lab, environment = Lab(options.tiny), describe_environment()
    names = list(ROWS) if options.rows is None else options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: there is no {', '.join(unknown)}")
    print(f"{environment}: {' '.join(sys.argv)}", flush=True)
    found = []
    for name in names:
        found.append(measure(name, lab))
        row = found[-1]
        said = row.get("differs") or "equal"
        print(f"{name:<42}{row.get('update', row['scope']):<14}{said:<20}{row['why']}", flush=True)
    wrong = [r["row"] for r in found if r.get("repeatable") and r.get("differs")]
    crashed = [r["row"] for r in found if r["scope"] == "crashed"]
    inside = sum(r.get("update") == "in the graph" for r in found)
    print(f"{inside} of {len(found)} in the graph; differ: {wrong}; crashed: {crashed}")
    if options.json is not None:
        written = {"environment": environment, "command": sys.argv, "rows": found}
        options.json.write_text(json.dumps(written, indent=1))
    if options.page is not None:
        put_into(options.page, f"{environment}\n\n{table(found)}")
    if options.markdown is not None:
        options.markdown.write_text(f"{environment}\n\n{table(found)}\n")
    return 1 if wrong or crashed else 0


if __name__ == "__main__":
    sys.exit(main())
