"""The examples run as they stand, and what they show is what they claim."""

from __future__ import annotations

import ast
import csv
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest

from tests.processes import ROOT, run_script

for library in ("jsonargparse", "peft", "sklearn", "tokenizers", "transformers"):
    pytest.importorskip(library)

Example = Callable[[str], ModuleType]

EXAMPLES = ROOT / "examples"
PROGRAMS = (
    "capture_training_step",
    "finetune_classifier",
    "finetune_vision",
    "gan_manual_optimization",
    "lora_finetune",
    "table_classifier",
    "variable_length_lm",
)

# Advice on larger programs, which an example silences when it runs by itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(EXAMPLES / name, *arguments, COLUMNS="100", HF_HUB_OFFLINE="1")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Example:
    """Imports an example, or what they share, by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module


@pytest.fixture
def classifier(example: Example) -> ModuleType:
    return example("finetune_classifier")


@pytest.fixture
def small(classifier: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that learns in a second: one layer. The script is run with its own, too."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = {**classifier.small_or_base(False), "hidden_size": 64, **sizes}
    monkeypatch.setattr(classifier, "small_or_base", lambda _: config)


@pytest.fixture
def corpus(example: Example) -> ModuleType:
    return example("helpers.stdlib_corpus")


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A CSV file whose two labels one word tells apart."""
    path = tmp_path / "reviews.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(60):
            writer.writerow([f"a good film, number {i}", "praise"])
            writer.writerow([f"a poor film, number {i}", "blame"])
    return path


@pytest.mark.usefixtures("small")
def test_a_captured_fit_learns_what_the_eager_one_learns(
    classifier: ModuleType, reviews: Path
) -> None:
    options = classifier.flags().parse_args(
        ["--data", str(reviews), "--epochs", "4", "--batch-size", "16", "--backend", "emulated"]
    )
    result = classifier.train(options, learning_rate=3e-3)
    done = result.captured.graphs._statistics

    # 90 texts: five whole batches and one of ten in each epoch, each shape captured by itself.
    assert len(result.pairs) == 24
    assert result.largest_difference == 0.0
    assert result.captured.accuracy == result.eager.accuracy == 1.0
    assert mean(result.captured.losses[-6:]) < 0.75 * mean(result.captured.losses[:6])
    assert (done.captures, done.fallbacks) == (2, [])
    assert done.eager + done.replayed == 24
    assert done.replayed >= 16


def test_the_classifier_reports_a_rehearsal_on_real_code() -> None:
    arguments = ("--backend", "emulated", "--max-steps", "8", "--batch-size", "8")
    done = run_example("finetune_classifier.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert "8 labels: asyncio, email, http" in done.stdout
    assert "Losses: 8 of 8 equal, largest difference 0.0e+00." in done.stdout
    assert "Fallbacks: none." in done.stdout
    assert "Times would mean nothing here, so none are shown." in done.stdout
    assert "ms per step" not in done.stdout
    assert "it/s" not in done.stdout + done.stderr  # a bar that would look slower


def test_the_captured_step_equals_the_eager_one() -> None:
    done = run_example("capture_training_step.py", "--steps", "8", "--backend", "emulated")
    assert done.returncode == 0, done.stderr
    assert "8 of 8 losses equal" in done.stdout


def test_the_minimal_example_needs_nothing_else() -> None:
    text = (EXAMPLES / "minimal.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    modules = {line.split()[1].partition(".")[0] for line in text.splitlines() if "import " in line}
    assert modules == {"lightning", "torch", "lightning_graphs"}
    done = run_example("minimal.py")
    assert done.returncode == 0, done.stderr
    assert "123 steps replayed, 5 eager" in done.stdout


@pytest.mark.filterwarnings("ignore:GraphCapture. cannot capture the whole step")
def test_the_notebook_shows_what_it_says(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "first_graph.ipynb").read_text(encoding="utf-8"))
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", ())]
    assert sum("27 steps replayed, 5 eager" in json.dumps(one) for one in outputs) >= 4
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [
        run_cell("".join(cell["source"]), tmp_path / f"cell_{number}.py", names)
        for number, cell in enumerate(notebook["cells"])
        if cell["cell_type"] == "code"
    ]
    first, mended, found = [value for value in shown if value is not None]
    assert first.replayed == mended.replayed == 27
    assert first.fallbacks == mended.fallbacks == ()
    assert first._repr_html_().startswith(
        "<p><b>27 steps replayed, 5 eager (84 %).</b></p>\n<table>"
    )
    assert names["with_graphs"] == names["without"] != names["refused"] == names["mended"]
    assert names["doctor"].report.replayed == 0
    [(place, remedy)] = found
    assert "if loss.tolist() > 0.5" in place
    assert "torch.where" in remedy


def run_cell(text: str, file: Path, names: dict[str, Any]) -> Any:
    """Run a cell of a notebook; returns what it would show: the value of its last line, if any."""
    file.write_text(text, encoding="utf-8")  # where messages find their lines
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(file), "exec"), names)
    return last and eval(compile(ast.Expression(last.value), str(file), "eval"), names)


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert f"`{path.name}`" in listed, path.name


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_example_explains_its_flags(
    example: Example,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        example(name).main()
    assert "--backend {auto,cuda,emulated}" in capsys.readouterr().out


def train(module: ModuleType, *arguments: str) -> Any:
    """The comparison that an example makes with these flags, on the CPU."""
    return module.train(module.flags().parse_args(["--backend", "emulated", *arguments]))


@pytest.mark.parametrize("name", PROGRAMS[1:])
def test_the_trainer_gets_its_flags(
    example: Example, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Made(Exception):
        pass

    def trainer(**options: Any) -> None:
        raise Made(options["devices"], options["strategy"], options["precision"])

    monkeypatch.setattr(example("helpers.comparison"), "Trainer", trainer)
    with pytest.raises(Made, match=r"^\('2', 'ddp', 'bf16-mixed'\)$"):
        train(example(name), "--devices=2", "--strategy=ddp", "--precision=bf16-mixed")


@pytest.mark.parametrize("model", ["resnet", "vit"])
def test_an_image_classifier_learns_digits(example: Example, model: str) -> None:
    result = train(example("finetune_vision"), "--model", model, "--max-steps", "45")
    done = result.captured.graphs._statistics

    # 1348 images: 42 whole batches and one of four.
    assert len(result.pairs) == 45
    assert result.largest_difference == 0.0
    assert result.captured.accuracy == result.eager.accuracy > 0.5
    assert mean(result.captured.losses[-10:]) < 0.7 * mean(result.captured.losses[:10])
    assert (done.captures, done.replayed, done.fallbacks) == (1, 39, [])


@pytest.mark.usefixtures("small")
def test_only_adapters_and_the_head_learn(example: Example, reviews: Path) -> None:
    module = example("lora_finetune")
    # Of equal counts the tokenizer takes any order: a higher rate fails in one run of ten.
    flags = ("--epochs", "8", "--batch-size", "15", "--learning-rate", "5e-3")
    result = train(module, "--data", str(reviews), *flags)
    done = result.captured.graphs._statistics

    assert len(result.pairs) == 48
    assert result.largest_difference == 0.0
    assert result.captured.accuracy == result.eager.accuracy > 0.8
    assert mean(result.captured.losses[-6:]) < 0.5 * mean(result.captured.losses[:6])
    assert (done.captures, done.replayed, done.fallbacks) == (1, 43, [])

    config = {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 48}
    encoder = example("finetune_classifier").make_model(None, 2, config)
    parameters = module.adapted(encoder, 4).named_parameters()
    learning = [name for name, value in parameters if value.requires_grad]
    assert sum("lora_" in name for name in learning) == 2 * 8
    assert [name for name in learning if "lora_" not in name] == [
        f"base_model.model.classifier.modules_to_save.default.{name}" for name in ("weight", "bias")
    ]


def test_a_table_is_learned_with_equal_checkpoints(example: Example) -> None:
    result = train(example("table_classifier"), "--epochs", "6")
    done = result.captured.graphs._statistics

    # 4096 rows: eight batches in each epoch.
    assert len(result.pairs) == 48
    assert result.largest_difference == 0.0
    assert result.same_checkpoint is True
    assert result.captured.accuracy == result.eager.accuracy > 0.65
    assert mean(result.captured.losses[-8:]) < 0.95 * mean(result.captured.losses[:8])
    assert (done.captures, done.replayed, done.fallbacks) == (1, 43, [])


def test_each_length_gets_a_graph(example: Example) -> None:
    flags = ("--max-steps", "44", "--batch-size", "4", "--longest", "32", "--bucket", "16")
    result = train(example("variable_length_lm"), *flags)
    done = result.captured.graphs._statistics

    assert len(result.pairs) == 44
    assert result.largest_difference == 0.0
    assert result.captured.accuracy == result.eager.accuracy > 0.02
    assert mean(result.captured.losses[-10:]) < 0.95 * mean(result.captured.losses[:10])
    # 16 and 32 tokens.
    assert (done.captures, done.fallbacks) == (2, [])
    assert done.replayed >= 20


@pytest.mark.filterwarnings("ignore:GraphCapture. (validation )?steps run eagerly. max_graphs")
def test_at_most_so_many_lengths_have_a_graph(example: Example) -> None:
    flags = ("--max-steps", "44", "--batch-size", "2", "--longest", "32", "--bucket", "8")
    result = train(example("variable_length_lm"), *flags, "--max-graphs", "2")
    done = result.captured.graphs._statistics
    assert result.largest_difference == 0.0
    # Two of four lengths have graphs; none goes for one that comes no more often.
    assert done.captures == 2
    (reason,) = done.fallbacks
    assert "max_graphs=2 allows no more graphs" in reason


def test_texts_of_a_batch_have_one_padded_length(example: Example) -> None:
    module = example("variable_length_lm")
    lengths = [32, 64, 32, 32, 64, 32, 96]
    buckets = module.Buckets(lengths, batch_size=2, seed=0)
    batches = list(buckets)
    assert len(batches) == len(buckets) == 3
    assert sorted(lengths[i] for batch in batches for i in batch) == [32, 32, 32, 32, 64, 64]
    assert all(lengths[a] == lengths[b] for a, b in batches)

    texts = ["def f(x):\n    return x", "x = 1", "import os\nimport sys\n" * 9]
    tokenizer = module.tokenizer_of(texts, 300, bucket=8, longest=32)
    assert module.padded_lengths(texts, tokenizer) == [
        min(32, -(-len(tokenizer.encode(text).attention_mask) // 8) * 8) for text in texts
    ]


def test_a_gan_trains_as_it_does_without_graphs(example: Example) -> None:
    result = train(example("gan_manual_optimization"), "--max-steps", "200")
    done = result.captured.graphs._statistics

    # Two optimizers: two of Lightning's steps in each training step.
    assert len(result.pairs) == 100
    assert result.largest_difference == 0.0
    assert result.captured.accuracy == result.eager.accuracy
    # The discriminator's loss falls until the generator's drawings get better.
    assert min(result.captured.losses) < 0.75 * result.captured.losses[0]
    assert done.fallbacks == []
    assert done.replayed >= 90


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """``python examples/cli/train.py fit ...``, in this process; returns its LightningCLI."""
    folder = EXAMPLES / "cli"
    given = ["fit", "--config", str(folder / "config.yaml"), *arguments]
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    monkeypatch.syspath_prepend(str(folder))
    return runpy.run_path(str(folder / "train.py"), run_name="__main__")["cli"]


def test_a_configuration_file_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Lightning 2.6 names an instantiator as newer versions of jsonargparse no longer do.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.chdir(tmp_path)
    quiet = (
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.accelerator=cpu",
        "--trainer.max_epochs=1",
        f"--trainer.default_root_dir={tmp_path}",
    )
    captured = run_cli(monkeypatch, *quiet, "--trainer.callbacks.backend=emulated")
    (tmp_path / "config.yaml").unlink()
    eager = run_cli(monkeypatch, *quiet, "--trainer.callbacks=null")

    [graphs] = [one for one in captured.trainer.callbacks if hasattr(one, "report")]
    assert (graphs._statistics.captures, graphs._statistics.fallbacks) == (1, [])
    assert graphs.report.replayed == 37
    values = [dict(one.trainer.callback_metrics) for one in (captured, eager)]
    assert values[0] == values[1]
    assert values[0]["val_accuracy"] > 0.8
    assert values[0]["loss"] < 0.8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--epochs", "0"), "--epochs must be at least 1"),
        (("--batch-size", "0"), "--batch-size must be at least 1"),
        (("--max-steps", "0"), "--max-steps must be at least 1, or -1 for no limit"),
    ],
)
def test_impossible_flags_end_with_a_sentence(
    classifier: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune_classifier.py", *arguments])
    with pytest.raises(SystemExit, match=r"^2$"):
        classifier.main()
    assert sentence in capsys.readouterr().err


def test_no_file_of_the_standard_library_is_in_both_parts(corpus: ModuleType) -> None:
    library = corpus.standard_library(40)
    assert library.names == list(corpus.PACKAGES)
    for part, most in ((library.train, 40), (library.validation, 13)):
        counts = [part.labels.count(label) for label in range(len(library.names))]
        assert min(counts) > 0
        assert max(counts) == most
    assert not set(library.train.texts) & set(library.validation.texts)
    assert all(text.count("\n") == corpus.LINES_PER_FRAGMENT - 1 for text in library.train.texts)


def test_the_same_seed_draws_the_same_fragments(corpus: ModuleType) -> None:
    assert corpus.standard_library(10, seed=1) == corpus.standard_library(10, seed=1)
    assert corpus.standard_library(10, seed=1) != corpus.standard_library(10, seed=2)


def test_rows_of_a_csv_file_are_split_within_each_label(corpus: ModuleType, reviews: Path) -> None:
    split = corpus.from_csv(reviews)
    assert split.names == ["blame", "praise"]
    assert [split.train.labels.count(label) for label in (0, 1)] == [45, 45]
    assert [split.validation.labels.count(label) for label in (0, 1)] == [15, 15]
    assert not set(split.train.texts) & set(split.validation.texts)


def test_the_table_is_readable_without_rich(
    classifier: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    comparison = import_module("helpers.comparison")
    comparison.print_table(("", "eager", "GraphCapture"), [("steps", "150", "149")])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["eager", "GraphCapture"],
        ["steps", "150", "149"],
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("text,kind\nfine,a\n", "no column label in the first row"),
        ("text,label\n" + "fine,a\n" * 9, r"9 rows with 1 label\(s\)"),
        ("text,label\nfine,a\npoor,b\n", r"2 rows with 2 label\(s\)"),
    ],
)
def test_an_unusable_csv_file_is_refused(
    corpus: ModuleType, tmp_path: Path, content: str, sentence: str
) -> None:
    path = tmp_path / "data.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        corpus.from_csv(path)
