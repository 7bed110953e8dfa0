"""What backfill makes of room that is kept for gangs, in the backfill week (tests/played_backfill.py).

The scheduler's real state in virtual time, a step per minute: 12 nodes of 16 cores, small jobs of three kinds whose run
times differ (lognormal), and every 2.5 h or so a gang of up to nine jobs, or one large job. First the week without
backfill, then the same work with it. Each gang of the second week is also tried without backfill from the moment on at
which it came, in a copy of the process: weeks drift apart after the first job that starts elsewhere, so that a gang's
wait in one says little of its wait in the other.

    python tests/bench/backfill.py [--seed 1] [--days 7] [--check]

Prints a table in Markdown. ``--check``: exit code 1 unless what is idle beside waiting work is halved at least, and 95
of 100 gangs start no later. What jobs that gave room back had done is lost; without backfill that room was idle.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from played_backfill import STEP_S, WEEK_S, Outcome, PlayedBackfill

MOST_IDLE = 0.5
NO_LATER = 0.95


def compare(seed: int, length_s: float) -> tuple[Outcome, Outcome]:
    """The week without backfill and with it."""
    plain = PlayedBackfill(seed, length_s).play()
    show("without", plain)
    filled = PlayedBackfill(seed, length_s, enable_backfill=True).play(compares=True)
    show("with", filled)
    return plain, filled


def show(name: str, outcome: Outcome) -> None:
    waits = sorted(outcome.waits.values())
    cells = [
        name, f"{outcome.idle_beside_work_hours:.0f}", f"{outcome.lost_hours:.0f}", f"{outcome.idle_hours:.0f}",
        f"{outcome.backfilled}", f"{outcome.returned}", f"{outcome.overstays}", f"{len(waits)}",
        f"{sum(waits) / max(len(waits), 1) / 60.0:.0f}", f"{outcome.small_wait_hours:.0f}",
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def count_no_later(outcome: Outcome) -> tuple[int, int]:
    """Gangs that started no later than without backfill, where a day is looked at, and all that started."""
    known = [number for number in outcome.alone if number in outcome.waits]
    return sum(outcome.waits[number] <= outcome.alone[number] for number in known), len(known)


def find_faults(plain: Outcome, filled: Outcome) -> list[str]:
    idle, before = filled.idle_beside_work_hours, plain.idle_beside_work_hours
    no_later, known = count_no_later(filled)
    faults = [] if idle <= MOST_IDLE * before else [f"{idle:.0f} core-hours idle beside work, {before:.0f} before"]
    return faults if no_later >= NO_LATER * known > 0 else [*faults, f"{no_later} of {known} gangs start no later"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--days", type=float, default=WEEK_S / 86_400.0)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    print(f"Core-hours of the week of seed {arguments.seed}, steps of {STEP_S:g} s\n")
    print(
        "| backfill | idle beside waiting work | lost by jobs that gave room back | idle in all | backfilled jobs | "
        "gave room back | ran longer than expected | gangs | minutes a gang waited | waited for by small jobs |"
    )
    print("|" + " --- |" * 10, flush=True)
    plain, filled = compare(arguments.seed, arguments.days * 86_400.0)
    no_later, known = count_no_later(filled)
    print(f"\n{no_later} of {known} gangs started no later than without backfill from where they came on.")
    faults = find_faults(plain, filled)
    print("\n".join(faults))
    return int(arguments.check and bool(faults))


if __name__ == "__main__":
    sys.exit(main())
