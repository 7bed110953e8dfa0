"""Has anything become slower? Runs the short form of each bench and compares its figures with the bounds of gates.toml.

    python tests/bench/check.py [--only BENCH ...] [--minutes 10] [--record NAME]

A bound is the mean of the named runs in runs.toml with a margin of 20 %. A bench with a figure outside of its bound is
run once more, since other work on the machine can make it slower: a figure falls where both runs are outside. Prints
each figure, then what fell; exit code 1 where something fell or there was no time for it. ``--record`` adds this run to
runs.toml in place of the comparison: on a machine that does nothing else.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

HERE = Path(__file__).parent
MARGIN = 0.2
RUNS = 10
"""Of which a bound is made; one of fewer is preliminary."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure that a bench prints: ``read`` finds it, ``unit`` is what it counts."""

    read: str
    unit: str
    better: Literal["less", "more"]


class Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The short form of a bench: a program of this folder with its arguments."""

    command: list[str]
    figures: dict[str, Figure]
    needs_root: bool = False


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run of all benches printed: bench -> figure -> value."""

    name: str
    at: str
    figures: dict[str, dict[str, float]]


class Judged(NamedTuple):
    """One figure beside its bound."""

    text: str
    is_good: bool


def read_figures(printed: str, figures: Mapping[str, Figure]) -> dict[str, float]:
    """The figures in what a bench printed; those that are not there are left out."""
    found = {name: re.search(figure.read, printed) for name, figure in figures.items()}
    return {name: float(each[1]) for name, each in found.items() if each is not None}


def list_known(runs: Iterable[Run], bench: str, figure: str) -> list[float]:
    """The values of a figure in the named runs that have it."""
    return [run.figures[bench][figure] for run in runs if figure in run.figures.get(bench, {})]


def judge(name: str, figure: Figure, value: float | None, known: list[float]) -> Judged:
    """A figure and its bound in words; one without any run yet is good, whatever it is."""
    if value is None:
        return Judged(f"{name}: not printed", False)
    said = f"{name}: {value:g} {figure.unit}"
    if not known:
        return Judged(f"{said} (no run to compare with)", True)
    mean = statistics.mean(known)
    is_less = figure.better == "less"
    bound = mean * (1.0 + MARGIN) if is_less else mean / (1.0 + MARGIN)
    is_good = value <= bound if is_less else value >= bound
    few = f" of {len(known)} runs" if len(known) < RUNS else ""
    return Judged(f"{said} (at {'most' if is_less else 'least'} {bound:.3g}{few})", is_good)


def show_run(run: Run) -> str:
    """A run as runs.toml has it."""
    lines = ["[[run]]", f'name = "{run.name}"', f'at = "{run.at}"']
    for bench, values in run.figures.items():
        lines += ["", f"[run.figures.{bench}]", *(f"{name} = {value!r}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def load_gates() -> dict[str, Bench]:
    return msgspec.convert(tomllib.loads((HERE / "gates.toml").read_text()), dict[str, Bench])


def load_runs() -> list[Run]:
    return msgspec.convert(tomllib.loads((HERE / "runs.toml").read_text()).get("run", []), list[Run])


def run_bench(bench: Bench, timeout_s: float) -> dict[str, float]:
    """Its figures; none of one that fails or takes longer, with what it said last."""
    program, *arguments = bench.command
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / program), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{program}: took longer than the {timeout_s:.0f} s that were left", flush=True)
        return {}
    if done.returncode:
        print(f"{program}: exit code {done.returncode}: {done.stdout[-1000:]}", flush=True)
    return read_figures(done.stdout, bench.figures)


def check_bench(name: str, bench: Bench, runs: list[Run], end: float) -> list[str]:
    """Print its figures; the texts of those that are outside of their bounds twice."""
    fallen: dict[str, str] = {}
    for attempt in range(2):
        values = run_bench(bench, max(end - time.monotonic(), 1.0))
        judged = {
            key: judge(f"{name} {key}", figure, values.get(key), list_known(runs, name, key))
            for key, figure in bench.figures.items()
            if not attempt or key in fallen
        }
        for each in judged.values():
            print(f"{'' if each.is_good else 'NO '}{each.text}", flush=True)
        fallen = {key: each.text for key, each in judged.items() if not each.is_good}
        if not fallen or time.monotonic() >= end:
            break
    return list(fallen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gates = load_gates()
    parser.add_argument("--only", nargs="+", choices=gates, default=list(gates), metavar="BENCH")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all benches together")
    parser.add_argument("--record", metavar="NAME", help="add this run to runs.toml")
    arguments = parser.parse_args()
    end, fallen, recorded = time.monotonic() + 60.0 * arguments.minutes, list[str](), dict[str, dict[str, float]]()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs at the start")
    for name in arguments.only:
        begun = time.monotonic()
        if gates[name].needs_root and os.geteuid():
            print(f"{name}: left out, it needs root")
        elif arguments.record:
            recorded[name] = run_bench(gates[name], max(end - begun, 1.0))
        else:
            fallen += check_bench(name, gates[name], load_runs(), end)
        print(f"  {name} took {time.monotonic() - begun:.0f} s", flush=True)
    if arguments.record:
        at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        with (HERE / "runs.toml").open("a") as file:
            file.write("\n" + show_run(Run(arguments.record, at, recorded)))
        return
    print("\n".join(["What fell:", *fallen]) if fallen else "Nothing fell.")
    sys.exit(1 if fallen else 0)


if __name__ == "__main__":
    main()
