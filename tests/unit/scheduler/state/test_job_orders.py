"""How much one heartbeat answer carries: agents refuse answers that are too long and would hear nothing any more."""

import msgspec
import pytest
from scheduler_world import EASY, PlayedNode, World, assert_consistent

from cpumond.scheduler.model import JobCounts, Rules
from cpumond.scheduler.state import heartbeats
from cpumond.scheduler.state.dispatch import MAX_ORDER_BYTES, MAX_ORDERS

WAIT_S = 30.0
"""waiting_job_timeout of these worlds."""


@pytest.fixture
def world():
    world = World(Rules(spare=EASY.spare, waiting_job_timeout_s=WAIT_S), pools=["p"])
    yield world
    assert_consistent(world.state)


def start(world: World, jobs: int, command: str = "true", **environment: str) -> str:
    return world.start("p", jobs=jobs, cpu=0.001, task={"command": command, "environment": environment})


def start_long(world: World, jobs: int, kib: int, character: str = "x") -> str:
    """An operation each of whose orders takes ``kib`` kibibytes; more where a character takes more than one."""
    return start(world, jobs, **{f"V{i}": character * 16 * 1024 for i in range(kib // 16)})


def ordered(node: PlayedNode) -> list[str]:
    return [order.job_id for order in node.heard.start]


def started(world: World, *operations: str) -> list[str]:
    jobs = [job for operation in operations for job in world.jobs_of(operation)]
    return [job.id for job in sorted(jobs, key=lambda job: job.sequence)]


def test_many_jobs_come_with_several_answers_the_oldest_first(world, node):
    operation = start(world, 2 * MAX_ORDERS + 50)
    world.step()
    jobs = started(world, operation)
    assert len(jobs) == 2 * MAX_ORDERS + 50
    assert ordered(node) == jobs[:MAX_ORDERS]
    world.step()
    assert ordered(node) == jobs[MAX_ORDERS : 2 * MAX_ORDERS]
    world.step()
    assert ordered(node) == jobs[2 * MAX_ORDERS :]
    assert list(node.jobs) == jobs
    world.step()
    assert ordered(node) == []


@pytest.mark.parametrize("character", ["x", "\x01", "\u20ac", '"'])
def test_long_commands_come_with_several_answers_of_a_bounded_size(world, node, character):
    operation = start_long(world, 30, 80, character)
    sizes = []
    while len(node.jobs) < 30:
        world.step()
        sizes.append(len(msgspec.json.encode(node.heard)))
    assert max(sizes) <= MAX_ORDER_BYTES + 10_000
    assert max(sizes) > MAX_ORDER_BYTES / 2
    assert list(node.jobs) == started(world, operation)


def test_waiting_job_timeout_runs_from_the_first_answer_with_the_order(world, node):
    node.has_no_room = True
    operation = start_long(world, 40, 240)  # four in each answer
    world.step()
    jobs = started(world, operation)
    assert len(ordered(node)) == 4
    for _ in range(32):  # and two heartbeats for the node's own word
        world.step()
    assert world.record(operation).counts == {}
    world.step()
    first = world.state.finished_jobs[operation]
    assert list(first) == jobs[:4]
    assert {job.reason for job in first.values()} == {"node n1 did not start it within waiting_job_timeout (33 s)"}
    world.step()
    assert list(world.state.finished_jobs[operation]) == jobs[:8]


def test_an_order_that_no_answer_has_room_for_is_given_up_at_last(world, node):
    operation = start_long(world, 5, 240)
    world.step()
    assert len(node.jobs) == 4
    (unsent,) = [job for job in world.jobs_of(operation) if job.first_sent_at is None]
    world.now += 10 * WAIT_S
    world.carry_out(heartbeats.receive(world.state, node.heartbeat(), world.now).transaction)
    assert unsent.id in world.state.jobs
    world.now += 0.5
    world.carry_out(heartbeats.receive(world.state, node.heartbeat(), world.now).transaction)
    record = world.state.finished_jobs[operation][unsent.id]
    assert (record.state, record.reason) == ("aborted", "no answer to node n1 had space for its start within 300 s")
    assert world.record(operation).counts == {"t": JobCounts(aborted=1)}


def test_a_job_whose_order_was_never_sent_is_gone_once_it_is_not_needed(world, node):
    operation = start(world, MAX_ORDERS + 10)
    world.step()
    assert len(node.jobs) == MAX_ORDERS
    world.abort(operation)
    world.settle_down(2)
    assert world.state.jobs == {}
    assert len(node.jobs) == 0
    assert len(world.state.finished_jobs[operation]) == MAX_ORDERS + 10
