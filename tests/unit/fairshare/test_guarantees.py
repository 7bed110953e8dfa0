"""Strong guarantees: inferred (fair_share_update.md 4), checked and adjusted (6, 6.1, 6.2), estimated (6.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, UpdateResult, Vector
from cpumond.fairshare import fair_share_update as update
from cpumond.fairshare.resources import ZERO
from cpumond.fairshare.tree import OptionalVector

TOTAL: Vector = (100.0, 100.0, 8.0, 1000.0, 0.0)
INF = float("inf")


def give(
    slots: float | None = None, cpu: float | None = None, gpu: float | None = None, memory: float | None = None
) -> OptionalVector:
    """A strong guarantee; what is not said is unset."""
    return (slots, cpu, gpu, memory, None)


def limit(slots: float = INF, cpu: float = INF, gpu: float = INF, memory: float = INF) -> Vector:
    return (slots, cpu, gpu, memory, INF)


def strong(name: str, parent: str = ROOT, /, cpu: float | None = None, **more: Any) -> Pool:
    """A pool with a guarantee of cpu; everything else is inferred."""
    return Pool(name, parent, strong_guarantee_resources=give(cpu=cpu), **more)


def run(*parts: Pool | Operation, total: Vector = TOTAL, root: Pool | None = None, **options: Any) -> UpdateResult:
    pools = tuple(part for part in parts if isinstance(part, Pool))
    operations = tuple(part for part in parts if isinstance(part, Operation))
    tree = Snapshot(total, pools, operations, Options(**options), root or Pool(ROOT, ""))
    return update(tree, 0.0, None)


def inferred(result: UpdateResult, name: str) -> Vector:
    return result.elements[name].inferred_strong_guarantee_resources


def strong_cpu(result: UpdateResult, *names: str) -> list[float]:
    return [result.elements[name].strong_guarantee_share[1] for name in names]


def near(*values: float) -> Any:
    return pytest.approx(values, abs=1e-12)


def vector(v: Sequence[float]) -> Any:
    return pytest.approx(v, abs=1e-12)


# ---- inferred


def test_unset_resources_follow_the_main_one():
    """4: the part of the main resource, of everything; an integer is truncated, here 8 * 0.3 gpus."""
    assert inferred(run(strong("a", cpu=30.0)), "a") == (30.0, 30.0, 2.0, 300.0, 0.0)


def test_on_the_first_level_inferred_guarantees_are_not_rescaled():
    """4: first-level guarantees may overcommit the cluster."""
    result = run(Pool("a", strong_guarantee_resources=give(cpu=50.0, memory=900.0)), strong("b", cpu=50.0))
    assert inferred(result, "b") == (50.0, 50.0, 4.0, 500.0, 0.0)
    assert [error.code for error in result.errors] == [29000, 29000]


def test_below_the_first_level_inferred_guarantees_share_what_is_left():
    """4: 900 of 1000 bytes are said, so the two that infer 300 and 200 get 60 and 40 of the 100 that are left."""
    result = run(
        strong("top", cpu=100.0),
        Pool("a", "top", strong_guarantee_resources=give(cpu=50.0, memory=900.0)),
        strong("b", "top", cpu=30.0),
        strong("c", "top", cpu=20.0),
    )
    assert [inferred(result, name)[3] for name in "abc"] == [900.0, 60.0, 40.0]
    assert [inferred(result, name)[0] for name in "abc"] == [50.0, 30.0, 20.0]


# ---- overcommit


def flow(cpu: float, burst: float = 0.0) -> IntegralGuarantees:
    return IntegralGuarantees("burst", (0.0, cpu, 0.0, 0.0, 0.0), (0.0, burst, 0.0, 0.0, 0.0))


def codes(result: UpdateResult) -> list[int]:
    return [error.code for error in result.errors]


def test_guarantees_and_bursts_beyond_the_cluster_are_scaled_with_one_factor():
    """6: phi = 1 / (0.6 + 0.6); the root's strong share and every burst ratio, but not the total burst ratio."""
    bursts = [Pool(name, "top", integral_guarantees=flow(5.0, burst)) for name, burst in (("b", 40.0), ("c", 20.0))]
    result = run(strong("a", cpu=60.0), Pool("top"), *bursts)
    assert codes(result) == [29000]
    assert "burst" in result.errors[0].message
    assert strong_cpu(result, ROOT, "a") == near(0.5, 0.5)
    elements = result.elements
    assert [elements[name].burst_ratio for name in "bc"] == near(1.0 / 3.0, 1.0 / 6.0)
    assert [elements[name].total_burst_ratio for name in ("b", "c", "top", ROOT)] == near(0.4, 0.2, 0.6, 0.6)


@pytest.mark.parametrize(("gpus", "errors"), [(2.0, []), (3.0, [29000])])
def test_flows_are_counted_in_whole_units(gpus, errors):
    """17: a flow of 0.4 is 1 of 3 gpus, so 2 more can be guaranteed although 2/3 + 0.4 is more than 1."""
    total = (0.0, 100.0, 3.0, 0.0, 0.0)
    pool = Pool("a", strong_guarantee_resources=(0.0, 0.0, gpus, 0.0, 0.0))
    assert codes(run(pool, Pool("b", integral_guarantees=flow(40.0)), total=total)) == errors


def test_exactly_the_cluster_is_no_error():
    """6: T dominates S; cpu is counted in hundredths, whatever their doubles sum up to."""
    pools = [strong(f"p{n}", cpu=cpu) for n, cpu in enumerate([33.3, 33.3, 33.4])]
    assert codes(run(*pools)) == []
    tenths = [strong(f"p{n}", cpu=cpu) for n, cpu in enumerate([0.1, 0.2, 0.7])]
    assert codes(run(*tenths, total=(0.0, 1.0, 0.0, 0.0, 0.0))) == []


# ---- adjustment


def test_children_of_one_pool_are_shrunk_by_one_factor_for_all_resources():
    """6.2: memory is short by half, so cpu is halved too."""
    result = run(
        strong("top", cpu=100.0),
        Pool("a", "top", strong_guarantee_resources=give(slots=0.0, cpu=30.0, gpu=0.0, memory=1500.0)),
        Pool("b", "top", strong_guarantee_resources=give(slots=0.0, cpu=10.0, gpu=0.0, memory=500.0)),
    )
    assert result.elements["a"].strong_guarantee_share == vector((0.0, 0.15, 0.0, 0.75, 0.0))
    assert result.elements["b"].strong_guarantee_share == vector((0.0, 0.05, 0.0, 0.25, 0.0))


def test_a_resource_that_is_not_there_takes_away_all_guarantees_below():
    """6.2: av_r = 0 < tot_r for one r zeroes all resources of all children."""
    result = run(
        strong("top", cpu=80.0, resource_limits=limit(gpu=0.0)),
        strong("a", "top", cpu=60.0),
        strong("b", "top", cpu=1.0),
    )
    assert result.elements["a"].strong_guarantee_share == vector(ZERO)
    assert result.elements["b"].strong_guarantee_share == vector(ZERO)
    assert result.elements["top"].strong_guarantee_share == (0.8, 0.8, 0.0, 0.8, 0.0)


DONOR = {"priority_strong_guarantee_adjustment_donorship": True}
PRIORITY = {"priority_strong_guarantee_adjustment": True}


def tiers(result: UpdateResult, name: str) -> tuple[float, float]:
    element = result.elements[name]
    return element.strong_guarantee_share_priority_tier[1], element.strong_guarantee_share_regular_tier[1]


def test_priority_guarantees_are_kept_first():
    """6.1, 6.2: of 40 the priority pool keeps its 30, the two regular ones share 10 in proportion to 30 and 20."""
    result = run(
        strong("donor", cpu=80.0, resource_limits=limit(cpu=40.0), **DONOR),
        strong("first", "donor", cpu=30.0, **PRIORITY),
        strong("b", "donor", cpu=30.0),
        strong("c", "donor", cpu=20.0),
    )
    assert codes(result) == []
    assert tiers(result, "donor") == (0.0, 0.8)
    assert tiers(result, "first") == near(0.3, 0.0)
    assert tiers(result, "b") == near(0.0, 0.06)
    assert strong_cpu(result, "donor", "first", "b", "c") == near(0.4, 0.3, 0.06, 0.04)


def test_priority_guarantees_that_do_not_fit_leave_nothing_to_regular_ones():
    """6.2: phi for the priority tier, every child's later tiers = 0, stop."""
    result = run(
        strong("donor", cpu=80.0, resource_limits=limit(cpu=20.0), **DONOR),
        strong("first", "donor", cpu=30.0, **PRIORITY),
        strong("second", "donor", cpu=10.0, **PRIORITY),
        strong("c", "donor", cpu=20.0),
    )
    assert strong_cpu(result, "first", "second", "c") == near(0.15, 0.05, 0.0)
    assert tiers(result, "c") == (0.0, 0.0)


# ---- estimated


def test_what_is_not_guaranteed_is_estimated_by_weight():
    """6.3: children get their strong share, then a part of the rest by weight, operations too."""
    result = run(
        strong("top", cpu=60.0),
        strong("a", "top", cpu=20.0, weight=3.0),
        strong("b", "top", cpu=10.0),
        Operation("o", "top", weight=2.0),
    )
    estimated = {name: result.elements[name].estimated_guarantee_share[1] for name in (ROOT, "top", "a", "b", "o")}
    # 60 - 30 are left: 15, 5 and 10
    assert estimated == pytest.approx({ROOT: 0.6, "top": 0.6, "a": 0.35, "b": 0.15, "o": 0.1})
