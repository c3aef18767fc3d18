"""Compares the inputs of all ranks at start-up: data, tokenizer, config, versions, and the run's folder."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import cast

import torch
import xxhash

from instar.config.checks import extension_conflicts
from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.config.sections import RecordConfig
from instar.distributed.agree import agree, gather, raise_on_all_ranks
from instar.distributed.failure import RunFailed
from instar.distributed.world import World
from instar.record.atomic import TMP
from instar.record.device import gpu_bytes, measure_bf16_gain
from instar.record.format import bytes_text
from instar.record.rundir import RunDir, folder_key
from instar.record.system import has_bf16_units, host_bytes, versions
from instar.run.start.preflight import Prepared, sharding_problems
from instar.schedule.memory import FORECAST_SHARE

_LOCAL = {"device", "parallel", "record"}
"""sections that may differ between machines"""
_JOINT = {
    "parallel": ("strategy", "ddp", "fsdp", "diloco", "elastic"),
    "record": (
        "log_interval",
        "analyze_every",
        "layers_every",
        "noise_every",
        "sample_every",
        "sample_prompt",
        "sample_tokens",
    ),
}
"""keys of those sections that decide when ranks wait for each other, and for what"""
_VERSIONS = ("instar", "torch")
_BF16_GAIN = 1.4
"""What bf16 matrix products must gain for casts and slower kernels around them to pay. On a Xeon they take a fifth of
the time with AMX and twice the time with AVX-512 BF16 alone."""
_VISIBLE_S = 5.0
"""Longest wait until a file that rank 0 has made is seen on another host, in seconds."""


def check_folder_is_shared(run: RunDir | None, record: RecordConfig, world: World) -> None:
    """Check that all hosts have one folder for the run, where each rank writes its part. A collective.

    Rank 0 makes a file in the folder, or in its nearest parent that exists, and the others look for it.

    Args:
        run: a run to resume; None: `record` says where the run will be.

    Raises:
        ConfigError: on all ranks; names the hosts, and their ranks, that do not see the file.
    """
    if world.size == 1:
        return
    folder = run.path if run else Path(record.run_dir or record.out_dir)
    with _probe(folder) if world.is_main else nullcontext("") as probe:
        name = str(agree(world, probe))
        unseeing_hosts = gather(world, None if _sees(name) else socket.gethostname())
    unseen: dict[str, list[str]] = {}
    for rank, host in enumerate(unseeing_hosts):
        if host is not None:
            unseen.setdefault(str(host), []).append(str(rank))
    if not unseen:
        return
    path, main_host = cast(list[str], agree(world, [str(folder.absolute()), socket.gethostname()]))
    hosts = "; ".join(f"host {host} (rank {', '.join(of)})" for host, of in unseen.items())
    raise ConfigError.of(
        f"what rank 0 on host {main_host} writes in {path} is not seen by {hosts}",
        where=folder_key(record),
        hint="all ranks write checkpoints and logs there, and read them at a resume: choose a folder on a "
        "file system that all hosts mount at the same path, such as NFS",
    )


@contextmanager
def _probe(folder: Path) -> Iterator[str]:
    """Make a file while the body runs, and yield its name: "" if that is impossible, which creating the
    run's folder reports better."""
    existing = next(
        folder_or_parent
        for folder_or_parent in (folder, *folder.parents)
        if folder_or_parent.is_dir()
    )
    with ExitStack() as stack:
        name = ""
        with suppress(OSError):
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=TMP, dir=existing))
            name = str(existing / Path(file.name).name)
        yield name


def _sees(name: str) -> bool:
    deadline = time.monotonic() + _VISIBLE_S
    while name and not Path(name).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def compare_inputs(prepared_run: Prepared, world: World) -> None:
    """Check that all ranks have the same inputs. A collective.

    The fingerprint of samples in memory is a hash of all their bytes (a few GB/s); that of files
    was computed when they were prepared.

    Raises:
        RunFailed: on all ranks, if inputs differ; names the ranks and what differs.
    """
    if world.size == 1:
        return
    facts: dict[str, str] = {}
    with raise_on_all_ranks(world, "comparing the ranks' inputs"):
        facts = _facts_of(prepared_run.config)
        installed_versions = versions()
        facts |= {
            f"the version of {name}": installed_versions.get(name, "none") for name in _VERSIONS
        }
        for name, fingerprint in prepared_run.spec.fingerprints.items():
            facts[f"the {name}"] = fingerprint
    _compare(facts, world)


def compare_configs(config: RunConfig, world: World) -> None:
    """Check that all ranks have the same config, before what it says decides what they do together. A collective.

    Raises:
        RunFailed: on all ranks, if the configs differ; names the ranks and the keys.
    """
    if world.size == 1:
        return
    facts: dict[str, str] = {}
    with raise_on_all_ranks(world, "comparing the ranks' configs"):
        facts = _facts_of(config)
    _compare(facts, world)


def _facts_of(config: RunConfig) -> dict[str, str]:
    values = config.model_dump(mode="json")
    facts = {
        f"the config's {key}": xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
        for key, value in values.items()
        if key not in _LOCAL
    }
    for section, keys in _JOINT.items():
        for key in keys:
            facts[f"the config's {section}.{key}"] = json.dumps(values[section][key])
    return facts


def _compare(facts: Mapping[str, str], world: World) -> None:
    digest = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
    digests = gather(world, digest)
    if all(other_digest == digests[0] for other_digest in digests):
        return
    everyones = cast(list[dict[str, str]], gather(world, facts))
    differences = []
    for key, first in everyones[0].items():
        differing_ranks = [
            rank for rank, other_facts in enumerate(everyones) if other_facts.get(key) != first
        ]
        if differing_ranks:
            ranks = f"rank{'s' if len(differing_ranks) > 1 else ''} {', '.join(map(str, differing_ranks))}"
            differences.append(
                f"{key} of {ranks} ({everyones[differing_ranks[0]].get(key)}; rank 0's {first})"
            )
    seed = any(
        other_facts.get("the data") != everyones[0].get("the data") for other_facts in everyones
    )
    hint = "; samples() must give the same in every process: seed it with self.seed" if seed else ""
    raise RunFailed(f"ranks would train on different inputs: {'; '.join(differences)}{hint}")


def resolve_precision(prepared_run: Prepared, world: World) -> tuple[Prepared, str]:
    """Resolve `precision: auto`, and return also why: bf16 if it is faster on every rank's device. A
    collective.

    CPUs with bf16 units differ in whether these are faster than those for float32, so it is measured.
    A resumed run keeps its precision on any machine: its config no longer contains `auto`.
    """
    config = prepared_run.config
    if config.precision != "auto":
        return prepared_run, ""
    reason, gain = prepared_run.spec.fp32_reason(world.device.type), 0.0
    if not reason:
        gain = bf16_gain(world.device)
        reason = "" if is_bf16_faster(gain) else f"{_gain_text(world.device, gain)} here"
    reasons = [
        f"{text}{f' (rank {rank})' if world.size > 1 else ''}"
        for rank, text in enumerate(cast(list[str], gather(world, reason)))
        if text
    ]
    precision = "fp32" if reasons else "bf16"
    config = config.model_copy(update={"precision": precision})
    with_precision = dataclasses.replace(prepared_run, config=config)
    return with_precision, reasons[0] if reasons else _gain_text(world.device, gain)


def bf16_gain(device: torch.device) -> float:
    """Return how many times as fast as float32 matrices a device multiplies those of bf16; 0 if not in
    hardware. On a GPU it is not measured, and infinite."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return math.inf if torch.cuda.is_bf16_supported(including_emulation=False) else 0.0
    return measure_bf16_gain() if has_bf16_units() else 0.0


def is_bf16_faster(gain: float) -> bool:
    """Return whether products in bf16 gain enough for a step in bf16 to be faster, unless its products are small."""
    return gain >= _BF16_GAIN


def _gain_text(device: torch.device, gain: float) -> str:
    if device.type == "cuda":
        return f"the GPU has {'bf16' if gain else 'no bf16'} units"
    return f"bf16 matrix products are {gain:.1f} times as fast as in fp32"


def resolve_strategy(loaded_config: Loaded, prepared_run: Prepared, world: World) -> Loaded:
    """Resolve `parallel.strategy: auto`: ddp if the run's peak fits on every rank's device, or where
    nothing else is possible, else fsdp. A collective.

    Raises:
        ConfigError: neither fits.
    """
    config, forecast = loaded_config.config, prepared_run.forecast
    if config.parallel.strategy != "auto":
        return loaded_config
    on_host = cast(list[int], gather(world, world.local_rank))
    memory_bytes = gpu_bytes(world.device) or host_bytes() // (max(on_host) + 1)
    available = min(cast(list[int], gather(world, memory_bytes)))

    def with_strategy(strategy: str) -> Loaded:
        parallel = config.parallel.model_copy(update={"strategy": strategy})
        return dataclasses.replace(
            loaded_config, config=config.model_copy(update={"parallel": parallel})
        )

    if world.size == 1 or forecast.peak_bytes("ddp") <= FORECAST_SHARE * available:
        return with_strategy("ddp")
    with_fsdp = with_strategy("fsdp")
    conflicts = [
        *extension_conflicts(with_fsdp.config),
        *sharding_problems(
            with_fsdp, prepared_run.spec, forecast.stages[0].architecture, world.size
        ),
    ]
    bytes_by_strategy = {
        name: memory.kept_bytes for name, memory in forecast.stages[0].memory.items()
    }
    if bytes_by_strategy["ddp" if conflicts else "fsdp"] > available:
        why = f"; fsdp is not possible: {conflicts[0].message}" if conflicts else ""
        raise ConfigError(
            loaded_config.problem(
                "parallel.strategy",
                "parallel.strategy auto: no strategy fits: weights, gradients and optimizer need "
                f"{bytes_text(bytes_by_strategy['ddp'])} on a rank with ddp, {bytes_text(bytes_by_strategy['fsdp'])} with fsdp "
                f"over {world.size} ranks, and the smallest device has {bytes_text(available)}{why}",
                "use more ranks, or make the model smaller",
            )
        )
    return with_strategy("ddp") if conflicts else with_fsdp
