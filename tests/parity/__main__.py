"""`python -m tests.parity`: see the package."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.parity.cases import DTYPES, RUNNERS
from tests.parity.encode import hushed
from tests.parity.measure import CaseResult, Plan, measure
from tests.parity.page import merge, page
from tests.parity.pictures import drawn
from tests.parity.registry import all_cases

DOCS = Path(__file__).parents[2] / "docs"
PARTS = ("tower", "features", "end")
QUICK_PICTURES, FULL_PICTURES, NPU_PICTURES = 8, 64, 8


def main(arguments: list[str]) -> int:
    """Exit status 1 when a number is outside its bounds."""
    cases = all_cases()
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description="parity with transformers")
    parser.add_argument("--quick", action="store_true", help="small models, eight pictures; seconds a family")
    parser.add_argument("--write", action="store_true", help="put the numbers of a quick run on the page too")
    parser.add_argument("--family", action="append", default=[], help="a family or a model; may be repeated")
    parser.add_argument("--runner", action="append", default=[], choices=RUNNERS, help="may be repeated")
    parser.add_argument("--npu-pictures", type=int, default=NPU_PICTURES, help="pictures for the simulated NPU")
    parser.add_argument("--page", action="store_true", help="only write the page anew from parity.json")
    asked = parser.parse_args(arguments)
    chosen = [case for case in cases.values() if not asked.family or {case.name, case.family} & set(asked.family)]
    if not chosen:
        parser.error(f"no such family: choose of {', '.join(sorted({case.family for case in cases.values()}))}")
    plan = Plan(
        size="small" if asked.quick else "real",
        pictures=drawn(QUICK_PICTURES if asked.quick else FULL_PICTURES),
        runners=asked.runner or RUNNERS,
        dtypes=DTYPES,
        npu_pictures=asked.npu_pictures,
    )
    hushed()
    results: list[CaseResult] = []
    # One start of the simulated NPU for all small models; else a case at a time, so that what is done is written.
    together = asked.quick and "npu" in plan.runners
    groups = [chosen] if together else [[case] for case in chosen]
    for group in [] if asked.page else groups:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(group, plan, Path(scratch))
        for result in found:
            show(result)
        if asked.write or not asked.quick:
            write_page(found)
        results += found
    if asked.page:
        write_page([])
    failures = [line for result in results for line in result.failures]
    print("\n".join(failures) if failures else "everything is within its bounds", flush=True)
    return 1 if failures else 0


def write_page(results: list[CaseResult]) -> None:
    """Writes docs/parity.json and docs/parity.md."""
    content = merge(DOCS / "parity.json", results)
    (DOCS / "parity.json").write_text(json.dumps(content, indent=1) + "\n")
    registered = [(case.name, case.family) for case in all_cases().values()]
    (DOCS / "parity.md").write_text(page(content, registered))


def show(result: CaseResult) -> None:
    """The numbers of one case, a line each."""
    for pixels in result.pixels:
        print(f"{result.name:24} pixels {pixels.mode:6} {pixels.equal} of {pixels.pictures} bit-equal", flush=True)
    for row in result.rows:
        pairs = {part: (getattr(row, f"{part}_cosine"), getattr(row, f"{part}_error")) for part in PARTS}
        told = "  ".join(f"{part} {cosine:.7f} {error:.1e}" for part, (cosine, error) in pairs.items())
        print(f"{result.name:24} {row.runner:9} {row.dtype:9} {told}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
