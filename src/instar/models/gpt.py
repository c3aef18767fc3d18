"""A GPT from GPT-2 to Llama style, each switch free of the others; shapes from `architecture`.

Letters in names of tensors: B samples, T tokens, D embed, M mlp, V vocab, H query heads,
K key and value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instar.models.adapted import Linear, Table
from instar.models.architecture import Architecture
from instar.models.attention import causal_attention
from instar.models.initial import set_parameters
from instar.models.lora import Lora, adapter_of
from instar.models.loss import head_cross_entropy
from instar.models.mask import MaskedAxis
from instar.models.norm import masked_norm, rms_norm
from instar.models.shape import Parameter


class GPT(nn.Module):
    """Pre-norm transformer decoder.

    Values are not set here: `init_weights` draws them, a checkpoint loads them. On the meta
    device it is all shape and no memory; after `to_empty`, `init_weights` or `reset_buffers`
    makes it whole.

    Where the architecture has a mask, `set_step` opens it; `openings` is what each index of the
    masked axis is multiplied by, 1 for what is old. A buffer, so that compiled graphs hold.
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
        self.token_embedding = _table(table, "token_embedding", adapter)
        if arch.positions == "learned":
            self.position_embedding = _table(table, "position_embedding", None)
        else:
            self.register_buffer("rope_cos", torch.empty(arch.context, 1, arch.head_dim), False)
            self.register_buffer("rope_sin", torch.empty(arch.context, 1, arch.head_dim), False)
        self.blocks = nn.ModuleList(_Block(arch, table, layer) for layer in range(arch.n_layer))
        self.final_norm = _Norm(arch, table, "final_norm")
        if not arch.tied:
            self.head = _linear(arch, table, "head")
        if arch.mask is not None:
            self.register_buffer("openings", torch.empty(arch.sizes()[arch.mask.axis]), False)
        self.reset_buffers()

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with targets the sum, in nats, of the cross entropies where they are
        not −1, as a float32 scalar. Raises ValueError for more tokens than the context."""
        T = inputs_BT.shape[1]
        if self.arch.context < T:
            raise ValueError(f"{T} tokens do not fit into a context of {self.arch.context}")
        x_BTD = self.token_embedding(inputs_BT)
        rotation = None
        if self.arch.positions == "learned":
            x_BTD = x_BTD + self.position_embedding.weight[:T]
        else:
            rotation = (self.rope_cos[:T], self.rope_sin[:T])
        x_BTD = _dropout(x_BTD, self.arch.dropout, self.training)
        openings = self.openings if self.arch.mask is not None else None
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_BTD = checkpoint(
                    block,
                    x_BTD,
                    rotation,
                    openings,
                    use_reentrant=False,
                    preserve_rng_state=self.arch.dropout > 0,
                )
            else:
                x_BTD = block(x_BTD, rotation, openings)
        x_BTD = self.final_norm(x_BTD, openings)
        weight_VD = (self.token_embedding if self.arch.tied else self.head).effective()
        if targets_BT is None:
            return F.linear(x_BTD, weight_VD)
        return head_cross_entropy(x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten())

    def reset_buffers(self) -> None:
        """Computes what follows from the architecture alone: RoPE's cosines and sines, a mask that
        is closed."""
        if self.arch.positions == "rope" and not self.rope_cos.is_meta:
            cos, sin = rope_table(self.arch)
            self.rope_cos.copy_(cos)
            self.rope_sin.copy_(sin)
        if self.arch.mask is not None:
            self.set_step(self.arch.mask.begin)

    def set_step(self, step: int) -> None:
        """Opens a mask as far as it is after so many steps of the run; without one does nothing."""
        mask = self.arch.mask
        if mask is not None and not self.openings.is_meta:
            self.openings.fill_(1.0)
            for start, stop in mask.new:
                self.openings[start:stop] = mask.opening(step)

    def init_weights(self, seed: int) -> None:
        """Sets every parameter (see `set_parameters`), and the buffers."""
        self.reset_buffers()
        set_parameters(self, self.arch.parameters(), seed)


def rope_table(arch: Architecture) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (context, 1, head_dim), in float64, of rotary positions
    (arXiv 2104.09864) for `rotate`: channel i is paired with channel i + head_dim / 2."""
    half = torch.arange(0, arch.head_dim, 2, dtype=torch.float64) / arch.head_dim
    angle = torch.arange(arch.context, dtype=torch.float64)[:, None] * arch.rope_base**-half
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x_BTHC: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (x[i], x[i + C/2]) by its position's angle; float32 at least."""
    cos_T1C, sin_T1C = rotation
    swapped = x_BTHC.roll(x_BTHC.shape[-1] // 2, -1)
    return torch.addcmul(x_BTHC * cos_T1C, swapped, sin_T1C)


class _Block(nn.Module):
    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], layer: int) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        self.dropout = arch.dropout
        self.layer = layer
        self.entering = arch.mask is not None and arch.mask.has("layers", layer)
        self.attn_norm = _Norm(arch, table, f"{name}.attn_norm")
        self.attn = _Attention(arch, table, f"{name}.attn")
        self.mlp_norm = _Norm(arch, table, f"{name}.mlp_norm")
        self.mlp = _MLP(arch, table, f"{name}.mlp")

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, openings: Tensor | None
    ) -> Tensor:
        attended = self.attn(self.attn_norm(x, openings), rotation, openings)
        if self.entering and openings is not None:
            attended = attended * openings[self.layer]
        x = x + _dropout(attended, self.dropout, self.training)
        made = self.mlp(self.mlp_norm(x, openings), openings)
        if self.entering and openings is not None:
            made = made * openings[self.layer]
        return x + _dropout(made, self.dropout, self.training)


class _Attention(nn.Module):
    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.head_dim, self.dropout = arch.head_dim, arch.dropout
        self.query = _linear(arch, table, f"{name}.query")
        self.key = _linear(arch, table, f"{name}.key")
        self.value = _linear(arch, table, f"{name}.value")
        self.q_norm = _HeadNorm(arch) if arch.qk_norm else None
        self.k_norm = _HeadNorm(arch) if arch.qk_norm else None
        self.output = _linear(arch, table, f"{name}.output")
        self.masked = _masks(arch, "heads")

    def heads(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H, C), keys and values (B, T, K, C), as attention takes them."""
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
    ) -> Tensor:
        q_BTHC, k_BTKC, v_BTKC = self.heads(x_BTD, rotation)
        y_BHTC = causal_attention(
            q_BTHC.to(v_BTKC.dtype).transpose(1, 2),
            k_BTKC.to(v_BTKC.dtype).transpose(1, 2),
            v_BTKC.transpose(1, 2),
            self.dropout if self.training else 0.0,
        )
        if self.masked and openings_H is not None:
            y_BHTC = y_BHTC * openings_H[:, None, None].to(y_BHTC.dtype)
        out: Tensor = self.output(y_BHTC.transpose(1, 2).flatten(2))
        return out


class _MLP(nn.Module):
    """down(gelu(up x)), down(relu(up x)²) (arXiv 2109.08668) or down(silu(gate x) · up x)
    (arXiv 2002.05202)."""

    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.activation = arch.activation
        self.masked = _masks(arch, "mlp")
        if arch.activation == "swiglu":
            self.gate = _linear(arch, table, f"{name}.gate")
        self.up = _linear(arch, table, f"{name}.up")
        self.down = _linear(arch, table, f"{name}.down")

    def forward(self, x_BTD: Tensor, openings_M: Tensor | None) -> Tensor:
        h_BTM = self.up(x_BTD)
        if self.activation == "swiglu":
            h_BTM = F.silu(self.gate(x_BTD)) * h_BTM
        elif self.activation == "relu2":
            h_BTM = F.relu(h_BTM)
            h_BTM = h_BTM * h_BTM  # the derivative of square() is three times as slow on a CPU
        else:
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            h_BTM = F.gelu(h_BTM, approximate=approximate)
        if self.masked and openings_M is not None:
            h_BTM = h_BTM * openings_M.to(h_BTM.dtype)
        out: Tensor = self.down(h_BTM)
        return out


class _Norm(nn.Module):
    """LayerNorm, with or without shift, or RMSNorm, over the stream."""

    def __init__(self, arch: Architecture, table: Mapping[str, Parameter], name: str) -> None:
        super().__init__()
        self.eps, self.rms = arch.norm_eps, arch.norm == "rmsnorm"
        self.masked = _masks(arch, "embed")
        self.weight = nn.Parameter(torch.empty(table[f"{name}.weight"].shape))
        shift = table.get(f"{name}.bias")
        self.bias = nn.Parameter(torch.empty(shift.shape)) if shift else None

    def forward(self, x: Tensor, openings_D: Tensor | None) -> Tensor:
        kind = x.device.type
        if self.masked and openings_D is not None:
            x = masked_norm(x, openings_D, self.weight, self.bias, self.eps, centred=not self.rms)
        elif self.rms:
            x = rms_norm(x, self.weight, self.eps)
        else:
            x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        # autocast would make and keep a copy for each of the linears that read this
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _HeadNorm(nn.Module):
    """RMSNorm of each head's queries or keys (arXiv 2302.05442, section 2.1)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.eps = arch.qk_norm_eps
        self.weight = nn.Parameter(torch.empty(arch.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def _table(table: Mapping[str, Parameter], name: str, adapter: Lora | None) -> Table:
    rows, width = table[f"{name}.weight"].shape
    made = Table(rows, width)
    made.adapt(table, name, adapter)
    return made


def _linear(arch: Architecture, table: Mapping[str, Parameter], name: str) -> Linear:
    outputs, inputs = table[f"{name}.weight"].shape
    made = Linear(inputs, outputs, bias=f"{name}.bias" in table)
    made.adapt(table, name, adapter_of(arch.lora, name))
    return made


def _masks(arch: Architecture, axis: MaskedAxis) -> bool:
    return arch.mask is not None and arch.mask.axis == axis


def _dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    return F.dropout(x, probability) if training and probability else x
