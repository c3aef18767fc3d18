"""First phase of a run: which run it is, the checkpoint that it goes on from, and its config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from instar.checkpoint.line import line_of
from instar.checkpoint.store import LATEST, Checkpoint, load_checkpoint
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.world import World, recall
from instar.record.rundir import RunDir
from instar.run.origin.resume import (
    Resume,
    automatic,
    choose_checkpoint,
    continuation,
    rewind_step,
)
from instar.run.start.plan import RankContext, ResolvedRun, RunRequest
from instar.run.start.rank_consistency import check_folder_is_shared, compare_configs


def resolve_run(request: RunRequest, rank: RankContext) -> ResolvedRun:
    """Find out which run is meant, and read it if it is resumed. A collective.

    Raises:
        CheckpointError: there is no intact checkpoint to resume from, or it is of another run.
        ConfigError: the run cannot be resumed with this config.
        RunFailed: the ranks' configs differ.
    """
    loaded_config, world = request.loaded_config, rank.world
    # first of all: what the config says decides which collectives follow
    compare_configs(loaded_config.config, world)
    resume, checkpoint_before = _agree_to_resume(request, world)
    check_folder_is_shared(resume.run if resume else None, loaded_config.config.record, world)
    if resume is None:
        return ResolvedRun(request, loaded_config)
    checkpoint, warnings = _agree_on_checkpoint(resume, world)
    if checkpoint is None:
        rank.console.say(f"{resume.run.path}: nothing was saved yet; the run starts again")
    elif request.resume is not None and checkpoint.path.name == checkpoint_before:
        # restarted before a new save: the changes are not in the checkpoint's history yet
        resume = replace(resume, by_person=request.resume.by_person)
    with raise_on_all_ranks(world, "reading the config of the resumed run"):
        resumed_run = continuation(resume, loaded_config, checkpoint)
    return ResolvedRun(
        request, resumed_run.loaded_config, resume, checkpoint, resumed_run, warnings
    )


def _agree_to_resume(request: RunRequest, world: World) -> tuple[Resume | None, str]:
    """Find the run to resume, on rank 0. A collective.

    It is the requested one, that of `resume: auto`, or the run that this launch started or resumed
    before its ranks were restarted.

    Returns:
        the resume, and the name of the checkpoint from which this launch resumed before, or "".
    """
    resume, answer = request.resume, ["", ""]
    # rank 0 alone looks: another rank could see a folder that is made meanwhile
    with raise_on_all_ranks(world, "looking for the run"):
        if world.is_main:
            folder, _, checkpoint_before = (recall(request.launch_key) or "").partition("\n")
            if folder or resume is None:
                automatically = automatic(request.loaded_config.config, folder or None)
                path = str(automatically.run.path) if automatically else ""
                answer = [path, checkpoint_before]
    folder, checkpoint_before = map(str, cast("list[str]", agree(world, answer)))
    if not folder:
        return resume, checkpoint_before
    return replace(
        resume or Resume(RunDir(Path(folder)), has_user_config=True),
        run=RunDir(Path(folder)),
        start=LATEST,
        fresh=True,
        by_person=False,
    ), checkpoint_before


def _agree_on_checkpoint(resume: Resume, world: World) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that rank 0 chooses (None: nothing saved yet), and warnings.

    A collective. The warnings say why later checkpoints were passed over.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    path, warnings = "", list[str]()
    with raise_on_all_ranks(world, "choosing a checkpoint"):
        if world.is_main:
            checkpoint, errors = choose_checkpoint(resume)
            path = str(checkpoint.path) if checkpoint else ""
            warnings = [f"passed over: {error}" for error in errors]
            step = checkpoint and rewind_step(checkpoint.path, line_of(resume.run.path))
            if checkpoint is not None and step is not None:
                warnings.append(
                    f"{checkpoint.path.name} lies on a branch that the run left at step {step:,}"
                )
    path = str(agree(world, path))
    if not path:
        return None, warnings
    with raise_on_all_ranks(world, "reading the checkpoint"):
        # rank 0 has just read every byte of it
        return load_checkpoint(Path(path), check=False), warnings
