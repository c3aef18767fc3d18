"""The plain contenders of `time_to_loss.py`: one recipe, as each framework's users write it.

    python benchmarks/plain_recipes.py bare|bare-bf16|fabric|hf '{"data": …, "seed": …, "steps": …}'

GPT-2 blocks, AdamW with a peak rate of 4e-3 (the best of 1e-3, 2e-3, 4e-3 and 6e-3), 100 steps of
warm-up, cosine to a tenth, weight decay 0.1 on matrices, gradients clipped at 1, batches of 12
windows at random places. Prints a JSON line with the time and the validation loss at the end.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
PEAK, LOWEST, WARMUP, BETAS, DECAY, CLIP = 4e-3, 4e-4, 100, (0.9, 0.99), 0.1, 1.0


def tokens(folder: str, split: str) -> torch.Tensor:
    """A split of the prepared data set, read with safetensors alone."""
    from safetensors.numpy import load_file

    return torch.from_numpy(
        load_file(f"{folder}/{split}-00000.safetensors")["tokens"].astype(np.int64)
    )


def vocabulary(folder: str) -> int:
    size: int = json.loads(Path(folder, "dataset.json").read_text())["vocab_size"]
    return size


def batch(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
    x = torch.stack([data[i : i + CONTEXT] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in starts])
    return x, y


def rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / max(1, steps - WARMUP))
    return LOWEST + 0.5 * (1 + math.cos(math.pi * progress)) * (PEAK - LOWEST)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(D, dim=2)
        q, k, v = (one.view(B, T, HEADS, D // HEADS).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)
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
def report(logits: Callable[[torch.Tensor], torch.Tensor], data: torch.Tensor) -> None:
    """Print the mean loss over every token of the validation set but the first."""
    full = (len(data) - 1) // CONTEXT
    windows = torch.arange(full)[:, None] * CONTEXT + torch.arange(CONTEXT)
    total = 0.0
    for part in windows.split(128):
        total += F.cross_entropy(
            logits(data[part]).flatten(0, 1), data[part + 1].flatten(), reduction="sum"
        ).item()
    rest = data[full * CONTEXT :]
    if len(rest) > 1:
        total += F.cross_entropy(logits(rest[None, :-1])[0], rest[1:], reduction="sum").item()
    print(json.dumps({"time": time.time(), "loss": total / (len(data) - 1)}), flush=True)


def bare(folder: str, seed: int, steps: int, *, low: bool = False) -> None:
    """`low`: forward passes under bf16 autocast."""
    torch.manual_seed(seed)
    model = PlainGPT(vocabulary(folder))
    optimizer = torch.optim.AdamW(groups(model), lr=PEAK, betas=BETAS, fused=True)
    data, generator = tokens(folder, "train"), torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        x, y = batch(data, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        report(model, tokens(folder, "val"))


def fabric(folder: str, seed: int, steps: int) -> None:
    from lightning.fabric import Fabric

    torch.manual_seed(seed)
    run = Fabric(accelerator="cpu", devices=1)
    run.launch()
    plain = PlainGPT(vocabulary(folder))
    model, optimizer = run.setup(
        plain, torch.optim.AdamW(groups(plain), lr=PEAK, betas=BETAS, fused=True)
    )
    data, generator = tokens(folder, "train"), torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        x, y = batch(data, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        run.backward(loss)
        run.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    report(model, tokens(folder, "val"))


def hf(folder: str, seed: int, steps: int) -> None:
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(seed)
    vocab = vocabulary(folder)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab,
            n_positions=CONTEXT,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
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
            return (len(data) - 1) // CONTEXT

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            # the model shifts labels itself
            window = data[index * CONTEXT : (index + 1) * CONTEXT]
            return {"input_ids": window, "labels": window}

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=PEAK,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": LOWEST / PEAK},
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
    report(lambda x: model(input_ids=x).logits, tokens(folder, "val"))


if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    {"bare": bare, "bare-bf16": partial(bare, low=True), "fabric": fabric, "hf": hf}[sys.argv[1]](
        asked["data"], asked["seed"], asked["steps"]
    )
