"""A cluster for the tests of the web pages: pools and operations of every kind, and a job whose CPU moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2
import pytest
from closed_loop import WAIT_S, Loop

from cpumond.host.cgroup.mounts import Hierarchies

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page
    from scheduler_process import SchedulerProcess

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs the Python package playwright: sh tests/venv.sh all"
).expect

QUICK = {"enable_cpu_reclaim": True, "min_cpu_limit": 0.2, "smoothing_factor": 0.5, "decrease_coefficient": 0.7}
"""A job's limit goes down within a few seconds."""

READY = """where => {
  const main = document.querySelector('main');
  return (where === null || location.hash === where) && main !== null && main.querySelector('h1') !== null
    && main.querySelector('.loading') === null && !main.textContent.includes('Asking the agent');
}"""


TURN = """async (where) => {
  const go = (hash) => new Promise((done) => {
    addEventListener('hashchange', done, { once: true });
    location.hash = hash;
  });
  // Where only what stands after the ? differs, what was loaded would stay: the page is left first.
  if (location.hash.split('?')[0] === where.split('?')[0]) await go('#/elsewhere');
  await go(where);
}"""
"""After it the page of before is gone, and what is asked for that of ``where`` is on its way."""


class Site:
    """What is there to be looked at; ids of operations and jobs by what they do."""

    def __init__(self, cluster: Loop) -> None:
        self.cluster = cluster
        self.wake = cluster.place / "wake"
        self.operations: dict[str, str] = {}
        self.job: dict[str, Any] = {}
        """Of the operation ``moving``: idle, and it uses all that it gets while the file ``wake`` is there."""

    def furnish(self) -> None:
        c, ids = self.cluster, self.operations
        c.create_pool("research", weight=2.0, strong_guarantee_resources={"cpu": 1.0})
        c.create_pool("models", "research", weight=3.0)
        c.create_pool("night", "models")
        c.create_pool("queue", mode="fifo", max_running_operation_count=1)
        burst = {"guarantee_type": "burst", "resource_flow": {"cpu": 0.5}, "burst_guarantee_resources": {"cpu": 1.0}}
        c.create_pool("bursts", integral_guarantees=burst)
        c.create_pool("saving", integral_guarantees={"guarantee_type": "relaxed", "resource_flow": {"cpu": 0.25}})
        c.create_pool("narrow")
        moving = f"while :; do [ -e {self.wake} ] || sleep 0.1; done"
        ids["moving"] = c.start_operation("models", moving, monitor=QUICK, title="Moving usage", alias="*moving")
        ids["burst"] = c.start_operation("bursts", "sleep 1000", cpu_limit=0.5, title="Burst of work")
        ids["first"] = c.start_operation("queue", "echo out; echo err >&2; sleep 1000", cpu_limit=0.2, title="First")
        ids["waiting"] = c.start_operation("queue", "sleep 1000", cpu_limit=0.2, title="Waits for the first")
        ids["done"] = c.start_operation("night", "true", cpu_limit=0.2, title="Soon done")
        ids["broken"] = c.start_operation("night", "exit 3", cpu_limit=0.2, title="Broken", max_failed_job_count=1)
        kept = {"enable_cpu_reclaim": False}
        ids["cut"] = c.start_operation("narrow", "sleep 1000", 2, cpu_limit=0.2, title="Cut short", monitor=kept)
        c.await_state(ids["done"], "completed")
        c.await_state(ids["broken"], "failed")
        c.await_running(ids["cut"], 2)
        limits = {"edits": [{"path": ["resource_limits"], "value": {"cpu": 0.3}}]}
        self.ask("PATCH", "/api/v1/trees/default/pools/narrow", limits)
        preempted = "/api/v1/preemptions?operation=" + ids["cut"]
        c.wait(lambda: c.get(preempted)["preemptions"], "a job is preempted", WAIT_S)
        [self.job] = c.await_running(ids["moving"])
        c.await_running(ids["first"])

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        if self.cluster.token:
            headers["Authorization"] = f"Bearer {self.cluster.token}"
        url = f"{self.cluster.url}{path}"
        answer = httpx2.request(method, url, json=body, headers=headers, trust_env=False, verify=False, timeout=250)
        assert answer.is_success, answer.text
        return answer.json()

    def explain(self) -> Any:
        return self.cluster.get(f"/api/v1/operations/{self.operations['moving']}/jobs/{self.job['id']}/explain")

    def addresses(self) -> dict[str, str]:
        """The scheduler's pages: what each is, and what stands after the #."""
        moving, tab = f"#/operations/{self.operations['moving']}", "?tab="
        return {
            "overview": "#/",
            "pools": "#/pools",
            "pool": "#/pools/default/models",
            "root pool": "#/pools/default/%3CRoot%3E",
            "integral pool": "#/pools/default/bursts",
            "operations": "#/operations",
            "my work": "#/mine",
            "operation": moving,
            "why": f"{moving}{tab}why",
            "jobs": f"{moving}{tab}jobs",
            "resulting specification": f"{moving}{tab}specification",
            "provided specification": f"{moving}{tab}specification&specification=provided",
            "failed operation": f"#/operations/{self.operations['broken']}",
            "waiting operation": f"#/operations/{self.operations['waiting']}{tab}why",
            "job": self.job_address(),
            "ended job": self._job_of("broken"),
            "nodes": "#/nodes",
            "node": f"#/nodes/{encode(self.job['node_id'])}",
            "fleet": "#/fleet",
            "preemptions": "#/preemptions",
            "savings": "#/savings",
            "what happened to it": f"{moving}{tab}events",
            "events": "#/events",
            "audit log": "#/audit",
            "tokens": "#/tokens",
        }

    def job_address(self) -> str:
        return f"#/operations/{self.operations['moving']}/jobs/{self.job['id']}"

    def agent_addresses(self) -> dict[str, str]:
        """The same of the agent that has the job ``moving``."""
        return {"agent's jobs": "#/", "agent's job": f"#/jobs/{encode(self.job['id'])}"}

    def _job_of(self, name: str) -> str:
        operation = self.operations[name]
        return f"#/operations/{operation}/jobs/{self.cluster.jobs(operation)[0]['id']}"

    @property
    def node(self) -> Any:
        """The agent that has the job ``moving``."""
        return next(node for node in self.cluster.nodes if node.node_id == self.job["node_id"])

    def open(self, page: Page, where: str) -> None:
        """A page of the scheduler, with its data."""
        open_page(page, f"{self.cluster.url}/", where)

    def open_agent(self, page: Page, where: str) -> None:
        open_page(page, self.node.web_url, where)


def encode(name: str) -> str:
    """A name as it stands in an address; what JavaScript's encodeURIComponent makes of it."""
    return quote(name, safe="!*'()-_.~")


def open_page(page: Page, url: str, where: str) -> None:
    """As a person does it, who chooses a link where one of these pages is open: a fraction of loading all of it."""
    if page.url.startswith(url):
        page.evaluate(TURN, where)
    else:
        page.goto(f"{url}{where}")
    await_page(page, where)


def show(page: Page, scheduler: SchedulerProcess, where: str) -> None:
    """A page of a scheduler that is alone."""
    open_page(page, f"{scheduler.url}/", where)


def await_page(page: Page, where: str | None = None) -> None:
    """Wait until the page shows what belongs to its address, or to this one."""
    page.wait_for_function(READY, arg=where)


def press(page: Page, name: str) -> None:
    """Press the button that is called exactly so."""
    page.get_by_role("button", name=name, exact=True).click()


def fill(where: Page | Locator, fields: dict[str, str]) -> None:
    for label, value in fields.items():
        where.get_by_label(label, exact=True).fill(value)


def dialog(page: Page) -> Any:
    return page.get_by_role("dialog")


def sign_in(page: Page, token: str) -> Page:
    """A page that is signed in before its first script runs."""
    page.add_init_script(
        """if (location.protocol === 'http:' && !localStorage.getItem('cpumond-session')) {
      const asked = new XMLHttpRequest();
      asked.open('POST', '/api/v1/session', false);
      asked.setRequestHeader('Authorization', 'Bearer TOKEN');
      asked.send();
      if (asked.status === 200) localStorage.setItem('cpumond-session', JSON.parse(asked.responseText).key);
    }""".replace("TOKEN", token)
    )
    return page


def tab_to(page: Page, wanted: Any, most: int = 80) -> None:
    """Go to an element with the key Tab alone."""
    for _ in range(most):
        if wanted.evaluate("node => node === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError("it is not reached with Tab")


@contextlib.contextmanager
def run_site(
    directory: Path, hierarchies: Hierarchies, nodes: int = 2, last_node_id: str = "", **options: Any
) -> Iterator[Site]:
    """A scheduler and agents of 2 cores, all with pages, and a history with a point each 200 ms."""
    config = options.pop("scheduler_config", "") + '[history]\nperiod = "200ms"\n'
    cluster = Loop(
        directory, hierarchies, nodes, cpu=2.0, memory=4 * 2**30, web=True, scheduler_config=config, **options
    )
    if last_node_id:
        cluster.nodes[-1].node_id = last_node_id
    with cluster:
        yield Site(cluster)
    assert cluster.leftovers() == []
