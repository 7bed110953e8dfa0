"""Jobs of engines tick by tick: names, orders up and down, other writers, the engine away.

What an engine says is put in place of the thread that asks one; real engines are in ``tests/integration``.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_node import QUICK, FakeNode

from cpumond.agent import control, tracked
from cpumond.host.engine.model import Engine, EngineJob, EngineView, Key
from cpumond.testing import v2_cgroup

KEY: Key = ("docker", "/run/docker.sock")
SOURCE = QUICK + '[[source]]\nkind = "docker"\n'
TWO = v2_cgroup(quota="200000 100000")
LABELS = {"name": "web", "image": "nginx"}
WEB = EngineJob("docker", "4f" * 32, "web", "docker/web", LABELS, "shop", ordered_cores=2.0, reports_request=True)


class Thread:
    """Stands for ``EngineThread``: what engines said last, and which were to be asked again."""

    def __init__(self) -> None:
        self.views: dict[Key, EngineView] = {}
        self.nudged: list[Key] = []

    def follow(self, engines: Mapping[Key, Callable[[], Engine]]) -> None:
        pass

    def nudge(self, keys: Iterable[Key]) -> None:
        self.nudged += keys

    def close(self) -> None:
        pass


class Node(FakeNode):
    folder = "docker"
    managed_roots = "[]"

    thread: Thread

    def answer(self, *jobs: EngineJob, problem: str = "", at_s: float = 0.0) -> None:
        view = EngineView("docker", {each.path: each for each in jobs}, at_s, problem)
        self.thread.views[KEY] = view
        self.agent.context.engines._news.set()

    def make_agent(self) -> Any:
        agent = super().make_agent()
        self.thread = Thread()
        agent.context.engines._thread = self.thread  # type: ignore[assignment]
        return agent


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A container that ordered two cores and was lowered to the floor."""
    node = Node(tmp_path, {"web": TWO}, config=SOURCE)
    node.answer(WEB)
    node.run(8)
    assert node.cores("web") == 0.5
    yield node
    if not node.reports.closed:
        node.agent.close()


@pytest.mark.parametrize("place", ["docker/web", "docker/web/system.slice/cpumond.service"])
def test_a_job_in_which_the_agent_runs_is_never_lowered(tmp_path, monkeypatch, place):
    monkeypatch.setattr(tracked.files, "find_vital", lambda _: {place: "this program itself runs in it"})
    node = Node(tmp_path, {"web": TWO}, config=SOURCE)
    node.answer(WEB)
    node.run(8)
    assert (node.cores("web"), node.agent.table.jobs["docker/web"].refused) == (2.0, "this program itself runs in it")
    node.agent.close()


def order(cores: float | None) -> EngineJob:
    return msgspec.structs.replace(WEB, ordered_cores=cores)


def ring(node: Node) -> list[str]:
    tracked = node.agent.table.find("web")
    assert tracked is not None
    return [record.kind for record in tracked.ring.records() if record.kind not in ("shrink", "grow")]


@pytest.mark.parametrize("first", ["engine", "cgroup"])
@pytest.mark.parametrize("cores", [1.2, 0.7, 3.0])
def test_an_order_is_followed_whoever_shows_it_first(node, cores, first):
    if first == "engine":
        node.answer(order(cores))
    node.write("web", "cpu.max", f"{round(cores * 100_000)} 100000")
    node.tick()
    if first == "cgroup":
        assert node.thread.nudged == [KEY], "the engine is asked"
        assert node.cores("web") == cores, "and nothing is written over it"
        node.answer(order(cores))
        node.tick()
        assert ring(node) == ["order"]
    assert (node.job("web").ordered_cores, node.job("web").status) == (cores, "reclaim")
    assert node.snapshot().foreign_writes == {"raise": 0, "lower": 0}
    node.ticks(8)
    assert node.cores("web") == 0.5, "the monitor goes on below it"
    assert node.end().cores("web") == cores


@pytest.mark.parametrize("is_running", [True, False])
def test_an_order_equal_to_the_limit_in_force_is_seen(node, is_running):
    if not is_running:
        node.drop_agent()
        node.agent = node.make_agent()
    node.answer(order(0.5))
    if is_running:
        node.tick()
        assert node.job("web").ordered_cores == 0.5
        node.tick(2.0)
    else:
        node.start()
    assert node.end().cores("web") == 0.5


def test_an_order_equal_to_the_limit_that_comes_with_the_end_is_kept(node, monkeypatch):
    node.write("web", "cpu.max", "50000 100000")
    monkeypatch.setattr(node.thread, "nudge", lambda _: node.answer(order(0.5), at_s=time.monotonic()))
    assert node.end().cores("web") == 0.5


def test_an_order_that_the_agent_wrote_over_is_followed_too(node):
    node.ticks(1, 1.9)
    node.write("web", "cpu.max", "200000 100000")
    node.tick(1.9)
    node.answer(order(0.8))  # written between the agent's look and its own write
    node.ticks(2, 1.9)
    assert node.cores("web") == 0.8


def test_a_write_of_another_program_is_respected_for_a_time(node):
    node.write("web", "cpu.max", "90000 100000")
    node.ticks(3)
    assert (node.cores("web"), node.job("web").status) == (0.9, "reclaim"), "the engine may say that it ordered it"
    node.ticks(5)
    assert (node.cores("web"), node.job("web").status) == (0.9, "overridden")
    assert node.snapshot().foreign_writes == {"raise": 1, "lower": 0}
    node.answer(order(0.9))  # the engine says so late
    node.tick()
    assert (node.job("web").ordered_cores, node.job("web").status) == (0.9, "reclaim")
    node.answer(order(0.9), problem="docker: no answer")
    node.write("web", "cpu.max", "80000 100000")
    node.tick()
    assert node.job("web").status == "overridden", "while the engine is away it is another program's at once"
    assert node.end().cores("web") == 0.8


@pytest.mark.parametrize(("quota", "cores"), [("110000", 1.1), ("260000", 2.6)])
def test_an_engine_that_does_not_tell_orders_is_taken_at_its_writes(node, quota, cores):
    mute = msgspec.structs.replace(WEB, reports_request=False)
    node.answer(mute)
    node.tick()
    for usage in (0.0, 1.9, 0.0, 1.9):
        node.ticks(8, usage)
        assert node.job("web").ordered_cores == 2.0, "the agent's own writes are no order"
    node.write("web", "cpu.max", f"{quota} 100000")
    node.tick()
    assert (node.job("web").ordered_cores, node.job("web").status, ring(node)) == (cores, "reclaim", ["order"])
    node.answer(mute, problem="podman: no answer")
    node.tick()
    node.write("web", "cpu.max", "90000 100000")
    node.tick()
    assert node.job("web").status == "overridden"


@pytest.mark.parametrize("is_up", [True, False])
def test_one_that_writes_just_the_limit_in_force_has_ordered_that(node, is_up):
    node.answer(msgspec.structs.replace(WEB, reports_request=False), problem="" if is_up else "podman: no answer")
    node.ticks(2)
    node.write("web", "cpu.max", "50000 100000")
    node.ticks(3, 1.9)
    ordered = 0.5 if is_up else 2.0
    assert (node.job("web").ordered_cores, node.cores("web") > 0.5) == (ordered, not is_up)
    assert node.end().cores("web") == ordered


def test_a_job_that_no_longer_has_a_limit_counts_as_its_use(node):
    node.answer(order(None))
    node.write("web", "cpu.max", "max 100000")
    node.ticks(3, 0.25)
    assert (node.job("web").status, node.read("web").split()[0]) == ("no limit ordered", "max")
    report = node.agent.table.find("web").report()
    assert (report.cpu_limit, report.current_cpu_limit) == (pytest.approx(0.25, abs=0.1),) * 2
    status = control.view_agent(node.snapshot())
    assert (status.totals.cpu_limit, status.jobs[0].unlimited) == (0.0, True)
    assert node.end().read("web").split()[0] == "max"


@pytest.mark.parametrize(("quota", "status"), [("200000", "shadow"), ("max", "no limit ordered")])
def test_what_no_engine_has_named_counts_as_its_use(node, quota, status):
    name = "5e" * 32
    node.make(name, quota=f"{quota} 100000")
    node.ticks(40, 0.25)
    assert (node.job(name).status, node.job(name).counts_use) == (status, True)
    report = node.agent.table.jobs[f"docker/{name}"].report()
    assert (report.cpu_limit, report.current_cpu_limit) == (pytest.approx(0.25, abs=0.1),) * 2


def test_one_without_a_limit_counts_as_its_use_from_its_first_check_on(tmp_path, logs):
    config = SOURCE.replace('smoothing_seed = "first_value"\n', "")
    node = Node(tmp_path, {"web": v2_cgroup(quota="max 100000")}, config=config)
    node.answer(order(None))
    node.run(1, 0.25)
    assert node.agent.table.find("web").report().current_cpu_limit == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("first", ["engine", "cgroup"])
def test_one_that_orders_its_first_limit_is_managed_from_then_on(tmp_path, logs, tells, first):
    free = msgspec.structs.replace(WEB, ordered_cores=None, reports_request=tells)
    node = Node(tmp_path, {"web": v2_cgroup(quota="max 100000")}, config=SOURCE)
    node.answer(free)
    node.run(8)
    assert node.job("web").status == "no limit ordered"
    ordered = msgspec.structs.replace(free, ordered_cores=1.6 if tells else None)
    if first == "engine":
        node.answer(ordered)
        node.tick()
    node.write("web", "cpu.max", "160000 100000")
    node.tick()
    node.answer(ordered)
    node.ticks(8)
    assert (node.job("web").ordered_cores, node.cores("web")) == (1.6, 0.5)
    assert node.end().cores("web") == 1.6


def test_one_that_is_left_alone_or_no_longer_named_gets_its_limit_back(node):
    node.answer(msgspec.structs.replace(WEB, name="www", labels={"name": "www"}, left_out="its CPUs are its own"))
    node.ticks(2)
    www = node.job("web")
    assert (node.cores("web"), www.refused) == (2.0, "its CPUs are its own")
    assert (www.found.job_id, www.labels) == ("www", {"name": "www"})
    node.answer(WEB)
    node.ticks(8)
    assert node.cores("web") == 0.5
    node.answer()
    node.tick()
    assert node.cores("web") == 2.0
    assert not node.snapshot().jobs


@pytest.mark.parametrize("tells", [True, False])
def test_a_pin_stays_below_a_new_order(node, tells):
    node.answer(msgspec.structs.replace(WEB, reports_request=tells))
    node.tick()
    control.pin_job(node.agent, "web", {"cpu_limit": 0.8})
    assert node.cores("web") == 0.8
    for cores in (1.2, 0.6, 1.8):
        node.write("web", "cpu.max", f"{round(cores * 100_000)} 100000")
        node.answer(msgspec.structs.replace(order(cores), reports_request=tells))
        node.ticks(3)
        assert (node.cores("web"), node.job("web").status) == (min(cores, 0.8), "pinned")
    assert node.end().cores("web") == 1.8


def test_an_order_that_the_engine_enforces_in_another_way_is_no_quota(tmp_path):
    """Slurm gives a job CPUs and writes no quota."""
    job = msgspec.structs.replace(WEB, sets_quota=False)
    node = Node(tmp_path, {"web": v2_cgroup(quota="max 100000")}, config=SOURCE)
    node.answer(job)
    node.run(8)
    assert node.cores("web") == 0.5
    node.answer(msgspec.structs.replace(job, ordered_cores=1.0))
    node.ticks(2)
    assert node.job("web").ordered_cores == 1.0
    assert node.end().read("web").split()[0] == "max"
