"""The update as a whole (fair_share_update.md 2), where the literal one (tests/property) does not decide: its elements,
rounding in FIFO order (7) and guarantees (4, 6), the words of checks (15), extremes."""

from dataclasses import replace
from typing import Any

import pytest

from cpumond.fairshare import (
    ROOT,
    ElementShares,
    IntegralGuarantees,
    Operation,
    Options,
    Pool,
    Snapshot,
    UpdateResult,
    Vector,
)
from cpumond.fairshare import fair_share_update as update

TOTAL: Vector = (100.0, 100.0, 8.0, 1000.0, 0.0)


def cpu(cores: float) -> Vector:
    return (0.0, cores, 0.0, 0.0, 0.0)


def run(*parts: Pool | Operation, total: Vector = TOTAL, **options: Any) -> UpdateResult:
    pools = tuple(part for part in parts if isinstance(part, Pool))
    operations = tuple(part for part in parts if isinstance(part, Operation))
    return update(Snapshot(total, pools, operations, Options(**options)), 0.0, None)


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


REORDERING = {"step_function_for_gang_operations": True, "fifo_reordering": True}


def test_what_exceeds_the_guarantee_by_less_than_eps_fits():
    """7: fits = (strong + E dominates acc + d)."""
    assert 0.1 + 0.1 + 0.1 > 0.3
    cores = {"g0": 10.0, "g1": 10.0, "g2": 10.0, "no": 1.0, "x": 0.0}
    operations = [
        Operation(name, "a", demand=cpu(demand), gang=name != "x", start_time=float(n))
        for n, (name, demand) in enumerate(cores.items())
    ]
    pool = Pool("a", mode="fifo", strong_guarantee_resources=(0.0, 30.0, 0.0, 0.0, 0.0), fifo_reordering=True)
    result = run(pool, *operations, **REORDERING)
    assert [result.elements[name].effective_fifo_index for name in cores] == [0, 1, 2, 4, 3]


PROMISE = {"compute_promised_guarantee_fair_share": True}
PRIORITY = {"priority_strong_guarantee_adjustment": True}
DONOR = {"priority_strong_guarantee_adjustment_donorship": True}


# ---- strong guarantees (4, 6)


def strong(name: str, parent: str = ROOT, /, cpu: float | None = None, **more: Any) -> Pool:
    """A pool with a guarantee of cpu; everything else is inferred."""
    return Pool(name, parent, strong_guarantee_resources=(None, cpu, None, None, None), **more)


@pytest.mark.parametrize(("gpus", "errors"), [(2.0, []), (3.0, [29000])])
def test_flows_are_counted_in_whole_units(gpus, errors):
    """17: a flow of 0.4 is 1 of 3 gpus, so 2 more can be guaranteed although 2/3 + 0.4 is more than 1."""
    total = (0.0, 100.0, 3.0, 0.0, 0.0)
    pool = Pool("a", strong_guarantee_resources=(0.0, 0.0, gpus, 0.0, 0.0))
    burst = Pool("b", integral_guarantees=IntegralGuarantees("burst", cpu(40.0)))
    assert codes(run(pool, burst, total=total)) == errors


def test_a_strong_guarantee_is_no_more_than_the_limits_of_its_pool():
    """6.1: nor is what its sub-pools are guaranteed of it."""
    limits = (1e9, 30.0, 1e9, 1e9, 1e9)
    parts = [strong("p", cpu=50.0, resource_limits=limits), strong("a", "p", cpu=40.0), strong("b", "p", cpu=10.0)]
    result = run(*parts, Pool("q"), *(Operation(f"o{name}", name, demand=cpu(100.0)) for name in "abq"))
    shares = [result.elements[name].strong_guarantee_share[1] for name in "pab"]
    assert shares == pytest.approx([0.3, 0.24, 0.06], abs=1e-9)
    assert result.elements["q"].fair_share.total[1] == pytest.approx(0.7, abs=1e-9)


def test_exactly_the_cluster_is_no_error():
    """6: T dominates S; cpu is counted in hundredths, whatever their doubles sum up to."""
    pools = [strong(f"p{n}", cpu=cpu) for n, cpu in enumerate([33.3, 33.3, 33.4])]
    assert codes(run(*pools)) == []
    tenths = [strong(f"p{n}", cpu=cpu) for n, cpu in enumerate([0.1, 0.2, 0.7])]
    assert codes(run(*tenths, total=(0.0, 1.0, 0.0, 0.0, 0.0))) == []


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
