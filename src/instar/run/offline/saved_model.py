"""Models of checkpoints, of any task: described by the run's config and history, and built by the code of their task."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

from torch import nn

from instar.checkpoint.layout import check_shapes
from instar.checkpoint.manifest import CheckpointError, Manifest, encode_json
from instar.checkpoint.store import Checkpoint, check_finite, load_checkpoint
from instar.config.errors import ConfigError, InstarError
from instar.config.fields import from_values, root_of
from instar.config.load import load_config
from instar.config.schema import RunConfig
from instar.config.user_code.failures import what_happened
from instar.models.module import load_buffers
from instar.record.rundir import RunDir
from instar.record.start_folder import begun_in
from instar.run.optimizer import copy_tensors
from instar.run.resume import began_with
from instar.run.step.stepper import set_model_step
from instar.schedule.operations import (
    History,
    State,
    fold_history,
    history_from_json,
    initial_state,
)
from instar.tasks.task import SavedModel, spec_class


def load_task_model(path: Path, device: str, task: str | None = None) -> nn.Module:
    """Return the model of a checkpoint of any task in evaluation mode; its moving average if there is one.

    Args:
        task: name of the class that builds it, "module:name"; None: that of the run, whose code must be this user's, or
            declared trusted.

    Raises:
        CheckpointError: the checkpoint is damaged, or its task builds another model.
        ConfigError: the task cannot be imported, or fails.
    """
    checkpoint = load_checkpoint(path)
    run = run_of(checkpoint)
    with chdir(begun_in(run, ())[1]):
        config = config_with_task(run, checkpoint.manifest, task)
        model, _, state = model_and_state(config, checkpoint)
        try:
            module = restored(model.build(state.architecture), checkpoint, checkpoint.weights)
        except InstarError:
            raise
        except (Exception, SystemExit) as error:
            message = f"{config.task}: its model cannot be built: {what_happened(error)}"
            raise ConfigError.at("task", message) from error
    check_finite(path, dict(module.named_parameters()))
    return module.to(device).eval()


def run_of(source: Checkpoint) -> RunDir:
    """Return the run that has a checkpoint.

    Raises:
        CheckpointError: none has.
    """
    run = RunDir(source.path.absolute().parent.parent)
    if not run.config.is_file():
        raise CheckpointError(
            f"{source.path}: not in the folder of a run, whose {run.config.name} says what it is a checkpoint of"
        )
    return run


def config_with_task(run: RunDir, manifest: Manifest, task: str | None = None) -> RunConfig:
    """Return the run's config at step 0; imports the class of a custom task.

    Args:
        task: the class, if it is another than the config's.

    Raises:
        Untrusted: the class belongs to another user.
    """
    if ":" not in began_with(run, manifest).task:
        return began_with(run, manifest)
    overrides = [] if task is None else [f"task={task}"]
    now = load_config(str(run.config), overrides, checks=()).config
    if not manifest.config:
        return now
    return from_values(root_of(now.task), {**manifest.config, "task": now.task})


def model_and_state(config: RunConfig, source: Checkpoint) -> tuple[SavedModel, History, State]:
    """Return the model of a checkpoint, its history, and its settings and architecture.

    Raises:
        CheckpointError: its parts contradict each other.
    """
    try:
        history = history_from_json(source.manifest.history)
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    try:
        model = spec_class(config.task).saved(config, source.manifest.architecture)
        state = fold_history(initial_state(config, model.initial_shape, model.facts), history)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source.path}: not a model that can grow:\n{error}") from error
    if encode_json(dict(state.architecture.to_dict())) != encode_json(dict(model.architecture)):
        raise CheckpointError(
            f"{source.path}: its run.yaml and its history lead to another architecture than its own"
        )
    shapes = {name: entry.shape for name, entry in state.architecture.parameters().items()}
    check_shapes(source.path, source.layout("model").entries, shapes)
    return model, history, state


def restored(module: nn.Module, checkpoint: Checkpoint, component: str = "model") -> nn.Module:
    """Return a module with a checkpoint's values.

    Args:
        component: with the parameters; buffers are those of the model.
    """
    tensors = checkpoint.tensors(component)
    parameters = dict(module.named_parameters())
    copy_tensors(parameters, {name: tensors[name] for name in parameters})
    if checkpoint.manifest.buffers:
        buffers = tensors if component == "model" else checkpoint.tensors("model")
        load_buffers(module, {name: buffers[name] for name in checkpoint.manifest.buffers})
    set_model_step(module, checkpoint.manifest.step)
    return module
