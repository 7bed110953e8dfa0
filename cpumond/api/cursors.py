"""Pages of lists by cursors: a page begins after the last item of the page before, even if the list changed since then.

Pure. If items are sorted by values that change, an item whose value passes the cursor may be on two pages or on none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from cpumond.scheduler.model import CommandError

T = TypeVar("T")


def cut_page(
    items: Sequence[T], limit: int, cursor: str, key: Callable[[T], Any], precedes: Callable[[Any, Any], bool],
    order: str = "", offset: int = 0,
) -> tuple[Sequence[T], str | None]:  # fmt: skip
    """Return a page of at most ``limit`` sorted items, and the cursor of the next page (None on the last page).

    ``cursor``: that of the previous page; "" for the first page, which begins at ``offset``. ``key``: returns the plain
    values by which an item is sorted; ``precedes``: whether one key comes before another. Raises CommandError."""
    if cursor:
        last = _read(cursor, order)
        try:
            offset = bisect_left(range(len(items)), True, key=lambda place: precedes(last, key(items[place])))
        except (TypeError, ValueError):
            raise _make_error() from None
    shown = items[offset : offset + limit]
    if not shown or offset + len(shown) == len(items):
        return shown, None
    return shown, msgspec.json.encode((order, key(shown[-1]))).hex()


def _read(cursor: str, order: str) -> Any:
    try:
        of_order, key = msgspec.json.decode(bytes.fromhex(cursor), type=tuple[str, Any])
    except (ValueError, RecursionError):
        raise _make_error() from None
    if of_order != order:
        raise CommandError("query: cursor: it belongs to a list in another order; start without a cursor")
    return key


def _make_error() -> CommandError:
    return CommandError("query: cursor: expected the unchanged `next` of the previous page; start without a cursor")
