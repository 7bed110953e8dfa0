"""Commands of the ``yt`` protocol about jobs (yt_protocol.md 11)."""

import asyncio

import pytest
from yt_client import error_of

from cpumond.core.wire import MAX_LOG_BYTES, JobLog


async def end(yt, job_id, state="completed", **facts):
    yt.clock.at += 0.5
    yt.node.finish(job_id, state, **facts)
    assert (await yt.node.beat()).accepted


async def list_ids(yt, operation, **parameters):
    return [job["id"] for job in (await yt("list_jobs", operation_id=operation, **parameters))["jobs"]]


async def test_progress_has_the_time_and_the_counts_that_the_client_prints(yt):
    """JOB-5: without a newer ``build_time`` the client prints no line of progress, without a count it fails."""
    operation, _ = await yt.run()
    first = (await yt("get_operation", operation_id=operation, attributes=["brief_progress"]))["brief_progress"]
    await yt.heartbeat()
    second = (await yt("get_operation", operation_id=operation, attributes=["brief_progress"]))["brief_progress"]
    assert first["build_time"] < second["build_time"]
    assert set(first["jobs"]) >= {"running", "completed", "pending", "failed", "aborted", "lost", "total"}
    assert (first["state"], first["total_job_counter"]) == ("running", first["jobs"])


async def test_jobs_with_stderr_are_those_that_wrote_some(yt):
    """JOB-3: what a node has not told, of running jobs, too, is not taken for stderr."""
    operation, ids = await yt.run(3)
    await end(yt, ids[0], stderr_size=2)
    await end(yt, ids[1], stderr_size=0)
    [found] = (await yt("list_jobs", operation_id=operation, with_stderr=True))["jobs"]
    assert (found["id"], found["stderr_size"]) == (ids[0], 2)
    assert await list_ids(yt, operation, with_stderr=False) == ids[1:]
    assert await list_ids(yt, operation) == ids


async def test_filters_and_counts(yt):
    operation, ids = await yt.run()
    await end(yt, ids[0])
    answer = await yt("list_jobs", operation_id=operation, job_state="completed", type="vanilla")
    assert [job["id"] for job in answer["jobs"]] == ids[:1]
    assert (answer["state_counts"], answer["type_counts"]) == ({"completed": 1, "running": 1}, {"vanilla": 1})
    counts = ("cypress_job_count", "controller_agent_job_count", "scheduler_job_count", "archive_job_count")
    assert [answer[name] for name in counts] == [None, 0, 0, 1]
    assert await list_ids(yt, operation, address="ho") == ids
    assert await list_ids(yt, operation, address="ost") == []
    none = await yt("list_jobs", operation_id=operation, job_type="map")
    assert (none["jobs"], none["type_counts"]) == ([], {"vanilla": 2})
    for name in ("with_fail_context", "with_spec", "with_competitors", "with_monitoring_descriptor"):
        assert await list_ids(yt, operation, **{name: True}) == []
        assert await list_ids(yt, operation, **{name: False}) == ids
    assert await list_ids(yt, operation, include_runtime=False) == ids, "the client sends it whatever is meant"
    assert await list_ids(yt, operation, job_competition_id="1-2-3-4") == []
    at = (await yt("get_job", operation_id=operation, job_id=ids[0]))["finish_time"]
    assert await list_ids(yt, operation, to_time="2000-01-01T00:00:00Z") == []
    yt.clock.at += 5.0
    assert await list_ids(yt, operation, from_time=at.replace(".5", ".6")) == ids[1:]
    [only] = (await yt("list_jobs", operation_id=operation, attributes=["state"], limit=1))["jobs"]
    assert only == {"id": ids[0], "state": "completed"}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"job_state": "xyz"}, "job_state must be one of none, waiting, running"),
        ({"state": "xyz"}, "state must be one of"),
        ({"job_type": "xyz"}, "job_type must be one of final_sort"),
        ({"sort_field": "xyz"}, "sort_field must be one of none, type"),
        ({"sort_order": "up"}, "sort_order must be one of ascending, descending"),
        ({"with_stderr": "yes"}, "with_stderr must be true or false"),
        ({"continuation_token": "abc"}, "continuation_token was not issued by this scheduler"),
    ],
)
async def test_unknown_words_are_refused(yt, parameters, said):
    await error_of(yt("list_jobs", operation_id=await yt.start(pool="p"), **parameters), 1, said)


async def test_orders(yt):
    """JOB-3: jobs that have not ended come last by their end."""
    operation, ids = await yt.run(3)
    await end(yt, ids[2])
    await end(yt, ids[0], "failed", exit_code=3)
    assert (await list_ids(yt, operation, sort_field="finish_time"))[:3] == [ids[2], ids[0], ids[1]]
    assert await list_ids(yt, operation, job_state="failed") == ids[:1]
    assert [each["id"] for each in (await yt("list_operations", with_failed_jobs=True))["operations"]] == [operation]
    ids = await list_ids(yt, operation)  # and the one that replaces the failed one
    assert await list_ids(yt, operation, limit=2, offset=1) == ids[1:3]
    assert await list_ids(yt, operation, task_name="x") == []
    assert await list_ids(yt, operation, sort_field="id", sort_order="descending") == sorted(ids)[::-1]
    by_state = await yt("list_jobs", operation_id=operation, sort_field="state")
    assert [job["state"] for job in by_state["jobs"]][:3] == ["completed", "failed", "running"]
    for field in ("none", "type", "start_time", "address", "duration", "progress"):
        assert sorted(await list_ids(yt, operation, sort_field=field)) == sorted(ids)


async def test_a_continuation_keeps_what_the_first_request_asked_for(yt):
    operation, ids = await yt.run(5)
    first = await yt("list_jobs", operation_id=operation, limit=2, sort_order="descending", attributes=["state"])
    token = first["continuation_token"]
    second = await yt("list_jobs", operation_id=operation, limit=2, continuation_token=token)
    third = await yt("list_jobs", operation_id=operation, limit=2, continuation_token=second["continuation_token"])
    assert [*first["jobs"], *second["jobs"], *third["jobs"]] == [{"id": job, "state": "running"} for job in ids[::-1]]
    assert "continuation_token" not in third
    other = yt("list_jobs", operation_id=operation, continuation_token=token, sort_order="ascending")
    await error_of(other, 1, "sort_order is not that of the request which continuation_token continues")


async def test_a_job_that_was_interrupted_says_why_and_for_whom(yt):
    """``interruption_info``: only of a job that got time to end."""
    operation, [killed, job] = await yt.run(tasks={"t": {"job_count": 2, "command": "x", "interruptible": True}})
    await yt("abort_job", job_id=killed)
    await yt("abort_job", job_id=job, interrupt_timeout=2500)
    info = {"interruption_reason": "user_request", "interruption_timeout": 2500}
    for has_ended in (False, True):
        if has_ended:
            await end(yt, job, "aborted")
        [found] = (await yt("list_jobs", operation_id=operation, with_interruption_info=True))["jobs"]
        assert (found["id"], found["interruption_info"]) == (job, info)
        assert killed in await list_ids(yt, operation, with_interruption_info=False)


async def test_the_full_specification_of_a_gang(yt):
    """All that the client asks for by default can be written."""
    task = {"job_count": 2, "command": "x"}
    sizes = {"a": {"size": 1}, "b": {}}
    tasks = {name: {**task, "gang_options": size} for name, size in sizes.items()}
    operation = await yt.start(tasks=tasks, pool="p", suspend_on_job_failure=True)
    shown = (await yt("get_operation", operation_id=operation))["full_spec"]
    assert {name: found["gang_options"] for name, found in shown["tasks"].items()} == sizes
    assert (shown["suspend_on_job_failure"], shown["enable_limiting_ancestor_check"]) == (True, True)


async def test_statistics_of_a_job_tell_its_memory(yt):
    """semantics.md 8.1: what it reserved, used and might use, in bytes; once it has ended over its time, too."""
    operation, [job] = await yt.run(1)
    live = (await yt("get_job", operation_id=operation, job_id=job))["statistics"]["user_job"]
    values = {"memory_limit": 2**29, "memory_reserve": 2**28}
    assert live == {name: {"sum": value, "count": 1, "min": value, "max": value} for name, value in values.items()}
    await end(yt, job, max_memory=1000, start_time=yt.clock.at - 1.5)
    ended = (await yt("get_job", operation_id=operation, job_id=job))["statistics"]["user_job"]
    assert {name: figure["max"] for name, figure in ended.items()} == {
        **values, "max_memory": 1000,
        "cumulative_memory_limit": 2**30, "cumulative_memory_reserve": 2**29, "cumulative_max_memory": 2000,
    }  # fmt: skip


async def test_statistics_of_ended_jobs(yt):
    operation, ids = await yt.run(3)
    yt.clock.at += 10.0
    for job, cpu_seconds in zip(ids, (2.0, 3.0, None), strict=True):
        at = yt.clock.at
        await end(yt, job, cpu_seconds=cpu_seconds, max_memory=7, start_time=at - 4.0, finish_time=at)
    found = (await yt("get_operation", operation_id=operation, attributes=["progress"]))["progress"]["job_statistics"]
    assert found["time"]["total"]["$"]["completed"]["vanilla"] == {"count": 3, "sum": 12_000, "min": 4000, "max": 4000}
    cpu = {"count": 2, "sum": 5000, "min": 2000, "max": 3000}
    assert found["user_job"]["cpu"]["user"]["$"]["completed"]["vanilla"] == cpu
    one = await yt("get_job", operation_id=operation, job_id=ids[0])
    assert one["statistics"]["user_job"]["cpu"] == {"user": {"count": 1, "sum": 2000, "min": 2000, "max": 2000}}
    assert [event["state"] for event in one["events"]] == ["running", "completed"]


async def test_a_part_of_a_log_is_read(yt, monkeypatch):
    operation, [job] = await yt.run(1)
    asked = []

    async def read_log(*words):
        asked.append(words[2:])
        return JobLog("host", "1", b"x")

    monkeypatch.setattr(yt.scheduler, "read_log", read_log)
    for given in ({}, {"limit": 5}, {"offset": 3}, {"limit": 5, "offset": 3}):
        assert await yt("get_job_stderr", operation_id=operation, job_id=job, **given) == b"x"
    assert asked == [
        ("stderr", MAX_LOG_BYTES, None), ("stderr", 5, 0), ("stderr", MAX_LOG_BYTES, 3), ("stderr", 5, 3),
    ]  # fmt: skip


async def test_no_more_of_stderr_is_asked_for_than_its_task_wants_to_keep(yt):
    """Also where the node's journal has more."""
    operation, [job] = await yt.run(tasks={"t": {"job_count": 1, "command": "x", "max_stderr_size": 7}})
    reading = asyncio.ensure_future(yt("get_job_stderr", operation_id=operation, job_id=job))
    while not (logs := (await yt.heartbeat()).logs):
        await asyncio.sleep(0)  # the reader's turn
    assert [each.tail_bytes for each in logs] == [7]
    reading.cancel()


async def test_events_of_an_operation(yt):
    operation = await yt.start(pool="p")
    assert await yt("list_operation_events", operation_id=operation, event_type="incarnation_started") == []
    await error_of(yt("list_operation_events", operation_id=operation, event_type="xyz"), 1, "incarnation_started")


async def test_who_may_not_manage_an_operation_changes_nothing_of_it(yt):
    """JOB-1: code 901, also for what would be refused anyway."""
    entry = {"action": "allow", "subjects": ["ann"], "permissions": ["use", "read"]}
    await yt.create_pool("closed", acl=[entry])
    await yt.register()
    operation = await yt.start(1, pool="closed")
    await yt.update()
    await yt.heartbeat()
    [job] = await list_ids(yt, operation)
    by_bob = {"by": "bob", "is_admin": False}
    for command in ("abort_job", "abandon_job"):
        await error_of(yt(command, job_id=job, **by_bob), 901, "(permission manage)")
    await error_of(yt("patch_operation_spec", operation_id=operation, patches=[{"path": "/x"}], **by_bob), 901)
    assert (await yt("get_job", operation_id=operation, job_id=job))["state"] == "waiting"
    assert await yt("abort_job", job_id=job) == {}
