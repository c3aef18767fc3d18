"""Fine-tuning: a pretrained GPT-2 with a new head tells praise from blame."""

from itertools import product

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer

from instar.custom import CustomTask, Section


class Judge(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.body = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.verdict = nn.Linear(self.body.config.hidden_size, 2)

    def forward(self, tokens, length):
        read = self.body(tokens, use_cache=False).last_hidden_state
        return self.verdict(read[torch.arange(len(tokens)), length - 1])


THINGS = ("The plot", "The cast", "The score", "Her voice", "His part", "The end", "Each scene")
WORDS = {"great": 1, "moving": 1, "clever": 1, "funny": 1, "dull": 0, "flat": 0, "silly": 0}


class Settings(Section):
    weights: str = "./gpt2"


class Reviews(CustomTask):
    Model, better, unit = Settings, {"accuracy": "max"}, "review"

    def samples(self):
        encode = AutoTokenizer.from_pretrained(self.model.weights)
        for thing, verb, degree, word in product(
            THINGS, ("is", "was", "seems"), ("", "very ", "not ", "hardly "), WORDS
        ):
            tokens = torch.tensor(encode(f"{thing} {verb} {degree}{word}.")["input_ids"])
            yield {"tokens": tokens, "good": WORDS[word] ^ (degree in ("not ", "hardly "))}

    def collate(self, samples):
        tokens, good = zip(*(sample.values() for sample in samples), strict=True)
        length = torch.tensor([len(review) for review in tokens], device=tokens[0].device)
        return (pad_sequence(tokens, batch_first=True), length), torch.stack(good)

    def module(self, _):
        return Judge(self.model.weights)

    def optimizer(self, model, config):
        body, head = model.body.parameters(), model.verdict.parameters()
        return [{"params": body, "lr": config.lr / 10}, {"params": head}]

    def loss(self, model, batch):
        read, good = batch
        logits = model(*read)
        return F.cross_entropy(logits, good, reduction="none"), logits

    def measure(self, logits, batch):
        return {"accuracy": logits.argmax(1) == batch[1]}

    def predict(self, logits, batch):
        return {"good": batch[1], "good.predicted": logits.argmax(1)}
