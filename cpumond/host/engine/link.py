"""One thread that queries the engines of this host, so that nothing else ever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import structlog

from cpumond.host.engine.model import Engine, EngineError, EngineReply, EngineView, Key
from cpumond.host.engine.nudge import wait_nudged

RETRY_S, RETRY_MAX_S = 0.25, 5.0
LAST_S = 1.0
MAX_NOTES = 20
"""Maximum number of sentences about one engine's jobs that are shown."""

log = structlog.get_logger("cpumond.agent")


class EngineThread:
    """Follows engines. ``views``: the last answer of each engine; any thread may read it. ``on_news`` is called in this
    thread when a view has changed."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.views: dict[Key, EngineView] = {}
        self._on_news = on_news
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._nudges: dict[Key, asyncio.Event] = {}
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in self._tasks.values():
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks.values(), return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def follow(self, engines: dict[Key, Callable[[], Engine]]) -> None:
        """Follow exactly these engines from now on, without interruption for those that are followed already."""
        self._loop.call_soon_threadsafe(self._follow, engines)

    def _follow(self, engines: dict[Key, Callable[[], Engine]]) -> None:
        for key in self._tasks.keys() - engines.keys():
            self._tasks.pop(key).cancel()
            del self._nudges[key], self.views[key]
        for key in engines.keys() - self._tasks.keys():
            self.views[key] = EngineView(key[0])
            self._nudges[key] = asyncio.Event()
            self._tasks[key] = self._loop.create_task(self._keep_asking(key, engines[key]()))

    def nudge(self, keys: Iterable[Key]) -> None:
        """Query engines at once, because a cgroup without a name was found or a limit was changed."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._nudge, list(keys))

    def _nudge(self, keys: list[Key]) -> None:
        for key in keys:
            if key in self._nudges:
                self._nudges[key].set()

    async def _keep_asking(self, key: Key, engine: Engine) -> None:
        delay_s = RETRY_S
        while True:
            asked_at_s = None

            def publish(answer: EngineReply) -> None:
                nonlocal asked_at_s
                asked_at_s = time.monotonic()
                self._publish(key, answer, asked_at_s)

            try:
                await engine.watch(publish, self._nudges[key])
                problem = f"{engine.kind}: it ended"
            except EngineError as error:
                problem = str(error)
            except Exception as error:
                # Whatever happens with one engine, the others continue.
                problem = f"{engine.kind}: {type(error).__name__}: {error}"
                log.exception("engine_failed", engine=engine.kind)
            delay_s = RETRY_S if asked_at_s is not None else min(2 * delay_s, RETRY_MAX_S)
            self._lose(key, problem)
            self._nudges[key].clear()
            if await wait_nudged(self._nudges[key], delay_s):
                await asyncio.sleep(RETRY_S)

    def _publish(self, key: Key, answer: EngineReply, asked_at_s: float) -> None:
        before = self.views[key]
        view = make_view(key, answer, asked_at_s)
        if before.problem:
            log.info("engine_back", engine=key[0], socket=key[1] or None, title=view.title, jobs=view.count_jobs())
        is_first = before.asked_at_s is None
        self._put(key, view, is_first or msgspec.structs.replace(view, asked_at_s=before.asked_at_s) != before)

    def _lose(self, key: Key, problem: str) -> None:
        before = self.views[key]
        if not before.problem:
            log.warning(
                "engine_away", engine=key[0], error=problem, advice="the last known names and requests are kept"
            )
        self._put(key, msgspec.structs.replace(before, problem=problem), problem != before.problem)

    def _put(self, key: Key, view: EngineView, is_news: bool) -> None:
        # A view is replaced as a whole and never changed, so readers always see a complete one.
        self.views[key] = view
        if is_news:
            self._on_news()

    def close(self) -> None:
        """End the thread; requests under way are cancelled."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LAST_S)


def ask_each(engines: Mapping[Key, Callable[[], Engine]], timeout_s: float) -> dict[Key, EngineView]:
    """Return these engines' present answers; one that does not answer within ``timeout_s`` has a ``problem``."""

    async def ask_all() -> list[EngineView]:
        return await asyncio.gather(*(_ask(key, make, timeout_s) for key, make in engines.items()))

    return dict(zip(engines, asyncio.run(ask_all()), strict=True))


async def _ask(key: Key, make: Callable[[], Engine], timeout_s: float) -> EngineView:
    kind, answered = key[0], asyncio.get_running_loop().create_future()

    def publish(answer: EngineReply) -> None:
        if not answered.done():
            answered.set_result(make_view(key, answer, time.monotonic()))

    async def watch() -> None:
        await make().watch(publish, asyncio.Event())

    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait({watching, answered}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            view: EngineView = answered.result()
            return view
        if not watching.done():
            return EngineView(kind, problem=f"{kind}: no response within {timeout_s:g} s")
        watching.result()
        return EngineView(kind, problem=f"{kind}: it ended")
    except EngineError as error:
        return EngineView(kind, problem=str(error))
    except Exception as error:
        # Whatever happens with one engine, the others are asked.
        return EngineView(kind, problem=f"{kind}: {type(error).__name__}: {error}")
    finally:
        watching.cancel()
        await asyncio.wait({watching}, timeout=LAST_S)
        if watching.done() and not watching.cancelled():
            watching.exception()  # retrieves the exception, which asyncio would print


def make_view(key: Key, answer: EngineReply, asked_at_s: float) -> EngineView:
    notes, more = answer.notes[:MAX_NOTES], len(answer.notes) - MAX_NOTES
    notes += (f"{key[0]}: {more} more such sentences",) if more > 0 else ()
    return EngineView(key[0], {each.path: each for each in answer.jobs}, asked_at_s, "", answer.title, notes)
