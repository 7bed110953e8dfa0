"""From the root's share down to every operation's: fair_share_update.md 12, 13, 14, 21 (worked examples)."""

from __future__ import annotations

from typing import Any

import pytest

from cpumond.fairshare import ROOT, Operation, Options, Pool, Snapshot, UpdateResult, Vector
from cpumond.fairshare import fair_share_update as update
from cpumond.fairshare.distribution import detail
from cpumond.fairshare.resources import ZERO
from cpumond.fairshare.result import NO_SHARE, FairShare

TOTAL: Vector = (100.0, 100.0, 0.0, 1000.0, 0.0)
INF = float("inf")


def vec(slots: float = 0.0, cpu: float = 0.0, memory: float = 0.0) -> Vector:
    """A share, in the order of the worked examples."""
    return (slots, cpu, 0.0, memory, 0.0)


def op(name: str, parent: str, /, *demand: float, usage: Vector = ZERO, **more: Any) -> Operation:
    """An operation that demands shares of slots, cpu, memory."""
    return Operation(name, parent, demand=amounts(vec(*demand)), usage=amounts(usage), **more)


def amounts(v: Vector) -> Vector:
    a, b, c, d, e = (x * total for x, total in zip(v, TOTAL, strict=True))
    return (a, b, c, d, e)


def pool(name: str, parent: str = ROOT, /, strong: float | None = None, cpu: float = INF, **more: Any) -> Pool:
    """A pool with a strong guarantee, a share of cpu with as much of everything, and a limit of cpu, a share too."""
    guarantee = None if strong is None else strong * 100.0
    limits = (INF, cpu * 100.0, INF, INF, INF)
    return Pool(
        name, parent, resource_limits=limits, strong_guarantee_resources=(None, guarantee, None, None, None), **more
    )


def run(*parts: Pool | Operation, root: Pool | None = None, **options: Any) -> UpdateResult:
    pools = tuple(part for part in parts if isinstance(part, Pool))
    operations = tuple(part for part in parts if isinstance(part, Operation))
    return update(Snapshot(TOTAL, pools, operations, Options(**options), root or Pool(ROOT, "")), 0.0, None)


def total(result: UpdateResult, name: str) -> Any:
    return pytest.approx(result.elements[name].fair_share.total, abs=1e-12)


def cpu(result: UpdateResult, *names: str) -> Any:
    return pytest.approx([result.elements[name].fair_share.total[1] for name in names], abs=1e-9)


def promised_cpu(result: UpdateResult, *names: str) -> Any:
    return pytest.approx([result.elements[name].promised_guarantee_fair_share.total[1] for name in names], abs=1e-9)


BOTH = pytest.mark.parametrize("improved", [False, True])


def mode(improved: bool) -> dict[str, bool]:
    return {"improved_fair_share_by_fit_factor": improved, "improved_distribution_gap": improved}


GANGS = {"step_function_for_gang_operations": True}


# ---- worked examples (21)


@BOTH
def test_one_operation_that_demands_more_than_there_is(improved):
    """21: demand (2, 2, 4); memory limits, so it gets a quarter."""
    result = run(pool("a"), op("x", "a", 2.0, 2.0, 4.0), **mode(improved))
    assert [total(result, name) for name in (ROOT, "a", "x")] == [vec(0.5, 0.5, 1.0)] * 3


@BOTH
def test_two_operations_with_other_dominant_resources(improved):
    """21: X demands (1, 1, 2), Y (1, 2, 1), equal weights."""
    result = run(pool("a"), op("x", "a", 1.0, 1.0, 2.0), op("y", "a", 1.0, 2.0, 1.0), **mode(improved))
    third = 1.0 / 3.0
    assert total(result, "x") == vec(third, third, 2 * third)
    assert total(result, "y") == vec(third, 2 * third, third)
    assert total(result, ROOT) == vec(2 * third, 1.0, 1.0)


@BOTH
def test_strong_guarantees_that_overcommit_the_cluster(improved):
    """21: strong 30 and 90 cpu, both demand all: 0.25 and 0.75."""
    everything = [op(f"of {name}", name, 1.0, 1.0, 1.0) for name in "ab"]
    result = run(pool("a", strong=0.3), pool("b", strong=0.9), *everything, **mode(improved))
    assert cpu(result, "a", "b", "of a", "of b", ROOT) == [0.25, 0.75, 0.25, 0.75, 1.0]
    assert result.elements["b"].fair_share.strong_guarantee[1] == pytest.approx(0.75)


@BOTH
def test_two_gangs_that_jump_together(improved):
    """21: their joint jump to 1.2 does not fit; in improved mode the first child gets its 0.6."""
    gangs = [op(f"of {name}", name, 0.0, 0.6, gang=True) for name in "ab"]
    result = run(pool("a"), pool("b"), *gangs, **GANGS, **mode(improved))
    assert cpu(result, "a", "b", "of a", "of b", ROOT) == [0.6 * improved, 0.0, 0.6 * improved, 0.0, 0.6 * improved]


@BOTH
def test_a_gang_that_demands_exactly_the_cluster(improved):
    """21: its jump sits at suggestion 1 and is trimmed."""
    result = run(pool("a"), op("x", "a", 0.0, 1.0, gang=True), **GANGS, **mode(improved))
    assert cpu(result, "x", "a", ROOT) == [0.0, 0.0, 0.0]


@BOTH
def test_a_gang_that_demands_exactly_its_strong_guarantee(improved):
    """21: it gets it, whatever the neighbour wants."""
    parts = [
        pool("a", strong=0.3),
        pool("b", weight=1e6),
        op("x", "a", 0.3, 0.3, 0.3, gang=True),
        op("y", "b", 1.0, 1.0, 1.0),
    ]
    result = run(*parts, **GANGS, **mode(improved))
    assert total(result, "x") == vec(0.3, 0.3, 0.3)
    assert cpu(result, "a", "y") == [0.3, 0.7]


# ---- the parts of a share (12)


def test_all_of_an_operation_is_by_weight():
    """12: also where its pool has it from guarantees."""
    result = run(pool("a", strong=0.5), op("x", "a", 0.2, 0.4, 0.1))
    assert result.elements["x"].fair_share == FairShare(vec(0.2, 0.4, 0.1), ZERO, ZERO, vec(0.2, 0.4, 0.1))
    assert result.elements["a"].fair_share == FairShare(vec(0.2, 0.4, 0.1), vec(0.2, 0.4, 0.1), ZERO, ZERO)


@BOTH
def test_a_pool_with_nothing_inside_gets_nothing(improved):
    """12: a composite without children gets 0, whatever it is guaranteed."""
    result = run(pool("a", strong=0.5), pool("b", "a", strong=0.2), pool("c", mode="fifo"), **mode(improved))
    assert {name: result.elements[name].fair_share for name in ("a", "b", "c", ROOT)} == dict.fromkeys(
        ("a", "b", "c", ROOT), NO_SHARE
    )


# ---- down the tree (12.1, 12.2)


@BOTH
def test_operations_beyond_the_first_of_a_long_fifo_pool(improved):
    """9.3, 12: however many of them there are."""
    operations = [op(f"o{n}", "a", 0.0, 0.01 + n / 1000, start_time=float(-n)) for n in range(40)]
    result = run(pool("a", mode="fifo"), pool("b"), *operations, op("x", "b", 0.0, 1.0), **mode(improved))
    served = [0.049 - n / 1000 for n in range(12)]
    assert cpu(result, *(f"o{39 - n}" for n in range(12))) == [*served[:11], 0.5 - sum(served[:11])]
    assert cpu(result, *(f"o{39 - n}" for n in range(12, 40))) == [0.0] * 28


# ---- promised shares (13)

PROMISE = {"compute_promised_guarantee_fair_share": True}


@BOTH
def test_promised_is_what_a_pool_gets_within_its_guarantees(improved):
    """13: 12 with suggestion 0; nothing above the pool, its parts as ever."""
    result = run(
        pool("top", strong=0.5),
        pool("a", "top", strong=0.4, **PROMISE),
        pool("b", "top", strong=0.1),
        pool("c", "a", strong=0.1),
        op("x", "c", 0.0, 1.0),
        op("y", "a", 0.0, 1.0),
        op("z", "b", 0.0, 1.0),
        **mode(improved),
    )
    assert promised_cpu(result, "a", "c", "x", "y") == [0.4, 0.25, 0.25, 0.15]
    assert promised_cpu(result, ROOT, "top", "b", "z") == [0.0] * 4
    promised = result.elements["c"].promised_guarantee_fair_share
    assert promised.strong_guarantee[1] == pytest.approx(0.1)
    assert promised.weight_proportional[1] == pytest.approx(0.15)
    assert cpu(result, "a", "b") == [0.65, 0.35]


@BOTH
def test_promised_shares_are_read_from_the_same_functions_as_the_others(improved):
    """13: the pool takes far less within its guarantee than in the distribution before."""
    operations = [op(f"o{n}", "a", 0.0, 0.05 + n / 100, weight=1.0 + n, gang=n % 2 == 1) for n in range(8)]
    result = run(pool("a", strong=0.125, **PROMISE), *operations, **GANGS, **mode(improved))
    names = [operation.name for operation in operations]
    # at fit factor x the even ones have x * weight, together 16 x; the first gang jumps at 0.12 / 8, beyond 0.125 / 16
    assert promised_cpu(result, "a") == [0.125]
    assert promised_cpu(result, *names[1::2]) == [0.0] * 4
    assert promised_cpu(result, *names[0::2]) == [weight * 0.125 / 16 for weight in (1, 3, 5, 7)]
    assert cpu(result, "a", *names) == [0.68, *(0.05 + n / 100 for n in range(8))]


# ---- the root (14)


def test_the_root_has_what_its_children_have():
    """14: strong part = min(total, sum of the children's strong parts), not of their guarantees."""
    result = run(
        pool("a", strong=0.5),
        pool("b", strong=0.2),
        op("x", "a", 0.0, 0.3),
        op("y", "b", 0.0, 0.4),
        op("z", ROOT, 0.0, 0.1),
    )
    root = result.elements[ROOT]
    assert total(result, ROOT) == vec(0.0, 0.8)
    assert root.fair_share.strong_guarantee == pytest.approx(vec(0.0, 0.5))
    assert root.fair_share.weight_proportional == pytest.approx(vec(0.0, 0.3))
    assert root.strong_guarantee_share[1] == pytest.approx(0.7)


def test_a_share_is_strong_then_integral_then_by_weight():
    """12: strong part = min(total, strong), integral part = min(rest, proposed), and the rest."""
    share = detail(vec(0.5, 0.15, 0.05), vec(0.1, 0.1, 0.1), vec(0.2, 0.2, 0.2))
    assert share.strong_guarantee == vec(0.1, 0.1, 0.05)
    assert share.integral_guarantee == pytest.approx(vec(0.2, 0.05, 0.0))
    assert share.weight_proportional == pytest.approx(vec(0.2, 0.0, 0.0))
