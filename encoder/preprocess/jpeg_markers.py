"""Bounds on the structure of a JPEG: how much work its markers ask for, whatever size its picture has.

Each scan of a progressive file visits every block of the picture and can take a hundred bytes, so a file within the
byte limit could keep a core busy for hours; ordinary files have about ten scans and a few dozen segments.
"""

import re

from encoder.errors import InvalidImage

MAX_SCANS = 100
MAX_HEADER_SEGMENTS = 512

_START_OF_SCAN = 0xDA
_END_OF_IMAGE = 0xD9
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_WITHOUT_LENGTH = frozenset({0x01, 0xD8})
# Within pixel data 0xFF is followed by 0, by a restart marker (D0 to D7), or by 0xFF as filling.
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")


def check_markers(data: bytes) -> bool:
    """Whether one scan holds the whole picture (else it comes in several, one refining or completing another).

    Raises InvalidImage when a JPEG has more segments before its pixels, or more scans, than is sane.
    """
    at, segments, scans, progressive, components = 2, 0, 0, False, 0
    while (found := _MARKER.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        if marker == _END_OF_IMAGE:
            break
        if marker in _WITHOUT_LENGTH:
            continue
        if marker in _FRAMES:
            progressive = progressive or marker in _PROGRESSIVE_FRAMES
            components = _byte(data, at + 7)
        if marker == _START_OF_SCAN:
            scans += 1
            if not progressive:  # every scan of any other kind pays for its blocks with bytes
                return components == _byte(data, at + 2)
        segments += scans == 0
        if scans > MAX_SCANS:
            raise InvalidImage(f"the JPEG has over {MAX_SCANS} scans: decoding it takes too long; save it anew")
        if segments > MAX_HEADER_SEGMENTS:
            raise InvalidImage(f"the JPEG has over {MAX_HEADER_SEGMENTS} segments before its pixels; save it anew")
        at += int.from_bytes(data[at : at + 2], "big")
    return False


def _byte(data: bytes, at: int) -> int:
    """A byte of a segment; 0 beyond the file's end."""
    return data[at] if at < len(data) else 0
