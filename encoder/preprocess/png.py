"""What Pillow leaves to its caller about PNG: a bound on chunks, huge texts, and the transparent colour's depth."""

from collections.abc import Iterator

from PIL import Image

from encoder.errors import InvalidImage

SIGNATURE_BYTES = 8
CHUNK_OVERHEAD = 12
NO_PIXELS = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})
PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"})
# Pillow takes a microsecond and more for each chunk. libpng writes 8 KiB of pixels a chunk, of texts there are a dozen.
MAX_CHUNKS = 65_536
MAX_METADATA_CHUNKS = 2_048


def png_pixels(data: bytes) -> int:
    """Width times height by the header, which is the first chunk; whether it is one is for the reader to say."""
    return int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")


def check_chunks(data: bytes) -> None:
    """Raises InvalidImage when a PNG has more chunks, or more beside its pixels, than is sane."""
    metadata = 0
    for count, (_, kind, _) in enumerate(_chunks(data), start=1):
        metadata += kind not in PIXELS
        if metadata > MAX_METADATA_CHUNKS:
            raise InvalidImage(f"the PNG has over {MAX_METADATA_CHUNKS} chunks beside its pixels; save it anew")
        if count > MAX_CHUNKS:
            raise InvalidImage(f"the PNG has over {MAX_CHUNKS} chunks; save it anew")
        if kind == b"IEND":
            return


def without_text(data: bytes) -> bytes | None:
    """The file without its texts and colour profile, None when it has none.

    Pillow refuses a file whose texts are huge, or grow huge when unpacked; the pixels are as good as ever.
    """
    kept, start = [], 0
    for at, kind, end in _chunks(data):
        if kind in NO_PIXELS:
            kept.append(data[start:at])
            start = end
    return b"".join([*kept, data[start:]]) if start else None


def fix_transparent_colour(image: Image.Image, data: bytes) -> None:
    """Bring the transparent colour (tRNS) to the depth of the pixels that Pillow made of the file.

    Pillow keeps the file's own number, which never matches where it widens 2 and 4-bit grey to 8 bits, or keeps
    the high byte of 16-bit colour (so colours that share it become transparent together).
    """
    colour, depth = image.info.get("transparency"), data[24]
    if image.mode == "L" and isinstance(colour, int) and depth in {2, 4}:
        top = (1 << depth) - 1
        image.info["transparency"] = (colour & top) * 255 // top
    if image.mode == "RGB" and isinstance(colour, tuple) and depth == 16:
        image.info["transparency"] = tuple(sample >> 8 for sample in colour)


def _chunks(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Where each chunk begins, its kind, and where it ends by its own word."""
    at = SIGNATURE_BYTES
    while at + CHUNK_OVERHEAD <= len(data):
        end = at + CHUNK_OVERHEAD + int.from_bytes(data[at : at + 4], "big")
        yield at, data[at + 4 : at + 8], end
        at = end
