"""The model zoo, on the CPU: a dozen of its rows, and that its table and its limits can fail."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

ROWS = [  # one for each thing that a model may do; benchmarks/zoo.py has all models
    "BertForSequenceClassification",
    "GPT2LMHeadModel",
    "ViTForImageClassification",
    "ResNetForImageClassification",
    "LlamaForCausalLM",  # masks that are made, or left out
    "LlamaForCausalLM with padding",
    "T5ForConditionalGeneration",
    "GPTJForCausalLM",  # numbers and tables that are made on the host
    "OPTForCausalLM with layerdrop",  # and draws, with branches on them
    "DebertaV2ForSequenceClassification",  # reads of the batch
    "WavLMForCTC without masks",  # lengths that a loss reads
]
if find_spec("timm") and find_spec("torchvision"):
    ROWS.append("samvit_base_patch16_224")


@pytest.fixture
def zoo(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    zoo = script("zoo")
    monkeypatch.setattr(zoo, "STEPS", 11)
    return zoo


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_an_architecture(zoo: Any, lab: Any, name: str) -> None:
    found = zoo.measure(name, lab)
    # A number that a scripted function makes, as older transformers have it: docs/versions.md
    code = import_module("transformers.models.deberta_v2.modeling_deberta_v2")
    is_scripted = isinstance(code.scaled_size_sqrt, torch.jit.ScriptFunction)
    old = name == "DebertaV2ForSequenceClassification" and is_scripted
    assert found["scope"] == ("submodules" if old else "whole step")
    assert old or found["why"] == ""
    assert found["repeatable"]
    assert found["differs"] == ""
    assert len(set(found["losses"])) == 11
    assert found["replayed"] >= (1 if old else 5)
    assert "equal" in zoo.line(found)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_is_wrong(zoo: Any, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(net: Any, batches: Any, lab: Any, graphs: Any = None) -> Any:
        outcome = fit(net, batches, lab, graphs)
        if graphs is not None:
            outcome.state["model.transformer.ln_f.bias"][0] += 2**-20
        return outcome

    fit = zoo.fit
    monkeypatch.setattr(zoo, "fit", wrong)
    found = zoo.measure("GPT2LMHeadModel", lab)
    assert found["repeatable"]
    assert found["differs"] == "model.transformer.ln_f.bias"
    assert "differs (model.transformer.ln_f.bias)" in zoo.line(found)


def test_of_infinite_losses_nothing_is_said(
    zoo: Any, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = zoo.Outcome(torch.full((11,), float("inf")), {})
    monkeypatch.setattr(zoo, "fit", lambda *_: outcome)
    found = zoo.measure("GPT2LMHeadModel", lab)
    assert (found["differs"], found["repeatable"]) == ("", False)
    assert "equal, not repeatable" in zoo.line(found)


def test_not_a_number_equals_itself(zoo: Any) -> None:
    nan, number = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    first = zoo.Outcome(nan, {"weight": number})
    assert not first.differs(zoo.Outcome(nan.clone(), {"weight": number.clone()}))
    assert first.differs(zoo.Outcome(number, {"weight": number})) == "losses"
    assert first.differs(zoo.Outcome(nan, {"weight": nan})) == "weight"


def test_the_reason_is_what_was_found(zoo: Any) -> None:
    told = ["a step runs eagerly: A rule: item at train.py:3 in f: x.item()\n  Fix: write x"]
    assert zoo.reason(told) == "item at train.py:3 in f: x.item()"
    assert zoo.reason(["steps run eagerly: no optimizer"]) == "steps run eagerly: no optimizer"


def test_what_is_not_installed_is_no_crash(
    zoo: Any, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = import_module("architectures").Architecture("NoSuchForCausalLM", "vision")
    monkeypatch.setattr(zoo, "ARCHITECTURES", {row.name: row})
    found = zoo.measure(row.name, lab)
    assert found["scope"] == "unavailable"
    assert "NoSuchForCausalLM" in found["why"]
    assert not found["last"]


def test_a_crash_with_the_callback(zoo: Any, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(net: Any, batches: Any, lab: Any, graphs: Any = None) -> Any:
        if graphs is not None:
            raise ValueError("out of order\nand more")
        return zoo.Outcome(torch.ones(1), {})

    monkeypatch.setattr(zoo, "fit", fit)
    found = zoo.measure("BertForSequenceClassification", lab)
    assert found["scope"] == "crashed"
    assert found["why"].startswith("ValueError: out of order (")
    assert "and more" in found["traceback"]


def rows(**counts: int) -> list[dict[str, Any]]:
    """So many rows of each kind."""
    kinds = {
        "whole": {"scope": "whole step", "repeatable": True, "differs": ""},
        "modules": {"scope": "submodules", "repeatable": True, "differs": ""},
        "routed": {"scope": "submodules", "why": "moe.py:332 in _grouped_mm: ..."},
        "eager": {"scope": "eager", "repeatable": True, "differs": ""},
        "wrong": {"scope": "whole step", "repeatable": True, "differs": "weight"},
        "wild": {"scope": "whole step", "repeatable": False, "differs": "losses"},
        "crashed": {"scope": "crashed"},
        "absent": {"scope": "unavailable"},
    }
    return [kinds[kind] for kind, count in counts.items() for _ in range(count)]


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ({"whole": 95, "modules": 5}, "PASS"),
        ({"whole": 94, "modules": 6}, "FAIL"),
        ({"whole": 19, "modules": 1, "routed": 30}, "PASS"),
        ({"whole": 99, "eager": 1}, "FAIL"),
        ({"whole": 99, "crashed": 1}, "FAIL"),
        ({"whole": 99, "wrong": 1}, "WRONG RESULT"),
        ({"whole": 99, "wild": 1}, "PASS"),
        ({"whole": 19, "modules": 1, "absent": 80}, "PASS"),
    ],
)
def test_limits(zoo: Any, counts: dict[str, int], verdict: str) -> None:
    verdict_of = import_module("harness").verdict_of
    assert verdict_of(zoo.summary(rows(**counts), limits=True)) == verdict


class FirstIsLate:
    """A timer that ends with the first row, and with no other, however long they take."""

    rows = 0

    def __init__(self, limit: float, end: Any) -> None:
        assert limit == 2
        self.end = end

    def start(self) -> None:
        type(self).rows += 1
        if self.rows == 1:
            self.end()

    def cancel(self) -> None:
        pass


def test_a_row_that_hangs_or_kills_its_process_loses_only_itself(
    zoo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "Timer", FirstIsLate)
    monkeypatch.setattr(FirstIsLate, "rows", 0)
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, time\n"
        "print('ready', flush=True)\n"
        "assert sys.argv[1:] == ['--worker', '--tiny']\n"
        "for name in map(str.strip, sys.stdin):\n"
        "    if name == 'hangs': time.sleep(600)\n"
        "    assert name != 'dies', 'of this'\n"
        "    found = {'row': name, 'scope': 'unavailable', 'why': 'no', 'last': name == 'last'}\n"
        "    print(json.dumps(found), flush=True)\n"
        "    if name == 'last': break\n"
    )
    names = ["hangs", "good", "dies", "last", "better"]
    found = zoo.in_processes(str(script), names, ["--tiny"], jobs=1, limit=2)
    assert [row["row"] for row in found] == names
    hangs, good, dies, last, better = found
    assert (hangs["scope"], hangs["why"]) == ("crashed", "took longer than 2 s")
    assert (dies["scope"], dies["why"]) == ("crashed", "its process ended")
    assert dies["traceback"].strip().endswith("AssertionError: of this")
    assert {row["scope"] for row in (good, last, better)} == {"unavailable"}
    assert "took longer" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("workers_are_here")
def test_tables(zoo: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["GPT2LMHeadModel", "ViTForImageClassification"]
    written, table = tmp_path / "rows.json", tmp_path / "zoo.md"
    flags = ["--tiny", "--jobs", "1", "--limit", "300", "--rows", ",".join(names)]
    assert zoo.main([*flags, "--json", str(written), "--markdown", str(table)]) == 0
    found = json.loads(written.read_text())
    assert [row["row"] for row in found["rows"]] == names
    assert found["verdict"] == "PASS"
    said = "2 architectures: 2 whole step; equal to eager training to the last bit: 2 of 2"
    assert said in capfd.readouterr().out
    text = table.read_text()
    assert said in text
    assert str(torch.__version__) in text
    assert "## Vision" in text
    assert "| GPT2LMHeadModel | whole step | 1 | 6 | equal |  |" in text


def test_without_a_gpu_it_says_so_in_one_sentence(
    zoo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert zoo.main([]) == 0
    said = "This benchmark needs a GPU; --tiny rehearses it on the CPU.\n"
    assert capsys.readouterr().out == said
    with pytest.raises(SystemExit, match="2"):
        zoo.main(["--rows", "NoSuchForCausalLM"])
    assert "there is no NoSuchForCausalLM" in capsys.readouterr().err
