"""Schedules Python's cyclic garbage collection in the scheduler."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Turn automatic collection off: it would scan all objects again and again, although few of them are in cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
