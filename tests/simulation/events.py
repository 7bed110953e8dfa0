"""Virtual time: one heap of events, and an asyncio loop for each process. A stopped process keeps its events until it
goes on, those of a killed one are dropped. What is called in a thread is carried out in one piece, some time after the
call and some time before its result: a process may be stopped or killed on either side of it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import traceback
from asyncio import events as asyncio_events
from collections.abc import Callable, Coroutine
from typing import Any

THREAD_S = (0.0001, 0.002)
SLOW_THREAD_S = (0.002, 0.4)
SLOW_THREADS = 0.02
"""How long each way of a call in a thread takes, and how many of them are slow."""


class Killed(BaseException):
    """The process that is running was killed at this very place."""


class Events:
    """The heap. ``now``: seconds since the world began; ``rng``: the one source of every choice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.count = 0
        self.current: VirtualLoop | None = None
        self.charged_s = 0.0
        self.violation: Exception | None = None
        self.problems: list[str] = []
        """Exceptions that no code of a process took, in words."""
        self.loops: list[VirtualLoop] = []
        self._heap: list[tuple[float, int, VirtualLoop, asyncio.Handle]] = []
        self.world_loop = VirtualLoop(self, "world")
        """Of what belongs to no process: messages under way, ends of jobs, faults."""

    def add(self, at: float, loop: VirtualLoop, handle: asyncio.Handle) -> None:
        self.count += 1
        heapq.heappush(self._heap, (at if at > self.now else self.now, self.count, loop, handle))

    def run(self, until: float) -> None:
        """Let all happen that is due up to ``until``."""
        heap, pop = self._heap, heapq.heappop
        set_running = asyncio_events._set_running_loop
        while heap and heap[0][0] <= until:
            self.now, _, loop, handle = pop(heap)
            if handle._cancelled or loop.is_dead:
                continue
            if loop.is_stopped:
                loop.held.append(handle)
                continue
            self.current = loop
            set_running(loop)
            try:
                handle._run()
            except Killed:
                pass
            finally:
                set_running(None)
                self.current = None
        self.now = max(self.now, until)

    def charge(self, seconds: float) -> None:
        """What is being done in a thread takes so much longer."""
        self.charged_s += seconds


ATTEMPTS = 20


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of one process on ``host``."""

    def __init__(self, events: Events, name: str, host: Any = None) -> None:
        self.events = events
        self.name = name
        self.host = host
        self.is_dead = self.is_stopped = False
        self.held: list[asyncio.Handle] = []
        self.on_kill: list[Callable[[], None]] = []
        self._left: list[asyncio.Task[Any]] = []
        events.loops.append(self)

    # --- what happens to the process

    def kill(self) -> None:
        """It is gone at once; its coroutines are kept as they are, so that none of their clean-up is run."""
        if self.is_dead:
            return
        self.is_dead = True
        self._left = list(asyncio.all_tasks(self))
        for task in self._left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for told in self.on_kill:
            told()

    def discard(self) -> None:
        """End the coroutines of a killed process once its world is over; the collector would in another test."""
        for task in self._left:
            for _ in range(ATTEMPTS):
                # One that waits for something at its end goes on there the next time.
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
                    break
        self._left.clear()

    def stop_process(self) -> None:
        self.is_stopped = True

    def continue_process(self) -> None:
        self.is_stopped = False
        held, self.held = self.held, []
        for handle in held:
            self.events.add(self.events.now, self, handle)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin the process's main task."""
        return self.create_task(coroutine)

    # --- asyncio's loop

    def time(self) -> float:
        return self.events.now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.events.add(self.events.now, self, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.events.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.events.add(when, self, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name or "task", context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        self.call_later(self._draw(), self._work, future, func, args)
        return future

    def _work(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.events.charged_s = 0.0
        try:
            tell, outcome = future.set_result, func(*args)
        except Exception as error:
            tell, outcome = future.set_exception, error  # type: ignore[assignment]

        def done() -> None:
            if not future.done():
                tell(outcome)

        if not self.is_dead:
            self.call_later(self.events.charged_s + self._draw(), done)

    def _draw(self) -> float:
        rng = self.events.rng
        return rng.uniform(*(SLOW_THREAD_S if rng.random() < SLOW_THREADS else THREAD_S))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.is_dead or isinstance(context.get("exception"), Killed):
            return
        error = context.get("exception")
        told = "".join(traceback.format_exception(error)) if error is not None else ""
        self.events.problems.append(f"{self.name}: {context.get('message')}\n{told}")
