"""Stores by their configured name: the path of a SQLite database, or the conninfo of a PostgreSQL database."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import ConfigError, UnavailableError
from cpumond.core.term import MAX_TERM
from cpumond.scheduler.store import TERM, Arbiter, Change, Store, StoreError
from cpumond.scheduler.store.sqlite import open_sqlite_store

if TYPE_CHECKING:
    from types import ModuleType


def make_arbiter(conninfo: str) -> Arbiter:
    """Return the arbiter of the schedulers on a PostgreSQL database. Raises ConfigError if psycopg is missing or
    ``conninfo`` cannot be read."""
    postgresql = _import_postgresql()
    try:
        arbiter: Arbiter = postgresql.PostgresArbiter(conninfo)
    except StoreError as error:
        raise ConfigError(str(error)) from None
    return arbiter


def is_conninfo(place: str) -> bool:
    """Whether ``place`` is for libpq: ``key=value`` or a URL. A text that begins with / or . is always a path."""
    return not place.startswith(("/", ".")) and ("=" in place or "://" in place)


def describe_place(place: str) -> str:
    """A store's name for messages: the path, or the database without its password. Raises ConfigError, StoreError."""
    if is_conninfo(place):
        return str(_import_postgresql().name_database(place))
    return os.path.realpath(place)


def open_place(place: str, above: int = 0, is_new: bool = True) -> tuple[Store, int]:
    """Open a store and lock it against schedulers. Return it and a term: SQLite's own, or in PostgreSQL a new one above
    ``above``. ``is_new``: create a missing SQLite database. Raises StoreError, ConfigError, UnavailableError."""
    if is_conninfo(place):
        alone = _import_postgresql().AloneStore(place, above)
        return alone, int(alone.term)
    if not (is_new or os.path.lexists(place)):
        raise UnavailableError(f"{place}: there is no database; give the path of one, state_dir/scheduler.db")
    store = open_sqlite_store(place)
    return store, read_term(store)


def read_term(store: Store) -> int:
    """Return the term that a SQLite database keeps, 0 if it keeps none. Raises StoreError."""
    for kind, _, value in store.load():
        if kind == TERM:
            try:
                term = decode_json(value, dict[str, int]).get(TERM, 0)
            except ContentError as error:
                raise StoreError(f"the store holds a {TERM} that this version cannot read: {error}") from None
            return min(max(term, 0), MAX_TERM)
    return 0


def make_term(term: int) -> Change:
    return Change(TERM, TERM, msgspec.json.encode({TERM: term}))


def _import_postgresql() -> ModuleType:
    try:
        from cpumond.scheduler.store import postgresql
    except ImportError as error:
        raise ConfigError(
            f"a store in PostgreSQL needs psycopg 3.1.13 or later ({error}): pip install 'psycopg[binary]'"
        ) from None
    return postgresql
