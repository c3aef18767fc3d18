"""Compares the inputs of all ranks at start-up: data, tokenizer, config and versions."""

from __future__ import annotations

import dataclasses
import json
from typing import cast

import torch
import xxhash

from instar.distributed.agree import gather, raise_on_all_ranks
from instar.distributed.failure import RunFailed
from instar.distributed.world import World
from instar.record.system import has_bf16_units, versions
from instar.run.lifecycle.preflight import Prepared

_LOCAL = {"device", "parallel", "record"}
"""sections that may differ between machines"""
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


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bf16_units()
