"""Runs inside the guest: the integration tests that touch cgroups and stand in /in/plan.json of ``test_vm.py``."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from guest_tools import add_address
from quick_start import QuickPopen

PLAN = json.loads(Path("/in/plan.json").read_text(encoding="utf-8"))
TESTS = Path("/in/repository/tests/integration")
FACTS = Path("/out/facts.json")


def shorten(node_id: str) -> str:
    """Without folders; a parameter may have a slash, too."""
    file, colons, rest = node_id.partition("::")
    return f"{file.rpartition('/')[2]}{colons}{rest}"


class Selection:
    """A plugin of pytest: keeps what the plan names, and records how each test went."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self.unused = set(PLAN["quick"])
        self.finished = False
        self._begin_s = time.monotonic()

    def why_left_out(self, item: pytest.Item, name: str) -> str:
        """The reason, "" when it is run."""
        for marker, reason in PLAN["not_here"].items():
            if item.get_closest_marker(marker) is not None:
                return str(reason)
        for beginning, reason in PLAN["left_out"].items():
            if name.startswith(beginning):
                return str(reason)
        chosen = {beginning for beginning in PLAN["quick"] if name.startswith(beginning)}
        self.unused -= chosen
        if PLAN["full"] or (chosen and not name.startswith(tuple(PLAN["slow"]))):
            return ""
        return str(PLAN["too_slow"])

    def pytest_sessionstart(self) -> None:
        """What a forked ``cpumond`` will need. Not before pytest has looked which modules it rewrites."""
        sys.modules["rich"] = None  # type: ignore[assignment]  # structlog would take it along; see `cpumond agent`
        for name in PLAN["imported"]:
            importlib.import_module(name)
        del sys.modules["rich"]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = []
        for item in items:
            name = shorten(item.nodeid)
            if item.get_closest_marker("cgroup") is None:
                continue
            reason = self.why_left_out(item, name)
            if reason:
                self.left_out[name] = reason
            else:
                kept.append(item)
        items[:] = kept
        self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.facts[report.nodeid] = {"outcome": "failed", "took_s": 0.0, "text": report.longreprtext}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = shorten(report.nodeid)
        fact = self.facts.setdefault(name, {"outcome": "passed", "took_s": 0.0, "text": ""})
        fact["took_s"] += report.duration
        if report.outcome != "passed" and fact["outcome"] == "passed":
            text = report.longreprtext if report.failed else str(report.longrepr[2])  # type: ignore[index]
            fact.update(outcome=report.outcome, text=text)
        if report.when == "teardown":
            at_s = time.monotonic() - self._begin_s
            print(f"{at_s:6.1f} {fact['outcome']} {fact['took_s']:.1f} s {name}", flush=True)
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.finished = True
        self.write()

    def write(self) -> None:
        """As far as it is."""
        facts = {
            "tests": self.facts,
            "left_out": self.left_out,
            "unused": sorted(self.unused),
            "finished": self.finished,
            "took_s": time.monotonic() - self._begin_s,
        }
        FACTS.write_text(json.dumps(facts), encoding="utf-8")


def main() -> int:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/tmp"], timeout=60, check=True)
    add_address("10.0.0.1")  # where there is the loopback's alone, Slurm finds no host at all (AI_ADDRCONFIG)
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    subprocess.Popen = QuickPopen  # type: ignore[misc]
    files = sorted({str(TESTS / name) for name in PLAN["files"]})
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-p", "pytest_timeout", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=short"]
    options += ["-c", "/in/repository/pyproject.toml"]
    options += ["-o", "addopts=--strict-markers", f"--timeout={PLAN['timeout_s']}", "--rootdir=/in/repository"]
    return int(pytest.main([*options, *PLAN["options"], *files], [Selection()]))


if __name__ == "__main__":
    sys.exit(main())
