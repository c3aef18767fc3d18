"""A table: a small network predicts prices from columns; the splits are the user's own."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from instar.custom import CustomTask, Section


class Settings(Section):
    width: int = 32


class Prices(CustomTask):
    Model, better, unit = Settings, {"error": "min"}, "house"

    def samples(self):
        rng = np.random.default_rng(self.seed)
        area, rooms, age = (
            rng.uniform(30, 200, 900),
            rng.integers(1, 8, 900),
            rng.gamma(3, 10, 900),
        )
        price = 3 * area + 20 * np.sqrt(rooms) - 0.5 * age + 0.01 * area * rooms
        x = np.stack([area / 100, rooms / 4, age / 30], axis=1)
        table = TensorDataset(torch.tensor(x).float(), torch.tensor(price / 100).float())
        parts = random_split(table, [700, 100, 100], torch.Generator().manual_seed(self.seed))
        return dict(zip(["train", "val", "test"], parts, strict=True))

    def module(self, _):
        width = self.model.width
        return nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, 1), nn.Flatten(0))

    def loss(self, model, batch):
        price = model(batch["x"])
        return (price - batch["y"]).square(), price

    def measure(self, price, batch):
        return {"error": (price - batch["y"]).abs()}

    def predict(self, price, batch):
        return {"price": batch["y"], "price.predicted": price}
