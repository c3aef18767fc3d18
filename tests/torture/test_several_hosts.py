"""Training on two hosts, what may happen to them and between them, and going on with what is left.

With `reproducible: elastic` equal weights prove equal samples: those of a run on one rank that nothing happened to.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import figures
import pytest
from tiny_run import Place, acknowledged_step, codes, events, output_of
from two_hosts import Host, Started, Wire, two_hosts

from instar.checkpoint.store import load_checkpoint

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]

SILENCE_S = 4.0
KEYS = (
    "optimizer.name=adamw",
    "reproducible=elastic",
    "train.batch_size=3",
    "train.gradient_accumulation_steps=8",
    "learning_rate.lr_decay_iters=100",
    "checkpoint.every_steps=2",
    f"parallel.silence_s={SILENCE_S}",
)
STRATEGIES = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "hsdp": ("parallel.strategy=hsdp", "parallel.fsdp.shards=2"),
}
FOR_EVER = "train.until=[100000it]"


def strategies_to_try() -> list[str]:
    return list(STRATEGIES) if figures.FULL else ["hsdp"]


@dataclass(frozen=True)
class Fault:
    """What happens, the longest time until nothing runs any more, and what the logs of rank 0 and of rank 2,
    which is on the other host, say; "": that host is gone."""

    happens: Callable[[Sequence[Host], Path], float]
    most_s: float
    first: str
    other: str


def freeze_rank_3(hosts: Sequence[Host], run_dir: Path) -> float:
    log = str(run_dir / "logs" / "rank_3.log")
    for pid in hosts[1].processes():
        if any(os.path.realpath(file) == log for file in Path(f"/proc/{pid}/fd").iterdir()):
            os.kill(pid, signal.SIGSTOP)
    return time.monotonic()


FROZEN = r"rank 3 on host {node1} has sent no heartbeat for \d+ s"
FAULTS = {
    "link cut": Fault(
        lambda hosts, _: hosts[1].unplug(),
        SILENCE_S + 6,
        r"rank 2 on host {node1} .*rank 3 on host {node1} .*no heartbeat arrives from host {node1}",
        r"the network to rank 0 at \S+ is lost: .*rank 0 on host {node0} was last seen",
    ),
    "host killed": Fault(
        lambda hosts, _: hosts[1].kill(),
        5.0,
        r"rank 2 on host {node1} was .*rank 3 on host {node1}",
        "",
    ),
    "host of rank 0 killed": Fault(
        lambda hosts, _: hosts[0].kill(),
        5.0,
        "",
        r"rank 0 on host {node0} was .*rank 1 on host {node0}",
    ),
    "rank frozen": Fault(freeze_rank_3, SILENCE_S + 6, FROZEN, FROZEN),
}


def torchrun(
    place: Place,
    host: Host,
    *words: str,
    run_dir: Path,
    keys: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Started:
    sets = [word for key in (*KEYS, *keys, f"record.run_dir={run_dir}") for word in ("--set", key)]
    command = [place.forks.bin / "torchrun", *words, "-m", "instar.train", "run.yaml", *sets]
    return host.start(command, place.path, environment)


def on_both(place: Place, hosts: Sequence[Host], run_dir: Path, *keys: str) -> list[Started]:
    """Two ranks on each host."""
    where = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--master-port=29778"]
    return [
        torchrun(place, host, *where, f"--node-rank={number}", run_dir=run_dir, keys=keys)
        for number, host in enumerate(hosts)
    ]


def saved_bytes(run_dir: Path, step: int) -> dict[str, object]:
    """The cursor, and the bytes of every tensor, whoever saved which rows of it."""
    checkpoint = load_checkpoint(run_dir / "checkpoints" / f"step-{step}")
    return {
        f"{component}/{name}": tensor.contiguous().numpy().tobytes()
        for component in ("model", "optimizer", "ema")
        for name, tensor in checkpoint.tensors(component).items()
    } | {"samples": checkpoint.manifest.progress["samples"]}


def differs_after_resume(place: Place, run_dir: Path, ranks: int) -> str:
    """Resume on one host, train three more steps, and compare with a run on one rank; "": equal."""
    until = acknowledged_step(run_dir) + 3
    whole_models = "--set parallel.strategy=ddp --set parallel.fsdp.shards=null"
    children = place.resume(run_dir, "--until", f"{until}it", *whole_models.split(), ranks=ranks)
    assert set(codes(children)) == {0}, output_of(children)
    return differs(place, run_dir, until)


def differs(place: Place, run_dir: Path, until: int) -> str:
    full_run = place.path / "whole"
    shutil.rmtree(full_run, ignore_errors=True)
    children = place.train(full_run, *KEYS, f"train.until=[{until}it]")
    assert set(codes(children)) == {0}, output_of(children)
    return (
        ""
        if saved_bytes(run_dir, until) == saved_bytes(full_run, until)
        else f"step {until} differs"
    )


def seconds_to_end(ranks: Sequence[Started], hosts: Sequence[Host], start_s: float) -> float:
    """Seconds since then until nothing runs on the hosts any more, the launchers included."""
    for rank in ranks:
        rank.finish()
    while any(host.processes() for host in hosts):
        assert time.monotonic() < start_s + 60, "a process is left"
        time.sleep(0.05)
    return time.monotonic() - start_s


@pytest.mark.torture
@pytest.mark.parametrize("fault", FAULTS if figures.FULL else ["link cut", "host of rank 0 killed"])
def test_a_fault_ends_all_ranks_in_time_by_name_and_one_host_goes_on_with_the_same_samples(
    place: Place, fault: str
) -> None:
    rng, seconds, silent, wrong = random.Random(fault), list[float](), list[str](), list[str]()
    what = FAULTS[fault]
    strategies = strategies_to_try() * figures.times(1, 3)
    for number, strategy in enumerate(strategies):
        run_dir = place.path / f"run-{number}"
        with two_hosts() as hosts:
            ranks = on_both(place, hosts, run_dir, *STRATEGIES[strategy], FOR_EVER)
            ranks[0].wait_for(f"\n      {rng.randint(4, 9)}  ")
            fault_s = what.happens(hosts, run_dir)
            seconds.append(seconds_to_end(ranks, hosts, fault_s))
            names = {f"node{n}": re.escape(host.name) for n, host in enumerate(hosts)}
            logs = [(run_dir / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 2)]
            for log, pattern in zip(logs, (what.first, what.other), strict=True):
                if not re.search(pattern.format(**names), log):
                    silent.append(f"{strategy}: {pattern!r} not in {log[-1000:]}")
        wrong += filter(None, [differs_after_resume(place, run_dir, ranks=2)])
        shutil.rmtree(run_dir)
    trials = len(strategies)
    figures.write(
        f"hosts-{fault.replace(' ', '-')}",
        [
            figures.at_most(
                f"{trials} × {fault}: nothing runs any more", seconds, "s", what.most_s
            ),
            figures.none_of(trials, f"{fault}, host not named", silent),
            figures.none_of(trials, f"{fault}, resumed with other samples", wrong),
        ],
    )


WIRES = {"slow": Wire(delay_s=0.2), "lossy": Wire(loss=0.01)}


@pytest.mark.torture
@pytest.mark.parametrize("wire", list(WIRES) if figures.FULL else ["lossy"])
def test_a_slow_or_lossy_network_changes_nothing_but_the_speed(place: Place, wire: str) -> None:
    steps, wrong, strategies = figures.times(3, 10), list[str](), strategies_to_try()
    for number, strategy in enumerate(strategies):
        run_dir = place.path / f"run-{number}"
        with two_hosts(WIRES[wire]) as hosts:
            ranks = on_both(
                place, hosts, run_dir, *STRATEGIES[strategy], f"train.until=[{steps}it]"
            )
            assert [rank.finish(900) for rank in ranks] == [0, 0], ranks[0].output()
        wrong += filter(None, [differs(place, run_dir, steps)])
    figures.write(
        f"hosts-{wire}-network",
        [figures.none_of(len(strategies), f"{WIRES[wire]}, other weights", wrong)],
    )


@pytest.mark.torture
def test_torchrun_goes_on_with_the_host_that_is_left_and_takes_the_other_back(place: Place) -> None:
    """As docs/scaling.md says, at shorter limits of torchrun's."""
    run_dir, limits = place.path / "run", "keep_alive_interval=1,last_call_timeout=2"
    with two_hosts() as hosts:

        def join(host: Host) -> Started:
            words = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=run"]
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29779"]
            words += [f"--rdzv-conf={limits}"]
            keys = (*STRATEGIES["fsdp"], FOR_EVER, "resume=auto")
            variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            return torchrun(place, host, *words, run_dir=run_dir, keys=keys, environment=variables)

        def trains_on(ranks: int) -> bool:
            """Whether the run was last started with so many ranks, and has saved since then."""
            saved = False
            for event in reversed(events(run_dir)):
                if event["kind"] == "run_started":
                    return saved and event["world_size"] == ranks
                saved = saved or event["kind"] == "checkpoint"
            return False

        def wait_for(ranks: int) -> float:
            start_s = time.monotonic()
            while not trains_on(ranks):
                assert time.monotonic() < start_s + 120, first.output()
                time.sleep(0.05)
            return time.monotonic() - start_s

        first, _ = map(join, hosts)
        wait_for(4)
        hosts[1].kill()
        seconds = [wait_for(2)]
        join(hosts[1])
        seconds.append(wait_for(4))
    wrong = list(filter(None, [differs_after_resume(place, run_dir, ranks=1)]))
    figures.write(
        "hosts-elastic",
        [
            figures.at_most("one host lost, then back: saved again", seconds, "s", 60.0),
            figures.none_of(2, "restart with other samples", wrong),
        ],
    )
