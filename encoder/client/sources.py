"""What a caller hands over, item by item, made ready for the wire. A bad item becomes an ItemError, never a crash.

Arrays, PIL images and byte buffers are copied at once, because a generator may use its buffer again; files are only
measured here, and read when their batch is sent.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from encoder.client.errors import ItemError, one_line
from encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

Kind = Literal["image", "text"]
ImageInput: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | npt.NDArray[np.uint8] | PilImage"
Payload: TypeAlias = "pb.Image | str | Path"


class ItemRefused(Exception):
    """The reason why an item cannot be sent."""


@dataclass(frozen=True)
class Source:
    """One item that can be sent. size: its bytes on the wire, without framing."""

    index: int
    name: str
    size: int
    payload: Payload

    def load(self) -> pb.Image | str | ItemError:
        """The wire form of the item; reads its file if it is one."""
        if not isinstance(self.payload, Path):
            return self.payload
        try:
            return pb.Image(encoded=_read_file(self.payload, self.size))
        except ItemRefused as refused:
            return refusal(self.index, self.name, str(refused))


def refusal(index: int, name: str, reason: str) -> ItemError:
    return ItemError(index, name, "INVALID_ARGUMENT", one_line(reason))


def make_source(kind: Kind, index: int, item: object, max_bytes: int) -> Source | ItemError:
    """Measures, checks and converts one item. Blocks for the file system or for PIL."""
    name = _name(kind, item)
    try:
        payload, size = _text_payload(item) if kind == "text" else _image_payload(item)
        if size > max_bytes:
            raise ItemRefused(
                f"{size} bytes do not fit into a message (at most {max_bytes}): shrink it, send pixels as JPEG or PNG, "
                "or raise max_message_bytes= where router and pool take more"
            )
        return Source(index, name, size, payload)
    except ItemRefused as refused:
        return refusal(index, name, str(refused))


def is_instant(kind: Kind, item: object) -> bool:
    """Whether make_source does no slow work for the item: no file system, no conversion, no copy."""
    return kind == "text" or isinstance(item, bytes)


def require_many(kind: Kind, items: object, method: str = "") -> None:
    """Raises TypeError for what is one item, or nothing that can be iterated, where many are expected."""
    method = method or ("encode_images" if kind == "image" else "encode_text")
    if isinstance(items, (str, bytes, bytearray, memoryview, os.PathLike)) or _is_pil(items) or _is_one_array(items):
        raise TypeError(f"{method} takes a list, got one {type(items).__name__}: write {method}([item])")
    if not isinstance(items, (Iterable, AsyncIterable)):
        raise TypeError(f"{method} takes a list or another iterable, got {type(items).__name__}")


def _is_one_array(items: object) -> bool:
    # [n, h, w, c] is a stack of images, and a 1-d array holds names; what is between is one image.
    return isinstance(items, np.ndarray) and items.ndim not in (1, 4)


def _is_pil(item: object) -> bool:
    # An object can only be a PIL image if somebody has imported PIL; the client does not.
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(item, pil.Image)


def _name(kind: Kind, item: object) -> str:
    if kind == "text":
        return "text"
    if isinstance(item, (str, os.PathLike)):
        return str(item)
    if isinstance(item, np.ndarray):
        return "array"
    if isinstance(item, (bytes, bytearray, memoryview)):
        return "bytes"
    return "PIL image" if _is_pil(item) else type(item).__name__


def _text_payload(item: object) -> tuple[str, int]:
    if not isinstance(item, str):
        raise ItemRefused(f"a text must be a str, not {type(item).__name__}")
    try:
        return str(item), len(item.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ItemRefused(f"the text holds a lone surrogate at position {error.start}, which is not Unicode") from None


def _image_payload(item: object) -> tuple[pb.Image | Path, int]:
    if isinstance(item, (str, os.PathLike)):
        path = _path(item)
        return path, _file_size(path)
    if isinstance(item, (bytes, bytearray, memoryview)):
        data = bytes(item)
        return pb.Image(encoded=data), len(data)
    if isinstance(item, np.ndarray):
        return pixels_payload(item)
    if _is_pil(item):
        from encoder.client.pil import pil_pixels

        return pixels_payload(pil_pixels(cast("PilImage", item)))
    raise ItemRefused(
        f"{type(item).__qualname__} is no image: pass a path, the bytes of a file, a uint8 array or a PIL image"
    )


def pixels_payload(pixels: npt.NDArray[Any]) -> tuple[pb.Image, int]:
    """RawPixels of a uint8 array [h, w] or [h, w, 1|3|4]; raises ItemRefused for any other."""
    if pixels.dtype != np.uint8:
        raise ItemRefused(f"the array is {pixels.dtype}: pass uint8, with values from 0 to 255")
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        raise ItemRefused(f"the array has shape {pixels.shape}: pass [h, w] or [h, w, 1, 3 or 4], channels last")
    if not pixels.size:
        raise ItemRefused(f"the array has shape {pixels.shape}: there are no pixels in it")
    height, width, channels = pixels.shape
    data = pixels.tobytes()
    return pb.Image(pixels=pb.RawPixels(data=data, height=height, width=width, channels=channels)), len(data)


def _path(item: str | os.PathLike[str]) -> Path:
    path = os.fspath(item)
    if not isinstance(path, str):
        raise ItemRefused("the path is bytes: pass a str or a Path")
    return Path(path)


def _file_size(path: Path) -> int:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ItemRefused(_cannot_read(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise ItemRefused("cannot read: not a regular file")
    return status.st_size


def _read_file(path: Path, measured: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(measured + 1)
    except OSError as error:
        raise ItemRefused(_cannot_read(error)) from error
    if len(data) != measured:
        raise ItemRefused("the file changed its size while it was waiting to be sent")
    return data


def _cannot_read(error: OSError | ValueError) -> str:
    return f"cannot read: {getattr(error, 'strerror', None) or error}"
