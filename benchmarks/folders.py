"""How much memory and time `instar grow` needs for a model of transformers of 7 billion parameters.

    python benchmarks/folders.py [--quick] [--layers N]

The layout of Llama 2 7B in bfloat16, random numbers in three shards, 13.5 GB; with fewer layers, of the same
tensors, for a small disk. In turns: the folder is copied by `cp` and synced; and grown by inserted layers, one for eight,
and wider MLPs, by the command in a process of its own. With 32 layers the disk needs 35 GB. A twin of 4 layers is grown
the same way, and its logits are compared.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from instar.checkpoint.tensor_file import Outline
from instar.models.hf.pretrained import PretrainedShape
from instar.models.hf.pretrained_folder import file_parts
from instar.models.hf.weights import write_weights
from report import case, options, parser, publish

LAYERS_7B = 32
TWIN = LlamaConfig(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    vocab_size=1000,
)
REPEATS = 3


def make(folder: Path, config: LlamaConfig, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Write a model of random numbers, all tensors a part of the same ones."""
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    parts = file_parts(PretrainedShape(config.to_dict()), single_experts=False)
    outlines = {name: Outline(dtype, part.shape) for name, part in parts.items()}
    size = max(outline.size_bytes // dtype.itemsize for outline in outlines.values())
    block = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)

    def tensor(name: str, outline: Outline) -> Tensor:
        size = outline.size_bytes // dtype.itemsize
        if len(outline.shape) == 1:
            return torch.ones(outline.shape, dtype=dtype)
        start = len(name) * 4099 % (len(block) - size + 1)
        return block[start : start + size].reshape(outline.shape)

    makers = {name: partial(tensor, name, outline) for name, outline in outlines.items()}
    write_weights(folder, outlines, makers, max_shard_bytes)


def run(command: Sequence[str | Path]) -> tuple[float, int, str]:
    """Return seconds until what a command wrote is on the disk, its most memory in bytes, and its output."""
    start, peak = time.perf_counter(), 0
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while child.poll() is None:  # what it says fits into the pipe
            peak = max(peak, _peak(child.pid))
            time.sleep(0.02)
        output = child.stdout.read()
    assert child.returncode == 0, command
    os.sync()
    return time.perf_counter() - start, peak, output


def _peak(process: int) -> int:
    """Return the most memory that a process had; `ru_maxrss` would begin with that of its parent."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has ended
        return 0
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument(
        "--layers", type=int, default=LAYERS_7B, metavar="N", help="default: %(default)s"
    )
    arguments = command_line.parse_args()
    run_options = options(arguments)
    layer_count = max(1, arguments.layers // 8)
    operations = ("--op", f"insert_layers={layer_count} where=even", "--op", "widen_mlp=x1.25")
    measurements: dict[str, list[float]] = {
        "copied": [],
        "grown": [],
        "without start": [],
        "memory": [],
    }
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        small, copy_dir, grown_dir = (Path(place) / name for name in ("small", "copied", "grown"))

        def turn(flag: str) -> dict[str, Any]:
            seconds, _, _ = run(["cp", "-r", small, copy_dir])
            measurements["copied"].append(size_of(copy_dir) / seconds / 1e9)
            shutil.rmtree(copy_dir)
            instar = [sys.executable, "-m", "instar", "grow", small, grown_dir, *operations, flag]
            seconds, peak, output = run([*instar, "--json"])
            measurements["grown"].append(size_of(grown_dir) / seconds / 1e9)
            measurements["memory"].append(peak / 1e9)
            result: dict[str, Any] = json.loads(output)
            measurements["without start"].append(size_of(grown_dir) / result["seconds"] / 1e9)
            return result

        make(small, TWIN, torch.float32, 10**7)
        report = turn("--check")
        drift = report["proof"]["max_logit_diff_relative"]
        if not run_options.quick:
            measurements = {name: [] for name in measurements}
            shutil.rmtree(small)
            make(small, LlamaConfig(num_hidden_layers=arguments.layers), torch.bfloat16, 5 * 10**9)
            for _ in range(REPEATS):
                shutil.rmtree(grown_dir)
                report = turn("--no-proof")
        sizes = [size_of(folder) / 1e9 for folder in (small, grown_dir)]
    ratio = [a / b for a, b in zip(measurements["grown"], measurements["copied"], strict=True)]
    publish(
        "folders",
        [
            case("parameters, small", [report["parameters_before"] / 1e9], "billions"),
            case("parameters, grown", [report["stages"][-1]["parameters"] / 1e9], "billions"),
            case("folder, small", [sizes[0]], "GB"),
            case("folder, grown", [sizes[1]], "GB"),
            case("instar grow, most memory", measurements["memory"], "GB", most=2.0),
            case("cp", measurements["copied"], "GB/s"),
            case("instar grow", measurements["grown"], "GB/s"),
            case("instar grow, without its start", measurements["without start"], "GB/s"),
            case("instar grow / cp", ratio, "ratio", least=0.6),
            case("twin: logits moved by", [drift], "of max", most=1e-5),
        ],
        run_options,
        libraries=["transformers", "safetensors"],
        layers=arguments.layers,
    )


if __name__ == "__main__":
    main()
