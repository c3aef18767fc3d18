"""Causal language models of transformers, which train, generate and are saved as a GPT is: made from a shape, read from
a checkpoint, or loaded by transformers itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instar.checkpoint.layout import check_shapes
from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.checkpoint.store import Checkpoint, check_finite, load_checkpoint
from instar.models.documents import Attention
from instar.models.gpt import GPT, load_gpt
from instar.models.hf.documents import attention_kinds, of_documents
from instar.models.hf.families import BUILT_IN
from instar.models.hf.pretrained import LoraShape, PretrainedShape
from instar.models.layers import Linear
from instar.models.lora import adapter_of
from instar.models.loss import IGNORED, at_least_float32, each_cross_entropy, head_cross_entropy
from instar.models.module import parameters_on_meta
from instar.models.shape import ArchitectureError


class PretrainedModel(nn.Module):
    """A model of transformers under the names of its shape, called as a `GPT` is.

    Parameters are float32. Nothing but the shape's config decides which class is built. On the meta device only
    parameters have no memory: `reset_buffers` gives buffers their first values again.
    """

    def __init__(
        self, shape: LoraShape, *, gradient_checkpointing: bool = False, seed: int | None = None
    ) -> None:
        """`seed`: of initial values as transformers draws them; None: parameters may have any values."""
        super().__init__()
        self.arch = shape
        self.inner = _build_model(shape, seed)
        _adapt(self.inner, shape)
        self._first_buffers = (
            dict(self.inner.named_buffers()) if torch.get_default_device().type == "meta" else {}
        )
        if gradient_checkpointing:
            # transformers before 5.23 knows the older name alone, of whose use later ones warn
            enable = (
                "activation_checkpointing_enable"
                if hasattr(self.inner, "activation_checkpointing_enable")
                else "gradient_checkpointing_enable"
            )
            getattr(self.inner, enable)({"use_reentrant": False})

    def forward(
        self,
        inputs_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        per_sample: bool = False,
        cache: PretrainedCache | None = None,
        positions_BT: Tensor | None = None,
        sizes_J: Tensor | None = None,
    ) -> Tensor:
        """Compute logits or the loss; arguments and results are those of `GPT`."""
        # what a family of one's own makes of its last states (a scale, say) only its class knows
        custom = self.arch.config["model_type"] not in BUILT_IN
        documents = {}
        if positions_BT is not None:
            documents = of_documents(self.inner, self.arch, positions_BT, sizes_J)
        read = (self.inner if custom else self.inner.base_model)(
            input_ids=inputs_BT,
            use_cache=cache is not None,
            past_key_values=None if cache is None else cache.layers,
            **documents,
        )
        if targets_BT is None:
            logits_BTV: Tensor = read.logits if custom else self._logits(read.last_hidden_state)
            return logits_BTV
        targets_N = targets_BT.flatten()
        if custom or self._cap is not None:
            logits_NV = (read.logits if custom else self._logits(read.last_hidden_state)).flatten(
                0, 1
            )
            how = "none" if per_sample else "sum"
            losses = F.cross_entropy(
                at_least_float32(logits_NV), targets_N, ignore_index=IGNORED, reduction=how
            )
        else:
            loss = each_cross_entropy if per_sample else head_cross_entropy
            losses = loss(read.last_hidden_state.flatten(0, 1), self._head.weight, targets_N)
        return losses.view(targets_BT.shape).sum(1, dtype=torch.float64) if per_sample else losses

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Set all buffers to the values of a new model; of one that was made on the meta device."""
        for name, buffer in self.inner.named_buffers():
            buffer.copy_(self._first_buffers[name])

    @property
    def _head(self) -> nn.Linear:
        head: nn.Linear = self.inner.get_output_embeddings()
        return head

    @property
    def _cap(self) -> float | None:
        cap: float | None = self.arch.config.get("final_logit_softcapping")
        return cap

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self._head(x)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def attention_kinds(self, dtype: torch.dtype) -> list[Attention]:
        """Return the attention of each kind of layer, with values of a type."""
        return attention_kinds(self.arch, dtype, training=self.training)

    def new_cache(self) -> PretrainedCache:
        return PretrainedCache(self.inner.config)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules by their names in the shape, from which those of parameters follow."""
        outer = f"{prefix}." if prefix else ""
        yield prefix, self
        for name, module in self.inner.named_modules(memo, remove_duplicate=remove_duplicate):
            yield outer + (self.arch.name(f"{name}.")[:-1] if name else "inner"), module


class PretrainedCache:
    """Keys and values of the tokens that a model has seen."""

    def __init__(self, config: Any) -> None:
        from transformers import DynamicCache

        self.layers = DynamicCache(config=config)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self.layers.get_seq_length())


def class_name(shape: PretrainedShape) -> str:
    """Return the class of transformers that the model has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.config["model_type"]])


def _build_model(shape: PretrainedShape, seed: int | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    values: dict[str, Any] = copy.deepcopy(dict(shape.config))
    kind = values.pop("model_type")
    config = CONFIG_MAPPING[kind](**values)
    if seed is None:
        without_memory = torch.get_default_device().type == "meta"
        with no_init_weights(), on_meta() if without_memory else nullcontext():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules that are made get parameters without memory; what buffers hold, only the module that makes them knows."""
    with parameters_on_meta(), torch.device("cpu"):
        yield


class DrawnValues(Mapping[str, Tensor]):
    """The parameters' values at step 0, which transformers draws for a whole model, when one is asked for."""

    def __init__(self, shape: LoraShape, seed: int) -> None:
        self._shape, self._seed = shape, seed
        self._names = shape.parameters()

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        with torch.device("cpu"):
            model = PretrainedModel(self._shape, seed=self._seed)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _adapt(inner: Any, shape: LoraShape) -> None:
    """Give the linear maps of a model their adapters; B is 0, so that nothing changes."""
    table = shape.parameters() if shape.lora else {}
    for name in shape.adaptable() if shape.lora else ():
        if (adapter := adapter_of(shape.lora, name)) is None:
            continue
        old: nn.Linear = inner.get_submodule(shape.module_name(name))
        with torch.device("meta"):
            linear = Linear(old.in_features, old.out_features, bias=old.bias is not None)
        linear.weight, linear.bias = old.weight, old.bias
        linear.adapt(table, name, adapter)
        inner.set_submodule(shape.module_name(name), linear)


def load_language_model(path: Path, device: str = "cpu") -> GPT | PretrainedModel:
    """Return the model of a checkpoint in evaluation mode; its moving average if there is one.

    Raises:
        CheckpointError: the checkpoint is damaged, or no language model that is known here.
    """
    if not is_of_transformers(read_manifest(path).architecture):
        return load_gpt(path, device)
    checkpoint = load_checkpoint(path)
    component = checkpoint.weights
    model = PretrainedModel(pretrained_shape(checkpoint, component))
    tensors = checkpoint.tensors(component)
    check_finite(path, tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return model.to(device).eval()


def is_of_transformers(architecture: Mapping[str, Any]) -> bool:
    """Return whether an architecture of a manifest is that of a model of transformers."""
    return "model_type" in architecture


def pretrained_shape(checkpoint: Checkpoint, component: str) -> LoraShape:
    """Return the shape of a checkpoint of a model of transformers.

    Raises:
        CheckpointError: it is unknown, or not that of the tensors.
    """
    path, entries = checkpoint.path, checkpoint.layout(component).entries
    try:
        shape = LoraShape.from_dict(checkpoint.manifest.architecture)
    except ArchitectureError as error:
        raise CheckpointError(f"{path}: no model that this Instar knows:\n{error}") from error
    # a manifest may claim any size: make nothing before the header of the file agrees
    if shape.sizes()["layers"] > len(entries):
        raise CheckpointError(f"{path}: more layers than tensors")
    check_shapes(path, entries, {name: e.shape for name, e in shape.parameters().items()})
    return shape


def load_published(folder: Path) -> nn.Module:
    """Return the model that `from_pretrained` makes of a folder alone, in float32 and evaluation mode.

    The folder must be one that `open_folder` accepts: no code of it is run, and nothing is downloaded.

    Raises:
        CheckpointError: transformers cannot load it, or would draw or leave out tensors.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            model_and_report: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever transformers makes of a config of anyone's
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    model, report = model_and_report
    if odd := {what: names for what, names in report.items() if names}:
        differences = "; ".join(
            f"{what}: {sorted(map(str, names))[0]}" for what, names in odd.items()
        )
        raise CheckpointError(f"{folder}: transformers loads another model of it: {differences}")
    module: nn.Module = model.eval()
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars that transformers shows while it loads."""
    from transformers.utils import logging

    bars_enabled: Any = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars_enabled:
            logging.enable_progress_bar()
