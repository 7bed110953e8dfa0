"""What the scheduler tells its log of events, in which write, and what it does not tell (semantics.md 12.5)."""

import asyncio
from typing import Any

import msgspec
import pytest
from scheduler_world import ServedNode, run_jobs
from watched_store import Watched, make_scheduler, pass_time, start

from cpumond.core.wire import JobReply
from cpumond.scheduler.events import Event
from cpumond.scheduler.model import ACCESS_DENIED, RESOLVE, CommandError
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.service import Scheduler
from cpumond.scheduler.settings import commands
from cpumond.scheduler.settings.attributes import Edit
from cpumond.scheduler.settings.operations import AbortOperation, StartOperation, SuspendOperation, UpdateOperation
from cpumond.scheduler.settings.undo import UndoChange
from cpumond.scheduler.state.nodes import LOST_S

MARKER = "hunter2-marker"
ALICE = User("alice", origin="10.0.0.7, token ab12cd34")
ROOT = User("root", admin=True)


def set_weight(pool: str, weight: float | None) -> commands.ChangePool:
    return commands.ChangePool("default", pool, (Edit(("weight",), weight),))


async def find(scheduler: Scheduler, *subjects: str, limit: int = 1000) -> list[Event]:
    """The events about all of ``subjects``, the oldest first."""
    return [event for _, event in reversed(await scheduler.event_log.read(subjects, limit=limit))]


async def number_of_last(scheduler: Scheduler, *subjects: str) -> int:
    return (await scheduler.event_log.read(subjects, limit=1))[0][0]


async def refusal(scheduler: Scheduler, command: Any, user: User = ALICE) -> CommandError:
    with pytest.raises(CommandError) as caught:
        await scheduler.execute(command, user)
    return caught.value


async def test_a_command_and_its_event_are_one_write(scheduler: Scheduler, store: Watched) -> None:
    await scheduler.execute(commands.CreatePool("default", "a", attributes={"weight": 1}), ROOT)
    writes: list[tuple[int, int]] = []
    store.before = lambda: writes.append((len(store.seen), len(store.entries)))
    acting = User("alice", admin=True, origin="unix socket, uid 0", acting="root")
    await scheduler.execute(set_weight("a", 2), acting, plan="3 pools get another share")
    assert len(writes) == 1, "one write for both"
    (event,) = await find(scheduler, "user:root", "user:alice")
    assert event.text == 'root in the name of alice changed pool "a": weight 1.0 -> 2.0'
    assert (event.kind, event.command, event.tree, event.pool) == ("command", "ChangePool", "default", "a")
    assert (event.plan, event.origin) == ("3 pools get another share", "unix socket, uid 0")
    assert event.allowed_by == "alice is an administrator"
    assert [(each.attribute, each.old, each.new) for each in event.changes] == [("weight", 1.0, 2.0)]
    # A store that refuses keeps neither.
    store.refusing, before = True, len(store.entries)
    with pytest.raises(Exception, match="disk is full"):
        await scheduler.execute(set_weight("a", 3), ROOT)
    store.refusing = False
    assert len(store.entries) == before
    assert len(await find(scheduler, "audit")) == 2


async def test_what_is_said_of_dictionaries_and_lists(scheduler: Scheduler) -> None:
    """What differs inside of them, where they come and go as a whole, too."""
    flow = {"guarantee_type": "relaxed", "resource_flow": {"cpu": 2}}
    entry = {"action": "allow", "subjects": ["bob"], "permissions": ["use"]}
    await scheduler.execute(commands.CreatePool("default", "a"), ROOT)
    said = []
    for key, value in (
        ("integral_guarantees", flow),
        ("integral_guarantees", {**flow, "resource_flow": {"cpu": 3}}),
        ("integral_guarantees", None),
        ("resource_limits", {}),
        ("acl", [entry]),
    ):
        await scheduler.execute(commands.ChangePool("default", "a", (Edit((key,), value),)), ROOT)
        said.append((await find(scheduler, "audit"))[-1].text.removeprefix('root changed pool "a": '))
    flow_path, type_path = "integral_guarantees/resource_flow/cpu", "integral_guarantees/guarantee_type"
    assert said == [
        f'{type_path} unset -> "relaxed", {flow_path} unset -> 2.0',
        f"{flow_path} 2.0 -> 3.0",
        f'{type_path} "relaxed" -> unset, {flow_path} 3.0 -> unset',
        "resource_limits unset -> {}",
        'acl unset -> [{"action":"allow","subjects":["bob"],"permissions":["use"]}]',
    ]


async def test_what_is_said_of_each_command(scheduler: Scheduler) -> None:
    said = []
    for command in (
        commands.CreateTree("gpu", {"nodes_filter": "gpu"}),
        commands.ChangeTree("gpu", (Edit(("max_operation_count",), 5),)),
        commands.SetDefaultTree("default"),
        commands.CreatePool("default", "a", attributes={"strong_guarantee_resources": {"cpu": 5}}),
        commands.CreatePool("default", "a", ignore_existing=True),
        commands.CreatePool("default", "b", "a"),
        commands.MovePool("default", "b", "<Root>", "c"),
        commands.TransferPoolResources("default", "a", "c", {"strong_guarantee_resources": {"cpu": 2}}),
        commands.MovePool("default", "c", "a", "c"),
        commands.RemovePool("default", "a", recursive=True),
        start(title="nightly"),
    ):
        await scheduler.execute(command, ROOT)
        said.append((await find(scheduler, "audit"))[-1].text)
    operation = next(iter(scheduler.state.operations))
    for change in (
        UpdateOperation(operation, {"weight": 3}),
        SuspendOperation(operation, abort_running_jobs=True),
        AbortOperation(operation, "no more"),
    ):
        await scheduler.execute(change, ROOT)
        said.append((await find(scheduler, "audit", f"operation:{operation}"))[-1].text)
    name = f'operation {operation} "nightly"'
    assert said == [
        'root made pool tree "gpu"',
        'root changed pool tree "gpu": max_operation_count unset -> 5',
        'root made pool tree "default" the default one, which changed nothing',
        'root made pool "a" under "<Root>"',
        'root made pool "a" under "<Root>", which changed nothing',
        'root made pool "b" under "a"',
        'root moved pool "b": name "b" -> "c", parent_name "a" -> "<Root>"',
        'root gave resources of pool "a" to pool "c"',
        'root moved pool "c": parent_name "<Root>" -> "a"',
        'root removed pool "a" and 1 pool below it',
        f'root started {name} in pool "p"',
        f"root changed {name}: weight",
        f"root suspended {name} and aborted its running jobs",
        f"root aborted {name}: no more",
    ]


async def test_a_pool_finds_what_happens_below_it_and_where_it_was(scheduler: Scheduler) -> None:
    for command in (
        commands.CreatePool("default", "a"),
        commands.CreatePool("default", "b", "a"),
        commands.CreatePool("default", "other"),
        commands.MovePool("default", "b", "other", "c"),
        start(pool="c"),
    ):
        await scheduler.execute(command, ROOT)

    async def texts(subject: str) -> list[str]:
        return [event.command for event in await find(scheduler, subject)]

    assert await texts("pool:default/a") == ["CreatePool", "CreatePool", "MovePool"]
    assert await texts("pool:default/b") == ["CreatePool", "MovePool"]
    assert await texts("pool:default/c") == ["MovePool", "StartOperation"]
    assert await texts("pool:default/other") == ["CreatePool", "MovePool", "StartOperation"]
    assert len(await texts("tree:default")) == 5


async def test_no_secret_of_a_specification_is_told(scheduler: Scheduler, capsys: pytest.CaptureFixture[str]) -> None:
    task = {"job_count": 1, "command": f"echo {MARKER}", "environment": {"TOKEN": MARKER}, "odd": MARKER}
    spec = {"pool": "p", "tasks": {"t": task}, "note": MARKER, "title": "shown"}
    await scheduler.execute(StartOperation(spec), ROOT)
    await scheduler.execute(commands.ChangeTree("default", (Edit(("acl_required",), True),)), ROOT)
    await refusal(scheduler, StartOperation({**spec, "pool": "q", "secure_vault": {"a": MARKER}}))
    operation = next(iter(scheduler.state.operations))
    await refusal(scheduler, UpdateOperation(operation, {"environment": {"A": MARKER}, "weight": 2}))
    events = await find(scheduler)
    assert {event.kind for event in events} == {"command", "refused"}
    assert [event.request.get("spec") for event in events if event.command == "StartOperation"] == [
        {"pool": pool, "title": "shown", "tasks": {"t": {"job_count": 1}}} for pool in ("p", "q")
    ]
    assert MARKER not in msgspec.json.encode(events).decode()
    assert MARKER not in str(capsys.readouterr())


async def test_a_command_refused_for_rights_is_told_and_another_refusal_is_not(
    scheduler: Scheduler, store: Watched
) -> None:
    await scheduler.execute(commands.CreatePool("default", "a"), ROOT)
    error = await refusal(scheduler, set_weight("a", 2))
    assert error.code == ACCESS_DENIED
    assert error.is_recorded
    (event,) = await find(scheduler, "user:alice")
    assert (event.kind, event.pool, event.origin) == ("refused", "a", ALICE.origin)
    assert event.text == f'alice was refused change pool "a": {error}'
    assert event.refused == str(error)
    assert "timeline" not in store.entries[-1].subjects, "it is not for everybody"
    await refusal(scheduler, set_weight("nope", 2), ROOT)
    await refusal(scheduler, set_weight("a", -2), ROOT)
    assert len(await find(scheduler, "audit")) == 2


async def test_refusals_of_one_user_are_bounded_and_none_is_lost_from_the_count(scheduler: Scheduler) -> None:
    for number in range(150):
        await scheduler.execute(commands.CreatePool("default", f"p{number}"), ROOT)
    for number in range(150):
        await refusal(scheduler, set_weight(f"p{number}", 2))
    assert len(await find(scheduler, "user:alice")) == 100
    await refusal(scheduler, set_weight("p0", 2), User("bob"))
    assert len(await find(scheduler, "user:bob")) == 1, "another user's are told"
    await pass_time(scheduler, 61.0)
    told = await find(scheduler, "user:alice")
    assert (len(told), told[-1].count) == (101, 50)
    # The same again is counted as long as it comes within a minute.
    for _ in range(3):
        await refusal(scheduler, set_weight("p1", 2))
    assert len(await find(scheduler, "user:alice")) == 102
    await pass_time(scheduler, 61.0)
    assert (await find(scheduler, "user:alice"))[-1].count == 2


async def test_the_life_of_a_node(scheduler: Scheduler, store: Watched) -> None:
    node, reply = await run_jobs(scheduler, start(jobs=1), ROOT)
    (job,) = node.jobs
    await pass_time(scheduler, 70.0)
    await node.beat()
    await pass_time(scheduler, 70.0)
    await pass_time(scheduler, 300.0)
    await scheduler.update_all()
    assert "n1" not in scheduler.state.nodes
    kinds = [event.kind for event in await find(scheduler, "node:n1")]
    assert kinds == ["node_registered", "node_silent", "node_returned", "node_silent", "node_lost"]
    lost = (await find(scheduler, f"operation:{reply.id}", "kind:node_lost"))[0]
    assert lost.text == 'node "n1" was declared lost, silent for 370 s, with 1 job'
    # It stays to be seen, also after a restart, with the jobs that it had.
    for each in (scheduler, make_scheduler(store, scheduler.clock)):
        known = each.state.lost_nodes["n1"]
        assert (known.lost_at, [each.id for each in known.jobs]) == (scheduler.clock.at, [job])
    node.incarnation, node.sequence = "i2", 0
    await node.register()
    assert (await find(scheduler, "node:n1"))[-1].text == 'node "n1" is back, 0 s after it was declared lost'
    assert not scheduler.state.lost_nodes
    assert not make_scheduler(store, scheduler.clock).state.lost_nodes


async def test_a_lost_node_is_forgotten_after_a_day(scheduler: Scheduler, store: Watched) -> None:
    await ServedNode(scheduler).register()
    for _ in range(2):
        await pass_time(scheduler, 301.0)
    assert list(scheduler.state.lost_nodes) == ["n1"]
    await pass_time(scheduler, LOST_S + 1.0)
    assert not scheduler.state.lost_nodes
    assert "lost_node" not in {kind for kind, _, _ in store.load()}


async def test_a_node_that_may_not_register_is_told_once(scheduler: Scheduler) -> None:
    await ServedNode(scheduler).register()
    other = ServedNode(scheduler, incarnation="i9")
    for _ in range(3):
        with pytest.raises(CommandError, match="is alive"):
            await scheduler.register(other.registration(), may_replace=False)
    (event,) = await find(scheduler, "node:n1", "kind:refused")
    assert "n1" in event.text
    assert "is alive, with another agent" in event.refused


async def test_a_failed_operation_is_told_in_the_write_of_its_end(scheduler: Scheduler, store: Watched) -> None:
    node, reply = await run_jobs(scheduler, start(jobs=1, max_failed_job_count=1), User("ann", admin=True))
    node.finish(next(iter(node.jobs)), "failed")
    writes: list[int] = []
    store.before = lambda: writes.append(len(store.entries))
    await node.beat()
    assert len(writes) == 1
    (event,) = await find(scheduler, "kind:operation_failed", "user:ann", "pool:default/p")
    assert event.operation == reply.id
    assert event.text.startswith(f"operation {reply.id} of ann failed: Failed jobs limit exceeded: 1 job failed")


async def test_preemptions_of_one_period_are_told_together(scheduler: Scheduler) -> None:
    node, reply = await run_jobs(scheduler, start(jobs=4), ROOT, cpu=4.0)
    assert len(node.jobs) == 4
    await scheduler.execute(commands.CreatePool("default", "p", attributes={"resource_limits": {"cpu": 1}}), ROOT)
    await pass_time(scheduler, 6.0)
    await node.beat()
    await scheduler.update_all()
    (event,) = await find(scheduler, "kind:preemption", "node:n1", "pool:default/p", f"operation:{reply.id}")
    assert (event.count, event.command, event.node, event.job) == (3, "limit_violated", "n1", "")
    assert event.text.startswith(f'3 jobs of operation {reply.id} in pool "p": preempted: pool "p" used more')


async def test_a_contested_limit_is_told_once_an_hour(scheduler: Scheduler) -> None:
    node, _ = await run_jobs(scheduler, start(jobs=1), ROOT)

    async def report_mode(mode: str) -> None:
        heartbeat = node.heartbeat()
        jobs = [msgspec.structs.replace(job, mode=mode) for job in heartbeat.jobs]
        await scheduler.heartbeat(msgspec.structs.replace(heartbeat, jobs=jobs))
        await scheduler.update_all()

    for mode in ("contested", "contested", "reclaim", "overridden", "reclaim"):
        await report_mode(mode)
    (event,) = await find(scheduler, "kind:limit_contested", "node:n1")
    assert "is contested" in event.text
    scheduler.clock.at += 3601.0
    await report_mode("overridden")
    assert len(await find(scheduler, "kind:limit_contested")) == 2


async def test_a_pin_is_told_when_its_node_has_done_it(scheduler: Scheduler) -> None:
    node, reply = await run_jobs(scheduler, start(jobs=1), ROOT)
    (job,) = node.jobs
    asked = asyncio.ensure_future(scheduler.ask_job(reply.id, job, "pin", 0.5, 60.0, ALICE))
    await asyncio.sleep(0)
    (request,) = (await node.beat()).requests
    assert not await find(scheduler, "user:alice")
    scheduler.requests.take(JobReply("n1", request.request_id, {"job_id": job}))
    await asked
    (event,) = await find(scheduler, "user:alice", "audit", "node:n1", f"operation:{reply.id}")
    assert event.text == f'alice pinned job {job} to 0.5 cores on node "n1"'
    assert event.request == {"cpu_limit": 0.5, "ttl_s": 60.0}


async def test_what_the_store_refuses_waits_for_the_next_period(scheduler: Scheduler, store: Watched) -> None:
    await ServedNode(scheduler).register()
    await pass_time(scheduler, 61.0)
    store.refusing = True
    await scheduler.update_all()
    await scheduler.update_all()
    store.refusing = False
    await scheduler.update_all()
    await scheduler.update_all()
    assert [event.kind for event in await find(scheduler, "node:n1")] == ["node_registered", "node_silent"]


async def test_a_change_is_taken_back_and_the_undo_too(scheduler: Scheduler, store: Watched) -> None:
    await scheduler.execute(commands.CreatePool("default", "a", attributes={"weight": 1}), ROOT)
    await scheduler.execute(commands.CreatePool("default", "b", "a"), ROOT)
    await scheduler.execute(commands.RemovePool("default", "a", recursive=True), ROOT)
    removal = await number_of_last(scheduler, "audit")
    await scheduler.execute(UndoChange(removal), ROOT, plan="seen")
    pools = scheduler.state.config.trees["default"].pools
    found = {name: (pool.parent, dict(pool.attributes)) for name, pool in pools.items()}
    assert found == {"a": ("<Root>", {"weight": 1.0}), "b": ("a", {})}
    event = (await find(scheduler, "audit"))[-1]
    assert (event.undoes, event.plan, event.command) == (removal, "seen", "Undo")
    assert event.text == f'root took back change {removal}: pool "a" is there, pool "b" is there'
    await scheduler.execute(UndoChange(await number_of_last(scheduler, "audit")), ROOT)
    assert not scheduler.state.config.trees["default"].pools
    assert make_scheduler(store).state.config.trees["default"].pools == {}


async def test_an_undo_says_which_later_change_is_in_its_way(scheduler: Scheduler) -> None:
    await scheduler.execute(commands.CreatePool("default", "a"), ROOT)
    await scheduler.execute(set_weight("a", 2), ROOT)
    number = await number_of_last(scheduler, "audit")
    await scheduler.execute(commands.CreatePool("default", "b"), ROOT)
    await scheduler.execute(set_weight("a", 3), User("ann", admin=True))
    later = await number_of_last(scheduler, "audit")
    assert str(await refusal(scheduler, UndoChange(number), ROOT)) == (
        f'change {number} cannot be undone: pool "a" in tree "default": weight is 3.0 now, not 2.0 as that '
        f'change left it; since then ann changed pool "a": weight 2.0 -> 3.0 (change {later})'
    )
    await scheduler.execute(commands.MovePool("default", "a", "<Root>", "z"), ROOT)
    assert f'"a" -> "z" (change {later + 1})' in str(await refusal(scheduler, UndoChange(number), ROOT))
    # What has nothing to do with it is no hindrance.
    await scheduler.execute(commands.MovePool("default", "z", "<Root>", "a"), ROOT)
    await scheduler.execute(UndoChange(later), ROOT)
    await scheduler.execute(UndoChange(number), ROOT)
    assert not scheduler.state.config.trees["default"].pools["a"].attributes


async def test_what_cannot_be_undone(scheduler: Scheduler) -> None:
    await scheduler.execute(start(), ROOT)
    number = await number_of_last(scheduler)
    for user in (ROOT, ALICE):  # who may not read the log learns nothing of it either
        text = f"change {number} changed no tree or pool; only such changes can be undone"
        assert str(await refusal(scheduler, UndoChange(number), user)) == text
    for none in (number + 1, 0, -3):
        error = await refusal(scheduler, UndoChange(none), ROOT)
        assert (error.code, f"there is no change {none}" in str(error)) == (RESOLVE, True)
