"""A SLURM of one node, this machine, started for a test from Debian's packages (`make slurm`)."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_READY_S = 30.0
CONFIG = """\
ClusterName=instar
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# a task that is queued again waits until its credential has expired
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Run SLURM on this machine; yields the environment variables in which its commands find it."""
    with tempfile.TemporaryDirectory(prefix="slurm") as name, ExitStack() as running:
        folder, host = Path(name), socket.gethostname().partition(".")[0]
        for part in ("state", "spool"):
            (folder / part).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        text = CONFIG.format(host=host, folder=folder, user=getpass.getuser(), ports=_free_ports())
        (folder / "slurm.conf").write_text(text)
        env = {"SLURM_CONF": str(folder / "slurm.conf")}
        options = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        files = [f"--{option}={folder}/munge.{file}" for option, file in options.items()]
        files += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
        commands = [
            ["/usr/sbin/munged", "--foreground", "--force", *files],
            ["/usr/sbin/slurmctld", "-D"],
            ["/usr/sbin/slurmd", "-D"],
        ]
        output = running.enter_context((folder / "output").open("wb"))
        for command in commands:
            process = subprocess.Popen(
                command, env=os.environ | env, stdout=output, stderr=output, start_new_session=True
            )
            running.callback(process.wait)
            running.callback(process.terminate)
            if "munged" in command[0]:
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: "idle" in _states(env), folder)
        yield env


def _states(env: dict[str, str]) -> str:
    words = ["sinfo", "-h", "-o", "%T"]
    return subprocess.run(
        words, env=os.environ | env, capture_output=True, text=True, check=False
    ).stdout


def _wait(condition, folder: Path) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + _READY_S
    while not condition():
        if time.monotonic() > deadline:
            logs = [path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log")]
            raise AssertionError("\n".join(["SLURM does not start", *logs]))
        time.sleep(0.1)


def _free_ports() -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
