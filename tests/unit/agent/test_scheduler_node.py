"""The agent as a node of a scheduler: when heartbeats go, what they hold, and what becomes of the answers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_executor import ME, PlayedExecutor
from fake_node import QUICK, FakeNode, source

from cpumond.agent.jobs.assigned import AssignedJobs
from cpumond.core.answers import ReporterStats
from cpumond.core.wire import Heartbeat, HeartbeatAnswer, JobOrder, RegistrationAnswer
from cpumond.host.executor.model import Ended, Started
from cpumond.testing import make_tree, v2_cgroup

EXECUTOR = f'[scheduler]\nurl = "http://h"\n[executor]\nkind = "cgroup"\nallow_root = true\nuser = "{ME}"\n'
RESOURCES = "[resources]\ncpu = 4.0\nmemory = 1000\nuser_slots = 3\n"
PATH = "cpumond-jobs/cpumond-job-j1"


class PlayedLink:
    def __init__(self) -> None:
        self.heartbeats: list[Heartbeat] = []
        self.registered: RegistrationAnswer | None = RegistrationAnswer("n", "default", 1.0)
        self.period_s = 0.0
        self.scheduler: tuple[str, int | None, int] = ("http://h", None, 0)

    def submit(self, heartbeat: Heartbeat) -> None:
        self.heartbeats.append(heartbeat)

    def close(self, timeout_s: float) -> None:
        pass

    def stats(self) -> ReporterStats:
        return ReporterStats(len(self.heartbeats), last_error="no answer")


class Node(FakeNode):
    """A fake node with a link, and an executor that starts nothing."""

    managed_roots = '["jobs", "cpumond-jobs"]'

    def __init__(self, directory: Path, executor: bool = True) -> None:
        self.executor = PlayedExecutor()
        tail = EXECUTOR if executor else '[scheduler]\nurl = "http://h"\n'
        super().__init__(directory, {"a": v2_cgroup()}, f"{QUICK}{source()}{RESOURCES}{tail}")
        self.link = PlayedLink()
        self.agent.context.link = self.link  # type: ignore[assignment]
        if executor:
            self.agent.context.assigned = AssignedJobs(self.agent.config, self.executor, self.clock)  # type: ignore[arg-type]
        self.start()

    def serve(self) -> None:
        """What happens between two ticks."""
        self.agent.loop.serve_scheduler(beat=True)

    def order(self, **answer: object) -> None:
        self.agent.take_answer(HeartbeatAnswer(True, **answer), self.clock.monotonic_s())  # type: ignore[arg-type]
        self.serve()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.agent.close()


def make_order(job_id: str = "j1", **monitor: object) -> JobOrder:
    return JobOrder(job_id, "op", "t", "p", 2.0, 0, 1, ["true"], {}, ME, monitor, 30.0)


def test_a_job_is_followed_as_soon_as_it_runs_and_told_at_once(node: Node) -> None:
    node.order(start=[make_order(check_period=100)])
    make_tree(node.root / PATH, v2_cgroup(quota="200000 100000"))
    before = len(node.link.heartbeats)
    node.executor.events.append(Started("j1", PATH, 100.0))
    node.serve()
    assert len(node.link.heartbeats) == before + 1
    [report] = [job for job in node.link.heartbeats[-1].jobs if job.from_scheduler]
    assert (report.job_id, report.cgroup, report.current_cpu_limit, report.mode) == ("j1", PATH, 2.0, "reclaim")
    assert PATH in node.agent.table.jobs
    assert node.agent.context.period_s == 0.1, "the next tick is as soon as this job wants it"
    shutil.rmtree(node.root / PATH)
    node.executor.events.append(Ended("j1", 200.0, exit_code=0))
    node.serve()
    assert PATH not in node.agent.table.jobs
    assert node.agent.context.period_s == 1.0
    last = node.link.heartbeats[-1]
    assert [job.job_id for job in last.finished_jobs] == ["j1"]
    assert [job.job_id for job in last.jobs] == ["a"]


@pytest.mark.parametrize(("period_s", "least", "most"), [(0.0, 9, 11), (5.0, 1, 3)])
def test_heartbeats_keep_their_period_whatever_the_ticks(node: Node, period_s: float, least: int, most: int) -> None:
    """A busy scheduler asks for fewer; without a change none comes between, and a change is sent at once."""
    node.link.period_s = period_s
    node.serve()
    before = len(node.link.heartbeats)
    for _ in range(5):
        node.order()
    assert len(node.link.heartbeats) == before
    for _ in range(100):
        node.clock.advance(0.1)
        node.serve()
    assert least <= len(node.link.heartbeats) - before <= most
    before = len(node.link.heartbeats)
    node.agent.context.due.beat = True
    node.serve()
    assert len(node.link.heartbeats) == before + 1


def test_a_node_that_does_not_know_its_jobs_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AssignedJobs, "knows_jobs", False)
    node = Node(tmp_path)
    for _ in range(5):
        node.clock.advance(1.0)
        node.tick()
        node.serve()
    assert node.link.heartbeats == []
    node.agent.close()


def test_answers_are_not_kept_where_nobody_obeys_them(tmp_path: Path) -> None:
    node = Node(tmp_path, executor=False)
    for _ in range(10):
        node.order(start=[make_order()])
    assert len(node.agent.loop.answers) == 0
    assert all(not job.from_scheduler for job in node.link.heartbeats[-1].jobs)
    node.agent.close()


def test_troubles_of_link_and_jobs_are_seen_and_stop_no_monitor(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.tick()
    snapshot = node.snapshot()
    assert snapshot.link is not None
    assert snapshot.link.tree == "default"
    assert any("scheduler http://h: no answer" in problem for problem in snapshot.problems)
    assert snapshot.assigned is not None

    def stumble() -> list[object]:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(node.executor, "poll", stumble)
    ticks = node.agent.context.totals.ticks
    node.tick(1.0)
    assert node.agent.context.totals.ticks == ticks + 1
    assert node.agent.context.totals.errors > 0
