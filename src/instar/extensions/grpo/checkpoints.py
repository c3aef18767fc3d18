"""Checkpoints of a GRPO run: which one to resume from, and what TRL leaves out of them.

transformers' checkpoints hold weights, optimizer, schedule and generators. TRL may be in the middle of a
batch of completions that it trains on several times (`num_iterations`); they are written beside these.
`instar.json` is written last: a checkpoint without it is not whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from instar.config.errors import ConfigError
from instar.config.files import of_bounded_depth, read_regular
from instar.extensions.grpo.options import Options
from instar.record.atomic import replace_file
from instar.record.rundir import RunDir

Resume = Literal["latest", "auto"]
MARKER = "instar.json"
COMPLETIONS = "completions.safetensors"
_PREFIX = "checkpoint-"


def find_checkpoint(options: Options, resume: Resume | None) -> Path | None:
    """Return the checkpoint to resume from; None for a start from the beginning.

    Raises:
        ConfigError: there is none, it is of a run with other options, or a new run would overwrite one.
    """
    folder = options.output_dir
    markers = sorted(folder.glob(f"{_PREFIX}*/{MARKER}"), key=lambda path: step_of(path.parent))
    if resume is None:
        if markers or RunDir(folder).holds_run():
            hint = "continue it with --resume, or choose another --run-suffix"
            raise ConfigError.of(f"{folder} holds a run", "--run-suffix", hint)
        return None
    if not markers:
        if resume == "auto":
            return None
        hint = "leave it out to start the run, or write --resume auto for either"
        raise ConfigError.of(f"{folder} has no checkpoint", "--resume", hint)
    checkpoint = markers[-1].parent
    _check_fixed(checkpoint, options)
    return checkpoint


def step_of(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() else -1


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `instar.json`; raises ConfigError."""
    path = checkpoint / MARKER
    try:
        marker = json.loads(of_bounded_depth(read_regular(path)))
        if isinstance(marker, dict) and isinstance(marker.get("options"), dict):
            return marker
        problem = "no options"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ConfigError.of(
        f"{path}: {problem}", where="--resume", hint="remove this checkpoint to use the one before"
    )


def _check_fixed(checkpoint: Path, options: Options) -> None:
    before = read_marker(checkpoint)["options"]
    for key, value in options.fixed().items():
        if before.get(key, value) != value:
            message = f"{checkpoint} was trained with {before[key]!r}, not {value!r}"
            hint = "resume with the same value, or start another run with --run-suffix"
            raise ConfigError.of(message, f"--{key.replace('_', '-')}", hint)


def save_rest(
    checkpoint: Path, trainer: Any, options: Options, progress: Mapping[str, Any]
) -> None:
    """Complete a checkpoint that transformers has written.

    Args:
        progress: what the record of the run goes on with, as JSON; goes into `instar.json`.
    """
    import torch
    from safetensors.torch import save_file

    if trainer.state.global_step % options.num_iterations:
        batches = {
            f"{index}/{name}": torch.clone(
                tensor.detach().cpu(), memory_format=torch.contiguous_format
            )
            for index, batch in enumerate(trainer._buffered_inputs)
            for name, tensor in batch.items()
        }
        save_file(batches, checkpoint / COMPLETIONS)
    content = {"options": options.as_dict(), **progress}
    replace_file(checkpoint / MARKER, json.dumps(content, indent=1).encode())


def restore_rest(checkpoint: Path, trainer: Any, options: Options) -> None:
    """Restore what transformers does not."""
    from safetensors.torch import load_file

    trainer._step = step_of(checkpoint) * options.accumulation
    if (path := checkpoint / COMPLETIONS).exists():
        batches: list[dict[str, Any]] = [{} for _ in range(options.accumulation)]
        for name, tensor in load_file(path, device=str(trainer.accelerator.device)).items():
            index, _, key = name.partition("/")
            batches[int(index)][key] = tensor
        trainer._buffered_inputs = batches
