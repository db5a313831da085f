"""The pytest plugin of the processes that run on a simulated machine: it starts the simulator before any test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch_npu
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from .simulator import Simulator, start

_running = start()


@pytest.fixture
def simulator() -> Simulator:
    """The running simulator: its call log (empty at the start of each test), its faults and its limits."""
    return _running


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Each test begins with an empty log and ends on the default streams, also after a capture that went wrong.

    torch_npu leaves its capture stream current and its dispatch mode active when the end of a capture raises.
    """
    _running.calls.clear()
    yield
    while _get_current_dispatch_mode_stack():
        _pop_mode()
    used = [device for device in range(torch_npu.npu.device_count()) if _running.runtime.live_streams(device)]
    for device in reversed(used):
        torch_npu.npu.set_device(device)
        torch_npu.npu.set_stream(torch_npu.npu.default_stream(device))
