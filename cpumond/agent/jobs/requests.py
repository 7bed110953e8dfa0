"""Requests of the scheduler's users about their jobs on this node: explain, pin, unpin.

The requests come in the responses to heartbeats (``wire.JobRequest``) and are repeated until the scheduler has the
reply. The tick's thread carries them out, like requests of the control socket, but only for the scheduler's jobs."""

from __future__ import annotations

import collections
from typing import Any, Final

import msgspec

from cpumond.agent import control
from cpumond.agent.discovery import FoundJob
from cpumond.agent.service import Agent
from cpumond.core.answers import JobAnswer
from cpumond.core.errors import ConfigError, CpumondError, RefusedError, UnavailableError
from cpumond.core.wire import MAX_NAME, MAX_REPLY_BYTES, JobReply, JobRequest

REMEMBERED: Final = 200
"""Number of replies that are remembered: more than the requests that can wait for one node at a time."""


class JobRequests:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._changes: collections.OrderedDict[str, JobReply] = collections.OrderedDict()
        """Request id -> reply, for pins and unpins. A repeated request whose reply was lost must not be carried out
        again: the time of a pin would restart. For the tick's thread."""

    def carry_out(self, request: JobRequest, timeout_s: float) -> JobReply | None:
        """Carry out a request and return the reply; None if the tick is too busy or the agent is stopping.

        The scheduler repeats a request that got no reply. For any thread but the tick's."""
        try:
            reply: JobReply = self._agent.call(lambda: self._reply(request), timeout_s)
        except (TimeoutError, UnavailableError):
            return None
        return _check_size(reply)

    def _reply(self, request: JobRequest) -> JobReply:
        known = self._changes.get(request.request_id)
        if known is not None:
            return known
        node_id = self._agent.config.node_id
        try:
            reply = JobReply(node_id, request.request_id, value=self._do(request))
        except CpumondError as error:
            is_refused = isinstance(error, ConfigError | RefusedError)
            reply = JobReply(node_id, request.request_id, error=str(error)[:MAX_NAME], is_refused=is_refused)
        if request.kind != "explain":
            self._changes[request.request_id] = reply
            if len(self._changes) > REMEMBERED:
                self._changes.popitem(last=False)
        return reply

    def _do(self, request: JobRequest) -> dict[str, Any]:
        """Carry out a request; return the reply's value. Raises CpumondError."""
        agent, job = self._agent, self._find(request.job_id)
        given = {"cpu_limit": request.cpu_limit, "ttl_s": request.ttl_s}
        answer: JobAnswer
        if request.kind == "explain":
            answer = control.explain_job(agent, job.job_id, f"cpumond operation unpin {job.operation_id}")
        elif request.kind == "unpin":
            answer = control.unpin_job(agent, job.job_id)
        else:
            answer = control.pin_job(agent, job.job_id, {k: value for k, value in given.items() if value is not None})
        described: dict[str, Any] = msgspec.to_builtins(answer)
        return described

    def _find(self, job_id: str) -> FoundJob:
        """Return the scheduler's job if the monitor follows it. Raises RefusedError or UnavailableError if not."""
        agent = self._agent
        job = None if agent.context.assigned is None else agent.context.assigned.jobs.get(job_id)
        if job is None:
            raise RefusedError(f"job {job_id} is not one of the scheduler's jobs on this node")
        found = {each.found.path: each.found for each in agent.table if each.found.job_id == job_id}
        if job.file.state != "running" or job.file.cgroup not in found:
            if job.file.state == "ended":
                raise RefusedError(f"job {job_id} has ended")
            what = "runs, but its cgroup is not measured yet" if job.file.state == "running" else "has not started yet"
            raise UnavailableError(f"job {job_id} {what}; ask again in a moment")
        if len(found) > 1:
            # Pins are by job id: a pin would also apply to the other jobs with this id.
            others = ", ".join(sorted(found.keys() - {job.file.cgroup}))
            raise RefusedError(f"job {job_id}: this node has another job with this id, cgroup {others}")
        return found[job.file.cgroup]


def _check_size(reply: JobReply) -> JobReply:
    size = len(msgspec.json.encode(reply.value))
    if size <= MAX_REPLY_BYTES:
        return reply
    text = f"the answer has {size} bytes, more than the {MAX_REPLY_BYTES} that can be sent; ask the node itself"
    return JobReply(reply.node_id, reply.request_id, error=text)
