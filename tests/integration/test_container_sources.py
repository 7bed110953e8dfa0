"""A real agent beside dockerd and Podman. Needs root, and Debian's docker.io, podman, runc and busybox-static."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_process import AgentProcess
from engines import Dockerd, Engine, Podman, Work, waits_or_burns
from waiting import wait_until

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(300)]

CPU = Path("/sys/fs/cgroup/cpu")
V2 = Path("/sys/fs/cgroup")
BURN = ("sh", "-c", waits_or_burns("/tmp"))


@pytest.fixture(scope="module")
def dockerd() -> Iterator[Engine]:
    with Dockerd(options=["--live-restore"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def podman() -> Iterator[Engine]:
    with Podman() as engine:
        yield engine


@pytest.fixture(params=[Dockerd])
def containers(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Docker; podman, too, where a test asks for ``both_engines``."""
    engine: Engine = request.getfixturevalue("dockerd" if request.param is Dockerd else "podman")
    yield engine
    engine.remove_all()


both_engines = pytest.mark.parametrize("containers", [Dockerd, Podman], indirect=True)


def kind_of(engine: Engine) -> str:
    return "podman" if isinstance(engine, Podman) else "docker"


def describe_agent(engine: Engine, more: str = "", mode: str = "reclaim", **source: Any) -> str:
    """A configuration that is quick to lower limits; ``source`` more keys of the source."""
    keys = "".join(f"{key} = {value!r}\n" for key, value in source.items())
    return (
        f'{more}\n[monitor]\nmode = "{mode}"\ncheck_period = "100ms"\ndecrease_coefficient = 0.5\n'
        f'[[source]]\nkind = "{kind_of(engine)}"\nsocket = "{engine.socket_path}"\n{keys}'
    )


def quota_of(engine: Engine, name: str) -> Path:
    path = engine.cgroup(name).strip("/")
    return CPU / path / "cpu.cfs_quota_us" if CPU.is_dir() else V2 / path / "cpu.max"


def work_of(engine: Engine, name: str) -> Work:
    return Work(Path(f"/proc/{engine.pid(name)}/root/tmp"))


def read(path: Path) -> int:
    """Microseconds of each 100 ms; -1 for no limit, and where systemd has not made the file yet."""
    try:
        quota, *period = path.read_text().split()
    except FileNotFoundError:
        return -1
    return -1 if quota in ("max", "-1") else int(quota) * 100_000 // int(period[0]) if period else int(quota)


def jobs(agent: AgentProcess) -> dict[str, dict[str, Any]]:
    """Those with a name; containers of other tests may be where an engine has its own unless told otherwise."""
    return {job["job_id"]: job for job in agent.get("/v1/status")["jobs"] if job["labels"]}


def named(agent: AgentProcess, name: str) -> dict[str, Any]:
    """The job, once its engine has named it: a busy one may answer only after the agent has begun."""
    return wait_until(lambda: jobs(agent).get(name) or {}, f"{name} has its name")


class Highest(threading.Thread):
    """The highest quota seen in a file until ``stop``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.highest, self._over = path, -1, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.002):
            self.highest = max(self.highest, read(self.path))

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.highest


@pytest.mark.parametrize(("ordered", "updated"), [(1.5, 0.5), (0.6, 1.4)])
@both_engines
def test_an_update_of_the_engine_is_the_new_order_at_once(containers, agent, ordered, updated):
    containers.run("web", f"--cpus={ordered}", command=BURN)
    quota, work = quota_of(containers, "web"), work_of(containers, "web")
    agent.start(describe_agent(containers))
    wait_until(lambda: read(quota) <= 20_000, "the idle container has little")
    assert agent.job("web")["cpu_limit"] == ordered

    containers.update("web", f"--cpus={updated}")
    highest = Highest(quota)
    wait_until(lambda: agent.job("web")["cpu_limit"] == updated, "the new order is known")
    work.begin()
    wait_until(lambda: read(quota) == updated * 100_000, "it has all of the new order")
    tick = agent.get("/v1/status")["tick"]
    wait_until(lambda: agent.get("/v1/status")["tick"] > tick + 8, "work for some checks")
    assert highest.stop() == updated * 100_000
    explained = agent.get("/v1/jobs/web/explain")
    assert explained["status"] == "reclaim", "an order is no override"
    assert f"of {updated:g} requested cores" in explained["why"]
    assert explained["facts"]["ordered"].startswith(f"{updated:g} cores")
    assert agent.get("/v1/status")["counters"]["foreign_writes"] == {"raise": 0, "lower": 0}

    # The monitor goes on below the new order at once.
    work.end()
    wait_until(lambda: read(quota) <= 30_000, "the idle container has little again")
    assert agent.stop() == 0
    assert read(quota) == updated * 100_000


@both_engines
def test_names_come_from_the_engine(containers, agent):
    labels = ["--label=com.docker.compose.project=shop", "--label=com.docker.compose.service=web"]
    containers.run("shop_web_1", "--cpus=1.5", *labels)
    agent.start(describe_agent(containers, mode="shadow"))
    job = named(agent, "shop_web_1")
    assert (job["cpu_limit"], job["mode"], job["engine"], job["operation_id"]) == (
        1.5, "shadow", kind_of(containers), "shop",
    )  # fmt: skip
    image = job["labels"].pop("image")
    assert "busybox" in image
    assert job["labels"] == {"name": "shop_web_1", "project": "shop", "service": "web"}
    (seen,) = agent.get("/v1/status")["engines"]
    assert (seen["kind"], seen["problem"], seen["jobs"]) == (kind_of(containers), "", 1)
    info = next(
        line for line in agent.metrics().splitlines() if line.startswith('cpumond_job_info{job_id="shop_web_1"')
    )
    for label in (f'engine="{kind_of(containers)}"', f'image="{image}"', 'project="shop"', 'service="web"'):
        assert label in info
    assert image in agent.run("status").stdout
    assert f"image {image}" in agent.get("/v1/jobs/shop_web_1/explain")["facts"]["labels"]
    # Options for jobs of engines.
    assert agent.get("/v1/jobs/shop_web_1/explain")["job_cpu_monitor"]["min_cpu_limit"] == 0.1


def test_names_outlive_the_engine(dockerd, agent):
    dockerd.run("shop_web_1", "--cpus=1.5", "--label=com.docker.compose.project=shop", command=BURN)
    quota, work = quota_of(dockerd, "shop_web_1"), work_of(dockerd, "shop_web_1")
    agent.start(describe_agent(dockerd))
    wait_until(lambda: read(quota) <= 20_000, "the idle container has little")
    for number, how in enumerate((dockerd.kill, dockerd.terminate), 1):
        how()
        wait_until(lambda: agent.get("/v1/status")["problems"], "status says so")
        assert "docker: no response from" in agent.get("/v1/status")["problems"][0]
        assert f'cpumond_engine_up{{engine="docker",socket="{dockerd.socket_path}"}} 0.0' in agent.metrics()
        job = agent.job("shop_web_1")
        assert (job["status"], job["labels"]["project"]) == ("reclaim", "shop")
        # It is still managed.
        work.begin()
        wait_until(lambda: read(quota) == 150_000, "it has what it needs")
        work.end()
        wait_until(lambda: read(quota) <= 20_000, "and little again")
        assert len(agent.events("engine_away")) == number, "one warning"
        dockerd.start()
        wait_until(lambda: not agent.get("/v1/status")["problems"], "the engine is back")
        assert list(jobs(agent)) == ["shop_web_1"]
    dockerd.update("shop_web_1", "--cpus=0.7")
    wait_until(lambda: agent.job("shop_web_1")["cpu_limit"] == 0.7, "orders are followed again")
    assert agent.stop() == 0
    assert read(quota) == 70_000
    dockerd.remove_all()


def churn(dockerd: Engine, agent: AgentProcess, number: int, restart_each: int) -> None:
    """Start and remove containers one after the other, kill and start the engine meanwhile; nothing is left of them."""
    agent.start(describe_agent(dockerd))
    assert agent.process is not None
    process = psutil.Process(agent.process.pid)
    dockerd.run("stays", "--cpus=1.3")
    quota = quota_of(dockerd, "stays")
    wait_until(lambda: read(quota) <= 20_000, "the idle container has little")
    descriptors = process.num_fds()
    for count in range(1, number + 1):
        name = f"c{count}"
        dockerd.run(name, "--cpus=1.1")
        if count % restart_each == 0:
            dockerd.kill()
            dockerd.start()
            wait_until(lambda: name in jobs(agent), "it is seen")  # noqa: B023
        dockerd.remove(name)
    wait_until(lambda: set(jobs(agent)) == {"stays"}, "all others are gone")
    wait_until(lambda: process.num_fds() <= descriptors, "their descriptors are given back")
    assert "exception" not in agent.log()
    assert agent.stop() == 0
    assert read(quota) == 130_000
    dockerd.remove_all()
