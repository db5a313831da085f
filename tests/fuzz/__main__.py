"""`python -m tests.fuzz --minutes 5`: hostile pictures and requests; counts, memory, exit code 1 on a finding."""

import argparse
import asyncio
import faulthandler
import hashlib
import logging
import sys
import time
import warnings
from pathlib import Path
from random import Random

from tests.fuzz.run import Findings, fuzz_pictures, fuzz_requests, make_core, make_decoders, memory_mib

SLICE_S = 20.0
STUCK_S = 120.0
GROWTH_MIB = 200.0


async def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    seed = options.seed if options.seed is not None else int(time.time())
    rng, found, end = Random(seed), Findings(), time.monotonic() + options.minutes * 60
    print(f"seed {seed}, {options.minutes:g} minutes")
    decoders, cores = make_decoders(), [make_core("vision"), make_core("text")]
    first = None
    while (now := time.monotonic()) < end:
        faulthandler.dump_traceback_later(STUCK_S, exit=True)  # a hang on a thread ends the run with its traceback
        half = min(SLICE_S, end - now) / 2
        fuzz_pictures(rng, now + half, found, decoders)
        await fuzz_requests(rng, now + 2 * half, found, cores)
        if first is None:  # pools, caches and workers are as large as they get
            first = memory_mib()
        print(f"{sum(found.counts.values())} inputs, {len(found.faults)} findings, {memory_mib():.0f} MiB", flush=True)
    faulthandler.cancel_dump_traceback_later()
    last = memory_mib()
    for decoder in decoders:
        decoder.close()
    for core in cores:
        await core.close()
    return _tell(found, first or last, last, options.findings)


def _tell(found: Findings, first: float, last: float, folder: Path) -> int:
    for what, count in sorted(found.counts.items()):
        print(f"{count:8d} {what}")
    print(f"memory after the first {SLICE_S:g} s: {first:.0f} MiB, at the end: {last:.0f} MiB")
    for told, data in found.faults:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(data).hexdigest()[:16]
        path.write_bytes(data)
        print(f"FINDING {told} ({path})")
    grown = last - first > GROWTH_MIB
    if grown:
        print(f"FINDING memory grew by {last - first:.0f} MiB")
    return 1 if found.faults or grown else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="of a run to repeat; default: another one each time")
    parser.add_argument("--findings", type=Path, default=Path(".fuzz"), help="folder for inputs that were findings")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
