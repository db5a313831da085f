"""Bounds on the structure of a JPEG: how much work its markers ask for, whatever size its picture has.

Each scan of a progressive file visits every block of the picture and can take a hundred bytes, so a file within the
byte limit could keep a core busy for hours; ordinary files have about ten scans and a few dozen segments.
"""

import re
from dataclasses import dataclass

from encoder.errors import InvalidImage

MAX_SCANS = 100
MAX_HEADER_SEGMENTS = 512

_START_OF_SCAN = 0xDA
_END_OF_IMAGE = 0xD9
_FRAMES = (frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}) | {0xF7}
_PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
# ITU T.81 table B.1 and T.87: libjpeg-turbo takes Huffman and arithmetic coding, sequential and progressive.
_NOT_DECODED = {0xC3: "lossless", 0xCB: "lossless", 0xF7: "JPEG-LS"} | dict.fromkeys(
    (0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical"
)
_WITHOUT_LENGTH = frozenset({0x01, 0xD8})
# Within pixel data 0xFF is followed by 0, by a restart marker (D0 to D7), or by 0xFF as filling.
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")


@dataclass(frozen=True)
class Scans:
    """`one` holds the whole picture (else several refine or complete one another); `passes`: visits of each block."""

    one: bool
    passes: int


def check_markers(data: bytes) -> Scans:
    """How the pixels come. Raises InvalidImage for more segments before the pixels, or more scans, than is sane, and
    for the kinds of JPEG that nothing here decodes.
    """
    at, segments, scans, progressive, components = 2, 0, 0, False, 0
    while (found := _MARKER.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        if marker == _END_OF_IMAGE:
            break
        if marker in _WITHOUT_LENGTH:
            continue
        if marker in _FRAMES:
            _check_frame(marker, _byte(data, at + 2))
            progressive = progressive or marker in _PROGRESSIVE_FRAMES
            components = _byte(data, at + 7)
        if marker == _START_OF_SCAN:
            scans += 1
            if not progressive:  # every scan of any other kind pays for its blocks with bytes
                return Scans(one=components == _byte(data, at + 2), passes=1)
        segments += scans == 0
        if scans > MAX_SCANS:
            raise InvalidImage(f"the JPEG has over {MAX_SCANS} scans: decoding it takes too long; save it anew")
        if segments > MAX_HEADER_SEGMENTS:
            raise InvalidImage(f"the JPEG has over {MAX_HEADER_SEGMENTS} segments before its pixels; save it anew")
        at += int.from_bytes(data[at : at + 2], "big")
    return Scans(one=False, passes=max(1, scans))


def _check_frame(marker: int, bits: int) -> None:
    kind = _NOT_DECODED.get(marker)
    if kind is not None:
        raise InvalidImage(f"the JPEG is {kind}, which is not supported; save it as a baseline JPEG or as PNG")
    if bits not in {0, 8}:  # 0: the file ends here
        raise InvalidImage(f"the JPEG has {bits} bits a sample, which is not supported; save it with 8, or as PNG")


def _byte(data: bytes, at: int) -> int:
    """A byte of a segment; 0 beyond the file's end."""
    return data[at] if at < len(data) else 0
