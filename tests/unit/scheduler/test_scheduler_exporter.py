"""Counters begin at 0 with fixed labels, so that rates see the first event; both formats say the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from scheduler_world import run_jobs

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


async def run(store: SqliteStore) -> Scheduler:
    """A scheduler after an update, with the pools ``a``, which has an operation, and ``b``."""
    scheduler = Scheduler(Rules(), store, Clock())
    for name in ("a", "b"):
        await scheduler.execute(CreatePool("default", name, "<Root>", {}), "root")
    task = {"job_count": 1, "command": "true"}
    await scheduler.execute(StartOperation({"pool": "a", "tasks": {"t": task}}), "root")
    await scheduler.update_all()
    return scheduler


def read(store: SqliteStore, max_pools: int, counts: dict[tuple[str, str, str], int]) -> dict[tuple[str, str], float]:
    """(pool, kind) -> preemptions."""

    async def work() -> str:
        scheduler = await run(store)
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


def test_both_formats_say_the_same(store: SqliteStore) -> None:
    """But for names of counters' families; the strict parser reads OpenMetrics to its end."""
    metrics = MetricsText(asyncio.run(run(store)), 100)
    plain = {family.name: family for family in text_string_to_metric_families(metrics.encode().decode())}
    opened = {family.name: family for family in parse_openmetrics(metrics.encode(True).decode())}
    assert "cpumond_preemptions" in opened
    assert "cpumond_pool_cpu_usage_seconds" in opened
    # The older format knows no info: there it is a gauge.
    assert {name.removesuffix("_info") for name in plain} == {name.removesuffix("_info") for name in opened}
    changing = ("process_", "python_", "cpumond_scheduler_lease")
    for name, family in opened.items():
        if not name.startswith(changing) and family.type != "info":
            assert plain[name].type == family.type
            assert plain[name].documentation == family.documentation
            told = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in plain[name].samples}
            assert told == {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}
    assert metrics.encode() is metrics.encode(), "made once for an update"


def test_a_bucket_leads_to_what_was_slow(store: SqliteStore) -> None:
    async def work() -> str:
        scheduler = await run(store)
        scheduler.timings.heartbeat.observe(0.003, "n1")
        scheduler.timings.heartbeat.observe(0.7, "long" * 50)
        return MetricsText(scheduler, 100).encode(True).decode()

    families = {family.name: family for family in parse_openmetrics(asyncio.run(work()))}
    name = "cpumond_scheduler_heartbeat_duration_seconds"
    found = {sample.labels["le"]: sample for sample in families[name].samples if sample.name == f"{name}_bucket"}
    assert found["0.002"].value == 0.0
    assert found["0.005"].value == found["0.5"].value == 1.0
    assert found["1.0"].value == found["+Inf"].value == 2.0
    assert found["0.005"].exemplar.labels == {"node": "n1"}
    assert found["0.005"].exemplar.value == 0.003
    assert found["1.0"].exemplar.labels == {"node": "long" * 25}
    update = families["cpumond_scheduler_update_duration_seconds"]
    assert [each.exemplar.labels for each in update.samples if each.exemplar] == [{"slowest_tree": "default"}]
    records = {
        each.exemplar.labels["record"].partition("/")[0]
        for each in families["cpumond_scheduler_store_commit_duration_seconds"].samples
        if each.exemplar
    }
    assert records


def test_cores_in_use_are_counted_by_the_class_of_their_jobs(store):
    async def work() -> str:
        scheduler = Scheduler(Rules(), store, Clock())
        tasks = {"t": {"job_count": 2, "cpu_limit": 0.5, "command": "true"}}
        node, _ = await run_jobs(scheduler, StartOperation({"tasks": tasks}))
        await scheduler.execute(StartOperation({"tasks": tasks, "require_reclaimed": True}), "bob")
        await scheduler.update_all()
        await node.beat()
        await scheduler.update_all()
        return MetricsText(scheduler, 10).encode().decode()

    text = asyncio.run(work())
    for name in ("ordinary", "reclaimed"):
        assert f'cpumond_tree_class_usage_cores{{class="{name}",tree="default"}} 1.0\n' in text
    assert 'cpumond_tree_ordered_cores{tree="default"} 2.0\n' in text
