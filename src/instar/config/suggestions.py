"""Messages and suggestions for unknown keys and invalid values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from instar.config.budget import meant_number
from instar.config.document import KeyPath, dotted_key
from instar.config.errors import is_secret, nearest, odd_space, value_text
from instar.config.fields import Root, alternatives, choices, default, schema_keys, section_types
from instar.config.torch_optim import optimizers, schedulers
from instar.extensions import how_to_install

ALIASES: Mapping[str, str] = {
    "name": "run_name experiment experiment_name project",
    "seed": "random_seed manual_seed rng_seed",
    "device": "accelerator",
    "precision": "dtype fp16 bf16 amp autocast mixed_precision torch_dtype",
    "tf32": "allow_tf32 float32_matmul_precision matmul_precision",
    "compile": "torch_compile use_compile",
    "resume": "resume_from_checkpoint",
    "model.from": "init_from pretrained from_pretrained model_name_or_path base_model "
    "model.name model.path model.pretrained",
    "model.context": "block_size max_seq_len seq_len seq_length sequence_length n_ctx n_positions "
    "max_length context_length max_position_embeddings",
    "model.n_embd": "d_model hidden_size hidden_dim embed_dim dim",
    "model.width": "hidden_channels d_model n_embd hidden_size hidden_dim hidden dim",
    "model.n_head": "num_attention_heads num_heads",
    "model.n_kv_head": "num_key_value_heads",
    "model.n_layer": "num_hidden_layers num_layers depth",
    "model.n_mlp": "intermediate_size d_ff ffn_dim dim_feedforward ffn_hidden_size",
    "model.num_experts": "num_local_experts n_experts moe_num_experts n_routed_experts",
    "model.num_experts_per_tok": "top_k moe_top_k num_experts_per_token experts_per_token",
    "model.router_aux_loss_coef": "aux_loss_coef moe_aux_loss_coeff load_balance_coeff",
    "model.conv_size": "d_conv conv_kernel conv_kernel_size use_short_conv canon canon_kernel",
    "model.embedding_multiplier": "scale_emb embed_scale embedding_scale scale_embedding",
    "model.tied": "tie_word_embeddings weight_tying",
    "model.bias": "use_bias",
    "model.positions": "rope rotary use_rope pos_emb",
    "model.activation": "hidden_act activation_function",
    "model.layer": "conv conv_type layer_type",
    "model.pooling": "pool aggr readout",
    "data.source": "dataset data_dir train_file corpus",
    "data.order": "shuffle",
    "data.val_fraction": "val val_ratio val_split val_set_size validation_split",
    "data.packing": "pack pack_sequences sample_packing",
    "data.test_fraction": "test test_ratio test_split",
    "data.balance": "balanced class_balanced balance_classes balanced_sampler",
    "data.sample_weights": "sampler weighted_sampler sampling_weights weight_column",
    "data.train_subset": "max_train_samples limit_train_batches train_size train_fraction select_range",
    "data.workers": "num_workers dataloader_num_workers",
    "train.batch_size": "batch micro_batch_size train_batch_size per_device_train_batch_size",
    "train.gradient_accumulation_steps": "grad_accum accumulate_grad_batches grad_accum_steps",
    "train.gradient_checkpointing": "checkpoint_activations activation_checkpointing",
    "train.clip": "grad_clip max_grad_norm max_norm gradient_clip_val gradient_clipping",
    "train.ema": "ema_decay",
    "train.until": "epochs num_epochs n_epochs max_epochs num_train_epochs steps max_steps num_steps "
    "total_steps train_steps max_iters num_iters iterations max_tokens total_tokens budget",
    "optimizer.name": "optimizer.type optim",
    "optimizer.lr": "learning_rate base_lr max_lr",
    "optimizer.beta1": "betas adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "epsilon adam_epsilon",
    "optimizer.weight_decay": "wd l2",
    "learning_rate.shape": "decay_lr scheduler lr_scheduler lr_scheduler_type lr_decay_style "
    "learning_rate.name learning_rate.type",
    "learning_rate.warmup_iters": "warmup warmup_steps num_warmup_steps warmup_ratio",
    "learning_rate.min_lr_ratio": "min_lr",
    "eval.eval_interval": "eval_every eval_steps val_check_interval",
    "eval.eval_epochs": "check_val_every_n_epoch",
    "eval.batch_size": "eval_batch_size per_device_eval_batch_size",
    "early_stopping.rules": "early_stopping_patience",
    "checkpoint.every_steps": "save_every save_steps save_interval checkpoint_every ckpt_interval",
    "checkpoint.every_epochs": "save_epochs save_every_epochs every_n_epochs",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.best_of": "metric_for_best_model monitor",
    "record.trackers": "logger report_to",
    "record.trackers.wandb": "use_wandb wandb_log wandb_project",
    "record.log_interval": "logging_steps log_every log_every_n_steps",
    "record.out_dir": "output output_dir save_dir log_dir",
    "parallel.world_size": "gpus num_gpus n_gpus nproc nproc_per_node num_processes",
}
"""Names of keys and sections in other trainers; a dotted name applies within its section only."""

WITHOUT_KEY: Mapping[str, str] = {
    "adapters are added by an operation: schedule: [{name: set_lora_rank, value: {target: attn, rank: 8}, when: "
    "{at_step: 0}}], with freeze for the rest": "adapter lora lora_r lora_rank lora_alpha lora_dropout "
    "lora_target_linear lora_target_modules peft peft_config peft_type use_lora use_peft",
    "weights are trained in the precision of the config; quantized ones are not trained": "load_in_4bit load_in_8bit "
    "quantization quantization_config bnb_4bit_compute_dtype",
}
"""Names in other trainers of what no key sets, by what to write instead."""

ITEM_ALIASES: Mapping[str, str] = {
    "trigger_loss": "loss_below",
    "loss": "loss_below",
    "max_wait_iters": "waited",
    "wait": "waited",
    "step": "at_step",
    "num_classes": "classes",
    "type": "kind",
    "path": "source",
    "proportion": "weight",
}
"""Aliases of keys in list items: operations, triggers, heads, parts of a mixture."""


REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "optimizer.name": optimizers.REFUSED,
    "learning_rate.shape": schedulers.REFUSED,
}
"""What to write instead of words that other tools have, in lower case, by key."""


@cache
def aliases(root: Root) -> dict[str, str]:
    """Map names used by other trainers to dotted keys, or sections, of this config."""
    return {
        name: key
        for key, names in ALIASES.items()
        if key in schema_keys(root) or key in section_types(root)
        for name in names.split()
    }


@cache
def _without_key() -> dict[str, str]:
    """Map names of other trainers without a key of ours to what to write instead."""
    return {name: remedy for remedy, names in WITHOUT_KEY.items() for name in names.split()}


def suggest_key(root: Root, name: str) -> str:
    """Return the dotted key, the first of several, that a name without or with the wrong section
    means; empty if it is ambiguous."""
    owners = [key for key in schema_keys(root) if name in (key, key.rpartition(".")[2])]
    known_aliases = aliases(root).get(name.rpartition(".")[2], "")
    return owners[0] if owners else known_aliases if known_aliases in schema_keys(root) else ""


def section_hint(root: Root, name: str) -> str:
    """Return a hint for a section that was given a value as if it were a key."""
    suggestion = aliases(root).get(name)
    return f"did you mean '{suggestion}'?" if suggestion else ""


RENAMED: Mapping[str, tuple[str, str]] = {
    "early_stopping.mode": (
        "early_stopping.stop_when",
        "it is stop_when now: any stops as soon as one metric has stopped improving, all only when every "
        "metric has; elsewhere mode any means that any improvement starts the patience again, which is "
        "stop_when: all, and mode all is stop_when: any",
    )
}
"""Keys of earlier versions whose values could be misread: the key that is meant, and what to write."""


def unknown_key(root: Root, path: KeyPath) -> tuple[str, str, str]:
    """Return message and hint for an unknown key, and the dotted key that was meant ("")."""
    section, name = dotted_key(path[:-1]), str(path[-1])
    message = f"unknown key '{name}'" + (f" in {section}" if section else "")
    if remedy := how_to_install("sections", dotted_key(path)):
        return message, f"its extension is not installed: {remedy}", ""
    if dotted_key(path) in RENAMED:
        new_name, hint = RENAMED[dotted_key(path)]
        return message, hint, new_name
    if section not in section_types(root):  # in an item of a list
        inner = choices(root, path[:-1])
        candidates = [key for choice in inner for key in choice.get("properties", ())]
        alias = ITEM_ALIASES.get(name)
        suggestion = alias if alias in candidates else nearest(name, candidates)
        hint = f"did you mean '{suggestion}'?" if suggestion else f"it has {', '.join(candidates)}"
        return message, hint, ""
    if "." in name and name in schema_keys(root):
        home, _, last = name.rpartition(".")
        return message, f"write '{last}:' under '{home}:'", name
    fields, known_aliases = section_types(root)[section].model_fields, aliases(root)
    suggestion = known_aliases.get(f"{section}.{name}")
    for names in (schema_keys(root), section_types(root)):
        owners = [key for key in names if key and key.rpartition(".")[2] == name]
        if suggestion is None and owners:
            homes = [key.rpartition(".")[0] for key in owners]
            places = [f"in {home}" if home else "at the top level" for home in homes]
            return message, f"'{name}' belongs {' or '.join(places)}", owners[0]
        suggestion = suggestion or known_aliases.get(name.lower().replace("-", "_"))
    if suggestion is None and name.lower() in _without_key():
        return message, _without_key()[name.lower()], ""
    if suggestion is None and (close := nearest(name, fields)):
        suggestion = f"{section}.{close}" if section else close
    if suggestion is None:
        keys_by_name = {key.rpartition(".")[2]: key for key in schema_keys(root)} | known_aliases
        suggestion = keys_by_name.get(nearest(name, keys_by_name, 0.85) or "")
    if suggestion is None:
        return message, f"it has {', '.join(fields)}" if len(fields) <= 8 else "", ""
    home, _, last = suggestion.rpartition(".")
    return message, f"did you mean '{last if home == section else suggestion}'?", suggestion


PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "a name of letters, digits, '.', '_' and '-'",
    r"^[A-Za-z][A-Za-z0-9_-]*$": "a name of letters, digits, '_' and '-' that begins with a letter",
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:<index>",
}


def expected(root: Root, path: KeyPath, value: Any = None) -> str:
    """Describe the allowed values of the key at a path: "a whole number greater than 0 or null".

    Bounds that only catch typing errors are mentioned only if `value` exceeds them.
    """
    return " or ".join(_in_words(root, choice, value) for choice in choices(root, path))


def _in_words(root: Root, node: dict[str, Any], value: Any) -> str:
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    if "const" in node:
        return str(node["const"])
    match node.get("type"):
        case "integer":
            return f"a whole number{_bounds(node, value)}"
        case "number":
            return f"a number{_bounds(node, value)}"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array":
            items = alternatives(root, node.get("items", {}))
            if items[0].get("type") == "object":
                return "a list of 'key: value' groups"
            if len(items) > 2 or "pattern" in items[0]:
                return "a list"
            words = " or ".join(_in_words(root, item, None) for item in items)
            if words.startswith("one of "):
                return f"a list, each {words}"
            return "a list of " + re.sub(r"^(?:a )?(whole number|number|text)", r"\1s", words)
        case "string" if "pattern" in node:
            return PATTERNS.get(node["pattern"], f"text that matches {node['pattern']}")
        case "string":
            return "text"
        case "object":
            return "a section of keys"
        case None if not node.keys() - {"title", "description", "default"}:
            return "anything"
    return "something else"


FAR = 100
"""Inclusive bounds at or beyond it only catch typing errors."""


def _bounds(node: dict[str, Any], value: Any) -> str:
    words = {
        "exclusiveMinimum": "greater than",
        "minimum": "of at least",
        "exclusiveMaximum": "less than",
        "maximum": "at most",
    }
    number = value if isinstance(value, int | float) else 0
    bounds = [
        f"{word} {_limit_text(node[name])}"
        for name, word in words.items()
        if name in node and (name.startswith("ex") or abs(node[name]) < max(FAR, abs(number)))
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _limit_text(number: float) -> str:
    for power in (31, 32, 63, 64):
        if number == 2**power:
            return f"2^{power}"
    digits = len(str(int(abs(number)))) - 1
    if digits >= 6 and abs(number) == 10**digits:
        return f"{'-' if number < 0 else ''}1e{digits}"
    return f"{number:,}" if isinstance(number, int) else f"{number:,g}"


def wrong_value(root: Root, path: KeyPath, value: Any, kind: str, reason: str) -> tuple[str, str]:
    """Return message and hint for a value that the schema rejects.

    Args:
        kind: pydantic's error type.
        reason: pydantic's message; both are used only if the schema does not describe the allowed values.
    """
    name = dotted_key(path)
    if kind == "missing":
        return f"{name} is missing", ""
    if is_secret(name):
        reason = reason.removeprefix("Value error, ") if kind == "value_error" else ""
        return f"{name} must be {reason or expected(root, path, None)}", ""
    if not choices(root, path) or kind in ("value_error", "assertion_error"):
        reason = reason.removeprefix("Value error, ")
        return f"{name}: {reason[:1].lower()}{reason[1:]}, got {value_text(value)}", ""
    hint = _hint(root, name, choices(root, path), value)
    return f"{name} must be {expected(root, path, value)}, got {value_text(value)}", hint


_YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _hint(root: Root, name: str, choices: Sequence[Mapping[str, Any]], value: Any) -> str:
    types = {choice.get("type") for choice in choices}
    if value is None:
        instead = default(schema_keys(root)[name]) if name in schema_keys(root) else None
        text = value_text(instead)
        return "" if instead is None else f"leave the line out for the default, {text}"
    if isinstance(value, str) and (hint := _hint_for_text(name, choices, types, value)):
        return hint
    if name == "schedule":
        return "or the path of a file with it"
    if isinstance(value, bool | int | float):
        has_pattern = any("pattern" in choice for choice in choices)
        return _hint_for_number(name, types, value, has_pattern=has_pattern)
    return ""


def _hint_for_text(
    name: str, choices: Sequence[Mapping[str, Any]], types: Collection[str | None], value: str
) -> str:
    text, number = value.lower(), _number(value)
    if instead := REFUSED_VALUES.get(name, {}).get(text):
        return instead
    if "boolean" in types and text in _YES_NO:
        return f"YAML 1.2 reads '{value}' as text, write {_YES_NO[text]}"
    if odd := odd_space(value):
        return f"{odd}; write ordinary spaces, or none"
    if _may_be(number, types) or ("boolean" in types and text in ("true", "false")):
        return "drop the quotes"
    if "null" in types and text in ("none", "nil"):
        return "write null"
    words = [str(word) for choice in choices for word in choice.get("enum", ())]
    if suggestion := nearest(value, words):
        return f"did you mean '{suggestion}'?"
    if name == "device" and text in ("gpu", "nvidia"):
        return "did you mean 'cuda'?"
    number = meant_number(value, name)
    return f"write the number out, {value_text(number)}" if _may_be(number, types) else ""


def _may_be(number: float | None, types: Collection[str | None]) -> bool:
    """Return whether a key of these types takes the number."""
    return number is not None and ("number" in types or ("integer" in types and number % 1 == 0))


def _hint_for_number(
    name: str, types: Collection[str | None], value: Any, *, has_pattern: bool
) -> str:
    if name == "device" and type(value) is int:
        return f"write cuda:{value}"
    if isinstance(value, int) and name.startswith("train.until"):
        return f"write {value}it for steps"
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return f"write {int(value)}"
    if "string" in types and not has_pattern:
        return f"put it in quotes to make it text: {value_text(value_text(value))}"
    return ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
