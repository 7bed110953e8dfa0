"""The thread that asks engines: what it keeps while they answer, fail and come back."""

import asyncio
import queue
import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from cpumond.host.engine import link
from cpumond.host.engine.link import EngineThread
from cpumond.host.engine.model import EngineError, EngineJob, EngineReply, EngineView, Key, Publish

KEY: Key = ("docker", "/run/docker.sock")
JOB = EngineJob("docker", "4f", "web", "docker/4f", {"name": "web"})


class Scripted:
    """An engine that does what it is told over a queue: publishes an answer, raises an error, or ends."""

    kind = "docker"

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[EngineReply | Exception | None] = queue.SimpleQueue()
        self.watched = 0
        self.nudges = 0

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        self.watched += 1
        while True:
            while self.orders.empty():
                await asyncio.sleep(0.001)
            if nudged.is_set():
                self.nudges += 1
                nudged.clear()
            order = self.orders.get()
            if order is None:
                return
            if isinstance(order, Exception):
                raise order
            publish(order)


class News:
    """Counts what the thread says, and waits for it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.count = 0

    def __call__(self) -> None:
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.count >= count, 30)


@pytest.fixture
def news() -> News:
    return News()


@pytest.fixture
def thread(news: News, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThread]:
    monkeypatch.setattr(link, "RETRY_S", 0.01)
    thread = EngineThread(news)
    yield thread
    thread.close()
    assert not thread._thread.is_alive()


def view(thread: EngineThread) -> EngineView:
    return thread.views[KEY]


def test_an_answer_is_news_when_it_differs(thread, news):
    engine = Scripted()
    thread.follow({KEY: lambda: engine})
    engine.orders.put(EngineReply((JOB,), "docker 20"))
    news.wait(1)
    assert (view(thread).jobs, view(thread).title, view(thread).is_up) == ({"docker/4f": JOB}, "docker 20", True)
    engine.orders.put(EngineReply((JOB,), "docker 20"))
    engine.orders.put(EngineReply((), "docker 20"))
    news.wait(2)
    assert view(thread).jobs == {}
    assert news.count == 2


@pytest.mark.parametrize(("failure", "problem"), [
    (EngineError("docker: no answer"), "docker: no answer"),
    (ValueError("odd"), "docker: ValueError: odd"),
    (None, "docker: it ended"),
])  # fmt: skip
def test_what_was_last_said_is_kept_while_the_engine_is_away(thread, news, failure, problem):
    engine = Scripted()
    thread.follow({KEY: lambda: engine})
    engine.orders.put(EngineReply((JOB,)))
    news.wait(1)
    for _ in range(3):
        engine.orders.put(failure)
    news.wait(2)
    assert (view(thread).problem, view(thread).is_up, list(view(thread).jobs)) == (problem, False, ["docker/4f"])
    with capture_logs() as logs:
        engine.orders.put(EngineReply((JOB,)))
        news.wait(3)
    assert "engine_back" in [each["event"] for each in logs]
    assert (view(thread).problem, view(thread).is_up) == ("", True)
    assert (engine.watched, news.count) == (4, 3), "one that stays away is news once"


def test_one_that_hangs_does_not_hold_up_another(thread, news):
    hanging, other = Scripted(), Scripted()
    thread.follow({KEY: lambda: hanging, ("podman", "/p"): lambda: other})
    other.orders.put(EngineReply((JOB,)))
    news.wait(1)
    assert thread.views["podman", "/p"].is_up
    assert not view(thread).is_up


def test_a_nudge_reaches_the_engines_that_are_named(thread, news):
    engine, other = Scripted(), Scripted()
    thread.follow({KEY: lambda: engine, ("podman", "/p"): lambda: other})
    thread.nudge([KEY, ("slurm", "")])
    engine.orders.put(EngineReply((JOB,)))
    other.orders.put(EngineReply((JOB,)))
    news.wait(2)
    assert (engine.nudges, other.nudges) == (1, 0)


def test_engines_are_followed_and_left(thread, news):
    engine, other = Scripted(), Scripted()
    thread.follow({KEY: lambda: engine})
    engine.orders.put(EngineReply((JOB,)))
    news.wait(1)
    thread.follow({KEY: Scripted, ("podman", "/p"): lambda: other})
    other.orders.put(EngineReply(()))
    news.wait(2)
    assert list(view(thread).jobs) == ["docker/4f"], "one that is followed already goes on"
    thread.follow({("podman", "/p"): Scripted})
    other.orders.put(EngineReply((JOB,)))
    news.wait(3)
    assert list(thread.views) == [("podman", "/p")]


def test_only_some_of_many_notes_are_shown():
    notes = tuple(f"docker: container {number} is odd" for number in range(1000))
    shown = link.make_view(KEY, EngineReply((), notes=notes), 0.0).notes
    assert shown == (*notes[: link.MAX_NOTES], f"docker: {1000 - link.MAX_NOTES} more such sentences")
    assert link.make_view(KEY, EngineReply((), notes=notes[:3]), 0.0).notes == notes[:3]


def test_nothing_is_asked_after_the_end(news):
    thread = EngineThread(news)
    thread.follow({KEY: Scripted})
    thread.close()
    thread.nudge([KEY])
    thread.close()
