"""Conditions that a step reads only to raise an error: the graph computes them.

PYTEST_DONT_REWRITE: the assertions in it are those of programs.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal
from torch.nn import functional

from tests.programs.table import Promises, stepping, table
from tests.training.fits import Net


class Asserting(Net):
    """Without draws: every value that is read is one of the device."""

    limit = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Identity()


def an_assertion(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As flows and survival models assert of their times."""
    loss = self.loss(batch)
    assert (loss >= 0.0).all()
    return loss


def a_raise(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As trainers and callbacks look for losses that are no numbers."""
    loss: Tensor = self.loss(batch)
    if torch.isnan(loss).any() or not torch.isfinite(loss).all():
        message = f"a loss of {loss:.2f} in batch of {tuple(batch['x'].shape)}"
        raise ValueError(message)
    self.log("loss", loss)
    return loss


def both_bounds(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch)
    assert 0 <= loss.detach() <= self.limit, f"{loss} is not below {self.limit}"
    torch._assert((batch["y"] < 3).all(), "an unknown class")
    return loss


def checked(loss: Tensor) -> Tensor:
    """Return a loss, or raise."""
    if torch.isfinite(loss):
        return loss
    raise ValueError("no number")


def by_a_function(self: Any, batch: Any, batch_idx: int) -> Tensor:
    for _ in range(2):
        loss = checked(self.loss(batch))
    try:
        return checked(loss)
    finally:
        checked(loss)


def caught(self: Any, batch: Any, batch_idx: int) -> Tensor:
    try:
        return checked(self.loss(batch)) * 1.0
    except ValueError:
        return self.net(batch["x"]).sum() * 0.0


def in_a_loop(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """More of them than a graph has room for."""
    loss: Tensor = self.loss(batch)
    for _ in range(300):
        assert torch.isfinite(loss), loss
    return loss


def as_numbers(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As code compares what ``item()`` gives."""
    loss: Tensor = self.loss(batch)
    assert loss.item() < self.limit, f"{loss} is too much"
    if math.isnan(loss.item()) or abs(loss.item() - 1) > 1e9:
        raise ValueError("no number")
    largest = batch["y"].max().item()
    if largest >= 3:
        raise IndexError(largest)
    assert 0.0 <= loss.item() <= self.limit
    assert int(batch["y"].max().item()) < 3  # of the host
    return loss


def as_plain_truths(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As code writes it that makes a bool of a tensor first."""
    loss: Tensor = self.loss(batch)
    finite = loss.isfinite().all().item()
    assert bool((batch["x"] < 1e9).all())
    assert not torch.isnan(loss).sum().item(), "no number"
    if not finite:
        raise ValueError(f"{loss}")
    if not is_known(batch["y"]):
        raise IndexError
    if torch.equal(loss, loss[None].expand(4)):  # of another shape
        raise ValueError("as if it was broadcast")
    if not torch.equal(loss, loss + 0.0) or not torch.allclose(loss, loss.abs(), atol=1e-3):
        raise ValueError("it differs")
    return loss


def is_known(labels: Tensor) -> bool:
    return bool((labels < 3).all())


def of_a_library(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As torch validates variances, and the parameters and values of distributions."""
    out = self.net(batch["x"]).float()
    variance = functional.softplus(out)
    loss = functional.gaussian_nll_loss(out, torch.zeros_like(out), variance)
    return loss - Normal(out, variance, validate_args=True).log_prob(out.detach() + 1.0).mean()


def draws_with_deviations(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As actors sample: torch looks at deviations on the host."""
    out = self.net(batch["x"]).float()
    scale = functional.softplus(out)
    actions = Normal(out, scale).sample()
    with torch.no_grad():
        noise = torch.normal(0.5, scale[:, :1]) + torch.normal(out[:1], scale)
        noise += torch.normal(scale, 0.25)
    return ((out - actions) * noise).square().mean()


def solves(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As whitening and multivariate distributions do: torch looks whether there is a result."""
    out = self.net(batch["x"]).float()
    covariance = out.t() @ out + 0.1 * torch.eye(out.shape[1], device=out.device)
    factor = torch.linalg.cholesky(covariance, upper=True)
    whitened = out @ torch.linalg.inv(factor) + torch.linalg.solve(covariance, out, left=False)
    normal = MultivariateNormal(out.mean(0), covariance.expand(2, -1, -1))
    return whitened.square().mean() - normal.log_prob(out[:2].detach()).mean()


def tells_first(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As neuralforecast shows where a loss is no number."""
    loss: Tensor = self.loss(batch)
    if torch.isnan(loss):
        print("limit", self.limit)
        print("x", torch.isnan(batch["x"]).sum())
        raise ValueError("Loss is NaN, training stopped.")
    return loss


def warns(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch)
    if torch.isinf(loss):
        warnings.warn(f"Training loss is infinite ({loss.item()}).", stacklevel=1)
    if not torch.isfinite(loss):
        warnings.warn("not finite", stacklevel=1)
        warnings.warn("or much", stacklevel=1)
    self.log("loss", loss)
    return loss


def within(outputs: Tensor) -> None:
    if not (outputs.abs() < 1e9).all():
        raise ValueError("outside of the support")


def warns_of_an_error(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As scvi-tools looks whether values are in the support of a distribution."""
    outputs = self.net(batch["x"])
    try:
        within(outputs)
    except ValueError:
        warnings.warn("outside", UserWarning, stacklevel=2)
    return functional.cross_entropy(outputs.float(), batch["y"])


def goes_on_otherwise(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch)
    if not torch.isfinite(loss):
        loss = self.net(batch["x"]).sum() * 0.0
    return loss


def chooses_a_loss(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As pytorch-forecasting replaces losses."""
    losses: Tensor = self.loss(batch) * 8
    if not torch.isfinite(losses):
        losses = torch.tensor(1e9, device=losses.device)
        warnings.warn("Loss is not finite. Resetting it to 1e9", stacklevel=1)
    losses = torch.zeros((), device=losses.device) + losses
    self.log("loss", losses)
    return losses


def chooses_values(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Both ways are gone within a fit."""
    loss: Tensor = self.loss(batch)
    for limit in (2.5, 1.0):
        largest = batch["x"].abs().amax()
        if largest > limit:
            factor = torch.full_like(largest, 0.5)
            largest = largest.clamp(max=limit)
        else:
            factor = largest.clone()
        loss = loss * factor + largest
    return loss


def chooses_by_either(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """One condition asks twice, and the next line needs what was chosen."""
    loss: Tensor = self.loss(batch)
    factor, largest = torch.ones_like(loss), batch["x"].abs().amax()
    if largest > 2.5 or is_small(loss.detach()):
        factor = torch.full_like(factor, 0.5)
    loss = loss * factor
    self.log("loss", loss)
    return loss


def chooses_in_a_loop(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """What both ways do next is to go on with the loop."""
    loss: Tensor = self.loss(batch)
    factor = torch.ones_like(loss)
    for values in batch["x"].abs().unbind(1)[:3]:
        if (values > 0.5).any() and values.amax() > 2.0:
            factor = torch.full_like(factor, 0.5)
    return loss * factor


def is_small(loss: Tensor) -> bool:
    return bool(loss < 1.0)


def chooses_a_part(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Behind the other way some parameters would have no gradient."""
    loss: Tensor = self.loss(batch)
    if torch.isnan(loss):
        loss = torch.zeros_like(loss)
    return loss + self.net[0](batch["x"]).sum() * 0.1


def writes_what_was_chosen(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Behind the other way it would write another tensor."""
    outputs = self.net(batch["x"]).detach()
    held = outputs
    if outputs.amax() > 1e9:
        outputs = torch.zeros_like(outputs)
    outputs.mul_(0.5)
    return self.loss(batch) * held.abs().mean()


def more_than_a_raise(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch)
    if torch.isnan(loss):
        self.limit = 0.0
        raise ValueError
    return loss


@contextlib.contextmanager
def skipping() -> Iterator[None]:
    with contextlib.suppress(ValueError):
        yield


class Skipping:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> bool:
        return kind is ValueError


def caught_by_a_context(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch)
    with skipping():
        if torch.isnan(loss):
            raise ValueError
    return loss


def caught_by_an_object(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss(batch)
    with Skipping():
        if torch.isnan(loss):
            raise ValueError
    return loss


def ends_its_epoch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Lightning takes that error for the end of the data."""
    loss: Tensor = self.loss(batch)
    if torch.isnan(loss):
        raise StopIteration
    return loss


class CaughtOutside(Asserting):
    """Skips the updates of batches that fail."""

    skipped = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        if torch.isnan(loss):
            raise ValueError
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().optimizer_step(*args, **kwargs)
        except ValueError:
            self.skipped += 1


class LooksAtGradients(Asserting):
    """In the backward pass, whose code a GPU runs in a thread of autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(self.look)

    def look(self, gradient: Tensor) -> None:
        assert torch.isfinite(gradient).all()  # read


class LooksAtParameters(Asserting):
    """Behind its update."""

    def configure_optimizers(self) -> Any:
        class Looking(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = super().step(closure)
                for parameter in self.param_groups[0]["params"]:
                    if not torch.isfinite(parameter).all():  # read
                        raise ValueError("no number")
                return loss

        return Looking(self.parameters(), lr=2**-7)


ROWS = {
    **table(LooksAtGradients, said="cannot"),
    **table(CaughtOutside),
    **table(
        LooksAtParameters,
        replayed=1,
        found=None,
        said="the optimizer step runs eagerly: .*if not torch.isfinite",
    ),
    **stepping(
        Asserting,
        an_assertion,
        a_raise,
        both_bounds,
        by_a_function,
        of_a_library,
        as_plain_truths,
        as_numbers,
        in_a_loop,
        draws_with_deviations,
        solves,
        tells_first,
        warns,
        warns_of_an_error,
        chooses_a_loss,
        chooses_values,
        chooses_by_either,
        also="cut; accumulated; verified; bf16; modules, verified",
        graphs=range(1, 3),
    ),
    # The host waits for the answer.
    **stepping(
        Asserting,
        *(caught, caught_by_a_context, caught_by_an_object),
        *(ends_its_epoch, more_than_a_raise, goes_on_otherwise),
        *(chooses_a_part, writes_what_was_chosen, chooses_in_a_loop),
        below=None,
    ),
}


class TestAssertions(Promises):
    rows = ROWS
