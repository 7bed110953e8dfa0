"""Why CPU stands idle: parts, sentences, who may read what, one pool's part; waiting demand; pools in a sentence."""

import asyncio

import msgspec
import pytest
from scheduler_world import GIB, TREE, ServedNode, World, make_task

from cpumond.core.wire import JobReport
from cpumond.scheduler.answers.idle import IdleReport, idle_reasons, in_pool, readable
from cpumond.scheduler.answers.idle_trials import find_idle
from cpumond.scheduler.answers.pool import describe_pool
from cpumond.scheduler.model import ROOT_POOL, CommandError
from cpumond.scheduler.settings.commands import ConfigCommand, CreatePool
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.state.commands import note_refused, prepare


def look(world: World) -> IdleReport:
    return find_idle(world.state, world.tree(), world.now)


@pytest.fixture
def full() -> World:
    """Pool lab runs 2 of 6 operations; 4 of 24 cores are used."""
    world = World()
    world.create_pool("lab", max_running_operation_count=2)
    world.create_pool("team", "lab")
    world.create_pool("other")
    for _ in range(6):
        world.start("team", cpu=2.0)
    world.add_nodes(3, 8.0, 64 * GIB)
    world.settle_down()
    return world


def test_the_sentence_says_how_much_why_and_what_to_do(full):
    report = look(full)
    assert report.sentence == (
        "8 cores stand idle while 4 operations wait: max_running_operation_count of pool lab is 2; raise it to 6 and "
        "8 cores start work"
    )
    [cause] = report.causes
    told = cause.kind, cause.pool, cause.cores, cause.operation_count
    assert told == ("max_running_operation_count", "lab", 8.0, 4)
    assert cause.change.shell == ["cpumond pool set lab max_running_operation_count=6 --tree default"]
    assert report.held_by_pool == {"team": 8.0, "lab": 8.0, "<Root>": 8.0}
    reasons = idle_reasons(report)
    assert (reasons["max_running_operation_count"], reasons["no_work"]) == (8.0, 12.0)
    assert reasons.keys() == idle_reasons(look(World())).keys(), "always the same series"


def test_a_pool_s_part_has_limits_above_and_below_it_and_no_others(full):
    full.run("other", jobs=1, cpu=9.0)
    report = look(full)
    assert {cause.kind for cause in report.causes} == {"max_running_operation_count", "fragmentation"}
    of_team = in_pool(report, "team", frozenset({"lab", "<Root>"}), frozenset({"team"}))
    assert [cause.pool for cause in of_team.causes] == ["lab"]
    of_other = in_pool(report, "other", frozenset({"<Root>"}), frozenset({"other"}))
    assert [cause.kind for cause in of_other.causes] == ["fragmentation"]


def refuse(world: World, pool: str, cores: float, times: int = 1) -> None:
    for _ in range(times):
        command = StartOperation({"pool": pool, "tasks": {"t": make_task(cpu_limit=cores)}})
        with pytest.raises(CommandError) as refused:
            prepare(world.state, command, "ann", world.now, lambda: "none")
        note_refused(world.state, command, refused.value, world.now)


def test_refused_starts_are_reported_while_cpu_is_idle_for_lack_of_work(world):
    world.create_pool("lab", max_operation_count=2)
    world.create_pool("team", "lab")
    world.node("n0", 16.0)
    ended = [world.start("team", cpu=1.0) for _ in range(2)]
    world.settle_down()
    assert look(world).sentence == "14 cores stand idle for lack of work: no operation waits for CPU"
    refuse(world, "team", 4.0, times=3)
    report = look(world)
    assert report.sentence == (
        "14 cores stand idle for lack of work: 3 starts of operations were refused in the last hour: "
        "max_operation_count of pool lab is 2; raise it to 5 and up to 12 cores start work once these are started again"
    )
    [cause] = report.causes
    assert (cause.kind, cause.pool, cause.cores, cause.idle_cores) == ("max_operation_count", "lab", 12.0, 0.0)
    assert (cause.operation_count, cause.operations) == (3, [])
    assert cause.change.shell == ["cpumond pool set lab max_operation_count=5 --tree default"]
    reasons = idle_reasons(report)
    assert (reasons["no_work"], sum(reasons.values())) == (14.0, 14.0)
    assert in_pool(report, "team", frozenset({"lab", ROOT_POOL}), frozenset({"team"})).causes == [cause]
    world.complete(*ended)
    world.step(3000.0)
    assert [each.kind for each in look(world).causes] == ["max_operation_count"]
    world.set_pool("lab", max_operation_count=5)
    assert look(world).causes == []


def test_of_refused_starts_as_many_cores_are_told_as_may_run_at_once():
    world = World(max_operation_count=6)
    world.create_pool("p", max_operation_count=2, max_running_operation_count=2)
    world.create_pool("q", max_operation_count=4, max_running_operation_count=3)
    world.node("n0", 64.0)
    for pool, number in (("p", 2), ("q", 1)):
        for _ in range(number):
            world.start(pool, cpu=1.0)
    world.settle_down()
    refuse(world, "p", 2.0, times=4)
    [cause] = look(world).causes
    # All of them could only run with two limits of the pool raised, and with one of the tree.
    assert cause.cores == 8.0
    assert cause.change.shell == [
        "cpumond pool set p max_operation_count=6 max_running_operation_count=6 --tree default",
        "cpumond tree set default max_operation_count=7",
    ]
    assert "max_operation_count and max_running_operation_count of pool p are 2 and 2" in cause.why
    for _ in range(3):
        world.start("q", cpu=0.5)
    world.settle_down()
    # What waits comes first.
    assert [each.kind for each in look(world).causes] == ["max_running_operation_count", "max_operation_count"]


def test_a_user_s_pool_that_refuses_is_made_a_pool_in_one_step():
    world = World(nodes={"n0": 8.0}, max_operation_count_per_pool=1, max_running_operation_count_per_pool=1)
    world.run(user="ann", cpu=1.0)
    refuse(world, "", 2.0, times=2)
    [cause] = look(world).causes
    [told] = cause.change.shell
    assert told == "cpumond pool create ann max_operation_count=3 max_running_operation_count=3 --tree default"
    world.do(msgspec.convert(cause.change.commands[0], ConfigCommand))
    for _ in range(2):
        world.start("ann", cpu=2.0)
    world.settle_down()
    assert world.cores("ann") == 5.0


def test_idle_for_lack_of_work_and_nothing_idle_are_said_so():
    world = World(nodes={"n0": 8.0})
    world.settle_down()
    assert look(world).sentence == "8 cores stand idle for lack of work: no operation waits for CPU"
    world.create_pool("p")
    world.start("p", jobs=12, cpu=1.0)
    assert "waiting jobs are about to get 8 cores" in look(world).sentence
    world.settle_down()
    assert look(world).sentence == "no CPU stands idle while 1 operation waits: all of it is allocated to jobs"


def test_used_cpu_is_the_nodes_word_and_what_reclaimed_cores_made_possible(world):
    node = world.node("n0", 8.0)
    world.run("p", jobs=2, cpu=4.0)
    for job_id in list(node.jobs):
        node.limit(job_id, 1.0)
        node.jobs[job_id].smoothed_cpu_usage = 0.5
    world.run("p", jobs=1, cpu=6.0)
    parts = look(world).parts
    # 14 cores are ordered of 8: the limits are 1 + 1 + 6, of which 0.5 + 0.5 + 6 are used, 6 of them beyond capacity.
    assert (parts.capacity, parts.used, parts.reused, parts.unused) == (8.0, 1.0, 6.0, 1.0)


def test_jobs_of_nobody_and_silent_nodes_are_no_idle_cpu(world):
    node = world.node("n0", 8.0)
    world.node("n1", 4.0)
    node.foreign.append(JobReport("x", "", cpu_limit=3.0, current_cpu_limit=3.0))
    world.settle_down()
    world.step(world.rules.node_heartbeat_timeout_s + 1.0, node)
    parts = look(world).parts
    assert (parts.capacity, parts.silent, parts.without_work) == (12.0, 4.0, 5.0)


def test_who_may_not_read_an_operation_is_not_told_its_id():
    world = World(pools=["p"], nodes={"n0": 8.0})
    operation = world.run("p", jobs=8, cpu=1.0, resource_limits={"cpu": 3})
    report = look(world)
    assert operation in report.sentence
    hidden = readable(report, lambda _: False)
    assert operation not in str(hidden)
    assert hidden.causes[0].operation_count == 1
    assert readable(report, lambda _: True) == report


def test_pending_operations_are_waiting_demand_of_all_pools_above(full):
    assert [full.pool(name).waiting[1] for name in ("team", "lab", "<Root>", "other")] == [8.0, 8.0, 8.0, 0.0]
    assert [full.pool(name).demand[1] for name in ("team", "lab", "<Root>")] == [4.0, 4.0, 4.0]
    pending = next(iter(full.tree().queue))
    for change, cores in ((full.suspend, 6.0), (full.resume, 8.0)):
        change(pending)
        full.update()
        assert full.pool("lab").waiting[1] == cores
    full.set_pool("lab", max_running_operation_count=4)
    full.update()
    assert [full.pool(name).waiting[1] for name in ("team", "lab")] == [4.0, 4.0]
    assert full.pool("lab").demand[1] == 8.0


def test_a_pool_explains_why_its_guarantee_is_unused_without_starving(world):
    world.create_pool("prod", strong_guarantee_resources={"cpu": 12.0}, max_running_operation_count=0)
    world.node("n0", 20.0)
    for _ in range(13):
        world.start("prod", cpu=1.0)
    world.settle_down()
    assert describe_pool(world.pool("prod"), world.now) == (
        "not starving, but it is allocated 0 of 12 guaranteed cores: operations that do not run yet want 13 cores, "
        'because pool "prod" runs 0 operations of at most 0'
    )
    assert describe_pool(world.pool("<Root>"), world.now) == ""


def test_a_pool_that_starves_says_since_when(world):
    world.create_pool("prod", strong_guarantee_resources={"cpu": 8.0})
    world.create_pool("dev")
    world.node("n0", 8.0)
    other = world.run("dev", jobs=4, cpu=2.0)
    world.start("prod", jobs=4, cpu=2.0)
    world.step()
    assert describe_pool(world.pool("prod"), world.now).startswith("starves in 30 s, below its guarantee")
    world.step(40.0)
    assert describe_pool(world.pool("prod"), world.now) == (
        "starving, below its guarantee for 40 s: 4 jobs of others are protected by their number "
        f"(operation {other}: 4): an operation with fewer than 10 jobs loses none "
        '(max_unpreemptible_running_job_count of tree "default"); lower it, 0 turns it off'
    )


async def test_reports_are_made_beside_the_service_and_kept_until_a_change(scheduler):
    await scheduler.execute(CreatePool(TREE, "p", attributes={"max_running_operation_count": 0}), "ann")
    node = ServedNode(scheduler, 8.0)
    await node.register()
    waiting = StartOperation({"pool": "p", "tasks": {"t": {"command": "true", "job_count": 1, "cpu_limit": 2.0}}})
    await scheduler.execute(waiting, "ann")
    await scheduler.update_all()
    await node.beat()
    tree = scheduler.state.trees[TREE]
    first, same = await asyncio.gather(scheduler.idle.read(tree), scheduler.idle.read(tree))
    assert first is same is await scheduler.idle.read(tree)
    assert tree.root.held_cores == tree.pools["p"].held_cores == 2.0
    assert tree.root.idle_cores == 8.0
    await scheduler.execute(waiting, "ann")
    assert (await scheduler.idle.read(tree)).parts.held_back == 4.0
    scheduler.idle.take_if_due()
    await scheduler.idle.close()


def test_a_gang_whose_jobs_fit_no_node_is_advised_and_then_starts():
    world = World(pools=["lab"])
    world.add_nodes(3, 2.0, 64 * GIB)
    gang = world.run("lab", jobs=3, cpu=5.0, is_gang=True)
    report = look(world)
    assert report.sentence == (
        "1 operation cannot start: 5 cores, largest node 2; "
        "6 cores stand idle while 1 operation waits: a gang starts only when all of its 3 jobs fit at once, and CPU is "
        f"free in pieces of at most 2 cores, less than a job requests; start operation {gang} again with at most 3 "
        "jobs of at most 2 cores each and 6 cores start work"
    )
    [cause] = report.causes
    assert (cause.kind, cause.cores, cause.change.operations) == ("gang", 6.0, [gang])
    world.abort(gang)
    world.run("lab", jobs=3, cpu=2.0, is_gang=True)
    assert world.cores("lab") == 6.0


@pytest.mark.parametrize("is_gang", [True, False])
def test_nobody_is_advised_to_order_less_than_a_tenth_of_a_core(is_gang):
    world = World(pools=["lab"])
    world.add_nodes(4, 0.08, 64 * GIB)
    world.run("lab", jobs=3, cpu=1.0, is_gang=is_gang)
    report = look(world)
    assert "wait until jobs end, or add a node" in report.sentence
    assert "request at most" not in report.sentence
    assert "jobs of at most" not in report.sentence


def test_a_job_that_no_node_could_hold_is_in_the_way_of_itself():
    world = World(pools=["lab"])
    world.node("n", 4.0, 64 * GIB)
    big = world.run("lab", jobs=1, cpu=9.0)
    report = look(world)
    assert report.sentence == (
        "1 operation cannot start: 9 cores, largest node 4; "
        "4 cores stand idle while 1 operation waits: they are in pieces of at most 4 cores, and each waiting job "
        "requests 9 cores; request at most 4 cores for a job and 4 cores start work"
    )
    [cause] = report.causes
    assert (cause.kind, cause.pool, cause.cores, cause.idle_cores) == ("fragmentation", "lab", 4.0, 4.0)
    world.abort(big)
    world.start("lab", jobs=1, cpu=4.0)
    world.run("lab", jobs=1, cpu=2.0)
    assert look(world).causes == [], "what fits an empty node waits for the end of others"


def test_a_pool_is_told_what_holds_back_its_own_operations():
    world = World(pools=["most", "least", "none"])
    world.add_nodes(4, 3.0, 64 * GIB)
    world.start("most", jobs=3, cpu=5.0)
    world.run("least", jobs=1, cpu=5.0)
    report = look(world)
    [cause] = report.causes
    assert (cause.pool, cause.pools) == ("most", ["least", "most"])
    above = frozenset({"<Root>"})
    for name in ("most", "least"):
        of_pool = in_pool(report, name, above, frozenset({name}))
        assert (of_pool.causes, of_pool.sentence) == ([cause], report.sentence)
    of_none = in_pool(report, "none", above, frozenset({"none"}))
    assert of_none.causes == []
    assert of_none.sentence == f"nothing blocks pool none; in the whole tree {report.sentence}"


def make_owners(jobs: int) -> World:
    """A node of 8 cores whose jobs ordered 2 each and have 0.5."""
    world = World(max_ephemeral_pools_per_user=9)
    node = world.node("n0", 8.0)
    world.run("owners", jobs=jobs, cpu=2.0)
    for job in node.jobs:
        node.limit(job, 0.5)
    return world


def test_an_operation_that_refuses_reclaimed_cpu_waits_for_free_requests():
    world = make_owners(3)
    refusing = world.run("picky", jobs=3, cpu=2.0, allow_reclaimed=False)
    assert len(world.jobs_of(refusing)) == 1
    report = look(world)
    (cause,) = report.causes
    assert (cause.kind, cause.cores, cause.operations) == ("allow_reclaimed", 4.0, [refusing])
    assert idle_reasons(report)["allow_reclaimed"] == 4.0
    assert report.sentence == (
        "4 cores stand idle while 1 operation waits: allow_reclaimed of 1 waiting operation is false, and other jobs "
        f"requested the CPU that is free; start it again with allow_reclaimed = true ({refusing}) and 4 cores start "
        "work"
    )


@pytest.mark.parametrize(
    ("picky", "other", "started"),
    [
        ({"jobs": 2, "cpu": 2.0}, {"jobs": 1, "cpu": 2.0}, 4.0),
        ({"jobs": 2, "cpu": 2.0, "is_gang": True}, {"jobs": 1, "cpu": 2.0}, 6.0),
        ({"jobs": 1, "cpu": 2.0}, {"jobs": 2, "cpu": 2.5, "is_gang": True}, 7.0),
    ],
)
def test_the_why_of_refused_reclaimed_cpu_is_what_the_next_heartbeat_shows(picky, other, started):
    world = make_owners(2)
    world.step()
    world.start("picky", allow_reclaimed=False, **picky)
    world.start("other", **other)
    world.update()
    before, report = world.cores(ROOT_POOL), look(world)
    assert report.parts.starting == started
    world.settle_down()
    assert world.cores(ROOT_POOL) - before == started
    told, then = ([(each.kind, each.cores) for each in found.causes] for found in (report, look(world)))
    assert told == then == ([("allow_reclaimed", 2.0)] if started == 4.0 else [])


def test_an_advice_that_the_pools_own_options_refuse_changes_these_too(world):
    world.create_pool("lab", max_running_operation_count=1, max_operation_count=9)
    world.node("n0", 8.0)
    for _ in range(4):
        world.start("lab", cpu=1.0)
    world.set_pool("lab", max_operation_count=2)
    world.settle_down()
    [cause] = look(world).causes
    [told] = cause.change.shell
    assert told == "cpumond pool set lab max_operation_count=4 max_running_operation_count=4 --tree default"
    for command in cause.change.commands:
        world.do(msgspec.convert(command, ConfigCommand))
    world.settle_down()
    assert world.cores("lab") == 1.0 + cause.cores == 4.0
