"""The first minute on the pages: an address that signs in, yt's link, keys, a palette, names that are completed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from web_site import await_page, dialog, expect, show

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

TOKEN = "first/minute+token"  # noqa: S105 - of this test only
NODE_TOKEN = "of-its-node"  # noqa: S105
POOLS = 1000


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    """One that asks for tokens, with a thousand pools."""
    with SchedulerProcess(tmp_path_factory.mktemp("keys")) as process:
        tokens = process.directory / "tokens"
        hashes = [hashlib.sha256(each.encode()).hexdigest() for each in (TOKEN, NODE_TOKEN, "of-ben")]
        tokens.write_text(f"anna:{hashes[0]}:admin\nnodes:{hashes[1]}:node:host-17\nben:{hashes[2]}:user\n")
        tokens.chmod(0o600)
        process.write_config('node_heartbeat_timeout = "1h"\n', api=f'tokens_file = "{tokens}"')
        process.start()
        process.use_token(TOKEN)
        pools = [{"name": f"team-{number:04}-batch", "parent": "<Root>"} for number in range(POOLS)]
        process.post("trees/default/apply", {"tables": {"own": {"options": {"acl_required": True}}, "pools": pools}})
        process.use_token(NODE_TOKEN)
        PlayedNode(process, "host-17").register()
        process.use_token(TOKEN)
        process.start_operation("team-0417-batch", title="Nightly index", job_count=1)
        yield process


def agree(page: Page, user: str) -> None:
    """Sign in with the token of the link, which is asked."""
    expect(dialog(page)).to_contain_text(f"Sign in as {user} with the token of this link?")
    dialog(page).get_by_role("button", name="Sign in", exact=True).click()
    await_page(page)


@pytest.fixture
def signed(page: Page, scheduler: SchedulerProcess) -> Page:
    page.allow("status: 401 ")
    page.goto(f"{scheduler.url}/#token={TOKEN.replace('/', '%2F')}")
    agree(page, "anna")
    return page


def test_the_address_with_a_token_signs_in_and_keeps_nothing_of_it(page, scheduler):
    asked: list[str] = []
    page.allow("status: 401 ")
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{scheduler.url}/#token={TOKEN.replace('/', '%2F')}")
    agree(page, "anna")
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    expect(page.get_by_role("link", name="anna")).to_be_visible()
    assert page.url == f"{scheduler.url}/"
    # The page's own modules may be asked for in between, and one of them is page_tokens.js.
    assert not [url for url in asked if "token=" in url or "first" in url]
    assert TOKEN not in scheduler.log()
    page.evaluate("location.hash = '#/pools'")
    await_page(page, "#/pools")
    assert "token" not in page.evaluate("JSON.stringify([localStorage, history.state, location.href])")
    # In a page that is open already, and with one that is refused.
    page.get_by_role("button", name="Sign out", exact=True).click()
    expect(dialog(page)).to_contain_text("requires a token")
    page.evaluate("location.hash = '#token=wrong'")
    expect(dialog(page)).to_contain_text("requires a token")
    page.evaluate(f"location.hash = '#token={TOKEN}'")
    agree(page, "anna")
    expect(dialog(page)).to_have_count(0)
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


def test_a_session_is_of_all_tabs_and_ends_with_its_token(signed, scheduler):
    made = scheduler.post("tokens", {"user": "carl"})
    other = signed.context.new_page()
    other.goto(f"{scheduler.url}/#/pools")
    await_page(other, "#/pools")
    expect(other.get_by_role("link", name="anna")).to_be_visible()
    assert TOKEN not in other.evaluate("JSON.stringify([localStorage, sessionStorage]) + document.cookie")
    # Whoever sends a link does not choose as whom one acts.
    other.evaluate(f"location.hash = '#token={made['token']}'")
    expect(dialog(other)).to_contain_text("Sign in as carl with the token of this link?")
    dialog(other).get_by_role("button", name="Cancel", exact=True).click()
    expect(other.get_by_role("link", name="anna")).to_be_visible()
    other.evaluate(f"location.hash = '#token={made['token']}'")
    agree(other, "carl")
    for page in (other, signed):
        expect(page.get_by_role("link", name="carl")).to_be_visible()
    assert scheduler.request("DELETE", f"tokens/{made['id']}").is_success
    expect(dialog(signed)).to_contain_text("requires a token")
    dialog(signed).get_by_label("Token", exact=True).fill(TOKEN)
    dialog(signed).get_by_role("button", name="Sign in", exact=True).click()
    expect(signed.get_by_role("link", name="anna")).to_be_visible()
    signed.get_by_role("button", name="Sign out", exact=True).click()
    expect(dialog(signed)).to_contain_text("requires a token")
    assert not [cookie for cookie in signed.context.cookies() if cookie["name"].startswith("cpumond")]
    other.close()


def test_the_link_that_yt_prints_opens_the_operation(signed, scheduler):
    done = scheduler.yt(
        "vanilla", "--async", "--tasks", "{t={job_count=1;command=true}}", "--spec", "{pool=p;title=By-yt}",
        bindings=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [link] = re.findall(r"http://\S+", done.stdout + done.stderr) or [f"no link: {done.stdout}{done.stderr}"]
    assert link.startswith(scheduler.url)
    signed.goto(link)
    await_page(signed)
    expect(signed.get_by_role("heading", level=1)).to_have_text("By-yt")
    assert "?" not in signed.url


def test_keys_go_to_the_search_to_help_and_anywhere(signed, scheduler):
    page = signed
    page.keyboard.press("?")
    expect(dialog(page)).to_contain_text("find a page, pool, operation or node")
    page.keyboard.press("?")  # not while a dialog is open
    expect(dialog(page)).to_have_count(1)
    page.keyboard.press("Escape")
    expect(dialog(page)).to_have_count(0)
    for where, field in (("#/pools", "Find a pool"), ("#/operations", "Search"), ("#/events", "Tree")):
        show(page, scheduler, where)
        page.keyboard.press("/")
        expect(page.get_by_label(field, exact=True)).to_be_focused()
        page.keyboard.type("/?")  # in a field they are signs
        expect(page.get_by_label(field, exact=True)).to_have_value("/?")
    for typed, kind, heading in (
        ("audit", "page", "Audit log"), ("0417", "pool", "team-0417-batch"), ("nightly", "operation", "Nightly index"),
        ("t-17", "node", "Node host-17"),
    ):  # fmt: skip
        page.keyboard.press("Control+k")
        box = dialog(page).get_by_role("combobox")
        expect(box).to_be_focused()
        page.keyboard.type(typed)
        options = dialog(page).get_by_role("option")
        wanted = options.filter(has_text=heading.removeprefix("Node ")).filter(has_text=kind)
        expect(wanted).to_be_visible()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowDown")
        while wanted.get_attribute("aria-selected") != "true":
            page.keyboard.press("ArrowDown")
        assert box.get_attribute("aria-activedescendant") == wanted.get_attribute("id")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    page.keyboard.press("Meta+k")
    page.keyboard.type("no such thing")
    expect(dialog(page).get_by_role("status")).to_have_text("Nothing found")
    page.keyboard.press("Enter")  # goes nowhere
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", level=1)).to_have_text("Node host-17")


def test_names_of_pools_are_completed_from_a_part_of_a_thousand(signed, scheduler):
    page = signed
    asked: list[int] = []
    page.on("response", lambda response: asked.append(len(response.body())) if "/find?" in response.url else None)
    show(page, scheduler, "#/operations")
    page.get_by_role("button", name="Start an operation", exact=True).click()
    pool = dialog(page).get_by_label("Pool", exact=True)
    names = dialog(page).locator("datalist option")
    expect(names).to_have_count(20)
    pool.fill("0417")
    expect(names).to_have_count(1)
    assert names.get_attribute("value") == "team-0417-batch"
    page.keyboard.press("Escape")
    page.get_by_role("search").get_by_label("Pool", exact=True).fill("09")
    option = page.locator("#filter-pool-names option").first
    expect(option).to_have_attribute("value", re.compile("09"))
    assert max(asked) < 3000
