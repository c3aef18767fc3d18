"""Deltas of a training with transformers: `Trainer(…, callbacks=[DeltaCallback("deltas")])`."""

# ruff: noqa: ARG002  the signatures are transformers'

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.writer import DTYPES, DeltaWriter

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "DeltaCallback needs `transformers`; pip install 'instar[hf,delta]'", name=error.name
    ) from error


class DeltaCallback(TrainerCallback):
    """Saves the first weights of a training, those after every n-th step, and the last ones.

    The main process saves, in the background; see `DeltaWriter`. A failure raises CheckpointError
    in the next step, and ends the training. A training that resumes from a checkpoint goes on with
    the same chain: in its last link if that has the same step and weights, else with an anchor.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        every: int = 1,
        anchor_every: int = 50,
        dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    ) -> None:
        """
        Args:
            folder: of the chain.
            every: steps between links.
            anchor_every: links after which one holds all weights again.
            dtype: weights are rounded to it before they are compared; auto: bf16 or fp16 where the
                training arguments say so, else fp32.
        """
        self.folder, self.every, self.anchor_every = Path(folder), every, anchor_every
        self.dtype = dtype
        self.writer: DeltaWriter | None = None
        """on the main process, during a training"""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.writer is not None:  # of a training that failed
            self.writer.close()
            self.writer = None
        if state.is_world_process_zero:
            precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
            dtype = DTYPES[precision if self.dtype == "auto" else self.dtype]
            self.writer = DeltaWriter(self.folder, self.every, self.anchor_every, dtype)
            self._save_if_due(state.global_step, kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        last = control.should_training_stop or state.global_step >= state.max_steps
        self._save_if_due(state.global_step, kwargs["model"], last=last)
        if control.should_save and self.writer is not None:
            # no checkpoint to resume from is newer than the chain
            self.writer.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # by now the model may have the weights of the best checkpoint
        if self.writer is not None:
            self.writer.flush()
            self.writer.close()
            self.writer = None

    def _save_if_due(self, step: int, model: Module, *, last: bool = False) -> None:
        writer = self.writer
        if writer is None:
            return
        if writer.failure is not None:
            raise CheckpointError(writer.failure)
        if writer.due(step, last=last):
            writer.save(step, whole_tensors(model))


def whole_tensors(model: Module) -> dict[str, Tensor]:
    """Return the tensors of `state_dict()`.

    Raises:
        ValueError: the model is sharded among processes.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or hasattr(parameter, "ds_id"):
            raise ValueError(
                f"{name} is sharded among processes; deltas are of whole models: train with DDP"
            )
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
