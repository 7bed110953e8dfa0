"""Waiting for something that happens in another thread or process, with a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

SLOWNESS = float(os.environ.get("CPUMOND_SLOWNESS", "1"))
"""How many times as long as here things take: more than 1 on an emulated processor."""


def wait_until(condition: Callable[[], T], what: str = "the condition", timeout_s: float = 30.0) -> T:
    """Ask ``condition`` every 20 ms until it is true and give its value.

    AssertionError after ``timeout_s``, times CPUMOND_SLOWNESS.
    """
    pause = threading.Event()
    timeout_s *= SLOWNESS
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s:g} s"
        pause.wait(0.02)


def is_over(process: psutil.Process) -> bool:
    """Whether a process has ended, though nobody may have asked for its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
