"""Accounts of this machine at the scheduler's unix socket, and what commands and agents do there."""

import json
import pwd
import signal
from pathlib import Path

import pytest
from agent_process import AgentProcess
from commands import run_command
from scheduler_process import SchedulerProcess, clean_environment
from test_access_by_token import ask, needs_root, place  # noqa: F401
from test_token_command import run
from waiting import wait_until


@needs_root
def test_every_account_is_known_by_its_uid_at_the_configured_socket(place: Path) -> None:  # noqa: F811
    account = pwd.getpwnam("daemon")
    scheduler = SchedulerProcess(place)
    path = place / "api.sock"
    scheduler.write_config(f'[groups]\nml = ["{account.pw_name}"]', api=f'socket = "{path}"')
    scheduler.start()
    try:
        assert path.stat().st_mode & 0o777 == 0o666
        answers = ask(str(path), *((uid, "GET", "/api/v1/me", {}, None) for uid in (0, account.pw_uid, 4712, 65534)))
        assert [status for status, _ in answers] == [200, 200, 403, 403]
        users = [json.loads(text) for _, text in answers]
        assert [each.get("user") for each in users] == ["root", "daemon", None, None]
        assert not users[0]["is_open"]
        assert "this is uid 4712, which has no account" in users[2]["error"]
        assert "which many programs share" in users[3]["error"]
        # Nobody passes for another one, nor for a node.
        for headers in ({"X-YT-User-Name": "root"}, {"X-Remote-User": "root"}):
            [(status, _)] = ask(str(path), (account.pw_uid, "GET", "/api/v1/me", headers, None))
            assert status in (401, 403)
        [(status, text)] = ask(str(path), (account.pw_uid, "POST", "/api/v1/nodes", {}, {
            "node_id": "n1", "incarnation": "a", "resources": {"cpu": 1.0},
        }))  # fmt: skip
        assert status == 403
        assert "this is daemon, and nodes have tokens of their own" in text
        # A token that an account makes for itself is good for no more than the account.
        made, refused = ask(
            str(path),
            (account.pw_uid, "POST", "/api/v1/tokens", {}, {"groups": ["ml"]}),
            (account.pw_uid, "POST", "/api/v1/tokens", {}, {"user": "root"}),
        )
        assert (made[0], refused[0]) == (201, 403)
        [record] = scheduler.events("command")
        assert (record["user"], record["origin"]) == ("daemon", f"unix socket, uid {account.pw_uid}")
        scheduler.use_token(json.loads(made[1])["token"])
        assert scheduler.get("me")["user"] == "daemon"
        # Over loopback the account is known as well.
        scheduler.use_token("")
        assert scheduler.get("me")["user"] == "root"
    finally:
        scheduler.close()


@needs_root
def test_the_socket_of_systemds_unit_is_for_root_alone(
    place: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(place))
    scheduler = SchedulerProcess(place)
    tokens = place / "tokens"
    tokens.touch(mode=0o600)
    scheduler.write_config(api=f'tokens_file = "{tokens}"')
    scheduler.start()
    try:
        path = place / "api.sock"
        daemon = pwd.getpwnam("daemon").pw_uid
        root, other = ask(str(path), *((uid, "GET", "/api/v1/me", {}, None) for uid in (0, daemon)))
        assert (root[0], other[0]) == (200, 403)
        assert f"and this is daemon (uid {daemon}); send a token" in other[1]
        assert scheduler.request("GET", "me").status_code == 401
        # So the first token is made where there is none.
        words = ["token", "create", "ops", "--role", "admin", "--scheduler", f"unix:{path}"]
        made = run_command(words, clean_environment())
        scheduler.use_token(made.stdout.strip())
        assert scheduler.get("me")["user"] == "ops"
        assert (
            ask(str(path), (daemon, "GET", "/api/v1/me", {"Authorization": f"OAuth {made.stdout.strip()}"}, None))[0][0]
            == 200
        )
    finally:
        scheduler.close()


@needs_root
def test_an_agent_at_the_socket(scheduler: SchedulerProcess, tmp_path: Path) -> None:
    path = scheduler.directory / "api.sock"
    scheduler.write_config(api=f'socket = "{path}"')
    scheduler.start()
    agent = AgentProcess(tmp_path)
    agent.start(f'[scheduler]\nurl = "unix:{path}"\nheartbeat_period = "100ms"\n[resources]\ncpu = 2\n')
    try:
        wait_until(lambda: [node["id"] for node in scheduler.get("nodes")["nodes"]] == ["test-node"], "it registers")
        # The scheduler comes back with a new socket.
        scheduler.kill()
        scheduler.start()
        wait_until(lambda: any(node["is_online"] for node in scheduler.get("nodes")["nodes"]), "it is back")
    finally:
        agent.process and agent.process.send_signal(signal.SIGTERM)
        agent.process and agent.process.wait(60)


def test_an_address_that_is_no_path(scheduler: SchedulerProcess) -> None:
    scheduler.write_config()
    scheduler.start()
    done = run(scheduler, "", "pool", "list", "--scheduler", "unix:api.sock", code=64)
    assert "expected the whole path of a socket" in done.stderr
    done = run(scheduler, "", "pool", "list", "--scheduler", "unix:/none.sock", code=69)
    assert "no scheduler answers on unix:/none.sock (No such file or directory)" in done.stderr
