"""Integral guarantees where the literal update (tests/property) does not decide: clocks and bounds of volumes
(fair_share_update.md 5), rounding (10), pools inside each other (11.1)."""

from typing import Any

import pytest

from cpumond.fairshare import ROOT, IntegralGuarantees, Operation, Options, Pool, Snapshot, UpdateResult, Vector
from cpumond.fairshare import fair_share_update as update
from cpumond.fairshare.resources import ZERO

TOTAL: Vector = (0.0, 100.0, 0.0, 1000.0, 0.0)
PERIOD = 86400.0


def vec(cpu: float = 0.0, memory: float = 0.0) -> Vector:
    return (0.0, cpu, 0.0, memory, 0.0)


def integral(kind: Any, name: str, parent: str = ROOT, /, flow: float = 10.0, burst: float = 0.0, **more: Any) -> Pool:
    volume = more.pop("volume", ZERO)
    guarantees = IntegralGuarantees(kind, vec(flow), vec(burst), accumulated_volume=volume, **more)
    return Pool(name, parent, integral_guarantees=guarantees)


def plain(name: str, parent: str = ROOT, /, **more: Any) -> Pool:
    return integral("none", name, parent, flow=0.0, **more)


def run(*parts: Pool | Operation, seconds: float | None = 0.0, total: Vector = TOTAL, **options: Any) -> UpdateResult:
    """An update ``seconds`` after the previous one, None for the first."""
    pools = tuple(part for part in parts if isinstance(part, Pool))
    operations = tuple(part for part in parts if isinstance(part, Operation))
    tree = Snapshot(total, pools, operations, Options(**options))
    return update(tree, 1000.0, None if seconds is None else 1000.0 - seconds)


def near(*values: float) -> Any:
    return pytest.approx(values, abs=1e-9)


def vector(v: Vector) -> Any:
    return pytest.approx(v, abs=1e-12)


# ---- volumes: refill (5.1)


CAPACITY = vec(10.0 * PERIOD, 100.0 * PERIOD)
ROOM = {"volume": vec(500.0, 7000.0)}
ABOVE = vec(CAPACITY[1] + 1000.0, CAPACITY[3] + 70.0)


@pytest.mark.parametrize(("pool", "clock", "volume", "overflow", "acceptable"), [
    pytest.param(
        {"volume": vec(2e6, 50.0), "last_share_ratio": 0.5}, {"seconds": None},
        vec(2e6, 50.0), ZERO, ZERO, id="no update before",
    ),
    pytest.param(
        {"volume": vec(2e6, 50.0), "last_share_ratio": 0.5}, {"seconds": 60.0, "total": ZERO},
        vec(2e6, 50.0), ZERO, ZERO, id="no cluster",
    ),
    pytest.param(
        {**ROOM, "last_share_ratio": 0.5}, {"seconds": -60.0},
        ROOM["volume"], ZERO, vec(CAPACITY[1] - 500.0, CAPACITY[3] - 7000.0), id="time runs backwards",
    ),
    pytest.param({"volume": ABOVE}, {"seconds": 60.0}, ABOVE, vec(600.0, 6000.0), ZERO, id="above the capacity"),
])  # fmt: skip
def test_a_volume_after_a_refill(pool, clock, volume, overflow, acceptable):
    """5.1: old + T * dt * (flow_ratio - last_share_ratio), between 0 and max(old, T * flow_ratio * saturation)."""
    element = run(integral("burst", "a", **pool), **clock).elements["a"]
    assert (element.accumulated_volume, element.volume_overflow) == (volume, overflow)
    assert element.acceptable_volume == acceptable


@pytest.mark.parametrize(("seconds", "microseconds"), [(4e-7, 0), (6e-7, 1), (1.4e-6, 1), (2.6e-6, 3)])
def test_times_are_whole_microseconds(seconds, microseconds):
    """17: both times are rounded, then subtracted."""
    tree = Snapshot(TOTAL, (integral("burst", "a", volume=vec(0.0, 100.0)),))
    element = update(tree, seconds, 0.0).elements["a"]
    assert element.accumulated_volume[3] == pytest.approx(100.0 + 100.0 * microseconds / 1e6, rel=1e-15)


# ---- burst pools (10)

AMPLE = vec(100.0 * PERIOD, 1000.0 * PERIOD)
"""A volume that never limits."""


def wants(pool: str, cpu: float = 100.0, memory: float = 0.0, **more: Any) -> Operation:
    return Operation(f"of {pool}", pool, demand=vec(cpu, memory), **more)


GREEDY = [Pool("greedy", weight=1e6), wants("greedy", 100.0, 1000.0)]
"""A heavy neighbour that leaves others nothing but what is guaranteed."""


def test_a_burst_pool_is_bound_by_its_volume():
    """10.1, 5.4: rho = min(burst_ratio, volume / T / smooth period), of the scarcest resource that the cluster has."""
    a = integral("burst", "a", burst=30.0, volume=vec(100.0 * 60.0 * 0.25, 1000.0 * 60.0 * 0.125))
    assert run(a, wants("a"), *GREEDY).elements["a"].last_share_ratio == pytest.approx(0.125)
    longer = run(a, wants("a"), *GREEDY, integral_smooth_period_s=120.0)
    assert longer.elements["a"].last_share_ratio == pytest.approx(0.0625)
    only_cpu = run(a, wants("a"), *GREEDY, total=vec(100.0))
    assert only_cpu.elements["a"].last_share_ratio == pytest.approx(0.25)


# ---- pools inside each other (11.1)


def test_a_burst_pool_inside_another_is_read_from_its_old_function():
    """11.1: the inner function was made with nothing proposed, when the outer pool was served, so B(0) is 0."""
    result = run(
        integral("burst", "outer", burst=50.0, volume=AMPLE),
        integral("burst", "inner", "outer", burst=30.0, volume=AMPLE),
        wants("inner"),
        *GREEDY,
    )
    assert [result.elements[name].last_share_ratio for name in ("outer", "inner")] == near(0.5, 0.0)
    assert result.elements["outer"].proposed_integral_share == vector(vec(0.5))
    assert result.elements["inner"].proposed_integral_share == ZERO


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
    result = run(
        integral("burst", "outer", burst=10.0, volume=AMPLE),
        plain("between", "outer"),
        # What lasts one smooth period for 0.2 of the cluster.
        integral("relaxed", "inner", "between", flow=20.0, volume=vec(100.0 * 60.0 * 0.2, 1000.0 * 60.0 * 0.2)),
        wants("inner", inner),
        wants("between", sibling, gang=gang),
        step_function_for_gang_operations=True,
    )
    assert [result.elements[name].last_share_ratio for name in ("outer", "inner")] == near(0.1, 0.9)
    proposed = [result.elements[name].proposed_integral_share[1] for name in ("outer", "between", "inner", ROOT)]
    assert proposed == near(1.0, 0.9, 0.9, 1.0)
    shares = [result.elements[name].fair_share.total[1] for name in ("between", "of inner", "of between")]
    assert shares == pytest.approx(totals, abs=2e-9)
