"""Cost of requests for the event loop, estimated before they are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cpumond.api.json.call import Call

STEPS: Final = 5000
"""So many function calls in the event loop (about half a millisecond) count as one request of a user."""

Cost = Callable[[Call], float]
"""Returns the number of requests as which a request counts, in addition to itself."""


def per(
    *, operations: int = 0, nodes: int = 0, pools: int = 0, preemptions: int = 0, listed: int = 0, values: int = 0
) -> Cost:
    """Return a cost by numbers of function calls: for each existing operation, node, pool and preemption, for each row
    that ``limit`` allows (``listed``), and for each value in the body."""

    def estimate(call: Call) -> float:
        state = call.state
        calls = operations * (len(state.operations) + len(state.finished)) + nodes * len(state.nodes)
        calls += preemptions * len(state.preemptions) + values * call.value_count
        if pools:
            calls += pools * sum(len(tree.pools) for tree in state.trees.values())
        if listed:
            calls += listed * int(call.query.limit)
        return calls / STEPS

    return estimate


COST_OF_A_BODY: Final = per(values=200)
