"""Two schedulers when the database's primary is killed."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
from postgresql import open_pair, run_sql
from scheduler_process import SchedulerProcess
from waiting import PATIENCE, wait_until

LEASE_S = 3.0


@contextlib.contextmanager
def run_scheduler(directory: Path, conninfo: str) -> Iterator[SchedulerProcess]:
    directory.mkdir()
    with SchedulerProcess(directory) as process:
        process.write_config(f'[store]\nkind = "postgresql"\nconninfo = "{conninfo}"\nlease = "{LEASE_S:g}s"')
        yield process.start()


def leads(scheduler: SchedulerProcess) -> bool:
    return bool(scheduler.get("/readyz")["role"] == "leader")


def test_a_killed_primary_costs_no_confirmed_command_and_a_few_seconds(tmp_path: Path) -> None:
    with open_pair() as (primary, standby):
        run_sql(primary.conninfo(), "CREATE DATABASE site")
        conninfo = standby.conninfo_of_both("site")
        with run_scheduler(tmp_path / "one", conninfo) as one, run_scheduler(tmp_path / "two", conninfo) as two:
            wait_until(lambda: leads(one) or leads(two), "one of them leads")
            leader = one if leads(one) else two
            names = [f"pool-{number}" for number in range(20)]
            for name in names:
                leader.create_pool(name)
            primary.kill()
            killed_at = time.monotonic()
            standby.promote()
            promoted_s = time.monotonic() - killed_at
            # Who led before may still answer, by its lease: what counts is who can store a command.
            stored = wait_until(lambda: store_pool(one) or store_pool(two), "a command is stored")
            took_s = time.monotonic() - killed_at
            print(
                f"a command was stored {took_s:.2f} s after the primary was killed, promoted after {promoted_s:.2f} s"
            )
            pools = (one if stored == one.address else two).get("trees/default/pools")["pools"]
            assert {*names, "after"} <= {pool["name"] for pool in pools}
    assert took_s < 10.0 * PATIENCE


def store_pool(scheduler: SchedulerProcess) -> str:
    """The address of a scheduler that made the pool ``after``, or "" """
    with contextlib.suppress(httpx2.HTTPError):
        answer = scheduler.request("POST", "trees/default/pools", {"name": "after", "parent": "<Root>"})
        # It may have been made by a request before, whose answer said that its outcome is not known.
        if answer.status_code == 201 or "already" in answer.text:
            return scheduler.address
    return ""
