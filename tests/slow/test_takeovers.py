"""Two schedulers, three agents, real jobs: the leader is killed and stopped again and again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
from takeover import LEASE_S, Pair, kill_the_leader, stop_the_leader, two_schedulers

from cpumond.core.errors import UnavailableError
from cpumond.testing.postgresql import PostgresServer

pytestmark = [pytest.mark.cgroup, pytest.mark.timeout(3000)]

ROUNDS = 50


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    try:
        PostgresServer().close()
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    with two_schedulers(tmp_path_factory.mktemp("pair")) as made:
        yield made


def test_killed_again_and_again(pair: Pair, capsys: pytest.CaptureFixture[str]):
    took = [kill_the_leader(pair) for _ in range(ROUNDS)]
    with capsys.disabled():
        print(
            f"\nkilled {ROUNDS} times: every node heard after {statistics.median(took):.2f} s, {max(took):.2f} at most"
        )
    assert max(took) < 5.0


def test_stopped_again_and_again(pair: Pair, capsys: pytest.CaptureFixture[str]):
    took, answered = zip(*(stop_the_leader(pair) for _ in range(ROUNDS)), strict=True)
    with capsys.disabled():
        print(
            f"\nstopped {ROUNDS} times, lease {LEASE_S:g} s: every node heard after {statistics.median(took):.2f} s, "
            f"{max(took):.2f} at most; 503 after SIGCONT within {max(answered):.3f} s"
        )
    assert max(took) < LEASE_S + 5.0
    assert max(answered) < 1.0
