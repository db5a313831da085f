"""``python -m tests.npu_sim.run TARGET``: starts the simulator, then runs a script or a module as ``__main__``.

The environment must be the simulator's: use ``run_simulated`` in ``launch.py``.
"""

from __future__ import annotations

import runpy
import sys

from .simulator import start

if __name__ == "__main__":
    start()
    target, sys.argv = sys.argv[1], sys.argv[1:]
    if target.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
