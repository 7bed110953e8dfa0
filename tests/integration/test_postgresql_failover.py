"""Two schedulers when the database's primary is killed, or cut off from the leader."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from postgresql import open_pair, run_sql
from scheduler_process import SchedulerProcess
from waiting import PATIENCE, wait_until

from cpumond.cluster.postgresql import PostgresServer
from cpumond.core.errors import UnavailableError

LEASE_S = 3.0
NEAR, FAR = "192.0.2.1", "192.0.2.2"
"""Addresses for documentation: they exist in the test's own network namespaces only."""


@contextlib.contextmanager
def run_scheduler(directory: Path, conninfo: str, *prefix: str) -> Iterator[SchedulerProcess]:
    directory.mkdir()
    with SchedulerProcess(directory) as process:
        process.write_config(f'[store]\nkind = "postgresql"\nconninfo = "{conninfo}"\nlease = "{LEASE_S:g}s"')
        command = process.arguments
        process.arguments = lambda *more: [*prefix, *command(*more)]  # type: ignore[method-assign]
        yield process.start()


def leads(scheduler: SchedulerProcess) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        return bool(scheduler.get("/readyz")["role"] == "leader")
    return False


def test_a_killed_primary_costs_no_confirmed_command_and_a_few_seconds(tmp_path: Path) -> None:
    with open_pair() as (primary, standby):
        run_sql(primary.conninfo(), "CREATE DATABASE site")
        conninfo = standby.conninfo_of_both("site")
        with (
            run_scheduler(tmp_path / "one", conninfo) as one,
            run_scheduler(tmp_path / "two", conninfo) as two,
        ):
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


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, ``NEAR`` to ``FAR``."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    near, far = (f"cpumond-{side}-{os.getpid()}" for side in ("near", "far"))
    with contextlib.ExitStack() as stack:
        for name in (near, far):
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"needs network namespaces: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ip(near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", far)
        for name, address in ((near, NEAR), (far, FAR)):
            ip(name, "addr", "add", f"{address}/30", "dev", "cable")
            for device in ("lo", "cable"):
                ip(name, "link", "set", device, "up")
        yield near, far


def ip(namespace: str, *arguments: str) -> None:
    subprocess.run(["ip", "-n", namespace, *arguments], check=True)


def test_a_leader_without_its_database_is_followed_and_does_not_answer(
    tmp_path: Path, namespaces: tuple[str, str]
) -> None:
    near, far = namespaces
    try:
        server = PostgresServer(f"listen_addresses = '{NEAR}'")
    except UnavailableError as error:
        pytest.skip(f"needs PostgreSQL: {error}")
    server.prefix = ("ip", "netns", "exec", near)
    with contextlib.closing(server):
        server.make()
        with open(f"{server.data}/pg_hba.conf", "a", encoding="utf-8") as file:
            file.write(f"host all all {FAR}/32 trust\n")
        server.start()
        # A socket in the file system leads into every network namespace.
        local = server.conninfo(host=server.directory)
        remote = server.conninfo(host=NEAR)
        with run_scheduler(tmp_path / "leader", remote, "ip", "netns", "exec", far) as leader:
            wait_until(lambda: leader.events("leads"), "the first one leads")
            with run_scheduler(tmp_path / "standby", local) as standby:
                assert not leads(standby)
                ip(near, "link", "set", "cable", "down")
                cut_at = time.monotonic()
                wait_until(lambda: leads(standby), "the other one leads")
                led_s = time.monotonic() - cut_at
                wait_until(lambda: leader.events("lost_lead"), "the first one notices")
                print(f"led {led_s:.2f} s after the cable was cut, lease {LEASE_S:g} s")
                standby.create_pool("after")
                ip(near, "link", "set", "cable", "up")
                wait_until(lambda: leader.events("standby"), "the first one follows")
                assert leads(standby)
        assert led_s < (LEASE_S + 5.0) * PATIENCE
