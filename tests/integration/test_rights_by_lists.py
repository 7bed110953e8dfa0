"""Access lists on a real scheduler with tokens: by the JSON interface, the command line and the ``yt`` client
(semantics.md 12)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx2
import pytest
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment

SECRET = "hunter2-swordfish"  # noqa: S105 - of a made-up job
USERS = {"root": "admin", "ann": "user", "bob": "user", "kim": "user", "n1": "node"}


def entry(subjects: list[str], permissions: list[str], **more: str) -> dict[str, Any]:
    return {"action": "allow", "subjects": subjects, "permissions": permissions, **more}


class Teams:
    """Pool ``red`` is ann's and ``blue`` is bob's; kim is in neither. Each token is its user's name."""

    def __init__(self, scheduler: SchedulerProcess) -> None:
        self.scheduler = scheduler
        scheduler.write_config(api=scheduler.write_tokens(USERS))
        scheduler.start()

    def set_up(self) -> None:
        """Two pools with their teams, and an operation of ann's with a secret."""
        self.as_user("root")
        for name, user in (("red", "ann"), ("blue", "bob")):
            acl = [entry([user], ["use", "modify_children", "write", "manage", "read_secrets"])]
            self.scheduler.create_pool(name, acl=acl, strong_guarantee_resources={"cpu": 4})
        self.as_user("ann")
        task = {"job_count": 1, "command": "true", "environment": {"KEY": SECRET}}
        spec = {"pool": "red", "tasks": {"t": task}, "secure_vault": {"TOKEN": SECRET}}
        self.operation = self.scheduler.post("operations", {"spec": spec})["id"]

    def as_user(self, name: str) -> SchedulerProcess:
        self.scheduler.use_token(name)
        return self.scheduler

    def refused(self, user: str, method: str, path: str, body: Any = None) -> str:
        """The sentence of a refusal for rights."""
        answer = self.as_user(user).request(method, path, body)
        assert answer.status_code == 403, f"{method} {path}: {answer.status_code} {answer.text}"
        assert answer.json()["code"] == 901
        return str(answer.json()["error"])

    def can(self, *arguments: str, asker: str = "root") -> subprocess.CompletedProcess[str]:
        """``cpumond can``."""
        token = self.scheduler.directory / "token"
        token.touch(mode=0o600)
        token.write_text(asker)
        command = [sys.executable, "-m", "cpumond", "can", *arguments, "--scheduler", self.scheduler.url]
        return subprocess.run(
            [*command, "--token-file", str(token)], env=clean_environment(), capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def teams(scheduler: SchedulerProcess) -> Teams:
    found = Teams(scheduler)
    found.set_up()
    return found


def test_12_4_a_new_store_is_closed_and_one_line_opens_it(scheduler: SchedulerProcess) -> None:
    teams = Teams(scheduler)
    for method, path, body in (
        ("POST", "trees/default/pools", {"name": "p"}),
        ("POST", "operations", {"spec": {"tasks": {"t": {"job_count": 1}}}}),
        ("PATCH", "trees/default", {"edits": [{"path": ["acl_required"], "value": False}]}),
        ("POST", "trees", {"name": "t"}),
        ("PUT", "default_tree", {"tree": None}),
    ):
        assert teams.refused("ann", method, path, body).startswith("ann may not ")
    teams.as_user("root").patch("trees/default", {"edits": [{"path": ["acl_required"], "value": False}]})
    teams.as_user("ann").create_pool("p")
    scheduler.start_operation("p")
    scheduler.stop()
    scheduler.start()
    teams.as_user("bob").start_operation("p")


def test_one_team_does_nothing_to_another(teams: Teams) -> None:
    operation = f"operations/{teams.operation}"
    raise_own = {"edits": [{"path": ["strong_guarantee_resources", "cpu"], "value": 8}]}
    hostile: list[tuple[str, str, Any]] = [
        ("POST", "trees/default/pools", {"name": "x", "parent": "red"}),
        ("POST", "trees/default/pools", {"name": "x"}),
        ("PATCH", "trees/default/pools/red", {"edits": [{"path": ["weight"], "value": 0.1}]}),
        ("PATCH", "trees/default/pools/red", {"edits": [{"path": ["acl"], "value": []}]}),
        ("PATCH", "trees/default/pools/red", {"edits": [{"path": ["parent_name"], "value": "blue"}]}),
        ("DELETE", "trees/default/pools/red?recursive=true", None),
        ("POST", "trees/default/pools/red/move", {"parent": "blue"}),
        ("POST", "trees/default/pools/red/move", {"name": "mine"}),
        ("POST", "trees/default/pools/red/transfer", {"destination": "blue", "delta": {}}),
        ("PATCH", "trees/default/pools/blue", raise_own),
        ("PATCH", "trees/default/pools/blue", {"edits": [{"path": ["acl", "end"], "value": None}]}),
        ("PATCH", "trees/default/pools/blue", {"edits": [{"path": ["owner"], "value": "bob"}]}),
        ("PATCH", "trees/default/pools/blue", {"edits": [{"path": ["fair_share_starvation_timeout"], "value": 1}]}),
        ("PATCH", "trees/default", {"edits": [{"path": ["acl"], "value": []}]}),
        ("POST", "operations", {"spec": {"pool": "red", "tasks": {"t": {"job_count": 1}}}}),
        ("POST", f"{operation}/abort", {}),
        ("POST", f"{operation}/suspend", {}),
        ("POST", f"{operation}/resume", None),
        ("POST", f"{operation}/complete", None),
        ("PATCH", operation, {"parameters": {"pool": "blue"}}),
        ("PATCH", operation, {"parameters": {"acl": [entry(["bob"], ["read_secrets"])]}}),
        ("GET", f"{operation}/specification", None),
        ("GET", f"{operation}/jobs/1-2-3-4/log", None),
        ("POST", f"{operation}/jobs/1-2-3-4/pin", {}),
        ("POST", f"{operation}/jobs/1-2-3-4/unpin", None),
    ]
    before = teams.as_user("root").get("trees/default/pools")
    for method, path, body in hostile:
        sentence = teams.refused("bob", method, path, body)
        assert sentence.startswith("bob may not "), sentence
        assert "(permission " in sentence
        assert sentence.endswith("an administrator"), sentence
    after = teams.as_user("root").get("trees/default/pools")
    assert [pool["attributes"] for pool in after["pools"]] == [pool["attributes"] for pool in before["pools"]]
    assert teams.scheduler.state_of(teams.operation) in ("pending", "running")
    for user in ("ann", "bob"):  # and each its own
        pool = {"ann": "red", "bob": "blue"}[user]
        teams.as_user(user).create_pool(f"{pool}-1", pool)
        lower = {"edits": [{"path": ["strong_guarantee_resources", "cpu"], "value": 3}]}
        teams.scheduler.patch(f"trees/default/pools/{pool}", lower)
        started = teams.scheduler.start_operation(pool)
        teams.scheduler.post(f"operations/{started}/abort")


def test_a_refusal_for_rights_is_the_first_and_tells_names_only(teams: Teams) -> None:
    body = {"edits": [{"path": ["weight"], "value": "not a number"}]}
    assert teams.refused("bob", "PATCH", "trees/default/pools/red", body).startswith("bob may not change the options")
    plan = teams.as_user("bob").post(
        "plan", {"type": "ChangePool", "tree": "default", "pool": "red", "edits": [{"path": ["weight"], "value": 2}]}
    )
    assert (plan["accepted"], plan["code"]) == (False, 901)
    assert plan["refusal"].startswith("bob may not change the options")


def test_secrets_are_shown_to_their_owner_alone(teams: Teams) -> None:
    operation = f"operations/{teams.operation}"
    for user, is_shown in (("ann", True), ("bob", False), ("kim", False), ("root", True)):
        answer = teams.as_user(user).request("GET", operation)
        assert (SECRET in answer.text) is is_shown, user
        shown = answer.json()
        assert (shown["may"]["read_secrets"] == "") is is_shown
        assert shown["spec"].get("environment_hidden", False) is not is_shown
        assert SECRET not in teams.scheduler.request("GET", "operations").text


def test_an_operation_that_may_not_be_read_is_not_there(teams: Teams) -> None:
    node = PlayedNode(teams.as_user("n1"), "n1")
    node.register()
    node.beat_until(lambda: node.jobs_of(teams.operation), "the job starts")
    (job,) = node.jobs_of(teams.operation)
    deny = {"action": "deny", "subjects": ["bob"], "permissions": ["read"]}
    teams.as_user("root").patch("trees/default/pools/red", {"edits": [{"path": ["acl", "end"], "value": deny}]})
    operation = f"operations/{teams.operation}"
    for path in (
        operation, f"{operation}/why", f"{operation}/orchid", f"{operation}/jobs", f"{operation}/jobs/{job}",
        f"{operation}/jobs/{job}/explain", f"history?kind=operation&name={teams.operation}",
        f"history?kind=job&name={job}",
    ):  # fmt: skip
        assert "denies read" in teams.refused("bob", "GET", path)
    assert teams.as_user("bob").get("operations")["total"] == 0
    assert teams.scheduler.get("nodes/n1")["jobs"] == []
    assert teams.as_user("kim").get("operations")["total"] == 1
    assert len(teams.scheduler.get("nodes/n1")["jobs"]) == 1


def test_the_page_is_told_what_its_user_may(teams: Teams) -> None:
    me = teams.as_user("ann").get("me")
    assert (me["user"], me["groups"], me["is_admin"]) == ("ann", [], False)
    assert teams.scheduler.get("trees/default/rights")["pools"] == {
        "<Root>": [], "blue": [], "red": ["use", "modify_children", "write"]
    }  # fmt: skip
    may = teams.scheduler.get("trees/default/pools/blue")["may"]
    assert may["use"] == 'no access list allows use to ann, and pool "blue" has one'
    everything = ["use", "modify_children", "write", "administer"]
    assert teams.as_user("root").get("trees/default/rights")["pools"]["<Root>"] == everything


def test_can_answers_by_exit_code_and_sentence(teams: Teams) -> None:
    yes = teams.can("ann", "start", "red", "--why")
    assert (yes.returncode, yes.stdout) == (0, 'yes: the access list of pool "red" allows use to ann\n')
    no = teams.can("ann", "abort", teams.operation, "--json", asker="ann")
    assert (no.returncode, json.loads(no.stdout)["allowed"]) == (0, True)
    no = teams.can("bob", "log", teams.operation, "--json", asker="bob")
    assert no.returncode == 1
    assert json.loads(no.stdout) == {
        "allowed": False, "because": 'no access list allows read_secrets to bob, and pool "red" has one'
    }  # fmt: skip
    assert teams.can("bob", "use", "red").stdout == "no\n"
    teams.as_user("root").patch(
        "trees/default/pools/red", {"edits": [{"path": ["acl", "end"], "value": entry(["ml"], ["use"])}]}
    )
    assert teams.can("x", "use", "//sys/pool_trees/default/red", "--group", "ml", "--group", "y").returncode == 0
    others = teams.can("ann", "use", "red", asker="bob")
    assert (others.returncode, others.stdout) == (77, "")
    assert "bob may not ask what ann may do to pool" in others.stderr
    assert teams.can("ann", "use", "nothing").returncode == 67


# --- the `yt` client


def test_yt_sets_and_shows_access_lists(teams: Teams) -> None:
    scheduler = teams.as_user("root")
    path = "//sys/pool_trees/default/red"
    added = scheduler.yt("set", f"{path}/@acl/end", "{action=allow;subjects=[kim];permissions=[use]}")
    assert added.returncode == 0, added.stderr
    scheduler.create_pool("below", "red", inherit_acl=True)
    found = scheduler.yt_all(
        {
            "acl": ("get", f"{path}/@acl", "--format", "json"),
            "inherit": ("get", f"{path}/@inherit_acl", "--format", "json"),
            "effective": ("get", f"{path}/below/@effective_acl", "--format", "json"),
            "own": ("get", f"{path}/below/@acl", "--format", "json"),
            "wrong": ("set", f"{path}/@acl", "[{action=allow;subjects=[kim];permissions=[uze]}]"),
            "fixed": ("set", f"{path}/@effective_acl", "[]"),
        }
    )
    acl = json.loads(found["acl"].stdout)
    assert acl[1] == {"action": "allow", "subjects": ["kim"], "permissions": ["use"]}
    assert json.loads(found["inherit"].stdout) is True
    assert json.loads(found["effective"].stdout) == acl
    assert json.loads(found["own"].stdout) == []
    assert 'acl/0/permissions: "uze" is unknown; did you mean "use"?' in found["wrong"].stderr
    assert "cannot be set or removed" in found["fixed"].stderr
    teams.as_user("kim").start_operation("red")


def test_yt_refuses_with_901_what_the_lists_do_not_allow(teams: Teams) -> None:
    scheduler = teams.as_user("bob")
    path = "//sys/pool_trees/default/red"
    runs = {
        "set": ("set", f"{path}/@weight", "2"),
        "acl": ("set", f"{path}/@acl", "[]"),
        "create": ("create", "map_node", f"{path}/x"),
        "made": ("create", "scheduler_pool", "--attributes", "{name=x;pool_tree=default;parent_name=red}"),
        "remove": ("remove", path),
        "move": ("move", path, "//sys/pool_trees/default/blue/red"),
        "abort": ("abort-op", teams.operation),
        "suspend": ("suspend-op", teams.operation),
        "parameters": ("update-op-parameters", teams.operation, "{weight=2}"),
        "vanilla": ("execute", "start_operation", "{operation_type=vanilla;spec={pool=red;tasks={t={job_count=1}}}}"),
        "spec": ("get-operation", teams.operation, "--attribute", "spec"),
        "stderr": ("execute", "get_job_stderr", f'{{operation_id="{teams.operation}";job_id="1-2-3-4"}}'),
    }
    for name, done in scheduler.yt_all(runs).items():
        assert done.returncode != 0, name
        assert "bob may not " in done.stderr, f"{name}: {done.stderr}"
    shown = scheduler.yt_all(
        {
            "all": ("get-operation", teams.operation, "--format", "json"),
            "list": ("list-operations", "--attribute", "id", "--attribute", "spec", "--format", "json"),
            "orchid": ("get", f"//sys/scheduler/orchid/scheduler/operations/{teams.operation}", "--format", "json"),
        }
    )
    for name, done in shown.items():
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert teams.operation in done.stdout
        assert SECRET not in done.stdout
    assert json.loads(shown["all"].stdout)["spec"]["environment_hidden"] is True
    assert "spec" not in json.loads(shown["list"].stdout)["operations"][0]
    own = teams.as_user("ann").yt("get-operation", teams.operation, "--attribute", "spec", "--format", "json")
    assert SECRET in own.stdout


@pytest.mark.parametrize("bindings", [True, False])
def test_yt_check_permission(teams: Teams, bindings: bool) -> None:
    path = "//sys/pool_trees/default/red"
    answers = teams.as_user("root").yt_all(
        {
            f"{user} {permission}": ("check-permission", user, permission, path, "--format", "json")
            for user, permission in (("ann", "use"), ("bob", "use"), ("bob", "read"), ("ann", "administer"))
        },
        bindings,
    )
    found = {name: json.loads(done.stdout)["action"] for name, done in answers.items()}
    assert found == {"ann use": "allow", "bob use": "deny", "bob read": "allow", "ann administer": "deny"}


def test_check_permission_of_operations_by_the_protocol(teams: Teams) -> None:
    def ask(asker: str, user: str, permission: str) -> httpx2.Response:
        given = f"operation_id={teams.operation}&user={user}&permission={permission}"
        return teams.as_user(asker).request("GET", f"/api/v4/check_operation_permission?{given}&output_format=json")

    assert ask("root", "ann", "manage").json()["action"] == "allow"
    assert ask("root", "bob", "read").json()["action"] == "allow"
    assert ask("bob", "bob", "manage").json()["action"] == "deny"
    assert ask("bob", "ann", "manage").json()["code"] == 901


def test_a_request_made_in_a_users_name_has_the_users_rights(teams: Teams) -> None:
    scheduler = teams.as_user("root")
    for user, status in (("ann", 201), ("kim", 403), ("root", 201)):
        answer = scheduler.client.post(
            "/api/v1/operations", json={"spec": {"pool": "red", "tasks": {"t": {"job_count": 1}}}},
            headers={"X-YT-User-Name": user},
        )  # fmt: skip
        assert answer.status_code == status, f"{user}: {answer.text}"


def test_what_allowed_a_command_is_in_the_log(teams: Teams) -> None:
    (found,) = [each for each in teams.scheduler.events("command") if each["command"] == "StartOperation"]
    assert (found["user"], found["allowed_by"]) == ("ann", 'the access list of pool "red" allows use to ann')
    assert SECRET not in teams.scheduler.log()
