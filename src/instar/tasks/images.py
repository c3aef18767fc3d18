"""Images that user code logs: arrays in the usual layouts, of PIL and of matplotlib, as bytes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from instar.models.loss import at_least_float32

Pixels = NDArray[np.uint8]
"""[height, width, channels], of which there are 1, 3 or 4"""
LARGEST_SIDE = 2048
"""pixels of an image in each direction"""
_CHANNELS = (1, 3, 4)
_PLAIN_MODES = ("1", "L", "RGB", "RGBA")
"""of PIL, whose pixels are colors"""


def to_pixels(name: str, image: object) -> Pixels:
    """Convert to bytes: floats from 0 to 1 are scaled and clipped, NaN becomes 0.

    Args:
        image: a tensor or an array, [height, width], [height, width, channels] or [channels, height, width], where
            both fit with channels last; an image of PIL; or a figure of matplotlib, drawn with its own size and dpi.

    Raises:
        ValueError: this is no image, or it is too large.
    """
    array = _channels_last(name, _as_array(image))
    if max(array.shape) > LARGEST_SIDE:
        raise ValueError(
            f"log_image({name!r}): {array.shape[1]} × {array.shape[0]} pixels are more than "
            f"{LARGEST_SIDE} in one direction; log a smaller image"
        )
    if array.dtype.kind == "f":
        array = np.rint(255 * np.clip(np.nan_to_num(array, nan=0.0), 0, 1))
    elif array.dtype.kind == "b":
        array = array * 255
    elif array.dtype != np.uint8:
        raise ValueError(
            f"log_image({name!r}): values are uint8, or floats from 0 to 1, not {array.dtype}"
        )
    return np.ascontiguousarray(array.astype(np.uint8))


def _as_array(image: Any) -> NDArray[Any]:
    if isinstance(image, Tensor):
        return np.asarray(at_least_float32(image.detach()).cpu())
    if hasattr(image, "savefig") and hasattr(image, "canvas"):
        return _drawn(image)
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        # pixels of other modes are numbers of colors, or other colors than red, green and blue
        return np.asarray(image if image.mode in _PLAIN_MODES else image.convert("RGBA"))
    return np.asarray(image)


def _drawn(figure: Any) -> NDArray[Any]:
    """Draw a figure of matplotlib, without the window that it may have."""
    canvas = figure.canvas
    if hasattr(canvas, "buffer_rgba"):
        canvas.draw()
        return np.array(canvas.buffer_rgba())
    # most runs draw none
    drawing = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    try:
        drawing.draw()
        return np.array(drawing.buffer_rgba())
    finally:
        figure.set_canvas(canvas)


def _channels_last(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an image as [height, width, channels]. Raises ValueError if it has another number of axes or channels."""
    if array.ndim == 2 and array.size:
        return array[:, :, None]
    if array.ndim == 3 and array.size:
        if array.shape[2] in _CHANNELS:
            return array
        if array.shape[0] in _CHANNELS:
            return np.moveaxis(array, 0, 2)
    raise ValueError(
        f"log_image({name!r}): an image is [height, width], [height, width, channels] or [channels, height, width] "
        f"with 1, 3 or 4 channels, an image of PIL or a figure of matplotlib, not {_form_text(array)}"
    )


def _form_text(array: NDArray[Any]) -> str:
    if array.dtype == object:
        return "an object of another kind"
    hint = ": take one of the batch, e.g. images[0]" if array.ndim == 4 else ""
    return f"{list(array.shape)}{hint}"
