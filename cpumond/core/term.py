"""The term of a scheduler's answers: which of several schedulers on one store led when it answered.

Each take-over begins a term, larger than all before it. Every answer of a leader has its term in the header
``TERM_HEADER``; one without belongs to a scheduler that is alone on its store. Whoever has seen a term refuses answers
of lower ones: they come from a scheduler that lost the lead and has not noticed.
"""

from __future__ import annotations

from typing import Final

TERM_HEADER: Final = "x-cpumond-term"
LEADER_HEADER: Final = "x-cpumond-leader"
"""In a standby's 503: the leader's address, ``host:port``, where it is known."""

MAX_TERM: Final = 2**62


def parse_term(text: str | None) -> int | None:
    """The term of an answer's header; None where there is none, or it is no number from 1 to MAX_TERM."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19:
        return None
    term = int(text)
    return term if 1 <= term <= MAX_TERM else None
