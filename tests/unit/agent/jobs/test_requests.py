"""Requests of the scheduler's users about jobs of this node: which jobs, the replies, requests that come again."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from test_scheduler_node import PATH, Node, make_order

from cpumond.agent import control
from cpumond.agent.jobs import requests as module
from cpumond.agent.jobs.requests import JobRequests
from cpumond.core.errors import CreateError
from cpumond.core.wire import JobReply, JobRequest, RequestKind
from cpumond.host.executor.model import Ended, Started
from cpumond.testing import make_tree, v2_cgroup


class Asked(Node):
    """A node with the job ``j1`` of the scheduler, which may use 2 cores, and ``a`` of its own."""

    def __init__(self, directory: Path, executor: bool = True) -> None:
        super().__init__(directory, executor)
        self.requests = JobRequests(self.agent)
        self.numbers = itertools.count()
        if executor:
            self.order(start=[make_order("j1")])
            self.make_cgroup(PATH)
            self.executor.events.append(Started("j1", PATH, 100.0))
            self.serve()

    def make_cgroup(self, path: str) -> None:
        make_tree(self.root / path, v2_cgroup(quota="200000 100000"))

    def ask(
        self, kind: RequestKind, job_id: str = "j1", cpu_limit: float | None = None, ttl_s: float | None = None,
        request_id: str = "",
    ) -> JobReply:  # fmt: skip
        """The reply, by a thread that is not the tick's; a new request unless it has an id."""
        request_id = request_id or f"new-{next(self.numbers)}"
        request = JobRequest(request_id, kind, job_id, cpu_limit, ttl_s)
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(self.requests.carry_out, request, 10.0)
            while not asking.done():
                self.agent.run_requests()
            reply = asking.result()
        assert reply is not None
        assert (reply.node_id, reply.request_id) == ("node", request_id)
        assert (reply.value is None) == bool(reply.error)
        return reply

    def pins(self) -> dict[str, tuple[float, float | None]]:
        return {name: (pin.cpu_limit, pin.until) for name, pin in self.agent.context.registered.content.pins.items()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Asked]:
    node = Asked(tmp_path)
    yield node
    node.agent.close()


def test_a_pin_is_on_disk_and_in_force_when_it_is_replied(node: Asked) -> None:
    reply = node.ask("pin", cpu_limit=0.5, ttl_s=60.0)
    assert reply.value is not None
    assert (reply.value["pinned_cpu_limit"], reply.value["current_cpu_limit"]) == (0.5, 0.5)
    assert node.pins() == {"j1": (0.5, node.clock.wall_s() + 60.0)}
    node.agent.context.registered.load()
    assert list(node.pins()) == ["j1"]
    assert (node.root / PATH / "cpu.max").read_text().split() == ["50000", "100000"]
    assert node.ask("unpin").value is not None
    assert node.pins() == {}
    assert node.ask("pin").value is not None
    assert node.pins() == {"j1": (2.0, None)}


def test_a_change_that_is_asked_for_again_is_not_made_again(node: Asked) -> None:
    first = node.ask("pin", cpu_limit=0.5, ttl_s=60.0, request_id="r1")
    until = node.clock.wall_s() + 60.0
    node.clock.advance(7.0)
    assert node.ask("pin", cpu_limit=0.5, ttl_s=60.0, request_id="r1") == first
    assert node.pins() == {"j1": (0.5, until)}
    node.ask("unpin")
    assert node.ask("pin", cpu_limit=0.5, ttl_s=60.0, request_id="r1") == first
    assert node.pins() == {}, "what came later holds"


def test_an_explanation_is_always_of_now(node: Asked) -> None:
    node.ask("explain")
    node.ask("pin", cpu_limit=0.5)
    again = node.ask("explain")
    assert again.value is not None
    assert again.value["pinned_cpu_limit"] == 0.5
    operation = again.value["operation_id"]
    assert again.value["why"].endswith(f": an operator pinned it until `cpumond operation unpin {operation} j1`.")


def test_what_is_remembered_is_bounded(node: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3)
    for number in range(10):
        node.ask("unpin", request_id=f"r{number}")
    assert list(node.requests._changes) == ["r7", "r8", "r9"]


@pytest.mark.parametrize("kind", ["explain", "pin", "unpin"])
@pytest.mark.parametrize("job_id", ["a", "jobs/a", PATH, "j2", "", "../../etc"])
def test_only_the_schedulers_own_jobs_are_its_users_business(node: Asked, kind: RequestKind, job_id: str) -> None:
    before = node.pins()
    reply = node.ask(kind, job_id)
    assert reply.is_refused
    assert reply.error == f"job {job_id} is not one of the scheduler's jobs on this node"
    assert node.pins() == before


def test_a_node_without_an_executor_has_no_jobs_of_the_scheduler(tmp_path: Path) -> None:
    node = Asked(tmp_path, executor=False)
    assert "not one of the scheduler's jobs" in node.ask("pin", "a").error
    node.agent.close()


def test_a_job_that_does_not_run_is_refused(node: Asked) -> None:
    node.order(start=[make_order("j2")])
    reply = node.ask("pin", "j2")
    assert (reply.error, reply.is_refused) == ("job j2 has not started yet; ask again in a moment", False)
    node.executor.events.append(Started("j2", "cpumond-jobs/cpumond-job-j2", 100.0))
    node.serve()
    reply = node.ask("explain", "j2")
    assert reply.error == "job j2 runs, but its cgroup is not measured yet; ask again in a moment"
    assert not reply.is_refused, "asking again helps"
    node.executor.events.append(Ended("j2", 200.0, exit_code=0))
    node.serve()
    reply = node.ask("explain", "j2")
    assert (reply.error, reply.is_refused) == ("job j2 has ended", True)


def test_the_id_of_somebody_elses_job_is_ambiguous(node: Asked) -> None:
    path = "cpumond-jobs/cpumond-job-j2"
    for each in ("jobs/other", path):
        node.make_cgroup(each)
    control.add_job(node.agent, {"cgroup": "jobs/other", "job_id": "j2"})
    node.order(start=[make_order("j2")])
    node.executor.events.append(Started("j2", path, 100.0))
    node.serve()
    assert {job.found.path for job in node.agent.table if job.found.job_id == "j2"} == {path, "jobs/other"}
    reply = node.ask("pin", "j2", 0.5)
    assert reply.is_refused
    assert reply.error == "job j2: this node has another job with this id, cgroup jobs/other"
    node.agent.rescan_now()
    assert [job.found.path for job in node.agent.table if job.found.job_id == "j2"] == ["jobs/other"]
    assert "runs, but its cgroup is not measured yet" in node.ask("explain", "j2").error
    assert node.pins() == {}


def test_a_disk_that_refuses_is_no_refusal_of_the_request(node: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job_id: str, pin: object) -> None:
        raise CreateError("registered.state cannot be written: no space left on device")

    monkeypatch.setattr(node.agent.context.registered, "pin", refuse)
    reply = node.ask("pin", cpu_limit=0.5)
    assert not reply.is_refused
    assert "no space left on device" in reply.error


def test_an_answer_that_is_too_large_is_said(node: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLY_BYTES", 100)
    reply = node.ask("explain")
    assert not reply.is_refused
    assert "more than the 100 that can be sent; ask the node itself" in reply.error


def test_a_tick_without_time_leaves_the_request_open(node: Asked) -> None:
    request = JobRequest("r1", "pin", "j1", 0.5, 60.0)
    assert node.requests.carry_out(request, 0.01) is None
    node.agent.run_requests()
    assert node.pins() == {}, "it was taken back"


def test_a_change_whose_reply_comes_too_late_is_made_once(node: Asked) -> None:
    """It was begun in time: it is done to its end, and its reply is there when the request comes again."""
    begun, go_on = threading.Event(), threading.Event()
    pin = node.agent.context.registered.pin

    def pin_slowly(job_id: str, pinned: object) -> None:
        begun.set()
        assert go_on.wait(60.0)
        pin(job_id, pinned)  # type: ignore[arg-type]

    node.agent.context.registered.pin = pin_slowly  # type: ignore[method-assign]
    request = JobRequest("r1", "pin", "j1", 0.5, 60.0)
    replies: list[JobReply | None] = []

    def ask() -> None:
        while not begun.is_set():  # again where the tick was so late that it was taken back
            replies.append(node.requests.carry_out(request, 0.05))
        go_on.set()

    thread = threading.Thread(target=ask)
    thread.start()
    while not begun.is_set():
        node.agent.run_requests()
    thread.join()
    assert set(replies) == {None}
    until = node.clock.wall_s() + 60.0
    node.clock.advance(5.0)
    assert node.ask("pin", cpu_limit=0.5, ttl_s=60.0, request_id="r1").value is not None
    assert node.pins() == {"j1": (0.5, until)}


def test_an_agent_that_ends_replies_nothing(node: Asked) -> None:
    assert node.end().requests.carry_out(JobRequest("r1", "explain", "j1"), 10.0) is None


def test_the_pin_of_a_job_that_ended_is_forgotten(node: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    node.ask("pin", cpu_limit=0.5)
    node.serve()
    assert list(node.pins()) == ["j1"]
    forget = node.agent.context.registered.pin
    errors = node.agent.context.totals.errors

    def refuse(job_id: str, pin: object) -> None:
        raise CreateError("no space left on device")

    monkeypatch.setattr(node.agent.context.registered, "pin", refuse)
    node.executor.events.append(Ended("j1", 200.0, exit_code=0))
    before = len(node.link.heartbeats)
    node.serve()
    assert len(node.link.heartbeats) == before + 1, "a full disk does not keep its end from the scheduler"
    for _ in range(50):
        node.serve()
    assert node.agent.context.totals.errors == errors + 1, "it is tried again in a while"
    monkeypatch.setattr(node.agent.context.registered, "pin", forget)
    node.order(acknowledged=["j1"])
    assert list(node.pins()) == ["j1"]
    node.clock.advance(node.agent.config.discovery.rescan_period_s)
    node.serve()
    assert node.pins() == {}


def test_the_pin_of_a_job_outlives_a_job_of_the_scheduler_with_its_id(node: Asked) -> None:
    for job_id in ("a", "j2"):
        node.make_cgroup(f"cpumond-jobs/cpumond-job-{job_id}")
    node.make_cgroup("jobs/other")
    control.add_job(node.agent, {"cgroup": "jobs/other", "job_id": "j2"})
    for job_id in ("a", "j2"):
        control.pin_job(node.agent, job_id, {"cpu_limit": 0.5})
        node.order(start=[make_order(job_id)])
        node.executor.events.append(Started(job_id, f"cpumond-jobs/cpumond-job-{job_id}", 100.0))
        node.serve()
        node.executor.events.append(Ended(job_id, 200.0, exit_code=0))
        node.serve()
    assert sorted(node.pins()) == ["a", "j2"]


def test_those_who_ask_without_end_do_not_hold_up_the_tick(node: Asked) -> None:
    def ask_again() -> None:
        asked.append(node.agent.context.totals.ticks)
        if len(asked) < 100:
            again: Future[None] = Future()
            node.agent._requests.append((ask_again, again))

    asked: list[int] = []
    first: Future[None] = Future()
    node.agent._requests.append((ask_again, first))
    node.agent.run_requests()
    assert first.done()
    assert len(asked) == 1
    node.agent.run_requests()
    assert len(asked) == 2, "it has its turn"
