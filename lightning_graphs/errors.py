"""One family of exceptions; every message is a rule, what was observed, and the remedy."""

from __future__ import annotations


class GraphError(RuntimeError):
    """Base of everything this package raises on purpose.

    It derives from :class:`RuntimeError` because torch's own graph API raises that, so code written
    against torch keeps catching what it caught.

    Args:
        rule: What must hold, in one sentence.
        observed: What was found instead: the leaf, the operator, the user's file and line.
        remedy: What to write or change so that it works.
    """

    def __init__(self, rule: str, observed: str = "", remedy: str = "") -> None:
        self.rule = rule
        self.observed = observed
        self.remedy = remedy
        super().__init__(rule, observed, remedy)

    def __str__(self) -> str:
        lines = [self.rule]
        if self.observed:
            lines.append(f"  observed: {self.observed}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    @property
    def brief(self) -> str:
        """The message for a warning: what is wrong and where in one line, the remedy in another."""
        observed = " ".join(self.observed.split())
        what = f"{self.rule.rstrip('.')} ({observed})" if observed else self.rule
        return f"{what}\n  remedy: {self.remedy}" if self.remedy else what


class CaptureError(GraphError):
    """Something in the captured code cannot become part of a graph."""


class ReplayError(GraphError):
    """A replay was refused because it would compute with stale, missing or overwritten memory."""


class SignatureError(GraphError):
    """A call differs from the one that was captured."""


class ArgumentElsewhereError(SignatureError):
    """An argument is not in the memory where a graph reads it."""


class UnsupportedError(GraphError):
    """This machine, driver, torch version or backend cannot do what was asked for."""


class VerificationError(GraphError):
    """A replay computed something else than the eager step; the message names the first tensor."""
