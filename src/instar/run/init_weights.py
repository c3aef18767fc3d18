"""Starting weights: what `model.from` names, and the config that comes with it. No torch.

The weights of a run, of a checkpoint or of a Hugging Face folder bring the keys of the section
`model`, and of a language model its tokenizer. A new run writes them into its own config, with the
path of the checkpoint; from its first save on it does not need the weights any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.checkpoint.listing import (
    BEST,
    latest_checkpoint,
    pointer_target,
    pointers,
    resolve_checkpoint,
)
from instar.checkpoint.manifest import MANIFEST, CheckpointError, encode_json, read_manifest
from instar.config.errors import ConfigError, ConfigProblem
from instar.config.fields import CAUSAL_LM, LANGUAGE, checkpoint_values
from instar.config.load import Brought, Loaded
from instar.config.origins import DEFAULT, WEIGHTS
from instar.config.sections import FROM
from instar.data.text.tokenizer import (
    TOKENIZER_FILE,
    TRAINED,
    Tokenizer,
    load_saved_tokenizer,
    named_tokenizer,
)
from instar.models.hf import CONFIG
from instar.models.hf.config import LABELS, TITLES, completed, from_config, read_config
from instar.models.hf.pretrained import LORA, LoraShape
from instar.models.hf.tokenizer import from_fast, same_vocabulary
from instar.models.shape import ArchitectureError
from instar.record.rundir import RunDir, find_run
from instar.run.resume import STARTS_FROM, began_with
from instar.tasks.task import TaskSpec, spec_class
from instar.tasks.text import TextSpec

KEY = STARTS_FROM
TOKENIZER = "data.tokenizer"
CONFIG_KEY = "model.config"
ADAPTER = "model.adapter"
_ON_TEXT = (LANGUAGE, CAUSAL_LM)


@dataclass(frozen=True)
class Weights:
    """A model on disk that a run can start from."""

    path: Path
    """a checkpoint's folder, or a Hugging Face folder"""
    task: str
    architecture: Mapping[str, Any]
    """its shape, as JSON values"""
    config: Mapping[str, Any]
    """the initial config of its run by dotted key; empty if there is none"""
    about: str
    """what it is, in words"""
    is_hf: bool = False
    adapter: Path | None = None
    """folder of an adapter of peft that is added to it"""

    @property
    def tokenizer_file(self) -> Path:
        """Where its tokenizer is, if it has one."""
        path = self.path if len(self.path.parts) > 2 else self.path.absolute()
        return (self.path if self.is_hf else path.parent.parent) / TOKENIZER_FILE

    def tokenizer(self) -> Tokenizer | None:
        """Return its tokenizer; None if it has none. Raises ConfigError if it cannot be read."""
        return (
            load_saved_tokenizer(self.tokenizer_file.parent)
            if self.tokenizer_file.exists()
            else None
        )

    def section(self) -> dict[str, Any]:
        """Return the keys of the section `model` that describe it.

        Raises:
            CheckpointError: a run of this task cannot begin with this model.
        """
        try:
            section = spec_class(self.task).section(self.config, self.architecture)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: no run can start from it: {error}") from error
        return {key: value for key, value in section.items() if key != FROM}


def find_weights(text: str, task: str = LANGUAGE, adapter: str | None = None) -> Weights:
    """Return what `model.from` names, for a run of a task.

    Args:
        adapter: `model.adapter`.

    Raises:
        ConfigError: there is no such run or folder.
        CheckpointError: the run has no checkpoint, or what is there cannot be read.
    """
    path = Path(text)
    if (path / CONFIG).is_file() and not (path / MANIFEST).is_file():
        if task == CAUSAL_LM:
            return _pretrained_weights(path, None if adapter is None else Path(adapter))
        config = read_config(path)
        shape = from_config(config).to_dict()
        return Weights(path, LANGUAGE, shape, {}, f"{TITLES[config['model_type']]} of {path}", True)
    if adapter is not None:
        raise ConfigError.of(
            f"{path} is no folder of transformers, to which {ADAPTER} could be added"
        )
    path = _checkpoint(path)
    manifest = read_manifest(path)
    run = RunDir(path.absolute().parent.parent)
    config = dict(manifest.config)
    if not config and run.config.is_file():
        config = checkpoint_values(began_with(run, manifest))
    about = f"step {manifest.step:,} of {run.path.name}"
    task = str(config.get("task", LANGUAGE))
    return Weights(path, task, manifest.architecture, config, about)


def _pretrained_weights(path: Path, adapter: Path | None) -> Weights:
    from instar.models.hf.peft import open_adapter  # imports torch
    from instar.models.hf.pretrained_folder import open_folder

    base = open_folder(path).shape
    shape, about = LoraShape(base.config), f"{base.family.name} of {path}"
    if adapter is not None:
        opened = open_adapter(adapter, base)
        shape = LoraShape(base.config, opened.lora)
        about += f" with the adapter {adapter}" + (f" ({opened.remark})" if opened.remark else "")
    # labels are of other tasks, and JSON has no numbers as keys
    values = {key: value for key, value in shape.to_dict().items() if key not in LABELS}
    return Weights(path, CAUSAL_LM, values, {}, about, True, adapter)


def _checkpoint(path: Path) -> Path:
    """Return a checkpoint's folder, of a run its best or else its latest."""
    if path.is_file() and path.name in pointers(path.parent.parent):
        return pointer_target(path.parent.parent, path.name) or latest_checkpoint(
            path.parent.parent
        )
    if (path / MANIFEST).is_file() or path.parent.name == "checkpoints":
        return resolve_checkpoint(str(path))
    if not (root := path).joinpath("checkpoints").is_dir():
        if (path / "adapter_config.json").is_file():
            raise ConfigError.of(
                f"{path} holds an adapter of peft",
                hint=f"name its base model here, and the folder in {ADAPTER}",
            )
        if path.is_dir() and not RunDir(path).holds_run():
            raise ConfigError.of(
                f"{path} has no {CONFIG} of a Hugging Face model, no {MANIFEST} of a checkpoint and "
                "no run.yaml of a run"
            )
        try:
            root = find_run(str(path)).path
        except ConfigError as error:
            why = error.problems[0]
            download = "a model on the hub is downloaded with: hf download NAME --local-dir FOLDER"
            hint = why.hint if why.hint.startswith(("did", "say")) else download
            no_folder = (
                "" if why.message.startswith("no folder") else f", and no folder {str(path)!r}"
            )
            raise ConfigError.of(f"{why.message}{no_folder}", hint=hint) from None
    return pointer_target(root, BEST) or latest_checkpoint(root)


def values_with_weights(config_values: Mapping[str, Any]) -> Brought:
    """Return the config that comes with the weights of `model.from`, for the given values."""
    text, folder = config_values.get(KEY), config_values.get("record.run_dir")
    if text is None:
        return completed_values(config_values)
    is_resumed = config_values.get("resume") == "auto" and isinstance(folder, str)
    if not isinstance(text, str) or (is_resumed and RunDir(Path(str(folder))).holds_run()):
        return {}, "", ()
    task = config_values.get("task", LANGUAGE)
    try:
        weights = find_weights(text, str(task), _adapter(config_values))
        if weights.task != task:
            raise ConfigError.of(f"{weights.about} is of task {weights.task}, not of {task}")
        section = _with_prefix(weights.section())
        source = weights.tokenizer() if task in _ON_TEXT else None
    except CheckpointError as error:
        adapter = _adapter(config_values)
        is_of_adapter = adapter is not None and str(error).startswith(str(Path(adapter)))
        key = ADAPTER if is_of_adapter else KEY
        title, *lines = str(error).splitlines()
        text = " ".join(filter(None, (title, "; ".join(map(str.strip, lines)))))
        return {}, "", (ConfigProblem((key,), f"{key}: {text}"),)
    except ConfigError as error:
        return {}, "", [_problem(KEY, problem) for problem in error.problems]
    conflicts = [*_conflicts(config_values, section, weights)]
    path_value = {} if text == str(weights.path) else {KEY: str(weights.path)}
    path_value |= {key: value for key, value in section.items() if config_values.get(key) is None}
    if task in _ON_TEXT:
        rows = section["model.vocab_size" if task == LANGUAGE else "model.config"]
        rows = rows if task == LANGUAGE else rows["vocab_size"]
        conflicts += _tokenizer_conflicts(config_values, source, rows, weights)
        if source is not None and TOKENIZER not in config_values:
            # beside its file are those that an export of a model of transformers takes along
            is_byte = task == LANGUAGE and from_fast(source).kind == "byte"
            path_value[TOKENIZER] = "byte" if is_byte else str(weights.tokenizer_file)
    return path_value, f"{WEIGHTS}{weights.path}", conflicts


def completed_values(config_values: Mapping[str, Any]) -> Brought:
    """Return the values of a model of transformers that somebody wrote into a config, completed by its defaults."""
    written = config_values.get(CONFIG_KEY)
    if config_values.get("task") != CAUSAL_LM or not isinstance(written, dict):
        return {}, "", ()
    try:
        shape = LoraShape.from_dict(written)  # whose sizes are not left to defaults
        config = completed({key: value for key, value in written.items() if key != LORA})
    except CheckpointError as error:
        return {}, "", (ConfigProblem((CONFIG_KEY,), f"{CONFIG_KEY}: {error}"),)
    except ArchitectureError:
        return {}, "", ()  # which is said with all other problems of the shape
    adapters = {LORA: written[LORA]} if shape.lora else {}
    return {CONFIG_KEY: {**config, **adapters}}, "defaults of transformers", ()


def _adapter(config_values: Mapping[str, Any]) -> str | None:
    adapter = config_values.get(ADAPTER)
    return adapter if isinstance(adapter, str) else None


def _problem(key: str, problem: ConfigProblem) -> ConfigProblem:
    where = f"{problem.where}: " if problem.where else ""
    return ConfigProblem((key,), f"{key}: {where}{problem.message}", problem.hint)


def _is_free(key: str, config_values: Mapping[str, Any], section: Mapping[str, Any]) -> bool:
    """Return whether a given value of a key replaces that of the weights."""
    value = config_values.get(key)
    if key == "model.context" and isinstance(value, int):
        return value <= int(section[key]) or section["model.positions"] == "rope"
    return key == "model.dropout" and value is not None


def _conflicts(
    config_values: Mapping[str, Any], section: Mapping[str, Any], weights: Weights
) -> Iterator[ConfigProblem]:
    for key, value in config_values.items():
        if not key.startswith("model.") or key == KEY or value is None:
            continue
        if isinstance(value, list | dict):  # may leave out defaults; see `starting_weights`
            continue
        has = section.get(key, value)
        if value != has and not _is_free(key, config_values, section):
            yield ConfigProblem(
                (key, KEY),
                f"{key} is {value!r}, but {weights.about} has {has!r}",
                "leave it out: the shape comes with the weights",
            )


def _tokenizer_conflicts(
    config_values: Mapping[str, Any], source: Tokenizer | None, rows: int, weights: Weights
) -> Iterator[ConfigProblem]:
    """Yield why the text would become other tokens than those of the weights. A tokenizer that is
    trained on the data is compared when they are prepared, see `starting_weights`."""
    tokenizer_name = config_values.get(TOKENIZER)
    if source is None:
        if tokenizer_name is None:
            yield ConfigProblem(
                (KEY,),
                f"{KEY}: {weights.path} has no {TOKENIZER_FILE}",
                f"say in {TOKENIZER} which tokenizer the model has learned",
            )
        return
    if source.vocab_size > rows:
        yield ConfigProblem(
            (KEY,),
            f"{KEY}: {weights.tokenizer_file} has {source.vocab_size:,} tokens, and the model's table "
            f"{rows:,} rows",
        )
    if not isinstance(tokenizer_name, str) or tokenizer_name in TRAINED[1:]:
        return
    with suppress(ConfigError):  # reported when the data are prepared
        other = named_tokenizer(tokenizer_name)
        if other is not None and not same_vocabulary(source, other):
            yield _other_tokenizer(tokenizer_name, weights)


def _other_tokenizer(tokenizer_name: str, weights: Weights) -> ConfigProblem:
    return ConfigProblem(
        (TOKENIZER, KEY),
        f"{TOKENIZER} {tokenizer_name} has another vocabulary than {weights.about}",
        "leave it out: the tokenizer comes with the weights",
    )


def starting_weights(loaded_config: Loaded, spec: TaskSpec) -> Weights | None:
    """Return the weights that a new run starts from; None for random ones.

    Args:
        spec: with the data opened or assumed.

    Raises:
        ConfigError: they do not fit the model or the data.
        CheckpointError: they cannot be read.
    """
    text = loaded_config.config.starts_from
    if text is None:
        return None
    try:
        model = getattr(loaded_config.config, "model", None)
        weights = find_weights(text, loaded_config.config.task, getattr(model, "adapter", None))
    except ConfigError as error:
        weight_problems = (_problem(KEY, problem) for problem in error.problems)
        raise ConfigError(
            *(_with_place(loaded_config, problem) for problem in weight_problems)
        ) from None
    problems = [
        _with_place(
            loaded_config,
            ConfigProblem(
                (f"model.{key}", KEY), f"{KEY}: {weights.about} has {key} {was!r}, this run {now!r}"
            ),
        )
        for key, was, now in _differences(weights, spec)
    ]
    if isinstance(spec, TextSpec) and spec.dataset is not None:
        source, tokenizer_text = weights.tokenizer(), spec.config.data.tokenizer
        tokenizer_name = (
            load_saved_tokenizer(spec.dataset.path) if tokenizer_text in TRAINED[1:] else None
        )
        if (
            source is not None
            and tokenizer_name is not None
            and not same_vocabulary(source, tokenizer_name)
        ):
            problems.append(_with_place(loaded_config, _other_tokenizer(tokenizer_text, weights)))
    if problems:
        raise ConfigError(*problems)
    return weights


def _differences(weights: Weights, spec: TaskSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs between a model and that of a new run: key, the model's, the run's."""
    now = json.loads(encode_json(spec.architecture.to_dict()))
    was: Mapping[str, Any] = weights.architecture
    if weights.task == LANGUAGE:  # in which adapters are merged, and the context may be shorter
        was, now = weights.section(), spec.section({}, now)
        if _is_free("model.context", {"model.context": now["context"]}, _with_prefix(was)):
            was = {**was, "context": now["context"]}
    for key in {**was, **now}:
        if key not in ("dropout", FROM) and was.get(key) != now.get(key):
            yield key, was.get(key), now.get(key)


def _with_prefix(section: Mapping[str, Any]) -> dict[str, Any]:
    return {f"model.{key}": value for key, value in section.items()}


def _with_place(loaded_config: Loaded, problem: ConfigProblem) -> ConfigProblem:
    """Return the problem at the first of its keys that was given."""
    set_keys = [key for key in problem.keys if loaded_config.origins.get(key, DEFAULT) != DEFAULT]
    return loaded_config.problem(next(iter(set_keys), KEY), problem.message, problem.hint)
