"""What pages ask for again and again: made in parts beside the heartbeats, kept, and made anew when it failed."""

import asyncio
from typing import Any

import msgspec
import pytest

from cpumond.api import tables
from cpumond.api.json.call import Call, Shared
from cpumond.api.json.operations import list_operations
from cpumond.api.json.requests import OperationsQuery
from cpumond.api.json.status import list_alerts
from cpumond.scheduler.model import Rules
from cpumond.scheduler.rights.tokens import User
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings.operations import AbortOperation, StartOperation
from cpumond.scheduler.store.sqlite import SqliteStore


@pytest.fixture
def api(store: SqliteStore) -> Shared:
    return Shared(Scheduler(Rules(), store, Clock()))


async def start(api: Shared, title: str) -> str:
    spec = {"pool": "p", "title": title, "tasks": {"t": {"command": "true", "job_count": 1}}}
    return (await api.scheduler.execute(StartOperation(spec), "me")).id


async def search(api: Shared, text: str) -> list[str]:
    found = await list_operations(Call(api, User("me"), query=OperationsQuery(search=text)))
    return [each.id for each in found.operations]


async def read_table(api: Shared) -> dict[str, Any]:
    made = await api.pool_tables.table_of(api.scheduler.state.trees["default"])
    table: dict[str, Any] = msgspec.json.decode(made.content)
    return table


async def test_a_search_of_many_operations_lets_others_have_their_turn(api: Shared) -> None:
    first = await start(api, "needle")
    record = api.scheduler.state.find_record(first)
    for number in range(5000):
        key = f"old-{number}"
        api.scheduler.state.finished[key] = msgspec.structs.replace(record, id=key, title="hay", state="completed")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count())
    try:
        assert await search(api, "NEEDLE") == [first]
    finally:
        others.cancel()
    assert turns >= 5


async def test_a_search_makes_each_text_once_and_finds_what_is_there_now(api: Shared) -> None:
    one = await start(api, "One")
    assert await search(api, "one") == [one]
    record = api.scheduler.state.find_record(one)
    text = api.texts.of(record)
    two = await start(api, "one more")
    assert sorted(await search(api, "one")) == sorted([one, two])
    assert api.texts.of(record) is text
    await api.scheduler.execute(AbortOperation(one), "me")
    assert sorted(await search(api, "ONE")) == sorted([one, two])
    assert len(api.texts) == 2


@pytest.mark.parametrize("name", ["make_pool_table", "CoreSums"])
async def test_a_pool_table_that_could_not_be_made_is_made_anew(
    api: Shared, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def stumble(*_: object) -> None:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patched:
        patched.setattr(tables, name, stumble)
        with pytest.raises(RuntimeError, match="a mistake"):
            await read_table(api)
    assert [row[0] for row in (await read_table(api))["rows"]] == ["<Root>"]


async def test_the_alert_about_late_updates_is_of_the_last_ones_and_goes_away(api: Shared) -> None:
    scheduler = api.scheduler

    async def late_alerts() -> list[str]:
        found = await list_alerts(Call(api, User("me", admin=True)))
        return [each.message for each in found.alerts if each.code == "late_updates"]

    for late in (True,) * 30 + (False,) * 10:
        scheduler.timings.count_update(scheduler.clock.now() if late else None)
    assert await late_alerts() == []
    scheduler.timings.count_update(scheduler.clock.now())
    assert await late_alerts() == [
        "31 of the last 41 fair-share updates began late; raise fair_share_update_period or give the scheduler more CPU"
    ]
    for _ in range(600):
        scheduler.timings.count_update(None)
    assert await late_alerts() == []
    assert scheduler.timings.late_updates == 31
