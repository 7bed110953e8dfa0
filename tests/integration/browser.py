"""A headless Chromium: pages that fail their test when anything goes wrong in them; ``conftest`` has the fixtures."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request, Response

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--no-proxy-server",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # a page that needs an outside address fails
)  # fmt: skip
WINDOW = {"width": 1280, "height": 800}
PATIENCE_MS = 60_000
"""Longer than a page takes for anything on a busy machine."""
ABORTED = "net::ERR_ABORTED"
"""The page itself gave up the request: it was left, or wants something newer."""


def find_program() -> str | None:
    """The path of Chromium, best of all its headless shell: a page opens there at half the cost."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Not for the whole session: while it is there an event loop runs in this thread, and ``asyncio.run`` fails."""
    program = find_program()
    if program is None:
        pytest.skip("needs Chromium (apt-get install --no-install-recommends chromium-headless-shell)")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs the Python package playwright: sh tests/venv.sh all"
    )
    sync_api.expect.set_options(timeout=PATIENCE_MS)
    home = str(tmp_path_factory.mktemp("home"))
    with sync_api.sync_playwright() as playwright:
        environment = {**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS), env=environment)
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """What went wrong in one page; ``page.allow(r"422 POST .*/pools")`` names what the test means to cause."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._problems: list[str] = []
        self._allowed: list[re.Pattern[str]] = []
        page.on("console", self._take_message)
        page.on("pageerror", lambda error: self._problems.append(f"uncaught: {error}"))
        page.on("requestfailed", self._take_failure)
        page.on("response", self._take_response)
        page.on("dialog", self._take_dialog)
        page.on("crash", lambda _: self._problems.append("the page crashed"))
        page.allow = self.allow  # type: ignore[attr-defined]

    def allow(self, *patterns: str) -> None:
        self._allowed += [re.compile(pattern) for pattern in patterns]

    def _take_message(self, message: ConsoleMessage) -> None:
        # What could not be loaded is a failed request or a status, too.
        if message.type in ("error", "assert") and not message.text.startswith("Failed to load resource"):
            place = message.location
            self._problems.append(f"console: {message.text} ({place.get('url')}:{place.get('lineNumber')})")

    def _take_failure(self, request: Request) -> None:
        if request.failure != ABORTED:
            self._problems.append(f"request failed: {request.method} {request.url}: {request.failure}")

    def _take_response(self, response: Response) -> None:
        if response.status >= 400:
            self._problems.append(f"status: {response.status} {response.request.method} {response.url}")

    def _take_dialog(self, dialog: Dialog) -> None:
        self._problems.append(f"dialog: {dialog.type}: {dialog.message}")
        dialog.dismiss()

    def problems(self) -> list[str]:
        """All up to now that are not allowed."""
        from playwright.sync_api import Error

        with contextlib.suppress(Error):  # a page that is gone
            self._page.evaluate("0")  # what the browser said before this answer is here now
        return [text for text in self._problems if not any(pattern.search(text) for pattern in self._allowed)]


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Makes watched pages, each with cookies and storage of its own; options are those of playwright's contexts."""
    opened: list[tuple[Watch, Any]] = []

    def make(**options: Any) -> Page:
        context = browser.new_context(**{"viewport": WINDOW, "reduced_motion": "reduce", **options})
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        opened.append((Watch(page), context))
        return page

    yield make
    problems = [text for watch, _ in opened for text in watch.problems()]
    for _, context in opened:
        context.close()
    assert not problems, "in the browser:\n" + "\n".join(problems)


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    """A watched page of 1280x800, empty."""
    return new_page()


@pytest.fixture
def sign(new_page: Callable[..., Page], scheduler: Any) -> Callable[..., Page]:
    """Opens a page of the module's scheduler as somebody whose token is called as the user."""
    from web_site import show, sign_in

    def open_as(user: str, where: str, **options: Any) -> Page:
        page = sign_in(new_page(**options), user)
        show(page, scheduler, where)
        return page

    return open_as
