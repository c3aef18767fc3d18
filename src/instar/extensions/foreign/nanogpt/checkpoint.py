"""Makes a run of nanoGPT's `ckpt.pt`, which goes on where that one stopped."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from instar.checkpoint.layout import file_layout, open_reader
from instar.checkpoint.manifest import CheckpointError, Facts
from instar.checkpoint.store import CheckpointContent, publish_checkpoint
from instar.config.budget import Counters
from instar.config.errors import ConfigError
from instar.config.fields import from_values
from instar.config.language import LanguageConfig
from instar.config.origins import config_text
from instar.data.text.tokenizer import (
    PICKLED,
    TOKENIZER_FILE,
    Tokenizer,
    named_tokenizer,
    tokenizer_files,
)
from instar.extensions.foreign.nanogpt.file import MODEL, STATES, NanoCheckpoint, convert_file
from instar.extensions.foreign.nanogpt.settings import settings_of, shape_of
from instar.extensions.foreign.nanogpt.states import (
    OtherOptimizer,
    as_gpt2,
    is_early,
    optimizer_states,
)
from instar.models.architecture import Architecture, section_of
from instar.models.cost import flops_per_token
from instar.models.hf.folder import name_of_run
from instar.models.hf.tensors import BUFFERS, from_tensors
from instar.record import atomic
from instar.record.atomic import atomic_dir, check_new
from instar.record.progress import folder_bytes, progress
from instar.record.rundir import RunDir
from instar.record.start_folder import note_start

Say = Callable[[str], None]

TRAIN, VAL, META = "train.bin", "val.bin", f"meta{PICKLED}"
_HEAD, _TABLE = "lm_head.weight", "transformer.wte.weight"


def import_checkpoint(
    path: Path, run_dir: Path, *, tokenizer: str | None, data: Path | None, say: Say
) -> Path:
    """Create a run with one checkpoint, that of `path`: weights, AdamW's states, step and arguments.

    Args:
        tokenizer: what `data.tokenizer` takes; None: that of `data`.
        data: nanoGPT's folder of `train.bin`, `val.bin` and perhaps `meta.pkl`.
        say: is told what was taken over and what was not.

    Returns:
        the path of the checkpoint.

    Raises:
        CheckpointError: the file is no such checkpoint; or it cannot go on here.
        ConfigError: the tokenizer or the data cannot be read.
        WriteError: `run_dir` cannot be written or is not empty.
    """
    check_new(run_dir)
    vocabulary = _vocabulary(tokenizer, data)
    with (
        atomic_dir(run_dir) as temporary,
        progress(f"importing {path}", measure=lambda: folder_bytes(temporary)),
    ):
        parts = temporary / "parts"
        parts.mkdir()
        contents = convert_file(path, parts)
        nano = _read(path, contents, parts)
        shutil.rmtree(parts)
        if vocabulary.vocab_size > nano.arch.vocab_size:
            raise CheckpointError(
                f"the tokenizer has {vocabulary.vocab_size:,} tokens, and the model's table {nano.arch.vocab_size:,} rows: "
                "it is another one's"
            )
        settings, left_out = _settings(run_dir, contents, nano, vocabulary, data)
        config = _config(path, settings)
        run = RunDir(temporary)
        run.await_start()
        for name, content in tokenizer_files(vocabulary).items():
            atomic.write_synced(temporary / name, content)
        origins = dict.fromkeys(settings, path.name)
        atomic.write_synced(run.config, config_text(config, origins).encode())
        note_start(run)
        checkpoint = _publish(temporary, path, contents, nano, config, vocabulary)
    for text in _remarks(contents, nano, left_out):
        say(text)
    return RunDir(run_dir).checkpoints / checkpoint.name


@dataclass(frozen=True)
class _Nano:
    """The model of a file and the states of its optimizer, in our names and layouts."""

    arch: Architecture
    model: Mapping[str, Tensor]
    early: bool
    """see `is_early`"""
    states: Mapping[str, Tensor]
    """empty if they are not taken over"""
    without_states: str = ""
    """why they are not"""


def _read(path: Path, contents: NanoCheckpoint, folder: Path) -> _Nano:
    try:
        early = is_early(contents, contents.names)
        arch = shape_of(contents.model_args, early=early)
        model, states = (_tensors(folder / file) for file in (MODEL, STATES))
        weights = from_tensors(arch, as_gpt2(model), shaped_by="model_args")
        shapes = {
            name: tuple(model[name].shape)
            for name in contents.names
            if name in model and name != _HEAD and not BUFFERS.fullmatch(_bare(name))
        }
        nano = _Nano(arch, weights, early, {}, "the file has none")
        if not states:
            return nano
        try:
            adamw = optimizer_states(contents, shapes, states, arch)
        except OtherOptimizer as error:
            return replace(nano, without_states=str(error))
        return replace(nano, states=adamw, without_states="")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _bare(name: str) -> str:
    return name.removeprefix("transformer.")


def _tensors(file: Path) -> dict[str, Tensor]:
    layout = file_layout(file)
    with open_reader(layout) as read:
        return {name: read(name) for name in layout.entries}


def _vocabulary(tokenizer: str | None, data: Path | None) -> Tokenizer:
    """Return the tokenizer whose tokens the model has learned.

    Raises:
        ConfigError: nothing names it, or two do; or there are no data.
    """
    if data is not None and not (data / TRAIN).is_file():
        raise ConfigError.of(f"there is no {TRAIN}, the ids that nanoGPT trains on", str(data))
    characters = data / META if data is not None and (data / META).is_file() else None
    if characters is not None and tokenizer is not None:
        raise ConfigError.of(
            "it is the vocabulary; --tokenizer is for data without", str(characters)
        )
    name = tokenizer or (characters and str(characters))
    vocabulary = named_tokenizer(name) if name else None
    if vocabulary is None:
        raise ConfigError.of(
            "nothing says which tokens the model has learned",
            "--tokenizer",
            f"name nanoGPT's folder with {META} by --data, or a tokenizer.json by --tokenizer; that of GPT-2 is "
            "written by AutoTokenizer.from_pretrained('gpt2').save_pretrained(FOLDER) of transformers",
        )
    return vocabulary


def _settings(
    run_dir: Path,
    contents: NanoCheckpoint,
    nano: _Nano,
    vocabulary: Tokenizer,
    data: Path | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the run's keys that are not left at their defaults, and the arguments that have no key."""
    settings, left_out = settings_of(contents.config)
    settings["name"] = name_of_run(run_dir)
    if not nano.early:
        settings["optimizer.no_decay"] = ["*.bias", "*norm*"]
    group = contents.groups[0] if nano.states else None
    if group is not None and group.betas is not None:
        settings |= {"optimizer.beta1": group.betas[0], "optimizer.beta2": group.betas[1]}
    if group is not None and group.eps is not None:
        settings["optimizer.eps"] = group.eps
    model = section_of(nano.arch)
    settings |= {f"model.{name}": getattr(model, name) for name in model.model_fields_set}
    if vocabulary.kind != "byte":
        settings["data.tokenizer"] = str(run_dir / TOKENIZER_FILE)
    if data is not None:
        # nanoGPT draws windows with replacement
        settings |= {"data.source": str(data / TRAIN), "data.order": "random"}
        if (data / VAL).is_file():
            settings |= {"data.val_source": str(data / VAL), "data.test_fraction": 0.0}
    return settings, left_out


def _config(path: Path, settings: Mapping[str, Any]) -> LanguageConfig:
    try:
        return from_values(LanguageConfig, settings)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()
        ]
        raise CheckpointError(
            f"{path}: its arguments cannot be used: {'; '.join(problems)}"
        ) from None


def _publish(
    folder: Path,
    path: Path,
    contents: NanoCheckpoint,
    nano: _Nano,
    config: LanguageConfig,
    vocabulary: Tokenizer,
) -> Path:
    step, train = contents.iter_num, config.train
    batch = train.batch_size * train.gradient_accumulation_steps
    context = nano.arch.context
    flops = flops_per_token(nano.arch, context) * batch * context
    last, before = (
        Counters(n, n * batch, n * batch * context, float(flops * n))
        for n in (step, max(0, step - 1))
    )
    facts = Facts(
        tokenizer=vocabulary.fingerprint,
        progress=dataclasses.asdict(last),
        reason=f"imported from {path.name} of nanoGPT",
        left_out=["rng"] if nano.states else ["optimizer", "rng"],
    )
    components = {"model": nano.model} | ({"optimizer": nano.states} if nano.states else {})
    # nanoGPT saves after an evaluation, before the step that follows it: it is due again here
    state = {
        "progress": dataclasses.asdict(last),
        "before": dataclasses.asdict(before),
        "judgement": {},
        "evaluated_at": -1,
        "skipped_in_a_row": 0,
        "scaler": {},
        "story": {
            "last_loss": None,
            "wall_s": 0.0,
            "saved_at": time.time(),
            "foreign_progress": dataclasses.asdict(last),
        },
    }
    content = CheckpointContent(components, state if step else {}, nano.arch.to_dict(), facts=facts)
    return publish_checkpoint(folder, step, content)


def _remarks(contents: NanoCheckpoint, nano: _Nano, left_out: list[str]) -> list[str]:
    states = "AdamW's state" if nano.states else "no state of an optimizer"
    texts = [f"imported step {contents.iter_num:,}, with its weights and {states}"]
    if nano.without_states:
        texts.append(f"warning: moments begin at zero: {nano.without_states}")
    if contents.best_val_loss is not None:
        texts.append(
            f"its best validation loss, {contents.best_val_loss:.4f}, is a mean over batches that it drew: best values "
            "begin anew here"
        )
    if nano.early:
        texts.append(
            "note: it is from before May 2023: GELU is approximated by tanh, embeddings are not decayed, and "
            "gradient_accumulation_steps counted for each process: check train.gradient_accumulation_steps"
        )
    if left_out:
        texts.append(f"arguments that are not taken over: {', '.join(left_out)}")
    return texts
