"""Tokenizers in the layouts of the families of transformers, small and made on the spot, with what lies beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = Path(json.__file__).read_text() + "naïve café, 再见 ✓\n" * 20
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""how the class of Qwen2's tokenizer splits a text, whatever its file says"""
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@dataclass(frozen=True)
class Layout:
    """What a family's folders have in common."""

    model_type: str
    tokenizer_class: str
    style: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    eos_ids: tuple[str, ...] = ()
    """tokens of `eos_token_id` in generation_config.json"""
    plain: tuple[str, ...] = ()
    """added tokens that are not special"""
    template: str = TURNS
    """a chat template, or the name of one that TRL ships"""


_END_OF_TEXT = ("<|endoftext|>",)
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA2 = ("<unk>", "<s>", "</s>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
_LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
_PHI3 = (*_LLAMA2, "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
_FAST = "PreTrainedTokenizerFast"

LAYOUTS = {
    "gpt2": Layout("gpt2", "GPT2Tokenizer", "gpt2", _END_OF_TEXT, *_END_OF_TEXT, *_END_OF_TEXT),
    "llama": Layout(
        "llama",
        _FAST,
        "gpt2",
        _LLAMA3,
        "<|eot_id|>",
        "<|begin_of_text|>",
        True,
        ("<|end_of_text|>", "<|eot_id|>"),
        template="llama3",
    ),
    "llama2": Layout("llama", "LlamaTokenizer", "llama2", _LLAMA2, "</s>", "<s>", True),
    "mistral": Layout("mistral", "LlamaTokenizer", "llama2", _LLAMA2, "</s>", "<s>", True),
    "mixtral": Layout("mixtral", "LlamaTokenizer", "llama2", _LLAMA2, "</s>", "<s>", True),
    "qwen2": Layout("qwen2", "Qwen2Tokenizer", "qwen", _CHATML, "<|im_end|>", template="qwen2_5"),
    "qwen3": Layout("qwen3", "Qwen2Tokenizer", "qwen", _CHATML, "<|im_end|>", template="qwen3"),
    "qwen3_moe": Layout(
        "qwen3_moe", "Qwen2Tokenizer", "qwen", _CHATML, "<|im_end|>", template="qwen3"
    ),
    "gemma2": Layout(
        "gemma2",
        "GemmaTokenizer",
        "gemma",
        _GEMMA,
        "<eos>",
        "<bos>",
        True,
        ("<eos>", "<end_of_turn>"),
        plain=("<s>", "</s>"),
        template="gemma",
    ),
    "gemma3": Layout(
        "gemma3_text",
        "GemmaTokenizer",
        "gemma",
        _GEMMA,
        "<eos>",
        "<bos>",
        True,
        ("<eos>", "<end_of_turn>"),
        plain=("<s>", "</s>"),
        template="gemma3",
    ),
    "olmo2": Layout("olmo2", _FAST, "trimmed", _CHATML, "<|endoftext|>", "<|endoftext|>"),
    "phi3": Layout(
        "phi3",
        "LlamaTokenizer",
        "llama2",
        _PHI3,
        "<|endoftext|>",
        "<s>",
        eos_ids=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        template="phi3",
    ),
}


def write_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """A folder with the files of a tokenizer and a chat template; returns the tokenizer."""
    layout = LAYOUTS[kind]
    tokenizer = _build_tokenizer(layout)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": layout.tokenizer_class, "eos_token": layout.eos}
    if layout.bos:
        config["bos_token"] = layout.bos
    config["add_bos_token"] = layout.adds_bos
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "config.json", {"model_type": layout.model_type, "eos_token_id": 2})
    ids = [tokenizer.token_to_id(token) for token in layout.eos_ids or (layout.eos,)]
    _write(folder / "generation_config.json", {"eos_token_id": ids})
    (folder / "chat_template.jinja").write_text(template_of(layout))
    return tokenizer


def template_of(layout: Layout) -> str:
    return TURNS if layout.template == TURNS else _of_trl(layout.template)


def marked_template(kind: str) -> str:
    """A template of the family that marks the assistant's tokens."""
    layout = LAYOUTS[kind]
    if layout.template != TURNS:
        return _of_trl(f"{layout.template}_training")
    return (
        "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "{{ eos_token }}{% endfor %}"
    )


def _of_trl(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _build_tokenizer(layout: Layout) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    by_pieces = layout.style in ("llama2", "gemma")
    first = list(layout.special) + [f"<0x{byte:02X}>" for byte in range(256)] * by_pieces
    if layout.style == "llama2":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        trained_as: Any = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif layout.style == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        trained_as = pre_tokenizers.Metaspace(prepend_scheme="never")
    elif layout.style == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
        levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        trained_as = tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, levels])
    else:
        trained_as = tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 300,
        special_tokens=first,
        initial_alphabet=[] if by_pieces else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = trained_as
    raw.train_from_iterator([TEXT], trainer)
    model = json.loads(raw.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    if by_pieces:
        tokenizer.model = models.BPE(
            model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        parts += [decoders.Strip(" ", 1, 0)] * (layout.style == "llama2")
        tokenizer.decoder = decoders.Sequence(parts)
    else:
        tokenizer.model = models.BPE(model["vocab"], merges)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=layout.style == "trimmed")
    tokenizer.add_special_tokens(list(layout.special))
    tokenizer.add_tokens(list(layout.plain))
    if layout.adds_bos:
        assert layout.bos is not None
        around = processors.TemplateProcessing(
            single=f"{layout.bos} $A",
            pair=f"{layout.bos} $A {layout.bos} $B",
            special_tokens=[(layout.bos, tokenizer.token_to_id(layout.bos))],
        )
        processor = tokenizer.post_processor
        tokenizer.post_processor = processors.Sequence([processor, around]) if processor else around
    return tokenizer
