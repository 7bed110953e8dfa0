"""``python -m simulation [SEED|FIRST-LAST] [OPTION]...`` in tests/: lives through them."""

import argparse
import collections
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from functools import partial

from simulation.world import Options, World, run_seed
from simulation.world_mutations import MUTATIONS


@contextlib.contextmanager
def prepared(mutation: str, keeps_notes: bool, world: World) -> Iterator[None]:
    world.ledger.keeps_notes = keeps_notes
    with MUTATIONS[mutation](world) if mutation else contextlib.nullcontext():
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0-9")
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--calm", action="store_false", dest="has_faults", help="no faults")
    parser.add_argument("--guarantees", action="store_true", help="long jobs take what is guaranteed to others")
    parser.add_argument("--vaults", action="store_true", help="some operations have secrets")
    parser.add_argument("--gangs", type=float, default=0.0, help="the part of operations with gang_options")
    parser.add_argument("--bad-host", action="store_true", dest="has_bad_host", help="one host fails all its jobs")
    parser.add_argument("--backfills", action="store_true", help="room kept for gangs is used until then")
    parser.add_argument("--bursts", action="store_true", help="operations are submitted several at once")
    parser.add_argument("--retries", type=float, default=0.0, help="the part of operations with a retry policy")
    parser.add_argument("--mutate", choices=list(MUTATIONS), default="", help="make a mistake on purpose")
    parser.add_argument("-v", "--verbose", action="store_true")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    known = {field.name for field in dataclasses.fields(Options)}
    options = Options(**{name: value for name, value in vars(given).items() if name in known})
    bad = 0
    totals: collections.Counter[str] = collections.Counter()
    for seed in range(int(first), int(last or first) + 1):
        outcome = run_seed(seed, options, partial(prepared, given.mutate, given.verbose))
        bad += bool(outcome.violation)
        totals.update(outcome.counts)
        totals.update({"fault: " + name: count for name, count in outcome.faults.items()})
        print(
            f"seed {seed}: {outcome.simulated_s:.0f} s in {outcome.real_s:.2f} s, {outcome.speed:.0f} times real time, "
            f"{outcome.events} events, {outcome.checks} checks, trace {outcome.trace:08x}: "
            f"{outcome.violation or 'good'}",
            flush=True,
        )
        if given.verbose:
            print(*outcome.notes, outcome.counts, outcome.faults, sep="\n")
    print(f"{bad} bad seeds", dict(totals))
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
