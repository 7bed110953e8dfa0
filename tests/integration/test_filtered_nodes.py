"""Tags of nodes and ``scheduling_tag_filter`` by the unmodified ``yt``, on a real scheduler (semantics.md 2.13)."""

import json

from scheduler_process import PlayedNode, SchedulerProcess


def yt(scheduler: SchedulerProcess, *words: str) -> str:
    done = scheduler.yt(*words, bindings=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def start(scheduler: SchedulerProcess, jobs: int, spec: str = "", task: str = "") -> str:
    tasks = f"{{t={{job_count={jobs};command=true;cpu_limit=1.0;memory_limit=1;{task}}}}}"
    return yt(scheduler, "vanilla", "--tasks", tasks, "--spec", f"{{{spec}}}", "--async")


def settle(scheduler: SchedulerProcess, nodes: list[PlayedNode], operation: str) -> list[int]:
    """How many jobs of an operation each node has when all that start by themselves have."""
    for _ in range(3):
        scheduler.wait_updates()
        for node in nodes:
            node.beat()
    return [len(node.jobs_of(operation)) for node in nodes]


def end(scheduler: SchedulerProcess, nodes: list[PlayedNode], operation: str) -> None:
    scheduler.post(f"operations/{operation}/abort", {})
    for node in nodes:
        node.beat_until(lambda node=node: not node.jobs_of(operation), "the end of the jobs")


def test_jobs_follow_tags_of_nodes_and_filters_of_operations_and_pools(scheduler: SchedulerProcess) -> None:
    """TAG-1 to TAG-5. What fails, waits or is stuck is in ``tests/unit/scheduler/state``."""
    scheduler.write_config("min_spare_job_resources_on_node = {user_slots = 0, cpu = 0.0, memory = 0}\n")
    scheduler.start()
    nodes = [PlayedNode(scheduler, "n1", 3.0), PlayedNode(scheduler, "n2", 7.0)]
    for node in nodes:
        node.register()
        node.beat()
    yt(scheduler, "set", "//sys/cluster_nodes/n1/@user_tags", "[ssd]")
    assert scheduler.get("nodes/n1")["tags"] == ["n1", "ssd"]
    attributes = '{name=fast;pool_tree=default;scheduling_tag_filter="ssd"}'
    yt(scheduler, "create", "scheduler_pool", "--attributes", attributes)
    for spec, jobs in (('pool=fast;scheduling_tag="!ssd"', [0, 0]), ("pool=fast", [3, 0])):
        operation = start(scheduler, 10, spec)
        assert settle(scheduler, nodes, operation) == jobs
        end(scheduler, nodes, operation)
    refused = scheduler.yt("set", "//sys/pool_trees/default/fast/@scheduling_tag_filter", '"a&&b"', bindings=False)
    assert (refused.returncode, "column 2" in refused.stderr) == (1, True)

    operation = start(scheduler, 20, 'scheduling_tag_filter="!ssd"', "scheduling_tag_filter=ssd")
    assert settle(scheduler, nodes, operation) == [0, 7]
    yt(scheduler, "update-op-parameters", operation, "{scheduling_tag_filter=ssd}")
    shown = json.loads(yt(scheduler, "get-operation", operation, "--format", "json"))
    assert shown["runtime_parameters"]["scheduling_tag_filter"] == "ssd"
    assert shown["unrecognized_spec"] == {"tasks": {"t": {"scheduling_tag_filter": "ssd"}}}
    assert settle(scheduler, nodes, operation) == [3, 7]
