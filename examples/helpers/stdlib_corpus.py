"""Labelled text for the examples: Python's standard library, or a CSV file of one's own.

The fragments of the standard library are code that every machine with Python has. The task is to
tell from a dozen lines which package they come from.
"""

from __future__ import annotations

import csv
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
)
"""Packages that Python 3.10 to 3.13 have, each with at least five files."""

LINES_PER_FRAGMENT = 12
VALIDATION_EVERY = 4
"""One file of so many, or one row of so many in a CSV file, is for validation."""


@dataclass(frozen=True)
class Examples:
    """Texts with their labels.

    Attributes:
        texts: The texts.
        labels: Index into :attr:`Corpus.names` for each text.
    """

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Corpus:
    """Labelled text, split for training and validation.

    Attributes:
        names: Name of each label.
        train: What is trained on.
        validation: What accuracy is measured on; no file of it is trained on.
    """

    names: list[str]
    train: Examples
    validation: Examples


def standard_library(per_package: int, seed: int = 0) -> Corpus:
    """Code fragments of the standard library, labelled with their package, split by file.

    Args:
        per_package: Most fragments of one package to train on; a third as many validate.
        seed: Decides which fragments are taken where there are more.

    Raises:
        FileNotFoundError: this Python has no source files of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: list[tuple[str, int]] = []
    validation: list[tuple[str, int]] = []
    for label, package in enumerate(PACKAGES):
        files = _source_files(root / package)
        if len(files) < VALIDATION_EVERY:
            raise FileNotFoundError(
                f"{root / package} has {len(files)} source files; use --data with a CSV file"
            )
        held_out = files[2::VALIDATION_EVERY]
        kept = [file for file in files if file not in held_out]
        draw = random.Random(f"{seed} {package}")
        train += [(text, label) for text in _fragments(kept, per_package, draw)]
        validation += [(text, label) for text in _fragments(held_out, per_package // 3, draw)]
    return Corpus(list(PACKAGES), _unzip(train), _unzip(validation))


def top_level_blocks(most: int, most_lines: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Functions, classes and the like of the standard library.

    Args:
        most: Most blocks to train on; a quarter as many validate, from other files.
        most_lines: Lines of a block at most.
        seed: Decides which blocks are taken where there are more.

    Returns:
        Texts to train on, and texts to validate on.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py"))
    files += [file for package in PACKAGES for file in _source_files(root / package)]
    held_out = files[::VALIDATION_EVERY]
    draw = random.Random(seed)

    def drawn(part: list[Path], most: int) -> list[str]:
        blocks = [block for file in part for block in _blocks(file, most_lines)]
        return draw.sample(blocks, min(most, len(blocks)))

    kept = [file for file in files if file not in held_out]
    return drawn(kept, most), drawn(held_out, most // VALIDATION_EVERY)


def from_csv(path: Path) -> Corpus:
    """The corpus of a CSV file with the columns ``text`` and ``label``.

    Args:
        path: The file, UTF-8, with a header row.

    Raises:
        ValueError: a column is missing, or there are too few rows or labels to train on.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = {"text", "label"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))} in the first row")
        rows = [(row["text"], row["label"]) for row in reader]
    names = sorted({label for _, label in rows})
    if len(names) < 2 or len(rows) < 2 * VALIDATION_EVERY:
        raise ValueError(
            f"{path}: {len(rows)} rows with {len(names)} label(s); at least "
            f"{2 * VALIDATION_EVERY} rows with two labels are needed"
        )
    # Files are often sorted by label, so rows are taken out evenly within each label.
    train: list[tuple[str, int]] = []
    validation: list[tuple[str, int]] = []
    for index, name in enumerate(names):
        texts = [(text, index) for text, label in rows if label == name]
        validation += texts[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
        del texts[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
        train += texts
    return Corpus(names, _unzip(train), _unzip(validation))


def _source_files(package: Path) -> list[Path]:
    """Its source files, largest first, without its tests."""
    files = [
        file
        for file in package.rglob("*.py")
        if not {"test", "tests"} & set(file.relative_to(package).parts)
    ]
    return sorted(files, key=lambda file: (-file.stat().st_size, file))


def _fragments(files: list[Path], most: int, draw: random.Random) -> list[str]:
    fragments = [fragment for file in files for fragment in _split(file)]
    return draw.sample(fragments, min(most, len(fragments)))


def _split(file: Path) -> Iterator[str]:
    """Consecutive runs of lines that are not blank."""
    source = file.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in source.splitlines() if line.strip()]
    for start in range(0, len(lines) - LINES_PER_FRAGMENT + 1, LINES_PER_FRAGMENT):
        yield "\n".join(lines[start : start + LINES_PER_FRAGMENT])


def _blocks(file: Path, most_lines: int) -> Iterator[str]:
    """What two blank lines separate, as is the habit between top-level definitions."""
    source = file.read_text(encoding="utf-8", errors="replace")
    for block in source.split("\n\n\n"):
        if block.strip() and block.strip("\n").count("\n") < most_lines:
            yield block.strip("\n")


def _unzip(pairs: list[tuple[str, int]]) -> Examples:
    return Examples([text for text, _ in pairs], [label for _, label in pairs])
