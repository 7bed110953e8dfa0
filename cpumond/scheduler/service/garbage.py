"""When Python's collector of cycles goes through the scheduler's objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Most objects are in no cycles; the automatic collector would go through all of them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
