"""This version over ``tests/data/scheduler_0.1.db.gz``, which a scheduler of version 0.1 wrote.

Trees ``default`` and ``gpu``, pools ``research``, ``nlp`` in it and ``batch``, node ``n1``, and two operations: ann's
in ``nlp``, and one of ben's that was aborted.
"""

import gzip
import os
import pwd
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scheduler_process import SchedulerProcess

DATABASE = Path(__file__).parents[1] / "data/scheduler_0.1.db.gz"
USERS = {"root": "admin", "ann": "user", "ben": "user", "n1": "node:n1"}
"""User -> role; the tokens are the names."""
ANNS = "e29ea6ec-44190013-f7248524-ab05b392"


@pytest.fixture
def old(scheduler: SchedulerProcess) -> SchedulerProcess:
    """What version 0.1 left, not started yet."""
    scheduler.state_dir.mkdir(mode=0o700)
    path = scheduler.state_dir / "scheduler.db"
    path.touch(mode=0o600)
    path.write_bytes(gzip.decompress(DATABASE.read_bytes()))
    scheduler.write_config(api=scheduler.write_tokens(USERS))
    return scheduler


def ask(scheduler: SchedulerProcess, user: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    scheduler.use_token(user)
    answer = scheduler.request(method, path, body)
    return answer.status_code, answer.json()


def edit(name: str, value: Any) -> dict[str, Any]:
    return {"edits": [{"path": [name], "value": value}]}


def test_nobody_loses_what_they_had(old: SchedulerProcess) -> None:
    old.start()
    requests: tuple[tuple[str, str, str, Any], ...] = (
        ("ann", "PATCH", "trees/default/pools/batch", edit("weight", 3.0)),
        ("ben", "POST", "trees/default/pools", {"name": "mine", "parent": "research"}),
        ("ben", "POST", "trees/default/pools/mine/move", {"parent": "nlp"}),
        ("ben", "PATCH", "trees/default/pools/research", edit("strong_guarantee_resources", {"cpu": 9})),
        ("ben", "GET", f"operations/{ANNS}/specification", None),
        ("ben", "PATCH", f"operations/{ANNS}", {"parameters": {"weight": 2.0}}),
        ("ben", "POST", "operations/*train/abort", {}),
        ("ben", "POST", "operations", {"spec": {"pool": "nlp", "tasks": {"t": {"job_count": 1, "command": "true"}}}}),
        ("ben", "POST", "trees", {"name": "new", "attributes": {"nodes_filter": "new"}}),
        ("ben", "PATCH", "trees/default", edit("max_operation_count", 1000)),
        ("ben", "DELETE", "trees/gpu", None),
        ("n1", "POST", "nodes", {"node_id": "n1", "incarnation": "b", "resources": {"cpu": 4.0}, "key": "k"}),
    )
    for user, method, path, body in requests:
        status, told = ask(old, user, method, path, body)
        assert status in (200, 201), f"{user} {method} {path}: {told}"
    assert ask(old, "", "GET", "operations")[0] == 401
    _, pool = ask(old, "ann", "GET", "trees/default/pools/research")
    assert pool["attributes"] == {"weight": 2.0, "note": "kept", "strong_guarantee_resources": {"cpu": 9}}
    _, tree = ask(old, "ann", "GET", "trees/default")
    assert "acl_required" not in tree["attributes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_an_account_that_might_ask_nothing_gains_nothing(old: SchedulerProcess) -> None:
    socket = old.directory / "api.sock"
    old.write_config(api=f'tokens_file = "{old.directory}/tokens"\nsocket = "{socket}"')
    old.start()
    for parent in (old.directory, *old.directory.parents):
        if parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(pwd.getpwnam("daemon").pw_uid)
            transport = httpx2.HTTPTransport(uds=str(socket))
            with httpx2.Client(base_url="http://localhost", transport=transport, trust_env=False) as client:
                seen = client.get("/api/v1/trees")
                tried = client.patch("/api/v1/trees/default/pools/batch", json=edit("weight", 3.0))
            code = 0 if (seen.status_code, tried.status_code) == (200, 403) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
