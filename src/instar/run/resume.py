"""Resume: choose the checkpoint, and find what the config changes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from instar.checkpoint.listing import (
    BEST,
    latest_intact,
    list_checkpoints,
    pointer_target,
    pointers,
)
from instar.checkpoint.manifest import (
    CheckpointError,
    Line,
    Manifest,
    line_of,
    read_manifest,
    superseded_at,
)
from instar.checkpoint.store import LATEST, Checkpoint, load_checkpoint
from instar.config.errors import ConfigError, ConfigProblem, nearest
from instar.config.fields import (
    LANGUAGE,
    PLACES,
    PRIVATE,
    SPELLED,
    from_values,
    is_fixed,
    is_launch_only,
    task_config_class,
    values,
    with_values,
)
from instar.config.load import Loaded, load_config
from instar.config.origins import DEFAULT, DERIVED, PRESET, SCHEDULE, SET
from instar.config.schema import RunConfig
from instar.config.sections import Operation
from instar.config.user_code.trust import is_local
from instar.data.text.files import same_place
from instar.record.imported import refuse_imported
from instar.record.rundir import RunDir, check_folders
from instar.schedule.operations import (
    Change,
    History,
    effective,
    history_from_json,
    override,
    overrides,
    value_in_force,
)
from instar.schedule.settings import Settings

LAUNCH_KEY = "instar/run"
"""Key under which a launch stores its run's folder and, in a second line, the checkpoint that it
resumed from, for restarted ranks."""

STARTS_FROM = "model.from"
CHANGED_SOURCES = "data.if_changed"

DERIVES = "learning_rate.lr_decay_iters"
"""The only key that is derived from the budget if the config leaves it open."""


@dataclass(frozen=True)
class Resume:
    """How to resume a run."""

    run: RunDir
    start: str = "latest"
    """latest, best, best-<metric>, or a step"""
    allow: tuple[str, ...] = ()
    """what may have changed: architecture, data, tokenizer"""
    fresh: bool = False
    """start at step 0 if nothing was saved yet"""
    has_user_config: bool = False
    """the config is a file of the user's, not the run's own run.yaml"""
    by_person: bool = True
    """a person requested it and means the values on the command line; False for `resume: auto` and
    for restarted ranks, whose command line is the same each time"""

    def words(self) -> list[str]:
        """Return the options of a rank that resumes so."""
        options = ["--resume", str(self.run.path), "--from", self.start]
        return options + [word for change in self.allow for word in ("--allow", change)]


@dataclass(frozen=True)
class Continuation:
    """Config of a resumed run, and its changes."""

    loaded_config: Loaded
    """the config at the checkpoint with the changes of this resume"""
    began: RunConfig
    """the config at step 0"""
    history: History
    changes: Mapping[str, tuple[Any, Any]]
    """(before, after) of the keys that this resume changes"""
    origins: Mapping[str, str]
    """origin of each of these values"""
    launch: Mapping[str, Any]
    """launch-only keys whose values hold for this process"""

    @property
    def operation(self) -> Operation | None:
        """The operation that the resume appends to the history, if any."""
        after = {key: value for key, (_, value) in self.changes.items()}
        return override(after, self.origins) if after else None

    @property
    def sets_schedule(self) -> bool:
        """Whether the schedule is another from now on, whose indices are those of other entries."""
        return SCHEDULE in self.changes

    @property
    def settings(self) -> Settings:
        """The settings with which the run goes on."""
        now = () if self.operation is None else (Change(self.operation, 0, 0),)
        return effective(self.began, (*self.history, *now))[1]

    def with_derived(self, config: RunConfig, derived_keys: Collection[str]) -> Continuation:
        """Return the continuation with the values of `config` for the open keys `derived_keys`."""
        began, now = values(self.began), values(config)
        filled_values = {key: now[key] for key in derived_keys if began.get(key) in (None, "auto")}
        changes, origins = dict(self.changes), dict(self.origins)
        for key in derived_keys:
            if is_launch_only(key) or key in filled_values:
                continue
            if now[key] != (before := self._before(key)):
                changes[key], origins[key] = (before, now[key]), DERIVED
            elif key in changes:
                # whoever set it left it open, and what follows is what is in force
                del changes[key], origins[key]
        return replace(
            self, began=with_values(self.began, filled_values), changes=changes, origins=origins
        )

    def _before(self, key: str) -> Any:
        config, settings = effective(self.began, self.history)
        return value_in_force(key, values(config), settings)


def automatic(config: RunConfig, last_folder: str | None = None) -> Resume | None:
    """Return the run that `resume: auto`, or a launcher that restarts its ranks, resumes, if any.

    Args:
        last_folder: folder of the run that the same launch started before.
    """
    folder = last_folder
    if folder is None and config.resume == "auto":
        folder = config.record.run_dir
    if folder is None or not RunDir(Path(folder)).holds_run():
        return None
    path, cwd = Path(folder), Path.cwd()
    run = RunDir(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
    return Resume(run, fresh=True, has_user_config=True, by_person=False)


def choose_checkpoint(
    resume: Resume, *, check: bool = True
) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """Choose the checkpoint to resume from.

    Args:
        check: verify every byte of the checkpoint.

    Returns:
        the checkpoint, or None if nothing was saved and `resume.fresh` is set; and the errors of
        later checkpoints.

    Raises:
        CheckpointError: there is no intact checkpoint; names what is wrong.
        ConfigError: a folder of the run is not its own, or it was imported from another tool.
    """
    root = resume.run.path
    refuse_imported(resume.run)
    check_folders(resume.run)
    if resume.fresh and not list_checkpoints(root):
        return None, []
    checkpoint_path = named_checkpoint(resume)
    return (
        latest_intact(root, check=check)
        if checkpoint_path is None
        else (load_checkpoint(checkpoint_path, check=check), [])
    )


def named_checkpoint(resume: Resume) -> Path | None:
    """Return the checkpoint that `resume.start` names; None: the latest intact one.

    Raises:
        CheckpointError: it does not exist.
        ConfigError: the run was imported from another tool.
    """
    root, start = resume.run.path, resume.start
    refuse_imported(resume.run)
    if start == "latest":
        return None
    if start.startswith(BEST):
        best = pointer_target(root, start)
        if best is None:
            names = [
                name for name in pointers(root) if name != LATEST and pointer_target(root, name)
            ]
            alternatives = f"there are {', '.join(names)}; " if names else ""
            raise CheckpointError(
                f"{root}: no checkpoint is its {start}: none was saved at an evaluation whose value was finite and "
                f"the best, or it was deleted; {alternatives}--from {LATEST} takes the last one"
            )
        return best
    by_name = {path.name: path for path in list_checkpoints(root)}
    if start.isdecimal() and (
        checkpoint_path := _of_step(root, int(start), list(by_name.values()))
    ):
        return checkpoint_path
    name = f"step-{start}" if start[:1].isdecimal() else start
    if name not in by_name:
        suggestion = nearest(start, [LATEST, BEST, *by_name]) if name == start else None
        hint = (
            f"did you mean '{suggestion}'?"
            if suggestion
            else f"there are {', '.join(by_name) or 'none'}"
        )
        raise CheckpointError(f"{root}: no checkpoint {name}; {hint}")
    return by_name[name]


def _of_step(root: Path, step: int, paths: Sequence[Path]) -> Path | None:
    """Return the checkpoint of a step: the newest on the run's line, else the only one on a branch.

    Raises:
        CheckpointError: several branches have one, and the line has none.
    """
    of_step = [path for path in paths if re.fullmatch(rf"step-0*{step}(\.\d+)?", path.name)]
    line = line_of(root)
    on_line = [path for path in of_step if rewind_step(path, line) is None]
    if not on_line and len(of_step) > 1:
        names = ", ".join(path.name for path in of_step)
        raise CheckpointError(
            f"{root}: {names} lie on branches that the run has left; say which: --from {of_step[-1].name}"
        )
    return (on_line or of_step)[-1] if of_step else None


def rewind_step(path: Path, line: Line | None) -> int | None:
    """Return the step at which a checkpoint's branch leaves the run's line; None: the checkpoint is
    on the line, or its manifest cannot be read."""
    try:
        return superseded_at(read_manifest(path), line)
    except CheckpointError:
        return None


def continuation(
    resume: Resume, loaded_config: Loaded, checkpoint: Checkpoint | None
) -> Continuation:
    """Read the run's config at step 0 and its history up to a checkpoint, and find the changes.

    A value from `--set` is a change if it differs from the current one; a value from a file, if it
    differs from the file's value when it was last read. Keys that a file omits are unchanged.

    Raises:
        ConfigError: keys that cannot change any more, or a damaged run.yaml; lists all of them.
        CheckpointError: the checkpoint's config or history is unreadable in this version.
    """
    manifest = checkpoint.manifest if checkpoint is not None else None
    if manifest is not None and not resume.has_user_config:
        check_complete(resume.run, loaded_config, manifest)
    past = _read_past(resume.run, loaded_config, checkpoint)
    changes = _changes(resume, loaded_config, past)
    # an imported checkpoint has no state of a run
    is_untrained = checkpoint is not None and not checkpoint.state
    fixed_keys = {
        key: pair
        for key, pair in changes.items()
        if is_fixed(key, resume.allow, untrained=is_untrained)
        or (key == "data.mixture" and not is_untrained and _differ_in_parts(*pair))
    }
    if fixed_keys:
        raise _cannot_change(resume.run, fixed_keys, past.began.task)
    current = {key: past.values[key] for key in past.keys_at_start}
    current |= {key: after for key, (_, after) in changes.items()}
    if CHANGED_SOURCES in past.values:  # the run goes on with the data that it began with
        current[CHANGED_SOURCES] = "keep"
    config = with_values(loaded_config.config, current)
    origins = {key: loaded_config.origins.get(key, DEFAULT) for key in changes}
    launch = _launch_values(loaded_config, manifest.config if manifest is not None else {})
    return Continuation(
        replace(loaded_config, config=config), past.began, past.history, changes, origins, launch
    )


def _differ_in_parts(*mixtures: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether mixtures have weights of other numbers of parts: neither goes on where the other ends."""
    weights = ([part["weight"] for part in parts] for parts in mixtures)
    return len({len(of_parts) for of_parts in weights if of_parts and None not in of_parts}) > 1


@dataclass(frozen=True)
class _Past:
    """A run up to a checkpoint."""

    began: RunConfig
    """the config at step 0"""
    history: History
    config: RunConfig
    """the config at the checkpoint"""
    settings: Settings
    """at the checkpoint"""
    values: Mapping[str, Any]
    """of `config`, by dotted key"""
    read_last: Mapping[str, Any]
    """values by dotted key when the file was last read"""
    set_last: Mapping[str, Any]
    """values by dotted key that the start of the run and its resumes set, whatever operations have changed since"""
    keys_at_start: Collection[str]
    """dotted keys that the run had when it began, except launch-only ones"""


def _read_past(run: RunDir, loaded_config: Loaded, checkpoint: Checkpoint | None) -> _Past:
    """Fold the run's history up to a checkpoint; launch-only keys have their values of `loaded_config`.

    Raises:
        ConfigError: the run is of another task.
        CheckpointError: the checkpoint's config or history is unreadable in this version.
    """
    manifest = checkpoint.manifest if checkpoint is not None else None
    try:
        began, task = began_with(run, manifest), loaded_config.config.task
        # the class of a notebook may have moved to a module
        if began.task != task and not (is_local(began.task) and ":" in task):
            raise _cannot_change(run, {"task": (began.task, task)}, began.task)
        values_at_start = {
            key: value for key, value in values(began).items() if not is_launch_only(key)
        }
        values_at_start["task"] = task
        began = with_values(loaded_config.config, values_at_start)
        history = history_from_json(manifest.history if manifest is not None else ())
        config, settings = effective(began, history)
        set_at_resumes = list(overrides(history))
        from_files = {key: value for key, value, origin in set_at_resumes if origin != SET}
        read_last = values(with_values(began, from_files))
        set_last = values(with_values(began, {key: value for key, value, _ in set_at_resumes}))
    except (LookupError, TypeError, ValueError) as error:
        where = checkpoint.path if checkpoint is not None else run.path
        raise CheckpointError(f"{where}: its history cannot be read: {error}") from error
    return _Past(
        began,
        history,
        config,
        settings,
        values(config),
        read_last,
        set_last,
        values_at_start.keys(),
    )


def _changes(resume: Resume, loaded_config: Loaded, past: _Past) -> dict[str, tuple[Any, Any]]:
    """Return (before, after) of the keys, except launch-only ones, that this resume changes."""
    new_values = values(loaded_config.config)
    if STARTS_FROM in past.values and (
        loaded_config.origins.get(STARTS_FROM) != SET or not resume.by_person
    ):
        # the run has weights, whatever became of those
        new_values[STARTS_FROM] = past.values[STARTS_FROM]
    changes: dict[str, tuple[Any, Any]] = {}
    for key, value in new_values.items():
        if is_launch_only(key):
            continue
        if key in SPELLED and same_place(past.values[key], value):
            continue
        if key == "data.seed" and past.config.data_seed == loaded_config.config.data_seed:
            continue  # the run is older than the key
        before = value_in_force(key, past.values, past.settings)
        origin = loaded_config.origins.get(key, DEFAULT)
        if key == "precision" and value == "auto":
            is_new = False  # the precision resolved at step 0 holds on any machine
        elif origin == SET:
            is_new = value != (before if resume.by_person else past.set_last[key])
        else:
            left_open = origin == DEFAULT or (value is None and (key == DERIVES or is_fixed(key)))
            is_new = not left_open and value not in (past.read_last[key], before)
        if is_new:
            changes[key] = (before, value)
    return changes


def _launch_values(loaded_config: Loaded, config_at_start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the launch-only keys whose values are set, or differ from those of the run's start."""
    return {
        key: value
        for key, value in values(loaded_config.config).items()
        if is_launch_only(key)
        and key not in PLACES
        and not key.startswith(PRIVATE)
        and (loaded_config.origins.get(key) == SET or config_at_start.get(key, value) != value)
    }


def began_with(run: RunDir, manifest: Manifest | None) -> RunConfig:
    """Return the run's config at step 0: from a checkpoint's manifest, else from run.yaml.

    No user code is imported: the sections of a task `module:class` are plain data.

    Raises:
        ConfigError: run.yaml is needed and cannot be read.
        CheckpointError: the manifest's config is unreadable in this version.
    """
    if manifest is not None and manifest.config:
        try:
            task = str(manifest.config["task"])
            root = task_config_class(task, manifest.config, plain=True)
            return from_values(root, manifest.config)
        except (LookupError, TypeError, ValueError) as error:
            where = f"{run.checkpoints}: step {manifest.step}"
            raise CheckpointError(f"{where}: its config cannot be read: {error}") from error
    return load_config(str(run.config), checks=(), import_task=False).config


def check_complete(run: RunDir, loaded_config: Loaded, manifest: Manifest) -> None:
    """Raise ConfigError if a run's own run.yaml lacks keys that it had, as when truncated."""
    origins = loaded_config.origins
    missing = [
        key
        for key in manifest.config
        if key in origins and (origins[key] == DEFAULT or origins[key].startswith(PRESET))
    ]
    if missing:
        more = f" and {len(missing) - 1} more keys" if len(missing) > 1 else ""
        raise ConfigError.of(
            f"damaged: {missing[0]}{more} that the run began with are missing",
            where=str(run.config),
            hint=_restore(run),
        )


def with_restoring(run: RunDir, error: ConfigError) -> ConfigError:
    """Add to an error in a run's own run.yaml how to restore the file."""
    try:
        load_config(str(run.config), import_task=False)
        return error  # the mistake is in a value on the command line, not in the file
    except ConfigError:
        if not list_checkpoints(run.path):
            return error
    message = f"this is the run's own config; {_restore(run)}"
    return ConfigError(*error.problems, ConfigProblem((), message, place=str(run.config)))


def _restore(run: RunDir) -> str:
    return f"restore it: instar checkpoint inspect {run.shell_word} --config > {shlex.quote(str(run.config))}"


def _cannot_change(
    run: RunDir, fixed_keys: Mapping[str, tuple[Any, Any]], task: str
) -> ConfigError:
    return ConfigError(
        *(
            ConfigProblem(
                (),
                f"{key} was {was!r} when the run began and cannot become {new!r}",
                _remedy(key, was, new, task),
                place=str(run.config),
            )
            for key, (was, new) in fixed_keys.items()
        )
    )


_OPERATION_OF = {
    "model.n_layer": "insert_layers",
    "model.n_embd": "widen_hidden",
    "model.n_head": "add_heads",
    "model.n_mlp": "widen_mlp",
    "model.vocab_size": "resize_vocab",
    "model.tied": "untie_embeddings",
    "model.dropout": "set_dropout",
}
"""Keys whose value no resume can set, and the operation that changes what they describe."""


def _remedy(key: str, was: Any, new: Any, task: str) -> str:
    if key == "model.dropout":
        is_possible = task == LANGUAGE
    elif key == "model.tied":
        is_possible = was and not new
    else:  # models do not shrink
        is_possible = isinstance(was, int) and isinstance(new, int) and new > was
    if key in _OPERATION_OF and is_possible:
        return f"the operation {_OPERATION_OF[key]} changes it, in the schedule or with instar grow"
    return "start a new run for that"
