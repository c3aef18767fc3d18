from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest

from instar.distributed.signals import StopSignal

Python = Callable[..., "subprocess.Popen[str]"]

BLOCKED = """
import datetime, threading
import torch.distributed as dist
from instar.distributed.signals import StopSignal

with StopSignal(moment_s=0) as stop:
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_only_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        assert stop.wait(10)
    assert (stop.requested, stop.insisted) == (number.name, False)
    assert signal.getsignal(number) is before


def test_a_second_signal_insists() -> None:
    again = threading.Event()
    with StopSignal(again.set, moment_s=0) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert again.wait(10)
    assert (stop.requested, stop.insisted) == ("SIGINT", True)


def test_one_ctrl_c_delivered_twice_counts_once() -> None:
    again = threading.Event()
    with StopSignal(again.set, moment_s=60) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not again.wait(0.2)


def test_a_second_signal_leaves_a_blocked_process_at_once(python: Python) -> None:
    process = python(BLOCKED)
    assert process.stdout is not None
    assert process.stdout.readline() == "blocked\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 75


def test_a_forked_child_keeps_its_signals_to_itself(python: Python) -> None:
    said, errors = python(FORKED).communicate(timeout=30)
    assert said == f"{-signal.SIGTERM} False\n", errors
