"""Mistakes made on purpose are found within a hundred seeds, each by what follows from it."""

from dataclasses import replace

import pytest
from examples import ALL
from simulation.world import Options, run_seed
from simulation.world_mutations import MUTATIONS

FIRST = {
    "claim": 0,
    "fence": 1,
    "clock": 0,
    "acknowledge": 0,
    "start": 0,
    "stop": 12,
    "term": 35,
    "outcome": 13,
    "later": 0,
    "numbers": 0,
    "count": 0,
    "hold": 1,
    "vault": 0,
    "blame": 13,
    "waits": 0,
    "bound": 4,
    "backfill": 1,
}
"""The first seed that finds it, when this was written; the search begins there, to be short."""
RETRIES = ("waits", "bound")
"""Those that only operations with a retry policy show."""
NAMES = [*MUTATIONS] if ALL else ["acknowledge", "start", "count", "hold", "blame", *RETRIES]


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_is_found(name: str) -> None:
    options = Options(retries=0.7 * (name in RETRIES), vaults=name == "vault", has_bad_host=name == "blame")
    options = replace(options, guarantees=name == "claim", backfills=name == "backfill")
    for seed in [*range(FIRST[name], 100), *range(FIRST[name])]:
        if run_seed(seed, options, MUTATIONS[name]).violation:
            return
    raise AssertionError(f"no seed below 100 finds the mistake {name!r}")
