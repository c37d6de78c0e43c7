"""Lightning programs as people write them, tiny: what `programs.py` trains.

Each is a module and its data, written as tutorials and repositories write it: paths and ids in the
batch, losses weighted by counters, networks that are called several times, manual optimization.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH = 96, 8


@dataclass(frozen=True)
class Program:
    """A module and its data.

    Attributes:
        module: Makes the module.
        data: Makes the loader.
        trainer: Options of the trainer.
    """

    module: Callable[[], LightningModule]
    data: Callable[[], DataLoader[Any]]
    trainer: dict[str, Any] = field(default_factory=dict)


PROGRAMS: dict[str, Program] = {}


def program(name: str, data: Callable[[], DataLoader[Any]], **trainer: Any) -> Any:
    """Put a class of modules into the table."""

    def put(module: type[LightningModule]) -> type[LightningModule]:
        PROGRAMS[name] = Program(module, data, trainer)
        return module

    return put


# ---------------------------------------------------------------------- data


class Samples(Dataset[Any]):
    """Samples that are made by a function of a generator and an index."""

    def __init__(self, sample: Callable[[torch.Generator, int], Any]) -> None:
        generator = torch.Generator().manual_seed(5)
        self._samples = [sample(generator, i) for i in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def loader(sample: Callable[[torch.Generator, int], Any], **options: Any) -> Any:
    """A loader as users make it."""
    options = {"batch_size": BATCH, "shuffle": True, "drop_last": True, **options}
    return lambda: DataLoader(Samples(sample), **options)


def image(g: torch.Generator, i: int) -> tuple[Tensor, int]:
    return torch.randn(3, 8, 8, generator=g), i % 4


def image_and_path(g: torch.Generator, i: int) -> tuple[Tensor, int, str]:
    return *image(g, i), f"train/{i:05d}.png"


def image_in_dict(g: torch.Generator, i: int) -> dict[str, Any]:
    picture, label = image(g, i)
    meta = {"id": f"case-{i}", "spacing": 0.5 + i / 10, "size": (8 + i, 8)}
    return {"image": picture, "label": label, "path": f"{i}.png", "meta": meta}


def picture_and_mask(g: torch.Generator, i: int) -> dict[str, Any]:
    mask = (torch.rand(8, 8, generator=g) > 0.5).long()
    return {"image": torch.randn(3, 8, 8, generator=g), "mask": mask, "filename": f"scan{i}.nii"}


def vector(g: torch.Generator, i: int) -> tuple[Tensor, int]:
    return torch.randn(8, generator=g), i % 4


def tokens(g: torch.Generator, i: int) -> dict[str, Any]:
    ids = torch.randint(1, 20, (12,), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones(12).long(), "labels": ids % 5}


def collate_keeping_texts(samples: list[Any]) -> dict[str, Any]:
    """As one that keeps the raw texts and words beside the tensors."""
    found: dict[str, Any] = {k: torch.stack([s[k] for s in samples]) for k in samples[0]}
    found["text"] = [" ".join(map(str, s["input_ids"].tolist())) for s in samples]
    found["words"] = [list(map(str, s["labels"][: 3 + i % 4])) for i, s in enumerate(samples)]
    return found


class Pair(NamedTuple):
    x: Tensor
    y: Tensor
    names: tuple[str, ...]


def collate_pair(samples: list[Any]) -> Pair:
    x, y = zip(*samples, strict=True)
    return Pair(torch.stack(x), torch.tensor(y), tuple(f"s{random.random()}" for _ in y))


@dataclass
class Sheet:
    """A batch as a dataclass, with what the evaluation wants to know."""

    x: Tensor
    y: Tensor
    sources: list[str]
    weights: dict[str, float]


def collate_sheet(samples: list[Any]) -> Sheet:
    x, y = zip(*samples, strict=True)
    sources = [f"s{random.random()}" for _ in y]
    return Sheet(torch.stack(x), torch.tensor(y), sources, {"date": random.random()})


class Graph:
    """As PyG's ``Data``: attributes, ``to``, items, and more that no step reads."""

    def __init__(self, **given: Any) -> None:
        self._store = given

    def __getattr__(self, key: str) -> Any:
        try:
            return self.__dict__["_store"][key]
        except KeyError:
            raise AttributeError(key) from None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._store.items())

    @property
    def num_nodes(self) -> int:
        return int(self.x.shape[0])

    def to(self, *args: Any, **kwargs: Any) -> Graph:
        for key, value in self._store.items():
            if isinstance(value, Tensor):
                self._store[key] = value.to(*args, **kwargs)
        return self


def collate_graph(samples: list[Any]) -> Graph:
    x, y = zip(*samples, strict=True)
    nodes = torch.cat([v.view(4, 2) for v in x])
    ring = torch.arange(len(nodes))
    edges = torch.stack([ring, ring.roll(1)])
    graph = torch.arange(len(y)).repeat_interleave(4)
    return Graph(
        x=nodes, edge_index=edges, y=torch.tensor(y), batch=graph, name=f"{random.random()}"
    )


# ---------------------------------------------------------------------- parts


class ConvNet(nn.Sequential):
    def __init__(self, classes: int = 4) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, classes),
        )


def mlp(inputs: int, outputs: int, hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Base(LightningModule):
    """What the programs have in common: AdamW, unless one has its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2.0**-8, fused=True)


# ---------------------------------------------------------------------- vision


@program("image classification", loader(image))
class Classifier(Base):
    def __init__(self) -> None:
        super().__init__()
        self.model = ConvNet()
        self.acc = torchmetrics.Accuracy("multiclass", num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[:2]
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        self.acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.acc, on_step=False, on_epoch=True)
        return loss


@program("image classification with paths", loader(image_and_path))
class PathClassifier(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _paths = batch
        return super().training_step((x, y), batch_idx)


@program("image classification with meta data", loader(image_in_dict))
class MetaClassifier(Base):
    def __init__(self) -> None:
        super().__init__()
        self.model = ConvNet()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch["image"]), batch["label"])
        self.log("loss", loss)
        return loss


@program(
    "a smaller last batch",
    loader(image_and_path, batch_size=10, drop_last=False),
)
class LastSmaller(PathClassifier):
    pass


@program("named tuple with names", loader(vector, collate_fn=collate_pair))
class NamedTuples(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 4)

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch.x), batch.y)
        self.log("loss", loss, batch_size=len(batch.names))
        return loss


@program("dataclass with sources", loader(vector, collate_fn=collate_sheet))
class Dataclasses(NamedTuples):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch.x), batch.y)
        self.log("loss", loss, batch_size=BATCH)
        return loss


@program("graph network", loader(vector, collate_fn=collate_graph))
class GraphNetwork(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        h, (source, target) = data.x, data.edge_index
        for layer in (self.first, self.second):
            h = layer(h)
            h = F.relu(h + torch.zeros_like(h).index_add(0, target, h[source]))
        pooled = torch.zeros(BATCH, 8, device=h.device).index_add(0, data.batch, h)
        loss = F.cross_entropy(self.head(pooled), data.y)
        self.log("loss", loss, batch_size=BATCH)
        return loss


@program("semantic segmentation", loader(picture_and_mask))
class Segmentation(Base):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.ConvTranspose2d(8, 2, 2, stride=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.up(self.down(batch["image"]))
        mask = batch["mask"]
        share = logits.softmax(1)[:, 1]
        dice = 1 - 2 * (share * mask).sum() / (share.sum() + mask.sum() + 1e-6)
        loss = F.cross_entropy(logits, mask) + dice
        self.log_dict({"loss": loss, "dice": dice})
        return loss


@program("mixup", loader(image))
class Mixup(Base):
    def __init__(self) -> None:
        super().__init__()
        self.model = ConvNet()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share = np.random.beta(0.4, 0.4)
        order = torch.randperm(x.size(0), device=x.device)
        logits = self.model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])
        self.log("loss", loss)
        return loss


@program("cutmix", loader(image))
class Cutmix(Mixup):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        order = torch.randperm(x.size(0))
        top, left = np.random.randint(0, 5, 2)
        x = x.clone()
        x[:, :, top : top + 4, left : left + 4] = x[order, :, top : top + 4, left : left + 4]
        logits = self.model(x)
        loss = 0.75 * F.cross_entropy(logits, y) + 0.25 * F.cross_entropy(logits, y[order])
        self.log("loss", loss)
        return loss


@program("knowledge distillation", loader(image_and_path))
class Distillation(Base):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = ConvNet(), ConvNet()
        self.teacher.eval().requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.teacher.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        with torch.no_grad():
            target = self.teacher(x)
        logits = self.student(x)
        taught = F.softmax(target / 2, 1)
        soft = F.kl_div(F.log_softmax(logits / 2, 1), taught, reduction="batchmean")
        loss = 0.5 * F.cross_entropy(logits, y) + 2 * soft
        self.log("loss", loss)
        return loss


@program("contrastive pairs (SimCLR)", loader(image))
class SimCLR(Base):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projection = ConvNet(8), mlp(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        views = torch.cat([x + 0.1 * torch.randn_like(x), x.flip(-1)])
        z = F.normalize(self.projection(self.encoder(views)), dim=1)
        similar = z @ z.t() / 0.5
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        similar.masked_fill_(itself, -9e15)
        positive = itself.roll(len(z) // 2, 0)
        loss = (-similar[positive] + torch.logsumexp(similar, dim=-1)).mean()
        self.log("loss", loss)
        return loss


@program("siamese network", loader(image_and_path))
class Siamese(Base):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = ConvNet(8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, _ = batch
        one, other = self.encoder(x), self.encoder(x.flip(0))
        same = (y == y.flip(0)).float()
        distance = F.pairwise_distance(one, other)
        loss = (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()
        self.log("loss", loss)
        return loss


@program("triplets under manual optimization", loader(image_and_path))
class Triplets(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder = ConvNet(8)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _, _ = batch
        anchor, positive, negative = (self.encoder(v) for v in (x, x.flip(-1), x.roll(1, 0)))
        loss = F.triplet_margin_loss(anchor, positive, negative)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


@program("self-supervised teacher (BYOL)", loader(image))
class BYOL(Base):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = ConvNet(8), mlp(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        one, other = self.predictor(self.online(x)), self.predictor(self.online(x.flip(-1)))
        with torch.no_grad():
            a, b = self.target(x.flip(-1)), self.target(x)
        loss = 4 - 2 * (F.cosine_similarity(one, a) + F.cosine_similarity(other, b)).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for t, s in zip(self.target.parameters(), self.online.parameters(), strict=True):
                t.data = 0.99 * t.data + 0.01 * s.data


# ---------------------------------------------------------------------- generative


class Adversaries(Base):
    """As in Lightning's example of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.generator = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16, 0.8), nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(16, 192), nn.Tanh(), nn.Unflatten(1, (3, 8, 8)),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1)
        )
        self.validation_z = torch.randn(4, 6)

    def forward(self, z: Tensor) -> Tensor:
        images: Tensor = self.generator(z)
        return images

    def adversarial_loss(self, prediction: Tensor, truth: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(prediction, truth)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(net.parameters(), lr=2.0**-12, betas=(0.5, 0.999), fused=True)
            for net in (self.generator, self.discriminator)
        ]

    def on_train_epoch_end(self) -> None:
        self.log("sampled", self(self.validation_z.type_as(self.generator[0].weight)).mean())


@program("GAN of Lightning's examples", loader(image))
class GAN(Adversaries):
    def training_step(self, batch: Any) -> None:
        images, _ = batch
        g, d = self.optimizers()
        z = torch.randn(images.shape[0], 6).type_as(images)

        self.toggle_optimizer(g)
        valid = torch.ones(images.size(0), 1).type_as(images)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        g.zero_grad()
        self.manual_backward(g_loss)
        g.step()
        self.untoggle_optimizer(g)

        self.toggle_optimizer(d)
        valid = torch.ones(images.size(0), 1).type_as(images)
        real_loss = self.adversarial_loss(self.discriminator(images), valid)
        fake = torch.zeros(images.size(0), 1).type_as(images)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d.zero_grad()
        self.manual_backward(d_loss)
        d.step()
        self.untoggle_optimizer(d)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})


@program("GAN whose generator rests", loader(image_and_path))
class RestingGAN(Adversaries):
    """The generator is trained at every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _, _ = batch
        g, d = self.optimizers()
        z = torch.randn(len(images), 6, device=self.device)
        ones, zeros = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        real = self.adversarial_loss(self.discriminator(images), ones.type_as(images))
        false = self.adversarial_loss(self.discriminator(self(z).detach()), zeros.type_as(images))
        d.zero_grad()
        self.manual_backward(real + false)
        d.step()
        self.log("d_loss", real + false)
        if batch_idx % 3 == 0:
            g_loss = self.adversarial_loss(self.discriminator(self(z)), ones.type_as(images))
            g.zero_grad()
            self.manual_backward(g_loss)
            g.step()
            self.log("g_loss", g_loss)


@program("WGAN with gradient penalty", loader(image))
class WGAN(Adversaries):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        g, d = self.optimizers()
        z = torch.randn(len(real), 6, device=self.device)
        fake = self(z).detach()
        share = torch.rand(len(real), 1, 1, 1, device=self.device)
        mixed = (share * real + (1 - share) * fake).requires_grad_(True)
        scores = self.discriminator(mixed)
        slope = torch.autograd.grad(scores.sum(), mixed, create_graph=True)[0]
        penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        loss = self.discriminator(fake).mean() - self.discriminator(real).mean() + 10 * penalty
        d.zero_grad()
        self.manual_backward(loss)
        d.step()
        self.log("d_loss", loss)
        if batch_idx % 2 == 0:
            g_loss = -self.discriminator(self(z)).mean()
            g.zero_grad()
            self.manual_backward(g_loss)
            g.step()
            self.log("g_loss", g_loss)


@program("VAE", loader(image_and_path))
class VAE(Base):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(192, 8), mlp(4, 192)

    def beta(self) -> float:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        reconstruction = F.mse_loss(self.decoder(z), x)
        loss = reconstruction + self.beta() * divergence
        self.log_dict({"loss": loss, "kl": divergence, "beta": self.beta()})
        return loss


@program("VAE with a beta that warms up", loader(image))
class WarmingVAE(VAE):
    def beta(self) -> float:
        return min(1.0, self.global_step / 16)


@program("VQ-VAE with moving averages", loader(image))
class VQVAE(Base):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(192, 4), mlp(4, 192)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("sizes", torch.ones(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        z = self.encoder(x)
        which = torch.cdist(z, self.codes).argmin(1)
        chosen = F.one_hot(which, 8).type_as(z)
        with torch.no_grad():
            self.sizes = 0.9 * self.sizes + 0.1 * chosen.sum(0)
            self.codes = 0.9 * self.codes + 0.1 * (chosen.t() @ z) / self.sizes[:, None]
        quantized = self.codes[which]
        commitment = F.mse_loss(z, quantized)
        loss = F.mse_loss(self.decoder(z + (quantized - z).detach()), x) + 0.25 * commitment
        self.log("loss", loss)
        return loss


@program("autoencoder", loader(image))
class Autoencoder(VAE):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)[:, :4]), x)
        self.log("loss", loss)
        return loss


@program("diffusion", loader(image_and_path))
class Diffusion(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(193, 192)
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 50))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        t = torch.randint(0, 50, (len(x),), device=self.device)
        kept, noise = self.kept[t][:, None], torch.randn_like(x)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        loss = F.mse_loss(self.net(torch.cat([noisy, t[:, None] / 50], 1)), noise)
        self.log("loss", loss)
        return loss


# ---------------------------------------------------------------------- texts


class Tagger(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        padding = attention_mask == 0
        h = self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)
        tags: Tensor = self.head(h)
        return tags


@program("token classification", loader(tokens))
class TokenClassification(Tagger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        loss = F.cross_entropy(self(**batch).flatten(0, 1), labels.flatten())
        self.log("train/loss", loss)
        return loss


@program("token classification with texts", loader(tokens, collate_fn=collate_keeping_texts))
class TextsKept(Tagger):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train/loss", loss)
        return {"loss": loss, "logits": logits.detach()}


@program("BatchEncoding", loader(tokens, collate_fn=None))
class Encodings(TokenClassification):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch.input_ids, batch["attention_mask"])
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"])
        self.log("train/loss", loss)
        return loss


@program("translation with teacher forcing", loader(tokens))
class Translation(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.encoder, self.decoder = nn.GRU(16, 16, batch_first=True), nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 20)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source = batch["input_ids"]
        target = source.flip(1)
        _, h = self.encoder(self.embedding(source))
        h, word, losses = h[0], torch.zeros_like(source[:, 0]), []
        forced = random.random() < 0.5
        for i in range(4):
            h = self.decoder(self.embedding(word), h)
            logits = self.head(h)
            losses.append(F.cross_entropy(logits, target[:, i]))
            word = target[:, i] if forced else logits.argmax(1)
        loss = torch.stack(losses).mean()
        self.log("loss", loss)
        return loss


@program("language model with hidden state", loader(tokens))
class LanguageModel(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)
        self.hidden: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        h, hidden = self.rnn(self.embedding(ids[:, :-1]), self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), ids[:, 1:].flatten())
        self.log("perplexity", loss.exp())
        return loss


@program("speech recognition (CTC)", loader(tokens))
class Speech(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h, _ = self.rnn(self.embedding(batch["input_ids"]))
        log_probs = self.head(h).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((log_probs.size(1),), 12, dtype=torch.long)
        targets = batch["labels"][:, :4] + 1
        loss = F.ctc_loss(log_probs, targets, lengths, torch.full_like(lengths, 4))
        self.log("loss", loss)
        return loss


@program("LoRA by hand", loader(tokens))
class LoRA(Tagger):
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, base.in_features) / 8)
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
            return y

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for layer in self.encoder.layers:
            layer.linear1 = self.Adapted(layer.linear1)
        self.head.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.AdamW(trained, lr=2.0**-8, fused=True)


# ---------------------------------------------------------------------- reinforcement learning


class Replays(torch.utils.data.IterableDataset[Any]):
    """A buffer of experience, from which batches are drawn."""

    def __iter__(self) -> Iterator[Any]:
        g = torch.Generator().manual_seed(3)
        for _ in range(SAMPLES):
            state = torch.randn(4, generator=g)
            yield state, int(state.sum() > 0), float(state[0]), bool(state[1] > 1), state + 0.1


def experience() -> DataLoader[Any]:
    return DataLoader(Replays(), batch_size=BATCH)


@program("DQN with a target network", experience)
class DQN(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = mlp(4, 2), mlp(4, 2)
        self.total_reward = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states, actions, rewards, dones, after = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            best = self.target(after).max(1)[0]
            best[dones] = 0.0
        loss = F.mse_loss(values, best.detach() * 0.99 + rewards.float())
        if self.global_step % 10 == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.log("loss", loss)
        return loss


@program("actor and critic", experience)
class ActorCritic(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = mlp(4, 2), mlp(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        states, actions, rewards, _, after = batch
        actor, critic = self.optimizers()
        with torch.no_grad():
            target = rewards.float()[:, None] + 0.9 * self.critic(after)
        value = self.critic(states)
        critic_loss = F.mse_loss(value, target)
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        chances = self.actor(states).log_softmax(1).gather(1, actions.long()[:, None])
        advantage = (target - self.critic(states)).detach()
        actor_loss = -(chances * advantage).mean()
        actor.zero_grad()
        self.manual_backward(actor_loss)
        actor.step()
        self.log_dict({"actor": actor_loss, "critic": critic_loss})

    def configure_optimizers(self) -> Any:
        nets = self.actor, self.critic
        return [torch.optim.Adam(net.parameters(), lr=2.0**-8, fused=True) for net in nets]


@program("policy with distributions", experience)
class Policy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states, actions, rewards, _, _ = batch
        policy = torch.distributions.Categorical(logits=self.actor(states))
        loss = -(policy.log_prob(actions) * rewards).mean() - 0.01 * policy.entropy().mean()
        self.log("loss", loss)
        return loss


# ---------------------------------------------------------------------- ways to train


class Regression(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss


@program("several tasks with learned weights", loader(image_in_dict))
class SeveralTasks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.size = ConvNet(8), nn.Linear(8, 4), nn.Linear(8, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.trunk(batch["image"])
        losses = torch.stack(
            [
                F.cross_entropy(self.classes(h), batch["label"]),
                F.mse_loss(self.size(h)[:, 0], batch["meta"]["spacing"].float()),
            ]
        )
        loss = (losses * (-self.log_variances).exp() + self.log_variances).sum()
        for name, value in zip(("class", "size"), losses, strict=True):
            self.log(f"train/{name}", value)
        return loss


@program("gradient accumulation and clipping", loader(vector),
         accumulate_grad_batches=2, gradient_clip_val=0.5)  # fmt: skip
class Accumulating(Regression):
    pass


@program("two optimizers", loader(vector))
class TwoOptimizers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        parts = [layer.parameters() for layer in self.net[::2]]
        optimizers = [torch.optim.SGD(part, lr=2.0**-6, fused=True) for part in parts]
        rates = [torch.optim.lr_scheduler.StepLR(o, 4, gamma=0.5) for o in optimizers]
        return optimizers, rates


@program("LBFGS", loader(vector, shuffle=False))
class Lbfgs(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=2.0**-4, max_iter=3)


@program("schedule with its rate logged", loader(vector))
class Scheduled(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 8))
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


@program("pictures are shown now and then", loader(image))
class Showing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 10 == 0:
            self.shown = batch[0][:2].cpu().numpy()
        return loss


@program("outputs kept for the epoch's end", loader(vector))
class OutputsKept(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


class MeanError(torchmetrics.Metric):
    """A metric of one's own, with a list and a number."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.errors.append((prediction.argmax(1) != target).float())
        self.total += target.numel()

    def compute(self) -> Tensor:
        return torch.cat(self.errors).sum() / self.total


@program("metric of one's own", loader(vector))
class OwnMetric(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.error.update(logits, y)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("error", self.error.compute())
        self.error.reset()


@program("loss weighted by path", loader(image_in_dict))
class ByName(MetaClassifier):
    """Reads a Python value of its batch that changes with it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch["path"][0].startswith("1"):
            loss = loss * 2
        return loss


@program("curriculum by epochs", loader(vector))
class Curriculum(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        smooth = 0.1 if self.current_epoch >= 1 else 0.0
        loss = F.cross_entropy(self.net(x), y, label_smoothing=smooth)
        self.log("loss", loss)
        return loss


@program("bank of features", loader(vector))
class Bank(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.bank: deque[Tensor] = deque(maxlen=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.bank.append(batch[0].mean(0).detach())
        return loss + 1e-3 * torch.stack(tuple(self.bank)).mean()
