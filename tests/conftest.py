"""Shared by all tests: what runs when, what a skip means, and what was running when a run was ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from spine import SPINE
from turns import hold_room, note_end, preferred, wait_for_ends

# A child that gRPC has not been told of begins no thread of it: trials of the scheduler fork processes in which another
# test may have used it, which no scheduler does.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

REQUIRED = os.environ.get("CPUMOND_REQUIRE") == "all"
"""Whether a test that is left out is a failure."""
TESTS = Path(__file__).parent
INTEGRATION, MACHINES, SLOW, UNIT = (TESTS / name for name in ("integration", "machine", "slow", "unit"))
MEMORY, MEMORY_BYTES = "/dev/shm", 2**30
"""Where the files of unit tests are, if so many bytes are free there."""
LANES = {
    "short": "unit tests, a few examples of each law, a few tests of each real part; "
    "`pytest --all` runs everything but tests/slow",
    "all": "everything but tests/slow",
    "rest": "what the short lane leaves out of `pytest --all`",
    "named": "the tests that are named",
}
"""What a run is, and what is printed of it: ``--all``, ``--rest``, files or folders of tests named, else short."""
LANE = pytest.StashKey[str]()
ROOM = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
ALONE = pytest.StashKey[int]()
"""How many of this run's tests must run alone."""
SEED = 20_261
"""Of the order of tests and of what they draw, in CI; any other run has one of its own and prints it."""
RUNNING: dict[str, None] = {}
"""Tests that have begun and not ended, in all processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cpumond")
    group.addoption("--all", action="store_const", const="all", dest="lane", help=LANES["all"])
    group.addoption("--rest", action="store_const", const="rest", dest="lane", help=LANES["rest"])


def find_lane(config: pytest.Config) -> str:
    """A key of LANES."""
    if hasattr(config, "workerinput"):
        return str(config.workerinput["lane"])
    if config.option.lane:
        return str(config.option.lane)
    named = [Path(os.path.abspath(name.partition("::")[0])) for name in config.args]
    is_named = all(path != TESTS and path.is_relative_to(TESTS) for path in named)
    return "named" if is_named and config.args_source is pytest.Config.ArgsSource.ARGS else "short"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[LANE] = os.environ["CPUMOND_LANE"] = find_lane(config)
    from examples import SAME, examples  # not before the lane is known

    # How fast a busy machine makes up examples says nothing about what is tested.
    settings.register_profile("any machine", examples(100), suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
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
        if config.stash[LANE] == "short" and config.getoption("numprocesses", 0):
            compile_once()
        config.stash[ROOM] = tempfile.TemporaryDirectory(prefix="cpumond-tests-")


def pytest_report_header(config: pytest.Config) -> str:
    lane = config.stash[LANE]
    return f"lane: {lane} ({LANES[lane]})"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What belongs to another lane is not even imported."""
    lane = config.stash[LANE]
    left_out = {"short": (MACHINES, SLOW), "all": (SLOW,), "rest": (SLOW, UNIT), "named": ()}[lane]
    if collection_path in left_out:
        return True
    is_test = collection_path.parent == INTEGRATION and collection_path.name.startswith("test_")
    return True if lane == "short" and is_test and collection_path.name not in SPINE else None


def choose_by_spine(lane: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """The items of this lane, short or rest. Raises UsageError where the spine names a test that does not exist."""
    names = {file: {item.originalname for item in items if item.path.name == file} for file in SPINE}  # type: ignore[attr-defined]
    found = {file: tests for file, tests in SPINE.items() if names[file]}  # a module may be skipped as a whole
    if unknown := [f"{file}::{test}" for file, tests in found.items() for test in tests if test not in names[file]]:
        raise pytest.UsageError(f"tests/spine.py names tests that do not exist: {', '.join(unknown)}")

    def is_chosen(item: pytest.Item) -> bool:
        if item.path.parent != INTEGRATION:
            return True
        of_spine = item.originalname in SPINE.get(item.path.name, ())  # type: ignore[attr-defined]
        return of_spine if lane == "short" else not of_spine

    return [item for item in items if is_chosen(item)]


def compile_once() -> None:
    """Compile the short lane's test modules on all cores if none is yet: else each process of xdist would do it."""
    if any(UNIT.rglob("__pycache__/test_*-pytest-*.pyc")):
        return
    folders = [*(path for path in UNIT.iterdir() if path.name != "__pycache__"), TESTS / "property"]
    folders.sort(key=lambda path: -sum(each.stat().st_size for each in path.rglob("*.py")))
    folders += (INTEGRATION / name for name in SPINE)
    cores = min(len(os.sched_getaffinity(0)), 4)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    begun = [
        subprocess.Popen([*command, *map(str, folders[n::cores])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for n in range(cores)
    ]
    for process in begun:
        process.wait()


def pytest_unconfigure(config: pytest.Config) -> None:
    if ROOM in config.stash:
        config.stash[ROOM].cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["room"] = node.config.stash[ROOM].name
    node.workerinput["lane"] = node.config.stash[LANE]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Most integration tests wait, so more processes than cores; fewer where most tests compute."""
    # Asked before pytest_configure has noted the lane.
    works = find_lane(config) == "short" or is_named(config, MACHINES) or are_all_in(config, UNIT)
    return min(len(os.sched_getaffinity(0)), 4) + (1 if works else 3)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in the order in which the processes are done soonest: first those with tests that must run alone, while
    nothing long runs beside them, then the emulated machines, which take longest; the many short ones fill the end."""
    twice = [name for name, number in Counter(item.nodeid for item in items).items() if number > 1]
    if twice:
        raise pytest.UsageError(f"tests of one name are one test to pytest-xdist: {', '.join(twice[:5])}")
    if config.stash[LANE] in ("short", "rest"):
        chosen = set(choose_by_spine(config.stash[LANE], items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    waiting = {item.path for item in items if item.get_closest_marker("alone") is not None}

    def rank(item: pytest.Item) -> int:
        if item.path in waiting:
            return 0
        if item.path.parent == MACHINES:
            return 1 if item.path.name == "test_vm.py" else 2
        return 3 if item.path.parent.name == "integration" else 4

    items.sort(key=rank)
    config.stash[ALONE] = sum(item.get_closest_marker("alone") is not None for item in items)


def is_named(config: pytest.Config, folder: Path) -> bool:
    """Whether the command line names this folder or something in it."""
    names = [str(name).partition("::")[0] for name in config.args]
    return find_lane(config) == "named" and any(Path(os.path.abspath(name)).is_relative_to(folder) for name in names)


def are_all_in(config: pytest.Config, lane: Path) -> bool:
    return all(Path(os.path.abspath(name.partition("::")[0])).is_relative_to(lane) for name in config.args)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """One that is marked ``alone`` waits until the others rest, before its own time begins, and keeps it so. Other work
    of this host cannot be asked to rest: it gets what is left."""
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
    """With CPUMOND_REQUIRE=all a test that was left out is a failure that says what is missing."""
    report = yield
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail"):
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
    """A run that is ended from outside says what it was at; emulated machines say what they did, in the property
    ``machine`` of their tests."""
    if RUNNING:
        terminalreporter.section("had begun and did not end")
        for nodeid in RUNNING:
            terminalreporter.write_line(nodeid)
    lines = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == "machine":
                    lines[text] = None
    if lines:
        terminalreporter.section("emulated machines")
        for text in lines:
            terminalreporter.write_line(text)
