"""For how long a heartbeat waits for the most expensive request to each endpoint: the longest turn of the event loop.

The requests of ``test_request_costs.py``, to 1000 pools, 10 000 operations and 3000 nodes; garbage is not collected
meanwhile, as in the scheduler, which does that by itself.

    python tests/bench/requests.py
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from asyncio import events
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import structlog
from test_request_costs import ask_all


class Turns:
    """The longest turn of the event loop, in seconds of its thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._run = events.Handle._run

    def __enter__(self) -> Turns:
        def run(handle: events.Handle) -> None:
            begun = time.thread_time()
            self._run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - begun)

        gc.collect()
        events.Handle._run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        events.Handle._run = self._run  # type: ignore[method-assign]


async def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    gc.disable()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        async for name, _, turns, _ in ask_all(Path(folder), Turns):
            found[name] = max(found.get(name, 0.0), turns.longest_s)
    for name, longest_s in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{longest_s * 1e3:8.1f} ms  {name}")


if __name__ == "__main__":
    asyncio.run(main())
