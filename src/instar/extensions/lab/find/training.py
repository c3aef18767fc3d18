"""Short trainings of a config, in this process, that leave no run behind."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.config.torch_optim.schedulers import with_steps
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World, join_group
from instar.record.atomic import scratch_folder
from instar.record.console import silent_console
from instar.record.progress import progress
from instar.record.recorder import Silent
from instar.record.rundir import RunDir
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.preflight import Prepared, check_memory, preflight, prepare_run_data
from instar.run.trainer import Trainer

_TIMED_S = 1.0
_SKIPPED = 3
"""Consecutive steps with a non-finite gradient after which a training has diverged."""


def prepared_alone(loaded_config: Loaded, say: Callable[[str], None]) -> Prepared:
    """Check a config for one rank, and prepare its data unless they exist.

    Raises:
        ConfigError: the run could not start.
    """
    prepare_run_data(loaded_config, 1, say)
    # neither the run's folder nor its schedule of operations is needed
    prepared_run = preflight(loaded_config, 1, new=False)
    check_memory(loaded_config, prepared_run.forecast, loaded_config.config.device)
    return prepared_run


@contextmanager
def open_trainer(prepared_run: Prepared, config: RunConfig, world: World) -> Iterator[Trainer]:
    """Context manager: a trainer at step 0 that records and saves nothing, without operations and
    without an outer optimizer.

    Args:
        config: used in place of `prepared.config`, with the same model and data.
    """
    record = config.record.model_copy(update={"layers_every": None})
    parallel = config.parallel.model_copy(update={"strategy": "ddp"})
    quiet = {"record": record, "parallel": parallel, "schedule": ()}
    with scratch_folder("find") as folder:
        trainer = build_trainer(
            replace(prepared_run, config=config.model_copy(update=quiet)),
            world,
            RunOutputs(
                StopSignal(),
                Silent(),
                silent_console(),
                RankLog(world.rank),
                RunDir(folder),
                extends=False,
            ),
        )
        with closing(trainer):
            yield trainer


def final_loss(prepared_run: Prepared, config: RunConfig, world: World, steps: int) -> float:
    """Train for a number of steps and return the validation loss; infinity if it diverges."""
    doing = f"training with learning rate {config.optimizer.lr:.3g}"
    with (
        open_trainer(prepared_run, config, world) as trainer,
        progress(doing, steps, "steps") as advance,
    ):
        while trainer.state.step < steps:
            trainer.step()
            advance(1)
            if trainer.state.skipped_in_a_row == _SKIPPED:
                return math.inf
        trainer.evaluate()
        loss = trainer.state.loss
        return loss if loss is not None and math.isfinite(loss) else math.inf


def shorten_config(
    config: RunConfig, rate: float, steps: int, run_steps: int, held_out: int
) -> RunConfig:
    """Return the config of a short training that resembles a run of `run_steps` steps.

    The learning rate schedule and the moving average are shortened in proportion. The model is not
    compiled, which would take longer than the training.

    Args:
        rate: peak learning rate; Muon's changes by the same factor.
        held_out: maximum number of micro-batches of the validation subset.
    """
    share = steps / run_steps
    schedule, optimizer = config.learning_rate, config.optimizer

    def scale(iters: int | None) -> int | None:
        return None if iters is None else max(1, round(iters * share))

    ema = None if config.train.ema is None else 1.0 - (1.0 - config.train.ema) / share
    subset = min(config.eval.eval_iters or held_out, held_out)
    return config.model_copy(
        update={
            "compile": False,
            "optimizer": optimizer.model_copy(
                update={"lr": rate, "muon_lr": optimizer.muon_lr * rate / optimizer.lr}
            ),
            "learning_rate": schedule.model_copy(
                update={
                    "warmup_iters": round(schedule.warmup_iters * share),
                    "lr_decay_iters": scale(schedule.lr_decay_iters),
                    "decay_every": scale(schedule.decay_every),
                    "options": with_steps(
                        schedule.shape, schedule.options, lambda step: max(1, round(step * share))
                    ),
                }
            ),
            "train": config.train.model_copy(
                update={
                    "ema": ema if ema is not None and ema > 0 else None,
                    "max_skipped_steps": _SKIPPED + 1,
                }
            ),
            "eval": config.eval.model_copy(update={"eval_iters": subset}),
        }
    )


_FEWEST, _MOST = 4, 50
"""steps"""


@dataclass(frozen=True)
class StepTime:
    """Seconds on one device."""

    step: float
    evaluation: float
    device: str
    """cpu or cuda"""


def step_time(loaded_config: Loaded, say: Callable[[str], None]) -> StepTime:
    """Train some steps of a config on one device and evaluate once; nothing is written but data that
    are prepared.

    Raises:
        ConfigError: the run could not start.
    """
    prepared_run = prepared_alone(loaded_config, say)
    with (
        join_group(loaded_config.config.parallel, loaded_config.config.device) as world,
        open_trainer(prepared_run, prepared_run.config, world) as trainer,
    ):
        for _ in range(2):  # the first ones also allocate, compile and choose kernels
            trainer.step()
        times: list[float] = []
        while len(times) < _FEWEST or (sum(times) < _TIMED_S and len(times) < _MOST):
            start = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        trainer.evaluate()
        evaluation_s = time.perf_counter() - start
        return StepTime(statistics.median(times), evaluation_s, world.device.type)
