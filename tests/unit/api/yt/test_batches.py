"""What a batch costs in the event loop's thread."""

from typing import Any

import pytest
from calls import count_calls

from cpumond.api.bodies import Bodies
from cpumond.api.yt.parameters import YtRequest
from cpumond.api.yt.replies import ReplyCache, YtLimits
from cpumond.api.yt.transport import _record_nothing, _Transport
from cpumond.scheduler.rights.tokens import User


@pytest.mark.parametrize("value", [[{"a": 1}] * 20_000, {"operations": [{"a": "b"}] * 20_000}], ids=["list", "map"])
async def test_large_answers_of_a_batch_are_not_gone_through_in_the_loop(value: Any) -> None:
    async def answer(_: YtRequest) -> Any:
        return {"value": value}

    limits, ann = YtLimits(), User("ann")
    transport = _Transport(answer, lambda _: ann, limits, ReplyCache(limits), Bodies(), _record_nothing)
    requests = [{"command": "get", "parameters": {"path": "/"}}] * 3
    with count_calls() as calls:
        answers = await transport._execute(YtRequest("execute_batch", {"requests": requests}, None, ann, "1-2-3-4"))
    assert answers == {"results": [{"output": {"value": value}}] * 3}
    assert calls.total() < 5000
