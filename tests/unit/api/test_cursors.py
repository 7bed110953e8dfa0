"""Pages of lists: nothing is on two of them, or on none, whatever begins and ends meanwhile."""

from typing import Any

import msgspec
import pytest

from cpumond.api.json.call import Call, Shared
from cpumond.api.json.operations import list_operations
from cpumond.api.json.requests import OperationsQuery
from cpumond.scheduler.model import CommandError, Rules
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings.operations import AbortOperation, StartOperation
from cpumond.scheduler.store.sqlite import SqliteStore

LONG = "\u0416" * 900
"""Of a title: more than a cursor holds."""


@pytest.fixture
def api(store: SqliteStore) -> Shared:
    return Shared(Scheduler(Rules(), store, Clock()))


async def start(api: Shared, title: str) -> str:
    count, task = len(api.scheduler.state.operations), {"command": "true", "job_count": 1}
    spec = {"pool": f"pool-{count}", "title": title, "tasks": {"t": task}}
    return (await api.scheduler.execute(StartOperation(spec), f"user-{count}")).id


async def show_page(api: Shared, **query: Any) -> Any:
    return await list_operations(Call(api, User("me"), query=msgspec.convert(query, OperationsQuery)))


@pytest.mark.parametrize("query", [{}, {"sort": "title"}, {"sort": "state", "descending": "false"}])
async def test_sixty_operations_are_listed_once_each_while_five_start(api: Shared, query: dict[str, Any]) -> None:
    known = [await start(api, f"title {number % 7}" + LONG) for number in range(60)]
    found, cursor, pages = [], "", 0
    while cursor is not None:
        page = await show_page(api, limit=7, cursor=cursor, **query)
        found += [each.id for each in page.operations]
        cursor, pages = page.next, pages + 1
        if pages <= 5:
            await start(api, "another")
        if pages == 3:
            await api.scheduler.execute(AbortOperation(found[0]), "me")
    assert len(set(found)) == len(found)
    assert set(known) <= set(found)


async def test_a_cursor_is_of_one_order_and_comes_from_a_page(api: Shared) -> None:
    for _ in range(3):
        await start(api, "one")
    cursor = (await show_page(api, limit=1)).next
    with pytest.raises(CommandError, match="another order"):
        await show_page(api, limit=1, cursor=cursor, sort="title")
    forged = [b'["start_time True", 1]', b'["start_time True", ["x", "y"]]', b"[" * 900, b"\xff"]
    for wrong in ("x", "é", *(each.hex() for each in forged)):
        with pytest.raises(CommandError, match="cursor"):
            await show_page(api, limit=1, cursor=wrong)
