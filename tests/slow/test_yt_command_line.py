"""The unmodified ``yt`` of ytsaurus-client against a running scheduler, with and without the bindings of YSON."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from scheduler_process import PlayedNode, SchedulerProcess, need_bindings
from waiting import wait_until

from cpumond.api.yt.yson import read_yson

NODE_CORES = 200.0
SATURATION_S = 86_400.0
"""How long a pool's resource flow is accumulated, unless the tree says otherwise."""

ORCHID = "//sys/scheduler/orchid/scheduler"
DEFAULT_TREE = f"{ORCHID}/pool_trees/default"
ID = re.compile(r"[0-9a-f]{1,8}(-[0-9a-f]{1,8}){3}")
Outputs = dict[str, str]


class World:
    """A scheduler with one node, for all tests here; each makes pools of its own names."""

    def __init__(self, scheduler: SchedulerProcess) -> None:
        self.scheduler = scheduler
        self.node = PlayedNode(scheduler, "host-1.example.net", cpu=NODE_CORES)
        self.node.register()
        self.node.beat()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    scheduler = SchedulerProcess(tmp_path_factory.mktemp("scheduler"))
    scheduler.write_config('node_heartbeat_timeout = "1h"\n')
    scheduler.start()
    try:
        yield World(scheduler)
        assert "Traceback" not in scheduler.log()
    finally:
        scheduler.close()


@pytest.fixture(params=[False, True], ids=["without bindings", "with bindings"])
def bindings(request: pytest.FixtureRequest) -> bool:
    """Whether the client has the bindings: it then asks for binary YSON, else for JSON."""
    if request.param:
        need_bindings()
    return bool(request.param)


@pytest.fixture
def kind(bindings: bool) -> str:
    return "b" if bindings else "n"


def run_all(world: World, bindings: bool, given: dict[str, str] | None = None, **runs: tuple[str, ...]) -> Outputs:
    """What command lines print, of which none must fail; ``given`` are the inputs of some."""
    done = world.scheduler.yt_all(runs, bindings, given)
    assert {name: run.stderr for name, run in done.items() if run.returncode} == {}
    return {name: run.stdout for name, run in done.items()}


@pytest.fixture
def yt(world: World, bindings: bool) -> Callable[..., Outputs]:
    """Runs command lines at the same time."""
    return partial(run_all, world, bindings)


def value_of(text: str) -> Any:
    return read_yson(text.encode())


# --- the documents' commands -----------------------------------------------------------------------------------------


@pytest.fixture
def documents_pools(world: World) -> None:
    """``burst`` under ``root-pool``, with guarantees other than those that a test sets."""
    guarantees = {"resource_flow": {"cpu": 100.0}, "burst_guarantee_resources": {"cpu": 150.0}}
    pools = "trees/default/pools"
    attributes: dict[str, Any] = {"integral_guarantees": guarantees}
    world.scheduler.post(pools, {"name": "root-pool", "attributes": attributes, "ignore_existing": True})
    attributes = {"integral_guarantees": {**guarantees, "resource_flow": {"cpu": 20.0}, "guarantee_type": "burst"}}
    body = {"name": "burst", "parent": "root-pool", "attributes": attributes, "ignore_existing": True}
    world.scheduler.post(pools, body)
    edit = {"path": ["integral_guarantees", "resource_flow"], "value": {"cpu": 20.0}}
    world.scheduler.patch(f"{pools}/burst", {"edits": [edit]})


@pytest.mark.usefixtures("documents_pools")
def test_the_commands_of_the_documents(world, yt, bindings):
    scheduler = world.scheduler
    done = scheduler.yt(
        "set", "//sys/pools/root-pool/burst/@integral-guarantees/resource_flow", "{cpu=100}", bindings=bindings
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    scheduler.wait_updates()
    pool = f"{DEFAULT_TREE}/pools/burst"
    out = yt(
        capacity=("get", f"{pool}/integral_pool_capacity"),
        flow=("get", "//sys/pools/root-pool/burst/@integral_guarantees/resource_flow"),
        hyphen=("get", "//sys/pool_trees/default/root-pool/burst/@integral-guarantees/resource-flow/cpu"),
        type=("get", f"{pool}/integral_guarantee_type"),
        ratio=("get", f"{pool}/specified_resource_flow_ratio"),
        burst=("get", f"{pool}/specified_burst_ratio"),
        volume=("get", f"{pool}/accumulated_resource_ratio_volume"),
    )
    assert float(out["capacity"]) == 100.0 / NODE_CORES * SATURATION_S
    assert (out["capacity"], out["hyphen"], out["type"]) == ("43200.\n", "100.\n", '"burst"\n')
    assert value_of(out["flow"]) == {"cpu": 100.0}
    assert (float(out["ratio"]), float(out["burst"])) == (0.5, 0.75)
    assert 0.0 < float(out["volume"]) < 43200.0


# --- pools and trees -------------------------------------------------------------------------------------------------


def test_pools_are_made_changed_moved_and_removed(world, yt, bindings, kind):
    scheduler = world.scheduler
    top, root = f"{kind}-top", f"//sys/pools/{kind}-top"
    made = yt(
        verb=(
            "create-pool", top, "default", "--weight", "2", "--max-operation-count", "20",
            "--max-running-operation-count", "10", "--strong-guarantee-resources", "{cpu=40}",
            "--resource-limits", "{cpu=100.5;memory=1000000}",
        ),
        fifo=(
            "create-pool", f"{kind}-fifo", "--mode", "fifo", "--fifo-sort-parameters", "[weight;start_time]",
        ),
    )  # fmt: skip
    assert all(ID.fullmatch(text.strip()) for text in made.values()), made
    made |= yt(
        object=(
            "create", "scheduler_pool", "--attributes",
            f"{{name={kind}-a;pool_tree=default;parent_name={top};weight=3;min_share_resources={{cpu=10}}}}",
        ),
        by_path=("create", "scheduler_pool", f"{root}/{kind}-b"),
        under=("create-pool", f"{kind}-c", "default", "--parent-name", top),
        existing=("create-pool", top, "default", "-i"),
    )  # fmt: skip
    assert made["existing"] == made["verb"]

    out = yt(
        children=("list", root),
        long=("list", "-l", root),
        attributes=("list", root, "--attribute", "weight", "--format", "json"),
        id=("get", f"#{made['verb'].strip()}/@name"),
        exists=("exists", f"{root}/{kind}-a/@weight"),
        missing=("exists", f"{root}/{kind}-zzz"),
        found=("find", root, "--type", "scheduler_pool"),
    )
    names = [f"{kind}-a", f"{kind}-b", f"{kind}-c"]
    assert out["children"].split() == names
    assert [line.split()[-1] for line in out["long"].splitlines()] == names
    listed = {each["$value"] if isinstance(each, dict) else each: each for each in json.loads(out["attributes"])}
    assert sorted(listed) == names
    assert listed[f"{kind}-a"]["$attributes"] == {"weight": 3.0}
    assert out["id"] == f'"{top}"\n'
    assert (out["exists"], out["missing"]) == ("true\n", "false\n")
    assert out["found"].split() == [root, *(f"{root}/{name}" for name in names)]

    yt(
        set=("set", f"{root}/{kind}-a/@weight", "5"),
        set_json=("set", "--format", "json", f"{root}/{kind}-b/@resource_limits", '{"cpu": 7}'),
        stdin=("set", f"{root}/{kind}-b/@max_operation_count"),
        attribute=("set-attribute", f"{root}/{kind}-c", "forbid_immediate_operations", "%true"),
        recursive=("set-attribute", "-r", root, "max_running_operation_count", "4"),
        several=("execute", "multiset_attributes", f'{{path="{root}/@"}}'),
        given={"stdin": "30", "several": '{max-operation-count=25;"заметка"="для всех"}'},
    )

    first, second, third, parent = (scheduler.get(f"trees/default/pools/{name}") for name in (*names, top))
    assert (first["weight"], first["max_running_operation_count"]) == (5.0, 4)
    assert first["attributes"]["strong_guarantee_resources"] == {"cpu": 10.0}
    assert (second["attributes"]["resource_limits"], second["max_operation_count"]) == ({"cpu": 7}, 30)
    assert third["attributes"]["forbid_immediate_operations"] is True
    assert (parent["max_operation_count"], parent["attributes"]["заметка"]) == (25, "для всех")
    assert (first["parent"], third["id"]) == (top, made["under"].strip())
    fifo = scheduler.get(f"trees/default/pools/{kind}-fifo")
    assert (fifo["mode"], fifo["attributes"]["fifo_sort_parameters"]) == ("fifo", ["weight", "start_time"])

    yt(
        one=("remove-attribute", f"{root}/{kind}-c", "forbid_immediate_operations"),
        recursive=("remove-attribute", "-r", f"{root}/{kind}-a", "max_running_operation_count"),
        by_remove=("remove", f"{root}/{kind}-b/@resource_limits"),
    )
    yt(move=("move", f"{root}/{kind}-c", f"{root}/{kind}-a/{kind}-renamed"))
    out = yt(
        moved=("get", f"{root}/{kind}-a/{kind}-renamed/@id"),
        gone=("exists", f"{root}/{kind}-c"),
        no_limit=("exists", f"{root}/{kind}-b/@resource_limits"),
        no_count=("exists", f"{root}/{kind}-a/@max_running_operation_count"),
    )
    assert json.loads(out["moved"]) == made["under"].strip()
    assert (out["gone"], out["no_limit"], out["no_count"]) == ("false\n", "false\n", "false\n")
    done = scheduler.yt("remove", root, bindings=bindings)
    assert done.returncode == 1
    assert f"{kind}-a" in done.stderr or "non-empty" in done.stderr
    yt(all=("remove", "-r", root), no_such=("remove", "-f", f"{root}-zzz"))
    assert scheduler.request("GET", f"trees/default/pools/{kind}-renamed").status_code == 404


def test_batches_and_the_small_commands(world, yt, kind):
    scheduler = world.scheduler
    pools = {name: f"{kind}-{name}" for name in ("giver", "taker", "batch")}
    scheduler.create_pool(pools["giver"], strong_guarantee_resources={"cpu": 10.0}, max_operation_count=40)
    scheduler.create_pool(pools["taker"], strong_guarantee_resources={"cpu": 1.0}, max_operation_count=10)
    create = f'{{command=create;parameters={{type=scheduler_pool;attributes={{name="{pools["batch"]}"}}}}}}'
    weight = f'parameters={{path="//sys/pools/{pools["batch"]}/@weight"}}'
    none = '{command=get;parameters={path="//sys/none"}}'
    requests = f"{{requests=[{create};{{command=set;{weight};input=7}};{none};{{command=get;{weight}}}]}}"
    out = yt(
        batch=("execute", "execute_batch", requests),
        verb=(
            "execute-batch", '{command=get;parameters={path="//sys/pools/@default_tree"}}',
            f'{{command=exists;parameters={{path="//sys/pools/{pools["giver"]}"}}}}',
        ),
        transfer=(
            "transfer-pool-resources", pools["giver"], pools["taker"], "default", "--resource-delta",
            "{strong_guarantee_resources={cpu=4};max_operation_count=5}",
        ),
        version=("execute", "get_version", "{}"),
        permission=("check-permission", "root", "write", "//sys/pools"),
        whole=("execute", "get", f'{{path="//sys/pools/{pools["giver"]}/@max_operation_count"}}'),
        default=("get", f"{ORCHID}/default_pool_tree"),
        root=("list", "/"),
        sys=("list", "//sys"),
    )  # fmt: skip
    made, done, refused, read = value_of(out["batch"])["results"]
    assert ID.fullmatch(made["output"]["object_id"])
    assert (done["output"], refused["error"]["code"], read["output"]["value"]) == ({}, 500, 7)
    first, second = value_of(out["verb"])["results"]
    assert "error" in first
    assert second["output"]["value"] is True
    assert value_of(out["version"])["version"]
    assert value_of(out["permission"])["action"] == "allow"
    assert value_of(out["whole"])["value"] in (40, 35)
    assert (out["default"], out["root"].split()) == ('"default"\n', ["sys"])
    assert {"pools", "pool_trees", "scheduler"} <= set(out["sys"].split())
    attributes = [scheduler.get(f"trees/default/pools/{pools[name]}")["attributes"] for name in ("giver", "taker")]
    assert [each["strong_guarantee_resources"]["cpu"] for each in attributes] == [6.0, 5.0]
    assert [each["max_operation_count"] for each in attributes] == [35, 15]


# --- what lives ------------------------------------------------------------------------------------------------------


def test_the_life_of_operations(world, yt, bindings, kind):
    scheduler, node = world.scheduler, world.node
    for name in ("from", "to"):
        scheduler.create_pool(f"{kind}-{name}", max_running_operation_count=20)
    tasks = '{t={job_count=2;command="sleep 1";cpu_limit=2.;memory_limit=1000000}}'
    start = ("vanilla", "--async", "--tasks", tasks, "--spec", f'{{pool={kind}-from;title="для всех {kind}"}}')
    raw = f'{{operation_type=vanilla;spec={{pool={kind}-from;tasks={tasks};alias="*{kind}"}}}}'
    started = yt(a=start, b=start, c=start, d=("execute", "start_operation", raw))
    a, b, c = (started[name].strip() for name in "abc")
    d = value_of(started["d"])["operation_id"]
    assert all(ID.fullmatch(each) for each in (a, b, c, d))
    for operation in (a, b, c, d):
        node.beat_until(lambda operation=operation: len(node.jobs_of(operation)) == 2, "its jobs")
    node.beat()

    parameters = f"{{scheduling_options_per_pool_tree={{default={{weight=5.0;pool={kind}-to}}}}}}"
    out = yt(
        list=("list-operations", "--pool", f"{kind}-from", "--format", "json"),
        title=("list-operations", "--filter", f"для всех {kind}", "--state", "running", "--limit", "2"),
        none=("list-operations", "--user", "nobody", "--type", "vanilla", "--pool-tree", "default"),
        get=("get-operation", a, "--attribute", "state", "--attribute", "id"),
        alias=("get-operation", f"*{kind}", "--attribute", "id"),
        json=("get-operation", a, "--format", "json"),
        jobs=("list-jobs", a, "--format", "json"),
        update=("update-op-parameters", a, parameters),
        suspend=("suspend-op", b),
        complete=("complete-op", c),
        abort=("abort-op", d, "--reason", "не нужна"),
    )
    assert (value_of(out["get"]), value_of(out["alias"])) == ({"state": "running", "id": a}, {"id": d})
    assert json.loads(out["json"])["spec"]["tasks"]["t"]["command"] == "sleep 1"
    jobs = json.loads(out["jobs"])["jobs"]
    assert sorted(job["id"] for job in jobs) == sorted(node.jobs_of(a))
    assert {(job["state"], job["address"], job["task_name"]) for job in jobs} == {("running", node.id, "t")}
    titled = value_of(out["title"])
    assert len(titled["operations"]) <= 2
    assert {each["brief_spec"]["title"] for each in titled["operations"]} <= {f"для всех {kind}"}
    assert json.loads(out["list"])["operations"], "some are still there"
    assert value_of(out["none"])["operations"] == []

    states = {operation: scheduler.get(f"operations/{operation}") for operation in (a, b, c, d)}
    assert [states[each]["state"] for each in (a, b, c, d)] == ["running", "running", "completed", "aborted"]
    assert (states[a]["pools"], states[a]["trees"]["default"]["weight"]) == ({"default": f"{kind}-to"}, 5.0)
    assert (states[b]["suspended"], states[d]["error"]) == (True, "не нужна")

    out = yt(
        parameters=("get-operation", a, "--attribute", "runtime_parameters"),
        suspended=("get-operation", b, "--attribute", "suspended"),
        track=("track-op", c),
        abort_again=("abort-op", d),
        result=("get-operation", d, "--attribute", "result"),
        hard=("suspend-op", a, "--abort-running-jobs"),
    )
    options = value_of(out["parameters"])["runtime_parameters"]["scheduling_options_per_pool_tree"]["default"]
    assert (options["pool"], options["weight"]) == (f"{kind}-to", 5.0)
    assert value_of(out["suspended"]) == {"suspended": True}
    assert "не нужна" in json.dumps(value_of(out["result"]), ensure_ascii=False)
    yt(resume=("resume-op", b))
    node.beat_until(lambda: not node.jobs_of(a), "the jobs of what was suspended hard are stopped")
    assert not scheduler.get(f"operations/{b}")["suspended"]

    tracked = scheduler.yt("track-op", d, bindings=bindings)
    assert tracked.returncode == 1
    assert "aborted" in tracked.stderr
    yt(a=("abort-op", a), b=("abort-op", b))
    node.beat_until(lambda: not node.jobs_of(b), "no jobs are left")


def test_who_tracks_an_operation_is_told_the_last_words_of_its_failed_job(world, bindings, kind):
    scheduler, node, pool = world.scheduler, world.node, f"{kind}-failing"
    scheduler.create_pool(pool)
    tasks = '{t={job_count=1;command="true";cpu_limit=1.;memory_limit=1000000}}'
    with subprocess.Popen(
        scheduler.yt_command("vanilla", "--tasks", tasks, "--spec", f"{{pool={pool};max_failed_job_count=1}}"),
        env=scheduler.yt_environment(bindings), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as client:  # fmt: skip
        try:
            path = f"operations?pool={pool}"
            operation = wait_until(lambda: scheduler.get(path)["operations"], "the operation starts")[0]["id"]
            (job,) = node.beat_until(lambda: node.jobs_of(operation), "its job")
            node.logs[job, "stderr"] = b"no such file: weights.bin\n"
            node.end(job, "failed", reason="exit code 1")
            node.beat_until(lambda: client.poll() is not None, "the end of the client")
            _, said = client.communicate(timeout=30)
        finally:
            client.kill()
    assert client.returncode != 0
    assert "no such file: weights.bin" in said
    assert "Traceback" not in said


# --- refusals --------------------------------------------------------------------------------------------------------


def test_the_last_words_of_a_job_are_read(world, bindings, kind):
    scheduler, node = world.scheduler, world.node
    scheduler.create_pool(f"{kind}-words")
    operation = scheduler.start_operation(f"{kind}-words")
    node.beat_until(lambda: node.jobs_of(operation), "the job")
    (job,) = node.jobs_of(operation)
    written = "oops: не так\n\x1b[0m".encode() + b"\xff\x00"
    node.logs[job, "stderr"] = written

    def read(*words: str) -> subprocess.CompletedProcess[bytes]:
        command, environment = scheduler.yt_command("get-job-stderr", *words), scheduler.yt_environment(bindings)
        return node.beat_until_done(
            lambda: subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
        )

    done = read("--job-id", job, "--operation", operation)
    assert (done.returncode, done.stdout) == (0, written), done.stderr
    node.end(job, "failed")
    node.beat()
    assert read(job, operation).stdout == written
    del node.logs[job, "stderr"]
    done = read(job, operation)
    assert done.returncode == 1
    assert f"node {node.id} has no log of it" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_text_reaches_the_client_the_same_with_and_without_bindings(world):
    need_bindings()
    world.scheduler.create_pool("same", strong_guarantee_resources={"cpu": 1.5}, weight=2.0, note="для всех")
    runs = {
        "get": ("get", "//sys/pools/same/@"),
        "attributes": ("get", "//sys/pools/same", "--attribute", "weight"),
        "list": ("list", "-l", "//sys/pools"),
        "operations": ("list-operations", "--pool", "same"),
        "version": ("execute", "get_version", "{}"),
    }
    first, second = (run_all(world, bindings, **runs) for bindings in (True, False))
    for name in runs.keys() - {"operations"}:
        assert first[name] == second[name], name
    assert value_of(first["operations"]) == value_of(second["operations"]), "which the client writes"
