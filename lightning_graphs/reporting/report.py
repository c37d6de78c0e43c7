"""The report of a fit as plain data: JSON there and back, and a page of HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_graphs.errors import GraphError

if TYPE_CHECKING:
    from lightning_graphs.core.info import GraphInfo

VERSION = 1
"""Version of the JSON text."""


@dataclass(kw_only=True, slots=True)
class GraphRecord:
    """What is known of one captured signature.

    Attributes:
        signature: The batch in words, such as ``x f32[32,128], y i64[32]``.
        scope: ``"step"``, or ``"module encoder.layers.0"``.
        parts: Graphs that one replay launches: more than one where hooks look in between.
        nodes: Nodes of all parts; None where they cannot be counted.
        kernels: Kernel launches among them; likewise.
        captures: How often it was captured; more than once after a release or a recapture.
        capture_ms: Time of the last capture, in milliseconds.
        pool_mib: Memory that the last capture added to the pool of graphs, in MiB; None without a
            GPU.
        replays: Replays of it.
        eager_ms: Median time of an eager step of this signature; None if none was timed.
        replay_ms: Median time of a replayed step; likewise.
        graphs: Nodes and edges of each part; empty unless the graphs kept their templates.
    """

    signature: str
    scope: str = "step"
    parts: int = 1
    nodes: int | None = None
    kernels: int | None = None
    captures: int = 1
    capture_ms: float = 0.0
    pool_mib: float | None = None
    replays: int = 0
    eager_ms: float | None = None
    replay_ms: float | None = None
    graphs: tuple[GraphInfo, ...] = ()

    @property
    def speed_up(self) -> float | None:
        """Time of an eager step over that of a replayed one; None if either is unknown."""
        if self.eager_ms is None or not self.replay_ms:
            return None
        return self.eager_ms / self.replay_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step that was timed.

    Attributes:
        step: Position of the micro-batch in the fit, from 0.
        kind: Whether it ran eagerly or was replayed.
        ms: From the begin of ``training_step`` to the end of backward pass or optimizer step, in
            milliseconds: on the GPU by its own clock, else by the host's.
    """

    step: int
    kind: Literal["eager", "replay"]
    ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the graphs of a fit did.

    Attributes:
        backend: ``"cuda"``, ``"emulated"``, or empty where nothing was captured.
        device: The device in words.
        torch: Version of torch.
        graphs: A record for each captured signature, in the order of their first capture.
        eager: Micro-batches that ran eagerly.
        replayed: Micro-batches that were replayed.
        fallbacks: Why steps ran eagerly, a reason each.
        recaptures: What changed, for each capture after the first.
        times: The steps that were timed: the first ones of the fit.
        verdict: What the times say, where replay is not (much) faster; else empty.
    """

    backend: str = ""
    device: str = ""
    torch: str = ""
    graphs: tuple[GraphRecord, ...] = ()
    eager: int = 0
    replayed: int = 0
    fallbacks: tuple[str, ...] = ()
    recaptures: tuple[str, ...] = ()
    times: tuple[StepTime, ...] = ()
    verdict: str = ""

    @property
    def times_mean_something(self) -> bool:
        """False for a rehearsal on the CPU, which replays operator by operator."""
        return self.backend != "emulated"

    @property
    def busiest(self) -> GraphRecord | None:
        """The record with most replays; None if nothing was captured."""
        return max(self.graphs, key=lambda record: record.replays, default=None)

    def metrics(self) -> dict[str, float]:
        """Figures for a logger, named ``graphs/...``.

        Sizes are sums over all graphs, times those of the most replayed one. What is unknown is
        absent, and so is the speed-up of a rehearsal.
        """
        busiest = self.busiest
        speed_up = busiest.speed_up if busiest and self.times_mean_something else None
        found: dict[str, float | None] = {
            "captures": sum(record.captures for record in self.graphs),
            "nodes": _total(record.nodes for record in self.graphs),
            "kernels": _total(record.kernels for record in self.graphs),
            "capture_ms": sum(record.capture_ms for record in self.graphs),
            "pool_mib": _total(record.pool_mib for record in self.graphs),
            "replayed_steps": self.replayed,
            "eager_steps": self.eager,
            "fallbacks": len(self.fallbacks),
            "recaptures": len(self.recaptures),
            "eager_ms": busiest.eager_ms if busiest else None,
            "replay_ms": busiest.replay_ms if busiest else None,
            "speed_up": speed_up,
        }
        return {f"graphs/{name}": float(v) for name, v in found.items() if v is not None}

    def to_json(self) -> str:
        """The report as JSON text, which :meth:`from_json` reads back."""
        data = {name: getattr(self, name) for name in _names(Report)}
        data["graphs"] = [_record_to_json(record) for record in self.graphs]
        data["times"] = [{n: getattr(time, n) for n in _names(StepTime)} for time in self.times]
        return json.dumps({"version": VERSION, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote.

        Raises:
            GraphError: ``text`` is something else; it names the key, or the line.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise _unreadable(f"line {error.lineno}: {error.msg}") from error
        except RecursionError:
            raise _unreadable("it is nested too deeply") from None
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise _unreadable(f"no object with version {VERSION}")
        return cls(**_checked(data, "report", _REPORT))

    def to_html(self, path: str | Path | None = None, *, overwrite: bool = False) -> str:
        """One page that needs no network: the table, step times, kernels and graphs.

        Args:
            path: Where to write it; not at all by default.
            overwrite: Whether a file that is there may be replaced.

        Returns:
            The page.

        Raises:
            GraphError: there is a file already, and ``overwrite=False``.
        """
        from lightning_graphs.reporting.page import page_of

        page = page_of(self)
        if path is not None:
            try:
                with open(path, "w" if overwrite else "x", encoding="utf-8") as file:
                    file.write(page)
            except FileExistsError as error:
                raise GraphError(
                    "A report replaces no file without being asked.",
                    f"{path} exists",
                    "name another file, remove this one, or write to_html(path, overwrite=True)",
                ) from error
        return page


def _total(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _names(kind: type) -> list[str]:
    return [entry.name for entry in fields(kind)]


def _record_to_json(record: GraphRecord) -> dict[str, Any]:
    data = {name: getattr(record, name) for name in _names(GraphRecord)}
    return data | {"graphs": [info.to_json() for info in record.graphs]}


# ------------------------------------------------------------------ reading

Read = Callable[[Any, str], Any]


def _unreadable(observed: str) -> GraphError:
    return GraphError(
        "Report.from_json reads what Report.to_json wrote.", observed, "pass the text unchanged"
    )


def _checked(data: Any, where: str, readers: Mapping[str, Read]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _unreadable(f"{where} is {type(data).__name__}, no object")
    for key in [*data, *readers]:
        if key not in readers or key not in data:
            raise _unreadable(f"{where} has {'no' if key in readers else 'an unknown'} key {key!r}")
    return {key: readers[key](value, f"{where}.{key}") for key, value in data.items()}


def _plain(*kinds: type | None) -> Read:
    def read(value: Any, where: str) -> Any:
        kind = None if value is None else type(value)
        if kind is int and int not in kinds and float in kinds:
            return float(value)
        if kind not in kinds:
            raise _unreadable(f"{where} is {value!r}")
        return value

    return read


def _list_of(read_one: Read) -> Read:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _unreadable(f"{where} is {type(value).__name__}, no list")
        return tuple(read_one(item, f"{where}[{i}]") for i, item in enumerate(value))

    return read


def _kind(value: Any, where: str) -> str:
    if value not in ("eager", "replay"):
        raise _unreadable(f"{where} is {value!r}")
    return str(value)


def _info(value: Any, where: str) -> GraphInfo:
    from lightning_graphs.core.info import GraphInfo

    try:
        return GraphInfo.from_json(value)
    except GraphError as error:
        raise _unreadable(f"{where}: {error.observed}") from error


_COUNT, _MAYBE_COUNT = _plain(int), _plain(int, None)
_NUMBER, _MAYBE_NUMBER = _plain(float), _plain(float, None)
_TEXT = _plain(str)
_RECORD: dict[str, Read] = {
    "signature": _TEXT,
    "scope": _TEXT,
    "parts": _COUNT,
    "nodes": _MAYBE_COUNT,
    "kernels": _MAYBE_COUNT,
    "captures": _COUNT,
    "capture_ms": _NUMBER,
    "pool_mib": _MAYBE_NUMBER,
    "replays": _COUNT,
    "eager_ms": _MAYBE_NUMBER,
    "replay_ms": _MAYBE_NUMBER,
    "graphs": _list_of(_info),
}
_TIME: dict[str, Read] = {"step": _COUNT, "kind": _kind, "ms": _NUMBER}
_REPORT: dict[str, Read] = {
    "backend": _TEXT,
    "device": _TEXT,
    "torch": _TEXT,
    "graphs": _list_of(lambda value, where: GraphRecord(**_checked(value, where, _RECORD))),
    "eager": _COUNT,
    "replayed": _COUNT,
    "fallbacks": _list_of(_TEXT),
    "recaptures": _list_of(_TEXT),
    "times": _list_of(lambda value, where: StepTime(**_checked(value, where, _TIME))),
    "verdict": _TEXT,
}
