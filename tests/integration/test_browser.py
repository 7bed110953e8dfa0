"""The watched pages of the browser tests: what goes wrong in one fails its test, and nothing else does."""

from collections.abc import Iterator

import pytest
from answering import Asked, listen
from browser import Watch
from waiting import wait_until

pytestmark = pytest.mark.browser


def answer(asked: Asked) -> None:
    """``/missing`` is not there, all else is an empty page."""
    asked.reply(404 if asked.path == "/missing" else 200, **{"Content-Type": "text/html"})


@pytest.fixture
def url() -> Iterator[str]:
    with listen(answer) as address:
        yield address


@pytest.fixture
def watched(browser) -> Iterator[tuple[Watch, object]]:
    context = browser.new_context()
    page = context.new_page()
    yield Watch(page), page
    context.close()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("console.error('a mistake')", "console: a mistake"),
        ("Promise.reject(new Error('nobody waits for it')); 0", "uncaught: nobody waits for it"),
        ("alert('<img src=x>')", "dialog: alert: <img src=x>"),
        ("fetch('/missing').then(() => 0)", "status: 404 GET "),
        ("fetch('https://example.com/').catch(() => 0)", "net::ERR_NAME_NOT_RESOLVED"),
    ],
)
def test_what_goes_wrong_is_noticed_unless_it_is_allowed(watched, url, script, problem):
    watch, page = watched
    page.goto(url)
    page.evaluate(script)
    wait_until(lambda: any(problem in text for text in watch.problems()), problem)
    page.allow("^(console|uncaught|dialog|status|request failed): ")
    assert watch.problems() == []
