"""What tests of the scheduler share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduler_world import World, assert_consistent, in_loop
from watched_store import Watched, make_scheduler

from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.store.sqlite import open_sqlite_store


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    in_loop(pyfuncitem.obj)(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    return True


@pytest.fixture
def world() -> Iterator[World]:
    """With a pool p; its counters are right after the test."""
    world = World()
    world.create_pool("p")
    yield world
    assert_consistent(world.state)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Watched]:
    store = Watched(open_sqlite_store(str(tmp_path / "scheduler.db")))
    yield store
    store.close()


@pytest.fixture
def scheduler(store: Watched) -> Scheduler:
    """On ``store``, with a ``StillClock``."""
    return make_scheduler(store)
