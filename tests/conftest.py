"""Shared by all tests: what a skip means, and where nothing may be left behind."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from turns import hold_room

# How fast a busy machine makes up examples says nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

REQUIRED = os.environ.get("CPUMOND_REQUIRE") == "all"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which two processes are done soonest: the emulated machines first, which take longest, and
    last those with tests that must run alone, so that nobody waits for them long."""
    waiting = {item.path for item in items if item.get_closest_marker("alone") is not None}

    def rank(item: pytest.Item) -> int:
        if item.path in waiting:
            return 3
        return 2 if item.path.parent.name != "machine" else item.path.name != "test_vm.py"

    items.sort(key=rank)


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


@pytest.fixture(autouse=True)
def take_turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests run in two processes; one that is marked ``alone`` waits until the other process rests, and keeps it so."""
    alone = request.node.get_closest_marker("alone") is not None
    with hold_room(tmp_path_factory, alone):
        yield
