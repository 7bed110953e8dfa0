"""Which engines are asked, and in which way."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from waiting import wait_until

from cpumond.agent import engines
from cpumond.agent.config import Source
from cpumond.agent.discovery import FoundJob
from cpumond.agent.engines import SERVICE_ACCOUNT, EngineContext, Engines, make_engine
from cpumond.host.engine.cri import CriEngine
from cpumond.host.engine.kubernetes import KubeletEngine
from cpumond.host.engine.model import EngineJob, EngineReply, EngineView, Publish

KUBELET = ("kubernetes", "https://127.0.0.1:10250")
WAIT_S = 30.0


class Counted:
    """An engine that has no jobs, and says so once."""

    kind = "kubernetes"

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        publish(EngineReply((), "counted"))
        await asyncio.Event().wait()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[EngineContext]:
    contexts: list[EngineContext] = []

    def make(socket: str, context: EngineContext) -> Counted:
        contexts.append(context)
        return Counted()

    monkeypatch.setitem(engines.ENGINES, "kubernetes", make)
    return contexts


@pytest.fixture
def asked() -> Iterator[Engines]:
    found = Engines(hierarchies("/nowhere"), "node-7")
    yield found
    found.close()


JOB = EngineJob("kubernetes", "a" * 64, "web", "kubepods/web", ordered_cores=1.5, reports_request=True)
FOUND = FoundJob("web", "", JOB.path, 1.5, engine=JOB, is_whole=True)


def test_the_cgroup_that_holds_a_pod_together_is_none_of_its_jobs():
    sandbox = msgspec.structs.replace(JOB, path="kubepods/sandbox", is_job=False)
    assert EngineView("kubernetes", {each.path: each for each in (JOB, sandbox)}).count_jobs() == 1


class Telling(Counted):
    """An engine that tells of one job, and of the next of its orders whenever it is asked again."""

    def __init__(self, *orders: float) -> None:
        self.orders = orders

    async def watch(self, publish: Publish, nudged: asyncio.Event) -> None:
        for cores in self.orders:
            publish(EngineReply((msgspec.structs.replace(JOB, ordered_cores=cores),)))
            await nudged.wait()
            nudged.clear()
        await asyncio.Event().wait()


@pytest.mark.parametrize(("orders", "found"), [((1.5, 0.5), 0.5), ((1.5, 1.5), 1.5), ((1.5,), 1.5)])
def test_what_an_engine_has_ordered_since_it_was_asked_is_waited_for(asked, monkeypatch, orders, found):
    monkeypatch.setitem(engines.ENGINES, "kubernetes", lambda *_: Telling(*orders))
    asked.follow([Source(kind="kubernetes")])
    asked.wait(WAIT_S)
    # The last one does not answer any more.
    assert asked.wait_for_orders([FOUND], WAIT_S if len(orders) > 1 else 0.05)
    assert asked.views[KUBELET].jobs[JOB.path].ordered_cores == found
    assert not asked.wait_for_orders([msgspec.structs.replace(FOUND, engine=None)], WAIT_S)


def hierarchies(root: str) -> Any:
    return SimpleNamespace(cpu_root=root, cpu_version=1)


def test_an_engine_asked_in_another_way_is_begun_anew_and_no_other(asked: Engines, made: list[EngineContext]) -> None:
    near, far = Source(kind="kubernetes"), Source(kind="kubernetes", socket="https://far:10250")
    asked.follow([near, far])
    asked.wait(WAIT_S)
    assert [each.node_id for each in made] == ["node-7"] * 2
    asked.follow([near, far])
    asked.follow([Source(kind="kubernetes", mode="shadow"), far])
    changed = Source(kind="kubernetes", ca_file="/other")
    asked.follow([changed, far])
    wait_until(lambda: len(made) > 2, "the one that changed is made anew")
    asked.wait(WAIT_S)
    assert asked.views[KUBELET].is_up
    asked.follow([far])
    wait_until(lambda: KUBELET not in asked.views, "one that no source asks any more is forgotten")
    assert [each.source for each in made[2:]] == [changed], "neither a repeated nor another key of a source counts"


def test_a_kubelet_or_a_runtime_by_the_address(tmp_path: Path) -> None:
    def make(socket: str, **more: str) -> object:
        context = EngineContext(hierarchies(str(tmp_path)), Source(kind="kubernetes", **more), "node-7")
        return make_engine(("kubernetes", socket), context)

    assert isinstance(make("/run/containerd/containerd.sock"), CriEngine)
    kubelet = make("https://127.0.0.1:10250")
    assert isinstance(kubelet, KubeletEngine)
    assert kubelet.access.token_file == f"{SERVICE_ACCOUNT}/token"
    assert (kubelet.access.ca_file, kubelet.access.node_name) == (f"{SERVICE_ACCOUNT}/ca.crt", "node-7")
    given = make("https://127.0.0.1:10250", token_file="/t", ca_file="/c")  # noqa: S106 - the name of a file
    assert isinstance(given, KubeletEngine)
    assert (given.access.token_file, given.access.ca_file) == ("/t", "/c")
