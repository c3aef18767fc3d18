import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import instar
from instar.record.device import measure_peak_flops
from instar.record.system import git_commit, machine, memory_bytes, versions


def run_afresh(code: str) -> None:
    """Run in an interpreter of its own, which has little else in memory."""
    environment = os.environ | {"PYTHONPATH": str(Path(instar.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_versions_and_machine_are_known_without_importing_torch() -> None:
    run_afresh(
        "import sys, instar.record.system as system\n"
        "system.versions(); system.machine(); system.memory_bytes()\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_versions() -> None:
    packages = versions()
    assert packages["instar"] == instar.__version__
    assert packages["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert packages["torch"] == torch.__version__


def test_the_commit_of_a_repository_and_of_none(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    commit = git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40


def test_machine() -> None:
    facts = machine()
    assert isinstance(facts["cores"], int)
    assert facts["cores"] >= 1
    assert isinstance(facts["memory_bytes"], int)
    assert facts["memory_bytes"] > 1 << 28
    assert facts["cpu"]


def test_resident_memory_grows_and_shrinks_with_what_is_held() -> None:
    """By a mapping, which reuses no freed memory, in a process too small to lose half as much."""
    run_afresh(
        "import mmap, instar.record.system as system\n"
        "before, half = system.resident_bytes(), 64 << 20\n"
        "with mmap.mmap(-1, 2 * half) as held:\n"
        "    for place in range(0, len(held), mmap.PAGESIZE):\n"
        "        held[place] = 1\n"
        "    assert system.resident_bytes() - before > half\n"
        "    assert system.memory_bytes('cpu') - before > half\n"
        "assert system.resident_bytes() - before < half\n"
    )


def test_peak_flops_are_of_this_world_and_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    assert 1e8 < measure_peak_flops("cpu", torch.float32) < 1e14
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_a_gpu_is_described_and_measured() -> None:
    assert machine("cuda")["gpus"] == torch.cuda.device_count()
    assert 1e12 < measure_peak_flops("cuda", torch.bfloat16) < 1e16
    assert memory_bytes("cuda") > 0
