"""What tests of the command line share."""

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest


@contextlib.contextmanager
def _be_nobody() -> Iterator[None]:
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def no_rights() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """An ordinary user for the time of a block, also where the tests run as root."""
    return _be_nobody
