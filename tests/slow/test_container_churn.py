"""Hundreds of containers started and removed in a row under a real agent, the engine killed and started meanwhile."""

import pytest
from agent_process import AgentProcess
from engines import Dockerd
from test_container_sources import churn

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(1800)]


def test_two_hundred_containers_come_and_go(agent: AgentProcess) -> None:
    with Dockerd(options=["--live-restore"]) as dockerd:
        churn(dockerd, agent, 200, restart_each=60)
