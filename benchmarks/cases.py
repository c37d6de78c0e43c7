"""What the whole fits train: models with random weights, batches, and settings to try by hand."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from step import convnext
from torch import Tensor, nn
from workloads import Gpt2, Llama, MixtureOfExperts, Mlp, Transformer

from lightning_graphs import PadTo, choose_lengths

Batch = tuple[Tensor, ...]
Settings = Mapping[str, Any]
NEVER_CAPTURE = {"min_repeats": 10**6}
SMALLER = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
CAPTURE_AT_ONCE = {"warmup_steps": 1, "min_repeats": 1, "verify": False}
MANY_SHAPES, FEW_LAUNCHES = 0.8, 0.2
"""What whole fits may take of the eager ones' time, with graphs for the commonest shapes only, and
where validation, too, costs what its kernels cost."""


@dataclass(frozen=True)
class Case:
    """What one row trains.

    Attributes:
        net: Returns its loss.
        batches: The batch of every step.
        by_hand: The settings that the defaults are compared with.
        validation: Batches to validate on.
        repeats: How many more fits are timed, where one is short.
        to_eager: What a fit may take of the eager one's time, where it is to gain much.
        alone: Whether nothing else may run on the GPU.
    """

    net: nn.Module
    batches: Sequence[Batch]
    by_hand: Sequence[Settings]
    validation: Sequence[Batch] = ()
    repeats: int = 1
    to_eager: float | None = None
    alone: bool = False


def texts(size: int, lengths: Sequence[int], vocabulary: int) -> list[Batch]:
    """Random tokens, a batch for each length."""
    return [(torch.randint(0, vocabulary, (size, length)),) for length in lengths]


def llama(lengths: Sequence[int], by_hand: Sequence[Settings], tiny: bool) -> Case:
    if tiny:
        return Case(Llama(1, 16, 64), texts(2, lengths, 64), by_hand)
    return Case(Llama(10, 256, 2048), texts(8, lengths, 2048), by_hand)


def some_lengths(count: int, tiny: bool) -> Case:
    """Lengths in any order, as the texts come that a collator pads to multiples of 8 or 4.

    None is above 256: beyond, flash attention adds parts of a gradient in any order, and replays,
    which leave no time between kernels, equal neither eager steps nor each other to the last bit.
    """
    count, steps = (min(count, 3), 15) if tiny else (count, 400)
    multiple = 8 if count < 30 else 4
    lengths = [multiple * (i % count + (2 if tiny else 4)) for i in range(steps)]
    random.Random(0).shuffle(lengths)
    early = {"max_graphs": count + 3, "min_repeats": 1}
    case = llama(lengths, (early, {**early, "verify": False}), tiny)
    return replace(case, to_eager=None if count < 30 else MANY_SHAPES)


def padded_to_a_few_lengths(tiny: bool) -> Case:
    """The batches of 60 lengths, as ``PadTo`` pads them."""
    case = some_lengths(60, tiny)
    lengths = choose_lengths([tokens.shape[1] for (tokens,) in case.batches], 2 if tiny else 8)
    pad = PadTo(lengths, {0: 0})
    return replace(case, batches=[pad.pad(batch) for batch in case.batches])


def new_length_at_each_step(tiny: bool) -> Case:
    lengths = random.Random(0).sample(range(9, 21) if tiny else range(33, 283), 12 if tiny else 250)
    return llama(lengths, (NEVER_CAPTURE,), tiny)


def mixture_of_experts(tiny: bool) -> Case:
    by_hand = ({"scope": "modules"}, {"scope": "modules", "modules": ["Attention"]})
    if tiny:
        return Case(MixtureOfExperts(1, 16, 2, 64), texts(2, [8] * 12, 64), by_hand)
    return Case(MixtureOfExperts(6, 256, 8, 2048), texts(8, [128] * 150, 2048), by_hand)


def gpt2(steps: int, by_hand: Sequence[Settings], tiny: bool) -> Case:
    if tiny:
        return Case(Gpt2(1, 64, 64), texts(2, [8] * min(steps, 25), 64), by_hand)
    return Case(Gpt2(12, 384, 8192), texts(4, [256] * steps, 8192), by_hand)


def gpt2_350m(tiny: bool) -> Case:
    """A step whose kernels take longer than their launches: there is little to gain."""
    by_hand = ({"verify": False},)
    if tiny:
        return gpt2(12, by_hand, tiny)
    net, batches = Gpt2(24, 1024, 50257), texts(12, [1024] * 40, 50257)
    return Case(net, batches, by_hand, alone=True)


def fifteen_steps(tiny: bool) -> Case:
    case = gpt2(15, ({"verify": False}, CAPTURE_AT_ONCE), tiny)
    return replace(case, repeats=2 if tiny else 5)


def validation_every_20_steps(tiny: bool) -> Case:
    case = gpt2(300, ({"verify": False}, {"scope": "modules"}), tiny)
    return replace(case, validation=case.batches[:4], repeats=1 if tiny else 2)


def convnext_with_validation(tiny: bool) -> Case:
    """67 batches of validation after every 20 of 120 steps, all of which wait for launches."""
    if tiny:
        net: nn.Module = Mlp(1, 8)
        batches = [(torch.randn(2, 8), torch.randint(0, 10, (2,))) for _ in range(24)]
        return Case(net, batches, (CAPTURE_AT_ONCE,), validation=batches)
    net, batch = convnext()
    batches = [batch() for _ in range(67)]
    steps = [batches[i % len(batches)] for i in range(120)]
    by_hand = ({"verify": False}, CAPTURE_AT_ONCE)
    return Case(net, steps, by_hand, validation=batches, to_eager=FEW_LAUNCHES)


def bert_with_a_padding_collator(tiny: bool) -> Case:
    """The texts of the demo, each batch padded to the multiple of 8 that its longest one needs."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from finetune_classifier import make_model, small_or_base, tokenizer_of
    from helpers.stdlib_corpus import standard_library
    from transformers import DataCollatorWithPadding

    corpus = standard_library(3 if tiny else 200)
    config = small_or_base(gpu=not tiny) | (SMALLER if tiny else {})
    tokenizer = tokenizer_of(corpus.train.texts, config["vocab_size"])
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    items = [
        {**tokenizer(text, truncation=True, max_length=32 if tiny else 512), "label": label}
        for text, label in zip(corpus.train.texts, corpus.train.labels, strict=True)
    ]
    names, size = ("input_ids", "attention_mask", "labels"), 2 if tiny else 16
    batches: list[Batch] = []
    for epoch in range(1 if tiny else 2):
        random.Random(epoch).shuffle(items)
        for start in range(0, len(items), size):
            padded = collate(items[start : start + size])
            batches.append(tuple(padded[name] for name in names))
    net = Transformer(make_model(None, len(corpus.names), config), names)
    early = {"max_graphs": 32, "min_repeats": 1}
    return Case(net, batches, (early, {**early, "verify": False}), to_eager=MANY_SHAPES)


ROWS: dict[str, Callable[[bool], Case]] = {  # the longest first, last what waits for the others
    "60 lengths": lambda tiny: some_lengths(60, tiny),
    "60 lengths padded to 8": padded_to_a_few_lengths,
    "new length at each step": new_length_at_each_step,
    "BERT with a padding collator": bert_with_a_padding_collator,
    "13 lengths": lambda tiny: some_lengths(13, tiny),
    "mixture of experts": mixture_of_experts,
    "validation every 20 steps": validation_every_20_steps,
    "ConvNeXt with validation": convnext_with_validation,
    "15 steps": fifteen_steps,
    "GPT-2 350M": gpt2_350m,
}
