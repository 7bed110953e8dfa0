"""Source ``kubernetes``: a real agent and real cgroups, named as a kubelet names them.

No kubelet or runtime runs here: ``kubelet_server.py`` answers after the published API, not as recorded on a live node.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from configs import QUICK, at_floor
from kubelet_server import (
    TOKEN,
    KubeletServer,
    RuntimeServer,
    container_id,
    list_entry,
    make_certificate,
    make_pod,
    place_of,
    write_token,
)
from real_cgroups import CgroupTree
from waiting import wait_until

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup

OTHER_TOKEN = "another.one"  # noqa: S105 - of nobody
BURSTABLE, BEST_EFFORT, GUARANTEED = "shop/web-1/app", "shop/batch-1/run", "shop/db-0/db"


@pytest.fixture
def kubepods(hierarchies: Hierarchies) -> Iterator[CgroupTree]:
    """The cgroups of pods, of the driver cgroupfs. The kubelet's own root has no more in its name than ``kubepods``."""
    if hierarchies.cpu_version != 1:
        pytest.skip("needs the cpu controller in a version 1 hierarchy")
    with CgroupTree(hierarchies, f"kubepods-cpumond-test-{os.getpid()}-{secrets.token_hex(4)}") as tree:
        yield tree


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletServer]:
    """A kubelet whose certificate is for the name of the agent's node."""
    server = KubeletServer(*make_certificate(tmp_path, "test-node"))
    write_token(tmp_path / "token")
    yield server
    server.close()


def run(tree: CgroupTree, pod: dict, quota_us: int = -1, number: int = 0) -> str:
    place = place_of(pod, number)
    tree.make(place)
    tree.write(place, "quota_us", quota_us)
    return place


def describe(tmp_path: Path, socket: str, more: str = "", source: str | None = None) -> str:
    options = "".join(f"{key} = {value}\n" for key, value in QUICK.items())
    files = f'token_file = "{tmp_path}/token"\nca_file = "{tmp_path}/kubelet.crt"\n' if source is None else source
    return (
        f'[monitor]\nmode = "reclaim"\ncheck_period = "100ms"\n{options}'
        f'[[source]]\nkind = "kubernetes"\nsocket = "{socket}"\n{files}'
        f'[discovery]\nrescan_period = "300ms"\n[cost]\ncpu_budget_ratio = 0.0\n{more}'
    )


def names(agent: AgentProcess, tree: CgroupTree) -> set[str]:
    """The ids of the jobs below the test's root: other tests may have pods of their own."""
    return {each["job_id"] for each in agent.get("/v1/status")["jobs"] if each["cgroup"].startswith(f"{tree.top}/")}


def test_burstable_pods_are_lowered_and_guaranteed_ones_never(
    agent: AgentProcess, kubepods: CgroupTree, kubelet: KubeletServer, tmp_path: Path
):
    web = make_pod("web-1", "Burstable", {"app": "1500m", "proxy": None})
    batch, database = make_pod("batch-1", "BestEffort", {"run": None}), make_pod("db-0", "Guaranteed", {"db": "2"})
    kubelet.pods = [web, batch, database]
    app, proxy = run(kubepods, web, 150_000), run(kubepods, web, number=1)
    job, db = run(kubepods, batch), run(kubepods, database, 200_000)
    sandbox = f"burstable/pod{web['metadata']['uid']}/{secrets.token_hex(32)}"
    kubepods.make(sandbox)
    agent.start(describe(tmp_path, kubelet.url))
    wait_until(lambda: at_floor(kubepods, app), "the burstable container is down at the floor")
    assert names(agent, kubepods) == {BURSTABLE, "shop/web-1/proxy", BEST_EFFORT, GUARANTEED}, "no sandbox"
    shown = agent.job(BURSTABLE)
    assert shown["engine"] == "kubernetes"
    assert shown["operation_id"] == "shop/web-1"
    assert shown["cpu_limit"] == 1.5
    assert shown["labels"] == {
        "namespace": "shop", "pod": "web-1", "container": "app", "image": "registry.example/app:1", "qos": "Burstable",
    }  # fmt: skip
    refused = agent.job(GUARANTEED)["refused"]
    assert "Guaranteed" in refused
    assert refused in agent.run("explain", GUARANTEED).stdout.replace("\n", " ")
    for name in (BEST_EFFORT, "shop/web-1/proxy"):
        assert agent.job(name)["unlimited"], name
    assert "no limit ordered" in agent.run("status").stdout
    assert [kubepods.read(each, "quota_us") for each in (proxy, job, db)] == ["-1", "-1", "200000"]
    infos = [each for each in agent.metrics().splitlines() if each.startswith("cpumond_job_info")]
    [line] = [each for each in infos if f'"{BURSTABLE}"' in each]
    assert all(label in line for label in ('engine="kubernetes"', 'namespace="shop"', 'qos="Burstable"'))
    assert agent.stop() == 0
    assert kubepods.read(app, "quota_us") == "150000"


def test_the_token_is_read_anew_and_shown_to_nobody_else(
    agent: AgentProcess, kubepods: CgroupTree, kubelet: KubeletServer, tmp_path: Path
):
    web = make_pod("web-1", "Burstable", {"app": "1500m"})
    kubelet.pods = [web]
    run(kubepods, web, 150_000)
    other = tmp_path / "other"
    other.mkdir()
    make_certificate(other, "test-node")
    files = f'token_file = "{tmp_path}/token"\nca_file = "{other}/kubelet.crt"\n'
    agent.start(describe(tmp_path, kubelet.url, source=files))
    problems = wait_until(lambda: agent.get("/v1/status")["problems"], "somebody else's certificate is not taken")
    assert "its certificate is not one for the node 'test-node'" in " ".join(problems)
    assert not kubelet.asked, "nothing was asked, so no token was shown"
    (other / "kubelet.crt").write_bytes((tmp_path / "kubelet.crt").read_bytes())
    wait_until(lambda: BURSTABLE in names(agent, kubepods), "the right one is read when it is there")
    kubelet.token = OTHER_TOKEN
    wait_until(lambda: "status 401" in " ".join(agent.get("/v1/status")["problems"]), "it is told")
    assert "Either the API server, which it asks about each token, is down" in agent.get("/v1/status")["problems"][0]
    write_token(tmp_path / "token", [OTHER_TOKEN])
    wait_until(lambda: not agent.get("/v1/status")["problems"], "the new token is shown")
    assert kubelet.tokens_seen == {f"Bearer {TOKEN}", f"Bearer {OTHER_TOKEN}"}


@pytest.mark.parametrize("port", ["read-only", "own"])
def test_a_kubelet_on_the_loopback_may_be_asked_without_its_certificate(
    agent: AgentProcess, kubepods: CgroupTree, tmp_path: Path, port: str
):
    """Its port without TLS is shown no token; the other one is, where the operator said so."""
    write_token(tmp_path / "token")
    files = f'token_file = "{tmp_path}/token"\nca_file = "none"\n' if port == "own" else ""
    server = KubeletServer(*(make_certificate(tmp_path, "elsewhere") if port == "own" else ()))
    try:
        web = make_pod("web-1", "Burstable", {"app": "1500m"})
        server.pods = [web]
        app = run(kubepods, web, 150_000)
        agent.start(describe(tmp_path, server.url, source=files))
        wait_until(lambda: at_floor(kubepods, app), "it is down at the floor")
        assert server.tokens_seen == {f"Bearer {TOKEN}" if port == "own" else ""}
    finally:
        server.close()


def test_a_container_runtime_is_asked_where_its_socket_is_given(
    agent: AgentProcess, kubepods: CgroupTree, tmp_path: Path
):
    pytest.importorskip("grpc", reason="needs grpcio")
    web, database = make_pod("web-1", "Burstable", {"app": "1"}), make_pod("db-0", "Guaranteed", {"db": "2"})
    old = make_pod("old", "Burstable", {"x": "1"})
    app, db, silent = run(kubepods, web, 150_000), run(kubepods, database, 200_000), run(kubepods, old, 100_000)
    runtime = RuntimeServer(tmp_path / "cri.sock")
    try:
        gone = make_pod("gone", "Burstable", {"x": "1"})
        runtime.entries = [list_entry(each) for each in (web, database, gone, old)]
        runtime.quotas = {container_id(web): 150_000, container_id(database): 200_000, container_id(old): None}
        agent.start(describe(tmp_path, f"{tmp_path}/cri.sock", source=""))
        wait_until(lambda: at_floor(kubepods, app, silent), "the burstable containers are down at the floor")
        assert names(agent, kubepods) == {BURSTABLE, GUARANTEED, "shop/old/x"}
        assert agent.job(BURSTABLE)["cpu_limit"] == 1.5
        assert agent.job(BURSTABLE)["labels"]["image"] == "registry.example/app:1"
        assert "Guaranteed" in agent.job(GUARANTEED)["refused"]
        assert kubepods.read(db, "quota_us") == "200000"
        kubepods.write(app, "quota_us", 60_000)
        runtime.quotas[container_id(web)] = 60_000
        wait_until(lambda: agent.job(BURSTABLE)["cpu_limit"] == 0.6, "the runtime's update is the order")
        runtime.entries.append(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
        wait_until(lambda: agent.get("/v1/status")["problems"], "what is no message is told")
        assert agent.job(BURSTABLE)["labels"]["pod"] == "web-1"
        runtime.entries = [b" " * (17 << 20)]
        told = "resource_exhausted"
        wait_until(lambda: told in " ".join(agent.get("/v1/status")["problems"]), "what is too large is not taken")
    finally:
        runtime.close()
    told = "no response (unavailable"
    wait_until(lambda: told in " ".join(agent.get("/v1/status")["problems"]), "it is told that the runtime is away")
    assert not agent.events("engine_failed")
    assert agent.stop() == 0
    assert kubepods.read(app, "quota_us") == "60000"
    assert kubepods.read(silent, "quota_us") == "100000"
