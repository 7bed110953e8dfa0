"""Cookies and indices of jobs: no two active jobs of a task have the same cookie, no index comes twice (7.4)."""

from collections import Counter

import msgspec
import pytest
from scheduler_world import PlayedNode, World, assert_consistent

from cpumond.core.wire import HeartbeatAnswer, StopOrder
from cpumond.scheduler.elements.job_numbers import EndingJob, TaskNumbers
from cpumond.scheduler.state.node_commands import CordonNode

LOST_S = 301.0
"""Longer than node_reconnection_timeout."""


def numbers(node: PlayedNode) -> list[tuple[int, int, int]]:
    """Cookie and both indices of the jobs on a node, as their environment has them."""
    names = ("YT_JOB_COOKIE", "YT_JOB_INDEX", "YT_TASK_JOB_INDEX")
    found = [tuple(int(job.order.variables[name]) for name in names) for job in node.jobs.values()]
    return [(a, b, c) for a, b, c in found]


def cookies(node: PlayedNode) -> list[int]:
    return [cookie for cookie, _, _ in numbers(node)]


def lose(world: World, *alive: PlayedNode) -> None:
    """The other nodes are silent for so long that they are given up."""
    for _ in range(6):
        world.step(LOST_S / 6 + 1.0, *alive)


def test_env_1_a_restarted_job_has_the_cookie_of_the_replaced_one(world, node):
    world.run("p", jobs=3)
    assert numbers(node) == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    node.finish(next(iter(node.jobs)), "failed", steps=3)
    assert numbers(node) == [(1, 1, 1), (2, 2, 2), (0, 3, 3)]


def test_a_job_knows_its_tree_and_node(world):
    node = world.node("n1", address="n1.example")
    world.run("p")
    (job,) = node.jobs.values()
    assert (job.order.variables["YT_POOL_TREE"], job.order.variables["YT_NODE_HOST"]) == ("default", "n1.example")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_completed_work_keeps_its_cookie_and_a_returned_one_is_given_again(world, is_restarted):
    node = world.node("n1", cpu=4)
    world.run("p", jobs=6)
    first, second, third, fourth = node.jobs
    node.finish(second)
    node.finish(third, "aborted")
    node.beat()
    node.deaf = True
    if is_restarted:
        world.restart()
        node.register()
    node.deaf = False
    world.settle_down()
    assert sorted(cookies(node)) == [0, 2, 3, 4]
    assert sorted(index for _, index, _ in numbers(node)) == [0, 3, 4, 5]
    node.finish(first)
    node.finish(fourth, "failed", steps=3)
    assert sorted(cookies(node)) == [2, 3, 4, 5]
    assert len({index for _, index, _ in numbers(node)} | {0, 1, 2, 3}) == 8


def replace_while_it_stops(world: World) -> tuple[PlayedNode, PlayedNode, str, str]:
    """One job that still stops on its node, and another one that takes its place on the other node; the operation, the
    first job."""
    node, other = world.node("n1", cpu=1), world.node("n2", cpu=1)
    operation = world.run("p")
    here, there = (node, other) if node.jobs else (other, node)
    (job,) = here.jobs
    here.keeps_stopping = True
    world.suspend(operation, abort_running_jobs=True)
    world.do(CordonNode(here.id))
    world.resume(operation)
    world.settle_down()
    return here, there, operation, job


def test_a_job_waits_for_the_end_of_the_one_whose_cookie_it_has(world):
    here, there, operation, job = replace_while_it_stops(world)
    (new,) = world.jobs_of(operation)
    assert (new.node.id, new.cookie, there.jobs) == (there.id, 0, {})
    world.restart(3, registers=True)
    assert there.jobs == {}, "nor after a restart of the scheduler"
    world.settle_down(40, 10.0)
    world.settle_down()
    assert there.jobs == {}, "nor is it given up meanwhile"
    here.let_go(job, steps=6)
    assert numbers(there) == [(0, 1, 1)]


def start_on_both(world: World) -> tuple[PlayedNode, PlayedNode, PlayedNode, str]:
    """An operation of two jobs; the node of the one with cookie 0, that of the other, one with room; the operation."""
    nodes = [world.node("n1", cpu=1), world.node("n2", cpu=1)]
    operation = world.run("p", jobs=2)
    nodes.sort(key=cookies)
    assert [cookies(node) for node in nodes] == [[0], [1]]
    return *nodes, world.node("n3", cpu=1), operation


def test_a_job_that_comes_back_is_stopped_where_another_has_its_cookie(world):
    first, second, third, operation = start_on_both(world)
    lose(world, second, third)
    assert cookies(third) == [0]
    (late,) = first.jobs
    second.finish(next(iter(second.jobs)), "failed")
    second.deaf = True
    world.beat(second)
    assert world.operation(operation).needed == {"t": 1} or second.heard.start
    first.register()
    world.beat(first)
    assert late not in first.jobs
    second.deaf = False
    world.settle_down()
    assert Counter(cookies(first) + cookies(second) + cookies(third)) == {0: 1, 1: 1}


def test_a_lost_job_that_had_completed_takes_the_place_of_its_replacement(world):
    """The other work is not left undone: with two jobs of three cookies done twice the third would be missing."""
    first, second, third, operation = start_on_both(world)
    first.finish(next(iter(first.jobs)))
    lose(world, second, third)
    assert cookies(third) == [0]
    first.register()
    world.settle_down()
    assert (cookies(third), cookies(second)) == ([], [1])
    assert world.job_counts(operation).completed == 1
    second.finish(next(iter(second.jobs)), "failed", steps=3)
    assert sorted(cookies(first) + cookies(second) + cookies(third)) == [1]


def test_a_needless_replacement_ends_though_a_take_over_does_not_know_why(world):
    first, second, third, operation = start_on_both(world)
    first.finish(next(iter(first.jobs)))
    lose(world, second, third)
    place = "start", next(iter(third.jobs))
    before = world.stored[place]
    third.deaf = True
    first.register()
    world.beat(first)
    world.stored[place] = before
    third.deaf = False
    world.restart(steps=3)
    assert (cookies(third), cookies(second)) == ([], [1])
    assert world.job_counts(operation).completed == 1


def test_jobs_started_without_numbers_take_the_places_that_are_left(world):
    node = world.node("n1", cpu=3)
    operation = world.run("p", jobs=5)
    node.finish(next(iter(node.jobs)), steps=3)
    for (kind, key), value in world.stored.items():
        if kind in ("start", "job"):
            record = msgspec.json.decode(value)
            for name in ("cookie", "job_index", "task_job_index"):
                record.pop(name, None)
            world.stored[kind, key] = msgspec.json.encode(record)
    world.restart(3, registers=True)
    assert sorted(job.cookie for job in world.jobs_of(operation)) == [0, 1, 2]
    assert_consistent(world.state)
    node.finish(next(iter(node.jobs)), steps=3)
    new = world.jobs_of(operation)[-1]
    assert (new.cookie, new.index, new.task_index) == (4, 4, 4)


def test_each_step_costs_the_same_for_any_number_of_jobs():
    """100 000 jobs of one task are started, fail and start again, in fewer calls than a scan of one list would take."""
    task = TaskNumbers("t")
    most = 100_000
    assert [task.take(f"a{number}", most) for number in range(most)] == list(range(most))
    for cookie in range(0, most, 2):
        task.give_back(cookie, f"a{cookie}")
    assert [task.take(f"b{number}", most) for number in range(most // 2)] == list(range(0, most, 2))
    assert all(task.is_taken(cookie) for cookie in range(most))


def test_a_cookie_of_a_job_that_ends_is_given_last():
    task = TaskNumbers("t")
    assert [task.take(name, 3) for name in "ab"] == [0, 1]
    task.note_ending(0, EndingJob("a", "n1"))
    task.give_back(0, "a")
    assert task.take("c", 3) == 2
    assert task.take("d", 3) == 0
    assert task.find_ending(0) == EndingJob("a", "n1")
    task.note_ended(0, "a")
    assert task.find_ending(0) is None


def stop_unstored(world: World, seconds: float = 1.0, **task: float) -> tuple[PlayedNode, PlayedNode, str, str]:
    """A job with cookie 0 was told to stop by a run of the scheduler that did not store that, and works on; the next
    run has heard of it. Its node, another one with room, the operation of two jobs, the job."""
    here = world.node("n1", cpu=2)
    operation = world.run("p", tasks={"t": {"job_count": 2, "command": "x", **task}})
    (job,) = [job.id for job in world.jobs_of(operation) if job.cookie == 0]
    here.keeps_stopping = True
    here.obey(HeartbeatAnswer(accepted=True, stop=[StopOrder(job, 60.0, "aborted", "not stored")]))
    assert list(here.stopping) == [job]
    world.after(seconds).restart()
    there = world.node("n2", cpu=2)
    world.do(CordonNode("n1"))
    here.register()
    world.beat(here)
    return here, there, operation, job


def test_an_unstored_stop_of_an_earlier_run_is_known_after_a_restart(world):
    """Else that job and its replacement were both active then, with one cookie."""
    here, there, operation, job = stop_unstored(world)
    world.settle_down()
    assert sorted((each.cookie, each.node.id) for each in world.jobs_of(operation)) == [(0, "n2"), (1, "n1")]
    world.restart()
    assert sorted((each.cookie, each.node.id) for each in world.jobs_of(operation)) == [(0, "n2"), (1, "n1")]
    assert_consistent(world.state)
    here.register()
    there.register()
    world.settle_down()
    assert there.jobs == {}, "it waits for the end of the one before"
    here.let_go(job, steps=6)
    assert cookies(there) == [0]


def test_a_job_stopped_for_its_time_keeps_its_numbers_until_its_end(world):
    here, there, _, job = stop_unstored(world, 100.0, job_time_limit=90_000)
    world.settle_down()
    for _ in range(2):
        assert (world.state.jobs[job].cookie, world.state.jobs[job].index) == (0, 0)
        assert world.state.jobs[job].keeps_place
        assert there.jobs == {}
        assert_consistent(world.state)
        world.restart()
        here.register()
        world.beat(here)


def test_stopped_work_of_an_earlier_run_that_completes_is_done(world):
    here, there, operation, job = stop_unstored(world)
    world.settle_down()
    here.let_go(job, "completed", steps=6)
    assert (cookies(here), cookies(there)) == ([1], []), "its replacement is needed no more, the other job is"
    assert world.state.finished_jobs[operation][job].cookie == 0
