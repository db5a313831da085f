"""Two things about PNG that Pillow leaves to its caller."""

from PIL import Image

SIGNATURE_BYTES = 8
CHUNK_OVERHEAD = 12
NO_PIXELS = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})


def without_text(data: bytes) -> bytes | None:
    """The file without its texts and colour profile, None when it has none.

    Pillow refuses a file whose texts are huge, or grow huge when unpacked; the pixels are as good as ever.
    """
    kept, start, at = [], 0, SIGNATURE_BYTES
    while at + CHUNK_OVERHEAD <= len(data):
        end = at + CHUNK_OVERHEAD + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] in NO_PIXELS:
            kept.append(data[start:at])
            start = end
        at = end
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
