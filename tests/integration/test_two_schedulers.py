"""Two schedulers, three agents, real jobs: what the loss of the leader costs them. ``tests/slow`` has more rounds."""

from pathlib import Path

import pytest
from takeover import kill_the_leader, stop_the_leader, two_schedulers

from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.errors import UnavailableError

pytest.importorskip("psycopg", reason="needs the Python package psycopg: sh tests/venv.sh all")
pytestmark = pytest.mark.cgroup


def test_a_killed_and_a_stopped_leader_are_replaced_and_cost_no_job(tmp_path: Path):
    try:
        PostgresServer().close()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    with two_schedulers(tmp_path, jobs=8) as pair:
        kill_the_leader(pair)
        stop_the_leader(pair)
