"""What tests of the scheduler share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from coroutines import pytest_pyfunc_call  # noqa: F401 - a hook
from scheduler_world import PlayedNode, World, assert_consistent
from watched_store import Watched, make_scheduler

from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.store.sqlite import open_sqlite_store


@pytest.fixture
def world() -> Iterator[World]:
    """With a pool p; its counters are right after the test."""
    world = World(pools=["p"])
    yield world
    assert_consistent(world.state)


@pytest.fixture
def node(world: World) -> PlayedNode:
    """n1, with ten cores."""
    return world.node("n1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Watched]:
    store = Watched(open_sqlite_store(str(tmp_path / "scheduler.db")))
    yield store
    store.close()


@pytest.fixture
def scheduler(store: Watched) -> Scheduler:
    """On ``store``, with a ``StillClock``."""
    return make_scheduler(store)
