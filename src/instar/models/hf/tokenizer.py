"""What a folder of transformers has beside config and weights: its tokenizer, in the format of the tokenizers library,
the files that came with an imported model, and what chats need to end; torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from instar.checkpoint.manifest import read_json
from instar.config.document import read_document
from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.data.text.foreign.chat_template import template_beside
from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG, end_token_of
from instar.data.text.tokenizer import (
    TOKENIZER_FILE,
    UNKNOWN,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_saved_tokenizer,
)
from instar.models.hf import CONFIG, encode_json_file
from instar.record.rundir import RunDir

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
SPECIAL_IDS = "special_ids.json"
"""In a run of an imported model: ids of special tokens as the config of its folder has them, perhaps among others."""
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
COMPANIONS = (
    TOKENIZER_CONFIG,
    GENERATION,
    "tokenizer.model",
    _SPECIAL_TOKENS_MAP,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
)
"""Files beside a tokenizer.json of transformers that belong to it or its model; no other is copied."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def to_fast(tokenizer: Tokenizer) -> str:
    """Return the equivalent tokenizer in the JSON of the tokenizers library."""
    if isinstance(tokenizer, ByteTokenizer):
        fast = Fast(models.BPE({letter(byte): byte for byte in range(256)}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharTokenizer):
        ids = {name: number for number, name in enumerate(tokenizer.names)}
        # a vocabulary without that token makes the library refuse other characters
        fast = Fast(models.WordLevel(ids, unk_token=UNKNOWN))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
    else:
        return tokenizer.to_json()
    return str(fast.to_str())


def from_fast(tokenizer: Tokenizer) -> Tokenizer:
    """Inverse of `to_fast`; a tokenizer that `to_fast` did not write is returned as it is."""
    text = tokenizer.to_json()
    if not isinstance(tokenizer, BPETokenizer):
        return tokenizer
    if text == to_fast(ByteTokenizer()):
        return ByteTokenizer()
    if (vocabulary := json.loads(text)["model"]).get("type") == "WordLevel":
        names = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
        is_closed = names[-1:] != [UNKNOWN]
        chars = CharTokenizer("".join(names if is_closed else names[:-1]), is_closed)
        return chars if text == to_fast(chars) else tokenizer
    return tokenizer


def same_vocabulary(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether two tokenizers have the same tokens with the same ids, whatever wrote their files."""
    first, second = from_fast(first), from_fast(second)
    if isinstance(first, BPETokenizer) and isinstance(second, BPETokenizer):
        return first.vocabulary == second.vocabulary
    return first == second


def letter(byte: int) -> str:
    """Return the character of a byte in byte-level tokenizers, as in GPT-2: itself if it is
    printable, else one from code point 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [code for code in range(256) if code not in visible]
    return chr(byte if byte in visible else 256 + hidden.index(byte))


def companion_files(folder: Path, *, follow: bool = False) -> dict[str, bytes]:
    """Return the files of a folder that belong to its tokenizer or model, the tokenizer's included.

    Args:
        follow: whether they may be symbolic links.
    """
    names = [name for name in (TOKENIZER_FILE, *COMPANIONS) if (folder / name).is_file()]
    return {name: read_regular(folder / name, follow=follow) for name in names}


def imported_companions(folder: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that a run keeps of a folder of transformers beside the tokenizer's, for its exports."""
    files = companion_files(folder, follow=True)
    files.pop(TOKENIZER_FILE, None)
    return {
        **files,
        SPECIAL_IDS: encode_json_file({key: config[key] for key in _IDS if key in config}),
    }


def exported_companions(run: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files of a run for its export, and the ids of special tokens for its config, as they came with an
    imported model; without ids, where only a tokenizer came with its config; nothing for any other run."""
    if not any((run / name).is_file() for name in (SPECIAL_IDS, TOKENIZER_CONFIG)):
        return {}, {}
    ids = read_json(run / SPECIAL_IDS) if (run / SPECIAL_IDS).is_file() else {}
    return companion_files(run), {key: ids[key] for key in _IDS if key in ids}


def as_trained(files: Mapping[str, bytes], run: Path) -> dict[str, bytes]:
    """Return the files of an export, which say what the run has learned to end a text with.

    That is `data.eos`, where the files that came with the model name another token. Of a run that was trained on
    conversations: with the chat template, and with the token that ends an answer among those that end a generation.

    Raises:
        ConfigError: the run's config, tokenizer or template cannot be read.
    """
    export_files = dict(files)
    if TOKENIZER_FILE not in files:
        return export_files
    tokenizer = load_saved_tokenizer(run)
    if isinstance(tokenizer, BPETokenizer) and not _names_end(run, tokenizer):
        about = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        export_files[TOKENIZER_CONFIG] = encode_json_file(
            {**about, "eos_token": tokenizer.end_token}
        )
        if _SPECIAL_TOKENS_MAP in files:
            about = json.loads(files[_SPECIAL_TOKENS_MAP])
            export_files[_SPECIAL_TOKENS_MAP] = encode_json_file(
                {**about, "eos_token": tokenizer.end_token}
            )
        export_files |= _ending_with(export_files, tokenizer.end_id)
    if not _trains_chats(run):
        return export_files
    template = template_beside(run, tokenizer)
    of_tokenizer = json.loads(export_files.get(TOKENIZER_CONFIG, b"{}"))
    if CHAT_TEMPLATE not in files and not of_tokenizer.get("chat_template"):
        export_files[CHAT_TEMPLATE] = template.text.encode()
        if of_tokenizer.get("split_special_tokens"):  # the template writes them as text
            export_files[TOKENIZER_CONFIG] = encode_json_file(
                {**of_tokenizer, "split_special_tokens": False}
            )
    vocabulary = tokenizer.vocabulary if isinstance(tokenizer, BPETokenizer) else {}
    return export_files | _ending_with(export_files, vocabulary.get(template.end.token))


def _names_end(run: Path, tokenizer: BPETokenizer) -> bool:
    """Return whether the files that came with a run's model name the end that its documents have."""
    if not tokenizer.needs_end_file or not any((run / name).is_file() for name in COMPANIONS):
        return True
    said = end_token_of(
        run, tokenizer.vocabulary, tokenizer.added_tokens, follow=False, is_kept=False
    )
    # with the model's config, from whose ids the end may be, only these ids are kept
    ids = (
        read_json(run / SPECIAL_IDS).get("eos_token_id") if (run / SPECIAL_IDS).is_file() else None
    )
    first = ids[0] if isinstance(ids, list) and ids else ids
    return tokenizer.end_token == said.token or (said.token is None and tokenizer.end_id == first)


def _ending_with(files: Mapping[str, bytes], end: int | None) -> dict[str, bytes]:
    """Return the settings of generation with a token among those that end one; nothing if it is already."""
    config = json.loads(files[CONFIG])
    settings = json.loads(files.get(GENERATION, b"{}")) or {
        key: config[key] for key in _IDS if config.get(key) is not None
    }
    ends = settings.get("eos_token_id", config.get("eos_token_id"))
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end is None or end in end_ids:
        return {}
    return {GENERATION: encode_json_file({**settings, "eos_token_id": [*end_ids, end]})}


def _trains_chats(run: Path) -> bool:
    """Return whether the config of a run says so; nothing that it names need be there any more."""
    file = RunDir(run).config
    document, problems = read_document(str(file), "") if file.is_file() else (None, ())
    if problems:
        raise ConfigError(*problems)
    data = document.data.get("data") if document and isinstance(document.data, dict) else None
    return isinstance(data, dict) and data.get("kind") == "chat"
