"""What a GRPO run does between the steps of TRL's trainer, and its record: `events.jsonl` in its output folder,
as `instar logs` and the dashboard read."""

# ruff: noqa: ARG002  the signatures are transformers'

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from instar import __version__
from instar.distributed.signals import StopSignal
from instar.extensions.delta.callback import DeltaCallback
from instar.extensions.delta.writer import Written
from instar.extensions.grpo.checkpoints import save_rest
from instar.extensions.grpo.evaluate import PassRates
from instar.extensions.grpo.options import Options
from instar.processes.identity import this_process
from instar.record.events import Eval, Failed, RunFinished, RunStarted, Saved, Stop, Train
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir

logger = logging.getLogger("instar.grpo")
_LEFT_OUT = frozenset(["loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"])


class GrpoRecord:
    """Writes the events of one start of a run."""

    def __init__(
        self,
        recorder: Recorder,
        options: Options,
        questions: int,
        *,
        began: float,
        active_s: float,
        best: tuple[float, int] | None,
    ) -> None:
        """
        Args:
            questions: for training.
            began: Unix seconds at which the run began.
            active_s: seconds of training before this start.
            best: the best pass@1 before this start and its step, if known.
        """
        self.began, self.active_s, self.best = began, active_s, best
        self._recorder, self._options, self._questions = recorder, options, questions
        self._tokens = 0
        self._train_loss: float | None = None

    def log_start(self, step: int, resumed_from: Path | None, model: Any, device: str) -> None:
        config = model.config
        self._recorder.write(
            RunStarted(
                run_id=RunDir(self._options.output_dir).id,
                step=step,
                resumed_from=None if resumed_from is None else str(resumed_from),
                model=f"{config.num_hidden_layers}L/{config.hidden_size}d",
                parameters=sum(p.numel() for p in model.parameters()),
                devices=device,
                better={"val/loss": "min"} | {f"val/pass@{k}": "max" for k in self._ks()},
                best_metric="pass@1",
                versions=_versions(),
                machine={"host": platform.node(), **this_process()},
                launch=self._options.as_dict(),
            )
        )

    def log_step(self, step: int, logs: Mapping[str, Any]) -> None:
        """Record what transformers logs of one step."""
        seconds = float(logs.get("step_time") or 0.0)
        self.active_s += seconds
        before, self._tokens = self._tokens, int(logs.get("num_tokens") or self._tokens)
        self._train_loss = float(logs["loss"])
        numbers = {k: float(v) for k, v in logs.items() if isinstance(v, int | float)}
        self._recorder.write(
            Train(
                loss=self._train_loss,
                steps=1,
                grad_norm=numbers.get("grad_norm"),
                lr=numbers.get("learning_rate"),
                tokens_per_s=(self._tokens - before) / seconds if before and seconds else None,
                extra={k: v for k, v in numbers.items() if k not in _LEFT_OUT},
                **self._place(step),
            )
        )

    def log_eval(self, step: int, pass_rates: PassRates, seconds: float) -> None:
        value = pass_rates.pass_at[1]
        is_best = self.best is None or value > self.best[0]
        if is_best:
            self.best = value, step
        self._recorder.write(
            Eval(
                split="val",
                loss=pass_rates.loss,
                eval_tokens=pass_rates.tokens,
                seconds=seconds,
                best=is_best,
                extra={f"pass@{k}": v for k, v in pass_rates.pass_at.items()},
                errors={f"pass@{k}": v for k, v in pass_rates.standard_errors.items()},
                **self._place(step),
            )
        )

    def log_save(self, step: int, checkpoint: Path, reason: str) -> None:
        self._recorder.write(Saved(path=str(checkpoint), reason=reason, **self._place(step)))

    def wrote_delta(self, delta: Written) -> None:
        self._recorder.write(delta.event(**self._place(delta.link.step)))

    def log_stop(self, step: int, reason: str, *, resumable: bool) -> None:
        self._recorder.write(Stop(reason=reason, resumable=resumable, **self._place(step)))
        self._recorder.write(
            RunFinished(
                loss=self._train_loss,
                best_metric="pass@1",
                best_value=self.best and self.best[0],
                best_value_step=self.best and self.best[1],
                **self._place(step),
            )
        )

    def log_failure(self, step: int, message: str, exit_code: int) -> None:
        self._recorder.write(Failed(message=message, rank=0, step=step, exit_code=exit_code))

    def _ks(self) -> list[int]:
        return sorted({1, self._options.pass_k})

    def _place(self, step: int) -> dict[str, Any]:
        """Return where the run is after a step, on all axes."""
        samples = -(-step // self._options.num_iterations) * self._options.prompts
        return {
            "step": step,
            "samples": samples,
            "tokens": self._tokens,
            "epoch": samples / self._questions,
            "wall_s": max(0.0, time.time() - self.began),
            "active_s": self.active_s,
        }


def _versions() -> dict[str, str]:
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    return {"instar": __version__, "python": platform.python_version(), **versions}


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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0:
            self._log_pass_rates(0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._stop.requested:
            control.should_save = control.should_training_stop = True
        self._report_deltas()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._report_deltas(last=True)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        record = self._record
        progress = {"active_s": record.active_s, "began": record.began, "best": record.best}
        save_rest(checkpoint, self.trainer, self._options, progress)
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
