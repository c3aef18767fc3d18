"""Going on with a run: from which checkpoint, and what the config changes on the way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import (
    BEST,
    LATEST,
    Checkpoint,
    checkpoints,
    load,
    newest_whole,
    pointed_at,
    pointers,
)
from instar.config.errors import ConfigError, Problem
from instar.config.explain import nearest
from instar.config.fields import keys, value_of
from instar.config.load import load as load_config
from instar.config.schema import RunConfig
from instar.record.rundir import RunDir

FIXED = (
    "seed",
    "task",
    "reproducible",
    "parallel.elastic.",
    "model.",
    "data.",
    "optimizer.name",
    "train.ema",
)
"""Keys, or sections, of which everything that is saved is a consequence."""

FREE = ("data.strategy", "data.workers", "data.prefetch")
"""Of these, what changes nothing but the time: how samples are read, not which ones."""

ALLOWED = {
    "architecture": ("model.",),
    "data": ("data.",),
    "tokenizer": ("data.tokenizer", "data.vocab_size"),
}
"""Of these, what may change where a person says so by name."""

PLACES = ("name", "preset", "resume", "device", "data.path", "record.run_dir", "record.out_dir")
"""Keys that say where a run is and not what it is."""

LAUNCH_KEY = "instar/run"
"""Under which a launch remembers its run's folder, for ranks that are started again."""


@dataclass(frozen=True)
class Resume:
    """How a run is to go on."""

    run: RunDir
    start: str = "latest"
    """latest, best, best-<metric>, or a step"""
    allow: tuple[str, ...] = ()
    """what may have changed: architecture, data, tokenizer"""
    fresh: bool = False
    """begin at step 0 if nothing was saved yet"""


def automatic(config: RunConfig, remembered: str | None = None) -> Resume | None:
    """What `resume: auto`, or a launcher that starts its ranks again, goes on with, if anything.

    Args:
        remembered: the folder of the run that the same launch has begun before.
    """
    folder = remembered
    if folder is None and config.resume == "auto":
        folder = config.record.run_dir
    if folder is None or not RunDir(Path(folder)).holds_run():
        return None
    path, here = Path(folder), Path.cwd()
    run = RunDir(path.relative_to(here) if path.is_relative_to(here) else path)
    return Resume(run, fresh=True)


def choose(resume: Resume) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The checkpoint to go on from, every byte checked, and what is wrong with later ones.

    None where there is none yet and the run may begin anew.

    Raises:
        CheckpointError: there is none that is whole; names what is wrong.
    """
    root = resume.run.path
    if resume.fresh and not checkpoints(root):
        return None, []
    named = named_checkpoint(resume)
    return newest_whole(root) if named is None else (load(named), [])


def named_checkpoint(resume: Resume) -> Path | None:
    """The checkpoint that `resume.start` names; None: the latest that is whole.

    Raises:
        CheckpointError: there is none.
    """
    root, start = resume.run.path, resume.start
    if start == "latest":
        return None
    if start.startswith(BEST):
        best = pointed_at(root, start)
        if best is None:
            others = ", ".join(name for name in pointers(root) if name != LATEST)
            raise CheckpointError(
                f"{root}: no checkpoint is its {start}; "
                + (f"there are {others}" if others else "checkpoint.on_best saves one at each best")
            )
        return best
    name = f"step-{start}" if start[:1].isdecimal() else start
    there = [path.name for path in checkpoints(root)]
    if name not in there:
        meant = nearest(start, [LATEST, BEST, *there]) if name == start else None
        hint = f"did you mean '{meant}'?" if meant else f"there are {', '.join(there) or 'none'}"
        raise CheckpointError(f"{root}: no checkpoint {name}; {hint}")
    return root / "checkpoints" / name


def overridden(resume: Resume, now: RunConfig) -> dict[str, tuple[object, object]]:
    """What the config says otherwise than the run's own, by dotted key: before and after.

    Raises:
        ConfigError: something that cannot change any more; names all of it.
    """
    before = load_config(str(resume.run.config)).config
    changed = {
        key: (value_of(before, key), value_of(now, key))
        for key in keys(type(now))
        if key not in PLACES and value_of(before, key) != value_of(now, key)
    }
    problems = [
        Problem(
            f"{key} was {was!r} when the run began and cannot become {new!r}",
            where=str(resume.run.config),
            hint="start a new run for that",
        )
        for key, (was, new) in changed.items()
        if key.startswith(FIXED) and key not in FREE and not _allowed(key, resume.allow)
    ]
    if problems:
        raise ConfigError(*problems)
    return changed


def _allowed(key: str, allow: Collection[str]) -> bool:
    return any(key.startswith(ALLOWED[what]) for what in allow)
