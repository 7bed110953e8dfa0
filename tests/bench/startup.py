"""What commands cost before they do anything: CPU of ``--help`` and of ``status`` without an agent.

    python tests/bench/startup.py [--runs 10]

Printed: the median of all runs in seconds of CPU, as the kernel counts them for a child, and as a multiple of an
interpreter that does nothing, in turns with it.
"""

import argparse
import resource
import statistics
import subprocess
import sys

COMMANDS = {
    "bare interpreter": ["-c", "pass"],
    "--help": ["-m", "cpumond", "--help"],
    "status": ["-m", "cpumond", "status", "--socket", "/nonexistent"],
}


def measure(arguments: list[str]) -> float:
    """Seconds of CPU of one run of the interpreter."""

    def read() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = read()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return read() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs):
        for name, command in COMMANDS.items():
            times[name].append(measure(command))
    bare = statistics.median(times["bare interpreter"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name}: {middle:.3f} s of CPU = {middle / bare:.2f} bare interpreters")


if __name__ == "__main__":
    main()
