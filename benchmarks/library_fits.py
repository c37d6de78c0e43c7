"""Fits of libraries on Lightning, each as a user of the library writes it, on data that it makes.

One function for each library: it trains one of its models (by name) through the library's own API
for about so many steps on ``cpu`` or ``gpu``, and returns predictions as tensors, where the library
has an API for them. No function knows of graphs. Libraries are imported where they are used.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import science_fits
import torch
from torch import Tensor, nn


def _quiet(steps: int, device: str) -> dict[str, Any]:
    """Options of a trainer that writes nothing."""
    return {
        "max_steps": steps,
        "accelerator": device,
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _series(length: int, seed: int = 0) -> Any:
    """A wave with noise, float32."""
    random = np.random.default_rng(seed)
    wave = np.sin(np.arange(length) * (2 * np.pi / 24)) + 2
    return (wave + 0.1 * random.standard_normal(length)).astype(np.float32)


# ---------------------------------------------------------------------- forecasting


def gluonts(model: str, device: str, steps: int) -> Any:
    import pandas as pd
    from gluonts import torch as models
    from gluonts.dataset.common import ListDataset

    start = pd.Period("2024-01-01 00:00", freq="h")
    entries = [{"start": start, "target": _series(400, seed)} for seed in range(8)]

    options: dict[str, Any] = {} if model in ("SimpleFeedForward", "DLinear") else {"freq": "h"}
    if model == "PatchTST":
        options = {"patch_len": 8, "context_length": 48}
    quiet = _quiet(steps, device)
    quiet |= {"enable_checkpointing": True, "max_epochs": 2, "max_steps": -1}
    estimator = getattr(models, f"{model}Estimator")(
        prediction_length=12,
        batch_size=32,
        num_batches_per_epoch=steps // 2,
        trainer_kwargs=quiet,
        **options,
    )
    data = ListDataset(entries, freq="h")
    forecasts = list(estimator.train(data).predict(data))
    return [torch.tensor(np.asarray(forecast.mean)) for forecast in forecasts]


def pytorch_forecasting(model: str, device: str, steps: int) -> Any:
    import lightning.pytorch as pl
    import pandas as pd
    import pytorch_forecasting as library
    from pytorch_forecasting.metrics import MAE, NormalDistributionLoss, QuantileLoss

    frames = [
        pd.DataFrame({"time": np.arange(200), "value": _series(200, seed), "group": str(seed)})
        for seed in range(8)
    ]
    frame = pd.concat(frames, ignore_index=True)

    known = {"time_varying_known_reals": ["time"]}
    fixed = {"min_encoder_length": 24, "min_prediction_length": 6}
    kind, metric, options = {
        "TFT": (library.TemporalFusionTransformer, QuantileLoss, known),
        "DeepAR": (library.DeepAR, NormalDistributionLoss, fixed),
        "NBeats": (library.NBeats, MAE, fixed),
        "NHiTS": (library.NHiTS, QuantileLoss, fixed),
        "DecoderMLP": (library.DecoderMLP, QuantileLoss, known),
        "RecurrentNetwork": (library.RecurrentNetwork, MAE, fixed),
    }[model]
    data = library.TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_unknown_reals=["value"],
        **options,
    )
    loader = data.to_dataloader(train=True, batch_size=32, num_workers=0)
    net: Any = kind.from_dataset(data, loss=metric(), log_interval=-1)
    pl.Trainer(**_quiet(steps, device), gradient_clip_val=0.1).fit(net, loader)


def neuralforecast(model: str, device: str, steps: int) -> Any:
    import pandas as pd
    from neuralforecast import NeuralForecast, losses, models

    frame = pd.concat(
        pd.DataFrame(
            {
                "unique_id": str(seed),
                "ds": pd.date_range("2024-01-01", periods=300, freq="h"),
                "y": _series(300, seed),
            }
        )
        for seed in range(8)
    )

    name, _, student = model.partition(" with ")
    loss = losses.pytorch.DistributionLoss("StudentT") if student else losses.pytorch.MAE()
    options: dict[str, Any] = {
        "TFT": {"hidden_size": 16},
        "PatchTST": {"patch_len": 8, "hidden_size": 16},
        "TimesNet": {"hidden_size": 16, "conv_hidden_size": 16},
        "TSMixer": {"n_series": 8},
        "iTransformer": {"n_series": 8, "hidden_size": 16},
    }.get(name, {})
    net = getattr(models, name)(
        h=12, input_size=24, batch_size=8, loss=loss, **options, **_quiet(steps, device)
    )
    forecast = NeuralForecast(models=[net], freq="h")
    forecast.fit(frame)
    return [torch.tensor(forecast.predict().select_dtypes("number").to_numpy())]


def darts(model: str, device: str, steps: int) -> Any:
    import pandas as pd
    from darts import TimeSeries, models

    times = pd.date_range("2024-01-01", periods=400, freq="h")
    series = [TimeSeries.from_times_and_values(times, _series(400, seed)) for seed in range(4)]

    options: dict[str, Any] = {
        "NBEATS": {"num_stacks": 3, "layer_widths": 32},
        "NHiTS": {"layer_widths": 32},
        "BlockRNN": {"model": "LSTM"},
        "TFT": {"add_relative_index": True},
    }.get(model, {})
    quiet = _quiet(steps, device)
    del quiet["max_steps"]
    net = getattr(models, f"{model}Model")(
        input_chunk_length=24,
        output_chunk_length=6,
        n_epochs=max(1, steps // 47),
        batch_size=32,
        pl_trainer_kwargs=quiet,
        **options,
    )
    net.fit(series)
    return [torch.tensor(net.predict(6, series=series[0]).values())]


# ---------------------------------------------------------------------- images


class _Views(torch.utils.data.Dataset[Any]):
    """Two views of an image of 32 x 32, its number and its class."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        return [image, image.flip(-1)], index % 10


def _backbone() -> tuple[nn.Module, int]:
    """A small ResNet."""
    import torchvision

    return nn.Sequential(*list(torchvision.models.resnet18(num_classes=10).children())[:-1]), 512


def lightly(model: str, device: str, steps: int) -> Any:
    import copy

    import lightning.pytorch as pl
    from lightly import loss as losses
    from lightly.models import modules
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class Base(pl.LightningModule):
        """As in the library's examples: a backbone, a head, a criterion, SGD."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.width = _backbone()

        def embed(self, x: Tensor) -> Tensor:
            return self.backbone(x).flatten(start_dim=1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    class TwoViews(Base):
        def __init__(self, head: nn.Module, criterion: nn.Module) -> None:
            super().__init__()
            self.head, self.criterion = head, criterion

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            (x0, x1) = batch[0]
            z0, z1 = self.head(self.embed(x0)), self.head(self.embed(x1))
            loss: Tensor = self.criterion(z0, z1)
            self.log("train_loss", loss)
            return loss

    class SimSiam(Base):
        def __init__(self) -> None:
            super().__init__()
            self.projection = modules.SimSiamProjectionHead(512, 128, 64)
            self.prediction = modules.SimSiamPredictionHead(64, 32, 64)
            self.criterion = losses.NegativeCosineSimilarity()

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            (x0, x1) = batch[0]
            z0, z1 = self.projection(self.embed(x0)), self.projection(self.embed(x1))
            p0, p1 = self.prediction(z0), self.prediction(z1)
            return 0.5 * (self.criterion(z0.detach(), p1) + self.criterion(z1.detach(), p0))

    class MoCo(Base):
        def __init__(self) -> None:
            super().__init__()
            self.head = modules.MoCoProjectionHead(512, 128, 64)
            self.momentum, self.momentum_head = copy.deepcopy((self.backbone, self.head))
            deactivate_requires_grad(self.momentum)
            deactivate_requires_grad(self.momentum_head)
            self.criterion = losses.NTXentLoss(memory_bank_size=(512, 64))

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.momentum, m=momentum)
            update_momentum(self.head, self.momentum_head, m=momentum)
            query, key = batch[0]
            q = self.head(self.embed(query))
            k = self.momentum_head(self.momentum(key).flatten(start_dim=1)).detach()
            loss: Tensor = self.criterion(q, k)
            return loss

    class BYOL(Base):
        def __init__(self) -> None:
            super().__init__()
            self.head = modules.BYOLProjectionHead(512, 128, 64)
            self.prediction = modules.BYOLPredictionHead(64, 128, 64)
            self.momentum, self.momentum_head = copy.deepcopy((self.backbone, self.head))
            deactivate_requires_grad(self.momentum)
            deactivate_requires_grad(self.momentum_head)
            self.criterion = losses.NegativeCosineSimilarity()

        def target(self, x: Tensor) -> Tensor:
            z: Tensor = self.momentum_head(self.momentum(x).flatten(start_dim=1))
            return z.detach()

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.momentum, m=momentum)
            update_momentum(self.head, self.momentum_head, m=momentum)
            x0, x1 = batch[0]
            p0, p1 = (self.prediction(self.head(self.embed(x))) for x in (x0, x1))
            loss = 0.5 * (self.criterion(p0, self.target(x1)) + self.criterion(p1, self.target(x0)))
            self.log("train_loss", loss)
            return loss

    class DINO(Base):
        def __init__(self) -> None:
            super().__init__()
            self.head = modules.DINOProjectionHead(512, 128, 64, 128, freeze_last_layer=1)
            self.teacher = copy.deepcopy(self.backbone)
            self.teacher_head = modules.DINOProjectionHead(512, 128, 64, 128)
            deactivate_requires_grad(self.teacher)
            deactivate_requires_grad(self.teacher_head)
            self.criterion = losses.DINOLoss(output_dim=128, warmup_teacher_temp_epochs=5)

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.teacher, m=momentum)
            update_momentum(self.head, self.teacher_head, m=momentum)
            views = batch[0]
            teachers = [self.teacher_head(self.teacher(v).flatten(start_dim=1)) for v in views]
            students = [self.head(self.embed(v)) for v in views]
            loss: Tensor = self.criterion(teachers, students, epoch=self.current_epoch)
            return loss

        def on_after_backward(self) -> None:
            self.head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    projected = {"SimCLR": losses.NTXentLoss, "BarlowTwins": losses.BarlowTwinsLoss}
    projected["VICReg"] = losses.VICRegLoss
    if model in projected:
        head = getattr(modules.heads, f"{model}ProjectionHead")(512, 128, 64)
        net: Any = TwoViews(head, projected[model]())
    else:
        net = {"SimSiam": SimSiam, "MoCo": MoCo, "BYOL": BYOL, "DINO": DINO}[model]()
    views = _Views(32 * 24)
    loader = torch.utils.data.DataLoader(views, batch_size=32, shuffle=True, drop_last=True)
    pl.Trainer(**_quiet(steps, device)).fit(net, loader)


class _Masks(torch.utils.data.Dataset[Any]):
    """Images of 64 x 64 and masks of them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        random = torch.Generator().manual_seed(index)
        image = torch.rand(3, 64, 64, generator=random) * 255
        return {"image": image, "mask": (image.mean(0, keepdim=True) > 128).float()}


def segmentation_models_pytorch(model: str, device: str, steps: int) -> Any:
    import lightning.pytorch as pl
    import segmentation_models_pytorch as smp

    class Model(pl.LightningModule):
        """As in the library's example of binary segmentation, its assertions included."""

        def __init__(self, arch: str) -> None:
            super().__init__()
            self.model = smp.create_model(
                arch, encoder_name="resnet18", encoder_weights=None, in_channels=3, classes=1
            )
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
            self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.training_step_outputs: list[Any] = []

        def forward(self, image: Tensor) -> Tensor:
            masks: Tensor = self.model((image - self.mean) / self.std)
            return masks

        def training_step(self, batch: Any, batch_index: int) -> Any:
            image, mask = batch["image"], batch["mask"]
            assert image.ndim == 4
            h, w = image.shape[2:]
            assert h % 32 == 0 and w % 32 == 0  # noqa: PT018  # as the library's example has it
            assert mask.ndim == 4
            assert mask.max() <= 1.0 and mask.min() >= 0  # noqa: PT018
            logits_mask = self.forward(image)
            loss = self.loss_fn(logits_mask, mask)
            pred_mask = (logits_mask.sigmoid() > 0.5).float()
            tp, fp, fn, tn = smp.metrics.get_stats(pred_mask.long(), mask.long(), mode="binary")
            found = {"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn}
            self.training_step_outputs.append(found)
            return found

        def on_train_epoch_end(self) -> None:
            outputs = self.training_step_outputs
            tp, fp, fn, tn = (
                torch.cat([x[key] for x in outputs]) for key in ("tp", "fp", "fn", "tn")
            )
            iou = smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro")
            self.log("train_dataset_iou", iou, prog_bar=True)
            self.training_step_outputs.clear()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    loader = torch.utils.data.DataLoader(_Masks(), batch_size=8, shuffle=True)
    pl.Trainer(**_quiet(steps, device)).fit(Model(model), loader)


# ---------------------------------------------------------------------- graphs and molecules


def torch_geometric(model: str, device: str, steps: int) -> Any:
    import lightning.pytorch as pl
    import torch_geometric.nn as layers
    from torch.nn import functional as F
    from torch_geometric.data import Data
    from torch_geometric.data.lightning import LightningDataset

    class Model(pl.LightningModule):
        """As in the library's example of graph classification."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.gnn = net
            self.classifier = layers.MLP([64, 64, 5], dropout=0.5)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            x = self.gnn(x, edge_index)
            x = layers.global_add_pool(x, batch)
            logits: Tensor = self.classifier(x)
            return logits

        def training_step(self, data: Any, batch_index: int) -> Tensor:
            y_hat = self(data.x, data.edge_index, data.batch)
            return F.cross_entropy(y_hat, data.y)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def graphs(nodes: int) -> list[Any]:
        random = torch.Generator().manual_seed(0)

        def edges() -> Tensor:
            """No node has one to itself: GCNConv drops these, as many as there are."""
            begins = torch.randint(0, nodes, (4 * nodes,), generator=random)
            further = torch.randint(1, nodes, (4 * nodes,), generator=random)
            return torch.stack([begins, (begins + further) % nodes])

        return [
            Data(
                x=torch.randn(nodes, 16, generator=random),
                edge_index=edges(),
                y=torch.tensor([number % 5]),
            )
            for number in range(256)
        ]

    data = LightningDataset(train_dataset=graphs(20), batch_size=32)
    net = getattr(layers, model)(16, 64, num_layers=3)
    pl.Trainer(**_quiet(steps, device)).fit(Model(net), data)


def chemprop(model: str, device: str, steps: int) -> Any:
    import lightning.pytorch as pl
    from chemprop import data, models
    from chemprop import nn as parts

    smiles = ["C" * n + tail for n in range(1, 9) for tail in ("O", "N", "C(=O)O", "c1ccccc1")]
    random = np.random.default_rng(0)
    targets = random.standard_normal((16 * len(smiles), 1))
    if model == "MPNN binary":
        targets = (targets > 0).astype(float)
    points = [
        data.MoleculeDatapoint.from_smi(smi, y) for smi, y in zip(smiles * 16, targets, strict=True)
    ]
    loader = data.build_dataloader(
        data.MoleculeDataset(points), batch_size=32, num_workers=0, shuffle=False
    )
    net = models.MPNN(
        parts.BondMessagePassing(d_h=64),
        parts.NormAggregation() if "norm" in model else parts.MeanAggregation(),
        (parts.BinaryClassificationFFN if "binary" in model else parts.RegressionFFN)(input_dim=64),
    )
    pl.Trainer(**_quiet(steps, device)).fit(net, loader)


def scvi(model: str, device: str, steps: int) -> Any:
    import scvi as library

    library.settings.seed = 1
    adata = library.data.synthetic_iid()
    kind = getattr(library.model, model)
    setup = {"batch_key": "batch"}
    if model == "SCANVI":
        setup |= {"labels_key": "labels", "unlabeled_category": "label_0"}
    kind.setup_anndata(adata, **setup)
    net, quiet = kind(adata), _quiet(steps, device)
    del quiet["max_steps"], quiet["enable_model_summary"]
    quiet["early_stopping"] = False  # without a validation set
    net.train(max_epochs=max(1, steps // 4), batch_size=100, train_size=1.0, **quiet)
    return [torch.tensor(net.get_latent_representation())]


# ---------------------------------------------------------------------- text


def litgpt(model: str, device: str, steps: int) -> Any:
    import lightning.pytorch as pl
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    class Model(pl.LightningModule):
        """As in the library's example of a module of Lightning's."""

        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__()
            self.model = GPT(Config(**options))

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            input_ids, targets = batch["input_ids"], batch["labels"]
            logits = self.model(input_ids)
            loss: Tensor = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            warmup = 10
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.0002, weight_decay=0.0)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / warmup)
            return [optimizer], [scheduler]

    small = {"n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 512, "block_size": 64}
    llama = {
        "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 128,
        "bias": False, "rotary_percentage": 1.0, "parallel_residual": False,
    }  # fmt: skip
    ids = torch.randint(0, 512, (256, 64), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": row, "labels": row} for row in ids]
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    net = Model({**small, **(llama if model == "Llama" else {})})
    pl.Trainer(**_quiet(steps, device)).fit(net, loader)


def rl4co(model: str, device: str, steps: int) -> Any:
    from rl4co import models
    from rl4co.envs import TSPEnv
    from rl4co.utils import RL4COTrainer

    sizes = {"batch_size": 32, "train_data_size": 32 * steps, "val_data_size": 32}
    options = {"baseline": "no"} if model == "AttentionModel" else {}
    net = getattr(models, model)(TSPEnv(generator_params={"num_loc": 10}), **sizes, **options)
    RL4COTrainer(**_quiet(steps, device), max_epochs=1, limit_val_batches=0).fit(net)


# ---------------------------------------------------------------------- tables and physics


def _frame(rows: int) -> Any:
    """Five numbers and two categories a row, and a class that two of the numbers decide."""
    import pandas as pd

    random = np.random.default_rng(0)
    numbers = {f"n{i}": random.standard_normal(rows).astype("float32") for i in range(5)}
    kinds = {f"c{i}": random.integers(0, 4, rows).astype(str) for i in range(2)}
    frame = pd.DataFrame({**numbers, **kinds})
    frame["y"] = (frame.n0 + frame.n1 > 0).astype(int)
    return frame


def pytorch_tabular(model: str, device: str, steps: int) -> Any:
    import pytorch_tabular.config as config
    from pytorch_tabular import TabularModel, models

    attention = {"num_heads": 2, "num_attn_blocks": 2, "input_embed_dim": 8}
    kind, options = {
        "CategoryEmbedding": ("CategoryEmbeddingModelConfig", {"layers": "32-16"}),
        "FTTransformer": ("FTTransformerConfig", attention),
        "TabTransformer": ("TabTransformerConfig", attention),
        "GANDALF": ("GANDALFConfig", {"gflu_stages": 2}),
        "AutoInt": ("AutoIntConfig", {}),
        "NODE": ("NodeConfig", {"num_trees": 8, "depth": 3}),
    }[model]
    frame = _frame(32 * (steps // 2 + 4))
    quiet = {"accelerator": device, "devices": 1, "progress_bar": "none", "load_best": False}
    library = TabularModel(
        data_config=config.DataConfig(
            target=["y"], continuous_cols=[f"n{i}" for i in range(5)],
            categorical_cols=["c0", "c1"], num_workers=0,
        ),
        model_config=getattr(models, kind)(task="classification", **options),
        optimizer_config=config.OptimizerConfig(),
        trainer_config=config.TrainerConfig(
            batch_size=32, max_epochs=2, early_stopping=None, checkpoints=None,
            trainer_kwargs={"enable_model_summary": False}, **quiet,
        ),
        verbose=False, suppress_lightning_logger=True,
    )  # fmt: skip
    library.fit(train=frame[128:], validation=frame[:128])
    found = library.predict(frame[:128]).select_dtypes("number")
    return [torch.tensor(found.to_numpy(dtype="float64").copy())]


def deeptab(model: str, device: str, steps: int) -> Any:
    from deeptab import models

    frame = _frame(32 * steps // 2)
    options = {k: v for k, v in _quiet(-1, device).items() if k not in ("max_steps",)}
    options.pop("enable_checkpointing")
    library = getattr(models, f"{model}Classifier")()
    library.fit(frame.drop(columns="y"), frame.y.to_numpy(), max_epochs=2, batch_size=32, **options)
    return [torch.tensor(library.predict_proba(frame.drop(columns="y")))]


def torchphysics(model: str, device: str, steps: int) -> None:
    import torchphysics as library

    plane, line = library.spaces.R2("x"), library.spaces.R1("u")
    square = library.domains.Parallelogram(plane, [0, 0], [1, 0], [0, 1])
    net = library.models.FCN(input_space=plane, output_space=line, hidden=(16, 16))
    points = library.samplers.RandomUniformSampler
    inside, border = points(square, n_points=64), points(square.boundary, n_points=16)
    if model == "static points":
        inside, border = inside.make_static(), border.make_static()
    conditions = [
        library.conditions.PINNCondition(net, inside, lambda u, x: library.utils.laplacian(u, x)),
        library.conditions.PINNCondition(net, border, lambda u, x: u - x[:, :1]),
    ]
    setting = library.OptimizerSetting(torch.optim.Adam, lr=1e-3)
    solver = library.solver.Solver(conditions, optimizer_setting=setting)
    _trainer_of(solver)(**_quiet(steps, device)).fit(solver)


def _trainer_of(module: Any) -> Any:
    """The Trainer of the package whose LightningModule this is."""
    import lightning.pytorch as pl

    if isinstance(module, pl.LightningModule):
        return pl.Trainer
    import pytorch_lightning

    return pytorch_lightning.Trainer


def pina(model: str, device: str, steps: int) -> None:
    import pina as library
    from pina.domain import CartesianDomain
    from pina.equation import Equation, FixedValue
    from pina.model import FeedForward
    from pina.operator import laplacian
    from pina.problem import SpatialProblem
    from pina.solver import PINN

    square = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    top = CartesianDomain({"x": [0, 1], "y": 1})
    poisson = Equation(lambda x, u: laplacian(u, x, components=["u"], d=["x", "y"]))
    attributes = {
        "output_variables": ["u"],
        "spatial_domain": square,
        "domains": {"D": square, "top": top},
        "conditions": {
            "top": library.Condition(domain="top", equation=FixedValue(0.0)),
            "D": library.Condition(domain="D", equation=poisson),
        },
    }
    problem = type("Poisson", (SpatialProblem,), attributes)()
    problem.discretise_domain(64, "random", domains=["D"])
    problem.discretise_domain(16, "grid", domains=["top"])
    net = FeedForward(input_dimensions=2, output_dimensions=1, layers=[16, 16])
    quiet = _quiet(steps, device)
    quiet.pop("devices")
    library.Trainer(solver=PINN(problem=problem, model=net), batch_size=16, **quiet).train()


# ---------------------------------------------------------------------- uncertainty


def torch_uncertainty(model: str, device: str, steps: int) -> None:
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.routines import ClassificationRoutine

    x = torch.randn(32 * steps // 2, 8)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    options: dict[str, Any] = {}
    if model == "mixup":
        options = {"mixup_params": {"mixtype": "mixup", "mixup_alpha": 0.3}}
    routine = ClassificationRoutine(
        model=net, num_classes=2, loss=nn.CrossEntropyLoss(),
        optim_recipe=torch.optim.AdamW(net.parameters()), **options,
    )  # fmt: skip
    loader = DataLoader(data, batch_size=32, shuffle=True)
    TUTrainer(**_quiet(steps, device)).fit(routine, loader, DataLoader(data, batch_size=64))


def lightning_uq_box(model: str, device: str, steps: int) -> None:
    import lightning.pytorch as pl
    from lightning_uq_box import uq_methods as methods

    x = torch.randn(32 * steps // 2, 4)
    data: Any = [{"input": row, "target": row[:1] * 2} for row in x]
    outputs = {"MVERegression": 2, "QuantileRegression": 3, "DER": 4, "DeterministicRegression": 1}
    last = nn.Linear(16, outputs[model])
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), last)
    options: dict[str, Any] = {
        "MVERegression": {"burnin_epochs": 1},
        "QuantileRegression": {"quantiles": [0.1, 0.5, 0.9]},
        "DeterministicRegression": {"loss_fn": nn.MSELoss()},
    }.get(model, {})
    module = getattr(methods, model)(net, optimizer=partial(torch.optim.Adam, lr=1e-3), **options)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    pl.Trainer(**_quiet(steps, device)).fit(module, loader, loader)


MODELS: dict[Callable[[str, str, int], Any], tuple[str, ...]] = {
    gluonts: (
        "DeepAR", "SimpleFeedForward", "TemporalFusionTransformer", "PatchTST", "DLinear", "LagTST",
        "TiDE", "WaveNet",
    ),
    pytorch_forecasting: ("TFT", "DeepAR", "NBeats", "NHiTS", "DecoderMLP", "RecurrentNetwork"),
    neuralforecast: (
        "NHITS", "NHITS with StudentT", "NBEATS", "NBEATSx", "MLP", "DLinear", "NLinear", "TFT",
        "PatchTST", "LSTM", "GRU", "TCN", "TiDE", "TSMixer", "iTransformer", "TimesNet",
    ),
    darts: (
        "NBEATS", "NHiTS", "TCN", "Transformer", "BlockRNN", "DLinear", "NLinear", "TiDE",
        "TSMixer", "TFT",
    ),
    lightly: ("SimCLR", "BarlowTwins", "VICReg", "SimSiam", "BYOL", "MoCo", "DINO"),
    segmentation_models_pytorch: ("Unet", "FPN", "DeepLabV3Plus", "Linknet"),
    torch_geometric: ("GIN", "GCN", "GraphSAGE", "GAT"),
    chemprop: ("MPNN", "MPNN binary", "MPNN norm"),
    scvi: ("SCVI", "LinearSCVI", "PEAKVI", "SCANVI"),
    litgpt: ("GPT", "Llama"),
    rl4co: ("AttentionModel", "POMO"),
    pytorch_tabular: (
        "CategoryEmbedding", "FTTransformer", "TabTransformer", "GANDALF", "AutoInt", "NODE",
    ),
    deeptab: ("MLP", "FTTransformer", "ResNet", "TabM"),
    torchphysics: ("random points", "static points"),
    pina: ("PINN",),
    torch_uncertainty: ("classification", "mixup"),
    lightning_uq_box: ("MVERegression", "QuantileRegression", "DER", "DeterministicRegression"),
    **science_fits.MODELS,
}  # fmt: skip
"""Libraries -> their models."""

FITS = {f"{fit.__name__}: {m}": partial(fit, m) for fit, models in MODELS.items() for m in models}
"""``library: model`` -> what trains it, given ``cpu`` or ``gpu`` and a number of steps."""


def be_quiet() -> None:
    """Silence what the libraries print; what this package logs is in its report, too."""
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
