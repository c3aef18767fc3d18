"""What a GRPO run does between the steps of TRL's trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from instar.distributed.signals import StopSignal
from instar.extensions.delta.callback import DeltaCallback
from instar.extensions.grpo.checkpoints import save_rest
from instar.extensions.grpo.evaluate import PassRates
from instar.extensions.grpo.options import Options
from instar.extensions.grpo.record import GrpoRecord

logger = logging.getLogger("instar.grpo")


class RunCallback(TrainerCallback):
    """Records steps, evaluates, completes checkpoints, and stops when a signal asks for it."""

    def __init__(
        self,
        options: Options,
        record: GrpoRecord,
        evaluate: Callable[[int], PassRates],
        stop: StopSignal,
        deltas: DeltaCallback | None = None,
    ) -> None:
        """
        Args:
            evaluate: evaluates the weights after a step.
            deltas: called after this, and reported here.
        """
        self._options, self._record, self._deltas = options, record, deltas
        self._evaluate, self._stop = evaluate, stop
        self.trainer: Any = None
        """Set once the trainer is made, which needs its callbacks before."""

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if state.global_step == 0:
            self._log_pass_rates(0)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if self._stop.requested:
            control.should_save = control.should_training_stop = True
        self._report_deltas()

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        self._report_deltas(last=True)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, float] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        step = state.global_step
        self._record.log_step(step, logs)
        logger.info(
            "%6d  reward %.3f  loss %+.4f  |g| %.2e  length %.1f  %.2f s",
            step,
            logs.get("reward") or 0.0,
            logs["loss"],
            logs.get("grad_norm") or 0.0,
            logs.get("completions/mean_length") or 0.0,
            logs.get("step_time") or 0.0,
        )
        if step % self._options.eval_every == 0 or step == state.max_steps:
            self._log_pass_rates(step)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        record = self._record
        save_rest(checkpoint, self.trainer, self._options, record.active_s, record.began)
        record.log_save(state.global_step, checkpoint, self._stop.requested or "interval")
        self._stop.resumable = True

    def _report_deltas(self, *, last: bool = False) -> None:
        """Record the deltas that are on disk; of the last ones, wait until they are."""
        if self._deltas is None or (writer := self._deltas.writer) is None:
            return
        if last:
            writer.flush()
        for delta in writer.finished_links():
            self._record.wrote_delta(delta)

    def _log_pass_rates(self, step: int) -> None:
        began = time.perf_counter()
        pass_rates = self._evaluate(step)
        self._record.log_eval(step, pass_rates, time.perf_counter() - began)
        rates_text = "  ".join(f"pass@{k} {value:.3f}" for k, value in pass_rates.pass_at.items())
        logger.info("%6d  %s  val loss %.4f", step, rates_text, pass_rates.loss)
