"""The web pages in a real browser, of a scheduler and agents with real jobs: each shows what the API says."""

import json
import re
import shlex
from collections.abc import Iterator

import pytest
from closed_loop import WAIT_S
from waiting import wait_until
from web_site import QUICK, Site, await_page, encode, expect, run_site

from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.scheduler.model import ROOT_POOL

pytestmark = [pytest.mark.browser, pytest.mark.cgroup]

MARKUP = "<img src=x onerror=alert(1)>"
SCRIPT = '"></td><script>alert(1)</script>'
SCHEME = "javascript:alert(1)"
TURNED = "\u202egnp.exe"
ODD = "a?b#c%20d&e=f+g'h"
PLAIN_HOSTILE = f"{MARKUP}{SCRIPT}{SCHEME}"
HOSTILE = f"{PLAIN_HOSTILE} {TURNED}"
LONG = "W" * 300
PRESSED = f"pressed {MARKUP}"
POOLS = (PRESSED, MARKUP, SCHEME, TURNED, ODD, "W" * 100)
NODE = f"node-2 {MARKUP} {ODD}"
TREE = f"tree {MARKUP}"
ANY_NAME = 'pool_name_regex = "(?s).+"\nephemeral_pool_name_regex = "(?s).+"\n'

STRANGE_PARTS = """() => [...document.querySelectorAll(
  'img, iframe, object, embed, base, main script, main style, [onerror], [onclick], [srcdoc], a:not([href^="#"])')]
  .map((element) => element.outerHTML.slice(0, 200))"""
"""What no page of ours is made of; names may become nothing of it."""

INK = """async (canvas) => {
  const { width, height } = canvas;
  const data = canvas.getContext('2d').getImageData(0, 0, width, height).data;
  let inked = 0;
  for (let at = 3; at < data.length; at += 4) inked += data[at] > 0;
  const digest = await crypto.subtle.digest('SHA-256', data);
  return [inked / (width * height), [...new Uint8Array(digest)].join()];
}"""
"""How much of a graph is painted, and a fingerprint of it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hierarchies: Hierarchies) -> Iterator[Site]:
    tags = {"node-1": (), "node-2": (PLAIN_HOSTILE, LONG)}
    directory = tmp_path_factory.mktemp("site")
    with run_site(directory, hierarchies, scheduler_config=ANY_NAME, last_node_id=NODE, tags=tags) as site:
        site.furnish()
        furnish_hostile(site)
        yield site


def furnish_hostile(site: Site) -> None:
    """Every name and text that somebody may choose is an attempt to be more than text."""
    c, ids = site.cluster, site.operations
    for name in POOLS:
        c.create_pool(name)
    c.post("/api/v1/trees", {"name": TREE, "attributes": {"nodes_filter": "nowhere"}})
    shout = f"echo {shlex.quote(HOSTILE)}; echo {LONG}; echo {shlex.quote(HOSTILE)} >&2; sleep 1000"
    task = {"command": "true", "job_count": 1, "cpu_limit": 0.1, "memory_limit": 2**24, "environment": {"A": HOSTILE}}
    named = {"title": f"{HOSTILE} {LONG}", "alias": f"*{HOSTILE}", "started_by": {"a": HOSTILE}}
    spec = {"pool": MARKUP, **named, "tasks": {MARKUP: {**task, "command": shout}}}
    ids["hostile"] = c.post("/api/v1/operations", {"spec": spec})["id"]
    ids["odd"] = c.start_operation(ODD, "sleep 1000", cpu_limit=0.1, title=LONG)
    # For which a pool is made that is called as its user.
    ids["of a long user"] = site.ask(
        "POST", "/api/v1/operations", {"spec": {"tasks": {"main": task}}},
        **{"X-YT-User-Name": "w" * 100},
    )["id"]  # fmt: skip
    ids["aborted"] = c.start_operation(MARKUP, "sleep 1000", cpu_limit=0.1, title=MARKUP)
    pressed = c.start_operation(PRESSED, "sleep 1000", cpu_limit=0.1, monitor={"enable_cpu_reclaim": False})
    c.await_running(pressed)
    limits = {"edits": [{"path": ["resource_limits"], "value": {"cpu": 0.05}}]}
    site.ask("PATCH", f"/api/v1/trees/default/pools/{encode(PRESSED)}", limits)
    preempted = "/api/v1/preemptions?limit=1&operation=" + pressed
    c.wait(lambda: c.get(preempted)["preemptions"], "a job is preempted in a pool with a hostile name", WAIT_S)
    c.await_running(ids["hostile"])
    c.await_running(ids["aborted"])
    c.post(f"/api/v1/operations/{ids['aborted']}/abort", {"message": f"{HOSTILE} {LONG}"})
    # From here on nothing changes by itself.
    c.wait(lambda: c.operation(ids["of a long user"])["state"] in ("completed", "failed"), "it has ended", WAIT_S)
    c.await_state(ids["aborted"], "aborted")
    c.wait(lambda: not c.jobs(ids["aborted"], "stopping"), "its job is gone", WAIT_S)


# --- all pages


def test_every_page_opens_with_one_heading_and_a_title(page, site):
    titles = {}
    for name, where in site.addresses().items():
        site.open(page, where)
        assert page.locator("h1").count() == 1, name
        assert page.title().endswith(" \u2013 cpumond"), name
        assert page.locator("main [role=alert]").count() == 0, name
        titles[name] = page.title()
    assert titles["operation"] == "Moving usage \u2013 cpumond"
    assert titles["integral pool"] == "Pool bursts \u2013 cpumond"
    assert len(set(titles.values())) >= len(titles) - 5  # the tabs of one operation have its title
    for name, where in site.agent_addresses().items():
        site.open_agent(page, where)
        assert page.locator("h1").count() == 1, name
        assert page.title().endswith(" \u2013 cpumond agent"), name


def test_what_does_not_exist_is_said_in_a_sentence_below_its_heading(page, site):
    page.allow("status: 404 ")
    for where, heading in (
        ("#/pools/default/nobody", "nobody"), ("#/operations/1-2-3-4", "Operation 1"),
        ("#/operations/1-2-3-4/jobs/5-6-7-8", "Job 5"), ("#/nodes/nobody", "Node nobody"), ("#/pools/nobody", "Pools"),
    ):  # fmt: skip
        site.open(page, where)
        expect(page.get_by_role("heading", level=1)).to_have_text(heading)
        name = where.split("/")[2] if "operations" in where else "nobody"
        expect(page.locator("main [role=alert]").first).to_contain_text(
            re.compile(f"(No such|does not exist).*{name}|{name}.*(does not exist|is not registered)")
        )
    page.goto(f"{site.cluster.url}/#/nothing/here/at/all")
    expect(page.locator("main")).to_contain_text("There is no such page")


# --- facts


def test_the_overview_shows_nodes_trees_and_the_scheduler(page, site):
    site.open(page, "#/")
    answer = site.cluster.get("/api/v1/overview")
    main = page.locator("main")
    figures = {each.split("\n")[0]: each.split("\n")[1] for each in page.locator(".figures .card").all_inner_texts()}
    assert figures["Nodes online"] == "2 of 2"
    assert figures["CPU capacity"] == "4.00 cores"
    assert figures["Operations"] == f"{answer['status']['counts']['shown_states']['running']} running"
    tree = next(tree for tree in answer["trees"] if tree["is_default"])
    expect(main.get_by_role("link", name=f"{tree['pool_count']} pools", exact=True)).to_have_attribute(
        "href", "#/pools/default"
    )
    expect(main).to_contain_text(answer["status"]["version"])
    expect(main).to_contain_text("of at most 256 MiB")  # of the history


def test_the_pool_s_page_shows_attributes_children_and_operations(page, site):
    site.open(page, "#/pools/default/models")
    main = page.locator("main")
    expect(main.get_by_role("navigation")).to_contain_text("Pools of default")
    expect(main.get_by_role("region", name="Pools in models", exact=True)).to_contain_text("night")
    operations = main.get_by_role("table", name="Running and pending operations directly in models")
    expect(operations.get_by_role("link", name="Moving usage", exact=True)).to_have_attribute(
        "href", f"#/operations/{site.operations['moving']}"
    )
    options = main.get_by_role("table", name="Options of the pool: set here, and in force")
    expect(options.get_by_role("row").filter(has_text="weight").first).to_contain_text("3")


def test_the_operation_s_page_shows_state_shares_why_and_jobs(page, site):
    operation = site.operations["moving"]
    answer = site.cluster.operation(operation)
    site.open(page, f"#/operations/{operation}")
    main = page.locator("main")
    expect(main).to_contain_text(answer["user"])
    expect(main).to_contain_text("0 of 1 completed, 1 active")
    expect(main).to_contain_text("*moving")
    page.get_by_role("link", name="Why", exact=True).click()
    lines = site.cluster.get(f"/api/v1/operations/{site.operations['waiting']}/why")["trees"][0]["lines"]
    site.open(page, f"#/operations/{site.operations['waiting']}?tab=why")
    for line in lines:
        if not any(sign.isdigit() for sign in line):
            expect(main).to_contain_text(line.strip())
    assert any("queue" in line for line in lines)
    turn = page.get_by_role("region", name="Your turn")
    expect(turn).to_contain_text("Pool queue is full")
    expect(turn).to_contain_text("raise it to 2")
    expect(turn.get_by_role("button", name="What it changes")).to_be_visible()
    expect(main).not_to_contain_text(f"operation {site.operations['waiting']}")  # its id is in its own place
    site.open(page, f"#/operations/{operation}?tab=why")
    way = main.locator(".way > li")
    for name, step in zip(("Root pool", "research", "models", "Moving usage"), way.all(), strict=True):
        expect(step).to_contain_text(re.compile(rf"{name}.* of .* cores: strong guarantee"))
    site.open(page, f"#/operations/{operation}?tab=jobs")
    expect(page.get_by_role("link", name=f"job {site.job['cookie']}", exact=True)).to_have_attribute(
        "href", f"#/operations/{operation}/jobs/{site.job['id']}"
    )
    site.open(page, site.addresses()["failed operation"])
    expect(page.locator(".framed")).to_contain_text(site.cluster.operation(site.operations["broken"])["error"])


def test_the_job_s_page_shows_limit_bounds_votes_and_decisions(page, site):
    site.cluster.wait(lambda: site.explain()["current_cpu_limit"] <= 0.2, "the limit is at its floor", WAIT_S)
    answer = site.explain()
    site.open(page, site.addresses()["job"])
    check_explained(page, answer)
    expect(page.locator("main")).to_contain_text("1 core")
    site.open_agent(page, site.agent_addresses()["agent's job"])
    check_explained(page, answer)
    site.open_agent(page, "#/")
    row = page.get_by_role("row").filter(has_text=site.job["id"])
    expect(row).to_contain_text("reclaim")
    expect(row).to_contain_text("1.00")


def check_explained(page, answer) -> None:
    main = page.locator("main")
    expect(main.locator(".why-limit")).to_contain_text("is 0.2 of 1 requested cores")
    decisions = main.get_by_role("table", name="Decisions about the limit, the newest first")
    shrinks = decisions.get_by_role("row").filter(has_text="shrink")
    assert shrinks.count() == sum(decision["kind"] == "shrink" for decision in answer["decisions"])
    expect(shrinks.last).to_contain_text("1.00 → 0.70")
    legend = main.get_by_role("table", name="CPU in cores: newest, smallest and largest value shown")
    for line in ("used", "smoothed", "limit", "requested", "floor", "lower bound", "upper bound"):
        expect(legend.get_by_role("rowheader", name=line, exact=True)).to_be_visible()
    votes = main.get_by_role("list", name="Votes of the window, the oldest first")
    expect(votes.get_by_role("listitem")).to_have_count(len(answer["window"]["votes"]))


def test_the_node_s_page_has_its_ledger(page, site):
    node = site.cluster.get(f"/api/v1/nodes/{encode(site.job['node_id'])}")
    site.open(page, site.addresses()["node"])
    ledger = page.get_by_role("table").filter(has_text="Capacity")
    cpu = ledger.get_by_role("row").filter(has_text="CPU, cores")
    assert cpu.get_by_role("cell").first.inner_text() == "2.00"
    ordered = sum(job["cpu_limit"] for job in node["jobs"])
    assert float(cpu.get_by_role("cell").nth(1).inner_text()) == pytest.approx(ordered)
    jobs = page.get_by_role("table", name=f"Jobs of node {site.job['node_id']}")
    assert jobs.get_by_role("row").count() == 1 + len(node["jobs"])
    expect(jobs.get_by_role("columnheader", name="Class")).to_be_visible()
    expect(jobs.get_by_role("row").nth(1)).to_contain_text(node["jobs"][0]["class"])


def test_operations_are_named_by_their_titles(page, site):
    moving, cut = site.operations["moving"], site.operations["cut"]
    for where, table, title, operation in (
        (site.addresses()["node"], f"Jobs of node {site.job['node_id']}", "Moving usage", moving),
        ("#/pools/default/narrow", "Jobs that were stopped in this pool or for this pool", "Cut short", cut),
        (f"#/events?operation={moving}", "Events, the newest first", "operation Moving usage", moving),
        (f"#/audit?operation={moving}", "Events, the newest first", "operation Moving usage", moving),
    ):
        site.open(page, where)
        link = page.get_by_role("table", name=table, exact=True).get_by_role("link", name=title, exact=True).first
        expect(link).to_have_attribute("href", f"#/operations/{operation}")
        expect(link).to_have_attribute("title", f"{title.removeprefix('operation ')}, {operation}")
    site.open(page, site.job_address())
    crumbs = page.get_by_role("navigation", name="Where this is")
    expect(crumbs.get_by_role("link", name="Moving usage")).to_have_attribute("href", f"#/operations/{moving}")


def test_the_resulting_specification_has_merged_values_with_their_source(page, site):
    operation = site.operations["moving"]
    answer = site.cluster.get(f"/api/v1/operations/{operation}/specification")["resulting"]
    site.open(page, f"#/operations/{operation}")
    page.get_by_role("link", name="Specification", exact=True).click()
    page.get_by_role("link", name="Resulting specification", exact=True).click()
    expect(page.get_by_role("heading", name="job-cpu-monitor", exact=True)).to_be_visible()
    table = page.get_by_role("table", name="job-cpu-monitor", exact=True)
    shown = {}
    for row in table.get_by_role("row").all()[1:]:
        value, source = row.get_by_role("cell").all_inner_texts()
        shown[row.get_by_role("rowheader").inner_text()] = (value, source)
    assert set(shown) == set(answer["job_cpu_monitor"])
    given = {
        "enable_cpu_reclaim": "true", "min_cpu_limit": "0.2", "smoothing_factor": "0.5", "decrease_coefficient": "0.7",
    }  # fmt: skip
    assert {name: value for name, (value, source) in shown.items() if source == "specification"} == given
    assert shown["relative_upper_bound"] == ("the node's value, else 0.9", "node")
    assert shown["check_period"] == ("the node's value, else 1 s", "node")
    assert {source for _, source in shown.values()} == {"specification", "node"}
    page.get_by_role("link", name="Provided specification", exact=True).click()
    provided = json.loads(page.locator("pre").inner_text())
    assert provided["job_cpu_monitor"] == QUICK


# --- graphs


def test_the_job_s_graph_follows_its_limit(page, site):
    site.cluster.wait(lambda: site.explain()["current_cpu_limit"] < 0.3, "the limit is down", WAIT_S)
    site.open(page, site.addresses()["job"])
    canvas = page.locator("figure canvas").first
    painted, before = canvas.evaluate(INK)
    assert painted > 0.01
    legend = page.get_by_role("table", name="CPU in cores: newest, smallest and largest value shown")
    limit = legend.get_by_role("row").filter(has=page.get_by_role("rowheader", name="limit", exact=True))
    now = limit.get_by_role("cell").first
    expect(now).to_have_text("0.20")
    site.wake.touch()
    try:
        # All that it ordered is back, and the page says so by itself.
        expect(now).to_have_text("1.00")
        wait_until(lambda: canvas.evaluate(INK)[1] != before, "the graph is painted anew")
        assert canvas.evaluate(INK)[0] > 0.01
    finally:
        site.wake.unlink()


def test_the_integral_pool_has_both_graphs_and_its_volume_moves(page, site):
    site.open(page, "#/pools/default/bursts")
    share = page.get_by_role("region", name="Allocated, demand and guarantee")
    volume = page.get_by_role("region", name="Accumulated volume")
    for line in ("allocated", "demand", "guarantee", "fair share"):
        expect(share.get_by_role("rowheader", name=line, exact=True)).to_be_visible()
    now = volume.get_by_role("row").filter(has=page.get_by_role("rowheader", name="volume", exact=True))
    number = now.get_by_role("cell").first
    before = number.inner_text()
    expect(number).not_to_have_text(before)
    expect(volume).to_contain_text("It fills with 12.5 % of the tree")
    history = site.cluster.get("/api/v1/history?kind=pool&tree=default&name=bursts&since_s=60")
    capacity = volume.get_by_role("row").filter(has=page.get_by_role("rowheader", name="capacity", exact=True))
    shown = capacity.get_by_role("cell").first.inner_text().replace(",", "")
    assert float(shown) == pytest.approx(history["columns"]["capacity"][-1], rel=0.01)


# --- what users choose is text


def check_harmless(page, *texts: str) -> None:
    """The texts are there as text, nothing came of them, and nothing is wider than the window."""
    everything = page.locator("main").evaluate("main => main.textContent")
    for text in texts:
        assert text in everything, (page.url, text)
    assert page.evaluate(STRANGE_PARTS) == [], page.url
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.url


def hostile_pages(site: Site) -> dict[str, tuple[str, ...]]:
    """The pages on which something hostile stands, and what."""
    ids = site.operations
    mine = f"#/operations/{ids['hostile']}"
    [job] = site.cluster.jobs(ids["hostile"])
    node = site.cluster.get(f"/api/v1/nodes/{encode(NODE)}")
    pages: dict[str, tuple[str, ...]] = {
        "#/": (TREE,),
        "#/pools": POOLS,
        f"#/pools/{encode(TREE)}": (TREE,),
        "#/operations": (HOSTILE, LONG, MARKUP, ODD, "w" * 100),
        mine: (HOSTILE, LONG, MARKUP, f"*{HOSTILE}"),
        f"{mine}?tab=why": (HOSTILE, MARKUP),
        f"{mine}?tab=jobs": (MARKUP, job["node_id"]),
        f"{mine}?tab=specification": (json.dumps(HOSTILE, ensure_ascii=False)[1:-1],),
        f"{mine}?tab=specification&specification=provided": (json.dumps(HOSTILE, ensure_ascii=False)[1:-1],),
        f"{mine}/jobs/{job['id']}": (HOSTILE, LONG, MARKUP),
        f"#/operations/{ids['aborted']}": (HOSTILE, LONG),
        f"#/events?pool={encode(MARKUP)}": (MARKUP,),
        f"#/audit?pool={encode(MARKUP)}": (MARKUP,),
        "#/preemptions": (PRESSED, f'pool "{PRESSED}" used more'),
        "#/nodes": (NODE, PLAIN_HOSTILE, LONG),
        f"#/nodes/{encode(NODE)}": (NODE, PLAIN_HOSTILE, LONG, *(f"job {job['cookie']}" for job in node["jobs"])),
    }
    pages |= {f"#/pools/default/{encode(name)}": (name,) for name in POOLS}
    return pages


def test_hostile_text_stays_text(new_page, site):
    page = new_page(viewport={"width": 390, "height": 800})
    page.add_init_script(
        "if (location.protocol === 'http:') localStorage.setItem('cpumond-columns-nodes-narrow', 'id,tags')"
    )
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    site.cluster.wait(lambda: site.cluster.operation(site.operations["aborted"])["state"] == "aborted", "it is aborted")
    for where, texts in hostile_pages(site).items():
        site.open(page, where)
        # What turns the direction of the text is shown as what it is.
        check_harmless(page, *(text.replace("\u202e", "\\u202e") for text in texts))
        assert "\u202e" not in page.locator("main").inner_text()
    assert not [url for url in asked if url.endswith("/x")]


def test_hostile_text_stays_text_on_the_agent_s_page(page, site):
    page.goto(site.cluster.nodes[-1].web_url)
    await_page(page)
    check_harmless(page, NODE)


def test_links_to_odd_names_work(page, site):
    site.open(page, f"#/operations/{site.operations['odd']}")
    page.get_by_role("link", name=ODD, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(ODD)
    site.open(page, "#/nodes")
    page.get_by_role("link", name=NODE, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Node {NODE}")
    site.open(page, "#/pools")
    page.get_by_role("link", name=SCHEME, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(SCHEME)
    page.get_by_role("link", name="Pools of default").first.click()
    page.get_by_role("link", name=ROOT_POOL, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Root pool of default")


def test_no_script_runs_that_is_not_a_file_of_the_server(page, site):
    page.allow("Content Security Policy", "TrustedHTML", "TrustedScript")
    for url in (site.cluster.url, site.node.web_url):
        response = page.goto(url)
        assert response is not None
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "'unsafe" not in policy
        # What an attacker would try first, if a page were careless with a name.
        tried = page.evaluate("""async () => {
          const violations = [];
          document.addEventListener('securitypolicyviolation', (event) => violations.push(event.effectiveDirective));
          const refused = [];
          const attempt = (name, work) => { try { work(); } catch (error) { refused.push(`${name}: ${error.name}`); } };
          attempt('innerHTML', () => { document.createElement('div').innerHTML = '<b>x</b>'; });
          attempt('script', () => { document.createElement('script').textContent = 'window.owned = 1'; });
          const link = document.createElement('a');
          link.setAttribute('href', 'javascript:window.owned=1');
          document.body.append(link);
          link.click();
          await new Promise((resolve) => setTimeout(resolve, 50));
          link.remove();
          return [window.owned === undefined, refused, violations.length > 0];
        }""")
        assert tried == [True, ["innerHTML: TypeError", "script: TypeError"], True]
