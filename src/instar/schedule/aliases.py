"""Schedules in the form of the nanoGPT orchestrator (JinxCodesAI/nano_gpt), read as ours.

Its files name some operations otherwise, give some values in another form, and have keys for its own progress. What can
be said in our words is translated, and what was is said; for the rest `REMEDIES` say what to write instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from instar.config.origins import in_yaml
from instar.schedule.branches import BRANCH, OPERATIONS

KEYS = frozenset({"name", "value", "trigger_loss", "max_wait_iters", "reevaluate"})
"""which every entry of its files has: numbers are read as it reads them"""
LARGEST_FACTOR = 16
"""a width of the MLP up to this number is a factor: the project had factors first, and widths later"""

REMEDIES: Mapping[str, str] = {
    "set_curriculum_alpha": "there is no curriculum of losses: leave it out; what is trained on is chosen by the "
    "data, stages of length by set_context",
    "resize_vocabulary": "its file does not say the size: write resize_vocab with the rows that the vocabulary is to "
    "have",
    "disable_vocab_remapping": "there is no remapping of tokens: leave it out, or write resize_vocab with a size",
}
"""What to write instead of operations that cannot be translated."""

_PARTS = {
    "attn": "blocks.{}.attn.*",
    "mlp": "blocks.{}.mlp.*",
    "ln_1": "blocks.{}.attn_norm.*",
    "ln_2": "blocks.{}.mlp_norm.*",
}
_WHOLE = {
    "wte": "token_embedding.*",
    "wpe": "position_embedding.*",
    "ln_f": "final_norm.*",
    "lm_head": "head.*",
}
_IF_ANY = {"on_failure": "skip"}
"""where no weight has an adapter it goes on"""
_ALL_BUT_TABLES = ["blocks.*", "final_norm.*"]

Entry = dict[str, Any]
Reading = Callable[[Any], Entry | None]
"""The keys that replace `name` and `value`, of the value; None: it has not the form."""


def translate(entries: Sequence[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """Return the entries of a schedule in our words, as many, and what to say of it."""
    changes: Counter[str] = Counter()
    translated = [_translated(entry, changes) for entry in entries]
    return translated, tuple(
        f"schedule: {text}, in {count} {'entry' if count == 1 else 'entries'}"
        for text, count in changes.items()
    )


def remedy(name: str) -> str:
    """Return what to write for an operation of the other form; empty if it is none."""
    if name in REMEDIES:
        return REMEDIES[name]
    return f"here it is {_OURS[name]}" if name in _OURS else ""


def _translated(entry: Any, changes: Counter[str]) -> Any:
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    if entry.get("completed") in (True, False) and entry.pop("completed"):
        changes["completed is ignored: a run begins with the first entry"] += 1
    name, value, wait = entry.get("name"), entry.get("value"), entry.get("max_wait_iters")
    if entry.keys() >= KEYS and type(wait) is int and wait < 0:
        entry["max_wait_iters"] = 0
        changes["max_wait_iters below 0 is read as 0"] += 1
    if name == BRANCH and isinstance(inner := entry.get(OPERATIONS), list):
        return entry | {OPERATIONS: [_translated(part, changes) for part in inner]}
    readings = _READINGS | _OF_SAME_NAME if entry.keys() >= KEYS else _READINGS
    reading = readings.get(name) if isinstance(name, str) else None
    keys = None if reading is None else reading(value)
    if keys is None:
        return entry
    if keys["name"] == name:
        text = ", ".join(f"{key} {in_yaml(keys[key])}" for key in keys if key != "name")
        changes[f"{name} {in_yaml(value)} is read as {text}"] += 1
    else:
        changes[f"{name} is read as {_OURS[name]}"] += 1
    return entry | keys


def _width(value: Any) -> Entry | None:
    is_factor = _is_number(value) and (value <= LARGEST_FACTOR or value != int(value))
    return {"name": "widen_mlp", "value": f"x{value:g}"} if is_factor else None


def _renamed(name: str) -> Reading:
    return lambda value: {"name": name, "value": value}


def _of_layer(name: str) -> Reading:
    def read(value: Any) -> Entry | None:
        pattern = _pattern(value)
        return None if pattern is None else {"name": name, "value": pattern}

    return read


def _pattern(layer: Any) -> str | None:
    """Return the pattern of the parameters of `attn.0`, `wte` and the like."""
    part, _, number = layer.partition(".") if isinstance(layer, str) else ("", "", "")
    if part in _PARTS and number.isdecimal():
        return _PARTS[part].format(int(number))
    return _WHOLE.get(part) if not number else None


def _layer_rank(value: Any) -> Entry | None:
    """Its attention has one adapter for queries, keys and values together; here each has one."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    layer, rank = value
    part, _, number = layer.partition(".") if isinstance(layer, str) else ("", "", "")
    if part == "attn" and number.isdecimal():
        return _rank_of(f"blocks.{int(number)}.attn.[qkv]*")(rank)
    return _rank_of("embedding")(rank) if layer == "wte" else None


def _rank_of(target: str) -> Reading:
    """It adds an adapter to its weight before it makes another one."""
    return lambda rank: {
        "name": "set_lora_rank",
        "value": {"target": target, "rank": rank},
        "merge": True,
    }


def _rank_by(target: str) -> Reading:
    """It divides the width by a divisor, which is divided by the value."""
    return lambda factor: {
        "name": "change_lora_rank",
        "value": {"target": target, "factor": factor},
        "merge": True,
        **_IF_ANY,
    }


def _only_tables(value: Any) -> Entry | None:
    """Whatever its name says, it trains the embedding and the head alone."""
    if not isinstance(value, bool):
        return None
    if value:
        return {"name": "freeze", "value": _ALL_BUT_TABLES}
    return {"name": "unfreeze", "value": "*"}


def _share_of_memory(value: Any) -> Entry | None:
    if not isinstance(value, dict) or not _is_number(value.get("target_vram_percent", 82.0)):
        return None
    keys = {"name": "adjust_batch_size", "value": value.get("target_vram_percent", 82.0) / 100}
    return keys | {"max": value.get("max_batch_size", 1024)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_OF_SAME_NAME: dict[str, Reading] = {
    "widen_mlp": _width,
    "change_lora_alpha": lambda value: {"name": "change_lora_alpha", "value": value, **_IF_ANY},
}
_SKIPPED = "skipped where there are no adapters"
_QKV = "the queries, keys and values of attention"
_READINGS: dict[str, Reading] = {
    "merge_lora_weights": lambda _: {"name": "merge_lora", "value": None, **_IF_ANY},
    "set_layer_lora_rank": _layer_rank,
    "set_attn_lora_rank": _rank_of("blocks.*.attn.[qkv]*"),
    "set_embedding_lora_rank": _rank_of("embedding"),
    "decrease_attn_lora_scaling": _rank_by("attn"),
    "decrease_vocab_lora_scaling": _rank_by("embedding"),
    "freeze_layer": _of_layer("freeze"),
    "unfreeze_layer": _of_layer("unfreeze"),
    "set_embedding_freeze_mode": _only_tables,
    "set_embedding_finetune_mode": _only_tables,
    "set_batch_size_relative": _renamed("change_batch_size"),
    "adjust_batch_size": _share_of_memory,
}
_OURS: Mapping[str, str] = {
    "merge_lora_weights": f"merge_lora, {_SKIPPED}",
    "set_layer_lora_rank": f"set_lora_rank with merge: true, of {_QKV}, or of the embedding",
    "set_attn_lora_rank": f"set_lora_rank with merge: true, of {_QKV}",
    "set_embedding_lora_rank": "set_lora_rank of the embedding, with merge: true",
    "decrease_attn_lora_scaling": f"change_lora_rank of the attention, with merge: true, {_SKIPPED}",
    "decrease_vocab_lora_scaling": f"change_lora_rank of the embedding, with merge: true, {_SKIPPED}",
    "freeze_layer": "freeze, with a pattern of parameter names",
    "unfreeze_layer": "unfreeze, with a pattern of parameter names",
    "set_embedding_freeze_mode": "freeze of all but the embedding and the head, or unfreeze",
    "set_embedding_finetune_mode": "freeze of all but the embedding and the head, or unfreeze",
    "set_batch_size_relative": "change_batch_size, rounded to the nearest, not to a multiple of 8",
}
"""How each is said here, in the form that the reader of a schedule would write."""
