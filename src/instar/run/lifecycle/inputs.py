"""Compares the inputs of all ranks at start-up: data, tokenizer, config and versions."""

from __future__ import annotations

import dataclasses
import json
from typing import cast

import torch
import xxhash

from instar.config.checks import sharding_conflicts
from instar.config.load import Loaded
from instar.distributed.agree import gather, raise_on_all_ranks
from instar.distributed.failure import RunFailed
from instar.distributed.world import World
from instar.record.system import gpu_bytes, has_bf16_units, host_bytes, versions
from instar.run.lifecycle.preflight import Prepared, sharding_problems

_LOCAL = {"device", "parallel", "record"}
"""sections that may differ between machines"""
_SHARE = 0.9
"""Share of a device's memory that the forecast of a step may take: it leaves out the allocator's."""
_VERSIONS = ("instar", "torch")


def compare_inputs(prepared: Prepared, world: World) -> None:
    """Check that all ranks have the same inputs. A collective.

    The fingerprint of samples in memory is a hash of all their bytes (a few GB/s); that of files
    was computed when they were prepared.

    Raises:
        RunFailed: on all ranks, if inputs differ; names the ranks and what differs.
    """
    if world.size == 1:
        return
    own: dict[str, str] = {}
    with raise_on_all_ranks(world, "comparing the ranks' inputs"):
        config = prepared.config.model_dump(mode="json", exclude=_LOCAL)
        own = {
            f"the config's {key}": xxhash.xxh3_128_hexdigest(
                json.dumps(value, sort_keys=True).encode()
            )
            for key, value in config.items()
        }
        # no other key of the section needs to be the same on all machines
        for key in ("strategy", "fsdp"):
            value = json.dumps(prepared.config.parallel.model_dump(mode="json")[key])
            own[f"the config's parallel.{key}"] = value
        installed = versions()
        own |= {f"the version of {name}": installed.get(name, "none") for name in _VERSIONS}
        for name, found in prepared.spec.fingerprints.items():
            own[f"the {name}"] = found
    digest = xxhash.xxh3_128_hexdigest(json.dumps(own, sort_keys=True).encode())
    digests = gather(world, digest)
    if all(one == digests[0] for one in digests):
        return
    everyones = cast(list[dict[str, str]], gather(world, own))
    differences = []
    for key, first in everyones[0].items():
        others = [rank for rank, one in enumerate(everyones) if one.get(key) != first]
        if others:
            ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
            differences.append(
                f"{key} of {ranks} ({everyones[others[0]].get(key)}; rank 0's {first})"
            )
    seed = any(one["the data"] != everyones[0]["the data"] for one in everyones)
    hint = "; samples() must give the same in every process: seed it with self.seed" if seed else ""
    raise RunFailed(f"ranks would train on different inputs: {'; '.join(differences)}{hint}")


def resolve_precision(prepared: Prepared, world: World) -> Prepared:
    """Resolve `precision: auto`: bf16 if every rank's device has bf16 units. A collective.

    A resumed run keeps its precision on any machine: its config no longer contains `auto`.
    """
    config = prepared.config
    if config.precision != "auto":
        return prepared
    pays = config.prefers_bf16 and all(gather(world, _has_bf16(world.device)))
    chosen = "bf16" if pays else "fp32"
    config = config.model_copy(update={"precision": chosen})
    return dataclasses.replace(prepared, config=config)


def resolve_strategy(loaded: Loaded, prepared: Prepared, world: World) -> Loaded:
    """Resolve `parallel.strategy: auto`: ddp if a step's memory fits on every rank's device, or where
    nothing else is possible, else fsdp. A collective."""
    config = loaded.config
    if config.parallel.strategy != "auto":
        return loaded
    needed = max(sum(stage.memory_bytes.values()) for stage in prepared.forecast.stages)
    on_host = cast(list[int], gather(world, world.local_rank))
    available = gpu_bytes(world.device) or host_bytes() // (max(on_host) + 1)
    fits = all(gather(world, needed <= _SHARE * available))

    def with_strategy(strategy: str) -> Loaded:
        parallel = config.parallel.model_copy(update={"strategy": strategy})
        return dataclasses.replace(loaded, config=config.model_copy(update={"parallel": parallel}))

    sharded = with_strategy("fsdp")
    possible = not [
        *sharding_conflicts(sharded.config),
        *sharding_problems(sharded, prepared.forecast, world.size),
    ]
    return sharded if possible and not fits and world.size > 1 else with_strategy("ddp")


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bf16_units()
