"""The parity table as JSON and as a page; a run replaces the rows that it measured and keeps the others."""

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.parity.cases import DTYPES, RUNNERS
from tests.parity.measure import END_COSINE, FLOAT32_ERROR, CaseResult

HEAD = """# Parity with transformers

Written by `make parity`; the numbers are in `parity.json`. Every family is held against its publisher's own code as
transformers carries it, with seeded random weights (attention sharpened, so that its faults show): the **pixels** that
the tower is fed, bit for bit against the image processor, in both preprocessing modes; the **tower**, from the same
pixels, against the model with transformers' eager attention in float32; **end to end**, from a picture's bytes to its
vector, against Pillow, the processor and the model. Pictures are drawn by formula: sizes from 1×50 to 512×512 and
700×90, as JPEG (4:2:0, 4:4:4, progressive, grey, turned by EXIF), PNG (RGB, alpha, palette, transparent colour, 16 bit,
bilevel), WebP, GIF, BMP and TIFF.

Errors are the largest absolute difference of vectors of length 1; cosines are the worst of all pictures. Bounds: pixels
equal; float32 error {error:.0e} (tower and features) and end to end cosine {end}; bfloat16 cosine 0.999 unless a row
says otherwise. `real` is a model of the size that its name says, on 64 pictures; `small` has two layers or a few, and
eight pictures. `npu` is the simulated device of `tests/npu_sim`: it computes what the operators are documented to
compute, on the CPU, and gets a few of the pictures. There was no CUDA device in these runs.
"""


def merge(path: Path, results: Sequence[CaseResult]) -> dict[str, Any]:
    """The content of parity.json with these results in it."""
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = {(case["name"], case["size"]): case for case in known}
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "openvino", "pillow")}
    for result in results:
        key, case = (result.name, result.size), result.as_json() | {"versions": versions}
        fresh = {(row["runner"], row["dtype"]) for row in case["rows"]}
        before = cases[key]["rows"] if key in cases else []
        kept = [row for row in before if (row["runner"], row["dtype"]) not in fresh]
        case["rows"] = sorted([*kept, *case["rows"]], key=lambda row: RUNNERS.index(row["runner"]))
        cases[key] = case
    return {"cases": sorted(cases.values(), key=lambda case: (case["family"], case["name"], case["size"]))}


def page(content: Mapping[str, Any], registered: Sequence[tuple[str, str]]) -> str:
    """The Markdown page; `registered` are (name, family) of all cases, so that what never ran is named too."""
    lines = [HEAD.format(error=FLOAT32_ERROR, end=END_COSINE), "## Pixels", ""]
    lines += ["| model | family | size | mode | bit-equal pictures |", "|---|---|---|---|---|"]
    for case in content["cases"]:
        for row in case["pixels"]:
            cells = [case["name"], case["family"], case["size"], row["mode"], f"{row['equal']} of {row['pictures']}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Towers and end to end", ""]
    lines.append(
        "| model | size | runner | dtype | attention | pictures | tower cosine | tower error | features cosine | "
        "features error | end to end cosine | end to end error |"
    )
    lines.append("|---" * 12 + "|")
    for case in content["cases"]:
        lines += [_row(case, row) for row in case["rows"]]
    lines += ["", "## What was not run", ""]
    lines += [f"- {line}" for line in _missing(content, registered)] or ["Every case ran on every runner."]
    failures = [
        f"{case['name']} {row['runner']} {row['dtype']}: {why}"
        for case in content["cases"]
        for row in case["rows"]
        for why in row["failures"]
    ]
    lines += ["", "## Outside the bounds", "", *([f"- {line}" for line in failures] or ["Nothing."])]
    versions = sorted({f"{name} {number}" for case in content["cases"] for name, number in case["versions"].items()})
    return "\n".join([*lines, "", f"Oracle and library versions: {', '.join(versions)}.", ""])


def _row(case: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    pairs = [(row[f"{part}_cosine"], row[f"{part}_error"]) for part in ("tower", "features", "end")]
    numbers = [cell for cosine, error in pairs for cell in (_cosine(cosine), "–" if error < 0 else f"{error:.1e}")]
    cells = [case["name"], case["size"], row["runner"], row["dtype"], row["backend"], str(row["pictures"]), *numbers]
    return f"| {' | '.join(cells)} |"


def _cosine(value: float) -> str:
    return "–" if value == -1 else f"{value:.7f}"


def _missing(content: Mapping[str, Any], registered: Sequence[tuple[str, str]]) -> list[str]:
    lines = []
    real = {case["name"]: case for case in content["cases"] if case["size"] == "real"}
    small = {case["name"] for case in content["cases"] if case["size"] == "small"}
    for name, family in registered:
        if name not in real:
            lines.append(f"{name} ({family}): not at real size{', only small' if name in small else ''}")
            continue
        case = real[name]
        # One that failed is told of as such.
        ran = {(row["runner"], row["dtype"]) for row in case["rows"] if row["pictures"] or row["failures"]}
        for runner in RUNNERS:
            absent = [dtype for dtype in DTYPES if (runner, dtype) not in ran]
            if absent:
                why = case["not_run"].get(runner, "left out of the run at real size")
                lines.append(f"{name} ({family}) on {runner} in {', '.join(absent)}: {why}")
    return lines
