"""The examples run as they stand, and what they show is what they claim."""

from __future__ import annotations

import csv
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PROGRAMS = ("capture_training_step.py", "finetune_classifier.py")

# Advice on larger programs, which an example silences when it runs by itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning"),
]


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def classifier(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("finetune_classifier")


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("stdlib_corpus")


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


def test_a_captured_fit_learns_what_the_eager_one_learns(
    classifier: ModuleType, reviews: Path
) -> None:
    options = classifier.flags().parse_args(
        ["--data", str(reviews), "--epochs", "4", "--batch-size", "16", "--backend", "emulated"]
    )
    result = classifier.train(options)
    done = result.captured.graphs.statistics

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


def test_the_captured_step_equals_the_eager_one() -> None:
    done = run_example("capture_training_step.py", "--steps", "8", "--backend", "emulated")
    assert done.returncode == 0, done.stderr
    assert "8 of 8 losses equal" in done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_example_explains_its_flags(name: str) -> None:
    done = run_example(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--backend {auto,cuda,emulated}" in done.stdout


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
    comparison = import_module("comparison")
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
