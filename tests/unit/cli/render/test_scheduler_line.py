"""What `cpumond status` says of the scheduler that the node is with."""

from __future__ import annotations

import pytest

from cpumond.cli.render.tables import draw_status
from cpumond.core.answers import Counters, LinkView, ReporterStats, StatusAnswer, Sums


@pytest.mark.parametrize(
    ("term", "shown"), [(None, "node of http://a:9757: in"), (7, "node of http://a:9757 (term 7): in")]
)
def test_the_scheduler_is_shown_with_its_term(term: int | None, shown: str):
    link = LinkView("http://a:9757", True, "default", "", ReporterStats(), term)
    answer = StatusAnswer("node-1", "v2", 0.001, 1.0, False, Sums(0.0, 0.0, 0.0), Counters(), [], scheduler=link)
    assert f"{shown} tree default" in draw_status(answer, None, colour=False)


def test_what_the_scheduler_lets_the_host_do_is_shown():
    link = LinkView("http://a:9757", True, "default", "", ReporterStats(), level="up-only")
    answer = StatusAnswer("node-1", "v2", 0.001, 1.0, False, Sums(0.0, 0.0, 0.0), Counters(), [], scheduler=link)
    assert "in tree default, lets this host do up-only at most" in draw_status(answer, None, colour=False)
