"""Requests about operations and their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.responses import Response

from cpumond.api import views
from cpumond.api.glance_views import OperationCounts, OperationGroups
from cpumond.api.json import requests
from cpumond.api.json.call import Call
from cpumond.api.json.parts import in_parts
from cpumond.api.json.trees import look_at
from cpumond.api.yt.orchid_attributes import operation_attributes
from cpumond.core.wire import RequestKind
from cpumond.fairshare.explain import Explanation, explain
from cpumond.scheduler.answers.causes import Causes
from cpumond.scheduler.answers.operation import OperationAnswer, explain_operation, name_operations
from cpumond.scheduler.decide.snapshot import GUARANTEE_PREFIX, OPERATION_PREFIX
from cpumond.scheduler.service import Scheduler

SHOWN_AT_ONCE: Final = 200
"""Number of operations that are formatted in one part; to format one takes a hundred times as long as to count it."""


async def list_operations(call: Call) -> views.OperationList:
    query: requests.OperationsQuery = call.query
    if query.search:
        await _read_texts(call)
    causes = await _find_causes(call, query.tree) if query.cause else {}
    descending = query.descending == "true"
    found = views.find_operations(
        call.rights, sort=query.sort, descending=descending, cause=query.cause, causes=causes,
        operation_state=query.state, user=query.user, tree=query.tree, pool=query.pool, search=query.search,
        texts=call.shared.texts,
    )  # fmt: skip
    page, then = views.cut_operations(
        call.state, found, query.limit, query.cursor, query.sort, descending, query.offset
    )  # fmt: skip
    shown: list[views.OperationView] = []
    async for records in in_parts(page, SHOWN_AT_ONCE):
        shown += views.view_operations(call.state, call.now, records)
    return views.OperationList(shown, len(found), then)


async def group_operations(call: Call) -> OperationGroups:
    async def count() -> OperationGroups:
        query: requests.GroupsQuery = call.query
        if query.search:
            await _read_texts(call)
        records = views.choose_records(call.rights, texts=call.shared.texts, **call.given)
        if not query.tree and len(records) == len(call.state.operations) + len(call.state.finished):
            return (await call.shared.looks.last()).counts.finish()
        counts = OperationCounts(call.state, await _find_causes(call, query.tree))
        async for some in in_parts(records):
            counts.add(some)
        return counts.finish()

    return await call.shared.groups.get((call.user, call.query), count, call.state.config)


async def _read_texts(call: Call) -> None:
    texts = call.shared.texts
    async for records in in_parts(views.list_records(call.state)):
        for record in records:
            texts.of(record)
    texts.forget_gone(call.state)


async def _find_causes(call: Call, tree: str) -> dict[str, Causes]:
    """Return tree -> causes for which its operations wait; ``tree`` "" for all trees."""
    causes = (await call.shared.looks.last()).causes
    return {name: each for name, each in causes.items() if not tree or name == tree}


def list_jobs(call: Call) -> views.JobList:
    query: requests.JobsQuery = call.query
    return views.view_jobs(
        call.state, call.find_operation(), limit=query.limit, offset=query.offset, cursor=query.cursor,
        job_state=query.state, node_id=query.node,
    )  # fmt: skip


def view_operation_orchid(call: Call) -> dict[str, dict[str, Any]]:
    live = call.state.operations.get(call.find_operation().id)
    return {
        name: operation_attributes(look_at(call.scheduler, element.tree), element).to_dict()
        for name, element in (live.elements.items() if live is not None else ())
    }


async def read_job_log(call: Call) -> Response:
    query: requests.LogQuery = call.query
    operation = call.find_operation("read_secrets").id
    found = await call.scheduler.read_log(operation, call.path["job"], query.stream, query.tail, query.offset)
    first = found.first_byte
    if isinstance(first, msgspec.UnsetType):
        first = found.total_bytes - len(found.content)
    headers = {
        requests.TOTAL_BYTES: str(found.total_bytes),
        requests.FIRST_BYTE: str(first),
        # No browser may interpret a job's output as a page.
        "X-Content-Type-Options": "nosniff",
        "content-type": requests.TEXT,
    }
    return Response(found.content, headers=headers)


async def explain_job(call: Call) -> dict[str, Any]:
    return await _ask_job(call, "explain")


async def pin_job(call: Call) -> views.Done:
    body: requests.PinBody = call.body
    job = await _ask_job(call, "pin", body.cpu_limit, body.ttl_s)
    warnings = []
    if job.get("last_result") == "failed" and job.get("last_error"):
        warnings.append(f"the limit could not be written: {job.get('last_error')}")
    elif job.get("pinned_cpu_limit") is None:
        warnings.append("writes are paused on its node; the pin takes effect when the pause file is removed")
    return views.Done(call.path["job"], warnings)


async def unpin_job(call: Call) -> views.Done:
    await _ask_job(call, "unpin")
    return views.Done(call.path["job"], [])


async def _ask_job(
    call: Call, kind: RequestKind, cpu_limit: float | None = None, ttl_s: float | None = None
) -> dict[str, Any]:
    operation = call.find_operation("read" if kind == "explain" else "manage").id
    return await call.scheduler.ask_job(operation, call.path["job"], kind, cpu_limit, ttl_s, call.user)


async def why_operation(call: Call) -> OperationAnswer:
    record = call.find_operation()
    shares, paths = {}, {}

    def make_readable(lines: Iterable[str]) -> list[str]:
        return name_operations(call.state, map(call.rights.hide_operations, lines))

    async with call.shared.plan_lock:
        for tree in record.trees:
            told = await _explain_share(call.scheduler, tree, GUARANTEE_PREFIX + record.id)
            told = told or await _explain_share(call.scheduler, tree, OPERATION_PREFIX + record.id)
            if told is not None:
                shares[tree] = (told.rule, make_readable(told.lines))
                cuts = make_readable(step.cut for step in told.path)
                paths[tree] = [replace(step, cut=cut) for step, cut in zip(told.path, cuts, strict=True)]
    record = call.state.find_record(record.id)
    answer = explain_operation(call.state, record, call.now, shares, call.rights)
    trees = [msgspec.structs.replace(part, path=paths.get(part.tree, [])) for part in answer.trees]
    return msgspec.structs.replace(answer, trees=trees)


async def _explain_share(scheduler: Scheduler, tree: str, element: str) -> Explanation | None:
    """Return the explanation of an element's share in the last update; None if the element was not part of it."""
    kept = scheduler.updates.get(tree)
    if kept is None or kept.snapshot is None or kept.result is None:
        return None
    try:
        return await asyncio.to_thread(explain, kept.snapshot, kept.result, element)
    except KeyError:
        return None
