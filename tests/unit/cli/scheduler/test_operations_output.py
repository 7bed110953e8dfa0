"""What jobs wrote, on a terminal."""

from __future__ import annotations

import pytest

from cpumond.cli.scheduler.follow import make_visible


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"one\n\ttwo\n", "one\n\ttwo\n"),
        (b"\x1b[2J\rgone\x00", "\\x1b[2J\\rgone\\x00"),
        ("é 漢".encode(), "é 漢"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("\u202ekcab\u2028".encode(), "\\u202ekcab\\u2028"),
        (b"back\\slash", "back\\slash"),
        (b"", ""),
    ],
)
def test_nothing_of_a_log_moves_the_cursor(content, shown):
    assert make_visible(content) == shown
