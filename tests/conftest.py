"""Shared by all tests: what runs when, what a skip means, and what was running when a run was ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from examples import REQUIRED, SAME, examples
from hypothesis import HealthCheck, settings
from turns import hold_room, note_end, preferred, wait_for_ends

# How fast a busy machine makes up examples says nothing about what is tested.
settings.register_profile("any machine", examples(100), suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

MACHINES = Path(__file__).parent / "machine"
SLOW = Path(__file__).parent / "slow"
UNIT = Path(__file__).parent / "unit"
MEMORY, MEMORY_BYTES = "/dev/shm", 2**30
"""Where the files of unit tests are, if so many bytes are free there."""
LANES = {
    MACHINES: "boots machines, about 20 min in all: CPUMOND_REQUIRE=all or `pytest tests/machine` runs it",
    SLOW: "takes long and rarely finds anything: `pytest tests/slow` runs it",
}
"""Folders of tests that are left out unless asked for, and what is said of them then."""
ROOM = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
ALONE = pytest.StashKey[int]()
"""How many of this run's tests must run alone."""
SEED = 20_261
"""Of the order of tests and of what they draw, in CI; any other run has one of its own and prints it."""
RUNNING: dict[str, None] = {}
"""Tests that have begun and not ended, in all processes."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if SAME and config.getoption("randomly_seed", None) == "default":
        config.option.randomly_seed = SEED
    # Started in the background, or with nohup, this ignores them, and so would all that is started here.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    # Images of containers often ask for no compiled files; each of many processes would compile all that it imports.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not hasattr(config, "workerinput"):
        if are_all_in(config, UNIT) and os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
            # Thousands of small files, many of them synced: what a disk takes for that is not what is tested.
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
        config.stash[ROOM] = tempfile.TemporaryDirectory(prefix="cpumond-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if ROOM in config.stash:
        config.stash[ROOM].cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes share a room."""
    node.workerinput["room"] = node.config.stash[ROOM].name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Most tests wait, so more processes than cores; fewer for unit tests and machines, which wait for nothing."""
    works = bool(REQUIRED) or is_named(config, MACHINES) or are_all_in(config, UNIT)
    return min(len(os.sched_getaffinity(0)), 4) + (1 if works else 3)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in the order in which the processes are done soonest: first those with tests that must run alone, while
    nothing long runs beside them, then the emulated machines, which take longest; the many short ones fill the end."""
    twice = [name for name, number in Counter(item.nodeid for item in items).items() if number > 1]
    if twice:
        raise pytest.UsageError(f"tests of one name are one test to pytest-xdist: {', '.join(twice[:5])}")
    waiting = {item.path for item in items if item.get_closest_marker("alone") is not None}

    def rank(item: pytest.Item) -> int:
        if item.path in waiting:
            return 0
        if item.path.parent == MACHINES:
            return 1 if item.path.name == "test_vm.py" else 2
        return 3 if item.path.parent.name == "integration" else 4

    items.sort(key=rank)
    config.stash[ALONE] = sum(item.get_closest_marker("alone") is not None for item in items)
    left_out = {lane: reason for lane, reason in LANES.items() if not is_named(config, lane)}
    if REQUIRED:
        left_out.pop(MACHINES, None)
    for item in items:
        if item.path.parent in left_out:
            item.add_marker(pytest.mark.skip(reason=left_out[item.path.parent]))


def is_named(config: pytest.Config, lane: Path) -> bool:
    """Whether the command line names this folder or something in it, or is given there."""
    words = getattr(config, "workerinput", {}).get("mainargv", config.invocation_params.args)
    names = [str(word).partition("::")[0] for word in words if not str(word).startswith("-")]
    return any(Path(os.path.abspath(name)).is_relative_to(lane) for name in ["", *names])


def are_all_in(config: pytest.Config, lane: Path) -> bool:
    """Whether this run is of tests in this folder only."""
    return all(Path(os.path.abspath(name.partition("::")[0])).is_relative_to(lane) for name in config.args)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests run in several processes; one that is marked ``alone`` waits until the others rest, and keeps it so.

    It waits before its own time begins. Other work of this host cannot be asked to rest: it gets what is left.
    """
    alone = item.get_closest_marker("alone") is not None
    room = getattr(item.config, "workerinput", {}).get("room")
    with contextlib.ExitStack() as stack:
        if room is not None:
            if item.path.parent == MACHINES and item.get_closest_marker("skip") is None:
                # It takes minutes, in which nobody could be alone.
                wait_for_ends(Path(room), item.config.stash[ALONE])
            if alone:
                stack.callback(note_end, Path(room))
            stack.enter_context(hold_room(Path(room), alone))
        if alone:
            stack.enter_context(preferred())
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CPUMOND_REQUIRE=all a test that was left out is a failure that says what is missing; one of the slow lane is
    where that was asked for."""
    report = yield
    is_wanted = REQUIRED and (item.path.parent != SLOW or is_named(item.config, SLOW))
    if is_wanted and report.skipped and not hasattr(report, "wasxfail"):
        reason = call.excinfo.value if call.excinfo is not None else "skipped"
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: left out, but CPUMOND_REQUIRE=all: {reason}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    RUNNING[nodeid] = None


def pytest_runtest_logfinish(nodeid: str) -> None:
    RUNNING.pop(nodeid, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A run that is ended from outside says what it was at."""
    if RUNNING:
        terminalreporter.section("had begun and did not end")
        for nodeid in RUNNING:
            terminalreporter.write_line(nodeid)
