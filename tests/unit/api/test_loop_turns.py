"""Who begins when thousands of requests arrive together."""

import asyncio

from cpumond.api.turns import BEGUN_AT_ONCE, Turns


async def test_requests_begin_some_at_a_time_in_order_and_heartbeats_at_once():
    begun: list[str] = []

    async def app(scope, receive, send):
        begun.append(scope["path"])

    turns = Turns(app)

    def ask(path: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(turns({"type": "http", "path": path}, None, None))  # type: ignore[arg-type]

    paths = [f"/{number}" for number in range(100)]
    tasks = [ask(path) for path in paths]
    await asyncio.sleep(0)
    assert begun == paths[:BEGUN_AT_ONCE]
    tasks.append(ask("/api/v1/heartbeats"))
    tasks.append(ask("/late"))
    tasks[20].cancel()
    await asyncio.sleep(0)
    assert "/api/v1/heartbeats" in begun
    assert len(begun) <= 2 * BEGUN_AT_ONCE + 1
    await asyncio.gather(*tasks, return_exceptions=True)
    others = [path for path in begun if path != "/api/v1/heartbeats"]
    assert others == [path for path in [*paths, "/late"] if path != "/20"]
    # Nothing is left behind: the next one begins at once.
    await asyncio.sleep(0)
    await ask("/next")
    assert begun[-1] == "/next"
