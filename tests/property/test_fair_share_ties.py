"""Points at which one unit in the last place decides (fair_share_update.md 9.1, 9.4, 10).

Where what is wanted of a resource sums up to exactly 1, what comes after it along the path is not handed out
(9.4, "trim"); where the sum falls short by one unit in the last place, it is.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_fair_share_cases import update

from cpumond.cli.fairshare.input import InputReader
from cpumond.fairshare import FairShareUpdater
from cpumond.fairshare.integral import propose_burst_shares
from cpumond.fairshare.nodes import PoolNode
from cpumond.fairshare.resources import CPU, MEMORY
from cpumond.fairshare.tree import IntegralGuarantees, Options, Pool


def share_memory(units: int, *operations: dict[str, Any]) -> list[float]:
    """What each operation gets of the memory of a cluster of ``units`` of each resource."""
    case = {
        "id": "", "options": {}, "now": 100.0, "previous_update_time": None, "pools": [],
        "total_resources": dict.fromkeys(("cpu", "memory", "user_slots"), units) | {"gpu": 0, "network": 0},
        "operations": [{"name": f"o{n}", "parent": "<root>", **each} for n, each in enumerate(operations)],
    }  # fmt: skip
    elements = update(case, InputReader(), FairShareUpdater()).elements
    return [elements[f"o{n}"].fair_share.total[MEMORY] for n in range(len(operations))]


def test_a_value_above_1_at_a_limit_in_the_growth_lets_the_rest_grow_on():
    """7.2 times the cluster is wanted within [1, 2]."""
    first = {"demand": {"user_slots": 3}, "usage": {"user_slots": 1}}
    second = {"demand": {"cpu": 36, "memory": 36, "user_slots": 2}, "weight": 2.0, "resource_limits": {"cpu": 5}}
    assert share_memory(5, first, second) == pytest.approx([0.0, 1.0], abs=1e-9)


def test_a_limit_within_the_usage_leaves_the_rest_to_the_other():
    first = {"demand": {"cpu": 4, "memory": 1}, "usage": {"cpu": 4, "memory": 1}, "weight": 3.0}
    second = {"demand": {"memory": 15}, "weight": 3.0, "resource_limits": {"memory": 2}}
    assert share_memory(3, first, second) == pytest.approx([1 / 3, 2 / 3], abs=1e-9)


@pytest.mark.parametrize(("wanted", "least", "most"), [(4, 0.5, 0.5), (6, 0.99, 1.0)])
def test_more_than_the_whole_cluster_is_only_given_within_one_rounding(wanted, least, most):
    """The same tree with 1 and with 3/2 of the cluster wanted: with 3/2 the value at the limit is 1 - 2^-52."""
    _, found = share_memory(4, {"demand": {"cpu": wanted}, "weight": 2.0}, {"demand": {"memory": 4}})
    assert least <= found <= most


def test_10_guarantee_and_grant_are_subtracted_from_the_limits_at_once():
    """Where strong + granted is the limit but for rounding, nothing is left; one after the other, one unit would be."""
    strong, granted, limit = 0.1, 0.2, 0.1 + 0.2
    assert limit - strong - granted != 0.0
    root = PoolNode(Pool("<root>", ""), None)
    above = PoolNode(Pool("above"), root)
    integral = IntegralGuarantees("burst", accumulated_volume=(600.0,) * 5)
    burst = PoolNode(Pool("burst", "above", integral_guarantees=integral), above)
    above.strong, above.proposed = (strong,) * 5, (granted,) * 5
    above.limits_share, burst.limits_share, burst.burst_ratio = (limit,) * 5, (1.0,) * 5, 1.0
    seen: list[float] = []

    class StopHereError(Exception):
        pass

    def prepare(node: PoolNode, _: float) -> None:
        seen.append(node.proposed[CPU])
        raise StopHereError

    with pytest.raises(StopHereError):
        propose_burst_shares([burst], (10.0,) * 5, Options(), prepare)
    assert seen == [0.0]
