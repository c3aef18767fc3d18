"""The mean of checkpoints of a run: in mid-run its weights take the place of the present ones.

The ranks agree on the checkpoints before any of them reads one, and each then reads its rows of a tensor from all of
them at a time. A checkpoint that is due at the same step is saved before, with the weights that the run has trained; so a
run that is killed before it saves the mean makes it again, of the same checkpoints: only a save deletes some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from instar.checkpoint.layout import ComponentReader, check_shapes
from instar.checkpoint.listing import list_checkpoints, step_of
from instar.checkpoint.manifest import (
    CheckpointError,
    Line,
    identify,
    is_on_line,
    read_manifest,
)
from instar.checkpoint.store import Checkpoint, check_finite, load_checkpoint
from instar.checkpoint.tensor_file import Read
from instar.config.sections import Operation
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.parallel import check_replicas_equal
from instar.distributed.shards import as_sharded, is_sharded, local_row_range, to_local
from instar.growth.engine import GrownPart, ProvedGrowth
from instar.growth.operators import is_growth
from instar.growth.plan import GrowthPlan
from instar.growth.proof import Probe, prove
from instar.run.changes.live_growth import Ranks, probe, probe_samples
from instar.run.checkpointing import reasons_to_save, save_checkpoint
from instar.run.components import Components
from instar.run.state.run_state import RunState
from instar.run.step.stepper import Stepper, set_model_step
from instar.schedule.operations import History, effective_changes

_SAME_WEIGHTS = ("set_dropout", "change_dropout")
"""operations on the model after which a tensor means what it did before"""

Weights = Mapping[str, Tensor]


def choose_checkpoints(
    root: Path, value: int | Sequence[int], line: Line | None, last_step: int | None = None
) -> list[Path]:
    """Return the checkpoints of a run that a value of `average_checkpoints` means, in the order of their steps.

    Args:
        value: how many of the last ones, or their steps; of a step the newest one counts.
        line: of the run; checkpoints on branches, and of other runs, do not count.
        last_step: later ones do not count.

    Raises:
        CheckpointError: there are fewer, or a manifest cannot be read; names it.
    """
    count = value if isinstance(value, int) else len(value)
    by_step: dict[int, Path] = {}
    elsewhere: list[str] = []
    for path in reversed(list_checkpoints(root)):
        step = step_of(path)
        if len(by_step) == count or step in by_step or (last_step is not None and step > last_step):
            continue
        if not isinstance(value, int) and step not in value:
            continue
        if is_on_line(read_manifest(path), line):
            by_step[step] = path
        else:
            elsewhere.append(path.name)
    if len(by_step) < count:
        raise CheckpointError(_missing(root, value, sorted(by_step), elsewhere))
    return [by_step[step] for step in sorted(by_step)]


def _missing(
    root: Path, value: int | Sequence[int], steps: Sequence[int], elsewhere: Sequence[str]
) -> str:
    names = ", ".join(path.name for path in list_checkpoints(root)) or "none"
    if isinstance(value, int):
        text = f"{value} checkpoints are to be averaged, and {len(steps)} can be"
    else:
        text = f"no checkpoint of step {', '.join(str(s) for s in value if s not in steps)} to be averaged"
    if elsewhere:
        text += f"; {', '.join(elsewhere)}: of another run, or on a branch that this run has left"
    return f"{root / 'checkpoints'}: {text}; there are {names} (checkpoint.keep_last and keep_every say which stay)"


def check_same_model(
    checkpoints: Sequence[Checkpoint], history: History, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise a CheckpointError for one whose weights are not those of the model after `history`."""
    for checkpoint in checkpoints:
        for change in effective_changes(history[len(checkpoint.manifest.history) :]):
            if is_growth(name := change.operation.name) and name not in _SAME_WEIGHTS:
                raise CheckpointError(
                    f"{checkpoint.path}: saved before {name} at step {change.step:,}: its weights are those of "
                    "another model, and have no mean with later ones"
                )
        check_shapes(checkpoint.path, checkpoint.layout("model").entries, shapes)


def mean_tensor(reads: Mapping[Path, Read], name: str) -> Tensor:
    """Return the mean of a tensor over checkpoints, in float64.

    Raises:
        CheckpointError: one of them holds a value that is not finite.
    """
    total: Tensor | None = None
    for path, read in reads.items():
        tensor = read(name)
        check_finite(path, {name: tensor}, hint="leave this checkpoint out")
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float64))
        total = wide if total is None else total.add_(wide)
    assert total is not None
    return total.div_(len(reads))


def average_weights(
    state: RunState, parts: Components, operation: Operation
) -> tuple[ProvedGrowth[Weights], tuple[Operation, str]]:
    """Return the mean of checkpoints, which is not in use yet; and the operation with their steps, and their names.

    A collective. Optimizer states, the moving average and buffers are not touched.

    Raises:
        CheckpointError, PeerError: a checkpoint is missing, damaged or of another model.
        ValueError: the mean gives outputs that are not finite.
    """
    if state.save_checked_at != state.step and (reasons := reasons_to_save(state, parts)):
        save_checkpoint(state, parts, ", ".join(reasons), must=True)
        parts.sync.begin(f"{operation.name} after step {state.step}", state.step)
    parts.saver.finish()
    parts.saver.free()  # the mean needs memory now
    world, stepper = parts.world, parts.stepper
    digests = _agree_on_checkpoints(state, parts, operation.value)
    with raise_on_all_ranks(world, "reading the checkpoints to be averaged"):
        weights = _read_mean(parts.saver.root, digests, stepper.parameters)
    whole_weights = {name: tensor for name, tensor in weights.items() if not is_sharded(tensor)}
    check_replicas_equal(world, whole_weights)
    stepper.share_buffers()
    plan = GrowthPlan({}, "lossy")
    dtypes = {tensor.dtype for tensor in weights.values()}
    peers = Ranks(world, "comparing the model with the mean of its checkpoints")
    proof = prove(plan, partial(_outputs, state, parts, weights), dtypes, peers=peers)
    if not proof.holds:
        raise ValueError("the outputs of the model, or of the mean, are not finite")
    part = GrownPart(lambda _: None, partial(_assign, stepper, weights))
    steps = [step_of(Path(name)) for name in digests]
    averaging = ProvedGrowth(weights, plan, proof, [part])
    return averaging, (replace(operation, value=steps), f"mean of {', '.join(digests)}")


def _agree_on_checkpoints(
    state: RunState, parts: Components, value: int | Sequence[int]
) -> dict[str, str]:
    """Return the names of the checkpoints, every byte of which rank 0 has checked, and the digests of their manifests."""
    digests: dict[str, str] = {}
    with raise_on_all_ranks(parts.world, "choosing the checkpoints to be averaged"):
        if parts.world.is_main:
            paths = choose_checkpoints(parts.saver.root, value, parts.line, state.step)
            shapes = {name: tuple(p.shape) for name, p in parts.stepper.parameters.items()}
            check_same_model([load_checkpoint(path) for path in paths], state.history, shapes)
            digests = {path.name: identify(path).manifest for path in paths}
    return cast("dict[str, str]", agree(parts.world, digests))


def _read_mean(root: Path, digests: Mapping[str, str], parameters: Weights) -> Weights:
    """Return the mean of the parameters, laid out as they are; of integers there is none."""
    with ExitStack() as stack:
        readers: dict[Path, ComponentReader] = {}
        for name, digest in digests.items():
            path = root / "checkpoints" / name
            if identify(path).manifest != digest:
                raise CheckpointError(f"{path}: rank 0 reads another checkpoint there")
            reading = load_checkpoint(path, check=False).reading("model")
            readers[path] = stack.enter_context(reading)
        return {
            name: _mean_like(readers, name, parameter)
            for name, parameter in parameters.items()
            if parameter.is_floating_point() or parameter.is_complex()
        }


@torch.no_grad()
def _mean_like(readers: Mapping[Path, ComponentReader], name: str, like: Tensor) -> Tensor:
    if not is_sharded(like):
        mean = mean_tensor(readers, name)
        return torch.empty_like(like).copy_(mean)
    rows = local_row_range(like)
    mean = mean_tensor({path: _rows_of(read, *rows) for path, read in readers.items()}, name)
    return as_sharded(torch.empty_like(to_local(like)).copy_(mean), like)


def _rows_of(reader: ComponentReader, first: int, last: int) -> Read:
    return lambda name: reader.rows(name, first, last)


def _outputs(state: RunState, parts: Components, weights: Weights) -> tuple[Probe, Probe]:
    """Return the outputs of the model with its own weights and with others, for the same held-out samples."""
    stepper = parts.stepper
    samples = probe_samples(parts.validation, parts.world.device)
    set_model_step(stepper.unwrapped_model, state.step)
    with stepper.strategy.evaluating(None):
        before = probe(parts.task, stepper.unwrapped_model, samples)
    with stepper.strategy.evaluating(weights):
        return before, probe(parts.task, stepper.unwrapped_model, samples)


@torch.no_grad()
def _assign(stepper: Stepper, weights: Weights) -> None:
    for name, tensor in weights.items():
        to_local(stepper.parameters[name]).copy_(to_local(tensor))
