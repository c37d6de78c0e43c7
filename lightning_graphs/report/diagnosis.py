"""What the doctor found: a row for each obstacle, for people and as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from lightning_graphs.device.rules import Obstacle, worded
from lightning_graphs.errors import OF_PACKAGE
from lightning_graphs.private.callsite import CallSite, file_shown, package_of

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
        file: The user's file; empty if no line is to blame.
        line: Line number, from 1; 0 if no line is to blame.
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
        """``file.py:12 in forward: the line``; empty if no line is to blame."""
        if not self.file:
            return ""
        inside = self.file.startswith(os.path.join(os.getcwd(), ""))
        file = os.path.relpath(self.file) if inside else file_shown(self.file)
        package = package_of(self.file)
        whose = f" ({OF_PACKAGE} {package})" if package else ""
        return f"{file}:{self.line} in {self.function}{whose}: {self.source}"

    @property
    def details(self) -> str:
        """How often, with which effect, and what was observed."""
        times = [f"{self.count} times"] * (self.count > 1)
        return ", ".join([self.effect, *times, *filter(None, [self.observed])])


@dataclass(slots=True)
class Diagnosis:
    """What ``diagnose=True`` found: ``report.diagnosis``.

    Attributes:
        steps: Steps that were observed.
        kind: What they are: ``"training"``, ``"validation"``, ``"test"`` or ``"predict"``;
            empty for calls of a captured function.
        findings: What was found, in the order of its first appearance.
        who: What has observed them: ``GraphCapture``, or ``capture`` of a function.
    """

    steps: int = 0
    kind: str = "training"
    findings: list[Finding] = field(default_factory=list)
    who: str = "GraphCapture"

    @property
    def obstacles(self) -> list[Finding]:
        """What stands in the way, and is not captured otherwise."""
        remarks = get_args(_Remark)
        return [finding for finding in self.findings if finding.effect not in remarks]

    def add(
        self,
        obstacle: Obstacle,
        operator: str,
        site: CallSite | None = None,
        *,
        observed: str = "",
        effect: Effect = "eager step",
    ) -> None:
        """Note an obstacle, or count it once more if line and effect are known already."""
        site = site if site is not None and site.line else CallSite("", 0, "")
        for known in self.at(site):
            if (known.kind, known.operator, known.effect) == (obstacle.kind, operator, effect):
                known.count += 1
                known.last_step = max(known.last_step, self.steps)
                return
        place = (site.file, site.line, site.function, site.source if site.file else "")
        texts = (obstacle.rule, observed, obstacle.remedy, obstacle.code)
        row = (obstacle.kind, operator, *place, 1, self.steps, effect, *texts)
        self.findings.append(Finding(*row))

    def at(self, site: CallSite) -> list[Finding]:
        """List what was found at a line."""
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

    @property
    def summary(self) -> str:
        """The number of obstacles, and of remarks, in words."""
        found = len(self.obstacles)
        what = f"{found} obstacle{'s' * (found != 1)}" if found else "nothing stands in the way"
        if further := len(self.findings) - found:
            what += f", {further} remark{'s' * (further != 1)}"
        return what

    def __str__(self) -> str:
        what = f"{self.kind} step" if self.kind else "call"
        observed = f"{self.steps} {what}{'s' * (self.steps != 1)} observed"
        lines = [f"{self.who}, doctor: {self.summary} ({observed})"]
        obstacles = self.obstacles
        remarks = [finding for finding in self.findings if finding not in obstacles]
        lines += _in_groups(obstacles, "Fix")
        if remarks:
            lines += ["", "Remarks: none of these stands in the way, and nothing is to be done."]
            lines += [f"  {line}".rstrip() for line in _in_groups(remarks, "To change it")]
        return "\n".join(lines)


def _in_groups(findings: list[Finding], label: str) -> list[str]:
    """List findings, those together that have one remedy, which the label precedes."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.remedy), []).append(finding)
    lines = []
    for alike in groups.values():
        first = alike[0]
        lines += ["", f"{first.kind}: {first.rule}"]
        for finding in alike:
            lines.append(f"  {worded(finding.operator)} ({finding.details})")
            lines += [f"    {finding.place}"] * bool(finding.place)
        lines.append(f"  {label}: {first.remedy}")
        lines += [f"    {line}" for line in first.code.splitlines()]
    return lines
