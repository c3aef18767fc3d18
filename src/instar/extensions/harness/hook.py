"""A hook that runs tasks of lm-evaluation-harness after evaluations of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from instar.config.errors import ConfigError
from instar.data.text.tokenizer import load_saved_tokenizer
from instar.models.sampling import LanguageModel
from instar.run.state.generators import generators_kept
from instar.run.step.hooks import HookContext


class Harness:
    """Runs tasks after every `every`-th evaluation, and logs their metrics as `<task>/<metric>`.

    Every rank computes all of them: models may be divided among ranks. They are measured on the weights, not on their
    moving average.
    """

    def __init__(
        self,
        tasks: Sequence[str | Mapping[str, Any]],
        *,
        every: int = 1,
        limit: int | float | None = None,
        num_fewshot: int | None = None,
        batch_size: int = 16,
        include_path: str | None = None,
    ) -> None:
        """
        Args:
            tasks: names that the harness knows, or a task as a dictionary of its config.
            every: evaluations of the run from one to the next.
            limit: samples of each task, or the share of them; None: all.
            num_fewshot: examples before each question; None: as the task says.
            batch_size: texts that are scored at once.
            include_path: folder of further tasks.

        Raises:
            ConfigError: the library is not installed.
        """
        try:
            import lm_eval  # noqa: F401
        except ImportError:
            raise ConfigError.of(
                "the library lm_eval is not installed",
                "Harness",
                "install the extra: pip install 'instar[harness]'",
            ) from None
        self._tasks, self._every = list(tasks), every
        self._options = {"limit": limit, "num_fewshot": num_fewshot}
        self._batch_size, self._include_path = batch_size, include_path
        self._task_manager: Any = None
        self._evaluations = 0
        self.results: dict[int, dict[str, float]] = {}
        """by step, of this process"""

    def state_dict(self) -> dict[str, int]:
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._evaluations = state["evaluations"]

    def on_evaluate_end(self, run: HookContext) -> None:
        self._evaluations += 1
        if self._evaluations % self._every:
            return
        # the harness seeds the generators of the whole process
        with generators_kept(run.device):
            numbers = self._measure(run)
        self.results[run.step] = numbers
        for name, value in numbers.items():
            run.log(name, value)

    def _measure(self, run: HookContext) -> dict[str, float]:
        from lm_eval import simple_evaluate

        from instar.extensions.harness.model import HarnessModel

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        model: Any = run.model
        tokenizer = load_saved_tokenizer(run.folder)
        language_model: LanguageModel = model
        results: Any = simple_evaluate(
            HarnessModel(language_model, tokenizer, self._batch_size),
            tasks=self._tasks,
            task_manager=self._manager(),
            bootstrap_iters=0,
            log_samples=False,
            **self._options,
        )
        return named_results(results["results"])

    def _manager(self) -> Any:
        """Return what finds tasks by name; reading its thousands of files takes ten seconds."""
        from lm_eval.tasks import TaskManager

        if self._task_manager is None:
            by_name = any(isinstance(task, str) for task in self._tasks)
            self._task_manager = TaskManager(
                include_path=self._include_path, include_defaults=by_name
            )
        return self._task_manager


def named_results(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of the harness by `<task>/<metric>`, or `<task>/<metric>/<filter>` where a metric has
    several filters.

    Args:
        results: of tasks, by `<metric>,<filter>`.
    """
    numbers = {}
    for task, values in results.items():
        metrics = {
            key: float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and "stderr" not in key and key != "sample_len"
        }
        names = [key.partition(",")[0] for key in metrics]
        for name, (key, value) in zip(names, metrics.items(), strict=True):
            numbers[f"{task}/{name if names.count(name) == 1 else key.replace(',', '/')}"] = value
    return numbers
