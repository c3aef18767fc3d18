"""A state of a chain as a folder that transformers loads, beside the config of another model of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from instar.checkpoint.layout import TensorEntry
from instar.checkpoint.manifest import SUFFIX, CheckpointError
from instar.config.files import read_regular
from instar.extensions.delta.format.state import open_state, outline
from instar.extensions.delta.replay import replay_to
from instar.record import atomic

_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of the files of configs and tokenizers."""
_NAMED = 3
"""Number of tensors that an error names."""


def export_state(chain: Path, number: int | None, like: Path, folder: Path) -> list[str]:
    """Write a state as a folder that transformers loads, with the config and tokenizer of another model of the
    same kind. The folder is published atomically.

    Returns:
        what differs from `like` though the state fits its config, in sentences.

    Raises:
        CheckpointError: there is no such state, a file that leads to it is damaged, its tensors are not those
            of `like`, or a file of `like` cannot be read.
        WriteError: the folder cannot be written or is not empty.
    """
    atomic.check_new(folder)
    end, replay = replay_to(chain, number)
    where = f"{chain}: the state of step {end.step:,}"
    notes, expected = list[str](), dict[str, TensorEntry]()
    if any(like.glob(f"*{SUFFIX}*")):
        expected = outline(open_state(like))
        check_same_tensors(where, replay.outline, end.aliases, expected, str(like))
    try:
        # the config is what will load the tensors, whatever lies beside it
        described_outline = _described_by(like)
    except CheckpointError as error:
        if not expected:
            raise
        notes.append(f"the tensors were compared with the weights of {like} alone: {error}")
    else:
        about = f"the config of {like}" if expected else str(like)
        check_same_tensors(where, replay.outline, end.aliases, described_outline, about)
        expected = expected or described_outline
    with atomic.atomic_dir(folder) as temporary:
        replay.write(temporary / f"model{SUFFIX}")
        for path in sorted(like.iterdir()):
            if path.suffix in _COPIED and not path.name.endswith(f"{SUFFIX}.index.json"):
                try:
                    content = read_regular(path, follow=True)
                except OSError as error:
                    raise CheckpointError(f"{path}: {error.strerror}") from error
                atomic.write_synced(temporary / path.name, content)
    kinds = [
        sorted({entry.dtype for entry in outline.values()})
        for outline in (replay.outline, expected)
    ]
    if kinds[0] != kinds[1]:
        our_dtypes, their_dtypes = map(", ".join, kinds)
        notes.append(
            f"the tensors are {our_dtypes}, those of {like} are {their_dtypes}: config.json names the latter"
        )
    return notes


def _described_by(like: Path) -> dict[str, TensorEntry]:
    """Return the tensors of the model that the config of a folder of transformers describes.

    Raises:
        CheckpointError: transformers is not installed, or cannot build the model.
    """
    try:
        import torch
        import transformers

        from instar.checkpoint.tensor_file import DTYPES
    except ImportError as error:
        raise CheckpointError(
            f"to build the model of the config of {like}, transformers must be installed: "
            "pip install 'instar[finetune]'"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(like, local_files_only=True)
        kind = getattr(transformers, (config.architectures or [""])[0])
        with torch.device("meta"):
            model = kind(config)
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{like}: the model of its config cannot be built: {error}"
        ) from error
    names = {dtype: word for word, dtype in DTYPES.items()}
    names_by_id = {
        id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())
    }
    tensors = {
        names_by_id[id(tensor)]: tensor for tensor in model.state_dict(keep_vars=True).values()
    }
    return {
        name: TensorEntry(
            names[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.itemsize
        )
        for name, tensor in tensors.items()
    }


def check_same_tensors(
    where: str,
    state: Mapping[str, TensorEntry],
    aliases: Mapping[str, str],
    expected: Mapping[str, TensorEntry],
    like: str,
) -> None:
    """Check that a state has the tensors of a model, no more and no less.

    Args:
        where: the state, for the error.
        aliases: other names of its tensors.
        like: the model, for the error.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or tied in one of the two only.
    """
    problems = list[str]()
    for name, entry in expected.items():
        target = aliases.get(name, name)
        if target not in state:
            problems.append(f"{name} is missing")
        elif target != name and target in expected:
            problems.append(f"{name} is tied to {target}, and separate in {like}")
        elif state[target].shape != entry.shape:
            problems.append(f"{name} has the shape {state[target].shape}, not {entry.shape}")
    expected_names = {aliases.get(name, name) for name in expected}
    problems += [f"{name} is not in {like}" for name in state if name not in expected_names]
    if problems:
        more = f", and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise CheckpointError(
            f"{where} is not of a model like {like}: {'; '.join(problems[:_NAMED])}{more}"
        )
