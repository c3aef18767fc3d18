"""Trains a model with GRPO: TRL's trainer, with Instar's order of questions, samplers and record."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from instar.config.errors import InstarError
from instar.distributed.signals import StopSignal
from instar.extensions.grpo.checkpoints import (
    Resume,
    find_checkpoint,
    step_of,
)
from instar.extensions.grpo.data import load_questions
from instar.extensions.grpo.options import Options, check_options
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir, hold

logger = logging.getLogger("instar.grpo")
_EXPECTED_WARNINGS = (
    "You are using 'rollout_func'",  # TRL: it may change
    r"`\w*gradient_checkpointing\w*` is deprecated",  # TRL calls it so, transformers renamed it
)


def train_grpo(options: Options, resume: Resume | None = None) -> None:
    """Train from the beginning or from a checkpoint, until `max_steps` or a stop signal.

    Raises:
        ConfigError: an option, the data set, the server or the checkpoint is not usable; before
            torch is imported where possible.
        Interrupted: a signal stopped the run, which can be resumed.
        StoppedUnsaved: a signal stopped it before the first checkpoint.
        ServerLost: the server does not answer any more.
    """
    check_options(options)
    questions = load_questions(options.dataset)
    checkpoint = find_checkpoint(options, resume)
    server = None
    if options.generation != "local":
        from instar.extensions.grpo.servers import find_server

        server = find_server(options.generation, options.vllm_port, options.model)
    if checkpoint is not None and step_of(checkpoint) >= options.max_steps:
        print(f"{options.output_dir}: finished at step {step_of(checkpoint)}")
        return
    options.output_dir.mkdir(parents=True, exist_ok=True)
    run = RunDir(options.output_dir)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal(last=True))
        stop.resumable = checkpoint is not None
        stack.enter_context(hold(run))
        stack.enter_context(_logging(options.log_dir / "train.log"))
        stack.enter_context(warnings.catch_warnings())
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        recorder = stack.enter_context(Recorder(run.events, warn=logger.warning))
        from instar.extensions.grpo.trainer import GrpoRun

        grpo_run = GrpoRun(options, questions, server, checkpoint, recorder, stop)
        stack.callback(grpo_run.close)
        grpo_run.train()


@contextmanager
def _logging(path: Path) -> Iterator[None]:
    """Show the run's lines, and write them into a file."""
    from transformers.utils.logging import disable_progress_bar

    path.parent.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    stdout_handler = logging.StreamHandler(sys.stdout)
    stdout_handler.addFilter(lambda line: line.levelno < logging.ERROR)  # the command prints errors
    handlers: list[logging.Handler] = [stdout_handler, logging.FileHandler(path)]
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    except InstarError as error:
        logger.error("%s", error)
        raise
    except Exception:
        logger.exception("failed")
        raise
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
