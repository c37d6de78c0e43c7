"""What the doctor found: a row for each obstacle, for people and as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from lightning_graphs.core.callsite import CallSite, shown
from lightning_graphs.core.obstacles import Obstacle

CONFIGURATION = Obstacle(
    "GraphCapture captures on one device, under DDP or FSDP2, and without a check of every "
    "operator on the host.",
    "change that, or train without GraphCapture",
    kind="configuration",
    code='Trainer(strategy="ddp", detect_anomaly=False)',
)
NO_WHOLE_STEP = Obstacle(
    "A whole step becomes a graph where Lightning optimizes by itself, with one optimizer that "
    "calls the step once.",
    "nothing, if that is needed: scope='auto' and scope='modules' make graphs of the submodules; "
    "modules=[...] names them",
    kind="configuration",
    code='GraphCapture(scope="modules", modules=["generator", "discriminator"])',
)
OPTIMIZER = Obstacle(
    "The step of an optimizer is captured where it neither reads its state on the host nor calls "
    "hooks.",
    "use an optimizer of torch.optim with a fused kernel, or one with capturable=True",
    kind="optimizer",
    code="return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)",
)
HOOK = Obstacle(
    "A replay of a submodule calls no hook that is inside of it.",
    "nothing, if it is needed: the modules inside become graphs; a whole step may have hooks",
    kind="hook",
    code='GraphCapture(scope="step")',
)
OBSERVER = Obstacle(
    "A hook that looks into a step runs between two graphs.",
    "nothing, if it is needed; otherwise look from on_train_batch_end",
    kind="observer",
    code="def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx): ...",
)
CHANGING_SHAPE = Obstacle(
    "A graph is captured for a batch signature that comes back.",
    "pad to a few fixed lengths, and drop the short last batch",
    kind="changing-shape",
    code="DataLoader(data, batch_size=32, drop_last=True, collate_fn=pad_to_a_multiple)",
)
CHANGING_NUMBER = Obstacle(
    "A captured step runs no Python code: the numbers and branches that it computes stand still.",
    "nothing, if counters and learning rates alone make the number, which a captured step follows; "
    "else make it a tensor that a hook fills, and choose between values with torch.where",
    kind="python-state",
    code='self.register_buffer("scale", torch.ones(()))  # in __init__\n'
    "self.scale.fill_(number)  # in on_train_batch_start",
)

_Remark = Literal[
    "further graph",
    "runs ahead of the graph",
    "left out unless it is read",
    "submodules become graphs",
    "stays eager between them",
]
"""Effects of what need not be mended."""

Effect = Literal["eager step", "eager optimizer step"] | _Remark


@dataclass(slots=True)
class Finding:
    """One thing in the way of a captured step.

    Attributes:
        kind: What it is, in a word that programs can rely on, such as ``"host-read"``.
        operator: The operator, function, attribute, hook or option.
        file: The user's file; empty where no line is to blame.
        line: Line number, from 1; 0 likewise.
        function: The function the line is in.
        source: The line.
        count: How often it was met in the observed steps.
        last_step: The last observed step that met it; 0 for what shows before any step.
        effect: What it does to the step, in words that the page about the doctor explains;
            ``"eager step"`` and ``"eager optimizer step"`` are those of obstacles.
        rule: What capture demands.
        observed: What was found, beyond operator and line; may be empty.
        remedy: What to do.
        code: The remedy as code.
    """

    kind: str
    operator: str
    file: str
    line: int
    function: str
    source: str
    count: int
    last_step: int
    effect: Effect
    rule: str
    observed: str
    remedy: str
    code: str

    @property
    def place(self) -> str:
        """``file.py:12 in training_step: the line``; empty where no line is to blame."""
        if not self.file:
            return ""
        inside = self.file.startswith(os.path.join(os.getcwd(), ""))
        file = os.path.relpath(self.file) if inside else shown(self.file)
        return f"{file}:{self.line} in {self.function}: {self.source}"

    @property
    def details(self) -> str:
        """How often, with which effect, and what was observed."""
        times = [f"{self.count} times"] * (self.count > 1)
        times += ["in the first step only"] * (self.last_step == 1)
        return ", ".join([self.effect, *times, *filter(None, [self.observed])])


@dataclass(slots=True)
class Diagnosis:
    """The result of ``GraphCapture(diagnose=True)``.

    Attributes:
        steps: Training steps that were observed.
        findings: What was found, in the order of its first appearance.
    """

    steps: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def obstacles(self) -> list[Finding]:
        """What stands in the way: neither what is captured otherwise nor what only the first
        step does.

        The first step fills caches and the like; it is never captured.
        """
        once = 1 if self.steps > 1 else -1
        blocking = [f for f in self.findings if f.effect not in get_args(_Remark)]
        return [f for f in blocking if f.last_step != once]

    def add(
        self,
        obstacle: Obstacle,
        operator: str,
        site: CallSite | None = None,
        *,
        observed: str = "",
        effect: Effect = "eager step",
    ) -> None:
        """Note an obstacle, or count it once more where line and effect are known already."""
        site = site if site is not None and site.line else CallSite("", 0, "")
        for known in self.at(site):
            if (known.kind, known.operator, known.effect) == (obstacle.kind, operator, effect):
                known.count += 1
                known.last_step = self.steps
                return
        place = (site.file, site.line, site.function, site.source if site.file else "")
        texts = (obstacle.rule, observed, obstacle.remedy, obstacle.code)
        row = (obstacle.kind, operator, *place, 1, self.steps, effect, *texts)
        self.findings.append(Finding(*row))

    def at(self, site: CallSite) -> list[Finding]:
        """What is known of a line."""
        return [f for f in self.findings if (f.file, f.line) == (site.file, site.line)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``findings`` are the rows of the table."""
        return {
            "steps": self.steps,
            "obstacles": len(self.obstacles),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        found = len(self.obstacles)
        what = f"{found} obstacle{'s' * (found != 1)}" if found else "nothing stands in the way"
        if further := len(self.findings) - found:
            what += f", {further} remark{'s' * (further != 1)}"
        observed = f"{self.steps} training step{'s' * (self.steps != 1)} observed"
        lines = [f"GraphCapture, doctor: {what} ({observed})"]
        groups: dict[tuple[str, str], list[Finding]] = {}  # what one remedy mends, together
        for finding in self.findings:
            groups.setdefault((finding.rule, finding.remedy), []).append(finding)
        for findings in groups.values():
            first = findings[0]
            lines += ["", f"{first.kind}: {first.rule}"]
            for finding in findings:
                lines.append(f"  {finding.operator} ({finding.details})")
                lines += [f"    {finding.place}"] * bool(finding.place)
            lines.append(f"  remedy: {first.remedy}")
            lines += [f"    {line}" for line in first.code.splitlines()]
        return "\n".join(lines)
