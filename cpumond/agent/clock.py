"""The agent's clocks, as one value that tests can replace."""

from __future__ import annotations

import functools
import time


class HostClock:
    """Clocks: ``monotonic_s`` measures periods, ``boottime_s`` shows a suspend, ``wall_s`` is the time of day."""

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)
    boottime_s = staticmethod(functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME))
