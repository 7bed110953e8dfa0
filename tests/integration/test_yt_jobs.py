"""Commands about jobs by the unmodified client, against real agents that run them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from closed_loop import WAIT_S, Loop

from cpumond.api.yt.yson import write_yson
from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = pytest.mark.cgroup


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Loop]:
    """Two nodes, on which many small jobs have room."""
    directory = tmp_path_factory.mktemp("yt_jobs")
    with Loop(directory, hierarchies, nodes=2, cpu=4.0, memory=4 * 2**30) as cluster:
        yield cluster
    assert cluster.leftovers() == []


def ask(loop: Loop, *arguments: str) -> Any:
    return json.loads(loop.yt(*arguments, "--format", "json"))


def tasks(command: str, count: int = 1, **options: Any) -> str:
    task = {"job_count": count, "command": command, "cpu_limit": 0.1, "memory_limit": 2**25, **options}
    return write_yson({"t": task}).decode()


def start(loop: Loop, command: str, count: int = 1, spec: str = "{pool=p}", **options: Any) -> str:
    """The id of an operation that nobody tracks."""
    words = ("vanilla", "--tasks", tasks(command, count, **options), "--spec", spec, "--async")
    return loop.yt(*words)


def use_library(loop: Loop, script: str) -> Any:
    done = loop.try_yt("-c", f"import json, yt.wrapper as yt\n{script}", program=Path(sys.executable))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def await_jobs(loop: Loop, operation: str, count: int) -> list[dict[str, Any]]:
    loop.await_running(operation, count)
    jobs: list[dict[str, Any]] = ask(loop, "list-jobs", operation, "--job-state", "running")["jobs"]
    return jobs


def test_who_tracks_an_operation_sees_its_progress(loop: Loop):
    """JOB-5."""
    done = loop.try_yt("vanilla", "--tasks", tasks("sleep 4"), "--spec", "{pool=p}")
    assert done.returncode == 0, done.stderr
    assert any("running=1" in line and "total=1" in line for line in done.stderr.splitlines()), done.stderr
    assert "completed" in done.stderr.splitlines()[-1]


def test_jobs_are_listed_by_what_they_wrote(loop: Loop):
    """JOB-3."""
    operation = start(loop, "echo x >&2", 2)
    silent = start(loop, "true")
    for each in (operation, silent):
        loop.await_state(each, "completed")
    found = ask(loop, "list-jobs", operation, "--with-stderr")["jobs"]
    assert [job["stderr_size"] for job in found] == [2, 2]
    assert ask(loop, "list-jobs", silent, "--with-stderr")["jobs"] == []


def test_the_library_reads_the_stderr_of_all_jobs(loop: Loop):
    """``Operation.get_stderrs`` and ``get_jobs_with_error_or_stderr``; with ``redirect_stdout_to_stderr`` all of it."""
    operation = start(loop, "echo y; echo x >&2", redirect_stdout_to_stderr=True)
    loop.await_state(operation, "completed")
    found = use_library(loop, f"print(json.dumps(yt.Operation('{operation}').get_stderrs()))")
    assert [each["stderr"] for each in found] == ["y\nx\n"]
    found = use_library(loop, f"print(json.dumps(yt.Operation('{operation}').get_job_statistics()))")
    assert found["time"]["total"]["$"]["completed"]["vanilla"]["count"] == 1


def test_what_is_not_recognised_reaches_its_user(loop: Loop):
    """UNR-1, and what is merely without effect."""
    spec = "{pool=p;nonsense=1;max_stderr_count=3;enable_job_splitting=%false}"
    lines = loop.try_yt("vanilla", "--tasks", tasks("true"), "--spec", spec).stderr.splitlines()
    (first,) = [line for line in lines if "Unrecognized spec" in line]
    (last,) = [line for line in lines if "Alerts" in line]
    for line in (first, last):
        assert ("nonsense" in line, "max_stderr_count" in line, "splitting" in line) == (True, True, False)
    told = loop.run("operation", "show", start(loop, "true", spec=spec)).stderr.splitlines()
    assert [line for line in told if "nonsense" in line] == ['warning: spec option "nonsense" is not recognized']
    done = loop.run("operation", "start", "--pool", "p", "--set", "nonsense=1", "--", "true")
    assert 'spec option "nonsense" is not recognized' in done.stderr


def test_what_would_change_the_result_is_refused(loop: Loop):
    """All of it is in ``tests/unit/scheduler/settings/test_spec_options.py``."""
    given = tasks("true", layer_paths=["//tmp/layer"])
    done = loop.try_yt("vanilla", "--tasks", given, "--spec", "{pool=p}", "--async")
    assert done.returncode != 0
    assert "spec/tasks/t/layer_paths: " in done.stderr
    assert "install what it needs on the nodes" in done.stderr


def count_jobs(loop: Loop, operation: str) -> Any:
    return ask(loop, "get-operation", operation, "--attribute", "progress")["progress"]["jobs"]


def test_an_aborted_job_is_started_again(loop: Loop, tmp_path: Path):
    """JOB-1: as the same part of the work."""
    gate = tmp_path / "gate"
    operation = start(loop, f"until [ -e {gate} ]; do sleep 0.1; done", 2)
    [first, other] = await_jobs(loop, operation, 2)
    loop.yt("abort-job", first["id"])
    again = loop.try_yt("abort-job", first["id"])
    assert again.returncode != 0
    assert "No such job" in again.stderr
    loop.wait(lambda: count_jobs(loop, operation)["aborted"]["total"] == 1, "it has ended", WAIT_S)
    assert count_jobs(loop, operation)["aborted"]["scheduled"] == {"user_request": 1}
    jobs = await_jobs(loop, operation, 2)
    [new] = [job for job in jobs if job["id"] != other["id"]]
    assert (new["id"] != first["id"], new["job_cookie"]) == (True, first["job_cookie"])
    gate.touch()
    loop.await_state(operation, "completed")
    [kept] = ask(loop, "list-jobs", operation, "--job-state", "aborted")["jobs"]
    assert kept["id"] == first["id"]


def test_a_running_operation_gets_more_and_fewer_jobs(loop: Loop, tmp_path: Path):
    """JOB-4."""
    gate = tmp_path / "gate"
    waits = f"until [ -e {gate} ]; do sleep 0.1; done"
    more, fewer = start(loop, waits, 2), start(loop, waits, 2)
    for operation, count in ((more, 4), (fewer, 1)):
        await_jobs(loop, operation, 2)
        loop.yt("patch-op-spec", operation, f'[{{path="/tasks/t/job_count";value={count}}}]')
        await_jobs(loop, operation, count)
    [left] = ask(loop, "list-jobs", fewer, "--job-state", "running")["jobs"]
    assert left["job_cookie"] == 0
    refused = loop.try_yt("patch-op-spec", more, '[{path="/tasks/t/job_count";value=0}]')
    assert (refused.returncode != 0, "expected a whole number" in refused.stderr) == (True, True), refused.stderr
    gate.touch()
    for operation, completed, aborted in ((more, 4, {}), (fewer, 1, {"job_count_changed_by_user_request": 1})):
        loop.await_state(operation, "completed")
        counts = count_jobs(loop, operation)
        assert (counts["completed"], counts["aborted"]["scheduled"]) == (completed, aborted)
    shown = ask(loop, "get-operation", more, "--attribute", "cumulative_spec_patch")
    assert shown["cumulative_spec_patch"] == {"tasks": {"t": {"job_count": 4}}}
