"""`python -m instar.recipes.grpo` and `python -m instar.recipes.grpo.serve`: their command lines, and what is
checked before torch is imported."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from instar.config.errors import InstarError
from instar.distributed.signals import StopSignal
from instar.extensions.grpo.checkpoints import Resume, find_checkpoint, step_of
from instar.extensions.grpo.data import load_questions
from instar.extensions.grpo.options import Options, check_installed, check_options
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir, hold

logger = logging.getLogger("instar.grpo")
_EXPECTED_WARNINGS = (
    "You are using 'rollout_func'",  # TRL: it may change
    r"`\w*gradient_checkpointing\w*` is deprecated",  # TRL calls it so, transformers renamed it
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_POSITIVE = click.IntRange(min=1)
_DEFAULTS = Options()


def _option(name: str, help: str, kind: Any = _POSITIVE) -> Callable[[_Function], _Function]:
    default = getattr(_DEFAULTS, name.removeprefix("--").replace("-", "_"))
    return click.option(name, type=kind, default=default, show_default=True, help=help)


@click.command(help="Train a model with GRPO on questions with exact answers.")
@_option("--dataset", "gsm8k, math, arithmetic, or a .jsonl or .parquet file", str)
@_option("--model", "tiny (made on the spot), a folder, or a name on the hub", str)
@_option("--seed", "of the order, the samples and all generators", click.IntRange(0, 2**32 - 1))
@click.option("--run-suffix", help="ends the names of folders  [default: seedSEED]")
@_option("--generation", "what draws completions", click.Choice(["local", "server", "vllm"]))
@_option("--vllm-port", "of the server of completions, also with --generation server")
@_option("--vllm-group-port", "at which vLLM's workers meet this process to get weights")
@_option("--server-timeout", "seconds to wait for an answer", click.FloatRange(0, min_open=True))
@_option("--max-steps", "optimizer steps")
@_option("--prompts", "questions of a step")
@_option("--generations", "completions of each question", click.IntRange(min=2))
@_option("--micro-batch", "completions that are trained on at once")
@_option("--num-iterations", "steps on the same completions")
@_option("--lr", "learning rate", click.FloatRange(0, min_open=True))
@_option("--beta", "weight of the KL divergence from the first model", click.FloatRange(0))
@_option("--max-tokens", "of a completion")
@_option("--temperature", "of samples", click.FloatRange(0, 100, min_open=True))
@_option("--top-p", "nucleus that samples are drawn from", click.FloatRange(0, 1, min_open=True))
@_option("--eval-every", "steps between evaluations")
@_option("--eval-prompts", "held-out questions of an evaluation")
@_option("--eval-samples", "completions of each of them")
@_option("--pass-k", "k of pass@k, beside pass@1")
@_option("--save-every", "steps between checkpoints; the last two are kept")
@_option("--delta-every", "steps between delta checkpoints; 0: none", click.IntRange(min=0))
@click.option("--wandb", is_flag=True, help="also log to Weights & Biases")
@click.option(
    "--resume",
    type=click.Choice(["latest", "auto"]),
    is_flag=False,
    flag_value="latest",
    help="continue from the latest checkpoint; auto: if there is one",
)
def main(resume: Resume | None, **options: Any) -> int:
    """Train."""
    train_grpo(Options(**options), resume)
    return 0


@click.command(help="Serve a model whose weights a GRPO trainer replaces.")
@click.option(
    "--model", default="tiny", show_default=True, help="tiny, a folder, or a name on the hub"
)
@click.option(
    "--dataset", default="arithmetic", show_default=True, help="trains the tokenizer of tiny"
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="of requests without one"
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True
)
def serve_model(model: str, dataset: str, host: str, port: int, seed: int, dtype: str) -> int:
    """Run the server until it is stopped."""
    check_installed("transformers", "starlette", "uvicorn")
    from instar.extensions.grpo.serve import run_server

    run_server(model, dataset, host, port, seed, dtype)
    return 0


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
