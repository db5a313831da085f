"""What is freed goes back to the system where the process asked for it, and is seldom searched for while it starts."""

import gc
import subprocess
import sys

import pytest

from encoder.memory import searching_seldom

# 40 blocks of 4 MB are freed below small ones that stay, which hold the heap up.
FREES_160_MB = """
import resource, sys
from pathlib import Path
from encoder.memory import keep_little

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

if sys.argv[1] == "little":
    keep_little()
bytearray(4_000_000)  # the first free of such a size is what raises glibc's own limit
bytearray(30_000_000)
before = resident_mb()
blocks, small = [], []
for _ in range(40):
    blocks.append(bytearray(4_000_000))
    small.append(bytearray(2_000))
full = resident_mb() - before
blocks.clear()
print(full, resident_mb() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is another one")
@pytest.mark.parametrize(("what", "kept"), [("little", (-5, 10)), ("as glibc does", (100, 200))])
def test_freed_memory_is_given_back(what: str, kept: tuple[float, float]) -> None:
    done = subprocess.run([sys.executable, "-c", FREES_160_MB, what], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    full, after = map(float, done.stdout.split())
    assert 150 <= full <= 200
    assert kept[0] <= after <= kept[1]


def searches_while_objects_are_made() -> int:
    before = sum(generation["collections"] for generation in gc.get_stats())
    kept = [[place] for place in range(20_000)]
    assert len(kept) == 20_000
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def test_cycles_are_searched_for_seldom_and_then_as_before() -> None:
    usual = gc.get_threshold()
    assert searches_while_objects_are_made() >= 20
    with pytest.raises(KeyError), searching_seldom():
        assert gc.isenabled() and searches_while_objects_are_made() <= 1
        raise KeyError
    assert gc.get_threshold() == usual and searches_while_objects_are_made() >= 20
