from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from cpumond.api.cypress import YtBackend
from cpumond.api.formats import Attributed, Uint, YtError, write_yson
from cpumond.api.yt import YtRequest
from cpumond.scheduler.loop import Clock, Scheduler
from cpumond.scheduler.model import CommandError
from cpumond.scheduler.state import Rules
from cpumond.scheduler.store.sqlite import open_sqlite_store
from cpumond.wire import FinishedJob, Heartbeat, JobReport, NodeRegistration, NodeResources

ORCHID = "//sys/scheduler/orchid/scheduler"
DEFAULT = f"{ORCHID}/pool_trees/default"
LISTED = ["type", "account", "resource_usage", "modification_time"]
GB = 2**30


class FakeClock(Clock):
    def __init__(self):
        super().__init__()
        self.time = 1_700_000_000.0

    def now(self):
        return self.time


class Client:
    """Gives commands to a backend, and plays a node."""

    def __init__(self, scheduler, clock):
        self.scheduler = scheduler
        self.clock = clock
        self.backend = YtBackend(scheduler, "test-cluster", "1.2.3")
        self.sequence = 0
        self.jobs = {}

    async def __call__(self, command, *, value=None, user="ann", **parameters):
        request = YtRequest(command, parameters, value, user, "1-2-3-4")
        answer = await self.backend(request)
        write_yson(answer)  # whatever it is, it can be sent
        return answer

    async def get(self, path, **parameters):
        return (await self("get", path=path, **parameters))["value"]

    async def list(self, path, **parameters):
        return (await self("list", path=path, **parameters))["value"]

    async def exists(self, path):
        return (await self("exists", path=path))["value"]

    async def set(self, path, value):
        assert await self("set", path=path, value=value) == {}

    async def remove(self, path, **parameters):
        assert await self("remove", path=path, **parameters) == {}

    async def create_pool(self, name, parent=None, **attributes):
        place = {"name": name, "pool_tree": "default", **({"parent_name": parent} if parent else {})}
        return (await self("create", type="scheduler_pool", attributes={**place, **attributes}))["object_id"]

    async def start(self, job_count=1, user="ann", cpu_limit=1.0, **spec):
        task = {"job_count": job_count, "command": "x", "cpu_limit": cpu_limit}
        spec = {"tasks": {"t": task}, **spec}
        answer = await self("start_operation", operation_type="vanilla", spec=spec, user=user)
        return answer["operation_id"]

    async def update(self, seconds=1.0):
        self.clock.time += seconds
        await self.scheduler.update_all()

    async def register(self, node_id="host", cpu=10.0, tags=()):
        resources = NodeResources(user_slots=100, cpu=cpu, gpu=0, memory=100 * GB, network=0)
        await self.scheduler.register(
            NodeRegistration(node_id=node_id, incarnation="run", tags=list(tags), resources=resources)
        )

    async def heartbeat(self, finished=(), node_id="host"):
        """What the node was told runs from now on; ``finished`` are (job id, state)."""
        self.sequence += 1
        self.clock.time += 0.5
        ended = []
        for job_id, state in finished:
            order = self.jobs.pop(job_id)
            ended.append(FinishedJob(job_id=job_id, operation_id=order.operation_id, state=state, task=order.task))
        reports = [
            JobReport(
                job_id=order.job_id,
                operation_id=order.operation_id,
                cpu_limit=order.cpu_limit,
                current_cpu_limit=order.cpu_limit,
                from_scheduler=True,
                task=order.task,
            )
            for order in self.jobs.values()
        ]
        answer = await self.scheduler.heartbeat(
            Heartbeat(
                version=1,
                node_id=node_id,
                incarnation="run",
                sequence=self.sequence,
                sent_at=self.clock.time,
                cpu_capacity=10.0,
                jobs=reports,
                finished_jobs=ended,
            )
        )
        assert answer.accepted
        self.jobs.update({order.job_id: order for order in answer.start})
        for order in answer.stop:
            self.jobs.pop(order.job_id, None)
        return answer


@pytest.fixture
def play(tmp_path):
    """Runs a test's coroutine with a client of a scheduler that has an empty store."""

    def run(test):
        async def body():
            clock = FakeClock()
            with contextlib.closing(open_sqlite_store(str(tmp_path / "store.db"))) as store:
                await test(Client(Scheduler(Rules(), store, clock), clock))

        asyncio.run(body())

    return run


async def refused(call, code=None):
    """The error of a call that is refused."""
    with pytest.raises((YtError, CommandError)) as caught:
        await call
    if code is not None:
        assert caught.value.code == code
    return caught.value


def test_smoke(play):
    async def test(yt):
        await yt.register()
        await yt.create_pool("a", weight=2, integral_guarantees={"resource_flow": {"cpu": 2}})
        await yt.create_pool("b", "a", integral_guarantees={"guarantee_type": "burst", "resource_flow": {"cpu": 1}})
        op = await yt.start(3, pool="b")
        await yt.update()
        await yt.heartbeat()
        await yt.update()
        await yt.heartbeat()
        print(json.dumps(await yt.get("//sys/pools"), indent=1))
        print(json.dumps(await yt.get(f"{ORCHID}"), indent=1))
        print(json.dumps(await yt("get_operation", operation_id=op), indent=1))
        print(json.dumps(await yt("list_operations"), indent=1))
        print(json.dumps(await yt("list_jobs", operation_id=op), indent=1))

    play(test)
