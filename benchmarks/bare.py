"""A training loop in PyTorch and nothing around it, as a script of its own.

    python benchmarks/bare.py SHARD '{"n_layer": 2, …}' BATCH_SIZE STEPS

Prints the Unix time at which its first step was done.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_

from instar.models.architecture import Architecture
from instar.models.gpt import GPT


def main(shard: str, shape: str, batch_size: int, steps: int) -> None:
    arch = Architecture.from_dict(json.loads(shape))
    model = GPT(arch)
    model.init_weights(seed=1337)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = load_file(shard)["tokens"]
    length = batch_size * arch.context
    for step in range(steps):
        window = tokens[step * length : (step + 1) * length + 1].long()
        inputs, targets = (part.view(batch_size, -1) for part in (window[:-1], window[1:]))
        loss = model(inputs, targets) / length
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            print(time.time())


if __name__ == "__main__" and len(sys.argv) == 5:
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
