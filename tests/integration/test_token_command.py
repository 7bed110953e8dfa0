"""Tokens that are made, listed and revoked while the scheduler runs, with the command line and over HTTP."""

import json
import subprocess
from typing import Any

from commands import run_command
from scheduler_process import PlayedNode, SchedulerProcess, clean_environment
from test_access_by_token import start_with_tokens


def run(scheduler: SchedulerProcess, token: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(), "CPUMOND_SCHEDULER": scheduler.url, "CPUMOND_TOKEN": token, "COLUMNS": "200"}
    done = run_command(list(arguments), environment)
    assert done.returncode == code, f"{arguments}: {done.returncode} {done.stdout} {done.stderr}"
    return done


def list_ids(scheduler: SchedulerProcess, token: str) -> list[str]:
    return [each["id"] for each in json.loads(run(scheduler, token, "token", "list", "--json").stdout)["tokens"]]


def ask(scheduler: SchedulerProcess, token: str, method: str, path: str, body: Any = None) -> tuple[int, str]:
    scheduler.use_token(token)
    answer = scheduler.request(method, path, body)
    return answer.status_code, answer.text


def test_the_life_of_a_token(scheduler: SchedulerProcess) -> None:
    start_with_tokens(scheduler, "admin", "user")
    done = run(scheduler, "admin", "token", "create", "alice", "--group", "ml", "--expires", "90d", "--note", "laptop")
    token = done.stdout.strip()
    assert len(token) == 43
    assert "of alice, role user, valid until 20" in done.stderr
    assert ask(scheduler, token, "GET", "me")[0] == 200
    scheduler.use_token(token)
    assert scheduler.get("me")["user"] == "alice"
    [mine] = list_ids(scheduler, token)
    listed = run(scheduler, "admin", "token", "list").stdout
    assert mine in listed
    assert "laptop" in listed
    assert "tokens_file" in listed, "those of the file are there, too"

    # It is known after a restart, and neither log nor database has it.
    scheduler.kill()
    scheduler.start()
    assert ask(scheduler, token, "GET", "me")[0] == 200
    assert token not in scheduler.log()
    files = list(scheduler.state_dir.iterdir())
    assert not any(token.encode() in path.read_bytes() for path in files if path.is_file())

    run(scheduler, "admin", "token", "revoke", mine)
    status, text = ask(scheduler, token, "GET", "me")
    assert status == 401
    assert f"the token {mine} was revoked on 20" in text
    assert "no token" in run(scheduler, "admin", "token", "list", "--user", "alice").stdout
    assert "revoked 20" in run(scheduler, "admin", "token", "list", "--all").stdout
    assert mine not in list_ids(scheduler, "admin"), "as the table: --json leaves the same out"
    alices = run(scheduler, "admin", "token", "list", "--all", "--user", "alice", "--json").stdout
    assert [each["id"] for each in json.loads(alices)["tokens"]] == [mine]
    assert "was revoked on" in run(scheduler, "admin", "token", "revoke", mine).stderr
    [record] = [each for each in scheduler.events("command") if each["command"] == "CreateToken"]
    assert (record["user"], record["about_user"], record["id"]) == ("me", "alice", mine)
    assert "token" in record["origin"]
    assert "hash" not in record

    # Who may make which is in ``tests/unit/scheduler/state/test_token_commands.py``.
    [of_file, _] = list_ids(scheduler, "admin")
    done = run(scheduler, "user", "token", "create", "carol", code=77)
    assert "me may create tokens only for me" in done.stderr
    done = run(scheduler, "admin", "token", "revoke", of_file, code=78)
    assert "is in the scheduler's [api] tokens_file" in done.stderr
    status, text = ask(scheduler, "admin", "POST", "tokens", {"user": "everyone"})
    assert status == 422
    assert "access lists use it as a special word" in text
    assert len(scheduler.get("tokens")["tokens"]) == 3
    arguments = ("token", "create", "rack1", "--role", "node", "--node-pattern", "n1", "--json")
    made = json.loads(run(scheduler, "admin", *arguments).stdout)
    assert (made["role"], made["expires_at"]) == ("node", None)
    scheduler.use_token(made["token"])
    PlayedNode(scheduler, "n1").register()
    assert PlayedNode(scheduler, "n2").send().status_code == 403
