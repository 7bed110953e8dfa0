"""What a person does on the scheduler's pages: a token, a plan first, the scheduler's words when it refuses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from closed_loop import WAIT_S
from web_site import QUICK, Site, await_page, dialog, expect, fill, press, run_site, sign_in

from cpumond.host.cgroup.mounts import Hierarchies

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

TOKEN = "secret-of-the-tests"  # noqa: S105 - of a cluster that lives as long as its test
SLOW_MS = 60_000
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    with run_site(tmp_path_factory.mktemp("site"), hierarchies, nodes=1, token=TOKEN) as site:
        yield site


@pytest.fixture
def signed(page: Page) -> Page:
    return sign_in(page, TOKEN)


@pytest.fixture
def make_pool(site: Site, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Makes a pool of this test, whose name begins with ``prefix``."""

    def make(prefix: str, **attributes: Any) -> str:
        name = f"{prefix}-{next(NUMBERS)}"
        site.cluster.create_pool(name, **attributes)
        return name

    return make


def pools(site: Site) -> dict[str, Any]:
    return {pool["name"]: pool["attributes"] for pool in site.cluster.get("/api/v1/trees/default/pools")["pools"]}


def test_a_token_is_asked_for_checked_and_forgotten(page, site):
    page.allow("status: 401 ")
    page.goto(f"{site.cluster.url}/#/pools")
    expect(dialog(page)).to_contain_text("This scheduler requires a token.")
    field = dialog(page).get_by_label("Token", exact=True)
    expect(field).to_be_focused()
    assert field.get_attribute("type") == "password"
    field.fill("wrong")
    field.press("Enter")
    expect(dialog(page).get_by_role("alert")).to_have_text("Authentication failed: the token is unknown")
    field.fill(TOKEN)
    dialog(page).get_by_role("button", name="Sign in", exact=True).click()
    expect(dialog(page)).to_have_count(0)
    await_page(page)
    expect(page.get_by_role("link", name="<Root>", exact=True)).to_be_visible()
    page.reload()
    await_page(page)
    assert TOKEN not in page.url
    assert page.evaluate("JSON.stringify(localStorage) + document.cookie").count(TOKEN) == 0
    press(page, "Sign out")
    expect(dialog(page)).to_contain_text("requires a token", timeout=SLOW_MS)
    page.keyboard.press("Escape")
    expect(page.get_by_role("link", name="<Root>", exact=True)).to_have_count(0)
    with page.expect_response(lambda response: response.status == 401):
        pass
    expect(dialog(page)).to_have_count(0)  # asked once, not each time that the page asks the scheduler
    press(page, "Enter a token")
    expect(dialog(page).get_by_label("Token", exact=True)).to_be_focused()


def test_a_pool_is_made_after_its_plan_was_shown(signed, site):
    page, before = signed, pools(site)
    site.open(page, "#/pools")
    press(page, "New pool")
    fill(dialog(page), {"Name": "made-here", "Weight": "2.5", "Guaranteed cores": "0.5"})
    create = dialog(page).get_by_role("button", name="Create", exact=True)
    expect(create).to_be_disabled()
    press(page, "Show what it changes")
    expect(dialog(page).get_by_role("heading", name="What it changes")).to_be_visible()
    plan = dialog(page)
    expect(plan.get_by_role("listitem").filter(has_text="made-here is new")).to_contain_text("2.5")
    expect(plan.get_by_role("row").filter(has_text="made-here")).to_contain_text(
        re.compile("new; guarantee . → .*0.5 cores")
    )
    assert pools(site) == before
    # A plan of something else is none.
    dialog(page).get_by_label("Weight", exact=True).fill("3")
    expect(create).to_be_disabled()
    press(page, "Show what it changes")
    create.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("made-here")
    assert page.url.endswith("#/pools/default/made-here")
    made = pools(site)["made-here"]
    assert (made["weight"], made["strong_guarantee_resources"]) == (3.0, {"cpu": 0.5})


@pytest.mark.parametrize(
    ("label", "value", "sentence"),
    [("Weight", "heavy", "weight"), ("Guaranteed cores", "-5", "strong_guarantee_resources")],
)
def test_an_invalid_change_is_said_beside_its_field(signed, site, make_pool, label, value, sentence):
    name = make_pool("kept", weight=2.0)
    before = site.cluster.get("/api/v1/trees/default/pools")["pools"]
    page = signed
    page.allow("status: 422 POST .*/api/v1/plan")
    site.open(page, f"#/pools/default/{name}")
    press(page, "Change")
    field = dialog(page).get_by_label(label, exact=True)
    field.fill(value)
    press(page, "Show what it changes")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    told = page.locator(f"[id='{(field.get_attribute('aria-describedby') or '').split()[1]}']")
    expect(told).to_contain_text(sentence)
    expect(told).to_be_visible()
    assert dialog(page).locator(".error:not(:empty)").count() == 1
    expect(dialog(page).get_by_role("button", name="Apply", exact=True)).to_be_disabled()
    after = site.cluster.get("/api/v1/trees/default/pools")["pools"]
    kept = ("name", "parent", "attributes", "weight", "strong_guarantee", "limits", "mode")
    assert [[pool[key] for key in kept] for pool in after] == [[pool[key] for key in kept] for pool in before]
    # What is right after all goes through.
    field.fill("1")
    press(page, "Show what it changes")
    expect(field).not_to_have_attribute("aria-invalid", "true")
    expect(dialog(page).get_by_role("button", name="Apply", exact=True)).to_be_enabled()


def test_a_pool_is_changed_and_the_table_shows_it_without_loading_anew(signed, new_page, site, make_pool):
    name, page = make_pool("changed", weight=2.0, max_operation_count=7), signed
    table = sign_in(new_page(), TOKEN)
    site.open(table, f"#/pools?find={name}")
    cell = table.get_by_role("row").filter(has=table.get_by_role("link", name=name, exact=True)).get_by_role("cell")
    expect(cell.nth(6)).to_have_text("2")
    site.open(page, f"#/pools/default/{name}")
    press(page, "Change")
    expect(dialog(page).get_by_label("Weight", exact=True)).to_have_value("2")
    dialog(page).get_by_label("Weight", exact=True).fill("4")
    dialog(page).get_by_label("Maximum of operations", exact=True).fill("")  # the default again
    press(page, "Show what it changes")
    press(page, "Apply")
    expect(dialog(page)).to_have_count(0)
    assert pools(site)[name] == {"weight": 4.0}
    expect(cell.nth(6)).to_have_text("4", timeout=SLOW_MS)


def test_a_pool_is_removed_but_not_with_pools_below_unless_that_is_said(signed, site, make_pool):
    name, page = make_pool("removed"), signed
    page.allow("status: 4.. DELETE ", f"status: 404 GET .*/{name}")
    site.cluster.create_pool(f"{name}-child", name)
    site.open(page, f"#/pools/default/{name}")
    press(page, "Remove")
    dialog(page).get_by_role("button", name="Remove", exact=True).click()
    expect(dialog(page).locator(".error:not(:empty)")).to_be_visible()
    assert name in pools(site)
    dialog(page).get_by_label("Also remove all pools below", exact=True).check()
    expect(dialog(page).locator(".error:not(:empty)")).to_have_count(0)
    expect(dialog(page).get_by_role("heading", name="What it changes")).to_be_visible()
    expect(dialog(page).get_by_role("row").filter(has_text=name).filter(has_text="gone")).to_have_count(2)
    dialog(page).get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Pools")
    expect(page.get_by_role("link", name=name, exact=True)).to_have_count(0, timeout=SLOW_MS)
    assert not {name, f"{name}-child"} & set(pools(site))


def test_what_is_odd_about_a_new_operation_is_told(signed, site, make_pool):
    name, page = make_pool("meant"), signed
    site.open(page, "#/operations")
    press(page, "Start an operation")
    fill(dialog(page), {"Pool": f"{name}x", "Command": "sleep 1000"})
    press(page, "Start")
    told = dialog(page).locator(".note")
    expect(told).to_contain_text(f'pool "{name}x" did not exist')
    expect(told).to_contain_text(f'did you mean "{name}"?')
    press(page, "Show it")
    expect(dialog(page)).to_have_count(0)
    assert "#/operations/" in page.url


def test_an_operation_is_started_suspended_resumed_and_aborted(signed, site, make_pool):
    pool, page = make_pool("work"), signed
    page.allow("status: 422 POST .*/operations")
    site.open(page, "#/operations")
    press(page, "Start an operation")
    fill(dialog(page), {"Pool": pool, "Title": "Started here"})
    command = dialog(page).get_by_label("Command", exact=True)
    cores = dialog(page).get_by_label("Cores per job", exact=True)
    assert [field.get_attribute("aria-required") for field in (command, cores)] == ["true", None]
    count = site.cluster.get("/api/v1/operations")["total"]
    press(page, "Start")
    expect(page.locator("#field-command-error")).to_contain_text(
        "command: is missing or blank; what shall each job run?"
    )
    command.fill("sleep 1000\n")
    cores.fill("-2")
    press(page, "Start")
    expect(cores).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#field-cpu_limit-error")).to_contain_text("cpu_limit")
    assert site.cluster.get("/api/v1/operations")["total"] == count
    cores.fill("0.25")
    press(page, "Start")
    expect(page.get_by_role("heading", level=1)).to_have_text("Started here", timeout=SLOW_MS)
    operation = page.url.rpartition("/")[2]
    view = site.cluster.operation(operation)
    assert (view["pools"], view["tasks"][0]["cpu_limit"]) == ({"default": pool}, 0.25)
    site.cluster.await_running(operation)

    for label, suspended in (("Suspend", True), ("Resume", False)):
        press(page, label)
        dialog(page).get_by_role("button", name=label, exact=True).click()
        expect(page.get_by_role("button", name="Resume" if suspended else "Suspend", exact=True)).to_be_visible(
            timeout=SLOW_MS
        )
        assert site.cluster.operation(operation)["suspended"] is suspended

    press(page, "Abort")
    dialog(page).get_by_label("Why", exact=True).fill("seen enough <b>of it</b>")
    dialog(page).get_by_role("button", name="Abort", exact=True).click()
    expect(page.locator(".framed")).to_contain_text("seen enough <b>of it</b>", timeout=SLOW_MS)
    site.cluster.await_state(operation, "aborted")
    expect(page.get_by_role("button", name="Abort", exact=True)).to_have_count(0, timeout=SLOW_MS)


def test_a_job_is_pinned_and_unpinned(signed, site, make_pool):
    operation = site.cluster.start_operation(make_pool("pinned"), "sleep 1000", cpu_limit=0.8, monitor=QUICK)
    [job] = site.cluster.await_running(operation)
    [node] = site.cluster.nodes
    page = signed
    page.allow("status: 422 POST .*/pin")

    def pinned() -> Any:
        [found] = [each for each in node.get("/v1/status")["jobs"] if each["job_id"] == job["id"]]
        return found["pinned_cpu_limit"]

    site.open(page, f"#/operations/{operation}/jobs/{job['id']}")
    assert page.get_by_role("button", name="Unpin", exact=True).count() == 0
    press(page, "Pin")
    cores = dialog(page).get_by_label("Cores", exact=True)
    cores.fill("99")
    dialog(page).get_by_role("button", name="Pin", exact=True).click()
    expect(dialog(page).locator(".error:not(:empty)")).to_contain_text("must be in [0.001, 0.8] cores", timeout=SLOW_MS)
    assert pinned() is None
    cores.fill("0.6")
    dialog(page).get_by_role("button", name="Pin", exact=True).click()
    expect(dialog(page)).to_have_count(0, timeout=SLOW_MS)
    assert pinned() == 0.6
    press(page, "Unpin")
    dialog(page).get_by_role("button", name="Unpin", exact=True).click()
    expect(dialog(page)).to_have_count(0, timeout=SLOW_MS)
    site.cluster.wait(lambda: pinned() is None, "the job is not pinned any more", WAIT_S)
    expect(page.get_by_role("button", name="Unpin", exact=True)).to_have_count(0, timeout=SLOW_MS)
    page.allow("status: 422 GET .*/explain")  # its agent may know a moment earlier that it has ended
    site.cluster.abort(operation)
