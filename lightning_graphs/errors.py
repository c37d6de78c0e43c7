"""The exceptions of the package: a message is a line on what is wrong, and the fix, as code too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import NoReturn

FIX = "\n  Fix: "  # begins the second line of a message
OF_PACKAGE = "of the installed package"  # precedes a package's name behind a line of its code
_OF_PACKAGE = re.compile(rf"\({OF_PACKAGE} ([\w.-]+)\)")
USER_OPTIONS = ["scope=", "precision=", "config."]  # which users set
_NO_MEMORY = "out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"
CODE: dict[str, str] = {}
"""Remedy -> the same as a line or two of code, which a message shows below it."""
_LONGEST = 300  # characters of what was observed that a message shows; a report has all


class GraphError(RuntimeError):
    """Base of everything this package raises on purpose.

    It derives from :class:`RuntimeError` because torch's own graph API raises that, so code written
    against torch keeps catching what it caught.

    Args:
        rule: What must hold, or cannot be, in one sentence.
        observed: What was found: the leaf, the operator, the user's file and line; ``got ...`` for
            a value that was given.
        remedy: What to write or change so that it works.
    """

    def __init__(self, rule: str, observed: str = "", remedy: str = "") -> None:
        self.rule = rule
        self.observed = observed
        self.remedy = remedy
        super().__init__(rule, observed, remedy)

    def __str__(self) -> str:
        found = self.observed.partition("\n")[0][:_LONGEST]
        return self._composed(found if found == self.observed else f"{found} ...")

    @property
    def full(self) -> str:
        """The message for a report: with all that was observed."""
        return self._composed(self.observed)

    def _composed(self, observed: str) -> str:
        what = self.rule.rstrip(".")
        if observed:
            what += f"{', ' if observed.startswith('got ') else ': '}{observed}"
        if not self.remedy:
            return what
        whose = self._whose(observed)
        code = "" if whose else CODE.get(self.remedy, "")
        lines = [f"{what}{FIX}{self.remedy}{whose}", *code.splitlines()]
        return "\n    ".join(lines)

    def _whose(self, observed: str) -> str:
        """Note that a remedy is for the authors of an installed package; empty for user code."""
        package = _OF_PACKAGE.search(observed)
        if package is None or any(option in self.remedy for option in USER_OPTIONS):
            return ""
        return (
            f"; that is for the authors of {package[1]}: as its user look for an option that "
            "avoids the line, or leave it as it is"
        )


class CaptureError(GraphError):
    """Something in the captured code cannot become part of a graph."""

    others: Sequence[CaptureError] = ()  # all refusals of a capture that takes notes, this first
    is_noted = False  # the captured code went on
    # Of one that is foreseen: the line in each function of user code that leads there
    lines: Mapping[CodeType, int] = MappingProxyType({})

    def __init__(self, rule: str, observed: str = "", remedy: str = "") -> None:
        super().__init__(rule, observed, remedy)
        for refused in REFUSED:
            refused.append(self)


REFUSED: list[list[CaptureError]] = []
"""Lists to which refusals are added as they are made: one of each capture that runs."""


class CaptureStopped(BaseException):
    """Ends code that a capture runs; no handler for errors in that code catches it.

    A handler would act on an error that an eager step does not raise: log it, clear callbacks, or
    go on without it.
    """

    def __init__(self, error: CaptureError) -> None:
        super().__init__(error)
        self.error = error

    @property
    def refusal(self) -> CaptureError:
        """The refusal, with the lines that it has passed."""
        return self.error.with_traceback(self.__traceback__)


def stop(error: CaptureError) -> NoReturn:
    """End the code that a capture runs with a refusal."""
    raise CaptureStopped(error) if REFUSED else error from error.__cause__


class NoRoomError(CaptureError):
    """A capture found no memory, or none within its budget; a smaller capture may succeed."""


def no_room(what: str, observed: str) -> NoRoomError:
    """Make the error for a capture of ``what``, with what was observed."""
    return NoRoomError(
        f"{what} needs memory of its own, next to that of eager steps.",
        observed,
        "allow fewer graphs (max_graphs=...), or make the batch smaller",
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether torch's allocator, the driver or a library found no memory."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "OutOfMemoryError" in kinds or isinstance(error, NoRoomError):  # the first one is torch's
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _NO_MEMORY)


class ReplayError(GraphError):
    """A replay was refused because it would compute with stale, missing or overwritten memory."""


class SignatureError(GraphError):
    """A call differs from the one that was captured."""


class ArgumentElsewhereError(SignatureError):
    """An argument is not in the memory where a graph reads it."""


class UnsupportedError(GraphError):
    """This machine, driver, torch version or backend cannot do what was asked for."""


class VerificationError(GraphError):
    """A replay and the eager step computed different values; the message names the first tensor."""


def causes_of(error: BaseException, *, stated: bool = False) -> Iterator[BaseException]:
    """Yield an error, and the earlier ones that led to it: each once, since they may go round.

    Args:
        error: The last one.
        stated: Follow ``raise ... from ...`` alone, and not what was being handled.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if stated else each.__context__)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without lists that follow it."""
    return str(error).partition("\n")[0]


def in_one_line(error: BaseException) -> str:
    """Return the kind of an error, and the first line of its text if it has one."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
