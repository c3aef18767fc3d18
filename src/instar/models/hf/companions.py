"""Files beside the weights of a folder: those that came with an imported model, and what chats need to end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instar.checkpoint.manifest import read_json
from instar.config.document import read_document
from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG
from instar.data.text.tokenizer import TOKENIZER_FILE, BPETokenizer, load_saved_tokenizer
from instar.models.hf import CONFIG
from instar.models.hf.tokenizer import CHAT_TEMPLATE, COMPANIONS, SPECIAL_IDS
from instar.models.hf.weights import encode_json_file
from instar.record.rundir import RunDir

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def companion_files(folder: Path, *, follow: bool = False) -> dict[str, bytes]:
    """Return the files of a folder that belong to its tokenizer or model, the tokenizer's included.

    Args:
        follow: whether they may be symbolic links.
    """
    names = [name for name in (TOKENIZER_FILE, *COMPANIONS) if (folder / name).is_file()]
    return {name: read_regular(folder / name, follow=follow) for name in names}


def imported(folder: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that a run keeps of a folder of transformers beside the tokenizer's, for its exports."""
    files = companion_files(folder, follow=True)
    files.pop(TOKENIZER_FILE, None)
    return {
        **files,
        SPECIAL_IDS: encode_json_file({key: config[key] for key in _IDS if key in config}),
    }


def exported(run: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files of a run for its export, and the ids of special tokens for its config, as they came with an
    imported model; nothing for any other run."""
    if not (run / SPECIAL_IDS).is_file():
        return {}, {}
    ids = read_json(run / SPECIAL_IDS)
    return companion_files(run), {key: ids[key] for key in _IDS if key in ids}


def with_chat(files: Mapping[str, bytes], run: Path) -> dict[str, bytes]:
    """Return the files of an export; of a run that was trained on conversations with the chat template, and
    with the token that ends an answer among those that end a generation.

    Raises:
        ConfigError: the run's config, tokenizer or template cannot be read.
    """
    export_files = dict(files)
    if TOKENIZER_FILE not in files or not _trains_chats(run):
        return export_files
    from instar.data.text.foreign.chat_template import template_beside

    tokenizer = load_saved_tokenizer(run)
    template = template_beside(run, tokenizer)
    of_tokenizer = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    if CHAT_TEMPLATE not in files and not of_tokenizer.get("chat_template"):
        export_files[CHAT_TEMPLATE] = template.text.encode()
    vocabulary = tokenizer.vocabulary if isinstance(tokenizer, BPETokenizer) else {}
    end = vocabulary.get(template.end.token)
    config = json.loads(files[CONFIG])
    settings = json.loads(files.get(GENERATION, b"{}")) or {
        key: config[key] for key in _IDS if config.get(key) is not None
    }
    ends = settings.get("eos_token_id", config.get("eos_token_id"))
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end is not None and end not in end_ids:
        export_files[GENERATION] = encode_json_file({**settings, "eos_token_id": [*end_ids, end]})
    return export_files


def _trains_chats(run: Path) -> bool:
    """Return whether the config of a run says so; nothing that it names need be there any more."""
    file = RunDir(run).config
    document, problems = read_document(str(file), "") if file.is_file() else (None, ())
    if problems:
        raise ConfigError(*problems)
    data = document.data.get("data") if document and isinstance(document.data, dict) else None
    return isinstance(data, dict) and data.get("kind") == "chat"
