from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest

from instar.distributed.signals import StopSignal
from instar.processes.interrupt import STOP_SIGNALS

Python = Callable[..., "subprocess.Popen[str]"]

BLOCKED = """
import datetime, threading
import torch.distributed as dist
from instar.distributed.signals import StopSignal

with StopSignal(moment_s=0) as stop:
    stop.resumable = {resumable}
    def tell():
        stop.wait()
        print("asked", stop.requested, flush=True)
    threading.Thread(target=tell, daemon=True).start()
    print("blocked", flush=True)
    dist.HashStore().wait(["never"], datetime.timedelta(seconds=60))
"""

FORKED = """
import os, signal, warnings
from instar.distributed.signals import StopSignal
warnings.simplefilter("ignore")
with StopSignal() as stop:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.wait(0.2))
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_only_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(10)
    assert (stop.requested, stop.insisted) == (number.name, False)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_ctrl_c_insists(first: signal.Signals) -> None:
    insist_event = threading.Event()
    with StopSignal(insist_event.set, moment_s=0) as stop:
        os.kill(os.getpid(), first)
        assert stop.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        assert insist_event.wait(10)
    assert (stop.requested, stop.insisted) == (first.name, True)


def test_a_second_sigterm_leaves_time_to_save_and_a_third_insists() -> None:
    """Schedulers send several, and other warnings before."""
    insist_event = threading.Event()
    with StopSignal(insist_event.set, moment_s=0) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, *STOP_SIGNALS[2:]):
            os.kill(os.getpid(), number)
            assert not insist_event.wait(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert insist_event.wait(10)
    assert (stop.requested, stop.insisted) == ("SIGTERM", True)


def test_a_second_sigterm_long_after_the_first_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instar.distributed.signals.SAVE_S", 0.0)
    insist_event = threading.Event()
    with StopSignal(insist_event.set, moment_s=0) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert insist_event.wait(10)


def test_what_somebody_else_has_set_stays() -> None:
    """SIGHUP is ignored under nohup; a script may have a use of its own for SIGUSR1."""
    signals: list[int] = []
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number)),
    }
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not stop.wait(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert signals == [signal.SIGUSR1]


MANY = """
import os, signal, sys, threading
from instar.distributed.signals import StopSignal

sys.setswitchinterval(1e-6)

def send():
    while True:
        os.kill(os.getpid(), signal.SIGUSR1)

with StopSignal() as stop:
    threading.Thread(target=send, daemon=True).start()
    for _ in range(10_000):
        stop.wait(0)
    print(stop.wait(10), flush=True)
    os._exit(0)
"""


def test_signals_that_interrupt_the_waiting_main_thread_do_not_block_it(python: Python) -> None:
    output, errors = python(MANY).communicate(timeout=60)
    assert output == "True\n", errors


LAST = """
import os, signal
from instar.distributed.signals import StopSignal
with StopSignal(last=True) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    stop.wait()
os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(75)
"""


def test_a_signal_to_a_process_that_is_leaving_changes_nothing(python: Python) -> None:
    process = python(LAST)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_a_signal_to_a_process_that_leaves_with_an_exception_changes_nothing(
    python: Python,
) -> None:
    """Ranks lose the store of a killed launcher before the kernel signals its death."""
    program = """
import os, signal, sys
from instar.distributed.signals import StopSignal
try:
    with StopSignal(last=True):
        raise RuntimeError
except RuntimeError:
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(4)
"""
    process = python(program)
    process.communicate(timeout=30)
    assert process.returncode == 4


def test_one_ctrl_c_delivered_twice_counts_once() -> None:
    insist_event = threading.Event()
    with StopSignal(insist_event.set, moment_s=60) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not insist_event.wait(0.2)


@pytest.mark.parametrize(("resumable", "code"), [(True, 75), (False, 130)])
def test_a_second_ctrl_c_leaves_a_blocked_process_at_once(
    python: Python, resumable: bool, code: int
) -> None:
    process = python(BLOCKED.format(resumable=resumable))
    assert process.stdout is not None
    assert process.stdout.readline() == "blocked\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked SIGINT\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == code


def test_a_forked_child_keeps_its_signals_to_itself(python: Python) -> None:
    output, errors = python(FORKED).communicate(timeout=30)
    assert output == f"{-signal.SIGTERM} False\n", errors
