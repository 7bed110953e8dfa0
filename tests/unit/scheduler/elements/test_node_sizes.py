"""What no node of a tree can hold, in words: by resource, of all together, and of a gang."""

import pytest

from cpumond.scheduler.elements.node_sizes import NodeSizes

GIB = 2.0**30
NODES = NodeSizes({(9.0, 4.0, 0.0, 2 * GIB, 0.0): 3, (9.0, 2.0, 0.0, 10 * GIB, 0.0): 1, (9.0, 1.0, 0.0, GIB, 0.0): 5})


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ((1.0, 4.0, 0.0, 2 * GIB, 0.0), ""),
        ((1.0, 4.0 + 1e-12, 0.0, 0.0, 0.0), ""),
        ((1.0, 5.0, 0.0, 0.0, 0.0), "5 cores, largest node 4"),
        ((1.0, 4.0001, 0.0, 0.0, 0.0), "4.0001 cpu, largest node 4"),
        ((20.0, 1.0, 1.0, 11 * GIB, 0.0),
         "20 user slots, largest node 9; 1 gpu, largest node 0; 11 GiB memory, largest node 10 GiB"),
        ((1.0, 4.0, 0.0, 10 * GIB, 0.0), "4 cores and 10 GiB memory on one node, no node has enough of each"),
    ],
)  # fmt: skip
def test_a_job(order, told):
    assert NODES.explain_excess(order) == NODES.explain_unplaceable([(order, 7)], False) == told
    assert NodeSizes({}).explain_excess(order) == "", "without a node nothing is known"


@pytest.mark.parametrize(
    ("jobs", "told"),
    [
        ([((1.0, 1.0, 0.0, 0.0, 0.0), 19)], ""),
        ([((1.0, 1.0, 0.0, 0.0, 0.0), 20)], "20 jobs of 1 core at once, all nodes together hold 19"),
        ([((1.0, 3.0, 0.0, 2 * GIB, 0.0), 4)],
         "4 jobs of 3 cores and 2 GiB memory at once, all nodes together hold 3"),
        ([((1.0, 1.0, 0.0, 0.0, 0.0), 10), ((1.0, 2.0, 0.0, 0.0, 0.0), 5)], "20 cores at once, all nodes 19"),
        ([((1.0, 1.0, 0.0, 0.0, 0.0), 1), ((1.0, 9.0, 0.0, 0.0, 0.0), 1)], "9 cores, largest node 4"),
    ],
)  # fmt: skip
def test_a_gang(jobs, told):
    assert NODES.explain_unplaceable(jobs, True) == told
    assert NODES.explain_unplaceable(jobs, False) == "", "one of the jobs can start"
