"""``cpumond tree``, ``pool``, ``operation`` and ``node`` against a real scheduler, as a user types them."""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from test_every_command import on_terminal
from test_json_api import LiveScheduler, make_node, run_one
from waiting import wait_until


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveScheduler]:
    monkeypatch.setenv("HOME", str(tmp_path))
    with LiveScheduler(tmp_path) as server:
        monkeypatch.setenv("CPUMOND_SCHEDULER", server.url)
        yield server


class Shell:
    err = ""

    def __call__(self, *words: str, code: int = 0) -> str:
        done = run_command(list(words))
        self.err = done.stderr
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def cpumond() -> Shell:
    return Shell()


# --- trees and pools


def test_pools_are_made_shown_changed_and_removed(server, cpumond):
    assert cpumond("pool", "create", "research", "weight=2", "strong_guarantee_resources={cpu=4}") == (
        "pool research is created\n"
    )
    cpumond("pool", "create", "nightly", "--parent", "research")
    listed = cpumond("pool", "list").splitlines()
    assert [line.split()[0] for line in listed] == ["pool", "<Root>", "research", "nightly"]
    assert listed[3].startswith("    nightly")
    cpumond(
        "pool", "set", "nightly", "weight=0.5", "resource_limits.cpu=3", "mode=fifo", 'fifo_sort_parameters=["weight"]'
    )
    assert cpumond.json("pool", "show", "nightly")["attributes"] == {
        "weight": 0.5,
        "resource_limits": {"cpu": 3.0},
        "mode": "fifo",
        "fifo_sort_parameters": ["weight"],
    }
    cpumond("pool", "set", "nightly", "weight=", "--unset", "resource_limits/cpu")
    assert "weight" not in cpumond.json("pool", "show", "nightly")["attributes"]
    shown = cpumond("pool", "show", "nightly")
    assert "parent:" in shown
    assert "fifo" in shown
    cpumond("pool", "move", "nightly", "--parent", "<Root>", "--name", "daily")
    assert cpumond.json("pool", "show", "daily")["parent"] == "<Root>"
    cpumond("pool", "remove", "research", code=64)  # it has a guarantee, and nobody can be asked
    cpumond("pool", "remove", "research", "--yes")
    assert [pool["name"] for pool in cpumond.json("pool", "list")["pools"]] == ["<Root>", "daily"]


def pool_names(cpumond: Shell) -> set[str]:
    return {pool["name"] for pool in cpumond.json("pool", "list")["pools"]} - {"<Root>"}


def test_what_has_guarantees_or_operations_is_not_removed_unasked(server, cpumond):
    cpumond("pool", "create", "strong", "strong_guarantee_resources={cpu=4}")
    cpumond("pool", "create", "flowing", "guarantee_type=relaxed", "resource_flow={cpu=4}")
    cpumond("pool", "create", "top")
    cpumond("pool", "create", "busy", "--parent", "top")
    cpumond("operation", "start", "--pool", "busy", "--", "sleep", "60")
    cpumond("pool", "create", "plain", "weight=3", "strong_guarantee_resources={cpu=0}")
    before = pool_names(cpumond)
    for words, held in (
        (("pool", "remove", "strong"), "guarantees"),
        (("pool", "remove", "flowing"), "guarantees"),
        (("pool", "remove", "top", "--recursive"), "1 operation"),
        (("tree", "remove", "default", "--recursive"), "1 operation"),
    ):
        assert cpumond(*words, code=64) == cpumond(*words, "--json", code=64) == ""
        assert f"has {held}; nothing is removed: give --yes" in cpumond.err
        assert pool_names(cpumond) == before
    cpumond("pool", "remove", "top", "--recursive", "--yes")
    assert cpumond.json("pool", "show", "busy")["is_ephemeral"]
    cpumond("pool", "remove", "plain")  # as ever
    for typed, code in (("", 130), ("y", 0)):
        shown, found = on_terminal(["pool", "remove", "strong"], 80, dict(os.environ), typed=f"{typed}\n")
        assert (found, "strong" in pool_names(cpumond)) == (code, bool(code))
        assert "pool strong: removed" in shown
        assert "pool strong has guarantees. Remove it? [y/N]:" in shown
        assert ("nothing is removed" in shown) == bool(code)


def test_warnings_go_to_standard_error_and_the_change_is_made(server, cpumond):
    cpumond("pool", "create", "research", "team=x", "wieght=2", "--force")
    assert cpumond.err.startswith("warning: ")
    assert 'did you mean "weight"' in cpumond.err
    cpumond("pool", "set", "research", "max-share-ratio=0.5", 'site={name="y"}', "team=", "--force")
    attributes = cpumond.json("pool", "show", "research")["attributes"]
    assert attributes == {"wieght": 2, "site": {"name": "y"}, "max_share_ratio": 0.5}
    operation = cpumond("operation", "start", "--pool", "reserch", "--", "true").strip()
    assert 'warning: pool "reserch" did not exist' in cpumond.err
    assert 'did you mean "research"?' in cpumond.err
    assert cpumond.json("operation", "show", operation)["pools"] == {"default": "reserch"}


def test_trees_are_made_and_one_becomes_the_default(server, cpumond):
    cpumond("tree", "set", "default", "nodes_filter=!gpu")
    cpumond("tree", "create", "gpu", "nodes_filter=gpu")
    cpumond("tree", "set", "gpu", "--default", "fair_share_starvation_timeout=10000")
    listed = cpumond("tree", "list")
    assert "gpu (default)" in listed
    assert "nodes_filter" in cpumond("tree", "show", "gpu")
    assert "at most 8 running, 50 in all, also of all that its sub-pools have" in cpumond("tree", "show", "gpu")
    of_new_store = cpumond("tree", "show", "default")
    assert "at most 8 running, 50 in all, unless it has sub-pools (per_pool_counts_for_leaves_only)" in of_new_store
    cpumond("pool", "create", "a")
    assert cpumond.json("pool", "show", "a")["tree"] == "gpu"
    cpumond("tree", "remove", "default")
    assert [tree["name"] for tree in cpumond.json("tree", "list")["trees"]] == ["gpu"]


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveScheduler]:
    """A scheduler with a pool, for what changes nothing."""
    with LiveScheduler(tmp_path_factory.mktemp("refusing")) as server:
        server.post("/trees/default/pools", {"name": "a"}, 201)
        yield server


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("operation", "start", "--working-directory", "data", "--", "a"), 78, "expected an absolute path"),
        (("operation", "start", "--env", "=1", "--", "a"), 64, "expected NAME=VALUE"),
        (("operation", "start", "--set", "tasks/other/job_count=1", "--", "true"), 64, "--set tasks"),
        (("pool", "set", "none", "weight=1"), 67, 'Pool "none" does not exist'),
        (("pool", "set", "a", "weight=-1"), 78, "weight: must be a number in"),
        (("pool", "set", "a"), 64, "nothing to change"),
        (("pool", "set", "a", "wieght=3"), 64, '"wieght" is no option of a pool; did you mean "weight"? --force'),
        (("pool", "create", "a"), 73, "already exists"),
        (("pool", "list", "--tree", "none"), 67, "does not exist"),
        (("pool", "move", "a"), 64, "--parent"),
        (("pool", "plan", "a", "--remove", "weight=1"), 64, "nothing else"),
        (("operation", "abort", "1-2-3-4"), 67, "No such operation"),
        (("operation", "start", "--memory", f"{'9' * 400}P", "--", "true"), 64, "expected bytes"),
        (("operation", "wait", ""), 64, "expected the name of an operation, got an empty one"),
        (("pool", "plan", "a", "weight=2", "--recursive"), 64, "--recursive goes with --remove"),
        (("pool", "plan", "a", "weight=2", "--simulate", "--all"), 64, "--all has no effect"),
        (("fleet", "--loopback"), 64, "--loopback goes with --prometheus-sd"),
        (("fleet", "--prometheus-sd", "--tag", "a"), 64, "leave --tag and --problems out"),
        (("top", "--cluster", "--once", "--tree", "none"), 67, "there is no tree none; known trees: default"),
        (("operation", "start", "--job-cpu-monitor", "[1]", "--", "true"), 64, "a map in YSON or JSON"),
        (("node", "tag", "none"), 64, "nothing to change; give tags, or --remove TAG"),
        (("node", "tag", "none", "ssd"), 67, "not registered"),
        (("tree", "list", "--scheduler", "ftp://x"), 64, "expected an address"),
        (("tree", "list", "--token", "two words"), 78, "one word"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(refusing, cpumond, tmp_path, monkeypatch, words, code, sentence):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CPUMOND_SCHEDULER", refusing.url)
    cpumond(*words, code=code)
    assert sentence in cpumond.err
    assert cpumond.err.startswith("cpumond: ")
    assert cpumond.err.count("\n") == 1


def test_without_a_scheduler_the_sentence_says_what_to_do(tmp_path, cpumond, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cpumond("pool", "list", "--scheduler", "127.0.0.1:1", code=69)
    assert "no scheduler answers on http://127.0.0.1:1 (Connection refused)" in cpumond.err
    assert "CPUMOND_SCHEDULER" in cpumond.err


def test_a_token_comes_from_the_option_the_environment_or_a_file(tmp_path, cpumond, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with LiveScheduler(tmp_path, token="s3cret") as server:  # noqa: S106
        monkeypatch.setenv("CPUMOND_SCHEDULER", server.url)
        cpumond("tree", "list", code=77)
        assert "--token" in cpumond.err
        cpumond("tree", "list", "--token", "s3cret")
        file = tmp_path / "my-token"
        file.write_text("s3cret\n")
        file.chmod(0o644)
        cpumond("tree", "list", "--token-file", str(file), code=78)
        assert f"chmod 600 {file}" in cpumond.err
        file.chmod(0o600)
        cpumond("tree", "list", "--token-file", str(file))
        usual = tmp_path / ".config/cpumond/token"
        usual.parent.mkdir(parents=True)
        usual.write_text("s3cret\n")
        usual.chmod(0o600)
        cpumond("tree", "list")
        monkeypatch.setenv("CPUMOND_TOKEN", "wrong")
        cpumond("tree", "list", code=77)


def test_a_plan_shows_what_changes_for_whom_and_changes_nothing(server, cpumond):
    make_node(server, "n1", cpu=6.0).register()
    for name in ("a", "b", "idle"):
        cpumond("pool", "create", name)
    for name in ("a", "b"):
        server.start(name, job_count=10, title=f"work of {name}")
    lines = cpumond("pool", "plan", "a", "weight=2").splitlines()
    assert lines[0] == "pool a: weight: not set -> 2"
    rows = {tuple(line.split()[:2]): line for line in lines}
    assert "3 -> 4" in rows["pool", "a"]
    assert "3 -> 2" in rows["pool", "b"]
    assert ("pool", "idle") not in rows
    assert "work of b" in "\n".join(lines)
    assert "weight" not in cpumond.json("pool", "show", "a")["attributes"]
    assert "idle" in cpumond("pool", "plan", "a", "weight=2", "--all")


def test_plans_of_making_moving_and_removing(server, cpumond):
    cpumond("pool", "create", "a")
    cpumond("pool", "create", "b")
    assert "pool c: made" in cpumond("pool", "plan", "c", "--create", "weight=2")
    assert "parent_name: <Root> -> a" in cpumond("pool", "plan", "b", "--parent", "a")
    assert "gone" in cpumond("pool", "plan", "b", "--remove")
    cpumond("pool", "set", "a", "mode=fifo")
    cpumond("pool", "plan", "c", "--create", "--parent", "a", code=78)
    assert "would be refused" in cpumond.err
    cpumond("pool", "plan", "a", "--create", code=73)


# --- operations and nodes


def test_an_operation_from_start_to_end(server, cpumond):
    node = make_node(server, "n1", cpu=4.0, tags=("fast",))
    node.register()
    server.wait_for_update()
    start = ("operation", "start", "--pool", "p", "--job-count", "2", "--cpu-limit", "1.5", "--memory", "1G")
    operation_id = cpumond(*start, "--title", "training", "--", "python", "train.py").strip()
    wait_until(lambda: node.beat() and len(node.jobs) == 2, "both jobs")
    node.beat()
    server.wait_for_update()
    row = next(line for line in cpumond("operation", "list").splitlines() if operation_id in line)
    assert row.split()[1] == "running"
    assert "training" in row
    shown = cpumond("operation", "show", operation_id)
    assert "2 jobs of 1.5 cpu, 1 GiB memory (0.5 GiB memory reserved): python train.py" in shown
    assert "pending_job_count:" in cpumond("operation", "show", operation_id, "--all")
    assert "fair_share_ratio:" in cpumond("pool", "show", "p", "--all")
    jobs = cpumond("operation", "jobs", operation_id)
    assert jobs.count("running") == 2
    told = cpumond("operation", "why", operation_id)
    assert "its fair share is 3 cores; 3 cores allocated to its 2 jobs; it demands 3 cores" in told
    assert "all of its jobs are started" in told
    listed = cpumond("node", "list", "--tag", "fast")
    assert listed.splitlines()[1].split()[:5] == ["n1", "default", "online", "4", "3"]
    assert operation_id in cpumond("node", "show", "n1")
    for job_id in list(node.jobs):
        node.end(job_id)
    node.beat()
    assert "completed" in cpumond("operation", "list", "--state", "completed")
    assert "2 of 2 jobs completed" in cpumond("operation", "why", operation_id)


def test_a_list_says_in_each_form_how_much_of_it_is_left_out(server, cpumond, monkeypatch):
    monkeypatch.setattr("cpumond.cli.scheduler.http_client.MAX_PAGE", 2)
    start = ("operation", "start", "--pool", "p", "--title", "a\r=1+1", "--", "true")
    started = [cpumond(*start).strip() for _ in range(5)]
    for words in ((), ("--json",), ("-o", "csv")):
        text = cpumond("operation", "list", "--limit", "3", *words)
        assert [each in text for each in started] == [False, False, True, True, True]
        assert "2 older operations are not shown; --all shows them" in cpumond.err
    rows = list(csv.DictReader(io.StringIO(cpumond("operation", "list", "--all", "-o", "csv"), newline="")))
    assert [row["id"] for row in rows] == started[::-1]
    assert {row["title"] for row in rows} == {"a\r'=1+1"}
    assert cpumond.err == ""


def test_an_operation_is_steered(server, cpumond):
    operation_id = cpumond("operation", "start", "--pool", "p", "--", "true").strip()
    cpumond("operation", "set", operation_id, "weight=3", "resource_limits={cpu=2}")
    cpumond("operation", "suspend", operation_id)
    shown = cpumond.json("operation", "show", operation_id)
    assert (shown["suspended"], shown["trees"]["default"]["weight"]) == (True, 3.0)
    assert "suspended" in cpumond("operation", "why", operation_id)
    cpumond("operation", "resume", operation_id)
    cpumond("operation", "abort", operation_id, "--message", "wrong input")
    assert "wrong input" in cpumond("operation", "why", operation_id)
    other = cpumond("operation", "start", "--pool", "p", "--", "true").strip()
    cpumond("operation", "complete", other)
    assert cpumond.json("operation", "show", other)["state"] == "completed"


def test_jobs_are_aborted_and_abandoned_and_a_specification_is_patched(server, cpumond):
    node = make_node(server, "n1")
    node.register()
    operation_id = cpumond("operation", "start", "--pool", "p", "--job-count", "2", "--", "true").strip()
    wait_until(lambda: node.beat() and len(node.jobs) == 2, "two jobs")
    first, second = node.jobs
    cpumond("operation", "abort-job", operation_id, first, "--interrupt-timeout", "1s", code=78)
    assert f"Job {first} cannot be interrupted" in cpumond.err
    cpumond("operation", "abort-job", operation_id, first)
    cpumond("operation", "abandon-job", operation_id, second)
    wait_until(lambda: node.beat() and node.jobs.keys().isdisjoint((first, second)), "their ends")
    node.beat()
    jobs = cpumond.json("operation", "show", operation_id)["jobs"]
    assert (jobs["total"], jobs["completed"], jobs["aborted"]) == (2, 1, 1)
    cpumond("operation", "patch", operation_id, "/max_failed_job_count=3", "tasks/main/job_count=5")
    assert cpumond.json("operation", "show", operation_id)["jobs"]["total"] == 5
    cpumond("operation", "patch", operation_id, "max_failed_job_count=2", "title=x", code=78)
    assert "only /max_failed_job_count and /tasks/NAME/job_count may change" in cpumond.err
    texts = [each["text"] for each in server.get("/events", kind="command", operation=operation_id)["events"]]
    assert any(text.endswith("/max_failed_job_count = 3, /tasks/main/job_count = 5") for text in texts)


def test_the_spec_carries_what_the_options_say(server, cpumond):
    monitor = '{"mode": "shadow"}'
    words = ("--gang", "--weight", "2", "--job-cpu-monitor", monitor, "--set", "max_failed_job_count=3")
    words = (*words, "--min-run-time", "2m", "--checkpoints", "--time-limit", "2h", "--job-time-limit", "90")
    operation_id = cpumond("operation", "start", "--pool", "p", *words, "--", "a", "--b").strip()
    shown = cpumond.json("operation", "show", operation_id)
    assert (shown["is_gang"], shown["max_failed_job_count"]) == (True, 3)
    assert shown["job_cpu_monitor"] == {"mode": "shadow"}
    assert shown["tasks"][0]["command"] == ["a", "--b"]
    assert shown["tasks"][0]["checkpoints"] is True
    assert shown["spec"]["min_run_time"] == 120_000.0
    assert (shown["time_limit"], shown["tasks"][0]["job_time_limit"]) == (7_200_000.0, 90_000.0)
    assert "time limit: 2 h" in " ".join(cpumond("operation", "show", operation_id).split())
    cpumond("operation", "abort", operation_id)
    node = make_node(server, "n1")
    node.register()
    words = ("--env", "A=1", "--env", "B=x=y", "--working-directory", "/srv/data", "--interruptible")
    operation_id = cpumond("operation", "start", "--pool", "p", *words, "--", "a").strip()
    assert "in /srv/data: a" in cpumond("operation", "show", operation_id)
    (order,) = wait_until(lambda: node.beat()["start"], "the order")
    assert order["environment"] == {"A": "1", "B": "x=y"}
    assert (order["working_directory"], order["interruptible"]) == ("/srv/data", True)


def test_the_end_of_a_log_is_printed_as_it_is(server, cpumond):
    node = make_node(server, "n1")
    node.register()
    operation_id = cpumond("operation", "start", "--pool", "p", "--", "true").strip()
    cpumond("operation", "log", operation_id, code=75)
    assert "has no job that has started" in cpumond.err
    wait_until(lambda: node.beat() and node.jobs, "the job")
    node.beat()
    (job,) = node.jobs
    node.logs[job, "stdout"] = b"first\nlast\x1b[2J"
    node.logs[job, "stderr"] = b"oops\n"

    def log(*words: str, code: int = 0) -> str:
        return node.beat_until_done(lambda: cpumond("operation", "log", operation_id, *words, code=code))

    assert log() == "first\nlast\x1b[2J"
    assert cpumond.err == ""
    assert log(job, "--stderr") == "oops\n"
    assert log("--tail", "2") == "2J"
    assert "12 bytes before these are not shown; raise --tail" in cpumond.err
    log("1-2-3-4", code=67)
    assert "No such job 1-2-3-4" in cpumond.err
    cpumond("operation", "log", operation_id, "--tail", "2M", code=64)
    assert "--tail: expected 1 to 1048576 bytes" in cpumond.err


def test_jobs_and_pools_say_what_was_used(server, cpumond):
    node, operation_id, job = run_one(server)
    node.jobs[job] |= {"cgroup": "/jobs/1", "cpu_seconds": 12.5, "reclaimed_cpu_seconds": 3.0}
    node.beat()
    (shown,) = cpumond.json("operation", "jobs", operation_id)["jobs"]
    assert {name: shown[name] for name in ("node", "cgroup", "cpu_seconds", "state")} == {
        "node": "n1", "cgroup": "/jobs/1", "cpu_seconds": 12.5, "state": "running",
    }  # fmt: skip
    assert "12.5 core-seconds used, 3 reclaimed" in cpumond("operation", "show", operation_id)
    assert "12.5 core-seconds used, 3 reclaimed, since the start" in cpumond("pool", "show", "p")


def test_the_fleet_is_filtered_in_every_form(server, cpumond):
    for name, tags in (("n1", ["rack-a"]), ("n2", [])):
        make_node(server, name, tags=tags).register()
    assert [line.split()[0] for line in cpumond("fleet", "--tag", "rack-a").splitlines()] == ["node", "n1"]
    assert [each["id"] for each in cpumond.json("fleet", "--tag", "rack-a")["agents"]] == ["n1"]
    assert cpumond("fleet", "--tag", "rack-a", "-o", "csv").count("\n") == 2
    assert cpumond.json("fleet", "--problems")["agents"] == []
