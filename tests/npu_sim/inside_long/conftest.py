"""The modules here run on a simulated machine alone: ``tests/npu_sim/test_real_size.py`` starts one."""

import sys

collect_ignore_glob = [] if "torch_npu" in sys.modules else ["test_*.py"]
