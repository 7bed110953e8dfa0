"""What machines did is said at the end of the tests, also of those that passed."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The lines that tests left in their property ``machine``."""
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
