"""Sends the waste of each week once to the owners, by a webhook, a command or both ([waste_summary]).

A notice is stored before it is sent; therefore it is sent at most once: if the process is killed meanwhile, the notice
is not repeated. A notice that is known to have failed is repeated, up to MAX_TRIES times in total, also after a
take-over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final

import httpx2
import msgspec
import structlog

from cpumond import __version__
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import CpumondError
from cpumond.scheduler.history.savings import WEEK_S, monday_before
from cpumond.scheduler.history.waste import WasteView, describe_waste
from cpumond.scheduler.store import Change, Store

log = structlog.get_logger("cpumond.scheduler")

KIND: Final = "waste_notice"
WEBHOOK: Final = "webhook"
TIMEOUT_S: Final = 10.0
"""Seconds that one try may take. When the scheduler exits, it waits as long for a try in progress."""
MAX_TRIES: Final = 6
AGAIN_S: Final = 600.0
"""Seconds between tries."""
_KEPT_VARIABLES: Final = ("PATH", "HOME", "LANG", "TZ")
"""Environment variables that the command inherits. Other variables of the scheduler may contain passwords."""


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A notice, stored under its recipient: ``WEBHOOK`` or "user:NAME". ``week``: start of the notice's week."""

    week: float
    tries: int = 0
    has_failed: bool = False


class WasteNotices:
    """``at_s``: when notices are due, in seconds from Monday 0:00 UTC. ``read``: returns the waste of a past week."""

    def __init__(
        self, store: Store, write: Callable[[Sequence[Change]], Awaitable[None]], now: Callable[[], float],
        read: Callable[[float, int], Awaitable[WasteView]], at_s: float, webhook: str, command: tuple[str, ...],
        cluster_name: str,
    ) -> None:  # fmt: skip
        """Read the stored notices from ``store``."""
        self._write, self._now, self._read, self._at_s = write, now, read, at_s
        self._webhook, self._command, self._cluster_name = webhook, command, cluster_name
        self._notices: dict[str, Notice] = {}
        for kind, key, value in store.load():
            if kind == KIND:
                with contextlib.suppress(ContentError):
                    self._notices[key] = decode_json(value, Notice)
        self._due_at = 0.0
        self._is_closing = False
        self._running: asyncio.Task[None] | None = None

    def take_if_due(self) -> None:
        """Start to send the due notices that have not been sent yet. Never raises."""
        now = self._now()
        if now >= self._due_at and (self._running is None or self._running.done()):
            self._due_at = now + AGAIN_S
            self._running = asyncio.ensure_future(self._send_all(now))

    async def close(self) -> None:
        """Wait for the try in progress."""
        self._is_closing = True
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=TIMEOUT_S + 1.0)

    async def _send_all(self, now: float) -> None:
        monday, is_done = monday_before(now - self._at_s), True
        try:
            view = await self._read(now, 1 if monday == monday_before(now) else 2)
            await self._forget([key for key, each in self._notices.items() if each.week < view.since - WEEK_S])
            for recipient, send in self._list(view):
                last = self._notices.get(recipient)
                if last is None or last.week < view.since:
                    last = Notice(view.since)
                elif last.week > view.since or not last.has_failed or last.tries >= MAX_TRIES:
                    continue
                if self._is_closing:
                    return
                is_done &= await self._send(recipient, Notice(view.since, last.tries + 1), send)
        except Exception as error:
            unexpected = None if isinstance(error, CpumondError) else error
            log.error("waste_summary_failed", error=str(error), exc_info=unexpected)
            return
        if is_done:
            self._due_at = monday + WEEK_S + self._at_s

    async def _send(self, recipient: str, notice: Notice, send: Callable[[], Awaitable[str]]) -> bool:
        """Try once to send a notice. Returns False if this failed and one more try follows. Raises StoreError."""
        await self._note(recipient, notice)
        try:
            problem = await send()
        except (TimeoutError, subprocess.TimeoutExpired):
            problem = f"not done within {TIMEOUT_S:g} s"
        except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            problem = str(error) or type(error).__name__
        if not problem:
            return True
        log.warning("waste_notice_failed", recipient=recipient, error=problem, tries=notice.tries, of=MAX_TRIES)
        await self._note(recipient, msgspec.structs.replace(notice, has_failed=True))
        return notice.tries >= MAX_TRIES

    async def _note(self, recipient: str, notice: Notice) -> None:
        await self._write([Change(KIND, recipient, msgspec.json.encode(notice))])
        self._notices[recipient] = notice

    async def _forget(self, recipients: Sequence[str]) -> None:
        if recipients:
            await self._write([Change(KIND, key, None) for key in recipients])
        for key in recipients:
            del self._notices[key]

    def _list(self, view: WasteView) -> Iterator[tuple[str, Callable[[], Awaitable[str]]]]:
        """Yield each recipient with a function that sends the notice. The function returns the problem, "" if none."""
        if self._webhook and view.users:
            body = msgspec.json.encode({"cluster_name": self._cluster_name, **msgspec.structs.asdict(view)})
            yield WEBHOOK, partial(post, self._webhook, body)
        # The command would interpret a name that starts with a hyphen as an option.
        names = {each.name for each in view.users if not each.name.startswith("-")} if self._command else ()
        for user in sorted(names):
            mine = [each for each in view.users if each.name == user]
            text = "\n".join(describe_waste(msgspec.structs.replace(view, users=mine, pools=[])))
            yield f"user:{user}", partial(asyncio.to_thread, run, (*self._command, user), f"{text}\n")


async def post(url: str, body: bytes) -> str:
    """Send JSON. Only the status of the response is read. Raises the errors that ``_send`` handles."""
    # To load the trusted certificates takes long, and http does not need them.
    trusted = await asyncio.to_thread(ssl.create_default_context) if url.startswith("https:") else False
    headers = {"Content-Type": "application/json", "User-Agent": f"cpumond/{__version__}"}
    async with (
        asyncio.timeout(TIMEOUT_S),
        httpx2.AsyncClient(verify=trusted, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=headers) as response,
    ):
        return "" if response.is_success else f"status {response.status_code}"


def run(command: Sequence[str], text: str) -> str:
    """Run a command with ``text`` as its input, and ignore its output. Raises TimeoutExpired, OSError, ValueError."""
    done = subprocess.run(  # noqa: S603 - of the operator's configuration
        command, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S,
        env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}, check=False,
    )  # fmt: skip
    return f"exit code {done.returncode}" if done.returncode else ""
