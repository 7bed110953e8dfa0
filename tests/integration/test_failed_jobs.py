"""Operations whose jobs fail, are interrupted or must not run twice: real jobs, by `yt` (semantics.md 3.6, 3.8)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from closed_loop import WAIT_S, Loop

from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Loop]:
    """Two nodes; each test ends its operations."""
    with Loop(tmp_path_factory.mktemp("loop"), hierarchies, nodes=2, cpu=2.0) as cluster:
        cluster.create_pool("p")
        yield cluster
    assert cluster.leftovers() == []


def start(loop: Loop, command: str, spec: str = "", **task: Any) -> str:
    given = {"command": command, "job_count": 1, "cpu_limit": 0.2, "memory_limit": 16 * 2**20, **task}
    whole = f"{{pool=p;{spec}}}"
    return loop.yt("vanilla", "--async", "--tasks", _yson({"main": given}), "--spec", whole).splitlines()[-1]


def _yson(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + "".join(f"{name}={_yson(each)};" for name, each in value.items()) + "}"
    return f"%{str(value).lower()}" if isinstance(value, bool) else json.dumps(value)


def get(loop: Loop, operation: str, *attributes: str) -> Any:
    words = [word for name in attributes for word in ("--attribute", name)]
    return json.loads(loop.yt("get-operation", operation, *words, "--format", "json"))


def list_jobs(loop: Loop, operation: str, *filters: str) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = json.loads(loop.yt("list-jobs", operation, *filters, "--format", "json"))["jobs"]
    return jobs


def count_jobs(loop: Loop, operation: str) -> dict[str, int]:
    """Without zeros."""
    counts = get(loop, operation, "brief_progress")["brief_progress"]["jobs"]
    return {name: number for name, number in counts.items() if number and name not in ("total", "pending")}


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_failed_job_of_an_operation_that_must_not_run_twice(loop: Loop, tmp_path: Path) -> None:
    """FOJR-1: each command ran once."""
    ran = tmp_path / "ran"
    operation = start(loop, f"echo 1 >> {ran}; exit 3", "fail_on_job_restart=%true;max_failed_job_count=10")
    loop.await_state(operation, "failed")
    error = get(loop, operation, "result")["result"]["error"]
    assert (error["code"], error["attributes"]["reason"]) == (210, "job_failed")
    assert error["inner_errors"][0]["inner_errors"][0]["attributes"] == {"exit_code": 3}
    assert lines(ran) == ["1"]
    [job] = list_jobs(loop, operation)
    assert (job["state"], job["error"]["code"], job["error"]["inner_errors"][0]["code"]) == ("failed", 1205, 10_000)


@pytest.mark.parametrize(("code", "counts"), [(17, {"lost": 1, "running": 1}), (0, {"completed": 1})])
def test_a_job_that_is_interrupted_by_its_own_signal(
    loop: Loop, tmp_path: Path, code: int, counts: dict[str, int]
) -> None:
    """INT-1 and INT-2: SIGINT comes, not SIGTERM, when the node is drained."""
    told = tmp_path / "told"
    command = (
        f"trap 'echo TERM >> {told}; exit 1' TERM; trap 'echo INT >> {told}; exit {code}' INT;"
        f" echo ready $YT_JOB_COOKIE >> {told}; while :; do sleep 0.05; done"
    )
    operation = start(loop, command, "max_failed_job_count=1", interruption_signal="SIGINT", restart_exit_code=17)
    [job] = loop.await_running(operation)
    loop.wait(lambda: lines(told) == ["ready 0"], "it waits for signals", WAIT_S)
    loop.run("node", "drain", job["node_id"])
    try:
        # A replacement that already waits for its end is aborted where that is a completion (semantics.md 7.4).
        ended = {"completed": 1, "aborted": 1}
        loop.wait(
            lambda: (found := count_jobs(loop, operation)) == counts or (not code and found == ended),
            f"its jobs are {counts}",
            WAIT_S,
        )
        again = ["ready 0"] if code else []
        loop.wait(lambda: lines(told) == ["ready 0", "INT", *again], f"what came is {lines(told)}", WAIT_S)
        [stopped] = list_jobs(loop, operation, "--with-interruption-info")
        info = {"interruption_reason": "jobs_disabled_on_node", "interruption_timeout": 10_000}
        assert (stopped["id"], stopped["interruption_info"]) == (job["id"], info)
    finally:
        loop.run("node", "uncordon", job["node_id"])
    if code:
        loop.yt("abort-op", operation)
    loop.await_state(operation, "aborted" if code else "completed")
    loop.await_no_jobs()


def test_a_job_that_ran_out_of_memory_is_started_again_with_more(loop: Loop, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    rule, words = "oom:2,memory_growth=4", ("--pool", "p", "--cpu-limit", "0.2", "--memory", "24M")
    options = (*words, "--set", "max_failed_job_count=1", "--retry", rule)
    command = f"echo $YT_JOB_COOKIE >> {ran}; head -c 50000000 /dev/zero | tail > /dev/null"
    operation = loop.run("operation", "start", *options, "--", "sh", "-c", command).stdout.split()[-1]
    loop.await_state(operation, "completed")
    assert lines(ran) == ["0", "0"]
    [note] = loop.operation(operation)["retried"]
    assert f"out of memory; rule {rule} started it again at once with 0.09 GiB, 1 retry left" in note
    assert note in loop.run("operation", "show", operation).stdout
