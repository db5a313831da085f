"""`python -m deployments.inputs`: the settings and bounds of inputs as Markdown tables, for docs/inputs.md."""

import json
import sys

from deployments.settings import PoolSettings
from encoder.preprocess import decode, jpeg_markers, png, text
from encoder.settings import DecodeSettings

HEAD = "| setting | default | what it is |\n| --- | --- | --- |"
OF_THE_POOL = (
    "max_items_per_request",
    "max_request_bytes",
    "max_waiting_items",
    "max_waiting_bytes",
    "max_stream_items",
    "decode_threads",
)


def settings_table() -> str:
    """Settings of a pool that bound or change its inputs."""
    found = [(f"engine.decode.{name}", field) for name, field in DecodeSettings.model_fields.items()]
    found += [(name, PoolSettings.model_fields[name]) for name in OF_THE_POOL]
    rows = [f"| `{name}` | `{json.dumps(field.default)}` | {field.description} |" for name, field in found]
    return "\n".join([HEAD, *rows])


def bounds_table() -> str:
    """Bounds that are no settings: beyond them no picture or text is a sane one."""
    bounds = [
        ("scans of a progressive JPEG", jpeg_markers.MAX_SCANS),
        ("segments of a JPEG before its pixels", jpeg_markers.MAX_HEADER_SEGMENTS),
        ("chunks of a PNG", png.MAX_CHUNKS),
        ("chunks of a PNG beside its pixels", png.MAX_METADATA_CHUNKS),
        ("pixels times scans decoded on a thread by isolation `auto`", decode.LIGHT_WORK),
        ("characters of a text", text.MAX_CHARACTERS),
    ]
    return "\n".join(["| bound | at most |", "| --- | --- |", *(f"| {what} | {most} |" for what, most in bounds)])


def policies_table() -> str:
    """The policies, as the decoder's own documentation states them."""
    lines = [line for line in (decode.__doc__ or "").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [f"| {what} | {policy} |" for what, policy in cells[2:]]
    return "\n".join([f"| {cells[0][0]} | {cells[0][1]} |", "| --- | --- |", *rows])


if __name__ == "__main__":
    print("\n\n".join([settings_table(), policies_table(), bounds_table()]))
    sys.exit(0)
