"""The architecture of a GPT: its shape, and its parameter table with named axes.

Growing an architecture changes fields of `Architecture`; `models/shape.py` defines axes. Query head
h reads key and value head ``h // (n_head / n_kv_head)``.

The residual stream is the axis ``embed``. Embeddings, ``attn.output`` and ``mlp.down`` (with their
biases) write it; queries, keys, values, ``mlp.up``, ``mlp.gate`` and the head read it, each through
a norm. A tied head is the token table and has no entry of its own. The layer is part of the name,
``blocks.<layer>.…``; see `layer_of`.

The factors of an adapter (see `lora`) have the kind of their weight and share an axis,
``<weight>.rank``: for a linear map, ``lora_a`` writes what ``lora_b`` reads; for the token table,
``lora_b`` has a row for each token and ``lora_a`` writes the stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from pydantic import ValidationError

from instar.config import sections
from instar.config.errors import ConfigProblem
from instar.config.language import LanguageConfig, ModelConfig
from instar.config.suggestions import wrong_value
from instar.models import lora as adapters
from instar.models.lora import Lora
from instar.models.shape import (
    ArchitectureError,
    Kind,
    Loop,
    Mask,
    Parameter,
    axis_size,
    check_fields,
    problem,
    size_problems,
)

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "relu2", "swiglu"]
Positions = Literal["learned", "rope"]

AXES = {
    "embed": "n_embd",
    "mlp": "n_mlp",
    "heads": "n_head",
    "kv_heads": "n_kv_head",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "context": "context",
    "layers": "n_layer",
    "experts": "num_experts",
}
"""Field of `Architecture` that holds the size of each simple axis."""


MOST = {
    "n_layer": sections.MOST_LAYERS,
    "n_head": sections.MOST_HEADS,
    "n_kv_head": sections.MOST_HEADS,
    "head_dim": sections.MOST_WIDTH,
    "n_embd": sections.MOST_WIDTH,
    "n_mlp": sections.MOST_MLP,
    "context": sections.MOST_CONTEXT,
    "vocab_size": sections.MOST_VOCABULARY,
    "num_experts": sections.MOST_EXPERTS,
}
"""Limits that protect readers of untrusted files."""

EXPERTS_PER_TOKEN = 2
"""Default number of experts that a token uses."""
ROUTER_STD = 0.02
"""Initial standard deviation of a router. Not 0: the largest of equal logits is the same expert for every token."""
CONV_STD = 0.5
"""Initial standard deviation of a short convolution. From zeros, it learns too late for short runs."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a GPT.

    `head_dim` and `n_embd` are independent: growth may change either. RoPE rotates pair i by
    ``rope_base ** (-2 i / head_dim)`` per position, so a head_dim grown by a factor k keeps its old
    frequencies with ``rope_base ** k``. `qk_norm_eps` is separate from `norm_eps` because widening
    the stream scales only the latter.

    Raises:
        ArchitectureError: no model can have this shape.
    """

    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    n_embd: int
    n_mlp: int
    context: int
    vocab_size: int
    norm: Norm
    activation: Activation
    positions: Positions
    bias: bool
    tied: bool
    qk_norm: bool
    rope_base: float
    norm_eps: float
    qk_norm_eps: float
    dropout: float
    lora: tuple[Lora, ...] = ()
    """adapters; at most one entry matches a weight"""
    mask: Mask | None = None
    """mask over new structure"""
    num_experts: int | None = None
    """MLPs of each block; None: one, without a router"""
    num_experts_per_tok: int | None = None
    """MLPs that each token uses; None without experts"""
    router_aux_loss_coef: float | None = None
    """weight of the load-balancing loss in training; None without experts"""
    conv_size: int | None = None
    """tokens that the short convolution before each MLP sees, the last one included; None: there is none"""
    embedding_multiplier: float = 1.0
    """factor of the token embeddings, but not of a tied head"""
    loop: Loop | None = None
    """blocks that run several times; None: each runs once"""
    windows: tuple[int | None, ...] = ()
    """of each layer, the tokens that a token attends to, itself included; None: all. Empty: no layer has a window"""

    def __post_init__(self) -> None:
        sizes = [AXES[axis] for axis in self.sizes()]
        problems = size_problems(
            self, sizes, {name: MOST[name] for name in sizes if name in MOST}, "n_layer"
        )
        problems += _expert_problems(self)
        problems += _option_problems(self.conv_size, self.embedding_multiplier)
        choices = {"norm": Norm, "activation": Activation, "positions": Positions}
        for field, choice in choices.items():
            if getattr(self, field) not in get_args(choice):
                choice_list = ", ".join(get_args(choice))
                problems.append(
                    problem(field, f"must be one of {choice_list}, not {getattr(self, field)!r}")
                )
        if not problems and self.n_head % self.n_kv_head:
            divisors = [str(d) for d in range(1, self.n_head + 1) if self.n_head % d == 0]
            problems.append(
                problem(
                    "n_kv_head",
                    f"{self.n_head} query heads cannot share {self.n_kv_head} key and value heads evenly",
                    f"choose one of {', '.join(divisors)}",
                )
            )
        if not problems and self.positions == "rope" and self.head_dim % 2:
            problems.append(
                problem(
                    "n_head",
                    f"RoPE rotates pairs of channels, and a head has {self.head_dim}, an odd number",
                    "make n_embd / n_head even, or use positions: learned",
                )
            )
        if not problems:
            problems += _window_problems(self)
        if self.lora and not problems:
            weights = replace(self, lora=()).adaptable()
            problems = [
                problem(f"lora[{number}]", message, hint)
                for number, message, hint in adapters.problems(self.lora, weights)
            ]
        if self.mask and not problems:
            problems = [
                problem("mask", message, hint) for message, hint in self.mask.problems(self.sizes())
            ]
        if self.loop and not problems and (message := self.loop.problem(self.n_layer)):
            problems = [problem("loop", message)]
        if problems:
            raise ArchitectureError(*problems)

    def sizes(self) -> dict[str, int]:
        """Size of each simple axis."""
        sizes = {axis: getattr(self, field) for axis, field in AXES.items()}
        return {axis: size for axis, size in sizes.items() if axis != "experts" or size is not None}

    @property
    def streams(self) -> tuple[str, ...]:
        """The axes that blocks add to."""
        return ("embed",)

    def resized(self, **sizes: int) -> Self:
        """Return a copy with other sizes of simple axes.

        Raises:
            ArchitectureError: no model can have these sizes.
            KeyError: an axis does not exist.
        """
        changes: dict[str, Any] = {AXES[axis]: size for axis, size in sizes.items()}
        return replace(self, **changes)

    @property
    def final_norm(self) -> str:
        return "final_norm"

    @property
    def scales_by_head_dim(self) -> bool:
        return True

    def refusals(self) -> dict[str, str]:
        return {}

    def changed(self, *, norm_eps: float | None = None, rope_base: float | None = None) -> Self:
        """Return a copy with other values of what growth adjusts beside sizes."""
        return replace(
            self,
            norm_eps=self.norm_eps if norm_eps is None else norm_eps,
            rope_base=self.rope_base if rope_base is None else rope_base,
        )

    def deeper(self, sources: Sequence[int | None]) -> Self:
        """Return a copy in which windows move with their blocks; a drawn block has that of the one below."""
        layers: list[int] = []
        for source in sources:
            layers.append(source if source is not None else layers[-1] if layers else 0)
        windows = tuple(self.windows[layer] for layer in layers) if self.windows else ()
        return replace(self, n_layer=len(sources), windows=windows)

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter by name, in the order of the forward pass."""
        return _Table(self).build()

    def adaptable(self) -> dict[str, tuple[int, ...]]:
        """Return shapes of the weights that may have an adapter, by name without ``.weight``."""
        return {
            name.removesuffix(".weight"): entry.shape
            for name, entry in self.parameters().items()
            if name.endswith(".weight")
            and (entry.reads or name.startswith("token_"))
            and not {"experts"} & {*entry.axes}
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, without those that are None or empty."""
        values = asdict(self)
        values |= {name: list(values[name]) for name in ("lora", "windows")}
        if self.mask is not None:
            values["mask"]["new"] = [list(part) for part in self.mask.new]
        return {name: value for name, value in values.items() if value not in ([], None)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. Raises ArchitectureError for missing or unknown fields."""
        optional = [field.name for field in fields(cls) if field.default is not MISSING]
        check_fields(cls, values, optional)
        problems = []
        read = dict(values)
        readers: Mapping[str, Callable[[Any], Any]] = {
            "lora": adapters.from_json,
            "mask": Mask.from_json,
            "windows": tuple,
            "loop": lambda values: Loop(**values),
        }
        for name, from_json in readers.items():
            try:
                if read.get(name) is not None:
                    read[name] = from_json(read[name])
            except (TypeError, ValueError, KeyError) as error:
                problems.append(problem(name, f"cannot be read: {error}"))
        if problems:
            raise ArchitectureError(*problems)
        return cls(**read)


def resolve_architecture(model: ModelConfig, vocab_size: int) -> Architecture:
    """Return the architecture that a config describes, with missing values derived.

    Args:
        vocab_size: the tokenizer's; the config may ask for more rows, not for fewer.

    Raises:
        ArchitectureError: lists every problem.
    """
    problems: list[ConfigProblem] = []
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        problems.append(
            problem(
                "vocab_size",
                f"{model.vocab_size} rows are too few for a tokenizer of {vocab_size} tokens",
                "leave it out to take the tokenizer's size",
            )
        )
    if model.head_dim is None and model.n_embd % model.n_head:
        problems.append(
            problem(
                "n_embd",
                f"a width of {model.n_embd} cannot be divided into {model.n_head} heads",
                f"choose a multiple of {model.n_head}, such as "
                f"{math.ceil(model.n_embd / model.n_head) * model.n_head}",
            )
        )
    n_mlp = model.n_mlp
    if n_mlp is None and model.activation == "swiglu":
        n_mlp = math.ceil(8 * model.n_embd / (3 * 32)) * 32
    values = model.model_dump(exclude={sections.FROM}) | {
        "n_kv_head": model.n_kv_head or model.n_head,
        "head_dim": model.head_dim or max(1, model.n_embd // model.n_head),
        "n_mlp": n_mlp or 4 * model.n_embd,
        "vocab_size": model.vocab_size or vocab_size,
        "qk_norm_eps": model.qk_norm_eps or model.norm_eps,
    }
    if model.num_experts is None:
        values |= {"num_experts_per_tok": None, "router_aux_loss_coef": None}
    else:
        per_token = model.num_experts_per_tok or min(EXPERTS_PER_TOKEN, model.num_experts)
        values |= {"num_experts_per_tok": per_token}
    try:
        architecture = Architecture.from_dict(values)
    except ArchitectureError as error:
        raise ArchitectureError(*problems, *error.problems) from None
    if problems:
        raise ArchitectureError(*problems)
    return architecture


def section_of(arch: Architecture) -> ModelConfig:
    """Return the config section from which `resolve_architecture` makes an architecture without adapters and masks.

    Raises:
        ArchitectureError: no run could have this shape, or begin with it.
    """
    if arch.windows:
        raise ArchitectureError(
            problem(
                "windows",
                "a run cannot begin with windows: only the operation set_window sets them",
                "take them away by set_window: null, and schedule set_window in the new run",
            )
        )
    values = {field: v for field, v in arch.to_dict().items() if field in ModelConfig.model_fields}
    if arch.head_dim * arch.n_head == arch.n_embd:
        del values["head_dim"]
    if not arch.qk_norm or arch.qk_norm_eps == arch.norm_eps:
        del values["qk_norm_eps"]
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            path = ("model", *detail["loc"])
            message, hint = wrong_value(LanguageConfig, path, detail["input"], detail["type"], "")
            field = str(detail["loc"][0])
            problems.append(problem(field, message.removeprefix(f"model.{field} "), hint))
        raise ArchitectureError(*problems) from None


class _Table:
    """Builds the parameter table with initial standard deviations.

    They are GPT-2's: 0.02, divided by √(2 n_layer) for matrices that write the residual stream.
    Short AdamW runs learned faster from it than from fan-in scaling, also at width 128. Adapters
    start as in loralib: B is 0, A has a variance of 1 / (3 · inputs) (Kaiming initialization,
    a = √5). Short convolutions start with `CONV_STD`.
    """

    def __init__(self, arch: Architecture) -> None:
        self.arch, self.sizes = arch, arch.sizes()
        self.entries: dict[str, Parameter] = {}
        self._into_stream = 0.02 / math.sqrt(2 * max(1, arch.n_layer))

    def build(self) -> dict[str, Parameter]:
        """Return the parameters in the order of the forward pass."""
        arch = self.arch
        self._weight("token_embedding", "embedding", "vocab", "embed", has_bias=False)
        if arch.positions == "learned":
            self._add("position_embedding.weight", "embedding", "context", "embed", std=0.02)
        for layer in range(arch.n_layer):
            self._attention(f"blocks.{layer}")
            self._mlp(f"blocks.{layer}")
        self._norm("final_norm")
        if not arch.tied:
            self._weight("head", "head", "vocab", "embed", has_bias=False)
        return self.entries

    def _attention(self, block: str) -> None:
        self._norm(f"{block}.attn_norm")
        self._linear(f"{block}.attn.query", "heads*head_dim", "embed")
        self._linear(f"{block}.attn.key", "kv_heads*head_dim", "embed")
        self._linear(f"{block}.attn.value", "kv_heads*head_dim", "embed")
        if self.arch.qk_norm:
            self._add(f"{block}.attn.q_norm.weight", "norm", "head_dim")
            self._add(f"{block}.attn.k_norm.weight", "norm", "head_dim")
        self._linear(f"{block}.attn.output", "embed", "heads*head_dim")

    def _mlp(self, block: str) -> None:
        arch = self.arch
        self._norm(f"{block}.mlp_norm")
        if arch.conv_size is not None:
            self.sizes.update(one=1, lags=arch.conv_size - 1)
            self._add(f"{block}.mlp_conv.weight", "channel", "embed", "one", "lags", std=CONV_STD)
        linear = self._linear
        if arch.num_experts is not None:
            self._add(f"{block}.mlp.router.weight", "matrix", "experts", "embed", std=ROUTER_STD)
            linear = self._experts
        if arch.activation == "swiglu":
            linear(f"{block}.mlp.gate", "mlp", "embed")
        linear(f"{block}.mlp.up", "mlp", "embed")
        linear(f"{block}.mlp.down", "embed", "mlp")

    def _add(self, name: str, kind: Kind, *axes: str, std: float = 0.0) -> None:
        part = name.rpartition(".attn.")[2].partition(".")[0]
        shape = tuple(axis_size(self.sizes, axis) for axis in axes)
        parts = (part,) if part in ("query", "key", "value") else ()
        self.entries[name] = Parameter(axes, shape, kind, std, parts)

    def _weight(self, name: str, kind: Kind, output: str, source: str, *, has_bias: bool) -> None:
        writes_stream = kind == "matrix" and output == "embed"
        std = self._into_stream if writes_stream else 0.02
        self._add(f"{name}.weight", kind, output, source, std=std)
        if has_bias:
            self._add(f"{name}.bias", "bias", output)
        if adapter := adapters.adapter_of(self.arch.lora, name):
            rank = f"{name}.rank"
            self.sizes[rank] = adapter.rank
            std = 1 / math.sqrt(3 * axis_size(self.sizes, source))
            self._add(f"{name}.lora_a", kind, rank, source, std=std)
            self._add(f"{name}.lora_b", kind, output, rank)

    def _linear(self, name: str, output: str, source: str) -> None:
        self._weight(name, "matrix", output, source, has_bias=self.arch.bias)

    def _experts(self, name: str, output: str, source: str) -> None:
        std = self._into_stream if output == "embed" else 0.02
        self._add(f"{name}.weight", "experts", "experts", output, source, std=std)
        if self.arch.bias:
            self._add(f"{name}.bias", "bias", "experts", output)

    def _norm(self, name: str) -> None:
        self._add(f"{name}.weight", "norm", "embed")
        if self.arch.bias and self.arch.norm == "layernorm":
            self._add(f"{name}.bias", "norm", "embed")


def _expert_problems(arch: Architecture) -> Iterator[ConfigProblem]:
    """Yield the problems of the fields of experts."""
    number, per_token, coefficient = (
        arch.num_experts,
        arch.num_experts_per_tok,
        arch.router_aux_loss_coef,
    )
    if number is None:
        expert_fields = {"num_experts_per_tok": per_token, "router_aux_loss_coef": coefficient}
        for field, value in expert_fields.items():
            if value is not None:
                yield problem(field, "has no effect without num_experts", "set model.num_experts")
        return
    if type(per_token) is not int or type(number) is not int or not 0 < per_token <= number:
        yield problem(
            "num_experts_per_tok",
            f"must be a whole number from 1 to {number} experts, not {per_token!r}",
        )
    if type(coefficient) not in (int, float) or not 0 <= coefficient < math.inf:  # type: ignore[operator]
        yield problem("router_aux_loss_coef", f"must be a number from 0 on, not {coefficient!r}")


def _option_problems(size: object, factor: object) -> Iterator[ConfigProblem]:
    """Yield the problems of the size of short convolutions and of the factor of token embeddings."""
    if size is not None and not (type(size) is int and 2 <= size <= sections.MOST_CONV):
        yield problem(
            "conv_size", f"must be a whole number from 2 to {sections.MOST_CONV}, not {size!r}"
        )

    if type(factor) not in (int, float) or not 0 < factor <= sections.LARGEST:  # type: ignore[operator]
        yield problem(
            "embedding_multiplier",
            f"must be a number above 0, at most {sections.LARGEST:,}, not {factor!r}",
        )


def _window_problems(arch: Architecture) -> Iterator[ConfigProblem]:
    """Yield the problems of the windows of layers."""
    if arch.windows and len(arch.windows) != arch.n_layer:
        yield problem("windows", f"has {len(arch.windows)} entries for {arch.n_layer} layers")
    elif arch.windows and all(window is None for window in arch.windows):
        yield problem("windows", "names no window", "leave it out")
    for layer, window in enumerate(arch.windows):
        if window is not None and not (type(window) is int and 0 < window < arch.context):
            yield problem(
                "windows",
                f"that of layer {layer} must be a whole number from 1 to less than the context of "
                f"{arch.context:,}, not {window!r}",
                "null is no window: it sees all tokens",
            )
