"""Tests of the API may be coroutines: each runs in an event loop of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpumond.scheduler.store.sqlite import SqliteStore, open_sqlite_store

LONGEST_S = 120.0
"""How long one may take; that of a request that never ends fails with the place where it waits."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), LONGEST_S))
    return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    """An empty one."""
    store = open_sqlite_store(str(tmp_path / "scheduler.db"))
    yield store
    store.close()
