"""The doctor and the run agree: where nothing stands in the way, the steps are replayed."""

from __future__ import annotations

import copy
import io
import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from lightning_graphs.report.diagnosis import Diagnosis, Finding
from tests.training.equal.test_distributions import Variational
from tests.training.equal.test_host_half import BRANCHING, SERVED
from tests.training.equal.test_python_draws import spans
from tests.training.examined import examined, line, rows
from tests.training.fits import Net, batches, compare, prepare

WEIGHTS = [1.0, 2.0, 3.0]


class Weighted(Net):
    """The host makes tensors of numbers, and moves some that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = torch.tensor(WEIGHTS, device=self.device)
        ramp = torch.arange(3).float().to(self.device)
        logits = self.net(batch["x"]).float()
        factors = weights * self.table.to(self.device) * ramp
        return nn.functional.cross_entropy(logits * factors, batch["y"])


def _kept(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


class Hooked(Net):
    """Hooks compute in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(_kept)
        self.net[4].bias.register_hook(lambda gradient: gradient * 0.5)


class Adversarial(Net):
    """Two networks, each called several times, with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        nets = (self.generator, self.discriminator)
        return [torch.optim.Adam(net.parameters(), lr=2**-10) for net in nets], []

    def _judged(self, x: Tensor, real: float) -> Tensor:
        scores = self.discriminator(x)
        return nn.functional.softplus(-scores if real else scores).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise = torch.randn_like(batch["x"])
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self._judged(self.generator(noise), 1.0)
        self.log("g_loss", loss)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = self._judged(batch["x"], 1.0) + self._judged(self.generator(noise).detach(), 0.0)
        self.log("d_loss", loss)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)


class Bootstrapped(Net):
    """A target network that follows, bound anew at each step (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for mine, own in zip(self.target.parameters(), self.net.parameters(), strict=True):
            mine.data = 0.75 * mine.data + 0.25 * own.data
        with torch.no_grad():
            wanted = self.target(batch["x"])
        loss = (self.net(batch["x"]) - wanted).square().mean() + self.loss(batch)
        self.log("loss", loss)
        return loss


def _named(*names: Callable[[int, int], int]) -> Callable[[], list[dict[str, Any]]]:
    """Batches with the names of their files, as data sets give them."""
    (number,) = names or (lambda i, j: 8 * i + j,)
    return lambda: [
        {**batch, "name": [f"image{number(i, j)}" for j in range(8)]}
        for i, batch in enumerate(batches(24))
    ]


def _in_tuples() -> list[Any]:
    """Batches as a data set of tuples gives them."""
    return [(batch, tuple(batch["name"])) for batch in _named()()]


class Sorting(Net):
    """The name of the first sample decides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch, names = batch if isinstance(batch, tuple | list) else (batch, batch["name"])
        loss = self.loss(batch)
        if "1" in names[0]:  # read
            loss = loss * 2
        return loss


def _activations(module: Any, batch: Any) -> Tensor:
    return module.net(batch["x"]).argmax()


def _weights(module: Any, batch: Any) -> Tensor:
    return (module.net[0].weight > 0).sum()


def _rounded(module: Any, batch: Any) -> Tensor:
    """The device may round a sum in another way."""
    return batch["x"].sum() > 0


def _changed(module: Any, batch: Any) -> Tensor:
    labels = batch["y"].clone()
    labels[:1] = module.net(batch["x"])[:1, 0].long()
    return labels.max()


class Mixed(Net):
    """Numbers that Python and NumPy draw, and those of the trainer, in arithmetic and branches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = np.random.beta(0.4, 0.4)
        scale = torch.tensor(1 + np.sqrt(random.random()), device=self.device)
        ramp = 0.5 * (1 + math.cos(math.pi * (self.global_step / 100)))
        self.log("share", float(share))
        x = share * batch["x"] + (1 - share) * batch["x"].flip(0)
        loss = self.loss({**batch, "x": x}) * scale.float() * ramp
        return loss * 2 if random.random() < 0.25 else loss


class Deciding(Net):
    """Its way is not the same in all steps: a graph for each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if random.random() < 0.5:
            loss = loss * 2
        if random.choice(["halved", "whole"]) == "halved":
            loss = loss / 2
        for _ in range(random.randint(1, 2)):
            loss = loss + 1
        if self.global_step % 2:
            loss = loss * 3
        return loss


class Cropped(Net):
    """The drawn place is another one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shares", torch.arange(1.0, 101.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.shares[self.place() :].mean()  # used

    def place(self) -> Any:
        return random.randrange(100)


class CroppedByNumPy(Cropped):
    def place(self) -> Any:
        return np.random.randint(0, 50, 2).sum()


class Coins(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        heads = sum(1 for _ in range(8) if random.random() < 0.5)  # used
        return self.loss(batch) * heads


class Spanned(Net):
    """A function of plain values draws, and NumPy writes what it has drawn into an array."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = torch.tensor(spans((len(batch["x"]), 8), 0.5), device=self.device)
        return self.loss({**batch, "x": batch["x"].masked_fill(mask, 0.0)})


class Chosen(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * 2
        random.choice([self.net[0], self.net[4]])  # used
        return loss


class Sampled(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = torch.tensor(random.sample(range(9999), 5000), device=self.device)
        return self.loss(batch) * chosen.float().mean()


class Annealed(Net):
    """Weighs its loss by numbers that counters make, and logs one."""

    table = torch.linspace(1.0, 2.0, 200)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        beta = 0.1 * self.global_step / self.table[self.global_step]
        loss = torch.add(self.loss(batch), beta, alpha=-0.1 * batch_idx) / (1 + batch_idx)
        beta = 0.1 * self.global_step
        self.log("beta", beta)
        tau = 0.996 + 0.004 * (1 - math.cos(math.pi * batch_idx / 100)) / 2
        return loss * tau + beta * self.net[0].weight.square().sum()


class Correlated(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        covariance = self.net[0].weight.T @ self.net[0].weight
        noise = MultivariateNormal(torch.zeros(8), covariance, validate_args=True)  # Dynamo: False
        return self.loss(batch) + noise.rsample().mean()


class Coded(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        codes = nn.functional.one_hot(self.net(batch["x"]).argmax(-1))
        return self.loss(batch) + codes.float().mean()


class Catching(Net):
    """Goes on where a look at its loss fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            return loss * 2 if loss > 1 else loss
        except Exception:
            return loss


class Trying(Net):
    """Goes on where something that a replay lacks is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.scales = itertools.cycle([1.0, 2.0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            return loss * self.scale(loss.detach())
        except Exception:
            return loss


class TryingMetric(Trying):
    def scale(self, loss: Tensor) -> Any:
        return 2 * self.mean(loss)


class TryingGradient(Trying):
    def scale(self, loss: Tensor) -> Any:
        return 1 + self.net[0].weight.grad.abs().mean()


class TryingIterator(Trying):
    def scale(self, loss: Tensor) -> Any:
        return next(self.scales)


class Box:
    """Holds what cannot be stored again."""

    def __init__(self, content: Tensor) -> None:
        self.content = content


class Boxing(Net):
    last: Box | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.last = Box(loss.detach())
        return loss


class Layer(nn.Module):
    """Leaves something behind in its ``leave``."""

    def __init__(self, leave: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.sizes: list[int] = []
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() * self.leave(self)


def _counts(layer: Any) -> float:
    layer.calls += 1
    return 1.0


def _appends(layer: Any) -> float:
    layer.sizes.append(8)
    return 1.0


def _draws(layer: Any) -> float:
    return random.random()


class Layered(Net):
    def __init__(self, leave: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = Layer(leave)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.layer(batch["x"])})


class Averaging(Net):
    """torch reads a number on the host, with no line of the author's in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.norm(batch["x"])})


class Shuffling(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        order = list(range(8))
        random.shuffle(order)
        return self.loss(batch) + self.net(batch["x"])[order].cumsum(0).mean()


class Consuming(Net):
    """Takes something from an iterator that is its own, as of a second loader."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 2.0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * next(self.scales)


class Listing(Net):
    """A tensor is made of the numbers in others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * torch.tensor([loss.detach()], device=self.device).mean()


class ListingLabels(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sums = torch.tensor([batch["y"].sum(), batch["y"][0]], device=self.device)
        return self.loss(batch) * sums.float().mean()


class Copying(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + copy.deepcopy(self.net)(batch["x"]).mean()


class Saving(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        torch.save(loss.detach(), io.BytesIO())
        return loss


SETTINGS = {"scale": 1.0}


class Set(Net):
    """A hook moves a number that the step finds outside of the module."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        SETTINGS["scale"] = 1 + 2.0**-self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * SETTINGS["scale"]


class Tempered(Net):
    """A hook moves a number that the forward reads."""

    temperature = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.temperature = 1 + 2.0**-self.global_step

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float() / math.sqrt(self.temperature)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch["x"]), batch["y"])


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Bound(nn.Linear):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)  # bound
        return self.last.relu()


class Scoring(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * self.mean(loss.detach())


class TemperedLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled(8, 8)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layer.scale = 1 + 2.0**-self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.layer(batch["x"])})


def agreed(root: Path, **options: Any) -> list[Finding]:
    """The doctor's rows with the words of the first refusal of a run: rule, remedy and line.

    On a GPU a refusal has the words of CUDA.
    """
    options = {"data": lambda: batches(20), "validation": 0, **options}
    capture = {"scope": "auto", "on_failure": "eager", **options.pop("capture", {})}
    said = prepare("emulated", root, True, capture=capture, **options).run().statistics.fallbacks
    found = examined("emulated", root, capture=capture, **options).capture.report.diagnosis
    assert found is not None

    def is_said(row: Finding) -> bool:
        words = (row.rule.rstrip("."), row.remedy, f"{__file__}:{row.line} in")
        return all(each in said[0] for each in words)

    return [row for row in found.obstacles if is_said(row)]


@pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
class TestAgreement:
    @pytest.mark.parametrize(
        ("module", "scope", "name"),
        [
            (Tempered, "auto", "self.temperature: "),
            (Set, "auto", "SETTINGS['scale']: "),
            (TemperedLayer, "modules", "self.layer.scale: "),
        ],
    )
    def test_a_number_that_moves_on_has_the_line_that_reads_it(
        self, tmp_path: Path, module: Any, scope: str, name: str
    ) -> None:
        options: dict[str, Any] = {"data": lambda: batches(40), "validation": 0, "module": module}
        capture = {"scope": scope, "on_failure": "eager"}
        fit = prepare("emulated", tmp_path, True, capture=capture, **options).run()
        said = fit.statistics.fallbacks[0]
        found = examined("emulated", tmp_path, capture=capture, **options).capture.report.diagnosis
        assert found is not None
        (row,) = found.obstacles
        assert name in said
        assert f"named at {row.file}:{row.line} in {row.function}" in said

    def test_a_submodule_that_is_refused_has_its_forward_as_line(self, tmp_path: Path) -> None:
        def binds(layer: Any) -> Any:
            layer.scale = layer.linear.bias.exp()
            return layer.scale

        options: dict[str, Any] = {"module": partial(Layered, binds), "validation": 0}
        capture = {"scope": "modules", "on_failure": "eager"}
        fit = prepare("emulated", tmp_path, True, capture=capture, **options).run()
        (said,) = fit.statistics.fallbacks
        where = f"in the code of {__file__}:{Layer.forward.__code__.co_firstlineno} in forward"
        assert f"`scale` is set to another tensor in every call, {where}" in said

    def test_a_submodule_of_torch_is_not_said_to_fail_at_the_fit(self, tmp_path: Path) -> None:
        capture = {"scope": "modules", "on_failure": "eager"}
        fit = prepare("emulated", tmp_path, True, capture=capture, module=Averaging).run()
        (said,) = [one for one in fit.statistics.fallbacks if "`norm` runs eagerly" in one]
        assert "has not computed it yet: aten._local_scalar_dense.default\n  Fix: give" in said

    @pytest.mark.parametrize(
        ("module", "operator"),
        [
            (Correlated, "aten._local_scalar_dense.default"),
            (Coded, "aten._local_scalar_dense.default"),
            (Catching, "aten._local_scalar_dense.default"),
            (Boxing, "self.last"),
            (Shuffling, "random.shuffle"),
            (Consuming, "self.scales"),
            (Listing, "tensor"),
            (ListingLabels, "tensor"),
            (Copying, "aten.set_.source_Storage"),
            (Saving, "torch.save"),
            (Scoring, "aten.mul.Tensor"),
        ],
    )
    def test_what_is_refused_has_the_same_words(
        self, tmp_path: Path, module: Any, operator: str
    ) -> None:
        assert operator in [row.operator for row in agreed(tmp_path, module=module)]

    @pytest.mark.parametrize(
        ("leave", "operator"),
        [
            (_counts, "self.layer.calls"),
            (_appends, "self.layer.sizes"),
            (_draws, "random.random"),
        ],
    )
    def test_so_has_what_is_refused_of_a_submodule(
        self, tmp_path: Path, leave: Callable[[Any], Any], operator: str
    ) -> None:
        capture, module = {"scope": "modules"}, partial(Layered, leave)
        found = agreed(tmp_path, module=module, capture=capture)
        assert [(row.operator, row.function) for row in found] == [(operator, leave.__name__)]

    @pytest.mark.parametrize(
        ("module", "row", "what"),
        [
            (TryingMetric, "aten.mul.Tensor", "the value of metric `mean` is used at"),
            (TryingGradient, ".grad of a parameter is read", ".grad of a parameter is read at"),
            (TryingIterator, "self.scales", "self.scales, an iterator, is read at"),
        ],
    )
    def test_what_an_except_has_caught_stays_refused(
        self, tmp_path: Path, module: Any, row: str, what: str
    ) -> None:
        options: dict[str, Any] = {"module": module, "validation": 0}
        eager = prepare("emulated", tmp_path, False, **options).run()
        capture = {"on_failure": "eager"}
        fit = prepare("emulated", tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed == 0
        assert what in fit.statistics.fallbacks[0]
        assert __file__ in fit.statistics.fallbacks[0]
        found = examined("emulated", tmp_path, **options).capture.report.diagnosis
        assert found is not None
        assert row in [finding.operator for finding in found.obstacles]

    @pytest.mark.parametrize("module", [Listing, ListingLabels])
    def test_numbers_in_a_list_of_tensors_do_not_stand_still(
        self, backend: str, tmp_path: Path, module: Any
    ) -> None:
        options: dict[str, Any] = {"module": module, "data": lambda: batches(20), "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        capture = {"on_failure": "eager"}
        fit = prepare(backend, tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed == 0

    def test_a_tensor_that_a_submodule_binds(self, tmp_path: Path) -> None:
        class Binding(Layered):
            def __init__(self) -> None:
                super().__init__(_counts)
                self.layer = Bound(8, 8)

        (row,) = agreed(tmp_path, module=Binding, capture={"scope": "modules"})
        assert (row.operator, row.line) == ("self.layer.last", line(Bound.forward, "bound"))

    def test_ways_that_draws_and_counters_decide_are_graphs(
        self, backend: str, tmp_path: Path
    ) -> None:
        options: dict[str, Any] = {"module": Deciding, "data": lambda: batches(60), "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = prepare(backend, tmp_path, True, capture={"min_repeats": 0}, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed > 0
        watched = examined(backend, tmp_path, capture={"warmup_steps": 30}, **options)
        compare(eager, watched, replayed=False)
        assert watched.capture.report.diagnosis == Diagnosis(steps=30)

    @pytest.mark.parametrize("module", [Cropped, CroppedByNumPy, Chosen, Coins])
    def test_draws_with_too_many_ways(self, backend: str, tmp_path: Path, module: Any) -> None:
        options: dict[str, Any] = {"module": module, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        capture = {"on_failure": "eager"}
        fit = prepare(backend, tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed == 0
        watched = examined(backend, tmp_path, capture={"warmup_steps": 6}, **options)
        compare(eager, watched, replayed=False)
        step = vars(module).get("training_step", Cropped.training_step)
        assert watched.capture.report.diagnosis is not None
        (row,) = watched.capture.report.diagnosis.obstacles
        assert (row.kind, row.line) == ("python-state", line(step, "used"))

    @pytest.mark.parametrize(
        "module",
        [
            *(Annealed, Weighted, Hooked, Adversarial, Bootstrapped, Mixed, Sampled, Spanned),
            Variational,
        ],
    )
    def test_nothing_stands_in_the_way_of_what_is_replayed(
        self, backend: str, tmp_path: Path, module: Any
    ) -> None:
        options: dict[str, Any] = {"module": module, "data": lambda: batches(20), "validation": 0}
        capture = {"scope": "auto", "on_failure": "eager"}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = prepare(backend, tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed > 0
        watched = examined(backend, tmp_path, capture=capture, **options)
        compare(eager, watched, replayed=False)
        found = watched.capture.report.diagnosis
        assert found is not None
        assert found.obstacles == []
        assert not [f for f in found.findings if f.operator.startswith("self._")]  # Lightning's

    @pytest.mark.parametrize("module", [*SERVED, *BRANCHING], ids=lambda kind: kind.__name__)
    def test_what_a_replay_asks_the_host_is_no_obstacle(
        self, backend: str, tmp_path: Path, module: Any
    ) -> None:
        """Runs capture these modules, see the tests of the host half."""
        options: dict[str, Any] = {"module": module, "data": lambda: batches(6), "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        watched = examined(backend, tmp_path, **options)
        compare(eager, watched, replayed=False)
        assert watched.capture.report.diagnosis is not None
        assert watched.capture.report.diagnosis.obstacles == []

    # The second names move one after the other.
    @pytest.mark.parametrize(
        ("scope", "data"), [("step", _named()), ("modules", _named()), ("step", _named(max))]
    )
    def test_names_in_the_batch_that_no_step_reads(
        self, backend: str, tmp_path: Path, scope: str, data: Any
    ) -> None:
        options: dict[str, Any] = {"data": data, "validation": 0}
        capture = {"scope": scope}
        eager = prepare(backend, tmp_path, False, **options).run()
        fit = prepare(backend, tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed > 0
        watched = examined(backend, tmp_path, capture=capture, **options)
        compare(eager, watched, replayed=False)
        found = watched.capture.report.diagnosis
        assert found is not None
        effects = {f.operator: f.effect for f in found.findings}
        left_out = {'batch["name"][0]': "left out unless it is read"}
        assert effects == (left_out if scope == "step" else {})
        assert found.obstacles == []

    @pytest.mark.filterwarnings("ignore:GraphCapture:UserWarning")
    def test_names_in_the_batch_that_a_step_reads(self, backend: str, tmp_path: Path) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                numbers = [float(name[5:]) for name in batch["name"]]  # read
                return self.loss(batch) * torch.tensor(numbers, device=self.device).mean()

        options: dict[str, Any] = {"module": Reading, "data": _named(), "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        capture = {"on_failure": "eager"}
        fit = prepare(backend, tmp_path, True, capture=capture, **options).run()
        compare(eager, fit, replayed=False)
        assert fit.statistics.replayed == 0
        watched = examined(backend, tmp_path, **options)
        compare(eager, watched, replayed=False)
        assert watched.capture.report.diagnosis is not None
        (row,) = watched.capture.report.diagnosis.obstacles
        assert (row.kind, row.operator) == ("batch-value", 'batch["name"][0]')
        assert (row.line, row.observed) == (line(Reading.training_step, "read"), "likewise 7 more")
        (said,) = fit.statistics.fallbacks
        assert f'batch["name"][0] is read at {row.file}:{row.line} in' in said

    @pytest.mark.parametrize("data", [_named(), _in_tuples])
    def test_a_name_in_the_batch_that_decides(self, tmp_path: Path, data: Any) -> None:
        (row,) = agreed(tmp_path, module=Sorting, data=data)
        assert (row.kind, row.line) == ("batch-value", line(Sorting.training_step, "read"))

    def test_names_that_come_back_are_graphs(self, backend: str, tmp_path: Path) -> None:
        data = _named(lambda i, j: i % 2)
        options: dict[str, Any] = {"module": Sorting, "data": data, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        compare(eager, prepare(backend, tmp_path, True, **options).run())
        watched = examined(backend, tmp_path, **options)
        compare(eager, watched, replayed=False)
        assert watched.capture.report.diagnosis is not None
        assert watched.capture.report.diagnosis.obstacles == []
        row = rows(watched, "batch-value")[0]
        assert row.effect == "further graph"
        assert row.line == line(Sorting.training_step, "read")

    @pytest.mark.parametrize(
        "read",
        [
            lambda n, loss: loss[:n].sum(),  # slice
            lambda n, loss: sum(loss.mean() for _ in range(n)),  # range
            lambda n, loss: loss.sum() * (0.5 * n),  # float
        ],
        ids=["slice", "range", "float"],
    )
    def test_numbers_in_the_batch_that_code_of_c_reads(
        self, backend: str, tmp_path: Path, read: Callable[[Any, Tensor], Any]
    ) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return read(batch["n"], (self.net(batch["x"]) ** 2).mean(-1))

        data = [{**batch, "n": (6, 4, 6, 4, 5)[i % 5]} for i, batch in enumerate(batches(40))]
        options: dict[str, Any] = {"module": Reading, "data": lambda: data, "validation": 0}
        eager = prepare(backend, tmp_path, False, **options).run()
        compare(eager, prepare(backend, tmp_path, True, **options).run())
        watched = examined(backend, tmp_path, capture={"warmup_steps": 4}, **options)
        compare(eager, watched, replayed=False)
        found = watched.capture.report.diagnosis
        assert found is not None
        (row,) = found.findings
        assert (row.kind, row.operator) == ("batch-value", 'batch["n"]')
        assert (row.effect, row.line) == ("further graph", read.__code__.co_firstlineno)

    def test_hooks_find_the_batch_as_the_step_has_left_it(
        self, backend: str, tmp_path: Path
    ) -> None:
        class Leaving(Sorting):
            left: list[Any] = []  # noqa: RUF012

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                batch["first"] = batch["name"].pop(0).upper()
                return self.loss(batch)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.left.append((batch["first"], [(type(n), n) for n in batch["name"]]))

        watched = examined(backend, tmp_path, module=Leaving, data=_named(), validation=0)
        assert watched.capture.report.diagnosis is not None
        names = [(str, f"image{j}") for j in range(1, 8)]
        assert Leaving.left[0] == ("IMAGE0", names)

    def test_a_value_that_never_comes_back(self, backend: str, tmp_path: Path) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.loss(batch) * batch["x"].max().item()  # read

        fit = examined(backend, tmp_path, module=Reading, validation=0)
        (row,) = rows(fit, "changing-shape")
        assert row.effect == "eager step"
        number = line(Reading.training_step, "read")
        assert f"test_doctor_agrees.py:{number} in training_step" in row.observed
        capture = {"scope": "modules"}
        between = examined(backend, tmp_path, module=Reading, capture=capture, validation=0)
        assert rows(between, "changing-shape") == []
        assert [row.effect for row in rows(between, "host-read")] == ["stays eager between them"]

    @pytest.mark.parametrize("capture", [{}, {"backend": "auto"}], ids=["own", "auto"])
    @pytest.mark.parametrize("read", [_activations, _weights, _rounded, _changed])
    def test_what_only_the_device_has_is_one(
        self, backend: str, tmp_path: Path, read: Callable[..., Tensor], capture: dict[str, Any]
    ) -> None:
        class Reading(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                return loss * (1.0 if read(self, batch).item() > -1e9 else 2.0)  # read

        fit = examined(backend, tmp_path, module=Reading, capture=capture, validation=0)
        found = rows(fit, "host-read")
        number = line(Reading.training_step, "read")
        assert [(row.line, row.effect) for row in found] == [(number, "eager step")]
