"""The example of GRPO on a laptop: a real server of a tiny model, and a real training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fleets import FleetPlace, first_port
from forks import forks_for_grpo

from instar.extensions.delta.format.folder import links
from instar.extensions.fleet.state import ProcessChanged, read_fleet_events
from instar.record.events import RunStarted, Train
from instar.record.events import read_events as read_record


@pytest.fixture
def place(tmp_path: Path) -> FleetPlace:
    return FleetPlace(tmp_path, first_port())


EXAMPLE = Path(__file__).parents[3] / "examples/fleet/grpo-cpu.yaml"
STEPS = 30


@pytest.mark.torture
@pytest.mark.timeout(400)
def test_a_server_killed_mid_run_is_restarted_with_its_training_which_goes_on(
    place: FleetPlace,
) -> None:
    sets = [f"first_port={place.first_port}", f"vars.max_steps={STEPS}"]
    example = place.path / EXAMPLE.name
    # spares each of four processes the ten seconds in which it imports TRL
    example.write_text(EXAMPLE.read_text().replace("python -m", f"{forks_for_grpo().python} -m"))
    up = place.start("up", example, "--only", "0", *(w for each in sets for w in ("--set", each)))
    record = place.path / "outputs/trl_arithmetic_instance0_seed42/events.jsonl"

    def has_saved(_: dict[str, Any]) -> bool:
        return b'"kind":"checkpoint"' in record.read_bytes()

    found = place.wait("grpo-cpu", has_saved, timeout_s=200)
    os.kill(found["instances"]["0"]["processes"]["server"]["pid"], signal.SIGKILL)
    killed_at = time.time()
    output, _ = up.communicate(timeout=200)
    assert up.returncode == 0, output
    assert not place.living_pids()

    changes = [
        each
        for each in read_fleet_events(place.path / "fleets/grpo-cpu")
        if isinstance(each, ProcessChanged)
    ]
    noticed = next(each for each in changes if each.process == "server" and each.phase == "exited")
    assert noticed.time - killed_at < 1.0
    started = [each.process for each in changes if each.phase == "starting"]
    assert started == ["server", "training"] * 2

    events = [*read_record(record)]
    first, second = (each.step for each in events if isinstance(each, RunStarted))
    assert first == 0
    assert second >= 10
    assert [each.step for each in events if isinstance(each, Train)][-1] == STEPS
    deltas = links(place.path / "checkpoints/deltas_arithmetic_instance0_seed42")
    assert deltas[-1].step == STEPS
