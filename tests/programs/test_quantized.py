"""Training in 8 bits: scales from largest values, histories of them, cached and quantized weights.

The patterns of torchao, TransformerEngine and bitsandbytes in a few lines each, so that no test
needs these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_graphs.regions.optimizer import capture_obstacle
from lightning_graphs.watch.user_code import obstacle_in
from tests.programs.table import Promises, table
from tests.training.fits import Net

FLOAT8 = torch.float8_e4m3fn
aten = torch.ops.aten


def scale_for(values: Tensor, dtype: torch.dtype, *, rows: bool = False) -> Tensor:
    """The power of two above the largest value, of each row or of all, over that of a type."""
    largest = values.detach().abs().amax(1, keepdim=True) if rows else values.detach().abs().amax()
    limit = 127 if dtype is torch.int8 else torch.finfo(dtype).max
    return torch.exp2(torch.ceil(torch.log2(largest.float().clamp(min=1e-12) / limit)))


def coded(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values over a scale, in 8 bits."""
    scaled = values.detach().float() / scale
    return scaled.round().clamp(-127, 127).to(dtype) if dtype is torch.int8 else scaled.to(dtype)


class Quantized(Tensor):
    """A tensor whose values are in two others: codes of 8 bits, and their scale.

    Operators compute with its values; one that writes it rounds what it has written.
    """

    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        kind = {"dtype": torch.float32, "device": codes.device}
        return Tensor._make_wrapper_subclass(cls, codes.shape, **kind)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype = FLOAT8, *, rows: bool = False) -> Quantized:
        scale = scale_for(values, dtype, rows=rows)
        return cls(coded(values, scale, dtype), scale)

    def values(self) -> Tensor:
        return self.codes.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Quantized:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0]
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            device = {"device": kwargs["device"]} if kwargs.get("device") else {}
            return cls(func(first.codes, **device), func(first.scale, **device))

        def plain(value: Any) -> Any:
            return value.values() if isinstance(value, cls) else value

        if not func._schema.is_mutable or not isinstance(first, cls):
            return func(*tree_map(plain, args), **tree_map(plain, kwargs))
        written = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        scale = scale_for(written, first.codes.dtype, rows=first.scale.dim() > 0)
        first.codes.copy_(coded(written, scale, first.codes.dtype))
        first.scale.copy_(scale)
        return first


class Multiply(torch.autograd.Function):
    """``x @ weight.T``, all three products of 8-bit numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(Quantized.of(x), Quantized.of(weight).t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        coded = Quantized.of(gradient, torch.float8_e5m2)
        return torch.mm(coded, Quantized.of(weight)), torch.mm(coded.t(), Quantized.of(x))


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Multiply.apply(x, self.weight) + self.bias  # type: ignore[no-any-return]


class Layered(Net):
    """The network of these programs, with another layer in it."""

    def __init__(self, layer: nn.Module, optimizers: Any = None) -> None:
        super().__init__(*[optimizers] * (optimizers is not None))
        self.layer = layer

    def loss(self, batch: Any) -> Tensor:
        return super().loss({**batch, "x": self.layer(batch["x"].float()).relu()})


def dynamic() -> Net:
    """Scales of the present values, with activations as a tensor subclass: torchao."""
    return Layered(Float8Linear(8, 8))


# ---------------------------------------------------------------------- histories


class Delayed(nn.Linear):
    """Scales of former steps, from a history of largest values: TransformerEngine."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(8, 8)
        self.register_buffer("history", torch.zeros(length, 2))
        self.register_buffer("scales", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        rounded = [self.rounded(v, s) for v, s in zip((x, self.weight), self.scales, strict=True)]
        result = nn.functional.linear(*rounded, self.bias)
        if self.training:
            found = [value.detach().abs().amax().float() for value in (x, self.weight)]
            with torch.no_grad():
                self.note(torch.stack(found))
                largest = self.history.amax(0).clamp(min=1e-12)
                self.scales.copy_(torch.exp2(torch.floor(torch.log2(448 / largest))))
        return result

    def rounded(self, values: Tensor, scale: Tensor) -> Tensor:
        codes = (values.detach().float() * scale).clamp(-448, 448).to(FLOAT8)
        return values + (codes.float() / scale - values).detach()

    def note(self, largest: Tensor) -> None:
        self.history.copy_(self.history.roll(1, 0))
        self.history[0] = largest


class BoundAnew(Delayed):
    """The buffer is another tensor in each step."""

    def note(self, largest: Tensor) -> None:
        self.history = torch.cat([largest[None], self.history[:-1]])


class OnDevice(Delayed):
    """The place in the ring is counted on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def note(self, largest: Tensor) -> None:
        self.history.index_copy_(0, self.place[None], largest[None])
        self.place.add_(1).remainder_(len(self.history))


class InPython(Delayed):
    """The place in the ring is counted in Python, and is an index."""

    place = 0

    def note(self, largest: Tensor) -> None:
        self.history[self.place] = largest
        self.place = (self.place + 1) % len(self.history)


def delayed() -> Net:
    return Layered(Delayed())


def bound_anew() -> Net:
    return Layered(BoundAnew())


def on_device() -> Net:
    return Layered(OnDevice())


def in_python() -> Net:
    return Layered(InPython())


# ---------------------------------------------------------------------- cached weights


class Cached(nn.Linear):
    """The weight is cast in the first step of an accumulation window, and used in all of it."""

    is_first = True

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("codes", torch.zeros(8, 8, dtype=FLOAT8))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.cast()
        values = self.codes.float() * self.scale
        return nn.functional.linear(x, self.weight + (values - self.weight).detach(), self.bias)

    def cast(self) -> None:
        self.scale.copy_(scale_for(self.weight, FLOAT8))
        self.codes.copy_(coded(self.weight, self.scale, FLOAT8))


class CachedAnew(Cached):
    """... in a new tensor each time."""

    def cast(self) -> None:
        self.scale = scale_for(self.weight, FLOAT8)
        self.codes = coded(self.weight, self.scale, FLOAT8)


class InWindows(Layered):
    """The step says which batch is the first of a window."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.layer.is_first = batch_idx % 2 == 0
        return super().training_step(batch, batch_idx)


def cached() -> Net:
    return InWindows(Cached())


def cached_anew() -> Net:
    return InWindows(CachedAnew())


# ---------------------------------------------------------------------- weights and state


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum has 8 bits where it is a matrix."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), {"lr": 2**-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                zeros = torch.zeros(parameter.shape, device=parameter.device)
                state["momentum"] = Quantized.of(zeros) if parameter.dim() > 1 else zeros
            moved = state["momentum"] * 0.5 + parameter.grad
            state["momentum"].copy_(moved)
            parameter.add_(moved, alpha=-self.param_groups[0]["lr"])
        return loss


def state_of_8_bits() -> Net:
    return Layered(Float8Linear(8, 8), Momentum)


class WeightOnly(torch.autograd.Function):
    """``x @ weight.T`` of a quantized weight, whose gradient is plain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.values().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.values(), gradient.T @ x


class Int8Linear(nn.Linear):
    """Its weight is a tensor subclass: 8-bit numbers, with a scale for each row."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__(8, 8)
        quantized = Quantized.of(self.weight, torch.int8, rows=True)
        self.weight = nn.Parameter(quantized, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return WeightOnly.apply(x, self.weight) + self.bias  # type: ignore[no-any-return]


class LowRank(Int8Linear):
    """A small trained matrix next to a quantized one that is frozen: QLoRA."""

    def __init__(self) -> None:
        super().__init__(trained=False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.values(), self.bias) + self.b(self.a(x))  # type: ignore[attr-defined]


def trained_in_8_bits() -> Net:
    return Layered(Int8Linear(), Momentum)


def low_rank() -> Net:
    return Layered(LowRank())


class Observer(nn.Module):
    """Moving averages of what it sees, and rounding by these: torch's module in quantized models
    that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("observes", torch.ones(1, dtype=torch.int64))
        self.register_buffer("rounds", torch.ones(1, dtype=torch.int64))
        self.register_buffer("least", torch.tensor(float("inf")))
        self.register_buffer("most", torch.tensor(float("-inf")))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        state = self.observes, self.rounds, self.least, self.most, self.scale, self.zero
        return torch.fused_moving_avg_obs_fake_quant(x.float(), *state, 0.25, 0, 255, 0)  # type: ignore[no-any-return]


class Observed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.of_input, self.of_weight = Observer(), Observer()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.of_input(x), self.of_weight(self.weight), self.bias)


def observed() -> Net:
    return Layered(Observed())


_MANY = "unverified; verified; accumulated"

ROWS = {
    **table(trained_in_8_bits, state_of_8_bits, also=_MANY, resumes=False),
    **table(dynamic, also=f"{_MANY}; gradients; cut, accumulated"),
    **table(delayed, on_device, also=f"{_MANY}; bf16"),
    **table(bound_anew, also="verified; accumulated"),
    # A graph for each way; the doctor has seen too few steps to know that ways come back.
    **table(cached, found=None, also="accumulated; cut, accumulated; verified"),
    **table(cached_anew, found=None, also="accumulated; verified"),
    **table(low_rank, also=f"{_MANY}; bf16", resumes=False),
    **table(observed, also="accumulated; verified"),
    **table(in_python, said=None, below=None, found=None),
}


class TestQuantized(Promises):
    """Programs that compute with, or train, numbers of 8 bits."""

    rows = ROWS


class Hidden(Tensor):
    """A subclass that does not say where its values are."""

    def __new__(cls, values: Tensor) -> Hidden:
        return Tensor._make_wrapper_subclass(cls, values.shape)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, values: Tensor) -> None:
        self.values = values  # type: ignore[method-assign,assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is aten.detach.default
        return cls(args[0].values)


def test_values_that_nothing_finds_are_in_no_graph() -> None:
    """No comparison could put them back."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.state[net.weight]["exp_avg"] = Hidden(torch.zeros(2, 2))
    assert "of the class Hidden" in str(capture_obstacle(net, optimizer, "cpu"))
    assert obstacle_in(net) is None
    net.weight = nn.Parameter(Hidden(net.weight.detach()))
    assert "`weight` is of the class Hidden" in str(obstacle_in(net))
