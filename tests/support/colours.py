"""How far apart colours look, to eyes with and without a deficiency.

Deficiencies are simulated by the matrices of Machado, Oliveira and Fernandes (2009), severity 1, on linear
RGB; distances are ΔE of CIEDE2000 (Sharma, Wu and Dalal 2005).
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np

VISIONS = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.01182, 0.04294, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}


def linear(colour: str) -> Any:
    """`#rrggbb` as linear RGB, [3]."""
    srgb = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: Any) -> Any:
    """CIELAB under D65 of linear RGB, [3]."""
    to_xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.072175],
            [0.0193339, 0.119192, 0.9503041],
        ]
    )
    ratio = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def delta_e(first: Any, second: Any) -> float:
    """CIEDE2000 of two colours in CIELAB."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean_c = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean_c**7 / (mean_c**7 + 25**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    difference = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(difference) / 2)
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    mean_h = h1 + h2 if c1 * c2 == 0 else (h1 + difference / 2) % 360
    t = (
        1
        - 0.17 * math.cos(math.radians(mean_h - 30))
        + 0.24 * math.cos(math.radians(2 * mean_h))
        + 0.32 * math.cos(math.radians(3 * mean_h + 6))
        - 0.2 * math.cos(math.radians(4 * mean_h - 63))
    )
    turn = 30 * math.exp(-(((mean_h - 275) / 25) ** 2))
    rotation = -2 * math.sqrt(mean_c**7 / (mean_c**7 + 25**7)) * math.sin(math.radians(2 * turn))
    light = (l2 - l1) / (1 + 0.015 * (mean_l - 50) ** 2 / math.sqrt(20 + (mean_l - 50) ** 2))
    chroma, hue = (c2 - c1) / (1 + 0.045 * mean_c), hue / (1 + 0.015 * mean_c * t)
    return math.sqrt(light**2 + chroma**2 + hue**2 + rotation * chroma * hue)


def closest(colours: list[str], vision: str) -> float:
    """The smallest distance of two of the colours."""
    points = [lab(VISIONS[vision] @ linear(colour)) for colour in colours]
    return min(delta_e(first, second) for first, second in combinations(points, 2))


def contrast(colour: str, background: str) -> float:
    """WCAG's ratio of luminances."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    lighter, darker = sorted(
        (float(weights @ linear(shade)) for shade in (colour, background)), reverse=True
    )
    return (lighter + 0.05) / (darker + 0.05)
