"""What if, on the pages: simulations of an operation, of a pool's change and of a node less; nodes are drained."""

from collections.abc import Iterator
from typing import Any

import pytest
from web_site import Site, dialog, encode, expect, fill, press, run_site

from cpumond.core.errors import UnavailableError
from cpumond.host.cgroup.mounts import Hierarchies

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

CONFIG = '[forecast]\nperiod = "1s"\nhorizon = "2m"\nmax_load = 1.0\n[min_spare_job_resources_on_node]\ncpu = 0\n'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    """Jobs sleep for a second, as is known of them; an operation that is suspended has the only place of a pool."""
    with run_site(tmp_path_factory.mktemp("site"), hierarchies, scheduler_config=CONFIG) as site:
        c = site.cluster
        c.create_pool("p")
        c.create_pool("narrow", max_running_operation_count=1)
        naps = [c.start_operation("p", "sleep 1", 1, cpu_limit=0.5, title="nap") for _ in range(4)]
        for each in naps:
            c.await_state(each, "completed")
        site.operations["long"] = c.start_operation("p", "sleep 1000", 1, cpu_limit=0.5, title="Long")
        [site.job] = c.await_running(site.operations["long"])
        blocks = c.start_operation("narrow", "sleep 1000", 1, cpu_limit=0.5, title="Blocks")
        c.post(f"/api/v1/operations/{blocks}/suspend", {"abort_running_jobs": True})
        c.wait(lambda: not c.operation(blocks)["jobs"]["active"], "its job is stopped")
        site.operations["waiting"] = c.start_operation("narrow", "sleep 1", 1, cpu_limit=0.5, title="Waits")
        c.wait(lambda: is_foretold(site), "the last round knows all that is there")
        yield site


def is_foretold(site: Site) -> bool:
    try:
        site.cluster.get(f"/api/v1/operations/{site.operations['waiting']}/when")
    except UnavailableError:
        return False
    return True


def operations(site: Site) -> int:
    return int(site.cluster.get("/api/v1/operations")["total"])


def test_the_start_of_an_operation_is_simulated_in_its_form(page, site):
    before = operations(site)
    site.open(page, "#/operations")
    press(page, "Start an operation")
    fill(dialog(page), {"Pool": "p", "Title": "nap", "Command": "sleep 1"})
    dialog(page).get_by_label("Cores per job").fill("-1")
    page.allow("status: 422 POST .*/simulate")
    press(page, "Simulate")
    expect(dialog(page).get_by_label("Cores per job")).to_have_attribute("aria-invalid", "true")
    dialog(page).get_by_label("Cores per job").fill("0.5")
    press(page, "Simulate")
    expect(dialog(page).get_by_role("heading", name="Result", exact=True)).to_be_visible()
    expect(dialog(page)).to_contain_text("its first job starts")
    # An answer about something else is none.
    dialog(page).get_by_label("Jobs", exact=True).fill("3")
    expect(dialog(page).get_by_role("heading", name="Result", exact=True)).to_have_count(0)
    press(page, "Simulate")
    dialog(page).get_by_role("link", name="Open on a page").click()
    expect(page.get_by_role("heading", name="Last simulation: start of nap")).to_be_visible()
    row = page.get_by_role("table", name="Operations that would start or end at another time").get_by_role("row").last
    expect(row).to_contain_text("nap")
    assert operations(site) == before


def test_a_simulation_is_cancelled_and_ends_in_the_scheduler(page, site):
    site.open(page, "#/operations")
    press(page, "Start an operation")
    fill(dialog(page), {"Pool": "p", "Jobs": "100000", "Command": "sleep 1"})
    for _ in range(3):  # more than are made at a time: the one before has ended
        press(page, "Simulate")
        expect(dialog(page).get_by_role("progressbar", name="Simulation")).to_be_visible()
        press(page, "Cancel")
        expect(dialog(page).get_by_role("progressbar")).to_have_count(0)
    press(page, "Simulate")
    expect(dialog(page).get_by_role("progressbar")).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog(page)).to_have_count(0)


def test_a_change_of_a_pool_is_simulated_beside_its_plan(page, site):
    site.open(page, "#/what-if")
    page.get_by_label("Pool", exact=True).fill("narrow")
    press(page, "Choose options")
    simulate = dialog(page).get_by_role("button", name="Simulate", exact=True)
    simulate.click()
    expect(dialog(page)).to_contain_text("nothing has been changed yet")
    dialog(page).get_by_label("Maximum of running operations").fill("2")
    press(page, "Show what it changes")
    expect(dialog(page).get_by_role("heading", name="What it changes")).to_be_visible()
    simulate.click()
    expect(
        dialog(page).get_by_role("table", name="Operations that would start or end at another time")
    ).to_contain_text("Waits")
    expect(dialog(page).get_by_role("heading", name="What it changes")).to_be_visible()
    page.keyboard.press("Escape")
    pool = site.cluster.get("/api/v1/trees/default/pools/narrow")
    assert pool["attributes"]["max_running_operation_count"] == 1
    page.get_by_label("Pool", exact=True).fill("none")
    page.allow("status: 404 .*/pools/none")
    press(page, "Choose options")
    expect(page.get_by_role("alert").filter(has_text="none")).to_be_visible()


def test_a_node_is_cordoned_drained_and_uncordoned_after_its_plan(page, site):
    def cordon() -> Any:
        return site.cluster.get(f"/api/v1/nodes/{encode(site.job['node_id'])}")["cordon"]

    site.open(page, f"#/nodes/{encode(site.job['node_id'])}")
    press(page, "Cordon")
    expect(dialog(page)).to_contain_text("cores that are free now stay idle; 1 job on it continues.")
    assert cordon() is None
    dialog(page).get_by_label("Why", exact=True).fill("new kernel")
    dialog(page).get_by_role("button", name="Cordon", exact=True).click()
    expect(page.locator("main")).to_contain_text("cordoned by root")
    assert (cordon()["why"], cordon()["drain"]) == ("new kernel", "")
    press(page, "Drain")
    expect(dialog(page)).to_contain_text("1 job would be stopped, of which 0 would have to wait for free resources")
    expect(dialog(page).get_by_role("table", name="Jobs that a drain would stop")).to_contain_text("Long")
    press(page, "Simulate")
    expect(dialog(page).get_by_role("heading", name="Result", exact=True)).to_be_visible()
    assert cordon()["drain"] == ""
    dialog(page).get_by_role("button", name="Drain", exact=True).click()
    expect(page.locator("main")).to_contain_text("drained by root")
    assert cordon()["drain"] == "usual"
    press(page, "Uncordon")
    dialog(page).get_by_role("button", name="Uncordon", exact=True).click()
    # Not the word beside a fact, which explains itself.
    expect(page.locator(".actions").get_by_role("button", name="Cordon", exact=True)).to_be_visible()
    assert cordon() is None
    site.open(page, "#/what-if")
    page.get_by_label("Node", exact=True).fill("nowhere")
    page.allow("status: 4.. POST .*/simulate")
    press(page, "Simulate")
    expect(page.get_by_role("alert").filter(has_text="nowhere")).to_be_visible()
    page.get_by_label("Node", exact=True).fill(site.job["node_id"])
    press(page, "Simulate")
    expect(page.get_by_role("heading", name=f"Last simulation: Cordon node {site.job['node_id']}")).to_be_visible()


def test_guarantees_are_tried_copied_applied_and_undone(page, site, tmp_path):
    def guaranteed() -> float:
        attributes = site.cluster.get("/api/v1/trees/default/pools/p")["attributes"]
        return float(attributes.get("strong_guarantee_resources", {}).get("cpu", 0.0))

    site.open(page, "#/guarantees/default")
    bar, apply = page.get_by_role("slider", name="p", exact=True), page.get_by_role("button", name="Apply", exact=True)
    expect(apply).to_be_disabled()
    bar.focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    cores = float(bar.input_value())
    assert cores > 0.0
    expect(apply).to_be_enabled()
    expect(page.locator(".drags")).to_contain_text(f"{cores:.2f} guaranteed")
    assert guaranteed() == 0.0

    press(page, "Copy as a tree file")
    file = tmp_path / "pools.json"
    file.write_text(dialog(page).locator("pre").inner_text())
    [change] = site.cluster.ask("tree", "plan", str(file))["changes"]
    assert (change["pool"], change["new"]) == ("p", cores)
    page.keyboard.press("Escape")

    apply.click()
    undo = page.get_by_role("button", name="Undo", exact=True)
    expect(undo).to_be_visible()
    assert guaranteed() == cores
    undo.click()
    dialog(page).get_by_role("button", name="Undo", exact=True).click()
    expect(bar).to_have_value("0")
    assert guaranteed() == 0.0
