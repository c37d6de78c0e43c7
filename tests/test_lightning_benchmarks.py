"""The benchmarks under Lightning, small and on the CPU: that they run, and that they can fail."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_graphs import GraphCapture

for library in ("tokenizers", "torchmetrics", "transformers"):
    pytest.importorskip(library)

HERE = {  # rounds of the fits
    "13 lengths": 1,
    "mixture of experts": 2,
    "15 steps": 1,
    "validation every 20 steps": 1,
    "ConvNeXt with validation": 1,
    "BERT with a padding collator": 1,
}
BY_THE_SCRIPT = {"GPT-2 350M": True, "new length at each step": False}  # whether it has graphs


@pytest.fixture
def fits(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark of whole fits; of the settings by hand only the first one trains."""
    fits = script("whole_fits")

    def shorter(make: Any, tiny: bool) -> Any:
        case = make(tiny)
        assert all(GraphCapture(**by_hand).options for by_hand in case.by_hand)
        return replace(case, by_hand=case.by_hand[:1], repeats=1)

    monkeypatch.setattr(fits, "ROWS", {n: partial(shorter, make) for n, make in fits.ROWS.items()})
    return fits


def test_every_row_is_tested(fits: Any) -> None:
    as_13 = {"60 lengths", "60 lengths padded to 8"}  # when tiny, but for the padding
    assert {*as_13, *HERE, *BY_THE_SCRIPT} == set(fits.ROWS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "rounds"), HERE.items())
def test_a_row_trains_as_eager_training_does(fits: Any, name: str, rounds: int) -> None:
    found = fits.measure(name, rounds=rounds, tiny=True)
    assert (found["wrong"], found["verdict"]) == ([], "PASS")
    assert found["eager fits equal"]
    assert found["captures"] > 0
    assert found["replayed"] > 0
    assert found["best"] in found["seconds"]
    assert len(found["seconds"]) > 2
    assert name in fits.line(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "replays"), BY_THE_SCRIPT.items())
def test_the_script_prints_and_writes_a_row(
    fits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, replays: bool
) -> None:
    written = tmp_path / "rows.json"
    assert fits.main(["--tiny", "--rows", name, "--out", str(written)]) == 0
    versions, titles, row = capsys.readouterr().out.splitlines()
    assert "best by hand" in titles
    assert str(torch.__version__) in versions
    assert row[:30].strip() == name
    [found] = json.loads(written.read_text())["rows"]
    assert found["verdict"] == "PASS"
    assert (found["replayed"] > 0) == replays


def test_a_process_that_dies_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fits: Any
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib\n"
        "_, _, name, _, path, flag = sys.argv\n"
        "assert name == 'good', f'{name} {flag}'\n"
        """pathlib.Path(path).write_text('{"rows": [{"row": "good", "verdict": "PASS"}]}')\n"""
    )
    measure_rows = import_module("harness").measure_rows
    rows = (str(script), ["good", "bad"], ["--flag"], None)
    written = tmp_path / "rows.json"
    assert measure_rows(*rows, str, "heading", jobs=2, path=written) == 1
    good, bad = sorted(
        json.loads(written.read_text())["rows"], key=lambda row: row["verdict"] == "CRASHED"
    )
    assert good == {"row": "good", "verdict": "PASS"}
    assert (bad["row"], bad["verdict"]) == ("bad", "CRASHED")
    assert bad["error"].endswith("AssertionError: bad --flag")
    assert "CRASHED" in fits.line(bad)
    assert "heading" in capsys.readouterr().out


def outcomes(fits: Any, seconds: list[float], **other: Any) -> list[Any]:
    """A round of fits for each number, of so many times three seconds."""
    facts: dict[str, Any] = {
        "peak": 5000.0,
        "last_third": 5000.0,
        "captures": 1,
        "replayed": 1,
        "fallbacks": [],
    }
    return [
        fits.Outcome(seconds=3 * s, **{"losses": [2.0, 1.0], **facts, **other}) for s in seconds
    ]


@pytest.mark.parametrize(
    ("defaults", "by_hand", "other", "verdict"),
    [
        ([1.0, 1.0], [1.0, 1.0], {}, "PASS"),
        ([1.0, 1.1], [1.0, 1.1], {}, "FAIL"),  # 1.05 of eager
        ([1.0, 1.0], [0.8, 0.9], {}, "FAIL"),  # 1.18 of the best setting
        ([1.0, 1.0], [1.0, 1.0], {"peak": 7000.0}, "FAIL"),
        ([1.0, 1.0], [1.0, 1.0], {"last_third": 5600.0}, "FAIL"),
        ([0.5, 0.5], [1.0, 1.0], {"losses": [2.0, 1.0 + 2**-20]}, "WRONG RESULT"),
        ([0.5, 0.5], [1.0, 1.0], {"losses": [2.0, float("nan")]}, "WRONG RESULT"),
    ],
)
def test_limits(
    fits: Any, defaults: list[float], by_hand: list[float], other: dict[str, Any], verdict: str
) -> None:
    found = {
        "eager": outcomes(fits, [1.0, 1.0]),
        "defaults": outcomes(fits, defaults, **other),
        "max_graphs=16": outcomes(fits, by_hand),
        "slow": outcomes(fits, [9.0, 9.0]),
    }
    summary = fits.summary("row", found, [], None, tiny=False)
    assert (summary["verdict"], summary["best"]) == (verdict, "max_graphs=16")
    assert summary["wrong"] == (["defaults"] if verdict == "WRONG RESULT" else [])


def test_losses_of_fits_that_are_not_repeatable(fits: Any) -> None:
    eager = [[2.0, 1.0, 1.0], [2.0, 1.01, 1.0]]
    assert fits.equal_eager([2.001, 1.09, 1.1], eager)
    assert not fits.equal_eager([2.01, 1.0, 1.0], eager)  # before eager fits part
    assert not fits.equal_eager([2.0, 1.2, 1.0], eager)


@pytest.fixture
def short(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark of steps with fewer of them."""
    step = script("step")
    for name, steps in {"WARMUP": 8, "TIMED": 4, "BLOCKS": 3, "LAST_THIRD": 12}.items():
        monkeypatch.setattr(step, name, steps)
    return step


@pytest.mark.filterwarnings("ignore")
def test_steps(short: Any) -> None:
    lab = import_module("harness").Lab(dry=True)
    found = short.measure("mlp", lab)
    assert (found["verdict"], found["largest_loss_difference"]) == ("PASS", 0)
    assert "mlp: PASS" in short.line(found)
    assert "loop: PASS" in short.line(short.measure("loop", lab))
    found = short.measure("mask", lab)
    assert "mask: PASS" in short.line(found)
    assert 0.0 < found["host_us"] < 1000.0
    assert "mlp validation: PASS" in short.line(short.measure("mlp validation", lab))


@pytest.mark.parametrize(
    ("masked", "other", "loop", "verdict"),
    [
        (20.0, 0.0, 300.0, "PASS"),
        (31.0, 0.0, 300.0, "FAIL"),
        (59.0, 0.0, 700.0, "PASS"),
        (20.0, 1.0, 300.0, "FAIL"),
    ],
)
def test_the_limit_of_a_host_half(
    short: Any,
    monkeypatch: pytest.MonkeyPatch,
    masked: float,
    other: float,
    loop: float,
    verdict: str,
) -> None:
    def fit(name: str, *_: Any, **__: Any) -> dict[str, Any]:
        host = masked if name == "masked" else other
        return {"ms": 1.0, "losses": [1.0], "host_us": host, "cpu_us": loop}

    monkeypatch.setattr(short, "fit", fit)
    assert short.host_time(SimpleNamespace(dry=False))["verdict"] == verdict


@pytest.mark.parametrize(
    ("row", "other", "verdict"),
    [
        ("gpt2", {"ms": 1.04}, "PASS"),
        ("gpt2", {"ms": 1.06}, "FAIL"),
        ("gpt2", {"ms": 1.06, "loop": 1.2}, "FAIL"),
        ("mlp", {"ms": 1.06, "loop": 1.2}, "PASS"),
        ("vit", {"losses": [1.0, 2.0]}, "WRONG RESULT"),
    ],
)
def test_limits_of_validations(
    short: Any, monkeypatch: pytest.MonkeyPatch, row: str, other: dict[str, Any], verdict: str
) -> None:
    def fit(
        name: str, graphs: Any = None, *, validates: bool, callbacks: Any = (), **_: Any
    ) -> dict[str, Any]:
        assert (name, validates) == (row, True)
        if callbacks:
            return {"ms": other.get("loop", 0.5)}
        eager = {"ms": 9.0, "floor": 0.0, "losses": [2.0, 1.0]}
        return eager if graphs is None else {**eager, "floor": 1.0, **other}

    monkeypatch.setattr(short, "fit", fit)
    monkeypatch.setattr(short, "whole_steps", lambda lab: "graphs")
    found = short.measure(f"{row} validation", SimpleNamespace(dry=False))
    assert found["verdict"] == verdict


@pytest.mark.parametrize(
    ("row", "other", "verdicts"),
    [
        ("gpt2", {}, ["PASS", "PASS", "PASS"]),
        ("gpt2", {"ms": 1.03}, ["FAIL", "PASS", "PASS"]),
        ("mlp", {"ms": 1.03}, ["PASS", "PASS", "PASS"]),
        ("mlp compiled", {"ms": 1.07}, ["FAIL", "PASS", "PASS"]),
        ("mlp", {"ms": 1.26, "loop": 1.2}, ["PASS", "PASS", "PASS"]),
        ("gpt2", {"ms": 1.03, "loop": 1.2}, ["FAIL", "PASS", "PASS"]),
        ("vit", {"peak": 3040.0, "last_third": 1150.0}, ["PASS", "PASS", "PASS"]),
        ("vit", {"peak": 3060.0}, ["PASS", "FAIL", "PASS"]),
        ("vit", {"last_third": 1200.0}, ["PASS", "PASS", "FAIL"]),
        ("bert", {"losses": [1.0, float("nan")]}, ["WRONG RESULT"] * 3),
    ],
)
def test_limits_of_steps(
    short: Any,
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    other: dict[str, Any],
    verdicts: list[str],
) -> None:
    eager = {"ms": 9.0, "floor": 0, "losses": [2.0, 1.0], "peak": 1000.0, "last_third": 1000.0}

    def fit(name: str, graphs: Any = None, callbacks: Any = (), **_: Any) -> dict[str, Any]:
        assert name == row.split()[0]
        if callbacks:  # a step that does nothing
            return {"ms": other.get("loop", 0.5)}
        return eager if graphs is None else {**eager, "ms": 1.01, "floor": 1.0, **other}

    monkeypatch.setattr(short, "fit", fit)
    monkeypatch.setattr(short, "whole_steps", lambda lab, **_: "graphs")
    found = [*short.measure(row, SimpleNamespace(dry=False))["verdicts"].values()]
    assert found[: len(verdicts)] == verdicts  # behind these, those of two streams


@pytest.mark.parametrize("name", ["whole_fits", "step"])
def test_without_a_gpu_it_says_so_in_one_sentence(
    script: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script(name).main([]) == 0
    said = "This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.\n"
    assert capsys.readouterr().out == said


class TestLibraries:
    """A library here is a function that makes a module and a trainer of its own."""

    @pytest.fixture
    def libraries(self, script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LIGHTNING_GRAPHS", "0")

        def library(device: str, steps: int) -> list[torch.Tensor]:
            module = BoringModel()
            module.configure_optimizers = lambda: torch.optim.Adam(module.parameters())  # type: ignore[method-assign]
            Trainer(**libraries.library_fits._quiet(steps, device)).fit(module)
            return [module.layer.weight]

        libraries = script("libraries")
        monkeypatch.setattr(libraries, "FITS", {"library: model": library})
        return libraries

    @pytest.mark.filterwarnings("ignore")
    def test_a_row_finds_the_graphs_of_the_variable(self, libraries: Any, lab: Any) -> None:
        found = libraries.measure("library: model", lab, 12, 1)
        assert (found["scope"], found["differs"], found["repeatable"]) == ("whole step", "", True)
        assert (found["steps"], found["fallbacks"]) == (12, [])
        assert found["replayed"] >= 9
        assert "| library | model | whole step | " in libraries.table([found])
        assert os.environ["LIGHTNING_GRAPHS"] == "0"

    @pytest.mark.filterwarnings("ignore")
    def test_a_difference_is_found_and_named(self, libraries: Any, lab: Any) -> None:
        one, other = (libraries.train("library: model", lab, 4) for _ in range(2))
        assert one.differs(other) == ""
        assert "exp_avg" in str(one.end["optimizers"])
        other.end["parameters"]["layer.bias"][0] += 1e-6
        assert one.differs(other) == "parameters.layer.bias"
        other.steps[2]["loss"] += 1e-6
        assert one.differs(other) == "step 2: loss"
        assert 0 < one.difference(other) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_optimizers_are_measured(
    script: Any, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizers = script("optimizers")
    monkeypatch.setattr(optimizers, "STEPS", 10)
    found = [optimizers.measure(name, lab) for name in ("SGD", "LBFGS")]
    assert [row["update"] for row in found] == ["in the graph", "eager"]
    assert [(row["differs"], row["repeatable"]) for row in found] == [("", True)] * 2
    assert "| LBFGS | eager | yes | LBFGS calls" in optimizers.table(found)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- optimizers -->\nb\n<!-- end of optimizers -->\nc\n")
    optimizers.put_into(page, optimizers.table(found))
    text = page.read_text()
    assert text.startswith("a\n<!-- optimizers -->\n| optimizer |")
    assert text.endswith("\n<!-- end of optimizers -->\nc\n")


@pytest.mark.filterwarnings("ignore")
def test_captured_loops_train_as_eager_ones_do(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loops = script("loops")
    assert loops.main(["--tiny", "--rows", "DreamerV3, Fabric"]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    found = {"differs": [], "repeatable": True, "compared": 3, "gain": 9.0, "limit": 10.0}
    assert loops.verdict(found, tiny=False) == "FAIL"
    assert loops.verdict({**found, "differs": ["world"]}, tiny=True) == "WRONG RESULT"


@pytest.mark.filterwarnings("ignore")
def test_peers_are_compared_with_eager_training(
    script: Any, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = script("peers")
    monkeypatch.setattr(peers, "BLOCKS", 1)
    monkeypatch.setattr(peers, "BLOCKS_OF_SWEEP", 1)
    ways = "lightning", "step", "make_graphed_callables", "whole-step graph", "nemo", "torchtitan"
    written = [tmp_path / "row.json", tmp_path / "sweep.json"]
    tiny = ["--tiny", "--peers", ";".join(ways), "--sizes", "1,2", "--ranks", ""]
    assert peers.main([*tiny, "--rows", "mlp", "--sweep", "", "--json", str(written[0])]) == 0
    assert peers.main([*tiny, "--rows", "", "--sweep", "mlp", "--json", str(written[1])]) == 0
    (row,) = json.loads(written[0].read_text())["rows"]
    assert [*row["peers"]] == [*ways]
    assert {one["losses"] for one in row["peers"].values() if "ms" in one} == {"equal"}
    missing = {one.get("error", "is not installed")[-16:] for one in row["peers"].values()}
    assert missing == {"is not installed"}
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- peers: {p} --><!-- end of peers: {p} -->" for p in peers.PARTS))
    drawn = tmp_path / "peers.svg"
    made = ["--pages", str(page), "--plot", str(drawn)]
    assert peers.main(["--from", *map(str, written), *made]) == 0
    assert page.read_text().count("no GPU (rehearsal)") == 3
    assert "| `GraphCapture()`, one stream | " in page.read_text()
    assert drawn.exists()


def test_pages_quote_the_written_figures_of_peers(script: Any, tmp_path: Path) -> None:
    peers = script("peers")
    written = json.loads((peers.ROOT / "benchmarks/peers.json").read_text())
    for name in peers.QUOTING:
        text = (peers.ROOT / name).read_text(encoding="utf-8")
        page = tmp_path / "page.md"
        page.write_text(text, encoding="utf-8")
        peers.put_into(page, peers.by_name(written["rows"]))
        assert page.read_text(encoding="utf-8") == text, f"peers.py --quote changes {name}"


def test_figures_that_a_run_lacks_come_from_later_ones(script: Any) -> None:
    def row(commit: str, **ms: float) -> dict[str, Any]:
        peers = {peer: {"ms": figure} for peer, figure in ms.items()} | {"nemo": {"error": "-"}}
        return {"row": "bert", "about": {"card": "H100", "commit": commit}, "peers": peers}

    peers = script("peers")
    (found,) = peers.by_name([row("a1", step=7.0), row("b2", step=8.0, compile=9.0)]).values()
    assert found["peers"] == {"step": {"ms": 7.0}, "compile": {"ms": 9.0}}
    assert found["about"]["commit"] == "a1 (compile: b2)"


def test_peers_that_are_slower_or_wrong_fail(script: Any, lab: Any) -> None:
    peers = script("peers")
    ours, theirs = {"ms": 4.0, "losses": "equal"}, {"ms": 9.9, "losses": "equal"}
    on_gpu = SimpleNamespace(dry=False)

    def verdict(row: str, ours: Any) -> str:
        found = {"step, compiled": ours, "reduce-overhead": theirs}
        return peers.verdict_of(peers.rows_of(row, found, on_gpu))

    assert [verdict(row, ours) for row in ("bert", "gpt2")] == ["PASS", "FAIL"]
    assert verdict("bert", {**ours, "losses": "other"}) == "WRONG RESULT"
    assert peers.compared([1.0, 2.0], [1.0, float("nan")])["losses"] == "other"


@pytest.mark.filterwarnings("ignore")
def test_phases_of_a_capture_are_timed(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    captures = script("captures")
    assert captures.main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert [label for _, _, label in captures.PHASES if label not in printed] == []
