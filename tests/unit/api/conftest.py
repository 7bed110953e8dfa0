"""What tests of the API share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from coroutines import pytest_pyfunc_call  # noqa: F401 - a hook

from cpumond.scheduler.store.sqlite import SqliteStore, open_sqlite_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = open_sqlite_store(str(tmp_path / "scheduler.db"))
    yield store
    store.close()
