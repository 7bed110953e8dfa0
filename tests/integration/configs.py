"""Configurations of the agents under test: quick checks, low floors, one source over all cgroups of the test."""

from typing import Any

from agent_process import AgentProcess
from real_cgroups import CgroupTree
from waiting import wait_until

FLOOR = 0.1

QUICK = {
    "smoothing_factor": "1.0",
    "vote_window_size": "2",
    "vote_decision_threshold": "1",
    "decrease_coefficient": "0.5",
    "min_cpu_limit": str(FLOOR),
}
"""Each check decides by the last two: 2 cores are down at 0.1 after seven checks."""


def make(cgroups: CgroupTree, *names: str, quota_us: int = 150_000) -> dict[str, dict[str, str]]:
    """Cgroups with a quota, 1.5 cores unless said; what all of their files hold."""
    for name in names:
        cgroups.make(name)
        cgroups.write(name, "quota_us", quota_us)
    return {name: cgroups.read_all(name) for name in names}


def at_floor(cgroups: CgroupTree, *names: str) -> bool:
    return all(abs(cgroups.quota_cores(name) - FLOOR) < 0.001 for name in names)


def describe_source(pattern: str, cpu_limit: object = "from-cgroup", more: str = "") -> str:
    limit = f'"{cpu_limit}"' if isinstance(cpu_limit, str) else str(cpu_limit)
    return f'[[source]]\nkind = "glob"\npattern = "{pattern}"\ncpu_limit = {limit}\n{more}\n'


def describe_agent(
    tree: CgroupTree,
    *,
    mode: str = "reclaim",
    check_period: str = "100ms",
    sources: str | None = None,
    monitor: dict[str, str] | None = None,
    more: str = "",
    roots: str | None = None,
) -> str:
    """A configuration over the cgroups below ``tree``'s top, which alone may be written."""
    options = {"mode": f'"{mode}"', "check_period": f'"{check_period}"', **QUICK, **(monitor or {})}
    section = "".join(f"{key} = {value}\n" for key, value in options.items())
    found = sources if sources is not None else describe_source(f"{tree.top}/*")
    rescan = "" if "[discovery]" in more else '[discovery]\nrescan_period = "300ms"\n'
    managed = f'managed_roots = ["{tree.top if roots is None else roots}"]\n'
    # The node is shared and checks are many: no check is left out for the agent's own cost.
    return f"{managed}[monitor]\n{section}{found}\n{rescan}[cost]\ncpu_budget_ratio = 0.0\n{more}"


def lower(agent: AgentProcess, cgroups: CgroupTree, *names: str, **options: Any) -> None:
    agent.start(describe_agent(cgroups, **options))
    wait_until(lambda: at_floor(cgroups, *names), "the quotas are down at the floor")
