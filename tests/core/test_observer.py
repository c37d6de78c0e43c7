"""The observer: every obstacle is noted with its line, and the code goes on as it would."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_graphs.private.callsite import CallSiteFinder, calls_observed
from lightning_graphs.watch.noted import Call, Observer, changes


def _line(function: object, text: str) -> int:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return next(first + i for i, line in enumerate(lines) if text in line)


class Notes:
    """What an observer has noted: operator, kind of obstacle, line."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, int]] = []
        self.arguments: list[object] = []
        self.anew: list[float] = []

    def observer(self, device: torch.device, *, rehearsal: bool = False) -> Observer:
        generators: list[Any] = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        elif device.type == "meta":  # stands for a GPU
            generators.append(SimpleNamespace(device=device, get_state=torch.get_rng_state))
        return Observer(
            lambda operator, obstacle, site: self.rows.append((operator, obstacle.kind, site.line)),
            self._look,
            generators,
            sites=CallSiteFinder(),
            rehearsal=rehearsal,
        )

    def _look(self, function: object, args: object, kwargs: object) -> list[float]:
        self.arguments.append((args, kwargs))
        return self.anew


@calls_observed
def _outside(observer: Observer, body: Callable[[], object]) -> None:
    with observer:
        body()


class TestObserver:
    def test_every_obstacle_is_noted_and_the_code_goes_on(self, device: torch.device) -> None:
        x = torch.arange(4.0, device=device)
        results: list[object] = []

        def body() -> None:
            results.append(x.sum().item())  # item
            results.append(x[x > 1].tolist())  # index and tolist
            results.append(torch.tensor([1.0, 2.0], device=device))  # numbers
            results.append(repr(x.sum()))  # repr

        notes = Notes()
        _outside(notes.observer(device), body)
        assert notes.rows == [
            ("aten._local_scalar_dense.default", "host-read", _line(body, "# item")),
            ("aten.index.Tensor", "data-dependent-shape", _line(body, "# index")),
            ("tolist", "host-read", _line(body, "# index")),
            ("tensor", "host-data", _line(body, "# numbers")),
            ("__repr__", "host-read", _line(body, "# repr")),
        ]
        assert results[:2] == [6.0, [2.0, 3.0]]
        assert isinstance(results[2], Tensor)
        assert results[2].tolist() == [1.0, 2.0]
        assert "6." in str(results[3])

    def test_limits_of_a_rehearsal_count_in_a_rehearsal_only(self) -> None:
        device = torch.device("cpu")  # the layout of oneDNN exists there only
        x = torch.eye(2)
        for rehearsal, kinds in ((True, {"layout"}), (False, set())):
            notes = Notes()
            _outside(notes.observer(device, rehearsal=rehearsal), lambda: x.to_mkldnn().to_dense())
            assert {kind for _, kind, _ in notes.rows} == kinds

    def test_copies_from_the_host(self, device: torch.device) -> None:
        before = torch.ones(2)

        def body() -> None:
            before.to(device)  # before
            torch.tensor([], device=device)

        notes = Notes()
        _outside(notes.observer(device), body)
        copies = [("host-copy", _line(body, "# before"))]
        assert [row[1:] for row in notes.rows] == copies * (device.type == "cuda")

    def test_draws_of_the_host_beside_a_gpu(self, device: torch.device) -> None:
        gpu = device if device.type == "cuda" else torch.device("meta")
        own, weights = torch.Generator(), torch.ones(4)

        def body() -> None:
            torch.nn.functional.dropout(torch.rand(3, device=gpu))
            torch.randperm(3)  # drawn
            torch.multinomial(weights, 2, generator=own)  # from its own

        notes = Notes()
        _outside(notes.observer(gpu), body)
        assert notes.rows == [
            ("aten.randperm.default", "python-state", _line(body, "# drawn")),
            ("aten.multinomial.default", "python-state", _line(body, "# from its own")),
        ]

    def test_what_a_value_is_forbidden_for(self, device: torch.device) -> None:
        value, notes = torch.ones(2, device=device), Notes()
        observer, used = notes.observer(device), list[str]()
        observer.forbid({"nested": [value]}, used.append)
        other = torch.zeros((), device=device)

        def body() -> None:
            follows = value[0] + 1
            observer.tell_used([other], "other")
            observer.tell_used([follows], "follows")
            other.add_(follows)

        _outside(observer, body)
        assert used == ["follows", "aten.add_.Tensor"]

    def test_looking_away(self, device: torch.device) -> None:
        x, notes = torch.ones(2, device=device), Notes()
        observer = notes.observer(device)

        def body() -> None:
            with observer.looking_away():
                x.sum().item()
            x + 1

        _outside(observer, body)
        assert notes.rows == []
        assert [call.operator for call in observer.calls] == ["aten.add.Tensor"]

    def test_lines_outside_of_the_observed_code_are_not_blamed(self, device: torch.device) -> None:
        x, notes = torch.ones((), device=device), Notes()
        _outside(notes.observer(device), x.item)
        assert notes.rows == [("aten._local_scalar_dense.default", "host-read", 0)]

    def test_it_sees_the_arguments_of_functions(self, device: torch.device) -> None:
        x, notes = torch.ones(2, device=device), Notes()
        _outside(notes.observer(device), lambda: torch.add(x, 3, alpha=2))
        assert notes.arguments == [((x, 3), {"alpha": 2})]


class TestChanges:
    @staticmethod
    def _calls(
        device: torch.device, body: Callable[[], object], anew: Sequence[float] = ()
    ) -> list[Call]:
        notes = Notes()
        notes.anew.extend(anew)
        observer = notes.observer(device)
        _outside(observer, body)
        return observer.calls

    def test_a_number_that_every_replay_has_anew(self, device: torch.device) -> None:
        x = torch.ones(2, device=device)
        runs = [self._calls(device, lambda f=f: x * f, [f]) for f in (0.5, 0.25)]  # type: ignore[misc]
        assert list(changes(*runs)) == []

    def test_a_number_that_differs(self, device: torch.device) -> None:
        x, factors = torch.ones(2, device=device), iter([0.5, 0.25])

        def body() -> None:
            y = x * next(factors)  # differs
            y + 3

        first, second = self._calls(device, body), self._calls(device, body)
        (change,) = changes(first, second)
        assert (change.operator, change.whole) == ("aten.mul.Tensor", False)
        assert change.what == "0.5 in one step, 0.25 in another"
        assert change.site.line == _line(body, "# differs")

    def test_an_operator_that_is_missing_hides_no_later_difference(
        self, device: torch.device
    ) -> None:
        x, numbers = torch.ones(2, device=device), iter([1, 2])

        def body() -> None:
            number = next(numbers)
            if number == 1:
                x.exp()  # once
            x * number  # differs

        first, second = self._calls(device, body), self._calls(device, body)
        found = list(changes(first, second))
        assert [(c.operator, c.what) for c in found] == [
            ("aten.exp.default", "not in every step"),
            ("aten.mul.Tensor", "1 in one step, 2 in another"),
        ]
        assert [c.site.line for c in found] == [_line(body, "# once"), _line(body, "# differs")]

    def test_equal_runs(self, device: torch.device) -> None:
        x = torch.ones(2, device=device)

        def body() -> None:
            (x * float("nan")).relu() + torch.tensor(2.0)

        assert list(changes(self._calls(device, body), self._calls(device, body))) == []
