"""What each rank does that trains a GPT under DDP for a step and publishes it.

Arguments: the run's folder, and the architecture as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from instar.checkpoint.store import CheckpointContent, publish_checkpoint
from instar.config.schema import DDPConfig, ParallelConfig
from instar.distributed.parallel import unwrap, wrap
from instar.distributed.world import join_group
from instar.models.architecture import Architecture
from instar.models.gpt import GPT


def train_and_save(root: Path, arch: Architecture) -> None:
    with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
        model = GPT(arch)
        model.init_weights(0)
        ddp_model = wrap(model, world, DDPConfig())
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
        tokens = (torch.arange(16).reshape(2, 8) + world.rank) % arch.vocab_size
        ddp_model(tokens, tokens.roll(-1)).backward()
        optimizer.step()
        bare = unwrap(ddp_model)
        weights = dict(bare.named_parameters())
        publish_checkpoint(
            root, 1, CheckpointContent({"model": weights}, {}, arch.to_dict()), world=world
        )
        if world.is_main:
            with torch.no_grad():
                save_file({"logits": ddp_model(tokens).contiguous()}, root / "logits.safetensors")


if __name__ == "__main__":
    train_and_save(Path(sys.argv[1]), Architecture(**json.loads(sys.argv[2])))
