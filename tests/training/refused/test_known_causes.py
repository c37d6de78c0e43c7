"""Host reads inside of torch are told with what their caller writes in place of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.fits import Net, compare, examined, fit_twice, prepare


class Masked(Net):
    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))
        self.is_causal: bool | None = None

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].view(-1, 4, 1).expand(-1, 4, 8)
        encoded = self.encoder(x, mask=self.mask, is_causal=self.is_causal)
        return super().loss(batch) + encoded.square().mean()


class Told(Masked):
    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.is_causal = True


class Averaged(Net):
    momentum: float | None = None

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm1d(1, momentum=self.momentum)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + self.norm(batch["x"].flatten()[:, None]).square().mean()


class Moving(Averaged):
    momentum = 0.1


class Coded(Net):
    """Codes of what the network has computed."""

    options: dict[str, int] = {}  # noqa: RUF012

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        codes = nn.functional.one_hot(self.net(batch["x"]).argmax(-1), **self.options)
        return super().loss(batch) + codes.float().mean()


class CodedByDefault(Coded):
    options = {"num_classes": -1}  # noqa: RUF012


class CodedInThree(Coded):
    options = {"num_classes": 3}  # noqa: RUF012


class Summed(Net):
    """Adds what a GPU computes to a tensor that stays on the CPU there: PyTorch raises."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        total = self.zero(batch["x"].device)
        total += super().loss(batch).detach()
        return super().loss(batch) + total

    def zero(self, device: torch.device) -> Tensor:
        return torch.tensor(0.0)


class SummedThere(Summed):
    def zero(self, device: torch.device) -> Tensor:
        return torch.tensor(0.0, device=device)


# A whole step waits for what torch reads from a mask; a submodule alone does not.
BY_MODULE = {"scope": "modules", "modules": ["encoder"]}
CASES: list[tuple[type[Net], str, type[Net], dict[str, Any]]] = [
    (Averaged, "give the BatchNorm a momentum", Moving, {}),
    (Masked, "is_causal=True or False", Told, BY_MODULE),
]


# A GPU's own refusal does not tell which of torch's functions has read.
REHEARSED = [
    (Coded, "pass num_classes", CodedInThree),
    (CodedByDefault, "pass num_classes", CodedInThree),
    (Summed, "make the tensor on the device of the module", SummedThere),
]


@pytest.mark.parametrize(("refused", "remedy", "mended"), REHEARSED)
def test_the_remedy_for_what_a_rehearsal_sees(
    tmp_path: Path, refused: type[Net], remedy: str, mended: type[Net]
) -> None:
    test_the_remedy_is_that_of_the_call_and_it_helps(
        "emulated", tmp_path, refused, remedy, mended, {}
    )


@pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly:UserWarning")
@pytest.mark.parametrize(("refused", "remedy", "mended", "scope"), CASES)
def test_the_remedy_is_that_of_the_call_and_it_helps(
    backend: str,
    tmp_path: Path,
    refused: type[Net],
    remedy: str,
    mended: type[Net],
    scope: dict[str, Any],
) -> None:
    options = {"on_failure": "eager", **scope}
    with pytest.warns(UserWarning, match=remedy):
        eager = prepare(backend, tmp_path, True, capture=options, module=refused).run()
    assert eager.statistics.replayed == 0
    found = examined(backend, tmp_path, module=refused, capture=scope).capture.report.diagnosis
    assert found is not None
    assert found.obstacles
    assert all(remedy in row.remedy for row in found.obstacles)
    captured = prepare(backend, tmp_path, True, module=mended, capture=scope)
    assert captured.run().statistics.replayed > 0


def test_a_whole_step_waits_for_what_torch_reads_from_a_mask(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Masked, validation=0)
    compare(eager, captured)
    (record,) = captured.capture.report.graphs
    (line,) = record.waits
    assert f"{__file__}:" in line
    assert "self.encoder(" in line
    assert prepare(backend, tmp_path, True, module=Told).run().capture.report.graphs[0].waits == []


class Padded(Net):
    """An encoder that may make nested tensors of padded batches, in evaluations alone."""

    nested = True

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.embed = nn.Linear(1, 16)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=self.nested)
        self.head = nn.Linear(16, 3)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        mask = torch.arange(8, device=x.device) >= 5 + (x[:, :1] > 0).long()
        hidden = self.encoder(self.embed(x[..., None]), src_key_padding_mask=mask)
        return nn.functional.cross_entropy(self.head(hidden.mean(1)), batch["y"])


class PaddedAlone(Padded):
    nested = False


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_of_an_encoder(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"validation": 6, "capture": {"on_failure": "eager"}}
    with pytest.warns(UserWarning, match="enable_nested_tensor=False"):
        refused = prepare(backend, tmp_path, True, module=Padded, **options).run()
    assert refused.capture.report.evaluation["validation_step"].replayed == 0
    eager, captured = fit_twice(backend, tmp_path, module=PaddedAlone, **options)
    compare(eager, captured)
    assert captured.capture.report.evaluation["validation_step"].replayed > 0
