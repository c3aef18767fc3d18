"""Checkpoints that ranks would have saved in parts, and the memory of a process that reads one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from instar.checkpoint.layout import Parts, SavedRows
from instar.checkpoint.manifest import Facts
from instar.checkpoint.store import CheckpointWriter, load_checkpoint
from instar.models.hf.folder import export_folder
from instar.run.optimizer import load_optimizer_tensors, parameter_of
from instar.run.start.restore import load_model_state

MIB = 1 << 20
WIDTHS = (1024, 4096)
LAYERS = 4


def save(
    root: Path,
    components: Mapping[str, Mapping[str, torch.Tensor]],
    shards: int,
    architecture: Mapping[str, Any],
) -> Path:
    """Save step 1 as so many ranks would, one after another."""
    writers = [CheckpointWriter(root, 1) for _ in range(shards)]
    writers[0].open()
    for shard, writer in enumerate(writers):
        writer.temporary = writers[0].temporary
        parts = {
            name: {key: rows_of(tensor, shard, shards) for key, tensor in tensors.items()}
            for name, tensors in components.items()
        }
        writer.write(parts, {}, shard)
        writers[0].files.update(writer.files)
    return writers[0].publish(
        architecture=dict(architecture), history=[], facts=Facts(), world_size=shards
    )


def rows_of(tensor: torch.Tensor, shard: int, shards: int) -> torch.Tensor | SavedRows:
    if tensor.ndim == 0:
        return tensor
    rows_per_shard = -(-len(tensor) // shards)
    first = min(len(tensor), shard * rows_per_shard)
    rows = tensor[first : first + rows_per_shard]
    return SavedRows(rows, first, tuple(tensor.shape), shard, shards, saved=True)


def linears() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(*WIDTHS, bias=False) for _ in range(LAYERS)))


def save_linears(root: Path) -> Path:
    """A model and its two moments, of 16 MiB each tensor, in two parts."""
    weights = {name: weight.detach() for name, weight in linears().named_parameters()}
    moments = {f"{n}/{m}": w + 1 for n, w in weights.items() for m in ("exp_avg", "exp_avg_sq")}
    steps = {f"{name}/step": torch.tensor(1.0) for name in weights}
    return save(root, {"model": weights, "optimizer": {**moments, **steps}}, 2, {})


def load_a_quarter(folder: str) -> int:
    """As the third of four ranks that share a model. Prints by how many MiB memory grew at most."""
    # which most tests of what is saved do not need
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    with torch.device("meta"):
        model = linears()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model.to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values())

    with load_checkpoint(Path(folder)).reading("model") as component:
        component.rows("0.weight", 0, 1)  # what the library itself takes is not counted

    def read() -> None:
        checkpoint = load_checkpoint(Path(folder))
        load_model_state(model, checkpoint)
        with checkpoint.reading("optimizer") as component:
            states = Parts(
                component, component.layout.entries, lambda name: parameters[parameter_of(name)]
            )
            load_optimizer_tensors([optimizer], parameters, states)

    print(f"{peak_growth(read) / MIB:.1f}")
    return 0


def export(folder: str, to: str) -> int:
    """Prints by how many MiB memory grew at most."""
    checkpoint = load_checkpoint(Path(folder))
    print(f"{peak_growth(lambda: export_folder(checkpoint, Path(to))) / MIB:.1f}")
    return 0


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes that the largest resident memory during `work` is above that before."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest until now
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])
