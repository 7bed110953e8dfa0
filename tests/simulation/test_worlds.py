"""Seeds of the simulated world, each played again exactly; ``python -m simulation SEED -v`` in tests/ shows all that
happens in one. Thousands are in tests/slow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import ALL, WHOLE
from simulation.world import Options, Outcome, run_seed

TESTS = Path(__file__).parents[1]
FOUND: dict[str, int] = {
    "jobs that a user had aborted went on after a take-over": 1,
    "a replaced job and its replacement were both work in hand after a take-over": 12,
    "an end that came with a node's return, while the node was given up, was acknowledged and not stored": 70,
    "a command that was stored without the stops it orders was acknowledged when it was repeated": 145,
    "a node whose starts had failed, while one more was on its way and went well, never offered anything again": 10727,
}
"""What was found once, in words, and the seed that found it."""
SEEDS = range(100, 124 if ALL else 110 if WHOLE else 101)
FIVE = Options()
FIFTY = Options(hosts=50, clients=6)
GANGS = Options(gangs=0.6)
"""Many operations have ``gang_options``: no rank twice in an incarnation, no two incarnations work at once."""
VAULTS = Options(vaults=True)
"""Jobs of some operations have secrets, also after a take-over, and nothing else has them."""
BAD_HOST = Options(has_bad_host=True)
"""One host fails all its jobs now and then: no operation fails by that."""
RETRIES = Options(retries=0.7, gangs=0.2)
"""Most have a retry policy: never more retries than allowed or before their time, memory within bounds, all of it kept
by take-overs."""
GUARANTEES = Options(guarantees=True)
"""Long jobs of small operations take what is guaranteed to others: who has enough demand gets
it (semantics.md 6.10)."""
BACKFILL = Options(backfills=True)
BURSTS = Options(bursts=True)
"""Operations are submitted several at once, which share writes: what is acknowledged is stored, whatever is killed."""
WORLDS = [
    *(pytest.param(FIVE, seed, id=f"five hosts {seed}") for seed in SEEDS),
    *(pytest.param(FIVE, seed, id=words) for words, seed in list(FOUND.items())[: None if WHOLE else 1]),
    *(pytest.param(FIFTY, seed, id=f"fifty hosts {seed}") for seed in range(4 if ALL else 2 if WHOLE else 0)),
    *(pytest.param(BACKFILL, seed, id=f"backfill {seed}") for seed in (8, 211, *range(214, 220 if ALL else 215))),
    *(pytest.param(GANGS, seed, id=f"gangs {seed}") for seed in (20, 12, *range(6 if ALL else 4 if WHOLE else 1))),
    *(pytest.param(GUARANTEES, seed, id=f"guarantees {seed}") for seed in range(12 if ALL else 4 if WHOLE else 1)),
    *[pytest.param(BURSTS, 3390, id="failures that one heartbeat reported counted at once")] * WHOLE,
    *(pytest.param(BURSTS, seed, id=f"bursts {seed}") for seed in range(6 if ALL else 2 if WHOLE else 1)),
    *(pytest.param(VAULTS, seed, id=f"vaults {seed}") for seed in range(6 if ALL else 2 if WHOLE else 1)),
    *(pytest.param(BAD_HOST, seed, id=f"bad host {seed}") for seed in (13, *range(12 if ALL else 4 if WHOLE else 0))),
    *[pytest.param(Options(retries=0.7), 63, id="a job that was told to stop before all were aborted went on")] * WHOLE,
    pytest.param(Options(backfills=True, retries=0.3), 2033, id="a job in kept room had the memory of another's retry"),
    *[pytest.param(Options(backfills=True, retries=0.3), 2345, id="a needless job went on after a take-over")] * WHOLE,
    *(pytest.param(RETRIES, seed, id=f"retries {seed}") for seed in range(8 if ALL else 4 if WHOLE else 1)),
]


def check(outcome: Outcome) -> None:
    assert not outcome.violation, f"seed {outcome.seed}: {outcome.violation}"


@pytest.mark.parametrize(("options", "seed"), WORLDS)
def test_a_seed_breaks_no_promise(options: Options, seed: int) -> None:
    outcome = run_seed(seed, options)
    check(outcome)
    assert outcome.counts["heartbeats"] > options.hosts * 20


def test_worlds_with_backfill_have_jobs_in_room_that_is_kept() -> None:
    outcome = run_seed(211, BACKFILL)
    check(outcome)
    assert outcome.counts["lent"] > 10


def test_a_world_without_faults_has_one_reign_and_loses_nothing() -> None:
    outcome = run_seed(1, Options(has_faults=False))
    check(outcome)
    assert outcome.counts["reigns"] == 1
    assert outcome.counts["started"] > 20


def test_a_seed_is_played_again_exactly_whatever_the_order_of_sets() -> None:
    options = FIVE if WHOLE else Options(seconds=120.0, faults_until_s=50.0, commands_until_s=45.0)
    program = (
        f"from simulation.world import Options, run_seed; outcome = run_seed(7, {options!r}); "
        "print(outcome.trace, outcome.events, outcome.checks)"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program], cwd=TESTS, env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    here = run_seed(7, options)
    assert said == [f"{here.trace} {here.events} {here.checks}\n"] * 2
