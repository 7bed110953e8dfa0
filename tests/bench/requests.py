"""For how long a heartbeat waits for the most expensive request to each endpoint: the longest turn of the event loop.

The requests of ``test_request_costs.py``, to 1000 pools, 10 000 operations and 3000 nodes; garbage is not collected
meanwhile, as in the scheduler, which does that by itself. ``--pages``: instead, the loop's work for each page of the
scheduler: when it is opened, and each time that it asks again, every two seconds, all of its requests together.

    python tests/bench/requests.py [--pages [--rounds 20]]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from asyncio import events
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import structlog
from starlette.types import ASGIApp
from test_request_costs import Cluster, ask_all

from cpumond.scheduler.rights.users import User

PERIOD_S = 2.0
MARKED = ("node_lost", "node_silent", "node_returned", "node_failing", "node_works", "preemption", "take_over")
PAGES = {
    "overview": (
        ["overview", "events?limit=50"],
        ["trees", "trees/default/rights", "history?kind=pool&tree=default&name=%3CRoot%3E",
         *(f"events?kind={kind}&limit=200" for kind in MARKED)],
    ),
    "pools": (["trees/default/pool_table"], ["trees", "trees/default/rights"]),
    "operations": (["operations?limit=50", "operation_groups", "trees"], ["trees/default/rights"]),
}  # fmt: skip
"""What each page asks for every PERIOD_S, and what only when it is opened and a few times in a minute
(``page_*.js``)."""


class Turns:
    """The turns of the event loop, in seconds of its thread: the longest one, and all of them together."""

    def __init__(self) -> None:
        self.longest_s = self.total_s = 0.0
        self._run = events.Handle._run

    def __enter__(self) -> Turns:
        def run(handle: events.Handle) -> None:
            begun = time.thread_time()
            self._run(handle)
            spent_s = time.thread_time() - begun
            self.longest_s = max(self.longest_s, spent_s)
            self.total_s += spent_s

        gc.collect()
        events.Handle._run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        events.Handle._run = self._run  # type: ignore[method-assign]


class Viewer:
    """A browser that costs this process as little as possible: it asks again with the ETags that it was given."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self._etags: dict[str, bytes] = {}

    async def ask(self, path: str) -> int:
        """The status of the answer."""
        where, _, query = path.partition("?")
        headers = [(b"host", b"127.0.0.1"), (b"accept-encoding", b"gzip")]
        if path in self._etags:
            headers.append((b"if-none-match", self._etags[path]))
        scope = {
            "type": "http", "method": "GET", "path": where, "raw_path": where.encode(), "query_string": query.encode(),
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "scheme": "http",
        }  # fmt: skip
        status = 0

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._etags.update((path, value) for name, value in message["headers"] if name == b"etag")

        await self._application(scope, receive, send)
        return status


async def measure_pages(folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Page -> what the viewer does -> milliseconds of the loop's thread, round by round."""
    cluster = Cluster(folder)
    cluster.reader = User("guest")
    await cluster.fill()

    async def look(viewer: Viewer, names: list[str]) -> float:
        async def ask() -> None:
            for name in names:
                status = await viewer.ask(name if name.startswith("/") else f"/api/v1/{name}")
                assert status in (200, 304), (name, status)

        with Turns() as turns:
            await asyncio.create_task(ask())
        return 1000 * turns.total_s

    found: dict[str, dict[str, list[float]]] = {}
    for page, (regular, seldom) in PAGES.items():
        times: dict[str, list[float]] = {"opened": [], "asked again": [], "bare": []}
        viewer = Viewer(cluster.application)
        times["opened"].append(await look(viewer, [*regular, *seldom, "/healthz"]))
        for _ in range(rounds):
            cluster.clock.at += PERIOD_S
            await cluster.scheduler.update_all()
            times["asked again"].append(await look(viewer, [*regular, "/healthz"]))
            times["bare"].append(await look(viewer, ["/healthz"]))
        found[page] = times
    await cluster.close()
    return found


async def show_pages(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = await measure_pages(Path(folder), rounds)
    for page, times in found.items():
        bare = statistics.mean(times.pop("bare"))
        for name, values in times.items():
            mean = statistics.mean(values)
            spread = f"{min(values):.2f} to {max(values):.2f} ms"
            print(f"{page}, {name}: {mean:.2f} ms = {mean / bare:.1f} bare requests ({spread})")


async def show_longest_turns() -> None:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        async for name, _, turns, _ in ask_all(Path(folder), Turns):
            found[name] = max(found.get(name, 0.0), turns.longest_s)
    for name, longest_s in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{longest_s * 1e3:8.1f} ms  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="what each page costs, and not each endpoint")
    parser.add_argument("--rounds", type=int, default=20, help="how often each page is looked at")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    gc.disable()
    asyncio.run(show_pages(arguments.rounds) if arguments.pages else show_longest_turns())


if __name__ == "__main__":
    main()
