"""Shared by all tests: what a skip means, and where nothing may be left behind."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

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
