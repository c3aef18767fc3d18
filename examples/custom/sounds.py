"""Two heads: which instrument plays, and how high; sounds of varying length, padded by `collate`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from instar.custom import CustomTask, Section


class Listener(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hear = nn.Conv1d(1, width, 9, padding=4)
        self.instrument, self.pitch = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, sound, length):
        features = F.relu(self.hear(sound[:, None])).cumsum(2)
        mean = features[torch.arange(len(sound)), :, length - 1] / length[:, None]
        return self.instrument(mean), self.pitch(mean).squeeze(1)


class Settings(Section):
    width: int = 16
    pitch_weight: float = 0.5


class Sounds(CustomTask):
    Model, better, unit = Settings, {"accuracy": "max", "pitch_error": "min"}, "sound"

    def samples(self):
        rng = np.random.default_rng(self.seed)
        for n in range(600):
            pitch = rng.uniform(0.1, 0.6)
            wave = np.sin(pitch * np.arange(rng.integers(40, 80)) + rng.uniform(0, 6))
            sound = (wave, np.sign(wave), np.abs(wave))[n % 3].astype("float32")
            yield {"sound": sound, "instrument": n % 3, "pitch": np.float32(pitch)}

    def collate(self, samples):
        sounds, instruments, pitches = zip(*(sample.values() for sample in samples), strict=True)
        length = torch.tensor([len(sound) for sound in sounds], device=sounds[0].device)
        waves = pad_sequence(sounds, batch_first=True)
        return (waves, length), torch.stack(instruments), torch.stack(pitches)

    def module(self, _):
        return Listener(self.model.width)

    def loss(self, model, batch):
        inputs, instrument, pitch = batch
        logits, height = model(*inputs)
        loss = F.cross_entropy(logits, instrument, reduction="none")
        return loss + self.model.pitch_weight * (height - pitch).square(), (logits, height)

    def measure(self, outputs, batch):
        (logits, height), (_, instrument, pitch) = outputs, batch
        return {"accuracy": logits.argmax(1) == instrument, "pitch_error": (height - pitch).abs()}

    def predict(self, outputs, batch):
        logits, height = outputs
        return {"instrument": batch[1], "instrument.predicted": logits.argmax(1), "pitch": height}
