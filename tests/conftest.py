"""Shared by all tests: what a skip means, and where nothing may be left behind."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

# How fast a busy machine makes up examples says nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

REQUIRED = os.environ.get("CPUMOND_REQUIRE") == "all"


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
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    shared = tmp_path_factory.getbasetemp().parent
    alone = request.node.get_closest_marker("alone") is not None
    with (shared / "door.lock").open("w") as door, (shared / "room.lock").open("w") as room:
        # Who waits for the room stands in the door, so that nobody slips in before.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
