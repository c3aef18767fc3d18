"""Growth in transformers' `Trainer`."""

# ruff: noqa: ARG002  the signatures are transformers'

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.nn import Module
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import ParallelMode

from instar.config.files import read_regular
from instar.growth.plan import GrowthError
from instar.loops.schedule import GrowthSchedule, Schedule, schedule_text

logger = logging.getLogger(__name__)


class TrainerGrowth(TrainerCallback, ExportableState):
    """Grow the model of a `Trainer` when the triggers of a schedule fire; at a loss the
    model grows before the next step.

    A checkpoint's `config.json` has the grown config, and `trainer_state.json` the history. To resume::

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        trainer = Trainer(model, ..., callbacks=[TrainerGrowth("schedule.yaml")])
        trainer.train(resume_from_checkpoint=checkpoint)

    With `load_best_model_at_end`, the best checkpoint is that of the last size: it begins anew with each growth.

    Args:
        schedule: path of a schedule file, or its entries.
        seed: of new values.
        probe: see `instar.growth.grow`.
        wrapped: returns the trainer's `model_wrapped`, which several processes need:
            ``TrainerGrowth(..., wrapped=lambda: trainer.model_wrapped)``.
        metric: that is the validation loss, as in `metric_for_best_model`.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        seed: int = 0,
        probe: Any = None,
        wrapped: Callable[[], Module] | None = None,
        metric: str = "eval_loss",
    ) -> None:
        self._wrapped_model = wrapped
        # what `trainer_state.json` can hold
        self._arguments = {"schedule": json.loads(schedule_text(schedule)), "seed": seed}
        self._metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        self._metrics: set[str] = set()
        self._probe = probe
        # the length of the run is known when it begins
        self.schedule = GrowthSchedule(schedule, seed=seed, steps=1)
        self._trains = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.parallel_mode is ParallelMode.DISTRIBUTED and self._wrapped_model is None:
            raise GrowthError(
                "with several processes TrainerGrowth needs what wraps the model: pass "
                "wrapped=lambda: trainer.model_wrapped"
            )
        self.schedule.steps, self.schedule.pending, self._trains = state.max_steps, None, True
        saved_state = (state.stateful_callbacks or {}).get(type(self).__name__)
        if state.global_step and saved_state:
            self.growth = saved_state["attributes"]["growth"]
            self.schedule.check(kwargs["model"])
        elif not state.global_step:  # of a search, perhaps, or after too large a batch
            self.schedule.begin_anew(kwargs["model"])
        if args.eval_strategy == IntervalStrategy.NO and (name := self.schedule.find_waiting()):
            # another callback may evaluate
            logger.warning(
                "%s waits for %s, and eval_strategy is 'no': without evaluations it never fires",
                name,
                self._metric,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step(args, state, kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the trainer labels a checkpoint of this step with this loss: it must be of the model that was evaluated
        metrics = kwargs.get("metrics") or {}
        if self._trains:
            # a call of `evaluate` with a prefix of its own is none of the training's evaluations
            self._metrics |= {name for name in metrics if name.startswith("eval_")}
            if (loss := metrics.get(self._metric)) is not None:
                self.schedule.pending = float(loss)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._metrics:  # of all data sets that are evaluated
            self.schedule.check_metric(self._metric, sorted(self._metrics))
            self._metrics = set()
        if (loss := self.schedule.take_pending()) is not None:
            self._step(args, state, kwargs, loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trains = False

    def replay(self, model: Module, checkpoint: str | Path) -> None:
        """Grow a model built as for a new run by the history of a checkpoint, which holds only adapters of peft, so that
        they fit it. The base grows as it did if its weights are frozen."""
        state = json.loads(read_regular(Path(checkpoint, "trainer_state.json")))
        saved_state = (state.get("stateful_callbacks") or {}).get(type(self).__name__)
        if saved_state is None:
            raise GrowthError(f"{checkpoint} holds no history of {type(self).__name__}")
        self.growth = saved_state["attributes"]["growth"]
        self.schedule.replay(model)

    @property
    def growth(self) -> dict[str, Any]:
        """State of the schedule, which `Trainer` may set when it resumes."""
        return self.schedule.state_dict()

    @growth.setter
    def growth(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """Return what `trainer_state.json` holds of the callback."""
        return {"args": self._arguments, "attributes": {"growth": self.growth}}

    def _step(
        self, args: Any, state: Any, live: Mapping[str, Any], loss: float | None = None
    ) -> None:
        changes = self.schedule.step(
            live["model"] if self._wrapped_model is None else self._wrapped_model(),
            state.global_step,
            optimizer=live["optimizer"],
            loss=loss,
            probe=self._probe,
        )
        if all(change.skipped for change in changes) or not args.load_best_model_at_end:
            return
        if state.best_global_step is not None or state.best_model_checkpoint is not None:
            # its tensors do not fit: the trainer would load what fits into the larger model
            logger.warning(
                "the best checkpoint, %s, is that of a smaller model: the best of the grown one begins anew",
                state.best_model_checkpoint or f"of step {state.best_global_step}",
            )
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
