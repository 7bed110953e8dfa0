"""Integral guarantees: volumes (fair_share_update.md 5), burst pools (10), relaxed pools (11), nested ones (11.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, UpdateResult, Vector
from cpumond.fairshare import fair_share_update as update
from cpumond.fairshare.resources import ZERO

TOTAL: Vector = (0.0, 100.0, 0.0, 1000.0, 0.0)
PERIOD = 86400.0
INF = float("inf")


def vec(cpu: float = 0.0, memory: float = 0.0) -> Vector:
    return (0.0, cpu, 0.0, memory, 0.0)


def limit(cpu: float = INF, memory: float = INF) -> Vector:
    return (INF, cpu, INF, memory, INF)


def integral(
    kind: Any,
    name: str,
    parent: str = ROOT,
    /,
    flow: float = 10.0,
    burst: float = 0.0,
    volume: Vector = ZERO,
    **more: Any,
) -> Pool:
    """A pool with an integral guarantee in cores of cpu; of ``more`` what a pool has is the pool's."""
    ours = {key: more.pop(key) for key in list(more) if key not in IntegralGuarantees.__dataclass_fields__}
    guarantees = IntegralGuarantees(kind, vec(flow), vec(burst), accumulated_volume=volume, **more)
    return Pool(name, parent, integral_guarantees=guarantees, **ours)


def plain(name: str, parent: str = ROOT, /, **more: Any) -> Pool:
    """A pool without integral guarantee."""
    return integral("none", name, parent, flow=0.0, **more)


def run(
    *parts: Pool | Operation,
    seconds: float | None = 0.0,
    total: Vector = TOTAL,
    root: Pool | None = None,
    now: float = 1000.0,
    **options: Any,
) -> UpdateResult:
    """An update ``seconds`` after the previous one, None for the first."""
    pools = tuple(part for part in parts if isinstance(part, Pool))
    operations = tuple(part for part in parts if isinstance(part, Operation))
    tree = Snapshot(total, pools, operations, Options(**options), root or Pool(ROOT, ""))
    return update(tree, now, None if seconds is None else now - seconds)


def near(*values: float) -> Any:
    return pytest.approx(values, abs=1e-9)


def vector(v: Vector) -> Any:
    return pytest.approx(v, abs=1e-12)


# ---- volumes: refill (5.1)


def refilled(volume: Vector, seconds: float | None, total: Vector = TOTAL, flow: float = 10.0, **more: Any) -> Any:
    return run(integral("burst", "a", flow=flow, volume=volume, **more), seconds=seconds, total=total).elements["a"]


CAPACITY = vec(10.0 * PERIOD, 100.0 * PERIOD)


def test_a_volume_grows_by_the_flow_in_all_resources():
    """5.1: T * dt * flow_ratio; the ratio is the greatest of what is guaranteed, here of cpu."""
    element = refilled(vec(500.0, 7000.0), 60.0)
    assert element.resource_flow_ratio == 0.1
    assert element.accumulated_volume == vec(500.0 + 600.0, 7000.0 + 6000.0)
    assert element.volume_overflow == ZERO
    assert element.acceptable_volume == vec(10.0 * PERIOD - 1100.0, 100.0 * PERIOD - 13000.0)


def test_a_volume_shrinks_by_what_the_last_update_granted():
    """5.1: T * dt * last_share_ratio, but never below 0."""
    assert refilled(vec(5000.0, 5000.0), 60.0, last_share_ratio=0.25).accumulated_volume == vec(4100.0, 0.0)


def test_without_a_previous_update_nothing_happens_to_volumes():
    """5.1: skipped, with overflow = acceptable = 0; last_share_ratio does not matter."""
    element = refilled(vec(2e6, 50.0), None, last_share_ratio=0.5)
    assert element.accumulated_volume == vec(2e6, 50.0)
    assert element.volume_overflow == element.acceptable_volume == ZERO


def test_in_an_empty_cluster_nothing_happens_to_volumes():
    """5.1: skipped if T is zero in every resource."""
    element = refilled(vec(2e6, 50.0), 60.0, total=ZERO, last_share_ratio=0.5)
    assert element.accumulated_volume == vec(2e6, 50.0)
    assert element.volume_overflow == element.acceptable_volume == ZERO


def test_time_that_runs_backwards_is_no_time():
    """5.1: dt = max(now - previous, 0); what can be accepted is still reckoned."""
    element = refilled(vec(500.0, 7000.0), -60.0, last_share_ratio=0.5)
    assert element.accumulated_volume == vec(500.0, 7000.0)
    assert element.acceptable_volume == vec(10.0 * PERIOD - 500.0, 100.0 * PERIOD - 7000.0)


@pytest.mark.parametrize(("seconds", "microseconds"), [(4e-7, 0), (6e-7, 1), (1.4e-6, 1), (2.6e-6, 3)])
def test_times_are_whole_microseconds(seconds, microseconds):
    """17: both times are rounded, then subtracted."""
    tree = Snapshot(TOTAL, (integral("burst", "a", volume=vec(0.0, 100.0)),))
    element = update(tree, seconds, 0.0).elements["a"]
    assert element.accumulated_volume[3] == pytest.approx(100.0 + 100.0 * microseconds / 1e6, rel=1e-15)


def test_a_full_volume_overflows():
    """5.1: capacity = T * flow_ratio * saturation period; what exceeds it is the overflow."""
    element = refilled(vec(CAPACITY[1] - 100.0, CAPACITY[3] - 7000.0), 60.0)
    assert element.accumulated_volume == vec(CAPACITY[1], CAPACITY[3] - 1000.0)
    assert element.volume_overflow == vec(500.0, 0.0)
    assert element.acceptable_volume == vec(0.0, 1000.0)


def test_a_volume_above_the_capacity_is_kept_but_cannot_grow():
    """5.1: upper = max(old, capacity)."""
    above = vec(CAPACITY[1] + 1000.0, CAPACITY[3] + 70.0)
    element = refilled(above, 60.0)
    assert element.accumulated_volume == above
    assert element.volume_overflow == vec(600.0, 6000.0)
    assert element.acceptable_volume == ZERO
    # what is used of it is lost: 0.1 flows in, 0.2 was granted
    element = refilled(above, 60.0, last_share_ratio=0.2)
    assert element.accumulated_volume == vec(CAPACITY[1] + 400.0, CAPACITY[3] - 5930.0)
    assert element.volume_overflow == ZERO
    assert element.acceptable_volume == vec(0.0, 5930.0)


def test_who_must_not_accept_free_volume_has_nothing_acceptable():
    """5.1: acceptable_volume = 0 unless can_accept_free_volume."""
    assert refilled(ZERO, 60.0, can_accept_free_volume=False).acceptable_volume == ZERO


def test_the_saturation_period_is_an_option():
    """5.1: capacity_saturation_period."""
    pool = integral("relaxed", "a", volume=vec(90.0))
    element = run(pool, seconds=60.0, integral_pool_capacity_saturation_period_s=10.0).elements["a"]
    assert element.accumulated_volume == vec(100.0, 1000.0)


def test_the_capacity_is_of_whole_units_the_flow_is_not():
    """17: of 3 gpus at 0.4 the capacity counts 1; in a second 1.2 flow in. Of 8 bytes at 0.4 it counts 3."""
    total = (0.0, 100.0, 3.0, 8.0, 0.0)
    element = refilled(ZERO, 1.0, total=total, flow=40.0)
    assert element.accumulated_volume == vector((0.0, 40.0, 1.2, 3.2, 0.0))
    assert element.acceptable_volume == vector((0.0, 40.0 * PERIOD - 40.0, PERIOD - 1.2, 3.0 * PERIOD - 3.2, 0.0))


def test_cpu_volume_is_rounded_after_each_multiplication():
    """17: 33.33 cores for 0.1 s are 3.33 of volume, a twentieth of that is 0.17; memory is not rounded."""
    total = vec(33.33, 33.0)
    element = run(integral("burst", "a", flow=33.33 / 20.0), total=total, seconds=0.1).elements["a"]
    assert element.accumulated_volume[1] == 0.17
    assert element.accumulated_volume[3] == pytest.approx(0.165, rel=1e-12)


def test_only_pools_with_an_integral_guarantee_have_flows():
    """3: both ratios are 0 if the type is none, whatever is configured; totals are own and below."""
    result = run(
        integral("none", "top", flow=50.0, burst=50.0),
        integral("burst", "a", "top", flow=10.0, burst=20.0),
        integral("relaxed", "b", "top", flow=5.0),
    )
    top, root = result.elements["top"], result.elements[ROOT]
    assert (top.resource_flow_ratio, top.burst_ratio) == (0.0, 0.0)
    assert (top.total_resource_flow_ratio, root.total_resource_flow_ratio) == near(0.15, 0.15)
    assert (top.total_burst_ratio, root.total_burst_ratio) == near(0.2, 0.2)
    assert top.accumulated_volume == ZERO


# ---- volumes: overflow up (5.2)

FULL = vec(CAPACITY[1], CAPACITY[3])


def short_of(cpu: float, memory: float = 0.0) -> Vector:
    """A volume that lacks so much after a second's flow."""
    return vec(CAPACITY[1] - 10.0 - cpu, CAPACITY[3] - 100.0 - memory)


def test_overflow_that_no_sibling_can_take_goes_up():
    """5.2: per resource the surplus of overflow over what is acceptable, one or the other."""
    result = run(
        plain("top"),
        integral("burst", "full", "top", volume=FULL),
        integral("relaxed", "hungry", "top", volume=short_of(4.0, 300.0)),
        seconds=1.0,
    )
    top, root = result.elements["top"], result.elements[ROOT]
    assert result.elements["full"].volume_overflow == vec(10.0, 100.0)
    assert result.elements["hungry"].acceptable_volume == vec(4.0, 300.0)
    assert (top.children_volume_overflow, top.volume_overflow, top.acceptable_volume) == (
        vec(10.0, 100.0), vec(6.0, 0.0), vec(0.0, 200.0),
    )  # fmt: skip
    # and once more on the level above
    assert (root.children_volume_overflow, root.volume_overflow, root.acceptable_volume) == (
        vec(6.0, 0.0), vec(6.0, 0.0), vec(0.0, 200.0),
    )  # fmt: skip


def test_a_pool_that_must_not_accept_passes_no_hunger_up():
    """5.2: acceptable = -d only if can_accept_free_volume."""
    result = run(
        plain("top", can_accept_free_volume=False), integral("burst", "a", "top", volume=short_of(4.0)), seconds=1.0
    )
    assert result.elements["a"].acceptable_volume == vec(4.0, 0.0)
    assert result.elements["top"].acceptable_volume == ZERO


def test_below_an_integral_pool_no_volume_flows():
    """5.2: a pool with type != none is a leaf here."""
    result = run(
        integral("burst", "outer", flow=20.0),
        plain("between", "outer"),
        integral("burst", "inner", "between", volume=FULL),
        seconds=1.0,
    )
    assert result.elements["inner"].volume_overflow == vec(10.0, 100.0)
    assert result.elements["between"].children_volume_overflow == ZERO
    assert result.elements["outer"].volume_overflow == ZERO


def test_without_a_previous_update_no_volume_flows():
    """5.2: this part runs even then, with nothing to pass on."""
    result = run(plain("top"), integral("burst", "a", "top", volume=vec(2.0 * CAPACITY[1])), seconds=None)
    for name in ("a", "top", ROOT):
        element = result.elements[name]
        assert element.volume_overflow == element.acceptable_volume == element.children_volume_overflow == ZERO


# ---- volumes: free volume down (5.3)

DISTRIBUTE = {"should_distribute_free_volume_among_children": True}


def sharing_root() -> Pool:
    return Pool(ROOT, "", integral_guarantees=IntegralGuarantees(**DISTRIBUTE))


def accepted(result: UpdateResult, *names: str) -> list[tuple[float, float]]:
    volumes = [result.elements[name].accepted_free_volume for name in names]
    return [(volume[1], round(volume[3], 9)) for volume in volumes]


def test_free_volume_is_walked_through_in_the_order_of_hunger():
    """5.3: "a" is filled with 1; of the remaining 9 "b" and "c" get equal parts, which do not fill them."""
    result = run(
        integral("burst", "full", volume=FULL),
        integral("burst", "c", volume=short_of(50.0, 10.0)),
        integral("relaxed", "b", volume=short_of(40.0, 20.0)),
        integral("burst", "a", volume=short_of(1.0, 200.0)),
        seconds=1.0,
        root=sharing_root(),
    )
    assert accepted(result, "full", "a", "b", "c") == [(0.0, 0.0), (1.0, 70.0), (4.5, 20.0), (4.5, 10.0)]
    assert result.elements["a"].accumulated_volume == vec(CAPACITY[1], CAPACITY[3] - 130.0)
    assert result.elements["full"].accumulated_volume == FULL


def test_free_volume_is_shared_in_proportion_to_flow():
    """5.3: weight = total_flow_ratio; who overflows in a resource is not hungry for it."""
    result = run(
        integral("burst", "full", volume=FULL),
        integral("burst", "slow", flow=10.0),
        integral("burst", "fast", flow=30.0),
        seconds=1.0,
        root=sharing_root(),
    )
    assert accepted(result, "slow", "fast") == [(2.5, 25.0), (7.5, 75.0)]


def test_who_can_take_exactly_its_part_is_filled():
    """5.3: the walk stops only if s < acceptable; the last one walked gets no more than it can take."""
    result = run(
        integral("burst", "full", volume=FULL),
        integral("burst", "a", volume=short_of(5.0, 50.0)),
        integral("burst", "b", volume=short_of(2.0, 60.0)),
        seconds=1.0,
        root=sharing_root(),
    )
    assert accepted(result, "a", "b") == [(5.0, 50.0), (2.0, 50.0)]


def test_parts_of_cpu_volume_are_rounded():
    """17: a third of 10.00 is 3.33 for each; of memory it is a third."""
    hungry = [integral("burst", name, volume=short_of(100.0, 900.0)) for name in "abc"]
    result = run(integral("burst", "full", volume=FULL), *hungry, seconds=1.0, root=sharing_root())
    assert accepted(result, *"abc") == [(3.33, pytest.approx(100.0 / 3.0))] * 3


def test_free_volume_without_anybody_who_distributes_it_is_lost():
    """5.3: accepted_free_volume = 0 for all; the root's overflow shows what is lost."""
    result = run(integral("burst", "full", volume=FULL), integral("burst", "a"), seconds=1.0)
    assert accepted(result, "full", "a") == [(0.0, 0.0)] * 2
    assert result.elements[ROOT].children_volume_overflow == vec(10.0, 100.0)


def test_a_pool_distributes_what_it_accepts_and_what_its_children_overflow():
    """5.3: level by level; a pool that is not told to keeps nothing and passes nothing on."""
    result = run(
        integral("burst", "full", volume=FULL),
        plain("giving", **DISTRIBUTE),
        integral("burst", "spills", "giving", volume=vec(CAPACITY[1] - 6.0, 0.0)),
        integral("burst", "thirsty", "giving", volume=short_of(100.0, 0.0)),
        plain("mute"),
        integral("burst", "left", "mute"),
        seconds=1.0,
        root=sharing_root(),
    )
    # 10 overflow at the top: 96 fit below "giving" (100 less 4 that overflow there) at a flow of 20, all below "mute"
    assert accepted(result, "giving", "mute") == [
        (6.67, pytest.approx(200.0 / 3.0)),
        (3.33, pytest.approx(100.0 / 3.0)),
    ]
    assert result.elements["giving"].children_volume_overflow == vec(4.0)
    assert accepted(result, "spills", "thirsty") == [(0.0, pytest.approx(200.0 / 3.0)), (10.67, 0.0)]
    assert accepted(result, "left") == [(0.0, 0.0)]


def test_a_pool_distributes_although_those_above_do_not():
    """5.3: distributing or not, recurse into all children."""
    result = run(
        plain("top"),
        plain("giving", "top", **DISTRIBUTE),
        integral("burst", "full", "giving", volume=FULL),
        integral("burst", "hungry", "giving"),
        seconds=1.0,
    )
    assert accepted(result, "top", "giving", "hungry") == [(0.0, 0.0), (0.0, 0.0), (10.0, 100.0)]


def test_nothing_is_distributed_where_nothing_overflows():
    """5.3: only if something is free in some resource."""
    result = run(integral("burst", "a"), integral("burst", "b"), seconds=1.0, root=sharing_root())
    assert accepted(result, "a", "b") == [(0.0, 0.0)] * 2


def test_a_child_of_next_to_no_flow_is_not_hungry():
    """5.3: total_flow_ratio > eps; its capacity is of some bytes all the same."""
    total = (0.0, 100.0, 0.0, 1e15, 0.0)
    tiny = IntegralGuarantees("burst", (0.0, 0.0, 0.0, 1e5, 0.0))
    full = integral("burst", "full", volume=vec(CAPACITY[1], 1e14 * PERIOD))
    result = run(full, Pool("tiny", integral_guarantees=tiny), seconds=1.0, total=total, root=sharing_root())
    assert result.elements["tiny"].acceptable_volume[3] == pytest.approx(1e5 * PERIOD, rel=1e-4)
    assert accepted(result, "tiny") == [(0.0, 0.0)]


# ---- burst pools (10)

AMPLE = vec(100.0 * PERIOD, 1000.0 * PERIOD)
"""A volume that never limits."""


def wants(pool: str, cpu: float = 100.0, memory: float = 0.0, **more: Any) -> Operation:
    return Operation(f"of {pool}", pool, demand=vec(cpu, memory), **more)


def greedy() -> list[Pool | Operation]:
    """A heavy neighbour that leaves others nothing but what is guaranteed."""
    return [Pool("greedy", weight=1e6), wants("greedy", 100.0, 1000.0)]


def cpu_parts(result: UpdateResult, name: str) -> Any:
    fair = result.elements[name].fair_share
    return fair.strong_guarantee[1], fair.integral_guarantee[1], fair.weight_proportional[1]


def test_a_burst_pool_gets_its_burst_guarantee():
    """10: proposed 0.3 on top of strong 0.1; last_share_ratio is what was granted."""
    pool = integral(
        "burst", "a", burst=30.0, volume=AMPLE, strong_guarantee_resources=(None, 10.0, None, 0.0, None), weight=1e-6
    )
    result = run(pool, wants("a"), *greedy())
    assert cpu_parts(result, "a") == near(0.1, 0.3, 6e-13)
    assert result.elements["a"].last_share_ratio == pytest.approx(0.3)
    assert result.elements["a"].proposed_integral_share == vector(vec(0.3))
    assert result.elements[ROOT].proposed_integral_share == vector(vec(0.3))
    assert cpu_parts(result, ROOT) == near(0.1, 0.3, 0.6)


def test_a_burst_pool_gets_no_more_than_it_demands():
    """10.5: delta = max(B(0) - strong, 0)."""
    result = run(integral("burst", "a", burst=30.0, volume=AMPLE), wants("a", 20.0, 50.0))
    assert result.elements["a"].proposed_integral_share == vector(vec(0.2, 0.05))
    assert result.elements["a"].last_share_ratio == pytest.approx(0.2)
    idle = run(integral("burst", "a", burst=30.0, volume=AMPLE, last_share_ratio=0.5))
    assert idle.elements["a"].last_share_ratio == 0.0


def test_a_burst_pool_is_bound_by_its_volume():
    """10.1, 5.4: rho = min(burst_ratio, volume / T / smooth period), of the scarcest resource that the cluster has."""
    a = integral("burst", "a", burst=30.0, volume=vec(100.0 * 60.0 * 0.25, 1000.0 * 60.0 * 0.125))
    assert run(a, wants("a"), *greedy()).elements["a"].last_share_ratio == pytest.approx(0.125)
    longer = run(a, wants("a"), *greedy(), integral_smooth_period_s=120.0)
    assert longer.elements["a"].last_share_ratio == pytest.approx(0.0625)
    only_cpu = run(a, wants("a"), *greedy(), total=vec(100.0))
    assert only_cpu.elements["a"].last_share_ratio == pytest.approx(0.25)


def test_the_volume_counts_as_it_is_after_refill_and_free_volume():
    """5.4: V as left by 5.3; without any it is the flow of the time since the last update."""
    result = run(integral("burst", "a", burst=30.0), wants("a"), *greedy(), seconds=60.0)
    assert result.elements["a"].last_share_ratio == pytest.approx(0.1)


def test_burst_pools_are_bound_by_limits_above_them_in_their_order():
    """10.2: limits - strong - proposed of the pool and all above it; the first takes 0.3, the second what is left."""
    result = run(
        plain("top", resource_limits=limit(cpu=50.0), strong_guarantee_resources=(None, 10.0, None, 0.0, None)),
        plain("between", "top"),
        integral("burst", "first", "between", burst=30.0, volume=AMPLE),
        integral("burst", "second", "top", burst=30.0, volume=AMPLE),
        wants("first"),
        wants("second"),
    )
    granted = [result.elements[name].proposed_integral_share[1] for name in ("first", "between", "second", "top", ROOT)]
    assert granted == near(0.3, 0.3, 0.1, 0.4, 0.4)
    assert cpu_parts(result, "top") == near(0.1, 0.4, 0.0)


def test_a_burst_pool_without_room_gets_nothing():
    """10.2: avail = 0 where the strong share fills the limit."""
    result = run(
        integral(
            "burst", "a", burst=30.0, volume=AMPLE,
            resource_limits=limit(cpu=20.0), strong_guarantee_resources=(None, 20.0, None, 0.0, None),
        ),
        wants("a"),
    )  # fmt: skip
    assert cpu_parts(result, "a") == near(0.2, 0.0, 0.0)
    assert result.elements["a"].last_share_ratio == 0.0


def test_what_exceeds_the_limits_by_rounding_is_replaced_in_all_resources():
    """10.3, 19: 0.03 + (0.29 - 0.03) > 0.29 in doubles, so proposed is limits - strong, in memory too."""
    assert 0.03 + (0.29 - 0.03) > 0.29
    pool = integral(
        "burst", "a", burst=60.0, volume=AMPLE, mode="fifo",
        resource_limits=limit(cpu=29.0), strong_guarantee_resources=(None, 3.0, None, 0.0, None),
    )  # fmt: skip
    result = run(
        pool, Operation("m", "a", demand=vec(memory=1000.0)), Operation("c", "a", demand=vec(100.0), start_time=1)
    )
    element = result.elements["a"]
    assert element.proposed_integral_share == vector(vec(0.26, 1.0))
    assert 0.03 + element.proposed_integral_share[1] <= 0.29
    assert element.last_share_ratio == 1.0
    # without the excess the volume's 0.6 of memory would be all, and "c" would wait behind it
    exact = replace(pool, resource_limits=limit(cpu=28.0))
    result = run(
        exact, Operation("m", "a", demand=vec(memory=1000.0)), Operation("c", "a", demand=vec(100.0), start_time=1)
    )
    assert result.elements["a"].proposed_integral_share == vector(
        vec(0.0, 0.6 if 0.03 + (0.28 - 0.03) <= 0.28 else 1.0)
    )


def test_scaled_burst_guarantees_are_what_is_granted():
    """6, 10.1: strong 0.6 and burst 0.6 overcommit, both become 0.5."""
    result = run(
        Pool("s", strong_guarantee_resources=(None, 60.0, None, 0.0, None)),
        integral("burst", "a", burst=60.0, volume=AMPLE),
        wants("s"),
        wants("a"),
    )
    assert cpu_parts(result, "s") == near(0.5, 0.0, 0.0)
    assert cpu_parts(result, "a") == near(0.0, 0.5, 0.0)
    assert result.elements["a"].last_share_ratio == pytest.approx(0.5)


# ---- relaxed pools (11)


def test_a_relaxed_pool_gets_what_flows_in():
    """21: strong 0.1, of the volume that came in 60 s another 0.1, and 0.1 by weight."""
    pool = integral("relaxed", "a", strong_guarantee_resources=(None, 10.0, None, None, None))
    result = run(pool, wants("a", 30.0), seconds=60.0)
    assert result.elements["a"].accumulated_volume == vec(600.0, 6000.0)
    assert cpu_parts(result, "a") == near(0.1, 0.1, 0.1)
    assert result.elements["a"].last_share_ratio == pytest.approx(0.1)
    assert result.elements["a"].limits_share == vec(1.0, 1.0)


def volume_for(ratio: float) -> Vector:
    return vec(100.0 * 60.0 * ratio, 1000.0 * 60.0 * ratio)


def test_relaxed_pools_share_what_is_free_in_proportion_to_their_volumes():
    """11: 0.6 are free; with volumes for 0.3 and 0.9 (of which three times the flow is 0.6), 0.15 and 0.45."""
    result = run(
        Pool("s", strong_guarantee_resources=(None, 40.0, None, 0.0, None)),
        integral("relaxed", "a", flow=20.0, volume=volume_for(0.3)),
        integral("relaxed", "b", flow=20.0, volume=volume_for(0.9)),
        *(wants(name) for name in ("s", "a", "b")),
    )
    assert [cpu_parts(result, name)[1] for name in ("s", "a", "b")] == near(0.0, 0.15, 0.45)
    assert [result.elements[name].last_share_ratio for name in "ab"] == near(0.15, 0.45)
    assert result.elements[ROOT].proposed_integral_share == vector(vec(0.6))


def test_what_others_do_not_demand_is_free():
    """11: free = 1 - sum of min(strong + proposed, demand) of the first level."""
    result = run(
        Pool("s", strong_guarantee_resources=(None, 40.0, None, 0.0, None)),
        integral("relaxed", "a", flow=30.0, volume=volume_for(1.0)),
        wants("s", 10.0),
        wants("a"),
    )
    assert cpu_parts(result, "a")[1] == pytest.approx(0.9)


@pytest.mark.parametrize(("multiplier", "granted"), [(1.0, 0.2), (2.0, 0.4), (3.0, 0.6)])
def test_a_relaxed_pool_gets_a_multiple_of_its_flow_at_most(multiplier, granted):
    """11: limits for a time: strong + min(rho, multiplier * flow_ratio)."""
    pool = integral("relaxed", "a", flow=20.0, volume=volume_for(1.0), relaxed_share_multiplier_limit=multiplier)
    result = run(pool, wants("a"))
    assert cpu_parts(result, "a") == near(0.0, granted, 1.0 - granted)


def test_burst_pools_come_first():
    """11: free is reckoned after all burst pools, wherever they are in the tree."""
    result = run(
        integral("relaxed", "a", flow=30.0, volume=volume_for(1.0)),
        plain("top"),
        integral("burst", "b", "top", burst=70.0, volume=AMPLE),
        wants("a"),
        wants("b"),
    )
    assert [cpu_parts(result, name)[1] for name in "ab"] == near(0.3, 0.7)


def test_a_relaxed_pool_without_volume_is_passed_over():
    """11: its last_share_ratio keeps the old value; the others share as if it were not there."""
    empty = integral("relaxed", "empty", last_share_ratio=0.7)
    result = run(empty, integral("relaxed", "a", flow=20.0, volume=volume_for(0.5)), wants("empty"), wants("a"))
    assert [result.elements[name].last_share_ratio for name in ("empty", "a")] == near(0.7, 0.5)
    assert result.elements["empty"].proposed_integral_share == ZERO
    alone = run(empty, wants("empty"))
    assert alone.elements["empty"].last_share_ratio == 0.7


def test_relaxed_pools_get_nothing_where_nothing_is_free():
    """11: strong guarantees that are all demanded leave 0."""
    result = run(
        Pool("s", strong_guarantee_resources=(None, 100.0, None, None, None)),
        integral("relaxed", "a", volume=volume_for(1.0)),
        wants("s", 100.0, 1000.0),
        wants("a"),
    )
    assert cpu_parts(result, "a") == near(0.0, 0.0, 0.0)
    assert result.elements["a"].last_share_ratio == pytest.approx(0.0, abs=1e-12)


def test_relaxed_pools_are_bound_by_limits_above_them_in_their_order():
    """11: avail with what earlier pools added to common ancestors; phi does not know of it."""
    result = run(
        plain("top", resource_limits=limit(cpu=50.0)),
        integral("relaxed", "a", "top", flow=20.0, volume=volume_for(0.4)),
        integral("relaxed", "b", "top", flow=20.0, volume=volume_for(0.4)),
        wants("a"),
        wants("b"),
    )
    assert [result.elements[name].proposed_integral_share[1] for name in ("a", "b", "top")] == near(0.4, 0.1, 0.5)
    assert [result.elements[name].last_share_ratio for name in "ab"] == near(0.4, 0.1)


def test_a_gang_in_a_relaxed_pool_gets_all_or_nothing_of_the_volume():
    """11, 9.1: B of the pool within its temporary limits; a gang beyond them is left to the distribution by weight."""
    gang = wants("a", 30.0, gang=True)
    for ratio, granted in ((0.3, 0.3), (0.29, 0.0)):
        pool = integral("relaxed", "a", flow=20.0, volume=volume_for(ratio))
        result = run(pool, gang, step_function_for_gang_operations=True)
        assert cpu_parts(result, "a") == near(0.0, granted, 0.3 - granted)


def test_the_root_has_no_integral_guarantee():
    """1: its type is none; flow and burst of the root count as 0."""
    root = replace(integral("burst", ROOT, "", flow=50.0, burst=50.0, volume=vec(5.0)))
    result = run(Pool("a"), integral("burst", "b"), root=root, seconds=1.0)
    element = result.elements[ROOT]
    assert (element.burst_ratio, element.resource_flow_ratio) == (0.0, 0.0)
    assert element.total_resource_flow_ratio == 0.1
    assert element.accumulated_volume == vec(5.0)


# ---- pools inside each other (11.1)


def test_a_burst_pool_inside_another_is_read_from_its_old_function():
    """11.1: the inner function was made with nothing proposed, when the outer pool was served, so B(0) is 0."""
    result = run(
        integral("burst", "outer", burst=50.0, volume=AMPLE),
        integral("burst", "inner", "outer", burst=30.0, volume=AMPLE),
        wants("inner"),
        *greedy(),
    )
    assert [result.elements[name].last_share_ratio for name in ("outer", "inner")] == near(0.5, 0.0)
    assert result.elements["outer"].proposed_integral_share == vector(vec(0.5))
    assert result.elements["inner"].proposed_integral_share == ZERO


def inner_below_outer(inner: float, sibling: float, *, gang: bool = False, **options: Any) -> UpdateResult:
    """A relaxed pool below a burst pool, with a pool between them that also has an operation."""
    return run(
        integral("burst", "outer", burst=10.0, volume=AMPLE),
        plain("between", "outer"),
        integral("relaxed", "inner", "between", flow=20.0, volume=volume_for(0.2)),
        wants("inner", inner),
        wants("between", sibling, gang=gang),
        step_function_for_gang_operations=True,
        **options,
    )


@pytest.mark.parametrize(
    ("inner", "sibling", "gang", "totals"),
    [(100.0, 100.0, False, (1.0, 0.95, 0.05)), (95.0, 30.0, True, (1.0, 0.95, 0.0))],
)
def test_a_relaxed_pool_inside_a_burst_pool(inner, sibling, gang, totals):
    """11.1: the pool between them keeps the function that was made of the inner pool's old one.

    "outer" is granted 0.1. "inner" takes what is free, 0.9, within its full limits although its volume is for 0.2, and
    "between" has it proposed too; but B(s) of "between" is as before. Its children have 1 to share: 0.9 is free for
    "inner" now, and the rest is shared evenly, or left over before the jump of a gang (12.1).
    """
    result = inner_below_outer(inner, sibling, gang=gang)
    assert [result.elements[name].last_share_ratio for name in ("outer", "inner")] == near(0.1, 0.9)
    proposed = [result.elements[name].proposed_integral_share[1] for name in ("outer", "between", "inner", ROOT)]
    assert proposed == near(1.0, 0.9, 0.9, 1.0)
    shares = [result.elements[name].fair_share.total[1] for name in ("between", "of inner", "of between")]
    assert shares == pytest.approx(totals, abs=2e-9)


@pytest.mark.parametrize("improved", [False, True])
def test_pools_inside_each_other_get_their_demand_where_it_fits(improved):
    """11.1: whatever the function between was made of."""
    result = inner_below_outer(60.0, 30.0, improved_fair_share_by_fit_factor=improved)
    assert [result.elements[name].last_share_ratio for name in ("outer", "inner")] == near(0.1, 0.6)
    shares = [result.elements[name].fair_share.total[1] for name in (ROOT, "between", "of inner", "of between")]
    assert shares == near(0.9, 0.9, 0.6, 0.3)


def test_a_pool_with_nothing_inside_nested_integral_pools():
    """9.2, 11.1: A is 0; its siblings are served as ever."""
    result = run(
        integral("burst", "outer", burst=50.0, volume=AMPLE),
        integral("relaxed", "inner", "outer", volume=volume_for(0.5)),
        plain("idle", "outer"),
        wants("outer"),
    )
    assert [result.elements[name].last_share_ratio for name in ("outer", "inner")] == near(0.5, 0.0)
    assert cpu_parts(result, "outer") == near(0.0, 0.5, 0.5)
