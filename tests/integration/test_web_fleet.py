"""The page of all agents: what they tell, a stage that is set after its plan was shown, and what users may not."""

from collections.abc import Iterator
from typing import Any

import pytest
from scheduler_process import PlayedNode, SchedulerProcess
from web_site import expect, fill, press

pytestmark = pytest.mark.browser

USERS = {"ann": "user", "root": "admin", "node": "node"}
ABOUT = {"version": "0.2.0", "level": "shadow", "bound": "quota", "may_set_mode": True, "limit_rule": "document"}


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    with SchedulerProcess(tmp_path_factory.mktemp("fleet")) as process:
        process.write_config('node_heartbeat_timeout = "300s"\n', api=process.write_tokens(USERS))
        process.start()
        process.use_token("node")
        for number in range(1, 6):
            node = PlayedNode(process, f"host-{number}", tags=["rack-a"])
            node.register()
            beat(node, {} if number < 4 else {"may_set_mode": False} if number == 4 else None)
        process.use_token("root")
        yield process


@pytest.fixture(autouse=True)
def no_stage(scheduler: SchedulerProcess) -> None:
    for each in scheduler.get("rollout")["stages"]:
        scheduler.post("rollout/remove", {"nodes_filter": each["stage"]["nodes_filter"]})


def beat(node: PlayedNode, about: dict[str, Any] | None) -> Any:
    """A heartbeat of an agent that is ``about`` besides ABOUT, of an old one with None; the answer."""
    node.sequence += 1
    body = {
        "node_id": node.id, "incarnation": node.incarnation, "sequence": node.sequence, "sent_at": 0.0,
        "cpu_capacity": 10.0, "jobs": [], **({} if about is None else {"about": {**ABOUT, **about}}),
    }  # fmt: skip
    return node.scheduler.post("heartbeats", body)


def test_a_stage_is_planned_set_advanced_and_stopped(sign, scheduler):
    page = sign("root", "#/fleet")
    expect(page.get_by_role("heading", name="Fleet", exact=True)).to_be_visible()
    expect(page.get_by_role("searchbox", name="Find an agent", exact=True)).to_be_visible()
    expect(page.get_by_text("1 unknown", exact=True)).to_be_visible()
    expect(page.get_by_role("table", name="Agents by tag")).to_contain_text("4 shadow, 1 unknown")
    press(page, "New stage")
    fill(page, {"Nodes": "rack-a", "Canary": "0.3"})
    apply = page.get_by_role("button", name="Apply", exact=True)
    expect(apply).to_be_disabled()
    press(page, "Show what it changes")
    expect(page.get_by_text("1 host would go as canary from shadow to reclaim by weight")).to_be_visible()
    expect(page.get_by_text("1 host may not: may_set_mode off")).to_be_visible()
    assert scheduler.get("rollout")["stages"] == []
    page.get_by_label("Why", exact=True).fill("second week")
    press(page, "Show what it changes")
    apply.click()
    stages = page.get_by_role("table", name="Stages of the roll-out")
    expect(stages).to_contain_text("canary: host-")
    press(page, "Advance")
    page.get_by_role("dialog").get_by_role("button", name="Advance", exact=True).click()
    expect(page.get_by_text("2 hosts may now do more, without a canary")).to_be_visible()
    page.get_by_role("dialog").get_by_role("button", name="Close", exact=True).last.click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(stages).to_contain_text("everywhere")
    press(page, "Stop")
    page.get_by_role("dialog").get_by_label("Why", exact=True).fill("users call")
    page.get_by_role("dialog").get_by_role("button", name="Stop", exact=True).click()
    expect(stages).to_contain_text("users call")
    [view] = scheduler.get("rollout")["stages"]
    assert (view["stage"]["state"], view["stage"]["why"]) == ("stopped", "second week")


def test_who_is_no_administrator_sees_all_and_may_set_nothing(sign):
    page = sign("ann", "#/fleet", viewport={"width": 390, "height": 844})
    expect(page.get_by_role("heading", name="Fleet", exact=True)).to_be_visible()
    button = page.get_by_role("button", name="New stage", exact=True)
    expect(button).to_have_attribute("title", "Only administrators may set stages.")
    expect(button).to_be_disabled()


def test_answers_tell_the_level_and_what_is_known_of_the_agent(scheduler):
    scheduler.post("rollout", {"nodes_filter": "late", "level": "quota", "canary_ratio": 1.0})
    node = PlayedNode(scheduler, "late-1", tags=["late"])
    scheduler.use_token("node")
    node.register()
    answers = [beat(node, about) for about in (None, {}, None)]
    scheduler.use_token("root")
    assert [(each["knows_about"], each["level"]) for each in answers] == [(is_known, "quota") for is_known in (0, 1, 1)]


def test_the_more_agents_there_are_the_less_often_all_are_asked_for(sign, scheduler):
    page = sign("ann", "#/fleet")
    expect(page.get_by_role("heading", name="Fleet", exact=True)).to_be_visible()
    period = "async () => (await import('/web/scheduler.js')).app.page.period - (await import('/web/app.js')).PERIOD_MS"
    assert page.evaluate(period) == 2 * len(scheduler.get("fleet")["agents"])
