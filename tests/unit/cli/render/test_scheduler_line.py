"""What `cpumond status` says of the scheduler that the node is with."""

from typing import Any

import pytest

from cpumond.cli.render.tables import draw_status
from cpumond.core.answers import Counters, LinkView, ReporterStats, StatusAnswer, Sums


@pytest.mark.parametrize(("more", "shown"), [
    ({}, "node of http://a:9757: in tree default"),
    ({"term": 7}, "node of http://a:9757 (term 7): in tree default"),
    ({"level": "up-only"}, "in tree default, lets this host do up-only at most"),
])  # fmt: skip
def test_the_scheduler_is_shown_with_its_term_and_what_it_lets_the_host_do(more: dict[str, Any], shown: str):
    link = LinkView("http://a:9757", True, "default", "", ReporterStats(), **more)
    answer = StatusAnswer("node-1", "v2", 0.001, 1.0, False, Sums(0.0, 0.0, 0.0), Counters(), [], scheduler=link)
    assert shown in draw_status(answer, None, colour=False)
