"""The filters of ``list_jobs``, and its counters (yt_protocol.md 11)."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cpumond.api.views import order_of_start
from cpumond.api.yt.jobs import JOB_TYPE, AnyJob, job_state
from cpumond.api.yt.parameters import YtRequest, get_names, get_number, get_text, get_time, plain
from cpumond.api.yt.values import YtError, quote_text
from cpumond.scheduler.elements import Job
from cpumond.scheduler.model import JobRecord

MAX_LISTED_JOBS: Final = 10_000
DEFAULT_LISTED_JOBS: Final = 1000

JOB_TYPES: Final = frozenset({
    JOB_TYPE, "map", "ordered_map", "partition_map", "partition", "simple_sort", "intermediate_sort", "final_sort",
    "sorted_merge", "ordered_merge", "unordered_merge", "shallow_merge", "sorted_reduce", "join_reduce",
    "partition_reduce", "reduce_combiner", "remote_copy", "shuffle", "scheduler_first", "scheduler_last",
})  # fmt: skip
"""Types that a filter may name, although all jobs here have the same type."""

JOB_STATES: Final = (
    "none", "waiting", "running", "aborting", "completed", "failed", "aborted", "lost", "materializing",
)  # fmt: skip

Test = Callable[[AnyJob], bool]
AddressOf = Callable[[AnyJob], str]


@dataclass(frozen=True)
class JobFilters:
    """The filters of a request ``list_jobs``. ``names``: the requested attributes, None for all."""

    parameters: dict[str, Any]
    """Parameters that the next page's request keeps."""
    tests: dict[str, Test]
    """Dimension -> test of a job. To count the jobs by a dimension, this dimension's own test is not applied."""
    key: Callable[[AnyJob], Any]
    is_descending: bool
    offset: int
    limit: int
    names: list[str] | None


_LISTED: Final = (
    "job_state", "state", "job_type", "type", "task_name", "address", "with_stderr", "with_fail_context", "with_spec",
    "with_competitors", "with_monitoring_descriptor", "with_interruption_info", "job_competition_id",
    "operation_incarnation", "monitoring_descriptor", "from_time", "to_time", "sort_field", "sort_order", "attributes",
)  # fmt: skip
"""Parameters of the first request that a ``continuation_token`` keeps."""
_TOKEN: Final = "continuation_token"  # noqa: S105 - the name of a parameter


def read_query(request: YtRequest, address_of: AddressOf, now: float) -> JobFilters:
    """Parse the filters. Raises YtError for unknown words, and for a token that continues a different request."""
    given = {name: plain(request.parameters[name]) for name in _LISTED if request.parameters.get(name) is not None}
    offset = get_number(request, "offset", 0, 2**31)
    if request.parameters.get(_TOKEN) is not None:
        kept, offset = _read_token(get_text(request, _TOKEN))
        other = sorted(name for name, value in given.items() if kept.get(name) != value)
        if other:
            raise YtError(f"list_jobs: {other[0]} is not that of the request which {_TOKEN} continues; leave it out")
        given = kept
        request = replace(request, parameters={**request.parameters, **kept})
    order = _word(request, "sort_order", ("ascending", "descending"), "ascending")
    return JobFilters(
        parameters=given, tests=_make_tests(request, address_of),
        key=_make_keys(address_of, now)[_word(request, "sort_field", tuple(_make_keys(address_of, now)), "none")],
        is_descending=order == "descending", offset=offset,
        limit=get_number(request, "limit", DEFAULT_LISTED_JOBS, MAX_LISTED_JOBS),
        names=get_names(request, "attributes"),
    )  # fmt: skip


def _word(request: YtRequest, name: str, known: Sequence[str], otherwise: str) -> str:
    word = get_text(request, name, "") or otherwise
    if word and word not in known:
        raise YtError(f"list_jobs: {name} must be one of {', '.join(known)}, not {quote_text(word)}")
    return word


def _make_keys(address_of: AddressOf, now: float) -> dict[str, Callable[[AnyJob], Any]]:
    """Return sort field -> key of a job; by ``finish_time``, jobs that have not ended come last."""

    def finish_time(job: AnyJob) -> float:
        return job.finish_time if isinstance(job, JobRecord) else math.inf

    return {
        "none": lambda _: (),
        "type": lambda _: (),
        "state": job_state,
        "start_time": lambda job: job.start_time,
        "finish_time": finish_time,
        "address": address_of,
        "duration": lambda job: min(finish_time(job), now) - job.start_time,
        "progress": lambda job: job.state == "completed",
        "id": lambda job: job.id,
    }


_ABSENT: Final = ("with_fail_context", "with_spec", "with_competitors", "with_monitoring_descriptor")
"""Filters for features that no job here has."""


def _make_tests(request: YtRequest, address_of: AddressOf) -> dict[str, Test]:
    state = _word(request, "job_state", JOB_STATES, "") or _word(request, "state", JOB_STATES, "")
    types = sorted(JOB_TYPES)
    kind = _word(request, "job_type", types, "") or _word(request, "type", types, "")
    task, address = get_text(request, "task_name", ""), get_text(request, "address", "")
    since, until = get_time(request, "from_time"), get_time(request, "to_time")
    with_stderr = _get_choice(request, "with_stderr")
    interrupted = _get_choice(request, "with_interruption_info")
    is_none = any(_get_choice(request, name) for name in _ABSENT) or any(
        get_text(request, name, "") for name in ("job_competition_id", "monitoring_descriptor")
    )
    incarnation = get_text(request, "operation_incarnation", "")

    def is_chosen(job: AnyJob) -> bool:
        if is_none or (task and task != job.task_name):
            return False
        if incarnation and job.incarnation != incarnation:
            return False
        if since is not None and isinstance(job, JobRecord) and job.finish_time < since:
            return False
        if until is not None and job.start_time > until:
            return False
        if with_stderr is not None and with_stderr != (isinstance(job, JobRecord) and bool(job.stderr_size)):
            return False
        if interrupted is not None and interrupted != bool(job.interruption_timeout):
            return False
        return not address or address_of(job).startswith(address)

    return {
        "others": is_chosen,
        "state": lambda job: not state or job_state(job) == state,
        "type": lambda _: not kind or kind == JOB_TYPE,
    }


def _get_choice(request: YtRequest, name: str) -> bool | None:
    """Return True to list only jobs with the property, False to list only jobs without it, None to list all."""
    value = plain(request.parameters.get(name))
    if value is not None and not isinstance(value, bool):
        raise YtError(f"list_jobs: {name} must be true or false, not {quote_text(value)}")
    return value


def choose_jobs(jobs: Sequence[AnyJob], query: JobFilters) -> tuple[list[AnyJob], dict[str, Any]]:
    """Return one page of the jobs that a request selects, and the rest of the answer."""
    failing = [(job, [name for name, test in query.tests.items() if not test(job)]) for job in jobs]
    chosen = [job for job, names in failing if not names]
    states = Counter(job_state(job) for job, names in failing if names in ([], ["state"]))
    types = sum(names in ([], ["type"]) for _, names in failing)
    chosen.sort(key=order_of_start, reverse=query.is_descending)
    chosen.sort(key=query.key, reverse=query.is_descending)
    page = chosen[query.offset : query.offset + query.limit]
    living = sum(isinstance(job, Job) for job in chosen)
    about: dict[str, Any] = {
        "cypress_job_count": None, "controller_agent_job_count": living, "scheduler_job_count": living,
        "archive_job_count": len(chosen) - living, "state_counts": dict(states),
        "type_counts": {JOB_TYPE: types} if types else {}, "errors": [],
    }  # fmt: skip
    if query.offset + len(page) < len(chosen) and page:
        about[_TOKEN] = _write_token(query.parameters, query.offset + len(page))
    return page, about


def _write_token(parameters: dict[str, Any], offset: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([offset, parameters]).encode()).decode()


def _read_token(token: str) -> tuple[dict[str, Any], int]:
    try:
        offset, parameters = json.loads(base64.urlsafe_b64decode(token.encode()))
        return {name: parameters[name] for name in _LISTED if name in parameters}, min(max(int(offset), 0), 2**31)
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise YtError(f"list_jobs: {_TOKEN} was not issued by this scheduler; start again without it") from None
