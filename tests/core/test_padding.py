"""Lengths that are chosen, and batches that are padded to them."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_graphs import PadTo, choose_lengths
from lightning_graphs.padding import added_by, next_length

IGNORED = -100


def total(lengths: list[int], counts: dict[int, int], each: float = 0.0) -> float:
    """Positions of all batches once they are padded, and what the lengths cost."""
    padded = sum(next_length(lengths, length) * count for length, count in counts.items())
    return padded + each * len(lengths)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("each", [0.0, 25.0])
def test_no_other_lengths_need_less_padding(seed: int, each: float) -> None:
    numbers = random.Random(seed)
    counts = {numbers.randrange(1, 90): numbers.randrange(1, 40) for _ in range(9)}
    longest = max(counts)
    for most in (1, 2, 3, 4, 12):
        found = choose_lengths(counts, most, each=each)
        assert found == sorted(set(found))
        assert len(found) <= most
        assert found[-1] == longest
        others = (
            sorted({*chosen, longest})
            for number in range(most)
            for chosen in itertools.combinations(sorted(counts), number)
        )
        assert total(found, counts, each) == min(total(other, counts, each) for other in others)


def test_a_thousand_lengths_take_no_time() -> None:
    found = choose_lengths(range(1, 1025), 4)
    assert found == [256, 512, 768, 1024]
    assert added_by(found, dict.fromkeys(range(1, 1025), 1)) == pytest.approx(0.25, abs=0.01)


def test_lengths_of_batches_are_those_of_their_longest_texts() -> None:
    numbers = random.Random(0)
    texts = [numbers.randrange(1, 65) for _ in range(400)]
    longest = [max(numbers.choices(texts, k=16)) for _ in range(4000)]
    by_texts = choose_lengths(texts, 3, batch_size=16)
    by_batches = choose_lengths(longest, 3)
    counts = Counter(longest)
    assert total(by_texts, counts) <= 1.01 * total(by_batches, counts)
    assert total(choose_lengths(texts, 3), counts) > total(by_texts, counts)


def test_lengths_are_multiples() -> None:
    assert choose_lengths([3, 9, 17, 18, 30], 9, multiple=8) == [8, 16, 24, 32]


@pytest.mark.parametrize("given", [{"seen": []}, {"seen": [3], "most": 0}])
def test_lengths_of_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least one length"):
        choose_lengths(**given)


# ------------------------------------------------------------------ batches


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor


def text(length: int) -> dict[str, Tensor]:
    return {"tokens": torch.arange(1, length + 1), "labels": torch.ones(length), "n": torch.ones(3)}


def longest(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As collators do that pad to the longest text of a batch."""
    return {
        key: torch.nn.utils.rnn.pad_sequence([e[key] for e in examples], batch_first=True)
        for key in examples[0]
    }


PAD = PadTo([4, 9], {"tokens": 0, "labels": IGNORED}, longest)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_batches_of_few_lengths(workers: int) -> None:
    texts = [text(n) for n in (2, 3, 4, 4, 5, 1, 12, 2)]
    batches = list(DataLoader(texts, batch_size=2, collate_fn=PAD, num_workers=workers))  # type: ignore[arg-type]
    assert [b["tokens"].shape[1] for b in batches] == [4, 4, 9, 12]
    first, third = batches[0], batches[2]
    assert first["tokens"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert first["labels"].tolist() == [[1, 1, 0, IGNORED], [1, 1, 1, IGNORED]]
    assert (first["tokens"].dtype, first["n"].shape) == (torch.int64, (2, 3))
    assert third["labels"][:, 5:].eq(IGNORED).all()


def test_tuples_and_lists_keep_their_kind() -> None:
    pad = PadTo([4], {0: 7})
    parts = [torch.ones(2, 3), torch.ones(2, 3)]
    for batch in (tuple(parts), parts, Pair(*parts)):
        padded = pad.pad(batch)
        assert type(padded) is type(batch)
        assert [part.shape for part in padded] == [(2, 4), (2, 3)]
        assert padded[0][:, 3].tolist() == [7, 7]


def test_masks_are_padded_in_two_dimensions() -> None:
    rows = PadTo([4, 8], {"mask": False}, collate_fn=torch.utils.data.default_collate)
    both = PadTo([4, 8], {"mask": False}, collate_fn=rows, dim=-1)
    batch = both([{"mask": torch.ones(3, 3, dtype=torch.bool)} for _ in range(2)])
    assert batch["mask"].shape == (2, 4, 4)
    assert batch["mask"].sum() == 18


def test_it_goes_to_other_processes() -> None:
    again = pickle.loads(pickle.dumps(PAD))
    assert (again.lengths, again.values, again.dim) == (PAD.lengths, PAD.values, 1)


def test_what_cannot_be_padded_is_named() -> None:
    with pytest.raises(ValueError, match="positive lengths"):
        PadTo([], {"x": 0})
    with pytest.raises(ValueError, match=r"none under 'y': it has \['x'\]"):
        PadTo([3], {"y": 0}).pad({"x": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="none under 2: it has 1 entries"):
        PadTo([3], {2: 0}).pad([torch.ones(2, 2)])
