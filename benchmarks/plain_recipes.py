"""The plain contenders of `time_to_loss.py`: one recipe, as each framework's users write it.

    python benchmarks/plain_recipes.py bare|bare-bf16|fabric|hf '{"data": …, "seed": …, "steps": …, "recipe": {…}}'

GPT-2 blocks, AdamW with a tuned peak rate, 100 steps of warm-up, cosine to a tenth, weight decay 0.1
on matrices, gradients clipped at 1, batches of windows at random places. Prints a JSON line with the time
and the validation loss at the end.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

WARMUP, BETAS, DECAY, CLIP, LOWEST_SHARE = 100, (0.9, 0.99), 0.1, 1.0, 0.1


@dataclass(frozen=True)
class Recipe:
    """A shape, and what a recipe has of its own at that size."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    peak: float
    """of the learning rate"""


def tokens(folder: str, split: str) -> torch.Tensor:
    """A split of the prepared data set, read with safetensors alone."""
    from safetensors.numpy import load_file

    return torch.from_numpy(
        load_file(f"{folder}/{split}-00000.safetensors")["tokens"].astype(np.int64)
    )


def vocabulary(folder: str) -> int:
    size: int = json.loads(Path(folder, "dataset.json").read_text())["vocab_size"]
    return size


def batch(
    recipe: Recipe, data: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    context = recipe.context
    starts = torch.randint(len(data) - context, (recipe.batch,), generator=generator)
    x = torch.stack([data[i : i + context] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + context] for i in starts])
    return x, y


def rate(recipe: Recipe, step: int, steps: int) -> float:
    if step < WARMUP:
        return recipe.peak * (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / max(1, steps - WARMUP))
    lowest = recipe.peak * LOWEST_SHARE
    return lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (recipe.peak - lowest)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(D, dim=2)
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    def __init__(self, recipe: Recipe, vocab: int) -> None:
        super().__init__()
        layers, width = recipe.layers, recipe.width
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(recipe.context, width)
        self.blocks = nn.ModuleList(Block(width, recipe.heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.tokens.weight)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]


@torch.no_grad()
def report(
    recipe: Recipe, logits: Callable[[torch.Tensor], torch.Tensor], data: torch.Tensor
) -> None:
    """Print the mean loss over every token of the validation set but the first."""
    context = recipe.context
    full = (len(data) - 1) // context
    windows = torch.arange(full)[:, None] * context + torch.arange(context)
    total = 0.0
    for part in windows.split(8192 // context):
        total += F.cross_entropy(
            logits(data[part]).flatten(0, 1), data[part + 1].flatten(), reduction="sum"
        ).item()
    remainder = data[full * context :]
    if len(remainder) > 1:
        total += F.cross_entropy(
            logits(remainder[None, :-1])[0], remainder[1:], reduction="sum"
        ).item()
    print(json.dumps({"time": time.time(), "loss": total / (len(data) - 1)}), flush=True)


def bare(recipe: Recipe, folder: str, seed: int, steps: int, *, low: bool = False) -> None:
    """`low`: forward passes under bf16 autocast."""
    torch.manual_seed(seed)
    model = PlainGPT(recipe, vocabulary(folder))
    optimizer = torch.optim.AdamW(groups(model), lr=recipe.peak, betas=BETAS, fused=True)
    data, generator = tokens(folder, "train"), torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step, steps)
        x, y = batch(recipe, data, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        report(recipe, model, tokens(folder, "val"))


def fabric(recipe: Recipe, folder: str, seed: int, steps: int) -> None:
    from lightning.fabric import Fabric

    torch.manual_seed(seed)
    run = Fabric(accelerator="cpu", devices=1)
    run.launch()
    plain = PlainGPT(recipe, vocabulary(folder))
    model, optimizer = run.setup(
        plain, torch.optim.AdamW(groups(plain), lr=recipe.peak, betas=BETAS, fused=True)
    )
    data, generator = tokens(folder, "train"), torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step, steps)
        x, y = batch(recipe, data, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        run.backward(loss)
        run.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    report(recipe, model, tokens(folder, "val"))


def hf(recipe: Recipe, folder: str, seed: int, steps: int) -> None:
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(seed)
    vocab = vocabulary(folder)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab,
            n_positions=recipe.context,
            n_embd=recipe.width,
            n_layer=recipe.layers,
            n_head=recipe.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            activation_function="gelu",
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    data = tokens(folder, "train")

    class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return (len(data) - 1) // recipe.context

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            # the model shifts labels itself
            window = data[index * recipe.context : (index + 1) * recipe.context]
            return {"input_ids": window, "labels": window}

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=recipe.batch,
            learning_rate=recipe.peak,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": LOWEST_SHARE},
            warmup_steps=min(WARMUP, max(1, steps // 2)),
            weight_decay=DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=seed,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=Windows()).train()
    model.eval()
    report(recipe, lambda x: model(input_ids=x).logits, tokens(folder, "val"))


if __name__ == "__main__":
    request = json.loads(sys.argv[2])
    {"bare": bare, "bare-bf16": partial(bare, low=True), "fabric": fabric, "hf": hf}[sys.argv[1]](
        Recipe(**request["recipe"]), request["data"], request["seed"], request["steps"]
    )
