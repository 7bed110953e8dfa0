"""Two schedulers, three agents, real jobs: what the loss of the leader costs them. ``tests/slow`` has more rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from takeover import LEASE_S, Pair, kill_the_leader, stop_the_leader, two_schedulers

from cpumond.core.errors import UnavailableError
from cpumond.testing.postgresql import PostgresServer

pytestmark = pytest.mark.cgroup

KILLED_S = 5.0
STOPPED_S = LEASE_S + 5.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    try:
        PostgresServer().close()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    with two_schedulers(tmp_path_factory.mktemp("pair")) as made:
        yield made


def test_a_killed_leader_costs_no_job_and_a_few_seconds(pair: Pair):
    for _ in range(2):
        assert kill_the_leader(pair) < KILLED_S


def test_a_stopped_leader_is_replaced_and_answers_nothing_when_it_goes_on(pair: Pair):
    for _ in range(2):
        took_s, answered_s = stop_the_leader(pair)
        assert took_s < STOPPED_S
        assert answered_s < 1.0
