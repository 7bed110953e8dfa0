"""Waiting for something that happens in another thread or process, and looking at what processes hold."""

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

SLOWNESS = float(os.environ.get("CPUMOND_SLOWNESS", "1"))
"""How many times as long as here things take: more than 1 on an emulated processor."""
PATIENCE = max(SLOWNESS, 3.0)
"""How many times as long things are waited for: this machine may be busy with other work."""


def wait_until(condition: Callable[[], T], what: str = "the condition", timeout_s: float = 60.0) -> T:
    """The value of ``condition`` once it is true, within ``timeout_s`` times PATIENCE, else AssertionError.

    Asked often at first, then every 50 ms: most conditions are requests, which take the processor from what works.
    """
    pause, pause_s = threading.Event(), 0.01
    timeout_s *= PATIENCE
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s:g} s"
        pause.wait(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)


def is_over(process: psutil.Process) -> bool:
    """Whether a process has ended, though nobody may have asked for its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def count_descriptors() -> int:
    """Without those of objects that nobody holds any more, which tests before this one leave to the collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
