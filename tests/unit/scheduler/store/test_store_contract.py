"""The store in SQLite keeps the contract of stores."""

from collections.abc import Callable

import pytest
from store_contract import Opener, StoreContract

from cpumond.scheduler.store.sqlite import open_sqlite_store


class TestSqlite(StoreContract):
    @pytest.fixture
    def make_opener(self, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Opener]:
        def make() -> Opener:
            path = tmp_path_factory.mktemp("store") / "store" / "records.db"
            return lambda: open_sqlite_store(str(path))

        return make
