"""What all tests have in common."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import durations
import figures
import forks as forking
import pytest
from hypothesis import settings

from instar.processes.interrupt import STOP_SIGNALS

MOST_EXAMPLES = figures.times(30, sys.maxsize)
"""of a property in `make test`; `make torture` tries as many as each property names"""

# How long an example takes is the machine's business. `make test` tries the same examples every
# time, so that a commit either passes or fails; `make torture` looks for new ones.
settings.register_profile("instar", deadline=None, derandomize=not figures.FULL)
settings.load_profile("instar")

# precision: auto is fp32 then, and curves do not depend on whether a processor has bf16 units
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"

# nohup and background jobs have these ignored, which processes that tests start would inherit, and honour
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

CACHES = tempfile.mkdtemp(prefix="instar-tests-")
# read when `datasets` is imported, which may be while tests are collected
os.environ["HF_HOME"] = f"{CACHES}/huggingface"
os.environ["INSTAR_CACHE_DIR"] = f"{CACHES}/instar"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":  # which it is in workers
        forking.warm_workers(config)


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHES, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a worker is given what `durations` says at a time, in its order."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return durations.unit_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -durations.seconds_of(item.nodeid))
    for item in items:
        if not isinstance(item, pytest.Function) or hasattr(item.module, "figures"):
            continue  # the latter names both numbers itself
        test = item.obj
        # decorators have made the settings, and Hypothesis has no other way to change them later
        name = "_hypothesis_internal_use_settings"
        test_settings = getattr(test, name, None)
        if test_settings is not None and test_settings.max_examples > MOST_EXAMPLES:
            setattr(test, name, settings(test_settings, max_examples=MOST_EXAMPLES))


def pytest_collection_finish() -> None:
    gc.freeze()  # collections of garbage need not look at all that stays until the end


@pytest.fixture(scope="session")
def forks() -> forking.Forks:
    """One process that has imported everything and forks those that tests start."""
    return forking.forks()


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was() -> Iterator[None]:
    """No test depends on which others have run before it in this process: what training sets for
    the whole of its own process is set back."""
    environment, folder, restore_torch = dict(os.environ), Path.cwd(), _torch_as_it_is()
    levels = {name: (logger.level, logger.handlers[:]) for name, logger in _loggers()}
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():  # a command that fails ignores further ones
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder)
    for name, logger in _loggers():
        level, handlers = levels.get(name, (logging.NOTSET, []))
        if logger.level != level:
            logger.setLevel(level)
        if logger.handlers != handlers:
            logger.handlers[:] = handlers
    restore_torch()


def _loggers() -> list[tuple[str, logging.Logger]]:
    return [
        (name, logger)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "instar"
    ]


def _torch_as_it_is() -> Callable[[], None]:
    """Gives back what is set in torch for the whole process, where it is imported by now."""
    if "torch" not in sys.modules:
        return lambda: None
    import torch

    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    matmul, gradients = torch.get_float32_matmul_precision(), torch.is_grad_enabled()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)
        if "torch._inductor.config" in sys.modules:
            torch.use_deterministic_algorithms(deterministic > 0, warn_only=deterministic == 1)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        if torch.get_float32_matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        torch.set_grad_enabled(gradients)

    return restore
