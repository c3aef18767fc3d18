"""Growing a checkpoint on the disk: a new run that stands where the old one stood, but grown.

What is written is what the same operations would make of the run under way, tensor for tensor. Of
the model only one tensor at a time is in memory (growth/chain.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F

from instar.checkpoint import disk
from instar.checkpoint.appearing import appearing, check_new
from instar.checkpoint.manifest import CheckpointError, Facts, encode_json
from instar.checkpoint.patterns import COMPONENTS, STATE, Pattern
from instar.checkpoint.store import Checkpoint, Draft
from instar.checkpoint.stream import outlines, reading, write_tensors
from instar.config.errors import ConfigError, InstarError
from instar.config.language import LanguageConfig
from instar.config.load import load as load_config
from instar.config.operation import Operation
from instar.data.tokenizer import TOKENIZER_FILE
from instar.growth.chain import Component, Link, grow_parameters, grow_states
from instar.growth.moments import moments_mode
from instar.growth.plan import GrowthPlan, Label
from instar.growth.proof import Probe, Proof, compare
from instar.models.architecture import Architecture, resolve
from instar.models.initial import named_generator
from instar.models.saved import load_gpt
from instar.models.shape import Growable, count_parameters
from instar.record.rundir import RunDir
from instar.run.state import history_from_json, history_to_json
from instar.schedule.operations import Change, History, State, fold, planned

REASON = "instar grow"
PROBE_SAMPLES, PROBE_TOKENS = 4, 128
"""random tokens that a proof compares logits on"""


class NotProven(InstarError):  # noqa: N818
    """An operation changed the function more than its label says; nothing was written."""


@dataclass(frozen=True)
class Stage:
    """One operation, and what it made of the model."""

    operation: Operation
    label: Label | None
    """None: an operation on settings"""
    bound_nats: float | None
    notes: tuple[str, ...]
    parameters: int
    """afterwards"""


@dataclass(frozen=True)
class Grown:
    """A checkpoint that was grown on the disk."""

    path: Path
    parameters_before: int
    stages: tuple[Stage, ...]
    proof: Proof | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": str(self.path)}


@dataclass(frozen=True)
class _Course:
    """Where the operations lead: the links of the chain, the history, and what is in force."""

    links: tuple[Link, ...]
    stages: tuple[Stage, ...]
    history: History
    state: State


def grow(
    source: Checkpoint, out: Path, operations: Sequence[Operation], *, check: bool = False
) -> Grown:
    """Make the run `out`, with one checkpoint: `source` after `operations`.

    Operations on settings become part of the history as the others do. A mask that an operation
    asks for opens from the checkpoint's step on, when the run goes on.

    Args:
        check: compare logits before and after, and write nothing unless the labels hold.

    Raises:
        ConfigError: an operation cannot be made of this model; names it and what is possible.
        CheckpointError: `source` is none of a run, or `out` cannot be written or is not empty.
        NotProven: a label does not hold.
    """
    begun = time.perf_counter()
    check_new(out)
    run = RunDir(source.path.absolute().parent.parent)
    if not run.config.is_file():
        raise CheckpointError(
            f"{source.path}: not in the folder of a run, whose {run.config.name} says from which "
            "seed new values are drawn"
        )
    config = load_config(str(run.config)).config
    if not isinstance(config, LanguageConfig):
        raise ConfigError.one(
            f"a run of task {config.task} grows while it runs, not on the disk",
            where=str(run.config),
            hint="resume it with the operations in its schedule",
        )
    history = history_from_json(source.manifest.history)
    state = _in_force(config, history, source)
    course = _carry_out(operations, config.seed, history, state, source)
    with appearing(out) as aside:
        there = RunDir(aside)
        there.logs.mkdir()
        for file in (run.config, run.path / TOKENIZER_FILE):
            if file.is_file():
                disk.write_synced(aside / file.name, file.read_bytes())
        made = _write(source, there, course)
        proof = None
        if check:
            proof = _prove(source.path, made, _promised(course.stages))
            if not proof.holds:
                names = ", ".join(stage.operation.name for stage in course.stages)
                raise NotProven(
                    f"{names}: not {proof.label}: logits moved by {proof.max_logit_diff:.3g} "
                    f"({proof.max_logit_diff_relative:.1g} of the largest), the loss on random tokens "
                    f"by {proof.delta_loss:+.3g} nats; {out} was not made"
                )
    before = count_parameters(state.architecture).total
    path = RunDir(out).checkpoints / made.name
    return Grown(path, before, course.stages, proof, time.perf_counter() - begun)


def _in_force(config: LanguageConfig, history: History, source: Checkpoint) -> State:
    """Settings and architecture at the checkpoint."""
    try:
        vocabulary = config.model.vocab_size or source.manifest.architecture["vocab_size"]
        begun = resolve(config.model, vocabulary)
        state = fold(config, begun, history)
        saved = Architecture.from_dict(source.manifest.architecture)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{source.path}: not a model that can grow:\n{error}") from error
    if state.architecture != saved:
        raise CheckpointError(
            f"{source.path}: its run.yaml and its history lead to another architecture than its own"
        )
    return state


def _carry_out(
    operations: Sequence[Operation], seed: int, history: History, state: State, source: Checkpoint
) -> _Course:
    step = source.manifest.step
    cursor = int(source.state.get("progress", {}).get("samples", 0))
    links: list[Link] = []
    stages: list[Stage] = []
    for operation in operations:
        with _as_config_error():
            state, plan = planned(state, operation, step)
        if plan is not None:
            key = (seed, len(history))
            table = state.architecture.parameters()
            links.append(Link(plan, table, key, moments_mode(operation)))
        history = (*history, Change(operation, step, cursor, reason=REASON))
        stages.append(_stage(operation, plan, state.architecture))
    return _Course(tuple(links), tuple(stages), history, state)


def _stage(operation: Operation, plan: GrowthPlan | None, grown: Growable) -> Stage:
    size = count_parameters(grown).total
    if plan is None:
        return Stage(operation, None, None, (), size)
    return Stage(operation, plan.label, plan.bound_nats, plan.notes, size)


@contextmanager
def _as_config_error() -> Iterator[None]:
    """An operation that cannot be is a mistake in what was asked for."""
    try:
        yield
    except ValueError as error:
        raise ConfigError.one(str(error), where="--op") from error


def _write(source: Checkpoint, there: RunDir, course: _Course) -> Path:
    saved = source.manifest
    exact = all(stage.label in (None, "exact") for stage in course.stages)
    draft = Draft(there.path, saved.step)
    with draft.or_nothing():
        draft.open()
        for component in source.components:
            _write_component(component, source, draft.aside, course.links)
        disk.write_synced(draft.aside / STATE, encode_json(_state(source.state, exact)))
        told = ", ".join(stage.operation.name for stage in course.stages)
        facts = Facts(
            data=saved.data,
            tokenizer=saved.tokenizer,
            progress=saved.progress,
            loss=saved.loss if exact else None,
            reason=f"{REASON}: {told}",
            left_out=saved.left_out,
        )
        return draft.publish(
            architecture=course.state.architecture.to_dict(),
            history=history_to_json(course.history),
            facts=facts,
            world_size=saved.world_size,
        )


def _write_component(
    component: str, source: Checkpoint, aside: Path, links: tuple[Link, ...]
) -> None:
    """One component's file, grown; what each rank has of its own stays as it is."""
    known = COMPONENTS[component]
    if known.pattern is Pattern.PER_RANK:
        for rank in range(source.manifest.world_size):
            to = aside / known.file(rank)
            disk.make_folder(to.parent)
            disk.write_synced(to, (source.path / known.file(rank)).read_bytes())
        return
    file = source.path / known.file()
    grow = grow_states if component == "optimizer" else grow_parameters
    with reading(file) as read:
        grown = grow(links, Component(outlines(file), read))
        write_tensors(aside / known.file(), grown.outlines, grown.read)


def _state(state: Mapping[str, Any], exact: bool) -> dict[str, Any]:
    """What the run remembers; an evaluation at this step, if the model is another, is none."""
    return dict(state) if exact or not state else {**state, "evaluated_at": -1, "losses": []}


def _promised(stages: Sequence[Stage]) -> GrowthPlan:
    """What all the labels together say."""
    labels = [stage.label for stage in stages if stage.label is not None]
    weakest: Label = max(labels, key=get_args(Label).index, default="exact")
    bound = sum(stage.bound_nats or 0.0 for stage in stages)
    return GrowthPlan({}, weakest, bound if weakest == "bounded" else None)


def _prove(before: Path, after: Path, promised: GrowthPlan) -> Proof:
    """Both models on the same tokens, in float64: what is compared is the weights' rounding."""
    models = [load_gpt(path).double() for path in (before, after)]
    rows = min(model.arch.vocab_size for model in models)
    columns = min(PROBE_TOKENS, *(model.arch.context for model in models))
    generator = named_generator(REASON)
    tokens_BT = torch.randint(rows, (PROBE_SAMPLES, columns + 1), generator=generator)
    probes = []
    for model in models:
        with torch.no_grad():
            logits_BTV = model(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        probes.append(Probe(logits_BTV, loss.item()))
    return compare(promised, probes[0], probes[1], torch.float32)
