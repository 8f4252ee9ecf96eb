"""From a `data:` URL to an RGB picture.

Owns what counts as an image and how large it may be. Knows no model. Invariant: bytes from
outside either become an upright RGB image within the limits or raise `InvalidRequest` naming the
parameter; nothing here fetches anything.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError

from serving.errors import UnsupportedParameter
from workers.errors import InvalidRequest

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


def load_image(url: str, param: str, limits: ImageLimits) -> Image.Image:
    """Return the picture behind a `data:` URL.

    Raises:
        InvalidRequest: It is no picture, is damaged or too large.
    """
    data = _decode_url(url, param)
    if len(data) > limits.max_bytes:
        raise InvalidRequest(
            f"{param}: the image has {len(data)} bytes; at most {limits.max_bytes} are accepted",
            param,
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            num_pixels = image.width * image.height
            # Only the header was read so far: a decompression bomb ends here.
            if num_pixels > limits.max_pixels:
                raise InvalidRequest(
                    f"{param}: the image has {image.width}x{image.height} pixels; "
                    f"at most {limits.max_pixels} are accepted",
                    param,
                )
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


def _decode_url(url: str, param: str) -> bytes:
    if url[: len(_DATA_PREFIX)].lower() != _DATA_PREFIX:
        raise UnsupportedParameter(
            f"{param}: only data: URLs are supported (data:image/png;base64,...)", param
        )
    header, comma, payload = url.partition(",")
    if not comma:
        raise InvalidRequest(f"{param}: the data: URL has no comma before its data", param)
    if not header.lower().endswith(";base64"):
        raise InvalidRequest(f"{param}: the data: URL must be base64", param)
    try:
        data = base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param}: invalid base64: {error}", param) from error
    if not data:
        raise InvalidRequest(f"{param}: the image is empty", param)
    return data


def _upright_rgb(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation and lay transparency on white; of an animation, frame one."""
    upright = ImageOps.exif_transpose(image)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    layered = upright.convert("RGBA")
    white = Image.new("RGBA", layered.size, "white")
    return Image.alpha_composite(white, layered).convert("RGB")


def _reason(error: Exception) -> str:
    # Pillow's message for unknown bytes names a Python object, which tells a client nothing.
    return "unknown format" if isinstance(error, UnidentifiedImageError) else str(error)
