"""Accelerators by name: memory, peak speeds and links as their vendors publish them.

Speeds are of dense matrices; data sheets that give them with sparsity are halved. Of GeForce cards, products that are added up in
float32 count. A GB is 10⁹ bytes here, which is at most what a device reports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from instar.config.errors import ConfigError, nearest

Arithmetic = Literal["bf16", "fp16", "tf32", "fp32"]
"""In what matrices are multiplied."""
MOST_DEVICES = 2**16
_TERA, _GIGA = 1e12, 10**9


@dataclass(frozen=True)
class Accelerator:
    """A device, by its data sheet."""

    name: str
    about: str
    memory_bytes: int
    peak_flops: Mapping[Arithmetic, float]
    """dense FLOPs per second; without an entry, the device has no units for it"""
    link: str
    """by which devices of a host are connected"""
    link_bytes: float
    """bytes per second that a device sends to others of its host"""
    source: str


def _accelerator(
    name: str,
    about: str,
    memory_gb: int,
    peaks: tuple[float | None, float, float | None, float],
    link: tuple[str, float],
    source: str,
) -> Accelerator:
    """Return a row of the table; `peaks` in TFLOP/s of bf16, fp16, tf32 and fp32, `link` in GB/s of one direction."""
    kinds: tuple[Arithmetic, ...] = "bf16", "fp16", "tf32", "fp32"
    speeds = {
        kind: peak * _TERA for kind, peak in zip(kinds, peaks, strict=True) if peak is not None
    }
    return Accelerator(name, about, memory_gb * _GIGA, speeds, link[0], link[1] * _GIGA, source)


_PCIE3, _PCIE4, _PCIE5 = ("PCIe 3", 16), ("PCIe 4", 32), ("PCIe 5", 64)
_NVLINK2, _NVLINK3, _NVLINK4 = ("NVLink", 150), ("NVLink", 300), ("NVLink", 450)
_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"
_MI300 = "AMD Instinct {} data sheet"

_TABLE = (
    _accelerator(
        "B200", "SXM", 180, (2250, 2250, 1125, 75), ("NVLink", 900), "NVIDIA HGX data sheet"
    ),
    _accelerator(
        "H200", "SXM", 141, (989, 989, 494, 67), _NVLINK4, "NVIDIA H200 Tensor Core GPU data sheet"
    ),
    _accelerator("H100", "SXM", 80, (989, 989, 494, 67), _NVLINK4, _H100),
    _accelerator("H100-NVL", "PCIe", 94, (835, 835, 417, 60), _PCIE5, _H100),
    _accelerator("H100-PCIe", "PCIe", 80, (756, 756, 378, 51), _PCIE5, _H100),
    _accelerator("A100-80GB", "SXM", 80, (312, 312, 156, 19.5), _NVLINK3, _A100),
    _accelerator("A100-40GB", "SXM", 40, (312, 312, 156, 19.5), _NVLINK3, _A100),
    _accelerator("A100-80GB-PCIe", "PCIe", 80, (312, 312, 156, 19.5), _PCIE4, _A100),
    _accelerator("A100-40GB-PCIe", "PCIe", 40, (312, 312, 156, 19.5), _PCIE4, _A100),
    _accelerator("L40S", "PCIe", 48, (362, 362, 183, 91.6), _PCIE4, "NVIDIA L40S data sheet"),
    _accelerator("L4", "PCIe", 24, (121, 121, 60, 30.3), _PCIE4, "NVIDIA L4 data sheet"),
    _accelerator("A40", "PCIe", 48, (149.7, 149.7, 74.8, 37.4), _PCIE4, "NVIDIA A40 data sheet"),
    _accelerator("A10", "PCIe", 24, (125, 125, 62.5, 31.2), _PCIE4, "NVIDIA A10 data sheet"),
    _accelerator(
        "RTX-A6000", "PCIe", 48, (154.8, 154.8, 77.4, 38.7), _PCIE4, "NVIDIA RTX A6000 data sheet"
    ),
    _accelerator("T4", "PCIe", 16, (None, 65, None, 8.1), _PCIE3, "NVIDIA T4 data sheet"),
    _accelerator("V100-32GB", "SXM2", 32, (None, 125, None, 15.7), _NVLINK2, _V100),
    _accelerator("V100-16GB", "SXM2", 16, (None, 125, None, 15.7), _NVLINK2, _V100),
    _accelerator(
        "RTX-5090",
        "PCIe",
        32,
        (209.5, 209.5, 104.8, 104.8),
        _PCIE5,
        "NVIDIA RTX Blackwell GPU architecture white paper",
    ),
    _accelerator(
        "RTX-4090",
        "PCIe",
        24,
        (165.2, 165.2, 82.6, 82.6),
        _PCIE4,
        "NVIDIA Ada GPU architecture white paper",
    ),
    _accelerator("RTX-3090", "PCIe", 24, (71, 71, 35.6, 35.6), _PCIE4, _AMPERE),
    # whose units for TF32 torch leaves off
    _accelerator(
        "MI325X",
        "OAM",
        256,
        (1307, 1307, None, 163),
        ("Infinity Fabric", 448),
        _MI300.format("MI325X"),
    ),
    _accelerator(
        "MI300X",
        "OAM",
        192,
        (1307, 1307, None, 163),
        ("Infinity Fabric", 448),
        _MI300.format("MI300X"),
    ),
)
ACCELERATORS: Mapping[str, Accelerator] = {row.name: row for row in _TABLE}
_SHORT = {
    "H100SXM": "H100",
    "H10080GB": "H100",
    "H10080GBHBM3": "H100",
    "H200SXM": "H200",
    "A10040GBSXM": "A100-40GB",
    "A10080GBSXM": "A100-80GB",
    "A100SXM440GB": "A100-40GB",
    "A100SXM480GB": "A100-80GB",
    "A100PCIE40GB": "A100-40GB-PCIe",
    "V100SXM216GB": "V100-16GB",
    "V100SXM232GB": "V100-32GB",
    "A6000": "RTX-A6000",
    "3090": "RTX-3090",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
}
"""Other names of rows, also those that torch gives, as `_key` makes them."""
_HARDWARE = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?([^\s×*].*)", re.IGNORECASE)
FORM = "8xH100, H100, or 2x8xH100: 2 hosts with 8 each"


@dataclass(frozen=True)
class Hardware:
    """Hosts with equal devices."""

    hosts: int
    devices_per_host: int
    device: Accelerator

    @property
    def devices(self) -> int:
        """How many there are in all; each has a rank."""
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        """Return `8 × H100 (SXM)`, or `2 hosts × 8 × H100 (SXM)`."""
        hosts = f"{self.hosts} hosts × " if self.hosts > 1 else ""
        return f"{hosts}{self.devices_per_host} × {self.device.name} ({self.device.about})"


def parse_hardware(text: str) -> Hardware:
    """Return the hardware that `8xH100`, `H100` or `2x8xH100` names; a single number counts the devices of one host.

    Raises:
        ConfigError: there is no such device, or it has variants of different memory; names those that there are.
    """
    match = _HARDWARE.fullmatch(text.strip())
    if match is None:
        raise _error(f"{text!r} names no devices", f"write {FORM}")
    first, second, name = match[1], match[2], match[3]
    hosts, devices = (int(first or 1), int(second)) if second else (1, int(first or 1))
    if not 0 < hosts * devices <= MOST_DEVICES:
        raise _error(f"{text!r}: there are 1 to {MOST_DEVICES:,} devices", f"write {FORM}")
    return Hardware(hosts, devices, _accelerator_named(name))


def _accelerator_named(name: str) -> Accelerator:
    """Return the row of a name, in whatever spelling; see `parse_hardware`."""
    key, rows = _key(name), {_key(row.name): row for row in _TABLE}
    row = rows.get(key) or ACCELERATORS.get(_SHORT.get(key, ""))
    if row is not None:
        return row
    variants = [row.name for k, row in rows.items() if key and k.startswith(key)]
    if len(variants) > 1:
        raise _error(f"{name} may be {' or '.join(variants)}", "say which")
    near = nearest(key, [*rows, *_SHORT], 0.5)
    hint = f"there are {', '.join(ACCELERATORS)}"
    if near is not None:
        similar = rows[near].name if near in rows else _SHORT[near]
        hint = f"did you mean {similar}? {hint[0].upper()}{hint[1:]}"
    raise _error(f"no data of a device {name!r}", hint)


def _key(name: str) -> str:
    return re.sub(r"nvidia|amd|geforce|tesla|instinct|[^a-z0-9]", "", name.lower()).upper()


def _error(message: str, hint: str) -> ConfigError:
    return ConfigError.of(message, where="--on", hint=hint)
