"""Counters begin at 0 with fixed labels, so that rates see the first event; both formats say the same."""

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from scheduler_world import run_jobs
from watched_store import start

from cpumond.scheduler.program.exporter import PREEMPTION_KINDS, MetricsText
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings.commands import ChangeTree, CreatePool, Edit
from cpumond.scheduler.settings.operations import StartOperation

NAME = "cpumond_preemptions_total"


async def run(scheduler: Scheduler) -> Scheduler:
    """After an update, with the pools ``a``, which has an operation, and ``b``."""
    for name in ("a", "b"):
        await scheduler.execute(CreatePool("default", name, "<Root>", {}), "root")
    await scheduler.execute(start(jobs=1, pool="a"), "root")
    await scheduler.update_all()
    return scheduler


NOTHING = {(pool, kind): 0.0 for pool in ("a", "") for kind in PREEMPTION_KINDS}


@pytest.mark.parametrize(
    ("max_pools", "counts", "expected"),
    [
        pytest.param(100, {}, NOTHING, id="a pool with operations has each kind from the start"),
        pytest.param(
            100, {("b", "preempted"): 2}, {**NOTHING, ("b", "preempted"): 2.0},
            id="it stays when the operations of its pool are gone",
        ),
        pytest.param(
            100, {("a", "preempted"): 3, ("gone", "preempted"): 4, ("off", "preempted"): 5},
            {**NOTHING, ("a", "preempted"): 3.0, ("", "preempted"): 9.0}, id="pools without series are summed",
        ),
        pytest.param(
            0, {("a", "overcommit"): 2}, {("", kind): 2.0 * (kind == "overcommit") for kind in PREEMPTION_KINDS},
            id="no pool has series where none shall have them",
        ),
        pytest.param(100, {("a", "strange"): 2}, {**NOTHING, ("", "strange"): 2.0},
                     id="a kind of a later version is not lost"),
    ],
)  # fmt: skip
async def test_preemptions_are_counted_by_pool_and_kind(scheduler: Scheduler, max_pools, counts, expected) -> None:
    await run(scheduler)
    scheduler.state.preemption_counts.update({("default", *key): count for key, count in counts.items()})
    families = text_string_to_metric_families(MetricsText(scheduler, max_pools).encode().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == NAME]
    assert {sample.labels["tree"] for sample in samples} == {"default"}
    found = {(sample.labels["pool"], sample.labels["kind"]): sample.value for sample in samples}
    assert found == expected
    assert len(samples) == len(found), "one comes twice"


async def test_both_formats_say_the_same(scheduler: Scheduler) -> None:
    """But for names of counters' families; the strict parser reads OpenMetrics to its end."""
    metrics = MetricsText(await run(scheduler), 100)
    plain = {family.name: family for family in text_string_to_metric_families(metrics.encode().decode())}
    opened = {family.name: family for family in parse_openmetrics(metrics.encode(True).decode())}
    assert "cpumond_preemptions" in opened
    assert "cpumond_pool_cpu_usage_seconds" in opened
    # The older format knows no info: there it is a gauge.
    assert {name.removesuffix("_info") for name in plain} == {name.removesuffix("_info") for name in opened}
    changing = ("process_", "python_", "cpumond_scheduler_lease")
    for name, family in opened.items():
        if not name.startswith(changing) and family.type != "info":
            assert (plain[name].type, plain[name].documentation) == (family.type, family.documentation)
            told = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in plain[name].samples}
            assert told == {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}
    assert metrics.encode() is metrics.encode(), "made once for an update"


async def test_a_bucket_leads_to_what_was_slow(scheduler: Scheduler) -> None:
    await run(scheduler)
    scheduler.timings.heartbeat.observe(0.003, "n1")
    scheduler.timings.heartbeat.observe(0.7, "long" * 50)
    families = {each.name: each for each in parse_openmetrics(MetricsText(scheduler, 100).encode(True).decode())}
    name = "cpumond_scheduler_heartbeat_duration_seconds"
    found = {sample.labels["le"]: sample for sample in families[name].samples if sample.name == f"{name}_bucket"}
    assert found["0.002"].value == 0.0
    assert found["0.005"].value == found["0.5"].value == 1.0
    assert found["1.0"].value == found["+Inf"].value == 2.0
    assert (found["0.005"].exemplar.labels, found["0.005"].exemplar.value) == ({"node": "n1"}, 0.003)
    assert found["1.0"].exemplar.labels == {"node": "long" * 25}
    update = families["cpumond_scheduler_update_duration_seconds"]
    assert [each.exemplar.labels for each in update.samples if each.exemplar] == [{"slowest_tree": "default"}]
    commits = families["cpumond_scheduler_store_commit_duration_seconds"].samples
    assert any(each.exemplar.labels["record"].partition("/")[0] for each in commits if each.exemplar)


async def test_cores_in_use_are_counted_by_the_class_of_their_jobs(scheduler: Scheduler) -> None:
    tasks = {"t": {"job_count": 2, "cpu_limit": 0.5, "command": "true"}}
    node, _ = await run_jobs(scheduler, StartOperation({"tasks": tasks}))
    await scheduler.execute(StartOperation({"tasks": tasks, "require_reclaimed": True}), "bob")
    await scheduler.update_all()
    await node.beat()
    await scheduler.update_all()
    text = MetricsText(scheduler, 10).encode().decode()
    for name in ("ordinary", "reclaimed"):
        assert f'cpumond_tree_class_usage_cores{{class="{name}",tree="default"}} 1.0\n' in text
    assert 'cpumond_tree_ordered_cores{tree="default"} 2.0\n' in text


async def test_jobs_above_their_memory_reserve_are_counted(scheduler: Scheduler) -> None:
    node, _ = await run_jobs(scheduler, StartOperation({"tasks": {"t": {"job_count": 2, "command": "true"}}}))
    heartbeat = node.heartbeat()
    jobs = [msgspec.structs.replace(report, over_reserve=number == 0) for number, report in enumerate(heartbeat.jobs)]
    await scheduler.heartbeat(msgspec.structs.replace(heartbeat, jobs=jobs))
    line = 'cpumond_tree_jobs_over_memory_reserve{tree="default"} 1.0\n'
    assert line in MetricsText(scheduler, 10).encode().decode()
    await scheduler.execute(ChangeTree("default", (Edit(("enable_memory_reserve",), False),)), "root")
    assert "cpumond_tree_jobs_over_memory_reserve{" not in MetricsText(scheduler, 10).encode().decode()
