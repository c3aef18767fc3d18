"""Does torch damage the memory of processes that gather tensors on gloo? See decision 62.

    python studies/gloo_memory.py [SECONDS] [full_tensor | all_gather]

Two processes gather the rows of a DTensor while an asynchronous collective of the same group is under way. With
`full_tensor`, torch 2.13 ends within some minutes, when both cores have other work as well: by `malloc(): unaligned tcache chunk
detected`, by a segmentation fault, or standing still. With `all_gather` it does not.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2
ROUNDS_BETWEEN_LOOKS = 400


def run(rank: int, store: str, seconds: float, way: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=RANKS, timeout=limit
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    matrix = torch.arange(64.0).view(8, 8)
    shards = distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None)
    flags, flags_of_ranks = torch.zeros(3), [torch.empty(3) for _ in range(RANKS)]
    rows = list(torch.empty_like(matrix).chunk(RANKS))
    is_over, rounds, end = torch.zeros(1), 0, time.monotonic() + seconds
    while not is_over.item():
        for _ in range(ROUNDS_BETWEEN_LOOKS):
            work = dist.all_gather(flags_of_ranks, flags, async_op=True)
            if way == "full_tensor":
                shards.full_tensor()
            else:
                dist.all_gather(rows, shards.to_local())
            work.wait()
        rounds += ROUNDS_BETWEEN_LOOKS
        is_over.fill_(time.monotonic() > end)
        dist.broadcast(is_over, 0)
    if rank == 0:
        print(f"torch {torch.__version__}: {rounds} rounds of {way}, nothing happened")


if __name__ == "__main__":
    seconds, way, *_ = [*sys.argv[1:], *("300", "full_tensor")[len(sys.argv) - 1 :]]
    with TemporaryDirectory() as folder:
        mp.spawn(run, (folder, float(seconds), way), RANKS)
