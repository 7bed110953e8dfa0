"""A gang of 60 % in a pool of 50 %, on played nodes (semantics.md 4; fair_share_update.md 12.1, 12.3)."""

import pytest
from scheduler_world import World

from cpumond.scheduler.answers.pool import describe_pool
from cpumond.scheduler.answers.standing import find_standing

STEP = (
    'all of its jobs need 60.0%, more than the 50.0% that pool "mpi" gets by its weight (1 of 2, summed over siblings '
    "that want more): raise that weight above 1.5, guarantee it 60.0%, set usage_half_life of the tree, so that it "
    "takes turns, or let fewer jobs start at once"
)


@pytest.mark.parametrize(("shares", "of_batch"), [(False, 0.6), (True, 1.0)])
@pytest.mark.parametrize("runs_first", [False, True])
def test_its_sentence_names_step_and_weight_and_its_advice_works(shares, of_batch, runs_first):
    world = World(max_unpreemptible_running_job_count=0 if not runs_first else 10, share_gang_remainders=shares)
    world.create_pools("mpi", "batch")
    world.node("n1", cpu=10)
    if runs_first:
        gang = world.run("mpi", jobs=6, is_gang=True)
        world.start("batch", jobs=100)
    else:
        world.run("batch", jobs=100)
        gang = world.start("mpi", jobs=6, is_gang=True)
    world.settle_down(40)
    assert len(world.jobs_of(gang)) == (6 if runs_first else 0)
    assert world.share("batch") == pytest.approx(of_batch)
    has = "is allocated all that it demands, 6 cores, and others may take it"
    has = has if runs_first else "gets none of the 6 cores it demands"
    assert describe_pool(world.pool("mpi"), world.now) == (
        f"not starving: it {has}: a gang starts whole or not at all, and {STEP}"
    )
    assert find_standing(world.element(gang)).text.endswith(STEP)
    world.set_pool("mpi", weight=1.6)
    world.settle_down(60)
    assert len(world.jobs_of(gang)) == 6
    assert world.share("mpi") == pytest.approx(0.6)
    assert world.share("batch") >= 0.375
