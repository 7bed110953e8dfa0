"""The scheduler's counters begin at 0 with fixed labels, so that rates see the first event."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cpumond.scheduler.exporter import PREEMPTION_KINDS, MetricsText
from cpumond.scheduler.model import Rules
from cpumond.scheduler.operations import StartOperation
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.settings.commands import CreatePool
from cpumond.scheduler.store.sqlite import SqliteStore, open_sqlite_store

NAME = "cpumond_preemptions_total"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_sqlite_store(str(tmp_path / "scheduler.db"))
    yield store
    store.close()


def read(store: SqliteStore, max_pools: int, counts: dict[tuple[str, str, str], int]) -> dict[tuple[str, str], float]:
    """(pool, kind) -> preemptions, of a scheduler with the pools ``a``, which has an operation, and ``b``."""

    async def work() -> str:
        scheduler = Scheduler(Rules(), store, Clock())
        for name in ("a", "b"):
            await scheduler.execute(CreatePool("default", name, "<Root>", {}), "root")
        task = {"job_count": 1, "command": "true"}
        await scheduler.execute(StartOperation({"pool": "a", "tasks": {"t": task}}), "root")
        await scheduler.update_all()
        scheduler.state.preemption_counts.update(counts)
        return MetricsText(scheduler, max_pools).encode().decode()

    text = asyncio.run(work())
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == NAME:
                key = sample.labels["pool"], sample.labels["kind"]
                assert sample.labels["tree"] == "default"
                assert key not in found, f"{key} comes twice"
                found[key] = sample.value
    return found


def test_a_pool_with_operations_has_each_kind_from_the_start(store: SqliteStore) -> None:
    found = read(store, 100, {})
    assert found == {(pool, kind): 0.0 for pool in ("a", "") for kind in PREEMPTION_KINDS}


def test_what_was_taken_from_a_pool_stays_when_its_operations_are_gone(store: SqliteStore) -> None:
    found = read(store, 100, {("default", "b", "preempted"): 2})
    assert found["b", "preempted"] == 2.0
    assert found["", "preempted"] == 0.0


def test_preemptions_of_pools_without_series_are_summed(store: SqliteStore) -> None:
    counts = {("default", "a", "preempted"): 3, ("default", "gone", "preempted"): 4, ("default", "off", "preempted"): 5}
    found = read(store, 100, counts)
    assert found["a", "preempted"] == 3.0
    assert found["", "preempted"] == 9.0
    assert sum(found.values()) == 12.0


def test_no_pool_has_series_where_none_shall_have_them(store: SqliteStore) -> None:
    found = read(store, 0, {("default", "a", "overcommit"): 2})
    assert found == {("", kind): 2.0 * (kind == "overcommit") for kind in PREEMPTION_KINDS}


def test_a_kind_of_a_later_version_is_not_lost(store: SqliteStore) -> None:
    assert read(store, 100, {("default", "a", "strange"): 2})["", "strange"] == 2.0
