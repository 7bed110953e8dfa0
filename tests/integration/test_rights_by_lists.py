"""Access lists with tokens (semantics.md 12): answers that depend on who asks, of two teams with a pool each."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scheduler_process import GIB, PlayedNode, SchedulerProcess
from test_scheduler_commands import Shell, cpumond

__all__ = ["cpumond"]

USERS = {"root": "admin", "ann": "user", "ben": "user", "kim": "user", "n1": "node:n1"}
"""User -> role. The tokens are the names: ann is of team red, ben of team blue, kim of none."""
SECRET = "s3cret-of-red"  # noqa: S105
ALL = ["use", "write", "modify_children", "manage", "read_secrets"]


def _edit(path: str, value: Any) -> dict[str, Any]:
    return {"edits": [{"path": [path], "value": value}]}


TASKS = {"t": {"job_count": 1, "command": "true"}}


class Site:
    """A scheduler with both teams, and a running operation of red's."""

    def __init__(self, directory: Path) -> None:
        self.scheduler = SchedulerProcess(directory)
        self.operation = ""
        groups = '[groups]\nteam-red = ["ann"]\nteam-blue = ["ben"]\n'
        self.scheduler.write_config(groups, api=self.scheduler.write_tokens(USERS))
        self.scheduler.start()

    def prepare(self) -> None:
        for team in ("red", "blue"):
            acl = [{"action": "allow", "subjects": [f"team-{team}"], "permissions": ALL}]
            pool = {"acl": acl, "strong_guarantee_resources": {"cpu": 5}, "allow_children_guarantees": True}
            self.must("root", "POST", "trees/default/pools", {"name": team, "attributes": pool})
            self.must("root", "POST", "trees/default/pools", {"name": f"{team}-a", "parent": team})
        task = {
            "job_count": 1, "cpu_limit": 1.0, "memory_limit": GIB, "command": "true", "environment": {"KEY": SECRET},
        }  # fmt: skip
        spec = {"pool": "red-a", "alias": "*red-alias", "tasks": {"t": task}}
        self.operation = str(self.must("ann", "POST", "operations", {"spec": spec})["id"])
        self.scheduler.use_token("n1")
        self.node = PlayedNode(self.scheduler, "n1")
        self.node.register()
        self.run_job(self.operation)

    def run_job(self, operation: str) -> list[str]:
        self.scheduler.use_token("n1")
        self.node.beat_until(lambda: self.node.jobs_of(operation), "the job is started")
        self.node.beat()
        return list(self.node.jobs_of(operation))

    def ask(self, user: str, method: str, path: str, body: Any = None) -> httpx2.Response:
        place = path if path.startswith("/") else f"/api/v1/{path}"
        return self.scheduler.client.request(method, place, json=body, headers={"authorization": f"Bearer {user}"})

    def must(self, user: str, method: str, path: str, body: Any = None) -> Any:
        answer = self.ask(user, method, path, body)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        return answer.json()

    def close(self) -> None:
        self.scheduler.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with contextlib.closing(Site(tmp_path_factory.mktemp("teams"))) as made:
        made.prepare()
        yield made


def test_what_is_shown_to_others_has_no_secrets(site: Site) -> None:
    paths = (
        f"operations/{site.operation}", f"operations/{site.operation}/orchid", f"operations/{site.operation}/jobs",
        "operations", "overview", "events", f"/api/v4/get_operation?operation_id={site.operation}",
        "/api/v4/list_operations", "/api/v4/get?path=//sys/scheduler/orchid",
        f"/api/v4/get?path=//sys/scheduler/orchid/scheduler/operations/{site.operation}",
    )  # fmt: skip
    for path in paths:
        for user, may in (("ben", False), ("ann", True)):
            answer = site.ask(user, "GET", path)
            assert answer.status_code == 200, f"{path}: {answer.text}"
            assert may or SECRET not in answer.text, path
    path = f"operations/{site.operation}"
    for user, is_shown in (("ann", True), ("ben", False), ("kim", False), ("root", True)):
        shown = site.must(user, "GET", path)
        assert (SECRET in json.dumps(shown)) is (shown["may"]["read_secrets"] == "") is is_shown, user
        assert shown["spec"]["tasks"]["t"].get("environment_hidden", False) is not is_shown
    assert SECRET in site.ask("ann", "GET", f"{path}/specification").text
    assert SECRET not in site.scheduler.log()


def test_who_is_allowed_a_command_and_why_is_in_the_log(site: Site) -> None:
    found, *_ = [each for each in site.scheduler.events("command") if each["command"] == "StartOperation"]
    because = 'the access list of pool "red" allows use to group team-red, inherited by pool "red-a"'
    assert (found["user"], found["allowed_by"]) == ("ann", because)


def test_an_operation_that_may_not_be_read_is_not_there(site: Site) -> None:
    acl = [
        {"action": "allow", "subjects": ["ann"], "permissions": ALL},
        {"action": "deny", "subjects": ["kim"], "permissions": ["read"]},
    ]
    site.must("root", "POST", "trees/default/pools", {"name": "private", "attributes": {"acl": acl}})
    made = site.must("ann", "POST", "operations", {"spec": {"pool": "private", "tasks": TASKS}})["id"]
    (job,) = site.run_job(made)
    operation = f"operations/{made}"
    for path in (
        operation, f"{operation}/why", f"{operation}/orchid", f"{operation}/jobs", f"{operation}/jobs/{job}",
        f"{operation}/jobs/{job}/explain", f"history?kind=operation&name={made}", f"history?kind=job&name={job}",
    ):  # fmt: skip
        refused = site.ask("kim", "GET", path)
        assert refused.status_code == 403, f"{path}: {refused.text}"
        assert "denies read" in refused.json()["error"]
    for user, is_shown in (("kim", False), ("ben", True)):
        assert (made in site.ask(user, "GET", "operations?limit=1000").text) is is_shown
        assert (job in site.ask(user, "GET", "nodes/n1").text) is is_shown
    site.must("ann", "POST", f"{operation}/abort")


def test_can_answers_by_exit_code_in_a_sentence_and_in_json(
    site: Site, cpumond: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUMOND_SCHEDULER", site.scheduler.url)
    monkeypatch.setenv("CPUMOND_TOKEN", "root")
    why = 'yes: the access list of pool "red" allows use to group team-red\n'
    assert cpumond("can", "ann", "start", "red", "--why") == why
    asked = ("can", "x", "use", "//sys/pool_trees/default/red", "--group", "team-red", "--group", "y")
    assert cpumond(*asked) == "yes\n"
    cpumond("can", "ann", "use", "nothing", code=67)
    assert 'there is no pool "nothing"' in cpumond.err
    monkeypatch.setenv("CPUMOND_TOKEN", "ben")
    assert cpumond("can", "ben", "use", "red", code=1) == "no\n"
    cpumond("can", "ann", "use", "red", code=77)
    assert "ben may not ask what ann may do to pool" in cpumond.err
    told = json.loads(cpumond("can", "ben", "log", site.operation, "--json", code=1))
    assert told == {"allowed": False, "because": 'no access list allows read_secrets to ben, and pool "red" has one'}


def test_12_4_a_new_store_is_closed_and_one_line_opens_it(scheduler: SchedulerProcess) -> None:
    scheduler.write_config(api=scheduler.write_tokens(USERS))
    scheduler.start()
    scheduler.use_token("ann")
    opened = _edit("acl_required", False)
    for method, path, body in (
        ("POST", "trees/default/pools", {"name": "p"}),
        ("POST", "operations", {"spec": {"tasks": TASKS}}),
        ("PATCH", "trees/default", opened),
        ("POST", "trees", {"name": "t"}),
        ("PUT", "default_tree", {"tree": None}),
    ):
        answer = scheduler.request(method, path, body)
        assert answer.status_code == 403
        assert answer.json()["error"].startswith("ann may not ")
    scheduler.use_token("root")
    scheduler.patch("trees/default", opened)
    scheduler.use_token("ann")
    scheduler.create_pool("p")
    scheduler.stop()
    scheduler.start()
    scheduler.use_token("ben")
    scheduler.start_operation("p")
