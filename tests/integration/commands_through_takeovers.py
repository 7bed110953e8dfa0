"""Commands through the loss of the leader, again and again: what was acknowledged is there, and nothing twice."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from scheduler_process import GIB, SchedulerProcess
from waiting import wait_until

from cpumond.cli.scheduler.http_client import SchedulerClient
from cpumond.cluster.ports import held
from cpumond.core.errors import CpumondError

LEASE_S = 2.0


@contextmanager
def shared_schedulers(directory: Path, conninfo: str, count: int = 2) -> Iterator[list[SchedulerProcess]]:
    """Schedulers on one database; the first of them leads at first."""
    made = []
    try:
        for number in range(count):
            place = directory / f"scheduler-{number}"
            place.mkdir()
            scheduler = SchedulerProcess(place)
            made.append(scheduler)
            scheduler.write_config(f'[store]\nkind = "postgresql"\nconninfo = "{conninfo}"\nlease = "{LEASE_S:g}s"')
            scheduler.start()
            if number == 0:
                wait_until(lambda: read_role(made[0]) == "leader", "the first one leads")
        yield made
    finally:
        for scheduler in made:
            if scheduler.process is not None:
                scheduler.process.send_signal(signal.SIGCONT)
            scheduler.close()


def read_role(scheduler: SchedulerProcess) -> Any:
    with suppress(httpx2.HTTPError), httpx2.Client(base_url=scheduler.url, timeout=1.0, trust_env=False) as client:
        return client.get("/readyz").json()["role"]
    return None


def find_leader(schedulers: list[SchedulerProcess], but: SchedulerProcess | None = None) -> SchedulerProcess:
    """The one that leads, as soon as another one than ``but`` does."""
    others = [each for each in schedulers if each is not but]
    return wait_until(lambda: next((each for each in others if read_role(each) == "leader"), None), "one leads", 60.0)


def lose(schedulers: list[SchedulerProcess], number: int) -> None:
    """Kill the leader, stop it with SIGSTOP, or end it, in turn; it is back as a standby when this returns."""
    leader = find_leader(schedulers)
    how = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)[number % 3]
    if how == signal.SIGSTOP:
        assert leader.process is not None
        leader.process.send_signal(how)
        find_leader(schedulers, leader)
        leader.process.send_signal(signal.SIGCONT)
        wait_until(lambda: read_role(leader) == "standby", "it is a standby")
        return
    leader.stop(how)
    with held(leader.address):
        find_leader(schedulers, leader)
        at_its_address = leader.config_path.read_text().replace("127.0.0.1:0", leader.address)
        leader.config_path.write_text(at_its_address)
        leader.start()


class Writer(threading.Thread):
    """Starts one operation after the other, each with a title of its own, until it is told to end."""

    def __init__(self, number: int, urls: list[str]) -> None:
        super().__init__()
        self.acknowledged: list[str] = []
        self.unknown: list[str] = []
        """It was told that this failed, or that nobody knows."""
        self._name = f"writer-{number}"
        self._client = SchedulerClient(urls, timeout_s=10.0, patience_s=30.0)
        self._ending = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._ending.wait(0.02):
            number += 1
            title = f"{self._name}-{number}"
            task = {"job_count": 1, "cpu_limit": 1.0, "memory_limit": GIB, "command": "true"}
            try:
                self._client.request(
                    "POST", "/operations", {"spec": {"pool": "p", "title": title, "tasks": {"t": task}}}
                )
            except CpumondError:
                self.unknown.append(title)
            else:
                self.acknowledged.append(title)

    def end(self) -> None:
        self._ending.set()
        self.join()


def run_commands(schedulers: list[SchedulerProcess], rounds: int) -> tuple[int, int]:
    """Lose the leader ``rounds`` times under commands; how many were acknowledged, and how many are not known."""
    leader = find_leader(schedulers)
    limits = {"max_running_operation_count": 1, "max_operation_count": 100_000}
    leader.create_pool("p", **limits)
    writers = [Writer(number, [each.url for each in schedulers]) for number in range(4)]
    for writer in writers:
        writer.start()
    try:
        for number in range(rounds):
            lose(schedulers, number)
    finally:
        for writer in writers:
            writer.end()
    leader = find_leader(schedulers)
    titles = Counter(list_titles(leader))
    acknowledged = [title for writer in writers for title in writer.acknowledged]
    unknown = {title for writer in writers for title in writer.unknown}
    assert [title for title in acknowledged if titles[title] != 1] == []
    assert {title for title, count in titles.items() if count != 1} == set()
    assert titles.keys() - set(acknowledged) <= unknown
    return len(acknowledged), len(unknown)


def list_titles(scheduler: SchedulerProcess) -> list[str]:
    titles: list[str] = []
    while page := scheduler.get(f"operations?limit=1000&offset={len(titles)}")["operations"]:
        titles += [each["title"] for each in page]
    return titles
