"""What the documents promise of pools, trees, ephemeral pools, starvation, preemption and integral guarantees, against
the running scheduler: a process, commands over HTTP, and nodes that obey (semantics.md 2 to 6 and 9)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from waiting import wait_until

ROOT = "%3CRoot%3E"

QUICK = {
    "fair_share_starvation_timeout": 300,
    "max_unpreemptable_running_job_count": 0,
    "preemptive_scheduling_backoff": 0,
    "max_running_operation_count_per_pool": 20,
}
"""Options of the tree with which starvation and preemption need no minutes."""


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerProcess]:
    process = SchedulerProcess(tmp_path)
    yield process
    process.close()


@pytest.fixture
def quick(scheduler: SchedulerProcess) -> SchedulerProcess:
    """Started, with QUICK."""
    scheduler.start()
    set_tree(scheduler, **QUICK)
    return scheduler


def edits(options: dict[str, Any]) -> dict[str, Any]:
    return {"edits": [{"path": [name], "value": value} for name, value in options.items()]}


def set_tree(scheduler: SchedulerProcess, tree: str = "default", **options: Any) -> list[str]:
    return list(scheduler.patch(f"trees/{tree}", edits(options))["warnings"])


def set_pool(scheduler: SchedulerProcess, pool: str, **options: Any) -> list[str]:
    return list(scheduler.patch(f"trees/default/pools/{pool}", edits(options))["warnings"])


def pool(scheduler: SchedulerProcess, name: str) -> dict[str, Any]:
    return dict(scheduler.get(f"trees/default/pools/{name}"))


def pools(scheduler: SchedulerProcess, tree: str = "default") -> set[str]:
    return {each["name"] for each in scheduler.get(f"trees/{tree}/pools")["pools"]}


def operation(scheduler: SchedulerProcess, name: str, tree: str = "default") -> dict[str, Any]:
    return dict(scheduler.get(f"operations/{name}")["trees"][tree])


def new_node(scheduler: SchedulerProcess, name: str = "n1", cpu: float = 10.0, **more: Any) -> PlayedNode:
    node = PlayedNode(scheduler, name, cpu, **{"memory": 2**50, **more})
    node.register()
    node.beat()
    return node


def fill(scheduler: SchedulerProcess, node: PlayedNode, count: int, *operations: str) -> None:
    """Heartbeats until these operations have so many jobs together there."""
    node.beat_until(lambda: sum(len(node.jobs_of(each)) for each in operations) == count, f"{count} jobs")


def refusal(scheduler: SchedulerProcess, path: str, body: Any) -> str:
    answer = scheduler.request("POST", path, body)
    assert answer.status_code in (409, 422), answer.text
    return answer.text


def spec(pool_name: str, cpu: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"spec": {"pool": pool_name, "tasks": {"t": {"job_count": 50, "cpu_limit": cpu}}, **more}}


# --- pools -----------------------------------------------------------------------------------------------------------


def test_weights_divide_what_the_parent_has(scheduler):
    scheduler.start()
    node = new_node(scheduler, cpu=12.0)
    scheduler.create_pool("team", weight=3)
    scheduler.create_pool("other", weight=1)
    scheduler.create_pool("half", "team", max_share_ratio=0.5)
    scheduler.create_pool("rest", "team")
    started = [scheduler.start_operation(name, 50) for name in ("half", "rest", "other")]
    scheduler.wait_updates()
    shares = {name: pool(scheduler, name)["fair_share"]["cpu"] for name in ("team", "other", "half", "rest")}
    assert shares == pytest.approx({"team": 9.0, "other": 3.0, "half": 4.5, "rest": 4.5})
    fill(scheduler, node, 12, *started)
    assert [len(node.jobs_of(each)) for each in started] in ([4, 5, 3], [5, 4, 3])


def test_limits_and_guarantees_hold_against_any_weight(scheduler):
    scheduler.start()
    node = new_node(scheduler, cpu=10.0)
    scheduler.create_pool("heavy", weight=1000, resource_limits={"cpu": 5})
    scheduler.create_pool("safe", weight=0.001, min_share_resources={"cpu": 4})
    scheduler.create_pool("rest", weight=1)
    started = [scheduler.start_operation(name, 50) for name in ("heavy", "safe", "rest")]
    scheduler.wait_updates()
    fill(scheduler, node, 10, *started)
    assert [len(node.jobs_of(each)) for each in started] == [5, 4, 1]


def test_a_fifo_pool_serves_its_operations_in_their_order(scheduler):
    scheduler.start()
    node = new_node(scheduler, cpu=6.0)
    scheduler.create_pool("queue", mode="fifo")
    first = scheduler.start_operation("queue", 4)
    second = scheduler.start_operation("queue", 4)
    urgent = scheduler.start_operation("queue", 1, weight=2.0)
    scheduler.wait_updates()
    fill(scheduler, node, 6, first, second, urgent)
    assert [len(node.jobs_of(each)) for each in (first, second, urgent)] == [4, 1, 1]


def test_operations_beyond_the_count_wait_and_run_in_order_of_arrival(scheduler):
    scheduler.start()
    scheduler.create_pool("p", max_running_operation_count=1, max_operation_count=3)
    first, second, third = (scheduler.start_operation("p") for _ in range(3))
    assert [scheduler.state_of(each) for each in (first, second, third)] == ["running", "pending", "pending"]
    text = refusal(scheduler, "operations", spec("p"))
    assert 'Limit for the number of concurrent operations 3 for pool \\"p\\"' in text
    scheduler.post(f"operations/{first}/abort", {})
    assert [scheduler.state_of(each) for each in (second, third)] == ["running", "pending"]


# --- trees -----------------------------------------------------------------------------------------------------------


def test_trees_have_their_nodes_and_an_operation_may_be_in_several(scheduler):
    scheduler.start()
    set_tree(scheduler, nodes_filter="!gpu")
    scheduler.post("trees", {"name": "physical", "attributes": {"nodes_filter": "gpu & !broken"}})
    cpu, gpu = new_node(scheduler, "c", 4.0), new_node(scheduler, "g", 4.0, tags=["gpu"])
    nobody = new_node(scheduler, "b", 4.0, tags=["gpu", "broken"])
    assert {name: scheduler.get(f"nodes/{name}")["tree"] for name in "cgb"} == {
        "c": "default",
        "g": "physical",
        "b": None,
    }
    both = scheduler.start_operation("p", 50, pool_trees=["default", "physical"])
    one = scheduler.start_operation("p", 50)
    for node in (cpu, gpu, nobody):
        scheduler.wait_updates()
        node.beat()
    assert (len(gpu.jobs_of(both)), len(gpu.jobs_of(one)), nobody.jobs) == (4, 0, {})
    assert len(cpu.jobs_of(both)) + len(cpu.jobs_of(one)) == 4
    answer = scheduler.request("PATCH", "trees/physical", edits({"nodes_filter": "%true"}))
    assert answer.status_code == 422
    assert "belong" in answer.text


# --- ephemeral pools -------------------------------------------------------------------------------------------------


def test_pools_are_made_for_operations_and_go_with_them(scheduler):
    scheduler.start()
    scheduler.create_pool("home", ephemeral_subpool_config={"max_running_operation_count": 1})
    set_tree(scheduler, default_parent_pool="home")
    first = scheduler.start_operation("mine")
    second = scheduler.start_operation("mine")
    assert (pool(scheduler, "mine")["parent"], pool(scheduler, "mine")["is_ephemeral"]) == ("home", True)
    assert scheduler.state_of(second) == "pending"
    assert "limit of 1 ephemeral pools" in refusal(scheduler, "operations", spec("another"))
    for each in (first, second):
        scheduler.post(f"operations/{each}/abort", {})
    assert "mine" not in pools(scheduler)


def test_a_pool_with_subpools_for_its_users(scheduler):
    scheduler.start()
    subpools = {"mode": "fifo", "max_operation_count": 1}
    scheduler.create_pool("team", create_ephemeral_subpools=True, ephemeral_subpool_config=subpools)
    started = scheduler.start_operation("team")
    [name] = pools(scheduler) - {"team", "<Root>"}
    assert name.startswith("team$")
    assert (pool(scheduler, name)["parent"], pool(scheduler, name)["mode"]) == ("team", "fifo")
    assert "has been reached" in refusal(scheduler, "operations", spec("team"))
    assert "more than once" in refusal(scheduler, "operations", spec("team$a$b"))
    set_pool(scheduler, "team", create_ephemeral_subpools=False)
    assert scheduler.get(f"operations/{started}")["pools"] == {"default": "team"}


# --- the root --------------------------------------------------------------------------------------------------------


def test_operations_in_the_root(quick):
    node = new_node(quick, cpu=8.0)
    text = refusal(quick, "operations", spec("<Root>"))
    assert "Starting operations immediately in pool" in text
    assert "is forbidden" in text
    set_tree(quick, forbid_immediate_operations_in_root=False)
    quick.create_pool("p")
    inside = quick.start_operation("p", 50)
    in_root = quick.start_operation("<Root>", 50)
    words = ["operation", "start", "--pool", "<Root>", "--title", "by hand", "--scheduler", quick.url, "--", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "cpumond", *words], env=clean_environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tasks = "{t={job_count=1;command=true}}"
    client = quick.yt("vanilla", "--async", "--tasks", tasks, "--spec", '{pool="<Root>";title=client}', bindings=False)
    assert client.returncode == 0, client.stderr
    by_client = next(each for each in quick.get("operations")["operations"] if each["title"] == "client")
    assert by_client["pools"] == {"default": "<Root>"}
    quick.post(f"operations/{by_client['id']}/abort", {})
    by_hand = next(each for each in quick.get("operations")["operations"] if each["title"] == "by hand")
    assert by_hand["pools"] == {"default": "<Root>"}
    quick.wait_updates()
    node.beat_until(lambda: len(node.jobs) == 8, "a full node")
    # Three that want something, one of them a single job: what it leaves is shared by the other two.
    assert operation(quick, in_root)["fair_share"]["cpu"] == pytest.approx(3.5)
    assert {len(node.jobs_of(inside)), len(node.jobs_of(in_root))} == {3, 4}
    assert "from the root down" in str(quick.get(f"operations/{in_root}/why"))
    quick.stop()
    quick.start()
    node.register()
    node.beat_until(lambda: operation(quick, in_root)["job_count"] == len(node.jobs_of(in_root)), "its jobs again")
    assert operation(quick, in_root)["pool"] == "<Root>"
    root = pool(quick, ROOT)
    assert (root["operation_count"], root["usage"]["cpu"]) == (3, 8.0)


# --- starvation and preemption ---------------------------------------------------------------------------------------


def test_who_is_below_the_fair_share_for_long_takes_the_last_started_jobs(quick):
    set_tree(quick, fair_share_starvation_timeout=5000)
    node = new_node(quick)
    for name in ("greedy", "late"):
        quick.create_pool(name)
    greedy = quick.start_operation("greedy", 50)
    fill(quick, node, 10, greedy)
    order = node.jobs_of(greedy)
    late = quick.start_operation("late", 50)
    seen = []

    def look() -> bool:
        told = operation(quick, late)
        seen.append((told["scheduling_status"], told["starvation_status"], len(node.jobs_of(late)) > 0))
        return len(node.jobs_of(late)) >= 4

    node.beat_until(look, "jobs for the one that starves")
    states = [state for n, state in enumerate(seen) if n == 0 or seen[n - 1] != state]
    assert ("below_fair_share", "non_starving", False) in states, "it waits for the time-out"
    taken = {job for job in order if job not in node.jobs}
    assert taken == set(order[-len(taken) :])
    quick.wait_updates(3)
    assert pool(quick, "late")["starvation_status"] == "non_starving"
    assert len(node.jobs_of(late)) in (4, 5), "until it has what it can claim"
    records = [each for each in quick.get("preemptions")["preemptions"] if each["kind"] == "preempted"]
    assert {each["preemptor_operation_id"] for each in records} == {late}


@pytest.mark.parametrize("of", ["pool", "operation"])
def test_who_is_below_the_guarantee_starves_after_the_other_time_out(quick, of):
    set_tree(quick, fair_share_starvation_timeout=3_600_000, min_share_preemption_timeout=300)
    node = new_node(quick)
    quick.create_pool("p", min_share_resources={"cpu": 10 if of == "operation" else 4})
    quick.create_pool("q")
    greedy = quick.start_operation("p" if of == "operation" else "q", 50)
    fill(quick, node, 10, greedy)
    guarantee = {"min_share_resources": {"cpu": 4}} if of == "operation" else {}
    starved = quick.start_operation("p", 50, weight=1.0, **guarantee)
    node.beat_until(lambda: len(node.jobs_of(starved)) >= 4, "jobs for the guarantee")
    others = [each for each in quick.get("preemptions")["preemptions"] if each["kind"] == "preempted"]
    assert len(others) >= 4
    quick.wait_updates(3)
    for _ in range(5):
        node.beat()
    told = operation(quick, starved)
    # its fair share is 5, or 7 of 10: what is above the guarantee is a matter of the longer time-out
    assert len(node.jobs_of(starved)) == 4
    assert told["starvation_status"] == "non_starving"


def test_below_the_guarantee_is_seen_while_the_time_out_runs(quick):
    set_tree(quick, min_share_preemption_timeout=3_600_000)
    node = new_node(quick)
    quick.create_pool("p", min_share_resources={"cpu": 10})
    greedy = quick.start_operation("p", 50)
    fill(quick, node, 10, greedy)
    starved = quick.start_operation("p", 50, min_share_resources={"cpu": 4})
    wait_until(lambda: operation(quick, starved)["scheduling_status"] == "below_min_share", "below_min_share")
    later = operation(quick, starved)["starves_in_s"]
    assert 3000 < later <= 3600


def test_options_without_effect_are_told_by_the_api(quick):
    quick.create_pool("p")
    done = quick.post("operations", spec("p", min_share_resources={"cpu": 1}, max_unpreemptable_running_job_count=5))
    assert len(done["warnings"]) == 2
    changed = quick.patch(f"operations/{done['id']}", {"parameters": {"fair_share_starvation_timeout": 999_999}})
    assert any("fair_share_starvation_timeout" in text for text in changed["warnings"])


AGGRESSIVE = [
    # (options of the tree, of the starving pool, of the other; jobs of 2 cores that it gets)
    ({}, {}, {}, 0),
    ({}, {"enable_aggressive_starvation": True}, {}, 1),
    ({"enable_aggressive_starvation": True}, {}, {}, 1),
    ({}, {"enable_aggressive_starvation": True}, {"allow_aggressive_starvation_preemption": False}, 0),
]


@pytest.mark.parametrize(("tree", "starving", "other", "jobs"), AGGRESSIVE)
def test_aggressive_starvation_takes_from_who_has_its_share_down_to_half(quick, tree, starving, other, jobs):
    set_tree(quick, **{**QUICK, **tree})
    node, taken = new_node(quick, "n1", 5.0), new_node(quick, "n2", 5.0)
    # Somebody else runs there: what is free fits no job of 2 cores.
    taken.jobs["foreign"] = {"job_id": "foreign", "operation_id": "", "cpu_limit": 5.0, "current_cpu_limit": 5.0}
    taken.beat()
    quick.create_pool("has", **other)
    quick.create_pool("wants", **starving)
    holder = quick.start_operation("has", 5)
    fill(quick, node, 5, holder)
    wanting = quick.start_operation("wants", 5, cpu=2.0)
    wait_until(lambda: pool(quick, "wants")["starvation_status"] != "non_starving", "it starves")

    def beat() -> bool:
        taken.beat()
        node.beat()
        return len(node.jobs_of(wanting)) == jobs

    wait_until(beat, "as many jobs as it may take")
    for _ in range(6):
        quick.wait_updates(1)
        beat()
    assert (len(node.jobs_of(wanting)), len(node.jobs_of(holder))) == (jobs, 5 - 2 * jobs)
    status = "aggressively_starving" if starving or tree else "starving"
    assert pool(quick, "wants")["starvation_status"] == status


@pytest.mark.parametrize(("count", "taken"), [(11, 0), (10, 4)])
def test_operations_with_few_jobs_are_not_preempted(quick, count, taken):
    set_tree(quick, max_unpreemptable_running_job_count=count)
    node = new_node(quick)
    for name in ("greedy", "late"):
        quick.create_pool(name)
    greedy = quick.start_operation("greedy", 10)
    fill(quick, node, 10, greedy)
    late = quick.start_operation("late", 50)
    wait_until(lambda: operation(quick, late)["starvation_status"] == "starving", "it starves")
    node.beat_until(lambda: not taken or node.jobs_of(late), "a job for the one that starves")
    for _ in range(8):
        quick.wait_updates(1)
        node.beat()
    assert (len(node.jobs_of(late)) > 0) == (taken > 0)


# --- integral guarantees ---------------------------------------------------------------------------------------------


def volume(scheduler: SchedulerProcess, name: str) -> float:
    return float(pool(scheduler, name)["volume"]["cpu"])


def start_fast(scheduler: SchedulerProcess, scale: int) -> None:
    """Start with time that runs faster; a node may be silent for minutes all the same."""
    scheduler.write_config('node_heartbeat_timeout = "24h"\n')
    scheduler.start("--time-scale", str(scale))


def go_on_slower(scheduler: SchedulerProcess, node: PlayedNode, scale: int) -> None:
    """Begin anew where it is: what comes next must last until it has been looked at, however busy this machine is."""
    assert scheduler.stop() == 0
    scheduler.start("--time-scale", str(scale))
    node.register()
    node.beat()


def test_a_burst_pool_saves_and_has_its_burst_while_the_volume_lasts(scheduler):
    start_fast(scheduler, 400)
    node = new_node(scheduler, cpu=100.0, user_slots=1000)
    given = {"guarantee_type": "burst", "resource_flow": {"cpu": 10}, "burst_guarantee_resources": {"cpu": 60}}
    scheduler.create_pool("burst", weight=0.001, integral_guarantees=given)
    scheduler.create_pool("rest", weight=1000)
    scheduler.start_operation("rest", 500)
    node.beat_until(lambda: volume(scheduler, "burst") > 60 * 120, "savings")
    go_on_slower(scheduler, node, 50)
    waiting = scheduler.start_operation("burst", 500)
    seen: list[float] = []

    def spent() -> bool:
        seen.append(operation(scheduler, waiting)["fair_share"]["cpu"])
        return bool(seen[-1] > 1.0) and volume(scheduler, "burst") < 60 * 60

    node.beat_until(spent, "spent")
    assert max(seen) == pytest.approx(60.0, abs=0.5), "no more than the burst"
    node.beat_until(lambda: operation(scheduler, waiting)["fair_share"]["cpu"] < 20.0, "on the flow at last")


def test_a_relaxed_pool_has_at_most_three_times_its_flow_of_what_is_left(scheduler):
    start_fast(scheduler, 400)
    node = new_node(scheduler, cpu=100.0, user_slots=1000)
    given = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 10}}
    scheduler.create_pool("relaxed", weight=0.001, integral_guarantees=given)
    scheduler.create_pool("strong", weight=1000, min_share_resources={"cpu": 60})
    scheduler.start_operation("strong", 500)
    node.beat_until(lambda: volume(scheduler, "relaxed") > 30 * 150, "savings")
    go_on_slower(scheduler, node, 40)
    waiting = scheduler.start_operation("relaxed", 500)
    seen = []

    def look() -> bool:
        seen.append(operation(scheduler, waiting)["fair_share"]["cpu"])
        return len(seen) > 5 and seen[-1] > 1.0

    node.beat_until(look, "a share")
    assert max(seen) == pytest.approx(30.0, abs=0.5)
    before = volume(scheduler, "relaxed")
    node.beat_until(lambda: volume(scheduler, "relaxed") < before - 100, "it is charged")
    set_pool(scheduler, "strong", min_share_resources={"cpu": 85})
    node.beat_until(lambda: operation(scheduler, waiting)["fair_share"]["cpu"] < 16.0, "only what guarantees leave")


@pytest.mark.parametrize("distributes", [False, True])
def test_volume_that_a_full_pool_cannot_keep_goes_to_others_where_the_tree_distributes_it(scheduler, distributes):
    start_fast(scheduler, 300)
    day = {"pool_capacity_saturation_period": 100_000}
    set_tree(scheduler, should_distribute_free_volume_among_children=distributes, integral_guarantees=day)
    node = new_node(scheduler, cpu=100.0)
    flow = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 10}}
    scheduler.create_pool("full", integral_guarantees=flow)
    node.beat_until(lambda: volume(scheduler, "full") == 1000, "a day of flow")
    go_on_slower(scheduler, node, 10)
    # As much flow again: alone it needs a day, 100 s of the scheduler's, with what the full one leaves half of it.
    scheduler.create_pool("hungry", integral_guarantees={**flow, "relaxed_share_multiplier_limit": 1})
    scheduler.create_pool("proud", integral_guarantees={**flow, "can_accept_free_volume": False})

    def volumes() -> tuple[float, float]:
        told = {each["name"]: each["volume"]["cpu"] for each in scheduler.get("trees/default/pools")["pools"]}
        return told["hungry"], told["proud"]

    # One was there before the other.
    hungry, proud = volumes()
    node.beat_until(lambda: volume(scheduler, "proud") > proud + 100, "some volume")
    now = volumes()
    assert max(now) < 1000, now
    rate = (now[0] - hungry) / (now[1] - proud)
    assert (1.8 < rate < 2.2) if distributes else (0.9 < rate < 1.1), (hungry, proud, now)
