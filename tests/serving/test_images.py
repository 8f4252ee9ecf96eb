"""Bytes from outside become an upright RGB image or a 400 that names the parameter (C10, C12)."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from serving.images import ImageLimits, load_image
from tests.serving.doubles import data_url, make_processor, picture
from workers.errors import ConfigError, InvalidRequest

PARAM = "messages[0].content[1].image_url"
LIMITS = ImageLimits()


def as_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def encoded(image: Image.Image, file_format: str) -> bytes:
    return base64.b64decode(data_url(image, file_format).partition(",")[2])


def bomb() -> bytes:
    """A PNG header that claims 60000 x 60000 pixels."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    crc = struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + crc


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
BAD = {
    "empty": "data:image/png;base64,",
    "no comma": "data:image/png;base64",
    "not base64": "data:image/png,abc",
    "bad characters": "data:image/png;base64,@@@@",
    "bad padding": "data:image/png;base64,iVBORw0KGgo",
    "text": as_url(b"hello, this is text"),
    "svg": as_url(SVG, "image/svg+xml"),
    "truncated jpeg": as_url(encoded(picture(200, 200), "JPEG")[:-128]),
    "truncated png": as_url(encoded(picture(200, 200), "PNG")[:-40]),
    "header only": as_url(encoded(picture(), "PNG")[:20]),
    "bomb": as_url(bomb()),
    "eps": as_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
}


@pytest.mark.parametrize("name", BAD)
def test_c10_bad_images_name_their_parameter(name: str) -> None:
    """C10: a damaged image is the client's error, never a 500."""
    with pytest.raises(InvalidRequest) as caught:
        load_image(BAD[name], PARAM, LIMITS)
    assert caught.value.param == PARAM
    assert "<" not in str(caught.value)


def test_c12_limits() -> None:
    url = data_url(picture(100, 100))
    for limits in (ImageLimits(max_bytes=50), ImageLimits(max_pixels=9999)):
        with pytest.raises(InvalidRequest, match="at most"):
            load_image(url, PARAM, limits)
    assert load_image(url, PARAM, ImageLimits(max_pixels=10000)).size == (100, 100)


def test_the_images_of_a_request_share_a_limit() -> None:
    """Sixteen pictures below the limit of one could hold gigabytes."""
    url, limits = data_url(picture(100, 100)), ImageLimits(max_total_pixels=25_000)
    assert load_image(url, PARAM, limits, used_pixels=15_000).size == (100, 100)
    with pytest.raises(InvalidRequest, match="at most 25000") as caught:
        load_image(url, PARAM, limits, used_pixels=15_001)
    assert caught.value.param == PARAM


@pytest.mark.parametrize("key", ["max_images", "max_bytes", "max_pixels", "max_total_pixels"])
def test_limits_are_positive(key: str) -> None:
    """A limit of zero would refuse every image with a message about the client's."""
    with pytest.raises(ConfigError, match=f"ingress.images.{key}"):
        ImageLimits(**{key: 0})


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(file_format: str) -> None:
    image = load_image(data_url(picture(color="blue"), file_format), PARAM, LIMITS)
    assert (image.mode, image.size) == ("RGB", (60, 40))
    red, green, blue = image.getpixel((30, 20))
    assert blue > 200
    assert red < 60
    assert green < 60


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "I;16", "CMYK"])
def test_modes(mode: str) -> None:
    source = (
        Image.new("RGBA", (20, 20), (255, 0, 0, 0)) if mode == "P" else Image.new(mode, (20, 20))
    )
    file_format = "JPEG" if mode == "CMYK" else "PNG"
    if mode == "P":
        source = source.quantize(8)
    assert load_image(data_url(source, file_format), PARAM, LIMITS).mode == "RGB"


def test_transparency_lies_on_white() -> None:
    clear = Image.new("RGBA", (10, 10), (255, 0, 0, 0))
    assert load_image(data_url(clear), PARAM, LIMITS).getpixel((5, 5)) == (255, 255, 255)


@pytest.mark.parametrize("alpha", [0, 1, 100, 128, 254, 255])
def test_transparency_is_mixed(alpha: int) -> None:
    """Laying it on white without a full-size copy must give the same colours."""
    image = load_image(data_url(Image.new("RGBA", (4, 4), (10, 100, 200, alpha))), PARAM, LIMITS)
    mixed = [255 + (c - 255) * alpha / 255 for c in (10, 100, 200)]
    assert image.getpixel((1, 1)) == pytest.approx(mixed, abs=1)


def ramp() -> np.ndarray:
    return (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)


def test_16_bit_grey_is_scaled() -> None:
    """Pillow cuts levels at 255: all but the darkest would be white."""
    image = load_image(data_url(Image.fromarray(ramp())), PARAM, LIMITS)
    assert image.mode == "RGB"
    for channel in np.moveaxis(np.asarray(image), -1, 0):
        assert channel.tolist() == np.arange(256).reshape(16, 16).tolist()


def test_16_bit_grey_with_a_transparent_level() -> None:
    """The level is one of 16 bits: compared with 8, another grey or none would be cleared."""
    url = data_url(Image.fromarray(ramp()), transparency=257 * 100)
    levels = np.asarray(load_image(url, PARAM, LIMITS))[..., 0].ravel().tolist()
    assert levels == [255 if level == 100 else level for level in range(256)]


def test_exif_orientation_of_16_bit_grey_is_applied() -> None:
    """Scaling makes a new picture, which has no orientation to apply any more."""
    exif = Image.Exif()
    exif[0x0112] = 3  # rotate by 180 degrees to show
    image = load_image(data_url(Image.fromarray(ramp()), exif=exif), PARAM, LIMITS)
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show
    url = data_url(picture(60, 40), "JPEG", exif=exif)
    assert load_image(url, PARAM, LIMITS).size == (40, 60)


def test_first_frame_of_an_animation() -> None:
    frames = [picture(color="red"), picture(color="blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    image = load_image(as_url(buffer.getvalue(), "image/gif"), PARAM, LIMITS)
    assert image.getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.parametrize(
    "size", [(1, 1), (26, 28), (332, 27), (305, 30), (31, 305), (28, 28), (27, 300), (3000, 2500)]
)
def test_c12_any_size_is_processed(size: tuple[int, int]) -> None:
    """C12: small, odd and large sizes are resized as the processor says."""
    result = make_processor().process(picture(*size), PARAM)
    t, h, w = result.grid_thw
    assert result.pixel_values.shape == (t * h * w, 3 * 2 * 14 * 14)
    assert result.pixel_values.dtype.name == "float32"
    assert result.num_tokens == t * h * w // 4


def test_c12_a_shape_the_model_refuses_is_a_400() -> None:
    with pytest.raises(InvalidRequest, match="aspect ratio") as caught:
        make_processor().process(picture(2010, 10), PARAM)
    assert caught.value.param == PARAM


def test_the_hash_covers_pixels() -> None:
    """A14: the key is the pixels' own hash, not the placeholder ids."""
    red, blue = picture(color="red"), picture(color="blue")
    hashes = [make_processor().process(i, PARAM).content_hash for i in (red, red.copy(), blue)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert len(hashes[0]) == 32
