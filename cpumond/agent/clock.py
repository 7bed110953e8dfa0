"""The agent's clocks, as one value that tests can replace."""

from __future__ import annotations

import time


class HostClock:
    """Clocks: ``monotonic_s`` measures periods, ``boottime_s`` shows a suspend, ``wall_s`` is the time of day."""

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)

    @staticmethod
    def boottime_s() -> float:
        """Return the seconds since boot, including the time for which the host was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
