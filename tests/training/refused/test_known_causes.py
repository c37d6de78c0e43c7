"""Host reads inside of torch are told with what their caller writes in place of the call."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.training.fits import Net, prepare


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


CASES = [
    (Masked, "is_causal=True or False", Told),
    (Averaged, "give the BatchNorm a momentum", Moving),
]


@pytest.mark.parametrize(("refused", "remedy", "mended"), CASES)
def test_the_remedy_is_that_of_the_call_and_it_helps(
    backend: str, tmp_path: Path, refused: type[Net], remedy: str, mended: type[Net]
) -> None:
    options = {"on_failure": "eager"}
    with pytest.warns(UserWarning, match=remedy):
        eager = prepare(backend, tmp_path, True, capture=options, module=refused).run()
    assert eager.statistics.replayed == 0
    assert prepare(backend, tmp_path, True, module=mended).run().statistics.replayed > 0
