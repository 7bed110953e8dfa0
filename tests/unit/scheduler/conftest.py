"""What tests of the running scheduler share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from watched_store import Watched

from cpumond.scheduler.store.sqlite import open_sqlite_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Watched]:
    store = Watched(open_sqlite_store(str(tmp_path / "scheduler.db")))
    yield store
    store.close()
