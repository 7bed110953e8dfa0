"""Fixtures of the integration tests."""

from __future__ import annotations

from browser import browser, new_page, page, web_loop  # noqa: F401
from postgresql import database, postgresql  # noqa: F401
from real_parts import agent, cgroups, hierarchies, scheduler  # noqa: F401
