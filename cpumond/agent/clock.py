"""The clocks of the agent, as one value that tests replace."""

from __future__ import annotations

import time


class HostClock:
    """``monotonic_s`` for rates and periods, ``boottime_s`` to notice a suspend, ``wall_s`` for times of day."""

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)

    @staticmethod
    def boottime_s() -> float:
        """Seconds since boot with time in suspend."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
