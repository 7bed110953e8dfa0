"""The agent's clocks, as one value that tests replace."""

from __future__ import annotations

import time


class HostClock:
    """The host's clocks: ``monotonic_s`` for periods, ``boottime_s`` to detect a suspend, ``wall_s`` for times of
    day."""

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)

    @staticmethod
    def boottime_s() -> float:
        """Return seconds since boot, including time in suspend."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
