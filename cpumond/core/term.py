"""The term in a scheduler's answers: it shows which of the schedulers on a shared store led when it answered.

Each take-over begins a new term, with a larger number than all before. Every answer of a leader has its term in the
header ``TERM_HEADER``; an answer without this header is from a scheduler that is alone on its store. A client that has
seen a term refuses answers with a lower one: they are from a scheduler that lost the lead and has not noticed."""

from __future__ import annotations

from typing import Final

TERM_HEADER: Final = "x-cpumond-term"
LEADER_HEADER: Final = "x-cpumond-leader"
"""Header of a standby's 503: the leader's address ``host:port``, if known."""

MAX_TERM: Final = 2**62


def parse_term(text: str | None) -> int | None:
    """Parse the term of an answer's header; None if it is missing or not a number from 1 to MAX_TERM."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19:
        return None
    term = int(text)
    return term if 1 <= term <= MAX_TERM else None
