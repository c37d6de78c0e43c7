"""Further fits of libraries on Lightning: molecules, recommendation, sound, representations.

As those of ``library_fits.py``, to whose table they belong: each function trains one model of a
library, written as a user of it writes that, on data that it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _quiet(steps: int, device: str) -> dict[str, Any]:
    """Options of a trainer that writes nothing."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {"max_steps": steps, "accelerator": device, "devices": 1, **dict.fromkeys(off, False)}


def _drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------- molecules


def _molecules(count: int) -> list[dict[str, Tensor]]:
    """Methanol, shaken: atomic numbers, positions, an energy and forces."""
    random = np.random.default_rng(0)
    corners = [[0, 0, 0], [1.1, 0, 0], [0, 1.1, 0], [0, 0, 1.1], [1.2, 1.2, 0], [0, 1.2, 1.2]]

    def drawn(*shape: int) -> Tensor:
        return torch.tensor(random.standard_normal(shape), dtype=torch.float32)

    return [
        {
            "numbers": torch.tensor([6, 1, 1, 1, 8, 1]),
            "positions": torch.tensor(corners) + 0.05 * drawn(6, 3),
            "energy": drawn(1),
            "forces": drawn(6, 3),
        }
        for _ in range(count)
    ]


def schnetpack(model: str, device: str, steps: int) -> None:
    from typing import TypeVar

    # Its release 2.1 imports this name, which torch's module has no more
    torch.utils.data.dataloader.T_co = TypeVar("T_co")  # type: ignore[attr-defined]
    import pytorch_lightning as pl
    import schnetpack as spk
    import torchmetrics
    from schnetpack.data.loader import _atoms_collate_fn

    class Task(spk.task.AtomisticTask):  # type: ignore[name-defined, misc]
        def setup(self, stage: str | None = None) -> None:
            """There is no data module whose statistics the transforms would take."""

    def output(name: str, weight: float) -> Any:
        mean = {"MAE": torchmetrics.MeanAbsoluteError()}
        loss = nn.MSELoss()
        return spk.task.ModelOutput(name=name, loss_fn=loss, loss_weight=weight, metrics=mean)

    kind, _, forces = model.partition(" ")
    net = getattr(spk.representation, kind)(
        n_atom_basis=16, n_interactions=2, cutoff_fn=spk.nn.CosineCutoff(5.0),
        radial_basis=spk.nn.GaussianRBF(n_rbf=8, cutoff=5.0),
    )  # fmt: skip
    heads, outputs = [spk.atomistic.Atomwise(n_in=16, output_key="energy")], [output("energy", 0.1)]
    if forces:
        heads.append(spk.atomistic.Forces(energy_key="energy", force_key="forces"))
        outputs.append(output("forces", 0.9))
    potential = spk.model.NeuralNetworkPotential(
        net, input_modules=[spk.atomistic.PairwiseDistances()], output_modules=heads
    )
    first, second = torch.where(~torch.eye(6, dtype=torch.bool))
    data: Any = [
        {
            "_idx": torch.tensor([0]), "_n_atoms": torch.tensor([6]),
            "_atomic_numbers": each["numbers"], "_positions": each["positions"],
            "_cell": torch.zeros(1, 3, 3), "_pbc": torch.zeros(3, dtype=torch.bool),
            "_idx_i": first, "_idx_j": second, "_offsets": torch.zeros(len(first), 3),
            "energy": each["energy"], "forces": each["forces"],
        }
        for each in _molecules(4 * steps)
    ]  # fmt: skip
    task = Task(potential, outputs, optimizer_cls=torch.optim.AdamW, optimizer_args={"lr": 1e-3})
    loader = DataLoader(data, batch_size=4, collate_fn=_atoms_collate_fn)
    pl.Trainer(**_quiet(steps, device)).fit(task, loader)


def mlcolvar(model: str, device: str, steps: int) -> Any:
    import lightning.pytorch as pl
    from mlcolvar import cvs, data
    from mlcolvar.utils.timelagged import create_timelagged_dataset

    x = torch.randn(20 * steps, 8, generator=_drawn())
    states = (x[:, 0] > 0).float()
    net, table = {
        "DeepTDA": (
            lambda: cvs.DeepTDA(
                n_states=2, n_cvs=1, target_centers=[-7.0, 7.0], target_sigmas=[0.2, 0.2],
                layers=[8, 16, 1],
            ),
            lambda: data.DictDataset({"data": x, "labels": states}),
        ),
        "DeepLDA": (
            lambda: cvs.DeepLDA([8, 16, 3], n_states=2),
            lambda: data.DictDataset({"data": x, "labels": states}),
        ),
        "DeepTICA": (
            lambda: cvs.DeepTICA([8, 16, 3], n_cvs=2),
            lambda: create_timelagged_dataset(x, lag_time=2),
        ),
        "AutoEncoder": (
            lambda: cvs.AutoEncoderCV([8, 16, 2]), lambda: data.DictDataset({"data": x})
        ),
        "VAE": (
            lambda: cvs.VariationalAutoEncoderCV(n_cvs=2, encoder_layers=[8, 16]),
            lambda: data.DictDataset({"data": x}),
        ),
    }[model]  # fmt: skip
    module = net()
    parts = data.DictModule(table(), lengths=[0.8, 0.2], batch_size=16)
    pl.Trainer(**_quiet(steps, device)).fit(module, parts)
    return [module.eval().cpu()(x[:4]).detach()]


# ---------------------------------------------------------------------- recommendation and sound


def replay(model: str, device: str, steps: int) -> None:
    import lightning.pytorch as pl
    from replay.data import FeatureHint, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorSchema
    from replay.models.nn import sequential

    items = TensorFeatureInfo(
        "item_id", FeatureType.CATEGORICAL, is_seq=True, feature_hint=FeatureHint.ITEM_ID,
        cardinality=40, padding_value=40, embedding_dim=16,
    )  # fmt: skip
    net = getattr(sequential, model)(
        TensorSchema([items]), block_count=1, head_count=2, hidden_size=16, max_seq_len=12
    )
    count = 16 * steps
    rows = torch.randint(0, 40, (count, 12), generator=_drawn())
    lengths = torch.randint(4, 13, (count, 1), generator=_drawn(1))
    padding = torch.arange(12) >= 12 - lengths
    masked = torch.rand(count, 12, generator=_drawn(2)) > 0.3

    def example(row: Tensor, own: Tensor, mask: Tensor) -> dict[str, Any]:
        features = {"item_id": row}
        if model == "Bert4Rec":
            labels = {"inputs": features, "pad_mask": own, "token_mask": mask}
            return {**labels, "positive_labels": row}
        masks = {"padding_mask": own, "target_padding_mask": own}
        return {"feature_tensor": features, "positive_labels": row.roll(-1), **masks}

    data: Any = [example(*each) for each in zip(rows, padding, masked, strict=True)]
    pl.Trainer(**_quiet(steps, device)).fit(net, DataLoader(data, batch_size=16))


def asteroid(model: str, device: str, steps: int) -> None:
    import pytorch_lightning as pl
    from asteroid import losses, models
    from asteroid.engine.system import System

    options: dict[str, Any] = {
        "ConvTasNet": {"n_blocks": 2, "hid_chan": 16, "skip_chan": 8, "n_repeats": 1},
        "DPRNNTasNet": {"hid_size": 8, "chunk_size": 10, "n_repeats": 1},
    }[model]
    net = getattr(models, model)(2, n_filters=16, bn_chan=8, **options)
    voices = torch.randn(4 * steps, 2, 800, generator=_drawn())
    loader = DataLoader(TensorDataset(voices.sum(1), voices), batch_size=4)
    loss = losses.PITLossWrapper(losses.pairwise_neg_sisdr, pit_from="pw_mtx")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    module = System(net, optimizer, loss, loader, loader)
    module.on_validation_epoch_end = lambda: None  # it would log to a logger, and there is none
    options = {**_quiet(steps, device), "limit_val_batches": 2, "gradient_clip_val": 5.0}
    pl.Trainer(**options).fit(module)


# ---------------------------------------------------------------------- representations


def disent(model: str, device: str, steps: int) -> None:
    import lightning.pytorch as pl
    from disent.frameworks import vae
    from disent.model import AutoEncoder
    from disent.model.ae import DecoderLinear, EncoderLinear

    kind, shape = getattr(vae, model), (1, 8, 8)
    coder = AutoEncoder(
        EncoderLinear(x_shape=shape, z_size=4, z_multiplier=2),
        DecoderLinear(x_shape=shape, z_size=4),
    )
    net = kind(coder, cfg=kind.cfg(optimizer="adam", optimizer_kwargs={"lr": 1e-3}))
    views = {"AdaVae": 2, "TripletVae": 3}.get(model, 1)
    images = torch.rand(16 * steps, views, *shape, generator=_drawn())
    data: Any = [{"x_targ": tuple(image)} for image in images]
    pl.Trainer(**_quiet(steps, device)).fit(net, DataLoader(data, batch_size=16))


MODELS: dict[Callable[[str, str, int], Any], tuple[str, ...]] = {
    schnetpack: ("SchNet", "SchNet forces", "PaiNN forces"),
    mlcolvar: ("DeepTDA", "DeepLDA", "DeepTICA", "AutoEncoder", "VAE"),
    replay: ("SasRec", "Bert4Rec"),
    asteroid: ("ConvTasNet", "DPRNNTasNet"),
    disent: ("Vae", "BetaTcVae", "AdaVae", "TripletVae"),
}
"""Libraries -> their models."""
