"""A small GPT with nanoGPT's names and layouts, its AdamW, and the checkpoints and data that it would save."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = "".join(f"{n} squared is {n * n}; its root is {math.isqrt(n)}.\n" for n in range(900))


class Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.bias = nn.Parameter(0.1 * torch.randn(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, heads: int, width: int, bias: bool, mask: int | None) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        if mask is not None:  # as where torch has no attention of its own
            self.register_buffer("bias", torch.ones(mask, mask).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(-2))


class Feed(nn.Module):
    def __init__(self, width: int, bias: bool, gelu: str) -> None:
        super().__init__()
        self.gelu = gelu
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu))


class Block(nn.Module):
    def __init__(self, heads: int, width: int, bias: bool, mask: int | None, gelu: str) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(width, bias), Attention(heads, width, bias, mask)
        self.ln_2, self.mlp = Norm(width, bias), Feed(width, bias, gelu)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """tokens [B, T] → logits [B, T, V]."""

    def __init__(
        self,
        *,
        n_layer: int,
        n_head: int,
        n_embd: int,
        block_size: int,
        vocab_size: int,
        bias: bool,
        dropout: float = 0.0,
        masks: bool = False,
        gelu: str = "none",
    ) -> None:
        super().__init__()
        assert not dropout
        mask = block_size if masks else None
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList(Block(n_head, n_embd, bias, mask, gelu) for _ in range(n_layer)),
                "ln_f": Norm(n_embd, bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02 if "c_proj" not in name else 0.01)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"].weight[: tokens.shape[1]]
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss of windows [B, T + 1]."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


CONFIG = {
    "out_dir": "out",
    "eval_interval": 20,
    "log_interval": 1,
    "eval_iters": 1000,
    "always_save_checkpoint": True,
    "dataset": "squares",
    "gradient_accumulation_steps": 2,
    "batch_size": 4,
    "block_size": 16,
    "learning_rate": 3e-3,
    "max_iters": 20,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "decay_lr": True,
    "warmup_iters": 5,
    "lr_decay_iters": 40,
    "min_lr": 3e-4,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
}


def learning_rate(step: int) -> float:
    """Return the rate that nanoGPT has in a step, from 0 on, after its warm-up."""
    progress = (step - CONFIG["warmup_iters"]) / (CONFIG["lr_decay_iters"] - CONFIG["warmup_iters"])
    lowest, peak = CONFIG["min_lr"], CONFIG["learning_rate"]
    return lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - lowest)


@dataclass
class Training:
    """A model in training, as nanoGPT does it."""

    bias: bool = True
    earlier: bool = False
    """whether it is nanoGPT of before May 2023: embeddings are not decayed, and GELU is approximated by tanh"""
    masks: bool = False
    step: int = 0
    model: NanoGPT = field(init=False)
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.args = {
            **{"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16},
            **{"bias": self.bias, "vocab_size": len(set(TEXT)), "dropout": 0.0},
        }
        gelu = "tanh" if self.earlier else "none"
        self.model = NanoGPT(**self.args, masks=self.masks, gelu=gelu)
        parameters = dict(self.model.named_parameters())
        with_decay = [name for name, parameter in parameters.items() if parameter.ndim > 1]
        without_decay = [name for name in parameters if name not in with_decay]
        if self.earlier:
            with_decay = sorted(name for name in with_decay if not name.startswith("transformer.w"))
            without_decay = sorted({*parameters} - {*with_decay})
        groups = [
            {"params": [parameters[name] for name in with_decay], "weight_decay": 0.1},
            {"params": [parameters[name] for name in without_decay], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def train(self, steps: Sequence[Tensor]) -> None:
        """Train on the windows of each step, [samples, T + 1]."""
        for windows in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step)
            self.model.loss(windows).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CONFIG["grad_clip"])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def checkpoint(self, prefix: str = "") -> dict[str, Any]:
        """Return what nanoGPT saves."""
        return {
            "model": {prefix + name: tensor for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "model_args": self.args,
            "iter_num": self.step,
            "best_val_loss": torch.tensor(2.5),
            "config": CONFIG,
        }


def ids_of(text: str) -> np.ndarray:
    characters = sorted(set(TEXT))
    return np.array([characters.index(character) for character in text], dtype=np.uint16)


def write_data(folder: Path) -> Path:
    """Write `train.bin`, `val.bin` and `meta.pkl` as nanoGPT's `prepare.py` does."""
    folder.mkdir(parents=True, exist_ok=True)
    end = int(0.9 * len(TEXT))
    ids_of(TEXT[:end]).tofile(folder / "train.bin")
    ids_of(TEXT[end:]).tofile(folder / "val.bin")
    characters = sorted(set(TEXT))
    meta = {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {character: number for number, character in enumerate(characters)},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def random_steps(count: int, seed: int) -> list[Tensor]:
    """Return random windows of the training text for some steps, [8, 17] each."""
    ids = torch.from_numpy(ids_of(TEXT[: int(0.9 * len(TEXT))]).astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - 17, (count, 8), generator=generator)
    return [torch.stack([ids[first : first + 17] for first in row]) for row in starts.tolist()]
