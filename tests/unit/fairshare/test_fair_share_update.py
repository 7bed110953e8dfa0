"""The update as a whole (fair_share_update.md 2): its elements, FIFO order (7), checks (15),
guarantees (4, 6), extremes, the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpumond.fairshare import (
    ROOT,
    ElementShares,
    FairShareUpdater,
    IntegralGuarantees,
    Operation,
    Options,
    Pool,
    Snapshot,
    UpdateResult,
    Vector,
)
from cpumond.fairshare import fair_share_update as update
from cpumond.fairshare.resources import ONE, ZERO
from cpumond.fairshare.result import NO_SHARE

TOTAL: Vector = (100.0, 100.0, 8.0, 1000.0, 0.0)
INF = float("inf")


def cpu(cores: float) -> Vector:
    return (0.0, cores, 0.0, 0.0, 0.0)


def tree(*parts: Pool | Operation, total: Vector = TOTAL, root: Pool | None = None, **options: Any) -> Snapshot:
    pools = tuple(part for part in parts if isinstance(part, Pool))
    operations = tuple(part for part in parts if isinstance(part, Operation))
    return Snapshot(total, pools, operations, Options(**options), root or Pool(ROOT, ""))


def run(*parts: Pool | Operation, total: Vector = TOTAL, root: Pool | None = None, **options: Any) -> UpdateResult:
    return update(tree(*parts, total=total, root=root, **options), 0.0, None)


def codes(result: UpdateResult) -> list[int]:
    return [error.code for error in result.errors]


def got(result: UpdateResult, *names: str) -> Any:
    return pytest.approx([result.elements[name].fair_share.total[1] for name in names], abs=1e-9)


def test_elements_are_a_mapping_in_pre_order():
    """Root, pools in pre-order, operations pool by pool; nothing else."""
    parts = [Pool("a"), Pool("b"), Pool("c", "a"), Operation("y", ROOT), Operation("x", "c"), Operation("z", "b")]
    elements = run(*parts).elements
    assert list(elements) == [ROOT, "a", "c", "b", "y", "x", "z"]
    assert len(elements) == 7
    assert "x" in elements
    assert "other" not in elements
    with pytest.raises(KeyError):
        elements["other"]
    assert all(isinstance(element, ElementShares) for element in elements.values())


# ---- FIFO order (3, 7)


def order(result: UpdateResult, *names: str) -> list[int | None]:
    return [result.elements[name].fifo_index for name in names]


def effective(result: UpdateResult, *names: str) -> list[int | None]:
    return [result.elements[name].effective_fifo_index for name in names]


REORDERING = {"step_function_for_gang_operations": True, "fifo_reordering": True}


def queue(*operations: Operation, strong: float = 50.0) -> UpdateResult:
    """A FIFO pool with these operations, guaranteed some cpu."""
    pool = Pool("a", mode="fifo", strong_guarantee_resources=(0.0, strong, 0.0, 0.0, 0.0), fifo_reordering=True)
    numbered = [replace(operation, start_time=float(n)) for n, operation in enumerate(operations)]
    return run(pool, *numbered, **REORDERING)


def gang(name: str, cores: float) -> Operation:
    return Operation(name, "a", demand=cpu(cores), gang=True)


def single(name: str, cores: float) -> Operation:
    return Operation(name, "a", demand=cpu(cores))


def test_a_gang_that_does_not_fit_the_guarantee_is_deferred():
    """7: of 50, "g" wants 60 and waits; "x" and "h" fit. fifo_index is unchanged."""
    result = queue(gang("g", 60.0), single("x", 20.0), gang("h", 30.0))
    assert order(result, *"gxh") == [0, 1, 2]
    assert effective(result, *"gxh") == [2, 0, 1]
    assert got(result, *"gxh") == [0.0, 0.2, 0.3]


def test_what_exceeds_the_guarantee_by_less_than_eps_fits():
    """7: fits = (strong + E dominates acc + d)."""
    tenths = [gang(f"g{n}", 10.0) for n in range(3)]
    assert 0.1 + 0.1 + 0.1 > 0.3
    result = queue(*tenths, gang("no", 1.0), single("x", 0.0), strong=30.0)
    assert effective(result, "g0", "g1", "g2", "no", "x") == [0, 1, 2, 4, 3]


# ---- checks (15)

PROMISE = {"compute_promised_guarantee_fair_share": True}
PRIORITY = {"priority_strong_guarantee_adjustment": True}
DONOR = {"priority_strong_guarantee_adjustment_donorship": True}


def test_promised_shares_inside_each_other_are_one_error():
    """15: 29001 once, root included, however far above."""
    assert codes(run(Pool("a", **PROMISE), Pool("b", **PROMISE))) == []
    result = run(Pool("a", **PROMISE), Pool("b", "a"), Pool("c", "b", **PROMISE), Pool("d", "c", **PROMISE))
    assert codes(result) == [29001]
    assert codes(run(Pool("a"), Pool("b", "a", **PROMISE), root=Pool(ROOT, "", **PROMISE))) == [29001]


def test_priority_pools_without_a_donor_are_one_error():
    """15: 29002 once; the sentence names one of them."""
    result = run(Pool("a", **PRIORITY), Pool("b", **PRIORITY), Pool("c", "b", **PRIORITY))
    assert codes(result) == [29002]
    assert "'a'" in result.errors[0].message
    assert codes(run(Pool("b"), root=Pool(ROOT, "", **PRIORITY))) == [29002]


def test_a_donor_serves_all_below_until_the_first_priority_pool():
    """15: children get donor(e) or (h and not priority(e))."""
    donor, between = Pool("d", **DONOR), Pool("e", "d")
    assert codes(run(donor, between, Pool("p", "e", **PRIORITY))) == []
    assert codes(run(donor, Pool("p", "d", **PRIORITY), Pool("q", "p", **PRIORITY))) == [29002]
    assert codes(run(donor, Pool("p", "d", **PRIORITY, **DONOR), Pool("q", "p", **PRIORITY))) == []
    assert codes(run(Pool("p", **PRIORITY, **DONOR))) == [29002]
    assert codes(run(Pool("p", **PRIORITY), root=Pool(ROOT, "", **DONOR))) == []


def test_errors_come_in_the_order_of_the_specification():
    """15: 29001, 29002, 29000 flow, 29000 burst; and they stop nothing."""
    integral = IntegralGuarantees("burst", cpu(60.0), cpu(60.0), accumulated_volume=ONE)
    result = run(
        Pool("a", strong_guarantee_resources=(None, 60.0, None, None, None), **PROMISE),
        Pool("b", "a", **PROMISE, **PRIORITY),
        Pool("c", integral_guarantees=integral),
        Operation("x", "b", demand=cpu(80.0)),
    )
    assert codes(result) == [29001, 29002, 29000, 29000]
    assert len({error.message for error in result.errors}) == 4
    assert got(result, "x", ROOT) == [0.8, 0.8]


# ---- strong guarantees (4, 6)


def strong(name: str, parent: str = ROOT, /, cpu: float | None = None, **more: Any) -> Pool:
    """A pool with a guarantee of cpu; everything else is inferred."""
    return Pool(name, parent, strong_guarantee_resources=(None, cpu, None, None, None), **more)


def inferred(result: UpdateResult, name: str) -> Vector:
    return result.elements[name].inferred_strong_guarantee_resources


def strong_cpu(result: UpdateResult, *names: str) -> list[float]:
    return [result.elements[name].strong_guarantee_share[1] for name in names]


def near(*values: float) -> Any:
    return pytest.approx(values, abs=1e-12)


def test_unset_resources_follow_the_main_one():
    """4: the part of the main resource, of everything; an integer is truncated, here 8 * 0.35 gpus."""
    assert inferred(run(strong("a", cpu=35.0)), "a") == (35.0, 35.0, 2.0, 350.0, 0.0)


def test_below_the_first_level_inferred_guarantees_share_what_is_left():
    """4: 900 of 1000 bytes are said, so the two that infer 300 and 200 get 60 and 40 of the 100 that are left."""
    result = run(
        strong("top", cpu=100.0),
        Pool("a", "top", strong_guarantee_resources=(None, 50.0, None, 900.0, None)),
        strong("b", "top", cpu=30.0),
        strong("c", "top", cpu=20.0),
    )
    assert [inferred(result, name)[3] for name in "abc"] == [900.0, 60.0, 40.0]
    assert [inferred(result, name)[0] for name in "abc"] == [50.0, 30.0, 20.0]


def flow(cpu: float, burst: float = 0.0) -> IntegralGuarantees:
    return IntegralGuarantees("burst", (0.0, cpu, 0.0, 0.0, 0.0), (0.0, burst, 0.0, 0.0, 0.0))


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


def test_children_of_one_pool_are_shrunk_by_one_factor_for_all_resources():
    """6.2: memory is short by half, so cpu is halved too."""
    result = run(
        strong("top", cpu=100.0),
        Pool("a", "top", strong_guarantee_resources=(0.0, 30.0, 0.0, 1500.0, None)),
        Pool("b", "top", strong_guarantee_resources=(0.0, 10.0, 0.0, 500.0, None)),
    )
    assert result.elements["a"].strong_guarantee_share == pytest.approx((0.0, 0.15, 0.0, 0.75, 0.0))
    assert result.elements["b"].strong_guarantee_share == pytest.approx((0.0, 0.05, 0.0, 0.25, 0.0))


def tiers(result: UpdateResult, name: str) -> tuple[float, float]:
    element = result.elements[name]
    return element.strong_guarantee_share_priority_tier[1], element.strong_guarantee_share_regular_tier[1]


def test_priority_guarantees_are_kept_first():
    """6.1, 6.2: of 40 the priority pool keeps its 30, the two regular ones share 10 in proportion to 30 and 20."""
    result = run(
        strong("donor", cpu=80.0, resource_limits=(INF, 40.0, INF, INF, INF), **DONOR),
        strong("first", "donor", cpu=30.0, **PRIORITY),
        strong("b", "donor", cpu=30.0),
        strong("c", "donor", cpu=20.0),
    )
    assert codes(result) == []
    assert tiers(result, "donor") == (0.0, 0.8)
    assert tiers(result, "first") == near(0.3, 0.0)
    assert tiers(result, "b") == near(0.0, 0.06)
    assert strong_cpu(result, "donor", "first", "b", "c") == near(0.4, 0.3, 0.06, 0.04)


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


# ---- extremes


def test_a_tree_with_nothing_but_a_root():
    """Phases run on nothing."""
    for total in (TOTAL, ZERO):
        result = update(Snapshot(total), 10.0, 0.0)
        assert list(result.elements) == [ROOT]
        assert result.errors == ()
        assert result.elements[ROOT].fair_share == NO_SHARE


@pytest.mark.parametrize("improved", [False, True])
def test_a_cluster_with_nothing(improved):
    """0: shares of 0 are 0, whatever is demanded, used, limited or guaranteed."""
    integral = IntegralGuarantees("burst", cpu(10.0), cpu(20.0), accumulated_volume=cpu(1e6), last_share_ratio=0.5)
    relaxed = replace(integral, guarantee_type="relaxed")
    result = update(
        tree(
            Pool("a", strong_guarantee_resources=(None, 10.0, None, 5.0, None), integral_guarantees=integral),
            Pool("b", mode="fifo", integral_guarantees=relaxed),
            Operation("x", "a", demand=TOTAL, usage=TOTAL),
            Operation("y", "b", demand=TOTAL, gang=True),
            total=ZERO,
            improved_fair_share_by_fit_factor=improved,
            **REORDERING,
        ),
        10.0,
        0.0,
    )
    for element in result.elements.values():
        assert element.fair_share == NO_SHARE
        assert element.demand_share == element.limits_share == element.strong_guarantee_share == ZERO
        assert element.dominant_resource == "cpu"
    # neither volume flows; the burst pool has been granted nothing, the relaxed one was passed over (10, 11)
    assert [result.elements[name].accumulated_volume for name in "ab"] == [cpu(1e6)] * 2
    assert [result.elements[name].last_share_ratio for name in "ab"] == [0.0, 0.5]
    assert codes(result) == [29000, 29000]


@pytest.mark.parametrize("improved", [False, True])
def test_a_tree_a_thousand_levels_deep(improved):
    """No phase recurses; guarantees and shares get to the bottom."""
    depth = 1000
    pools = [
        Pool(f"p{n}", f"p{n - 1}" if n else ROOT, strong_guarantee_resources=(None, 60.0, None, None, None), **DONOR)
        for n in range(depth)
    ]
    pools[-1] = replace(pools[-1], **PRIORITY, **PROMISE, priority_strong_guarantee_adjustment_donorship=False)
    operations = [Operation("x", "p999", demand=cpu(90.0)), Operation("y", "p500", demand=cpu(90.0))]
    result = run(*pools, *operations, improved_fair_share_by_fit_factor=improved)
    assert codes(result) == []
    assert got(result, ROOT, "p500", "p999", "x", "y") == [1.0, 1.0, 0.8, 0.8, 0.2]
    assert result.elements["x"].estimated_guarantee_share[1] == pytest.approx(0.6)
    assert result.elements["p999"].promised_guarantee_fair_share.total[1] == pytest.approx(0.6)


# ---- updates in a row


def test_a_result_that_is_read_late_is_that_of_its_update():
    """Entries are put together when they are asked for, from what no later update changes."""
    updater = FairShareUpdater()
    first = updater.update(tree(Pool("a"), Operation("x", "a", demand=cpu(40.0))), 0.0, None)
    second = updater.update(tree(Pool("a"), Operation("x", "a", demand=cpu(70.0)), Operation("y", "a")), 10.0, 0.0)
    assert list(first.elements) == [ROOT, "a", "x"]
    assert got(first, "x") == [0.4]
    assert got(second, "x") == [0.7]


def test_operations_that_come_to_another_pool():
    """An operation is known by its name; its pool decides whether it is a gang."""
    updater = FairShareUpdater()
    pools = [
        Pool("a"),
        Pool("b", step_function_for_gang_operations=False),
        Pool("c"),
        Operation("n", "c", demand=cpu(100.0)),
    ]
    moved = Operation("x", "a", demand=cpu(60.0), gang=True)
    for parent, share in (("a", 0.0), ("b", 0.5), ("a", 0.0)):
        result = updater.update(tree(*pools, replace(moved, parent=parent), **REORDERING), 0.0, None)
        assert got(result, "x") == [share]
    # of the same operation in the same place, the pool's flag decides
    without = replace(pools[0], step_function_for_gang_operations=False)
    assert got(updater.update(tree(without, *pools[1:], moved, **REORDERING), 0.0, None), "x") == [0.5]


def test_the_state_of_an_update_is_that_of_the_next():
    """2: nothing but accumulated_volume and last_share_ratio survives; the pool uses up what flowed in (5.1, 10)."""
    integral = IntegralGuarantees("burst", cpu(10.0), cpu(30.0), accumulated_volume=(0.0, 1200.0, 0.0, 0.0, 0.0))
    ratios = []
    for step in range(5):
        snapshot = tree(
            Pool("a", integral_guarantees=integral), Operation("x", "a", demand=cpu(100.0)), total=cpu(100.0)
        )
        element = update(snapshot, 60.0 * step, 60.0 * step - 60.0).elements["a"]
        ratios.append(element.last_share_ratio)
        integral = replace(
            integral, accumulated_volume=element.accumulated_volume, last_share_ratio=element.last_share_ratio
        )
    # 1200 + 600 last for 0.3; then 600 flow in while 1800 are used, so 600 are left, and from then on what flows in
    assert ratios == pytest.approx([0.3, 0.1, 0.1, 0.1, 0.1])
