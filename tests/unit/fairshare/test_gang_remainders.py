"""What the step of a gang cuts off, left or shared out among the others (fair_share_update.md 12.3)."""

import pytest

from cpumond.fairshare import fair_share_update
from cpumond.fairshare.resources import Vector
from cpumond.fairshare.tree import Operation, Options, Pool, Snapshot

MPI, BATCH, OTHER = Pool("mpi"), Pool("batch"), Pool("other")


def cpu(amount: float) -> Vector:
    return (0.0, amount, 0.0, 0.0, 0.0)


def gang(name: str, pool: str, demand: float, usage: float = 0.0) -> Operation:
    return Operation(name, pool, demand=cpu(demand), usage=cpu(usage), gang=True)


def plain(name: str, pool: str, demand: float = 1000.0) -> Operation:
    return Operation(name, pool, demand=cpu(demand))


@pytest.mark.parametrize(("pools", "operations", "before", "after"), [
    ((MPI, BATCH), (gang("g", "mpi", 60), plain("o", "batch")), (0, 60), (0, 100)),
    # Two that do not fit together: one does, the one that runs rather than the first.
    ((MPI, BATCH), (gang("g", "mpi", 60), gang("h", "batch", 60)), (0, 0), (60, 0)),
    ((MPI, BATCH), (gang("g", "mpi", 60), gang("h", "batch", 60, 60)), (0, 0), (0, 60)),
    # A gang that comes before the step keeps its share.
    ((MPI, BATCH, OTHER),
     (gang("g", "mpi", 60), gang("h", "batch", 30), plain("o", "other")), (0, 30, 60), (0, 30, 70)),
    # A pool that ends at its limit, one in FIFO order, one below another.
    ((Pool("mpi", resource_limits=cpu(50)), BATCH),
     (gang("g", "mpi", 30), plain("o", "mpi"), plain("x", "batch", 10)), (0, 30, 10), (0, 50, 10)),
    ((Pool("mpi", mode="fifo"), BATCH),
     (gang("g", "mpi", 60), plain("o", "mpi"), plain("x", "batch")), (0, 0, 60), (0, 50, 50)),
    ((MPI, Pool("inner", "mpi"), BATCH),
     (gang("g", "inner", 60), plain("o", "inner", 10), plain("x", "batch")), (0, 10, 70), (0, 10, 90)),
    # More than are passed over one by one.
    (tuple(Pool(f"p{n}") for n in range(40)),
     (*(gang(f"g{n}", f"p{n}", 51 + n) for n in range(39)), plain("o", "p39")),
     (*[0] * 39, 51), (*[0] * 39, 100)),
])  # fmt: skip
def test_12_3_what_is_cut_off_goes_to_the_others(pools, operations, before, after):
    for shares, expected in ((False, before), (True, after)):
        options = Options(step_function_for_gang_operations=True, share_gang_remainders=shares)
        result = fair_share_update(Snapshot(cpu(100.0), pools, operations, options), 0.0, None)
        got = [100.0 * result.elements[each.name].fair_share.total[1] for each in operations]
        assert got == pytest.approx(expected, abs=1e-6)
