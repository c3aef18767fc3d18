"""Offline growth of a checkpoint on disk, and the mean of several, of any task.

They create a new run folder with one checkpoint. A grown one is the same as the operations would have produced in
the live run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from instar.checkpoint.layout import open_reader
from instar.checkpoint.listing import step_of
from instar.checkpoint.manifest import (
    COMPONENTS,
    STATE,
    CheckpointError,
    Facts,
    Pattern,
    encode_json,
    line_of,
)
from instar.checkpoint.store import Checkpoint, CheckpointWriter, load_checkpoint
from instar.checkpoint.tensor_file import Outline, outlines, write_tensors
from instar.config.errors import ConfigError, InstarError
from instar.config.fields import CAUSAL_LM, LANGUAGE
from instar.config.files import read_regular
from instar.config.load import load_config
from instar.config.sections import Operation
from instar.config.user_code.failures import what_happened
from instar.data.text.foreign.special_tokens import END_FILE
from instar.data.text.tokenizer import TOKENIZER_FILE
from instar.growth.apply import (
    GrowthStep,
    Read,
    TensorReader,
    grow_buffers,
    grow_parameters,
    grow_states,
    moments_mode,
)
from instar.growth.offline import (
    DiskGrowth,
    GrowthStage,
    OfflineGrowth,
    PlannedGrowth,
    as_config_error,
    copies_warning,
    stage,
    write_and_prove,
)
from instar.growth.proof import Probe
from instar.models.gpt import named_generator
from instar.models.hf.module import load_language_model
from instar.models.hf.tokenizer import COMPANIONS
from instar.models.shape import Growable, count_parameters
from instar.record import atomic
from instar.record.atomic import atomic_dir, check_new
from instar.record.progress import folder_bytes, progress
from instar.record.rundir import RunDir
from instar.record.start_folder import begun_in, note_start, read_start
from instar.run.changes.average import check_same_model, choose_checkpoints, mean_tensor
from instar.run.changes.live_growth import probe, probe_samples
from instar.run.offline.saved_model import config_with_task, model_and_state, restored, run_of
from instar.run.optimizer import check_states
from instar.run.state.gradient_stats import dead_ranks
from instar.schedule.operations import (
    Change,
    History,
    State,
    history_from_json,
    history_to_json,
    number_of,
    plan_operation,
)
from instar.schedule.settings import AVERAGE
from instar.tasks.task import Task, spec_class

REASON, MEAN_REASON = "instar grow", "instar checkpoint average"
PROBE_SAMPLES, PROBE_TOKENS = 4, 128
"""shape [samples, tokens] of the random tokens on which a proof compares logits"""

Build = Callable[[Any], torch.nn.Module]


@dataclass(frozen=True)
class _PlannedCheckpoint(PlannedGrowth):
    history: History
    state: State
    """after the operations"""


Written = tuple[Path, Mapping[str, torch.Tensor]]
"""The folder of a grown checkpoint, and its model's persistent buffers."""


def grow_checkpoint(
    source: Checkpoint, out: Path, operations: Sequence[Operation], *, check: bool = False
) -> OfflineGrowth:
    """Create the run `out`, with one checkpoint: `source` after `operations`.

    All operations, also those on settings, are added to the history. A mask of an operation opens
    from the checkpoint's step on, when the run is resumed.

    Args:
        check: compare the outputs before and after, and write nothing unless the labels hold: of a
            GPT on random tokens, of other models on held-out samples of the run.

    Raises:
        ConfigError: an operation is not possible for this model; or, with `check`, the run's data
            cannot be opened.
        CheckpointError: `source` is not a run's checkpoint.
        WriteError: `out` cannot be written or is not empty.
        NotProven: a label does not hold.
    """
    start = time.perf_counter()
    check_new(out)
    run = run_of(source)
    source = replace(source, path=source.path.absolute())
    _, base, overrides = begun_in(run, ())
    with chdir(base):
        config = config_with_task(run, source.manifest)
    model, history, state = model_and_state(config, source)
    plan = _plan_checkpoint(operations, config.seed, history, state, source)
    with (
        atomic_dir(out) as temporary,
        progress(f"writing {out}", measure=lambda: folder_bytes(temporary)),
    ):
        new_run = RunDir(temporary)
        _begin_run(new_run, run, base)

        def outputs(files: Written) -> tuple[Probe, Probe]:
            if on_tokens:
                return _outputs_on_tokens(source.path, files[0])
            with chdir(base), _code_of(config.task):
                task, ends = _task_of(run, overrides), (state, plan.state)
                tasks = [task.at(end.architecture, end.settings.context) for end in ends]
                return _outputs_on_samples(tasks, model.build, source, load_checkpoint(files[0]))

        on_tokens = config.task in (LANGUAGE, CAUSAL_LM)
        growth = DiskGrowth(
            plan,
            out,
            "random tokens" if on_tokens else "held-out samples",
            partial(_write, source, new_run, plan, model.build),
            outputs,
            partial(_read_again, source, plan),
        )
        (folder, _), proof = write_and_prove(growth, check=check)
    before = count_parameters(state.architecture).total
    path = RunDir(out).checkpoints / folder.name
    warning = _warning(source, plan, path)
    seconds = time.perf_counter() - start
    checked_on = growth.checked_on if proof else ""
    return OfflineGrowth(path, before, plan.stages, proof, seconds, warning, checked_on)


def _warning(source: Checkpoint, plan: _PlannedCheckpoint, path: Path) -> str:
    """Return what in the grown checkpoint at `path` cannot learn; empty: nothing."""
    has_states = "optimizer" in source.components
    entries = source.layout("optimizer").entries if has_states else {}
    shapes = {name: torch.empty(entry.shape, device="meta") for name, entry in entries.items()}
    with load_checkpoint(path, check=False).reading("model") as read:
        dead = dead_ranks(plan.state.architecture.parameters(), read)
    return "; ".join(filter(None, (copies_warning(plan, shapes), dead)))


def average_checkpoints(root: Path, value: int | Sequence[int], out: Path) -> Path:
    """Create the run `out`, with one checkpoint: the last of those averaged, with the mean of their weights, and without a
    moving average, which would be used in their place.

    Args:
        root: of the run.
        value: how many of its last checkpoints, or their steps.

    Raises:
        CheckpointError: one is missing, damaged or of another model.
        WriteError: `out` cannot be written or is not empty.
    """
    check_new(out)
    paths = choose_checkpoints(root.absolute(), value, line_of(root))
    checkpoints = [load_checkpoint(path) for path in paths]
    source = checkpoints[-1]
    run, step, names = run_of(source), source.manifest.step, ", ".join(p.name for p in paths)
    try:
        history = history_from_json(source.manifest.history)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    shapes = {name: entry.shape for name, entry in source.layout("model").entries.items()}
    check_same_model(checkpoints, history, shapes)
    operation = Operation(AVERAGE, [step_of(path) for path in paths])
    cursor, reason = int(source.manifest.progress.get("samples", 0)), f"{MEAN_REASON}: {names}"
    change = Change(operation, step, cursor, reason=f"{reason} of {run.path.name}")
    with atomic_dir(out) as temporary:
        new_run = RunDir(temporary)
        _begin_run(new_run, run, begun_in(run, ())[1])
        writer = CheckpointWriter(new_run.path, step)
        with writer.removed_on_error():
            writer.open()
            for component in source.components:
                if component == "model":
                    _write_mean(checkpoints, writer.temporary)
                elif component != "ema":
                    _write_component(component, source, writer.temporary, (), {})
            architecture, buffers = source.manifest.architecture, source.manifest.buffers
            new_history = (*history, change)
            path = _publish(
                writer, source, architecture, new_history, buffers, change.reason, exact=False
            )
    return RunDir(out).checkpoints / path.name


def _write_mean(checkpoints: Sequence[Checkpoint], temporary: Path) -> None:
    """Write the mean of the weights; buffers and integers are those of the last checkpoint."""
    last = checkpoints[-1]
    shapes = outlines(last.layout("model"))
    with ExitStack() as stack:
        reads = {c.path: stack.enter_context(c.reading("model")) for c in checkpoints}

        def read(name: str) -> torch.Tensor:
            dtype = shapes[name].dtype
            if name in last.manifest.buffers or not (dtype.is_floating_point or dtype.is_complex):
                return reads[last.path](name)
            return mean_tensor(reads, name).to(dtype)

        write_tensors(temporary / COMPONENTS["model"].file(), shapes, read)


def _begin_run(new_run: RunDir, run: RunDir, base: Path) -> None:
    """Give a new run's folder the files of another that a resume needs besides the checkpoint."""
    new_run.await_start()
    note_start(new_run, base, read_start(run))
    companions = (run.path / name for name in (TOKENIZER_FILE, END_FILE, *COMPANIONS))
    for file in (run.config, *companions):
        if file.is_file():
            atomic.write_synced(new_run.path / file.name, read_regular(file))


def _task_of(run: RunDir, overrides: Sequence[str]) -> Task:
    """Return the run's task with its data, to compare models on held-out samples."""
    loaded_config = load_config(str(run.config), overrides, checks=())
    return spec_class(loaded_config.config.task).open(loaded_config, 1).task(loaded_config.config)


@contextmanager
def _code_of(task: str) -> Iterator[None]:
    """Context manager that turns errors of a task's code into ConfigErrors."""
    try:
        yield
    except InstarError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{task}: the models cannot be compared: {what_happened(error)}"
        raise ConfigError.at("task", message) from error


def _plan_checkpoint(
    operations: Sequence[Operation], seed: int, history: History, state: State, source: Checkpoint
) -> _PlannedCheckpoint:
    step = source.manifest.step
    cursor = int(source.state.get("progress", {}).get("samples", 0))
    steps: list[GrowthStep] = []
    stages: list[GrowthStage] = []
    shapes: list[Growable] = []
    for operation in operations:
        if operation.name == AVERAGE:
            raise ConfigError.of(f"{AVERAGE} is a command offline: {MEAN_REASON} RUN", where="--op")
        with as_config_error():
            state, plan = plan_operation(state, operation, step)
        if plan is not None:
            key = (seed, number_of(history))
            table = state.architecture.parameters()
            steps.append(GrowthStep(plan, table, key, moments_mode(operation)))
            shapes.append(state.architecture)
        history = (*history, Change(operation, step, cursor, reason=REASON))
        stages.append(stage(operation, plan, state.architecture))
    return _PlannedCheckpoint(tuple(steps), tuple(stages), tuple(shapes), history, state)


def _write(source: Checkpoint, run: RunDir, plan: _PlannedCheckpoint, build: Build) -> Written:
    """Write the grown checkpoint; return its folder, and its model's persistent buffers."""
    exact = all(stage.label in (None, "exact") for stage in plan.stages)
    writer = CheckpointWriter(run.path, source.manifest.step)
    with writer.removed_on_error():
        writer.open()
        buffers = _grown_buffers(source, plan, build)
        for component in source.components:
            _write_component(component, source, writer.temporary, plan.steps, buffers)
        names = ", ".join(stage.operation.name for stage in plan.stages)
        architecture = dict(plan.state.architecture.to_dict())
        reason = f"{REASON}: {names}"
        path = _publish(writer, source, architecture, plan.history, buffers, reason, exact=exact)
        return path, buffers


def _publish(
    writer: CheckpointWriter,
    source: Checkpoint,
    architecture: dict[str, Any],
    history: History,
    buffers: Iterable[str],
    reason: str,
    *,
    exact: bool,
) -> Path:
    """Publish a checkpoint made from another, whose tensors are written; unless exactly, without its evaluation."""
    manifest = source.manifest
    atomic.write_synced(writer.temporary / STATE, encode_json(_state(source.state, exact)))
    writer.add_files(path for path in writer.temporary.rglob("*") if path.is_file())
    facts = Facts(
        data=manifest.data,
        tokenizer=manifest.tokenizer,
        progress=manifest.progress,
        loss=manifest.loss if exact else None,
        metrics=manifest.metrics if exact else {},
        better=manifest.better,
        reason=reason,
        left_out=manifest.left_out,
        config=manifest.config,
        buffers=sorted(buffers),
    )
    return writer.publish(
        architecture=architecture,
        history=history_to_json(history),
        facts=facts,
        world_size=manifest.world_size,
    )


def _write_component(
    component: str,
    source: Checkpoint,
    temporary: Path,
    steps: tuple[GrowthStep, ...],
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Write one component's file, grown; per-rank components are copied unchanged."""
    layout = COMPONENTS[component]
    if layout.pattern is Pattern.PER_RANK:
        for rank in range(source.manifest.world_size):
            to = temporary / layout.file(rank)
            atomic.make_folder(to.parent)
            atomic.write_synced(to, read_regular(source.path / layout.file(rank)))
        return
    with _grown(component, source, steps, buffers) as grown_tensors:
        write_tensors(temporary / layout.file(), grown_tensors.outlines, grown_tensors.read)


@contextmanager
def _grown(
    component: str,
    source: Checkpoint,
    steps: tuple[GrowthStep, ...],
    buffers: Mapping[str, torch.Tensor],
) -> Iterator[TensorReader]:
    """Context with a reader of a component's tensors after all growth steps.

    Args:
        buffers: the model's, which were grown already.
    """
    layout = source.layout(component)
    if component == "optimizer" and any(step.mode != "reset" for step in steps):
        files = (layout, source.layout("model"))
        check_states(*({n: e.shape for n, e in file.entries.items()} for file in files))
    grow = grow_states if component == "optimizer" else grow_parameters
    new_buffers = buffers if component == "model" else {}
    saved_outlines = outlines(layout)
    for name in source.manifest.buffers if component == "model" else ():
        del saved_outlines[name]
    with open_reader(layout) as read:
        grown_tensors = grow(steps, TensorReader(saved_outlines, read))
        shapes = {name: Outline(t.dtype, tuple(t.shape)) for name, t in new_buffers.items()}
        yield TensorReader(
            {**grown_tensors.outlines, **shapes},
            lambda name: new_buffers[name] if name in new_buffers else grown_tensors.read(name),
        )


def _grown_buffers(
    source: Checkpoint, plan: _PlannedCheckpoint, build: Build
) -> dict[str, torch.Tensor]:
    """Return the persistent buffers after all growth steps.

    New elements of a buffer have the values of a new module, so a module of each shape is built.
    """
    if not source.manifest.buffers:
        return {}
    with source.reading("model") as read:
        buffers = {name: read(name) for name in source.manifest.buffers}
    for step, shape in zip(plan.steps, plan.shapes, strict=True):
        buffers = grow_buffers(step.plan, buffers, build(shape))
    return buffers


def _read_again(
    source: Checkpoint, plan: _PlannedCheckpoint, files: Written
) -> Iterator[tuple[Read, TensorReader]]:
    """Yield readers of the tensors that were written, and of these as they are made again."""
    path, buffers = files
    checkpoint = load_checkpoint(path)
    for component in source.components:
        if COMPONENTS[component].pattern is not Pattern.PER_RANK:
            with (
                _grown(component, source, plan.steps, buffers) as grown_tensors,
                checkpoint.reading(component) as read,
            ):
                yield read, grown_tensors


def _state(state: Mapping[str, Any], exact: bool) -> dict[str, Any]:
    """Return the run's state; unless growth is exact, without this step's measurements."""
    if exact or not state:
        return dict(state)
    state_after = {**state, "evaluated_at": -1, "judged_at": -1, "losses": []}
    if "story" in state:
        state_after["story"] = {**state["story"], "interval": None}
    return state_after


def _outputs_on_samples(
    tasks: Sequence[Task], build: Build, before: Checkpoint, after: Checkpoint
) -> tuple[Probe, Probe]:
    """Return the outputs of both models for the same held-out samples: in float64, or in float32 if the task's
    code does not accept float64."""
    models = [
        restored(build(task.architecture), checkpoint)
        for task, checkpoint in zip(tasks, (before, after), strict=True)
    ]
    samples = probe_samples(tasks[0].held_out("val"), torch.device("cpu"))
    pairs = [*zip(tasks, models, strict=True)]
    single = [copy.deepcopy(model) for model in models]
    try:
        old, new = (probe(task, model.double(), samples.in_double()) for task, model in pairs)
    except (RuntimeError, TypeError, ValueError):
        pairs = [*zip(tasks, single, strict=True)]
        old, new = (probe(task, model, samples) for task, model in pairs)
    return old, new


def _outputs_on_tokens(before: Path, after: Path) -> tuple[Probe, Probe]:
    """Return the outputs of two language models for random tokens, in float64: only the rounding of the weights remains."""
    old, new = (load_language_model(path).double() for path in (before, after))
    rows = min(model.arch.vocab_size for model in (old, new))
    columns = min(PROBE_TOKENS, *(model.arch.context for model in (old, new)))
    generator = named_generator(REASON)
    tokens_BT = torch.randint(rows, (PROBE_SAMPLES, columns + 1), generator=generator)

    def probe_of(model: torch.nn.Module) -> Probe:
        with torch.no_grad():
            logits_BTV = model(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        return Probe(logits_BTV, loss.item())

    return probe_of(old), probe_of(new)
