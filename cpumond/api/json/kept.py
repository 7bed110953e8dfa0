"""Cache of values that are slow to compute. All requests share it; it computes rarely enough for the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Generator, Hashable
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

PAUSE: Final = 400.0
"""A value is kept for its computing time times this number, so computing takes at most 0.25 % of the loop's time."""
FREE_S: Final = 0.0005
"""Seconds of computing time that do not count, so that values of small clusters are computed for each request."""
MAX_KEPT_S: Final = 10.0


class Kept(Generic[K, T]):
    """Cached values by key. A value whose computation failed is computed again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._made: dict[K, _Made[T]] = {}

    async def get(self, key: K, make: Callable[[], Coroutine[Any, Any, T]], *made_of: Any, version: object = None) -> T:
        """Return the value for ``key``. It is computed again at once if ``made_of`` has changed, and after a while if
        only ``version`` has changed or is None."""
        now, made = self._clock(), self._made.get(key)
        is_old = made is not None and now >= made.until and (version is None or version != made.version)
        if made is None or is_old or made.made_of != made_of:
            self._made = {each: known for each, known in self._made.items() if now < known.until + MAX_KEPT_S}
            made = self._made[key] = _Made(made_of, version, make(), self._clock)
        return await asyncio.shield(made.task)


class _Made(Generic[T]):
    """A value that is being computed, or that has been computed and is kept until ``until``."""

    def __init__(
        self, made_of: object, version: object, making: Coroutine[Any, Any, T], clock: Callable[[], float]
    ) -> None:
        self.made_of = made_of
        self.version = version
        self.until = math.inf
        self._clock = clock
        self._making = making.__await__()
        self._spent_s = -FREE_S
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> T:
        try:
            value = await self
        except BaseException:
            self.made_of = self.until = -math.inf
            raise
        self.until = self._clock() + min(max(PAUSE * self._spent_s, 0.0), MAX_KEPT_S)
        return value

    def __await__(self) -> Generator[Any, None, T]:
        """Run the computation, and count the thread's seconds."""
        error: BaseException | None = None
        while True:
            begun = time.thread_time()
            try:
                waited_for = self._making.send(None) if error is None else self._making.throw(error)
            except StopIteration as end:
                value: T = end.value
                return value
            finally:
                self._spent_s += time.thread_time() - begun
            try:
                error = yield waited_for
            except BaseException as raised:
                error = raised
