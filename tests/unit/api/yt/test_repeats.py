"""A command with a mutation id is carried out once, also where the scheduler was killed before its answer arrived."""

import pytest
from starlette.testclient import TestClient

from cpumond.api.server import make_app
from cpumond.api.yt.yson import write_yson
from cpumond.scheduler.model import Rules
from cpumond.scheduler.program.config import Api
from cpumond.scheduler.program.identities import Identities
from cpumond.scheduler.rights.tokens import hash_token, parse_tokens
from cpumond.scheduler.service import Clock, Scheduler
from cpumond.scheduler.store.sqlite import SqliteStore

KNOWN = Identities(parse_tokens(f"ann:{hash_token('ann')}:admin", "tokens"), None)
POOL = {"type": "scheduler_pool", "attributes": {"name": "p"}}
BATCH = {"requests": [{"command": "create", "parameters": POOL}]}
SPEC = {"pool": "p", "tasks": {"t": {"job_count": 1, "command": "true"}}}


@pytest.mark.parametrize(
    ("command", "parameters"),
    [("create", POOL), ("execute_batch", BATCH), ("start_operation", {"operation_type": "vanilla", "spec": SPEC})],
)
def test_the_next_scheduler_gives_the_answer_of_the_first(
    store: SqliteStore, command: str, parameters: dict[str, object]
) -> None:
    answers = []
    for is_retry in (False, True):
        scheduler = Scheduler(Rules(), store, Clock())
        client = TestClient(make_app(scheduler, Api(tokens_file="tokens"), KNOWN, lambda _: b"", "c"))
        content = write_yson({**parameters, "mutation_id": "1-2-3-4", "retry": is_retry})
        headers = {"X-YT-Header-Format": "<format=text>yson", "Authorization": "OAuth ann"}
        answer = client.post(f"/api/v4/{command}", content=content, headers=headers)
        answers.append((answer.status_code, answer.content))
        made = [*scheduler.state.operations, *scheduler.state.trees["default"].pools]
    assert answers[0] == answers[1]
    assert answers[0][0] == 200
    assert len(made) == (2 if command == "start_operation" else 1), "with the pool of the operation"
