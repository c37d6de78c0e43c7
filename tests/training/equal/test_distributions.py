"""``torch.distributions``, whose checks of values become part of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal, kl_divergence

from tests.training.fits import Net, batches, compare, fit_twice, prepare


class Variational(Net):
    """As the variational autoencoders of Lightning's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def loss(self, batch: Any) -> Tensor:
        mean, log_scale = self.encoder(batch["x"]).float().chunk(2, 1)
        posterior = Normal(mean, log_scale.exp())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        latent = posterior.rsample()
        likelihood = Normal(self.decoder(latent).float(), 1.0).log_prob(batch["x"]).mean()
        return kl_divergence(posterior, prior).mean() - likelihood + super().loss(batch)


class Policy(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        return Categorical(logits=self.net(states).float()).log_prob(actions)


class Acting(Net):
    """Code of a submodule makes the distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(self.net)

    def loss(self, batch: Any) -> Tensor:
        return -self.policy(batch["x"], batch["y"]).mean()


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch does by default, until something is compiled in the process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("module", [Variational, Acting])
def test_distributions_in_graphs(
    backend: str, tmp_path: Path, module: type[Net], scope: str
) -> None:
    options: dict[str, Any] = {"module": module, "capture": {"scope": scope}}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured)
    signatures = [record.signature for record in captured.statistics.graphs]
    assert scope == "step" or module is Variational or "args[1] i64[8]" in signatures[0]


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_values_that_are_not_valid_end_a_fit_as_they_do_without_graphs(
    backend: str, tmp_path: Path, scope: str
) -> None:
    data = batches(10)
    data[8]["x"][0, 0] = torch.nan
    for captured in (False, True):
        capture = {"scope": scope}
        fit = prepare(
            backend, tmp_path, captured, module=Acting, data=lambda: data, capture=capture
        )
        with pytest.raises(ValueError, match="constraint"):
            fit.run()
        assert fit.trainer.global_step == 8
    assert fit.statistics.replayed > 0
