"""Heartbeats as differences: when they are sent, and that a state takes them as it takes the full ones."""

import random

import msgspec
import pytest
from scheduler_world import EASY, PlayedNode, World, describe

from cpumond.core.difference import FULL_EVERY, Differences
from cpumond.core.wire import Heartbeat, HeartbeatAnswer, JobReport, NodeHeartbeat

TAKEN = HeartbeatAnswer(accepted=True, differences=True)


def beat(sequence: int, cores: dict[str, float], incarnation: str = "i1") -> Heartbeat:
    reports = [JobReport(job, "o", 1.0, limit) for job, limit in cores.items()]
    return Heartbeat("n", incarnation, sequence, 0.0, 8.0, reports)


def test_a_heartbeat_whose_answer_is_lost_is_followed_by_a_full_one():
    differences = Differences()
    differences.taken(differences.make(beat(1, {"a": 1.0})), TAKEN)
    assert isinstance(differences.make(beat(2, {"a": 1.0})), NodeHeartbeat)
    third = beat(3, {"a": 1.0})
    assert differences.make(third) is third


def test_a_scheduler_that_knows_no_differences_gets_none():
    differences = Differences()
    for sequence in range(3):
        full = beat(sequence, {"a": 1.0})
        assert differences.make(full) is full
        differences.taken(full, HeartbeatAnswer(accepted=True))
    assert b'"base"' not in msgspec.json.encode(full)


def test_another_run_of_the_agent_and_jobs_of_one_id_are_told_in_full():
    differences = Differences()
    differences.taken(beat(1, {"a": 1.0}), TAKEN)
    other = beat(2, {"a": 1.0}, "i2")
    assert differences.make(other) is other
    twice = msgspec.structs.replace(other, jobs=other.jobs * 2)
    differences.taken(twice, TAKEN)
    assert differences.make(other) is other


def test_the_full_state_is_told_now_and_then():
    differences = Differences()
    full = 0
    for sequence in range(3 * (FULL_EVERY + 1)):
        heartbeat = beat(sequence, {"a": 1.0})
        full += differences.make(heartbeat) is heartbeat
        differences.taken(heartbeat, TAKEN)
    assert full == 3


def test_a_difference_to_another_heartbeat_is_dropped_for_the_full_state():
    world = World(EASY)
    node = world.node("n1")
    world.create_pool("p")
    world.start("p", jobs=3)
    world.settle_down()
    before = describe(world.state)
    told = node.differences.make(node.heartbeat())
    assert isinstance(told, NodeHeartbeat)
    for wrong in ({"base": told.base - 1}, {"job_count": told.job_count + 1}, {"gone": [next(iter(node.jobs))]}):
        answer = world.hear(msgspec.structs.replace(told, **wrong))
        assert (answer.accepted, answer.full, answer.register) == (False, True, False)
    assert describe(world.state) == before
    assert world.hear(told).accepted
    world.restart()
    assert world.hear(msgspec.structs.replace(told, sequence=told.sequence + 1, base=told.sequence)).full


@pytest.mark.parametrize("seed", range(10))
def test_differences_lead_to_the_same_state_as_full_heartbeats(seed):
    """Two worlds with the same life, one node of each full, the other with differences."""
    worlds = []
    for is_full in (False, True):
        rng = random.Random(seed)
        world = World(EASY, job_preemption_timeout=2000)
        node = world.node("n1", cpu=6)
        world.create_pool("p")
        for _ in range(60):
            live_randomly(world, node, rng)
            if is_full:
                node.differences = Differences()
            world.step()
        worlds.append(world)
    one, two = worlds
    assert describe(one.state) == describe(two.state)
    assert one.state.nodes["n1"].foreign_usage == two.state.nodes["n1"].foreign_usage


def live_randomly(world: World, node: PlayedNode, rng: random.Random) -> None:
    jobs, operations = sorted(node.jobs), sorted(world.state.operations)
    match rng.randrange(12):
        case 0 | 1:
            world.start("p", jobs=rng.randint(1, 3))
        case 2 | 3 if jobs:
            node.limit(rng.choice(jobs), rng.choice([0.5, 1.0]))
        case 4 | 5 if jobs:
            node.finish(rng.choice(jobs))
        case 6 if jobs:
            gone = rng.choice(jobs)
            del node.jobs[gone]
            node.stopping.pop(gone, None)
        case 7:
            node.foreign = [JobReport(f"f{n}", "", 1.0, rng.choice([0.5, 1.0])) for n in range(rng.randint(0, 2))]
        case 8 if operations:
            world.abort(rng.choice(operations))
        case 9:
            node.keeps_stopping = not node.keeps_stopping
            for job in [] if node.keeps_stopping else list(node.stopping):
                node.let_go(job)
        case 10:
            world.restart()
        case 11:
            node.restart_agent()
