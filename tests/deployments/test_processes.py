"""Ports and processes of one fleet, with real sockets and processes."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from deployments.processes import (
    BLOCK_SIZE,
    MARK_VARIABLE,
    PortBlock,
    end_processes,
    marked_processes,
    port_is_free,
)
from encoder.errors import Unsupported

SLEEP = "import time; time.sleep(60)"
# Says when it is deaf to SIGTERM.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
# Starts a grandchild, says its pid and ends: the grandchild is an orphan.
ORPHAN_MAKER = (
    "import subprocess, sys; "
    f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.DEVNULL).pid, flush=True)"
)


def start(code: str, mark: str) -> psutil.Popen:
    environment = {**os.environ, MARK_VARIABLE: mark}
    return psutil.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def test_blocks_do_not_overlap_and_come_back():
    with PortBlock.reserve() as one, PortBlock.reserve() as other:
        assert abs(one.first - other.first) >= BLOCK_SIZE
        assert all(port_is_free(one.port(offset)) for offset in range(BLOCK_SIZE))
    with pytest.raises(ValueError, match="offset 64"):
        one.port(64)
    one.release()  # twice is no error


def test_a_block_that_is_held_is_not_given_twice(monkeypatch):
    with PortBlock.reserve() as block:
        monkeypatch.setattr("deployments.processes.BLOCK_RANGE", (block.first, block.first + BLOCK_SIZE))
        with pytest.raises(Unsupported, match="no 64 free ports"):
            PortBlock.reserve()
    with PortBlock.reserve() as again:
        assert again.first == block.first


def test_a_block_with_a_taken_port_is_passed_over(monkeypatch):
    with PortBlock.reserve() as block:
        first = block.first
    # Others on this machine may hold some of them.
    monkeypatch.setattr("deployments.processes.BLOCK_RANGE", (first, first + 16 * BLOCK_SIZE))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 7))
        taken.listen()
        with PortBlock.reserve() as block:
            assert block.first > first and (block.first - first) % BLOCK_SIZE == 0


def test_a_port_that_grpc_would_share_counts_as_taken():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_is_free(port, "127.0.0.1")
        assert not port_is_free(port)
    assert port_is_free(port, "127.0.0.1")


def test_marked_processes_are_found_as_orphans_too():
    maker, other = start(ORPHAN_MAKER, "mark-a"), start(SLEEP, "mark-b")
    try:
        assert maker.stdout is not None
        orphan = int(maker.stdout.readline())
        maker.wait(10)
        assert [process.pid for process in marked_processes("mark-a")] == [orphan]
        end_processes(marked_processes("mark-a"), grace_s=5)
        assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_deaf_to_sigterm_is_killed():
    process = start(STUBBORN, "mark-c")
    assert process.stdout is not None and process.stdout.readline() == "deaf\n"
    end_processes([process], grace_s=0.2)
    assert process.wait(5) == -9


def test_a_process_that_listens_to_sigterm_is_not_killed():
    process = start(SLEEP, "mark-d")
    time.sleep(0.2)
    end_processes([process], grace_s=10)
    assert process.wait(5) == -15


def test_orphans_come_to_a_subreaper():
    code = (
        "import os, subprocess, sys, psutil\n"
        "from deployments.processes import become_subreaper\n"
        "become_subreaper()\n"
        f"maker = subprocess.run([sys.executable, '-c', {ORPHAN_MAKER!r}], stdout=subprocess.PIPE, text=True)\n"
        "orphan = psutil.Process(int(maker.stdout))\n"
        "print(orphan.ppid() == os.getpid())\n"
        "orphan.kill()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "True", done.stderr
