"""Bytes to pixels: any picture file as RGB, by stated policies, and never an exception but InvalidImage.

| matter            | policy (version 2)                                                                             |
|-------------------|------------------------------------------------------------------------------------------------|
| what it is        | read from the content: JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF                                   |
| too large         | refused from the header, before anything is decoded                                            |
| EXIF orientation  | applied, all eight (a setting); EXIF that cannot be read counts as upright                     |
| transparency      | composited on a background, white unless set: alpha bands, palette entries, tRNS colours       |
| animation, pages  | the first frame                                                                                |
| palette, 1 bit    | converted to RGB here, so before any resizing                                                  |
| grey              | repeated to RGB                                                                                |
| 16 bits a sample  | the high byte is kept, for grey as for colour: scaled, never clipped; so for 12 bits           |
| floats, 32 bits   | refused: no defined white                                                                      |
| CMYK, YCCK        | by Adobe's marker (with it, ink is stored inverted), without colour management                 |
| colour profiles   | ignored, as are PNG gamma and chromaticities                                                   |
| large JPEGs       | whole; at a reduced scale by the preprocess mode `reduced` alone                               |
| truncated         | refused; with `allow_truncated` what is missing is grey (JPEG), black or background (others)   |
| damaged           | a JPEG with broken data is refused too; one that lacks just its end marker is whole (one scan) |

The oracles are Pillow's pixels, and transformers' conversion to RGB for transparency. Imports no torch; thread-safe;
sets no process-wide option of Pillow. libjpeg-turbo's and Pillow's readers run without the GIL.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image

from encoder.errors import InvalidImage
from encoder.preprocess.complaints import complaint
from encoder.preprocess.flatten import cmyk_to_rgb, on_background, to_rgb
from encoder.preprocess.jpeg import read_jpeg
from encoder.preprocess.jpeg_markers import Scans, check_markers
from encoder.preprocess.orientation import INVERSE, exif_orientation, turn
from encoder.preprocess.png import png_pixels
from encoder.preprocess.policy import DecodeLimits, DecodePolicy
from encoder.preprocess.reader import open_picture, read_picture
from encoder.preprocess.sniff import ACCEPTED, picture_format

__all__ = ["DecodeLimits", "DecodePolicy", "check_pixels", "decode_image", "decode_light"]

RAW_CHANNELS = (1, 3, 4)
# Pixels times passes over them; libjpeg-turbo and zlib do more than that in half a second.
LIGHT_WORK = 32_000_000
DEFAULT_LIMITS = DecodeLimits()
DEFAULT_POLICY = DecodePolicy()


def decode_image(
    data: bytes | memoryview, limits: DecodeLimits = DEFAULT_LIMITS, policy: DecodePolicy = DEFAULT_POLICY
) -> np.ndarray:
    """A picture file as RGB, uint8 [h, w, 3], contiguous and writable. Raises InvalidImage with a one-line reason."""
    content, name = _identify(data, limits)
    with _as_invalid_image(content, name, limits):
        return _jpeg(content, limits, policy) if name == "JPEG" else _read(content, name, limits, policy)


def decode_light(
    data: bytes | memoryview, limits: DecodeLimits = DEFAULT_LIMITS, policy: DecodePolicy = DEFAULT_POLICY
) -> np.ndarray | None:
    """As `decode_image` for JPEG and PNG of ordinary kind and size; None for a picture that it would rather not touch.

    What it takes is read by libjpeg-turbo or by zlib and takes a second at most; the rest belongs into a process of its
    own.
    """
    content, name = _identify(data, limits)
    with _as_invalid_image(content, name, limits):
        if name == "JPEG":
            return _light_jpeg(content, limits, policy)
        if name == "PNG" and png_pixels(content) <= LIGHT_WORK:
            return _read(content, name, limits, policy)
        return None


def check_pixels(
    data: bytes | memoryview,
    height: int,
    width: int,
    channels: int,
    limits: DecodeLimits = DEFAULT_LIMITS,
    policy: DecodePolicy = DEFAULT_POLICY,
) -> np.ndarray:
    """Pixels that the caller decoded, uint8 [height, width, channels] row by row, as RGB uint8 [height, width, 3].

    1 channel is grey, 3 RGB, 4 RGBA (composited as a file's transparency is). Contiguous and writable. Raises
    InvalidImage.
    """
    if channels not in RAW_CHANNELS:
        raise InvalidImage(f"raw pixels have {channels} channels: send 1 (grey), 3 (RGB) or 4 (RGBA)")
    limits.check_size(width, height)
    expected, length = height * width * channels, memoryview(data).nbytes
    if length != expected:
        shape = f"{height}x{width}x{channels}"
        raise InvalidImage(f"raw pixels of {shape} take {expected} bytes, {length} came; send rows without padding")
    pixels = np.frombuffer(data, dtype=np.uint8).reshape(height, width, channels)
    if channels == 4:
        return on_background(Image.fromarray(pixels), policy.background)
    return np.repeat(pixels, 3, axis=2) if channels == 1 else pixels.copy()


def _identify(data: bytes | memoryview, limits: DecodeLimits) -> tuple[bytes, str]:
    length = memoryview(data).nbytes
    if length == 0:
        raise InvalidImage(f"not a supported picture: no bytes at all; send {ACCEPTED}")
    limits.check_bytes(length)
    content = bytes(data)
    return content, picture_format(content)


@contextmanager
def _as_invalid_image(content: bytes, name: str, limits: DecodeLimits) -> Iterator[None]:
    """Readers raise what they like for broken files; none of it may escape."""
    try:
        yield
    except InvalidImage:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, met while it reads the header
        seen = str(error).partition(" exceeds")[0]
        raise InvalidImage(f"{name}: {seen} is over the limit of {limits.max_pixels} pixels; scale it down") from None
    except MemoryError as error:
        raise InvalidImage(f"broken {name}: decoding it takes too much memory; scale it down") from error
    except Exception as error:
        raise InvalidImage(complaint(content, name, error)) from error


def _light_jpeg(content: bytes, limits: DecodeLimits, policy: DecodePolicy) -> np.ndarray | None:
    scans = check_markers(content)
    header = open_picture(content, "JPEG", limits)
    if header.width * header.height * scans.passes > LIGHT_WORK:
        return None
    pixels = _fast_jpeg(content, header, scans, policy)
    return None if pixels is None else _upright(pixels, header, policy)


def _jpeg(content: bytes, limits: DecodeLimits, policy: DecodePolicy) -> np.ndarray:
    scans = check_markers(content)
    header = open_picture(content, "JPEG", limits)
    pixels = _fast_jpeg(content, header, scans, policy)
    if pixels is None:
        image, _ = read_picture(content, "JPEG", limits, allow_truncated=policy.allow_truncated)
        if image.mode == "CMYK" and "adobe" not in header.info:  # Pillow takes all CMYK for Adobe's: it has inverted it
            pixels = cmyk_to_rgb(255 - np.asarray(image))
        else:
            pixels = to_rgb(image, policy.background)
    return _upright(pixels, header, policy)


def _fast_jpeg(content: bytes, header: Image.Image, scans: Scans, policy: DecodePolicy) -> np.ndarray | None:
    return read_jpeg(
        content,
        header.size,
        adobe="adobe" in header.info,
        one_scan=scans.one,
        allow_truncated=policy.allow_truncated,
        reduced_side=policy.reduced_side,
    )


def _upright(pixels: np.ndarray, header: Image.Image, policy: DecodePolicy) -> np.ndarray:
    return turn(pixels, exif_orientation(header)) if policy.apply_exif_orientation else pixels


def _read(content: bytes, name: str, limits: DecodeLimits, policy: DecodePolicy) -> np.ndarray:
    image, already_turned = read_picture(content, name, limits, allow_truncated=policy.allow_truncated)
    pixels = to_rgb(image, policy.background)
    return turn(pixels, exif_orientation(image) if policy.apply_exif_orientation else INVERSE[already_turned])
