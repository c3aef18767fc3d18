"""How fast two ranks save and load a sharded model, against the bare disk and against torch's own.

    python benchmarks/sharded_saves.py [--quick]

100 M parameters and their two AdamW moments, 1.2 GB, half of them on each of two ranks. In turns: as
many bytes that are in memory already, written and synced by both ranks; a checkpoint, with its
checksums; and one of `torch.distributed.checkpoint`, which has none. Both are then loaded, ours with
all checksums verified: once with the files of both in the page cache, and once with neither, for ours are written past it
and torch's through it. A background save stops training for its call. In the end a byte in the middle of each checkpoint is
flipped.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from instar.checkpoint.layout import Parts
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import CheckpointContent, load_checkpoint, publish_checkpoint
from instar.checkpoint.tensor_file import rows_to_save
from instar.config.budget import Counters
from instar.config.schema import CheckpointConfig, ParallelConfig
from instar.distributed.shards import to_local
from instar.distributed.world import World, join_group
from instar.run.optimizer import copy_tensors
from instar.run.output.save import Saver, Snapshot
from report import Options, case, options, parser
from report import publish as publish_cases

RANKS = 2
LAYERS, ROWS, COLUMNS = 24, 4096, 1024
STATES = {"model": ("",), "optimizer": ("/exp_avg", "/exp_avg_sq")}
REPEATS = 3

State = Mapping[str, Mapping[str, Tensor]]
"""this rank's rows of the tensors of each component"""


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--place", type=Path, help="of the ranks, which are started with it")
    arguments = command_line.parse_args()
    run_options = options(arguments)
    if arguments.place is not None:
        with join_group(ParallelConfig(timeout_s=600), "cpu") as world:
            Ranks(world, arguments.place, run_options.quick).measure()
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        run_ranks(["--place", folder, *(["--quick"] if run_options.quick else [])])
        figures = json.loads((Path(folder) / "figures.json").read_text())
    report(figures, run_options)


def run_ranks(words: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *words], env={**os.environ, **common, "RANK": str(rank)}
        )
        for rank in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * RANKS, codes


class Ranks:
    """What one of the ranks does."""

    def __init__(self, world: World, place: Path, quick: bool) -> None:
        self.world, self.place, self.repeats = world, place, 1 if quick else REPEATS
        self.mesh = init_device_mesh("cpu", (RANKS,))
        self.shape = (2, 64, 16) if quick else (LAYERS, ROWS, COLUMNS)
        self.figures: dict[str, list[float]] = {}

    def state(self, fill: float | None = None) -> State:
        """Random numbers, or one."""
        layers, rows, columns = self.shape
        return {
            component: {
                f"layers.{layer}.weight{state}": DTensor.from_local(
                    torch.randn(rows // RANKS, columns)
                    if fill is None
                    else torch.full((rows // RANKS, columns), fill),
                    self.mesh,
                    [Shard(0)],
                )
                for layer in range(layers)
                for state in states
            }
            for component, states in STATES.items()
        }

    def measure(self) -> None:
        torch.manual_seed(self.world.rank)
        saved_state = self.state()
        for repeat in range(1, self.repeats + 1):
            self.turn(saved_state, last=repeat == self.repeats)
        if self.world.is_main:
            (self.place / "figures.json").write_text(json.dumps(self.figures))

    def turn(self, saved_state: State, *, last: bool) -> None:
        run_dir, dcp_dir = self.place / "run", self.place / "dcp"
        self.time_work("raw synced write", lambda: self.raw(saved_state))
        self.time_work("save", lambda: self.save(run_dir, 1, saved_state))
        self.time_work("torch DCP, save", lambda: dcp.save(saved_state, checkpoint_id=dcp_dir))
        self.background(run_dir, 2, saved_state)
        path = run_dir / "checkpoints" / "step-1"
        for where, prepare in (("", read_all), (" from the disk", drop_all)):
            loaded_state, dcp_state = self.state(0.0), self.state(0.0)
            if self.world.is_main:
                prepare(path)
                prepare(dcp_dir)
            self.time_work(f"load{where}", lambda: self.load(path, loaded_state))  # noqa: B023
            self.time_work(
                f"torch DCP, load{where}",
                lambda: dcp.load(dcp_state, checkpoint_id=dcp_dir),  # noqa: B023
            )
            assert self.same(saved_state, loaded_state)
            assert self.same(saved_state, dcp_state)
        if last:
            self.figures["damage named"] = [self.names_damage(path, saved_state)]
            self.figures["DCP, damage found"] = [
                self.dcp_notices_damage(dcp_dir, saved_state, dcp_state)
            ]
        dist.barrier()
        if self.world.is_main:
            shutil.rmtree(dcp_dir)
            shutil.rmtree(run_dir)

    def time_work(self, name: str, work: Callable[[], object]) -> None:
        """Until the last rank has done it."""
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        self.figures.setdefault(name, []).append(time.perf_counter() - start)
        if self.world.is_main:
            print(f"{name}: {self.figures[name][-1]:.2f} s", file=sys.stderr)

    def raw(self, state: State) -> None:
        path = self.place / f"raw-{self.world.rank}"
        with path.open("wb") as file:
            for tensors in state.values():
                for tensor in tensors.values():
                    file.write(to_local(tensor).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()

    def save(self, root: Path, step: int, state: State) -> None:
        components = {
            c: {n: rows_to_save(t) for n, t in tensors.items()} for c, tensors in state.items()
        }
        publish_checkpoint(root, step, CheckpointContent(components, {}, {}), world=self.world)

    def background(self, root: Path, step: int, state: State) -> None:
        """A save for which training stops only while the tensors are copied."""
        saver = Saver(CheckpointConfig(asynchronous=True), self.world, root, lambda _: None)
        components = {
            c: {n: rows_to_save(t) for n, t in tensors.items()} for c, tensors in state.items()
        }
        snapshot = Snapshot(components, {}, {}, progress=Counters(step=step))
        self.time_work("stall of a background save", lambda: saver.save(snapshot))
        saver.finish()

    def load(self, path: Path, state: State) -> None:
        """As a resume does: rank 0 reads every byte for the checksums, then each rank its rows."""
        if self.world.is_main:
            load_checkpoint(path)
        dist.barrier()
        checkpoint = load_checkpoint(path, check=False)
        for component, targets in state.items():
            with checkpoint.reading(component) as read:
                copy_tensors(targets, Parts(read, targets, targets.__getitem__))

    def same(self, saved_state: State, loaded_state: State) -> bool:
        return all(
            torch.equal(to_local(tensor), to_local(loaded_state[component][name]))
            for component, tensors in saved_state.items()
            for name, tensor in tensors.items()
        )

    def names_damage(self, path: Path, saved_state: State) -> float:
        """Whether a flipped byte is found and its file named."""
        file = path / "optimizer" / "1-of-2.safetensors"
        if self.world.rank == 1:
            flip(file, saved_state)
        dist.barrier()
        if self.world.is_main:
            try:
                load_checkpoint(path)
            except CheckpointError as error:
                return float(str(file) in str(error))
        return 0.0

    def dcp_notices_damage(self, folder: Path, saved_state: State, loaded_state: State) -> float:
        """Whether loading fails; it is checked that what was loaded differs otherwise."""
        if self.world.rank == 1:
            flip(folder / "__1_0.distcp", saved_state)
        dist.barrier()
        try:
            dcp.load(loaded_state, checkpoint_id=folder)
        except CheckpointException:
            return 1.0
        assert self.world.is_main or not self.same(saved_state, loaded_state)
        return 0.0


def read_all(folder: Path) -> None:
    """Bring the files of a folder into the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def drop_all(folder: Path) -> None:
    """Take the files of a folder, which are synced, out of the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flip(file: Path, saved_state: State) -> None:
    """Change a bit of a moment that a file holds."""
    (_, moment), *_ = saved_state["optimizer"].items()
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as content:
        place = content.find(to_local(moment).numpy().tobytes()[:64])
        assert place >= 0
        content[place] ^= 1


def report(figures: Mapping[str, list[float]], run_options: Options) -> None:
    def ratio(first: str, other: str) -> list[float]:
        return [a / b for a, b in zip(figures[first], figures[other], strict=True)]

    loads = ("load", "torch DCP, load", "load from the disk", "torch DCP, load from the disk")
    seconds = ("raw synced write", "save", "torch DCP, save", *loads)
    publish_cases(
        "sharded_saves",
        [
            *(case(name, figures[name], "s") for name in (*seconds, "stall of a background save")),
            case("save / raw synced write", ratio("save", "raw synced write"), "ratio", most=1.3),
            case("torch DCP / ours, save", ratio("torch DCP, save", "save"), "ratio", least=3.0),
            case("torch DCP / ours, load", ratio("torch DCP, load", "load"), "ratio", least=3.0),
            case(
                "torch DCP / ours, load from the disk",
                ratio("torch DCP, load from the disk", "load from the disk"),
                "ratio",
            ),
            case("flipped byte: ours names the file", figures["damage named"], "of 1", least=1.0),
            case("flipped byte: torch DCP notices", figures["DCP, damage found"], "of 1"),
        ],
        run_options,
    )


if __name__ == "__main__":
    main()
