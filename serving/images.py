"""From bytes to an RGB picture.

Owns what counts as an image and how large it may be. Knows no model and no network. Invariant:
bytes from outside either become an upright RGB image within the limits or raise `InvalidRequest`
naming the parameter.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass, fields

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from workers.errors import ConfigError, InvalidRequest

# Formats with a decoder in Pillow itself; others (EPS, PDF, ...) would start programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_PREFIX = "data:"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a request may bring."""

    max_images: int = 16
    # Encoded, after base64.
    max_bytes: int = 20 * 1024**2
    # Width times height, before any resizing.
    max_pixels: int = 50_000_000
    # Of all images of a request together.
    max_total_pixels: int = 100_000_000

    def __post_init__(self) -> None:
        """Check the ranges."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value < 1:
                raise ConfigError(f"ingress.images.{limit.name}", value, "must be at least 1")


def load_image(
    source: str | bytes, param: str, limits: ImageLimits, used_pixels: int = 0
) -> Image.Image:
    """Return a picture.

    Args:
        source: A `data:` URL, or the bytes behind another one.
        param: Where it stands, for errors.
        limits: What the request may bring.
        used_pixels: Pixels of the request's images before this one.

    Raises:
        InvalidRequest: It is no picture, is damaged or too large.
    """
    data = _decode_url(source, param) if isinstance(source, str) else source
    if not data:
        raise InvalidRequest(f"{param}: the image is empty", param)
    if len(data) > limits.max_bytes:
        raise InvalidRequest(
            f"{param}: the image has {len(data)} bytes; at most {limits.max_bytes} are accepted",
            param,
        )
    try:
        # Not closed: it holds nothing but memory, and may itself be what is returned.
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        # Only the header was read so far: a decompression bomb ends here.
        _check_pixels(image, param, limits, used_pixels)
        image.load()
        return _upright_rgb(image)
    except InvalidRequest:
        raise
    # Boundary: decoders raise whatever they stumble over in damaged bytes (OSError, SyntaxError,
    # ValueError, struct.error, zlib.error, DecompressionBombError, ...): all mean a bad image.
    except Exception as error:
        accepted = ", ".join(FORMATS)
        raise InvalidRequest(
            f"{param}: not a readable image ({accepted} are accepted): {_reason(error)}", param
        ) from error


def is_data_url(url: str) -> bool:
    """Whether a URL holds the image itself."""
    return url[: len(_DATA_PREFIX)].lower() == _DATA_PREFIX


def _decode_url(url: str, param: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise InvalidRequest(f"{param}: the data: URL has no comma before its data", param)
    if not header.lower().endswith(";base64"):
        raise InvalidRequest(f"{param}: the data: URL must be base64", param)
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param}: invalid base64: {error}", param) from error


def _check_pixels(image: Image.Image, param: str, limits: ImageLimits, used_pixels: int) -> None:
    num_pixels = image.width * image.height
    if num_pixels > limits.max_pixels:
        raise InvalidRequest(
            f"{param}: the image has {image.width}x{image.height} pixels; "
            f"at most {limits.max_pixels} are accepted",
            param,
        )
    if used_pixels + num_pixels > limits.max_total_pixels:
        raise InvalidRequest(
            f"{param}: the request's images have {used_pixels + num_pixels} pixels up to this one; "
            f"at most {limits.max_total_pixels} are accepted",
            param,
        )


def _upright_rgb(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation and lay transparency on white; of an animation, frame one.

    Changes `image`, and copies only what has to change its mode.
    """
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    layered = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", layered.size, "white")
    white.paste(layered, mask=layered)
    return white


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Scale grey to 8 bits, its transparent value laid on white; Pillow would cut at 255."""
    levels = np.asarray(image).clip(0, 0xFFFF)
    grey = (levels >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[levels == transparent] = 255
    return Image.fromarray(grey)


def _reason(error: Exception) -> str:
    # Pillow's message for unknown bytes names a Python object, which tells a client nothing.
    return "unknown format" if isinstance(error, UnidentifiedImageError) else str(error)
