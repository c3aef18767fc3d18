"""Images: a convolutional network reads digits that are drawn on the spot."""

import numpy as np
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from instar.custom import CustomTask, Section


class Reader(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.edges = nn.Conv2d(1, channels, 3, padding=1)
        self.strokes = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.digit = nn.Linear(2 * channels * 9, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.edges(x)), 2)
        x = F.max_pool2d(F.relu(self.strokes(x)), 2)
        return self.digit(x.flatten(1))


FONT = (0o75557, 0o26227, 0o71747, 0o71717, 0o55711, 0o74717, 0o74757, 0o71122, 0o75757, 0o75717)


class Digits(Dataset):
    """Item n is an image [1, 12, 12] of a digit somewhere in noise, and the digit."""

    def __init__(self, seed):
        self.seed = seed
        self.glyphs = [[glyph >> bit & 1 for bit in range(14, -1, -1)] for glyph in FONT]

    def __len__(self):
        return 1000

    def __getitem__(self, n):
        rng, digit = np.random.default_rng([self.seed, n]), n % 10
        image = rng.normal(0, 0.3, (1, 12, 12)).astype("float32")
        top, left = rng.integers(0, (3, 7))
        image[0, top : top + 10, left : left + 6] += np.kron(
            np.reshape(self.glyphs[digit], (5, 3)), np.ones((2, 2))
        )
        return image, digit


class Settings(Section):
    channels: int = 6


class ReadDigits(CustomTask):
    Model, better, unit = Settings, {"accuracy": "max"}, "image"

    def samples(self):
        return Digits(self.seed)

    def module(self, _):
        return Reader(self.model.channels)

    def loss(self, model, batch):
        logits = model(batch["x"])
        return F.cross_entropy(logits, batch["y"], reduction="none"), logits

    def measure(self, logits, batch):
        return {"accuracy": logits.argmax(1) == batch["y"]}

    def predict(self, logits, batch):
        return {"digit": batch["y"], "digit.predicted": logits.argmax(1)}
