"""From the root's share down to every operation's, where the trees of tests/property do not come: long FIFO pools,
functions that are known only in part (fair_share_update.md 12, 13)."""

from typing import Any

import pytest

from cpumond.fairshare import Operation, Options, Pool, Snapshot, UpdateResult, Vector
from cpumond.fairshare import fair_share_update as update
from cpumond.fairshare.distribution import detail

TOTAL: Vector = (100.0, 100.0, 0.0, 1000.0, 0.0)


def vec(slots: float = 0.0, cpu: float = 0.0, memory: float = 0.0) -> Vector:
    return (slots, cpu, 0.0, memory, 0.0)


def op(name: str, parent: str, part: float, **more: Any) -> Operation:
    return Operation(name, parent, demand=vec(cpu=part * TOTAL[1]), **more)


def run(*parts: Pool | Operation, improved: bool, **options: Any) -> UpdateResult:
    pools = tuple(part for part in parts if isinstance(part, Pool))
    operations = tuple(part for part in parts if isinstance(part, Operation))
    options |= {"improved_fair_share_by_fit_factor": improved, "improved_distribution_gap": improved}
    return update(Snapshot(TOTAL, pools, operations, Options(**options)), 0.0, None)


def cpu(result: UpdateResult, *names: str) -> Any:
    return pytest.approx([result.elements[name].fair_share.total[1] for name in names], abs=1e-9)


BOTH = pytest.mark.parametrize("improved", [False, True])


@BOTH
def test_operations_beyond_the_first_of_a_long_fifo_pool(improved):
    """9.3, 12: however many of them there are."""
    operations = [op(f"o{n}", "a", 0.01 + n / 1000, start_time=float(-n)) for n in range(40)]
    result = run(Pool("a", mode="fifo"), Pool("b"), *operations, op("x", "b", 1.0), improved=improved)
    served = [0.049 - n / 1000 for n in range(12)]
    assert cpu(result, *(f"o{39 - n}" for n in range(12))) == [*served[:11], 0.5 - sum(served[:11])]
    assert cpu(result, *(f"o{39 - n}" for n in range(12, 40))) == [0.0] * 28


@pytest.mark.parametrize(
    ("total", "strong", "proposed", "parts"),
    [(0.5, 0.5, 0.5, (0.5, 0.0, 0.0)), (0.6, 0.5, 0.5, (0.5, 0.1, 0.0)), (1.0, 0.25, 0.5, (0.25, 0.5, 0.25))],
)
def test_an_integral_guarantee_is_what_the_strong_one_leaves(total, strong, proposed, parts):
    """12: the parts add up to the share."""
    share = detail(vec(cpu=total), vec(cpu=strong), vec(cpu=proposed))
    found = (share.strong_guarantee, share.integral_guarantee, share.weight_proportional)
    assert [part[1] for part in found] == pytest.approx(parts, abs=1e-9)
