"""Engines that are asked once, by a command: answers, refusals, silence."""

import asyncio

from cpumond.host.engine.link import ask_each
from cpumond.host.engine.model import EngineError, EngineJob, EngineReply, Publish

WEB = EngineJob("docker", "0a1b", "web", "docker/0a1b", ordered_cores=1.5)


class Engine:
    """An engine that publishes what it is given, and then does what it is given; a client as the protocol has it."""

    kind = "docker"

    def __init__(self, *answers: EngineReply, error: Exception | None = None, is_slow: bool = False) -> None:
        self.answers = answers
        self.error = error
        self.is_slow = is_slow
        self.was_cancelled = False

    async def watch(self, publish: Publish, _nudged: asyncio.Event) -> None:
        for answer in self.answers:
            publish(answer)
        if self.error is not None:
            raise self.error
        if self.is_slow:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise


def test_the_first_answer_counts_and_the_client_is_ended():
    engine = Engine(EngineReply((WEB,), "docker 20.10.24", ("a note",)), EngineReply((), "later"), is_slow=True)
    view = ask_each({("docker", "/s"): lambda: engine}, 30.0)["docker", "/s"]
    assert view.is_up
    assert (view.jobs, view.title, view.notes) == ({"docker/0a1b": WEB}, "docker 20.10.24", ("a note",))
    assert engine.was_cancelled


def test_each_that_fails_has_a_sentence_and_the_others_answer():
    def fail() -> Engine:
        raise RuntimeError("no client")

    views = ask_each(
        {
            ("docker", "refuses"): lambda: Engine(error=EngineError("docker: the socket does not exist")),
            ("docker", "breaks"): lambda: Engine(error=ValueError("nonsense")),
            ("docker", "none"): fail,
            ("docker", "silent"): lambda: Engine(is_slow=True),
            ("docker", "ends"): Engine,
            ("docker", "answers"): lambda: Engine(EngineReply((WEB,)), error=EngineError("and then ends")),
        },
        0.05,
    )
    assert {key[1]: view.problem for key, view in views.items()} == {
        "refuses": "docker: the socket does not exist", "breaks": "docker: ValueError: nonsense",
        "none": "docker: RuntimeError: no client", "silent": "docker: no response within 0.05 s",
        "ends": "docker: it ended", "answers": "",
    }  # fmt: skip
    assert [key[1] for key, view in views.items() if view.is_up] == ["answers"]


def test_nobody_to_ask():
    assert ask_each({}, 1.0) == {}
