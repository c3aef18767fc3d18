"""A GPT decoder, from GPT-2 to Llama style; all options are independent of each other.

The file follows the forward pass: the model, its blocks, attention, RoPE and the MLP; then initial
values, and loading from a checkpoint. Shapes are in `instar.models.architecture`, norms and linear maps
in `instar.models.layers`.

Suffixes of tensor names are their dimensions: B samples, T tokens, D embed, M mlp, V vocab, H query
heads, K key and value heads, C channels of a head, S tokens of a block, N flattened leading dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instar.checkpoint.layout import check_shapes
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import check_finite, load_checkpoint
from instar.models.architecture import Architecture
from instar.models.attention import causal_attention
from instar.models.documents import Attention, PackedDocuments, computed_type
from instar.models.experts import ExpertMLP, load_balancing_loss
from instar.models.layers import (
    HeadNorm,
    Norm,
    ShortConv,
    activate,
    embedding,
    is_masked,
    make_linear,
)
from instar.models.lora import adapter_of
from instar.models.loss import each_cross_entropy, head_cross_entropy
from instar.models.shape import ArchitectureError, Parameter, passes_of


class GPT(nn.Module):
    """Pre-norm transformer decoder.

    The constructor does not initialize parameters: call `init_weights`, or load a checkpoint. A
    model made on the meta device needs `to_empty`, and then `init_weights` or `reset_buffers`.

    If the architecture has a mask, `set_step` opens it. `openings` has the factor of each index of
    the masked axis, 1 for old indices; as a buffer it may change without recompiling.
    """

    rope_cos: Tensor
    rope_sin: Tensor
    openings: Tensor

    def __init__(self, arch: Architecture, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.arch = arch
        self.gradient_checkpointing = gradient_checkpointing
        table = arch.parameters()
        adapter = adapter_of(arch.lora, "token_embedding")
        self.token_embedding = embedding(table, "token_embedding", adapter)
        if arch.positions == "learned":
            self.position_embedding = embedding(table, "position_embedding", None)
        else:
            self.register_buffer("rope_cos", torch.empty(arch.context, 1, arch.head_dim), False)
            self.register_buffer("rope_sin", torch.empty(arch.context, 1, arch.head_dim), False)
        self.passes = passes_of(arch)
        self.blocks = nn.ModuleList(_Block(arch, table, layer) for layer in range(arch.n_layer))
        self.final_norm = Norm(arch, table, "final_norm")
        if not arch.tied:
            self.head = make_linear(arch, table, "head")
        if arch.mask is not None:
            self.register_buffer("openings", torch.empty(arch.sizes()[arch.mask.axis]), False)
        self.reset_buffers()

    def forward(
        self,
        inputs_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        per_sample: bool = False,
        cache: KVCache | None = None,
        balance: bool = False,
        positions_BT: Tensor | None = None,
        sizes_J: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits or the loss.

        Args:
            inputs_BT: token ids, at most `context` of them per sample.
            targets_BT: token ids; −1 marks positions without loss.
            per_sample: return the loss of each sample, without gradients.
            cache: of the tokens before `inputs_BT`, to which these are added: first all tokens of a
                prompt, then one at a time. For inference.
            balance: of a model with experts: return also the sum of `load_balancing_loss`.
            positions_BT: of each token in its document, of which several may be in a sample: they do not see each
                other. None: a sample is one document. Not with a cache.

        Returns:
            logits (B, T, V); with targets the sum of the cross entropies in nats, a float32 scalar,
            or with `per_sample` their sums per sample (B,), float64.

        Raises:
            ValueError: there are more tokens than the context has.
        """
        begin = len(cache) if cache is not None else 0
        x_BTD, rotation = self._embed(inputs_BT, begin, positions_BT)
        documents = None
        if positions_BT is not None:
            attention = self.attention_kinds(computed_type(x_BTD))
            documents = PackedDocuments.at(positions_BT, sizes_J, attention)
        x_BTD = _dropout(x_BTD, self.arch.dropout, self.training)
        openings = self.openings if self.arch.mask is not None else None
        router_logits: list[Tensor] = []
        for number, layer in enumerate(self.passes):
            if cache is not None:
                cache.number = number
            x_BTD, logits_BTE = self._run_block(layer, x_BTD, rotation, openings, cache, documents)
            if balance:
                router_logits.append(logits_BTE)
        if cache is not None:
            cache.tokens = begin + inputs_BT.shape[1]
        x_BTD = self.final_norm(x_BTD, openings)
        weight_VD = (self.token_embedding if self.arch.tied else self.head).effective()
        if targets_BT is None:
            return F.linear(x_BTD, weight_VD)
        if per_sample:
            losses_N = each_cross_entropy(x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten())
            return losses_N.view_as(targets_BT).sum(1, dtype=torch.float64)
        loss = head_cross_entropy(x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten())
        if not balance:
            return loss
        assert self.arch.num_experts_per_tok is not None
        stacked_LBTE = torch.stack(router_logits)
        return loss, load_balancing_loss(stacked_LBTE, targets_BT, self.arch.num_experts_per_tok)

    def attention_kinds(self, dtype: torch.dtype) -> list[Attention]:
        """Return the attention of each kind of layer, with values of a type."""
        arch = self.arch
        size = dtype, arch.n_head, arch.n_kv_head, arch.head_dim
        dropout = arch.dropout if self.training else 0.0
        return [
            Attention(*size, window, dropout=dropout) for window in {*(arch.windows or (None,))}
        ]

    def _run_block(
        self,
        layer: int,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        openings: Tensor | None,
        cache: KVCache | None,
        documents: PackedDocuments | None,
    ) -> Any:
        """Return what a block does, recomputed in the backward pass if the model says so."""
        block, arguments = self.blocks[layer], (x_BTD, rotation, openings, cache, documents)
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return block(*arguments)
        keeps_random = self.arch.dropout > 0
        return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=keeps_random)

    def _embed(
        self, inputs_BT: Tensor, begin: int, positions_BT: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the stream of tokens at their positions, by default from `begin` on, and the rotation of these, if any."""
        end = begin + inputs_BT.shape[1]
        if self.arch.context < end:
            raise ValueError(f"{end} tokens do not fit into a context of {self.arch.context}")
        x_BTD = self.token_embedding(inputs_BT)
        if self.arch.embedding_multiplier != 1:
            x_BTD = x_BTD * self.arch.embedding_multiplier
        places = slice(begin, end) if positions_BT is None else positions_BT
        if self.arch.positions == "learned":
            return x_BTD + self.position_embedding.weight[places], None
        return x_BTD, (self.rope_cos[places], self.rope_sin[places])

    @torch.no_grad()
    def queries_and_keys(self, tokens_BT: Tensor) -> Iterator[tuple[Tensor, Tensor, int | None]]:
        """Yield queries (B, T, H, C), keys (B, T, K, C) and the window of each layer, of a loop those of its last pass,
        for analysis."""
        layers: dict[nn.Module, tuple[Tensor, Tensor, int | None]] = {}

        def record(attention: nn.Module, inputs: tuple[Any, ...]) -> None:
            assert isinstance(attention, _Attention)
            q_BTHC, k_BTKC, _ = attention.heads(inputs[0], inputs[1])
            layers[attention] = q_BTHC, k_BTKC, attention.window

        hooks = [
            block.get_submodule("attn").register_forward_pre_hook(record) for block in self.blocks
        ]
        try:
            self(tokens_BT)
        finally:
            for hook in hooks:
                hook.remove()
        yield from layers.values()

    def new_cache(self) -> KVCache:
        return KVCache()

    def reset_buffers(self) -> None:
        """Compute the non-persistent buffers: RoPE tables, and a closed mask."""
        if self.arch.positions == "rope" and not self.rope_cos.is_meta:
            cos, sin = rope_table(self.arch)
            self.rope_cos.copy_(cos)
            self.rope_sin.copy_(sin)
        if self.arch.mask is not None:
            self.set_step(self.arch.mask.begin)

    def set_step(self, step: int) -> None:
        """Set the mask to its value at a step of the run; do nothing without a mask."""
        mask = self.arch.mask
        if mask is not None and not self.openings.is_meta:
            self.openings.fill_(1.0)
            for start, stop in mask.new:
                self.openings[start:stop] = mask.opening(step)

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter (see `set_parameters`) and the buffers."""
        self.reset_buffers()
        set_parameters(self, self.arch.parameters(), seed)


class KVCache:
    """Keys and values (B, K, T, C) of the tokens that a model has seen, for each pass through a layer, and the inputs of
    its short convolutions (B, K − 1, D) that the next token needs."""

    def __init__(self) -> None:
        self.tokens = 0
        self.number = 0
        """of the present pass"""
        self._inputs: dict[int, Tensor] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Return the number of tokens T, also of a model without layers."""
        return self.tokens

    def extend(self, k_BKTC: Tensor, v_BKTC: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Add the keys and values of further tokens to those of the present pass; return those of all.

        Of a layer with a window it holds no more than the next token attends to.
        """
        if (past := self._layers.get(self.number)) is not None:
            k_BKTC, v_BKTC = torch.cat((past[0], k_BKTC), 2), torch.cat((past[1], v_BKTC), 2)
        begin = 0 if window is None else max(0, k_BKTC.shape[2] + 1 - window)
        self._layers[self.number] = k_BKTC[:, :, begin:], v_BKTC[:, :, begin:]
        return k_BKTC, v_BKTC

    def convolve(self, conv: ShortConv, x_BTD: Tensor) -> Tensor:
        """Return what a convolution makes of further tokens (B, T, D)."""
        before_BSD = self._inputs.get(self.number)
        all_BSD = x_BTD if before_BSD is None else torch.cat((before_BSD, x_BTD), 1)
        self._inputs[self.number] = all_BSD[:, -conv.lags :]
        y_BSD: Tensor = conv(all_BSD)
        return y_BSD[:, -x_BTD.shape[1] :]


class _Block(nn.Module):
    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], layer: int) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        self.dropout = arch.dropout
        self.layer = layer
        self.is_masked = arch.mask is not None and arch.mask.has("layers", layer)
        self.attn_norm = Norm(arch, table, f"{name}.attn_norm")
        self.attn = _Attention(arch, table, layer)
        self.mlp_norm = Norm(arch, table, f"{name}.mlp_norm")
        self.mlp_conv = None if arch.conv_size is None else ShortConv(table, f"{name}.mlp_conv")
        mlp = _MLP if arch.num_experts is None else ExpertMLP
        self.mlp = mlp(arch, table, f"{name}.mlp")

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        openings: Tensor | None,
        cache: KVCache | None = None,
        documents: PackedDocuments | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream (B, T, D) and, with experts, the router's logits (B, T, E)."""
        attention = self.attn(self.attn_norm(x, openings), rotation, openings, cache, documents)
        if self.is_masked and openings is not None:
            attention = attention * openings[self.layer]
        x = x + _dropout(attention, self.dropout, self.training)
        hidden = self.mlp_norm(x, openings)
        if self.mlp_conv is not None:
            conv, numbers = self.mlp_conv, None if documents is None else documents.numbers
            hidden = conv(hidden, numbers) if cache is None else cache.convolve(conv, hidden)
        update, logits = self.mlp(hidden, openings)
        if self.is_masked and openings is not None:
            update = update * openings[self.layer]
        return x + _dropout(update, self.dropout, self.training), logits


class _Attention(nn.Module):
    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], layer: int) -> None:
        super().__init__()
        name = f"blocks.{layer}.attn"
        self.layer = layer
        self.window = arch.windows[layer] if arch.windows else None
        self.head_dim, self.dropout = arch.head_dim, arch.dropout
        self.query = make_linear(arch, table, f"{name}.query")
        self.key = make_linear(arch, table, f"{name}.key")
        self.value = make_linear(arch, table, f"{name}.value")
        self.q_norm = HeadNorm(arch) if arch.qk_norm else None
        self.k_norm = HeadNorm(arch) if arch.qk_norm else None
        self.output = make_linear(arch, table, f"{name}.output")
        self.masked = is_masked(arch, "heads")

    def heads(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, H, C), keys and values (B, T, K, C), normalized and rotated."""
        q_BTHC = self.query(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKC = self.key(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKC = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        if rotation is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, rotation), rotate(k_BTKC, rotation)
        return q_BTHC, k_BTKC, v_BTKC

    def forward(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        openings_H: Tensor | None,
        cache: KVCache | None,
        documents: PackedDocuments | None,
    ) -> Tensor:
        q_BTHC, k_BTKC, v_BTKC = self.heads(x_BTD, rotation)
        q_BHTC = q_BTHC.to(v_BTKC.dtype).transpose(1, 2)
        k_BKTC = k_BTKC.to(v_BTKC.dtype).transpose(1, 2)
        v_BKTC = v_BTKC.transpose(1, 2)
        if cache is not None:
            k_BKTC, v_BKTC = cache.extend(k_BKTC, v_BKTC, self.window)
        dropout = self.dropout if self.training else 0.0
        y_BHTC = causal_attention(q_BHTC, k_BKTC, v_BKTC, dropout, self.window, documents)
        if self.masked and openings_H is not None:
            y_BHTC = y_BHTC * openings_H[:, None, None].to(y_BHTC.dtype)
        out: Tensor = self.output(y_BHTC.transpose(1, 2).flatten(2))
        return out


def rope_table(arch: Architecture) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines (context, 1, head_dim), float64, of rotary positions for
    `rotate` (arXiv 2104.09864); channel i is paired with channel i + head_dim / 2."""
    half = torch.arange(0, arch.head_dim, 2, dtype=torch.float64) / arch.head_dim
    angle = torch.arange(arch.context, dtype=torch.float64)[:, None] * arch.rope_base**-half
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x_BTHC: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x[i], x[i + C/2]) by the angle of its position; at least float32."""
    cos_T1C, sin_T1C = rotation
    halves = x_BTHC.roll(x_BTHC.shape[-1] // 2, -1)
    return torch.addcmul(x_BTHC * cos_T1C, halves, sin_T1C)


class _MLP(nn.Module):
    """down(activate(up x)), see `activate`."""

    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.activation = arch.activation
        self.masked = is_masked(arch, "mlp")
        self.gate = (
            make_linear(arch, table, f"{name}.gate") if arch.activation == "swiglu" else None
        )
        self.up = make_linear(arch, table, f"{name}.up")
        self.down = make_linear(arch, table, f"{name}.down")

    def forward(self, x_BTD: Tensor, openings_M: Tensor | None) -> tuple[Tensor, None]:
        h_BTM = self.up(x_BTD)
        h_BTM = activate(self.activation, h_BTM, None if self.gate is None else self.gate(x_BTD))
        if self.masked and openings_M is not None:
            h_BTM = h_BTM * openings_M.to(h_BTM.dtype)
        return self.down(h_BTM), None


def _dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    return F.dropout(x, probability) if training and probability else x


class InitialValues(Mapping[str, Tensor]):
    """Initial values of the parameters of a table, float32 on the CPU, each made when it is asked for.

    They depend on (seed, name, table) only, not on the device, the order of construction or other
    parameters. Norm weights are 1, biases and adapters' B are 0, everything else is normal with the
    standard deviation of the table.
    """

    def __init__(self, table: Mapping[str, Parameter], seed: int) -> None:
        self._table, self._seed = table, seed

    def __getitem__(self, name: str) -> Tensor:
        entry = self._table[name]
        if not entry.std:
            gain = entry.kind == "norm" and name.endswith(".weight")
            return torch.full(entry.shape, 1.0 if gain else 0.0, dtype=torch.float32)
        values = torch.empty(entry.shape, dtype=torch.float32, device="cpu")
        return values.normal_(0.0, entry.std, generator=named_generator(self._seed, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


@torch.no_grad()
def set_parameters(model: nn.Module, table: Mapping[str, Parameter], seed: int) -> None:
    """Initialize every parameter of the table, see `InitialValues`."""
    for name, values in InitialValues(table, seed).items():
        model.get_parameter(name).copy_(values)


def named_generator(*key: int | str) -> torch.Generator:
    """Return a CPU generator seeded by the key, such as (seed, parameter name)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def load_gpt(path: Path, device: str = "cpu") -> GPT:
    """Return the model of a checkpoint in evaluation mode; its moving average if there is one.

    Raises:
        CheckpointError: the checkpoint is damaged, or not one of a GPT that this version supports.
    """
    checkpoint = load_checkpoint(path)
    try:
        architecture = Architecture.from_dict(checkpoint.manifest.architecture)
    except ArchitectureError as error:
        raise CheckpointError(f"{path}: not a GPT that this Instar knows:\n{error}") from error
    component = checkpoint.weights
    # a manifest may claim any size: allocate nothing before the header of the file agrees
    shapes = {name: entry.shape for name, entry in architecture.parameters().items()}
    check_shapes(path, checkpoint.layout(component).entries, shapes)
    with torch.device("meta"):
        model = GPT(architecture)
    model = model.to_empty(device=device)
    model.reset_buffers()
    try:
        model.load_state_dict(checkpoint.tensors(component, device))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: the tensors do not fit the architecture: {error}"
        ) from error
    check_finite(path, model.state_dict())
    model.set_step(checkpoint.manifest.step)
    return model.eval()
