"""Commands of the ``yt`` protocol to a scheduler in this process, without transport, and a played node."""

import pytest
from scheduler_world import ServedNode, StillClock

from cpumond.api.yt.commands import YtBackend
from cpumond.api.yt.parameters import YtRequest
from cpumond.api.yt.values import YtError
from cpumond.api.yt.yson import write_yson
from cpumond.scheduler.access import Rights
from cpumond.scheduler.model import CommandError, Rules
from cpumond.scheduler.rights.tokens import User
from cpumond.scheduler.service import Scheduler

GB = 2**30


class Client:
    def __init__(self, scheduler, clock):
        self.scheduler = scheduler
        self.clock = clock
        self.backend = YtBackend(scheduler, "test-cluster", "1.2.3")

    @property
    def rights(self):
        return Rights(self.scheduler.state, User("root", admin=True))

    async def __call__(self, command, *, value=None, by="ann", is_admin=True, **parameters):
        answer = await self.backend(YtRequest(command, parameters, value, User(by, admin=is_admin), "1-2-3-4"))
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

    async def create_pools(self, *paths):
        """``parent/name`` or, of one below the root, its name."""
        for path in paths:
            parent, _, name = path.rpartition("/")
            await self.create_pool(name, parent or None)

    async def run(self, job_count=2, **spec):
        """An operation whose jobs run on a new node; its id and theirs."""
        await self.register()
        operation = await self.start(job_count, **{"pool": "p", **spec})
        await self.update()
        await self.heartbeat()
        await self.heartbeat()
        return operation, [job["id"] for job in (await self("list_jobs", operation_id=operation))["jobs"]]

    async def start(self, job_count=1, by="ann", cpu_limit=1.0, **spec):
        spec = {"tasks": {"t": {"job_count": job_count, "command": "x", "cpu_limit": cpu_limit}}, **spec}
        return (await self("start_operation", operation_type="vanilla", spec=spec, by=by))["operation_id"]

    async def update(self, seconds=1.0):
        self.clock.at += seconds
        await self.scheduler.update_all()

    async def register(self, cpu=10.0, tags=()):
        self.node = ServedNode(self.scheduler, cpu, "host", memory=100 * GB, tags=tags, user_slots=100)
        await self.node.register()

    async def heartbeat(self, finished=()):
        """What the node was told runs from now on; ``finished`` are (job id, state)."""
        self.clock.at += 0.5
        for job_id, state in finished:
            self.node.finish(job_id, state, exit_code=None, reason="", finish_time=None)
        answer = await self.node.beat()
        assert answer.accepted
        return answer


@pytest.fixture
def yt(store):
    clock = StillClock(1_700_000_000.0)
    return Client(Scheduler(Rules(), store, clock), clock)


async def error_of(call, code=None, said=""):
    """The error of a call that is refused with these words."""
    with pytest.raises((YtError, CommandError)) as caught:
        await call
    if code is not None:
        assert caught.value.code == code
    assert said in str(caught.value)
    return caught.value
