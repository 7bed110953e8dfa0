"""Fixtures of the tests that take long and use real parts."""

from browser import browser, new_page, page  # noqa: F401
from postgresql import database, postgresql  # noqa: F401
from real_parts import agent, cgroups, hierarchies  # noqa: F401
