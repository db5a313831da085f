"""Mutations of files: of bytes, and of the structures that decoders believe (chunks, segments, directories, sizes)."""

import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random

from tests.preprocess.pictures import png_chunk

EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
HEADER_BYTES = 120
PNG_KINDS = (b"tRNS", b"PLTE", b"IDAT", b"eXIf", b"iCCP", b"zTXt", b"acTL", b"fcTL", b"fdAT", b"IEND")


def mutate(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A file made of one or two seeds by one to four mutations."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if len(data) < 8:
            break
        data = bytearray(_choose(rng, data)(rng, data, seeds))
    return bytes(data)


def _choose(rng: Random, data: bytearray) -> "Mutation":
    return rng.choice([*BYTES, *STRUCTURES.get(bytes(data[:2]), ())])


Mutation = Callable[[Random, bytearray, Sequence[bytes]], bytes | bytearray]


def flip(rng: Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def overwrite(rng: Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    data[rng.randrange(min(len(data), HEADER_BYTES))] = rng.randrange(256)
    return data


def extreme(rng: Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    """An extreme number where a size or a count may be."""
    size, order = rng.choice((1, 2, 4)), rng.choice(("little", "big"))
    reach = len(data) if rng.random() < 0.4 else min(len(data), HEADER_BYTES)
    at = rng.randrange(max(1, reach - size))
    data[at : at + size] = (rng.choice(EXTREMES) & ((1 << 8 * size) - 1)).to_bytes(size, order)
    return data


def cut(rng: Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    return data[: rng.randrange(1, len(data))]


def remove(rng: Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 40) :]


def repeat(rng: Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    start = rng.randrange(len(data))
    piece = data[start : start + rng.randrange(1, 200)]
    return data[:start] + piece * rng.choice((2, 3, 50)) + data[start:]


def insert(rng: Random, data: bytearray, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randrange(1, 30)) + data[at:]


def splice(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> bytearray:
    other = rng.choice(seeds)
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def edit_png(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> bytes:
    """Something about one chunk, its checksum made right again: else no decoder would look further."""
    chunks, at = [], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((bytes(data[at + 4 : at + 8]), bytes(data[at + 8 : at + 8 + length])))
        at += 12 + length
    if not chunks:
        return flip(rng, data, seeds)
    which = rng.randrange(len(chunks))
    kind, body = chunks[which]
    match rng.randrange(5):
        case 0:
            body = bytes(flip(rng, bytearray(body), seeds)) if body else rng.randbytes(5)
        case 1:
            kind = rng.choice(
                (b"tRNS", b"PLTE", b"IDAT", b"eXIf", b"iCCP", b"zTXt", b"acTL", b"fcTL", b"fdAT", b"IEND")
            )
        case 2:
            chunks.insert(rng.randrange(len(chunks) + 1), (kind, body))
        case 3:
            if kind == b"IDAT":
                body = zlib.compress(rng.randbytes(rng.randrange(1, 3000)))
            elif kind == b"IHDR" and len(body) == 13:
                width, height = rng.choice((1, 7, 300)), rng.choice((1, 7, 300))
                depth, colour, interlaced = (
                    rng.choice((1, 2, 4, 8, 16)),
                    rng.choice((0, 2, 3, 4, 6)),
                    rng.choice((0, 1)),
                )
                body = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
        case _:
            del chunks[which]
            return _png(chunks)
    chunks[which] = (kind, body)
    return _png(chunks)


def jpeg_segment(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> bytearray:
    """A segment's marker, length or contents, or one segment more."""
    places, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        places.append(at)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    if not places:
        return flip(rng, data, seeds)
    at = rng.choice(places)
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    match rng.randrange(4):
        case 0:
            data[at + 1] = rng.choice((0xC0, 0xC1, 0xC2, 0xC4, 0xC9, 0xDA, 0xDB, 0xDD, 0xE1, 0xE2, 0xEE, 0xFE))
        case 1:
            data[at + 2 : at + 4] = rng.choice((0, 1, 2, 3, 0xFFFF, rng.randrange(0x10000))).to_bytes(2, "big")
        case 2:
            data[at:at] = data[at:end] * rng.choice((1, 3, 20))
        case _:
            place = rng.randrange(at + 2, max(at + 3, min(end, len(data))))
            data[min(place, len(data) - 1)] = rng.randrange(256)
    return data


def tiff_entry(rng: Random, data: bytearray, seeds: Sequence[bytes]) -> bytearray:
    """A directory entry's tag, type, count or value."""
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    if start + 2 > len(data):
        return flip(rng, data, seeds)
    (count,) = struct.unpack_from(f"{order}H", data, start)
    at = start + 2 + 12 * rng.randrange(max(1, min(count, 40)))
    if at + 12 > len(data):
        return flip(rng, data, seeds)
    field, size = rng.choice((("H", 0), ("H", 2), ("I", 4), ("I", 8), ("I", 8)))
    tags = (256, 257, 258, 259, 262, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 338, 339, 347, 530)
    value = rng.choice(tags) if size == 0 else rng.choice((*EXTREMES, 3, 4, 5, 7, 8, 16, 32))
    struct.pack_into(f"{order}{field}", data, at + size, value & (0xFFFF if field == "H" else 0xFFFFFFFF))
    return data


def _png(chunks: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, body) for kind, body in chunks)


BYTES: tuple[Mutation, ...] = (flip, overwrite, extreme, extreme, cut, remove, repeat, insert, splice)
STRUCTURES: dict[bytes, tuple[Mutation, ...]] = {
    b"\x89P": (edit_png,) * 6,
    b"\xff\xd8": (jpeg_segment,) * 5,
    b"II": (tiff_entry,) * 6,
    b"MM": (tiff_entry,) * 6,
}
