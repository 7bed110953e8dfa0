"""Two thousand seeds of the simulated world, and how fast they are; the figures are in docs/trust.md."""

import pytest
from simulation.world import Options, Outcome, run_seed

SEEDS, GROUP = 2000, 100
FIRST = 10_000


def summarize(outcomes: list[Outcome]) -> str:
    simulated_s = sum(each.simulated_s for each in outcomes)
    cpu_s = sum(each.real_s for each in outcomes)
    checks = sum(each.checks for each in outcomes)
    faults = sum(sum(each.faults.values()) for each in outcomes)
    return f"{len(outcomes)} seeds, {simulated_s / cpu_s:.0f} times real time, {checks} checks, {faults} faults"


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, GROUP))
def test_many_seeds(first: int) -> None:
    outcomes = [run_seed(seed, Options()) for seed in range(first, first + GROUP)]
    print(summarize(outcomes))
    assert [f"seed {each.seed}: {each.violation}" for each in outcomes if each.violation] == []


@pytest.mark.parametrize(("options", "least"), [(Options(), 200.0), (Options(hosts=50, clients=6), 20.0)])
def test_it_is_much_faster_than_real_time(options: Options, least: float) -> None:
    outcomes = [run_seed(seed, options) for seed in range(5)]
    print(summarize(outcomes))
    assert sum(each.simulated_s for each in outcomes) > least * sum(each.real_s for each in outcomes)
