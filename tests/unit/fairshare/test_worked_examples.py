"""The worked examples of fair_share_update.md 21, and a few trees whose shares can be reckoned by hand."""

from __future__ import annotations

import math

import pytest

from cpumond.fairshare import (
    ROOT,
    FairShareUpdater,
    IntegralGuarantees,
    Operation,
    Options,
    Pool,
    Snapshot,
    UpdateResult,
    fair_share_update,
)
from cpumond.fairshare.functions import ShareFunction, operation_function
from cpumond.fairshare.paths import weighted_path

TOTAL = (100.0, 100.0, 0.0, 1000.0, 0.0)
"""100 slots, 100 cores, 1000 units of memory."""

Three = tuple[float, float, float]


def vector(slots: float = 0.0, cpu: float = 0.0, memory: float = 0.0):
    return (slots, cpu, 0.0, memory, 0.0)


def demanding(name: str, parent: str, shares: Three, **more) -> Operation:
    """An operation that demands these shares of slots, cpu and memory."""
    slots, cpu, memory = shares
    return Operation(name, parent, demand=vector(slots * 100.0, cpu * 100.0, memory * 1000.0), **more)


def update(pools: list[Pool], operations: list[Operation], options: Options | None = None, **times) -> UpdateResult:
    snapshot = Snapshot(TOTAL, tuple(pools), tuple(operations), options or Options())
    return fair_share_update(snapshot, times.get("now", 60.0), times.get("previous"))


def total(result: UpdateResult, name: str) -> Three:
    a, b, _, c, _ = result.elements[name].fair_share.total
    return pytest.approx((a, b, c), abs=1e-12)


def strong(cpu: float):
    return (None, cpu, None, None, None)


GANGS = Options(step_function_for_gang_operations=True)


def test_one_operation_goes_as_far_as_its_scarcest_resource():
    """Memory demanded four times: a quarter of everything."""
    result = update([], [demanding("o", ROOT, (2.0, 2.0, 4.0))])
    assert total(result, "o") == (0.5, 0.5, 1.0)


def test_two_operations_of_equal_weight_share_by_their_dominant_resources():
    result = update([Pool("p")], [demanding("x", "p", (1.0, 1.0, 2.0)), demanding("y", "p", (1.0, 2.0, 1.0))])
    assert total(result, "x") == (1 / 3, 1 / 3, 2 / 3)
    assert total(result, "y") == (1 / 3, 2 / 3, 1 / 3)
    assert total(result, ROOT) == (2 / 3, 1.0, 1.0)


def test_guarantees_beyond_the_cluster_shrink_by_one_factor():
    pools = [Pool("a", strong_guarantee_resources=strong(30.0)), Pool("b", strong_guarantee_resources=strong(90.0))]
    operations = [demanding("x", "a", (1.0, 1.0, 1.0)), demanding("y", "b", (1.0, 1.0, 1.0))]
    result = update(pools, operations)
    assert [error.code for error in result.errors] == [29000, 29000]
    assert result.elements["a"].strong_guarantee_share[1] == pytest.approx(0.25)
    assert result.elements["b"].strong_guarantee_share[1] == pytest.approx(0.75)


@pytest.mark.parametrize(("improved", "first"), [(False, 0.0), (True, 0.6)])
def test_two_gangs_that_do_not_fit_together(improved, first):
    """In normal mode they jump together and neither fits; in improved mode the first does."""
    options = Options(step_function_for_gang_operations=True, improved_fair_share_by_fit_factor=improved)
    pools = [Pool("a"), Pool("b")]
    result = update(pools, [demanding(f"in_{p.name}", p.name, (0.6, 0.6, 0.6), gang=True) for p in pools], options)
    assert total(result, "in_a") == (first, first, first)
    assert total(result, "in_b") == (0.0, 0.0, 0.0)


def test_a_gang_that_demands_the_whole_cluster_gets_nothing_but_its_guarantee_is_kept():
    whole = update([Pool("p")], [demanding("o", "p", (1.0, 1.0, 1.0), gang=True)], GANGS)
    assert total(whole, "o") == (0.0, 0.0, 0.0)
    guaranteed = Pool("p", strong_guarantee_resources=(40.0, 40.0, None, 400.0, None))
    exact = update([guaranteed], [demanding("o", "p", (0.4, 0.4, 0.4), gang=True)], GANGS)
    assert total(exact, "o") == (0.4, 0.4, 0.4)


def test_a_relaxed_pool_is_granted_what_its_volume_gives_it():
    """Flow and guarantee of 10 cores, a minute from empty: strong, integral and proportional part of 0.1 each."""
    integral = IntegralGuarantees("relaxed", resource_flow=vector(cpu=10.0))
    pool = Pool("p", strong_guarantee_resources=strong(10.0), integral_guarantees=integral)
    result = update([pool], [demanding("o", "p", (0.3, 0.3, 0.3))], previous=0.0)
    share = result.elements["p"].fair_share
    for part in (share.strong_guarantee, share.integral_guarantee, share.weight_proportional):
        assert part == pytest.approx((0.1, 0.1, 0.0, 0.1, 0.0))
    assert result.elements["p"].last_share_ratio == pytest.approx(0.1)
    assert result.elements["p"].accumulated_volume[1] == pytest.approx(600.0)


def test_a_burst_pool_takes_its_burst_guarantee_before_weights_count():
    integral = IntegralGuarantees("burst", vector(cpu=10.0), vector(cpu=50.0), accumulated_volume=(1e6,) * 5)
    pools = [Pool("bursting", weight=1.0, integral_guarantees=integral), Pool("other", weight=9.0)]
    operations = [demanding("x", "bursting", (0.0, 1.0, 0.0)), demanding("y", "other", (0.0, 1.0, 0.0))]
    result = update(pools, operations, previous=0.0)
    assert result.elements["bursting"].fair_share.integral_guarantee[1] == pytest.approx(0.5)
    assert result.elements["bursting"].fair_share.total[1] == pytest.approx(0.55)


def test_a_fifo_pool_serves_by_weight_then_start():
    operations = [
        demanding("late", "p", (0.0, 0.6, 0.0), start_time=2.0),
        demanding("early", "p", (0.0, 0.6, 0.0), start_time=1.0),
        demanding("heavy", "p", (0.0, 0.3, 0.0), start_time=3.0, weight=2.0),
    ]
    result = update([Pool("p", mode="fifo")], operations)
    assert [result.elements[name].fifo_index for name in ("heavy", "early", "late")] == [0, 1, 2]
    got = [result.elements[name].fair_share.total[1] for name in ("heavy", "early", "late")]
    assert got == pytest.approx([0.3, 0.6, 0.1])


def test_an_empty_cluster_and_an_empty_tree_have_no_shares():
    nothing = fair_share_update(Snapshot((0.0,) * 5, (Pool("p"),), ()), 0.0, None)
    assert list(nothing.elements) == [ROOT, "p"]
    assert len(nothing.elements) == 2
    assert nothing.elements[ROOT].fair_share.total == (0.0,) * 5
    assert nothing.errors == ()


def test_a_chain_of_a_thousand_pools_is_transparent():
    chain = [Pool(f"p{n}", f"p{n - 1}" if n else ROOT) for n in range(1000)]
    operations = [demanding("deep", "p999", (0.0, 2.0, 0.0)), demanding("near", ROOT, (0.0, 2.0, 0.0))]
    result = update(chain, operations)
    assert result.elements["deep"].fair_share.total[1] == pytest.approx(0.5)
    assert result.elements["p500"].fair_share.total[1] == pytest.approx(0.5)


def test_five_thousand_operations_in_one_pool_fill_the_cluster():
    """Weights 1 to 5 in turn, all hungry: each gets its part of the sum of weights."""
    operations = [demanding(f"o{n}", "p", (0.0, 0.1, 0.0), weight=float(n % 5 + 1)) for n in range(5000)]
    result = update([Pool("p")], operations)
    assert result.elements[ROOT].fair_share.total[1] == pytest.approx(1.0)
    assert result.elements["o4"].fair_share.total[1] == pytest.approx(5.0 / 15000.0)


def test_a_result_stays_as_it_is_when_the_updater_goes_on():
    updater = FairShareUpdater()
    first = updater.update(Snapshot(TOTAL, (Pool("p"),), (demanding("o", "p", (0.0, 0.5, 0.0)),)), 0.0, None)
    before = {name: first.elements[name] for name in first.elements}
    updater.update(Snapshot(TOTAL, (Pool("p"),), (demanding("o", "p", (0.0, 0.9, 0.0)),)), 1.0, 0.0)
    assert {name: first.elements[name] for name in first.elements} == before


def test_a_rise_shorter_than_rounding_counts_as_a_jump():
    """Scaled by weight, both ends of a steep segment fall on one fit factor: its height is not lost (9.2)."""
    start = 0.3
    end = math.nextafter(start, 1.0)
    factor = next(f for f in (1.0 + n / 7.0 for n in range(1, 1000)) if start / f == end / f)
    flat, top = vector(cpu=start), vector(cpu=end, memory=0.5)
    slopes = [vector(cpu=1.0), vector(cpu=1.0, memory=0.5 / (end - start)), vector()]
    steep = ShareFunction([0.0, start, end], [vector(), flat, top], slopes, vector())
    cut = ShareFunction([0.0, start], [vector(), flat], slopes[:2], vector(), horizon=end)
    other = operation_function(vector(), vector(cpu=0.1), vector(1.0, 1.0, 1.0))
    path = weighted_path([steep, other], [factor, 1.0], 1.0, improved=False)
    assert None in path.slopes
    assert path.values[-1] == pytest.approx(vector(cpu=0.4, memory=0.5))
    unfinished = weighted_path([cut, other], [factor, 1.0], start / factor, improved=False)
    assert None not in unfinished.slopes
    assert unfinished.values[-1] == path.values[: len(unfinished.values)][-1]
