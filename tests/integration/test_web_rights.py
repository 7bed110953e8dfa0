"""What the scheduler's page shows of rights and of what happened: to an administrator, and to users of two teams."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from waiting import wait_until
from web_site import expect, press, show

pytestmark = pytest.mark.browser

USERS = {"ann": "user", "ben": "user", "root": "admin", "node": "node"}
"""Each shows a token that is called as the user; ann is of the group ``ml``."""
ML = {"action": "allow", "subjects": ["ml"], "permissions": ["use", "write", "modify_children"]}


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(tmp_path_factory.mktemp("rights")) as process:
        process.write_config('node_heartbeat_timeout = "1s"\n[groups]\nml = ["ann"]\n', api=process.write_tokens(USERS))
        process.use_token("root")
        process.start()
        process.create_pool("ours", acl=[ML])
        process.create_pool("theirs", acl=[{**ML, "subjects": ["ben"]}])
        yield process


def act_as(scheduler: SchedulerProcess, user: str, work: Callable[[], Any]) -> Any:
    scheduler.use_token(user)
    try:
        return work()
    finally:
        scheduler.use_token("root")


def weight_of(scheduler: SchedulerProcess, pool: str) -> Any:
    return scheduler.get(f"trees/default/pools/{pool}")["weight"]


def test_the_head_of_the_page_says_who_is_there(sign):
    who = sign("ann", "#/").get_by_title("You, and your tokens")
    expect(who).to_have_text("ann ml")
    expect(sign("root", "#/").get_by_title("You, and your tokens")).to_have_text("root administrator")


def test_what_would_be_refused_says_why_and_cannot_be_used(sign, scheduler):
    theirs = act_as(scheduler, "ben", lambda: scheduler.start_operation("theirs", title="of the others"))
    page = sign("ann", "#/pools/default/theirs")
    for name in ("Change", "New sub-pool", "Remove", "Change the access list"):
        button = page.get_by_role("button", name=name, exact=True)
        expect(button).to_have_attribute("aria-disabled", "true")
        expect(button).to_have_attribute("title", re.compile("no access list allows|You need"))
        button.click(force=True)
        expect(page.get_by_role("dialog")).to_have_count(0)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    show(page, scheduler, f"#/operations/{theirs}?tab=specification")
    expect(page.locator("main")).to_contain_text("no access list allows read_secrets to ann")
    for name in ("Suspend", "Complete", "Abort"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute("aria-disabled", "true")
    assert not [url for url in asked if "/specification" in url]  # a refused request would be in the audit log
    # The own pool is as it was before there were rights.
    show(page, scheduler, "#/pools/default/ours")
    for name in ("Change", "New sub-pool"):
        expect(page.get_by_role("button", name=name, exact=True)).not_to_have_attribute("aria-disabled", "true")
    show(page, scheduler, "#/pools")
    press(page, "New pool")
    expect(page.get_by_role("dialog").get_by_label("Parent", exact=True)).to_have_value("ours")
    scheduler.post(f"operations/{theirs}/abort", {})


def test_an_access_list_is_changed_and_holds_at_once(sign, scheduler):
    scheduler.create_pool("lent", acl=[])
    page = sign("root", "#/pools/default/lent")
    page.allow("status: 422 PATCH ")
    section = page.get_by_role("region", name="Who may do what", exact=True)
    press(page, "Change the access list")
    press(page, "Add an entry")
    entry = page.get_by_role("group", name="Entry 1", exact=True)
    press(page, "Save")
    expect(entry.locator(".error:not(:empty)")).to_contain_text("subjects")
    assert scheduler.get("trees/default/pools/lent")["attributes"]["acl"] == []
    entry.get_by_label("Who", exact=True).fill("ann, ben")
    entry.get_by_label("write", exact=True).check()
    press(page, "Save")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(section.get_by_role("row").filter(has_text="ann, ben")).to_contain_text("use, write")
    user = sign("ann", "#/pools/default/lent")
    expect(user.get_by_role("button", name="Change", exact=True)).not_to_have_attribute("aria-disabled", "true")
    press(page, "Change the access list")
    press(page, "Remove this entry")
    press(page, "Save")
    expect(section.get_by_role("row").filter(has_text="ann, ben")).to_have_count(0)
    expect(user.get_by_role("button", name="Change", exact=True)).to_have_attribute("aria-disabled", "true")


def test_a_change_is_undone_after_its_plan_was_shown(sign, scheduler):
    scheduler.create_pool("moved", "ours", weight=2.0)
    page = sign("ann", "#/pools/default/moved")
    press(page, "Change")
    page.get_by_role("dialog").get_by_label("Weight", exact=True).fill("5")
    press(page, "Show what it changes")
    press(page, "Apply")
    row = page.get_by_role("row").filter(has_text="weight of moved: 2 → 5")
    expect(row).to_contain_text("ann")
    assert weight_of(scheduler, "moved") == 5.0
    row.get_by_role("button", name=re.compile("Undo")).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading", name="What it changes")).to_be_visible()
    assert weight_of(scheduler, "moved") == 5.0
    dialog.get_by_role("button", name="Undo", exact=True).click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("row").filter(has_text="weight of moved: 5 → 2")).to_contain_text("undoes")
    assert weight_of(scheduler, "moved") == 2.0
    other = sign("ben", "#/pools/default/moved")
    expect(other.get_by_role("row").filter(has_text="weight of moved: 5 → 2")).to_be_visible()
    expect(other.get_by_role("button", name=re.compile("Undo"))).to_have_count(0)
    # The plan that was seen is in the audit log.
    [change] = scheduler.get("audit?pool=moved&user=ann&limit=1")["events"]
    assert change["plan"]


def test_events_are_filtered_in_the_address_and_come_in_parts(sign, scheduler):
    scheduler.create_pool("often")
    for weight in range(1, 60):
        edits = [{"path": ["weight"], "value": weight}]
        scheduler.patch("trees/default/pools/often", {"edits": edits})
    page = sign("root", "#/events?pool=often&tree=default")
    rows = page.get_by_role("table", name="Events, the newest first").get_by_role("row")
    expect(rows).to_have_count(51)
    expect(rows.nth(1)).to_contain_text("58 → 59")
    press(page, "Older →")
    expect(rows.last).to_contain_text("often is new")
    assert "before=" in page.url
    press(page, "← Newest")
    expect(rows.nth(1)).to_contain_text("58 → 59")
    page.get_by_label("Kind", exact=True).select_option("node_lost")
    expect(page.locator("main")).to_contain_text("There are no matching events.")
    assert "kind=node_lost" in page.url


def test_the_audit_log_has_refusals_and_who_sees_them(sign, scheduler):
    def intrude() -> None:
        answer = scheduler.request("PATCH", "trees/default/pools/theirs", {"edits": [{"path": ["weight"], "value": 9}]})
        assert answer.status_code == 403

    act_as(scheduler, "ann", intrude)
    for user in ("root", "ann"):
        row = (
            sign(user, "#/audit?kind=refused&user=ann")
            .get_by_role("row")
            .filter(has_text="no access list allows write")
        )
        expect(row.first).to_contain_text("127.0.0.1")
    page = sign("ben", "#/audit?pool=theirs")
    expect(page.get_by_role("row").filter(has_text="ann")).to_have_count(0)
    expect(page.get_by_role("heading", name="Audit log")).to_be_visible()


def test_a_lost_node_stays_with_its_jobs_and_others_do_not_read_their_logs(sign, scheduler):
    scheduler.patch("trees/default", {"edits": [{"path": ["node_reconnection_timeout"], "value": 100}]})
    operation = act_as(scheduler, "ann", lambda: scheduler.start_operation("ours", title="left behind"))
    node = PlayedNode(scheduler, "gone")

    def run() -> None:
        node.register()
        node.beat_until(lambda: node.jobs, "its job runs")

    act_as(scheduler, "node", run)
    page = sign("ann", "#/nodes")
    row = page.get_by_role("row").filter(has_text=re.compile("lost .* ago"))
    expect(row).to_have_class(re.compile("gone"))
    page.get_by_role("link", name="gone", exact=True).click()
    expect(page.get_by_role("table", name="Jobs of node gone").get_by_role("row")).to_have_count(2)
    expect(page.get_by_role("row").filter(has_text="node lost")).to_be_visible()
    # A log that would be refused is not asked for: no status of 403 here, and none in the audit log.
    [job] = node.jobs
    other = sign("ben", f"#/operations/{operation}/jobs/{job}")
    expect(other.locator("main")).to_contain_text("no access list allows read_secrets to ben")


def test_a_token_is_made_shown_once_and_revoked(sign, scheduler):
    page = sign("ann", "#/tokens")
    press(page, "New token")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("User", exact=True)).to_have_value("ann")
    expect(dialog.get_by_label("Role", exact=True)).to_have_count(0)  # an administrator's
    dialog.get_by_label("Note", exact=True).fill("of a test")
    dialog.get_by_role("button", name="Create", exact=True).click()
    token = dialog.locator(".token-shown").inner_text()
    press(page, "I have copied it")
    expect(page.locator(".token-shown")).to_have_count(0)
    row = page.get_by_role("row").filter(has_text="of a test")
    expect(row).to_contain_text("valid")
    assert token not in page.content()
    assert act_as(scheduler, token, lambda: scheduler.get("me"))["user"] == "ann"
    row.get_by_role("button", name=re.compile("Revoke")).click()
    dialog.get_by_role("button", name="Revoke", exact=True).click()
    expect(row).to_contain_text("revoked")
    wait_until(
        lambda: act_as(scheduler, token, lambda: scheduler.request("GET", "me")).status_code == 401, "it is refused"
    )
