"""The scheduler's unit in a real systemd; each test judges facts of one boot with ``guest/scheduler_service.py``."""

import re

import pytest
from guest_host import Facts, assert_quiet, lives, of

LIMIT_S = 180
WRITABLE = {"/tmp", "/var/tmp", "/var/lib/private/cpumond-scheduler", "/run/cpumond-scheduler"}
NO_FILES = {"/dev/hugepages", "/dev/mqueue", "/dev/pts", "/dev/shm", "/proc"}
"""Mounts of the kernel's own things, which are there as far as the kernel has them."""

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


facts = lives("scheduler_service.py", LIMIT_S, "scheduler")


def test_systemd_accepts_the_unit(facts: Facts) -> None:
    fact = of(facts, "install")
    assert_quiet(fact["reload"], fact["verify"])


def test_it_starts_as_it_is_shipped(facts: Facts) -> None:
    """``enable --now`` waits for the first update; the state is in a line of ``systemctl status``."""
    fact = of(facts, "start")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert (fact["ActiveState"], fact["SubState"], fact["enabled"]) == ("active", "running", "enabled")
    assert fact["StatusText"] == "0 operations (0 pending); 0 jobs; 0 nodes (0 online)"
    assert fact["WatchdogUSec"] == "30s"


def test_it_has_no_rights(facts: Facts) -> None:
    """A user of its own that is not root's, no capability, and one directory that it may write."""
    fact = of(facts, "start")
    rights = fact["rights"]
    assert fact["DynamicUser"] == "yes"
    assert "0" not in rights["Uid"]
    assert rights["CapEff"] == rights["CapBnd"] == rights["CapAmb"] == ["0000000000000000"]
    assert (rights["NoNewPrivs"], rights["Seccomp"]) == (["1"], ["2"])
    assert set(fact["run"]) <= {"credentials", "systemd", "cpumond-scheduler"}
    assert {"/", "/sys", "/sys/fs/cgroup"} <= set(fact["read_only"])
    assert set(fact["writable"]) - NO_FILES == WRITABLE
    assert fact["state"] == "0o700"
    assert "scheduler.db" in fact["files"]


def test_it_works_in_its_sandbox(facts: Facts) -> None:
    """Commands and refusals, metrics, pages, history."""
    fact = of(facts, "work")
    assert fact["refusal"][0] == 422, fact["refusal"]
    assert fact["said_s"] is not None, fact["StatusText"]
    assert re.search(r'^cpumond_scheduler_operations\{state="\w+"\} 1\.0', fact["metrics"], re.MULTILINE)
    assert fact["page"] == 200
    assert fact["history_s"] is not None


def test_a_killed_one_is_started_again(facts: Facts) -> None:
    fact = of(facts, "kill")
    assert fact["up_s"] is not None
    assert fact["lost"] == 0
    assert fact["restarts"] == "1"


def test_the_watchdog_ends_a_scheduler_that_hangs(facts: Facts) -> None:
    fact = of(facts, "hang")
    assert_quiet(fact["restart"])
    assert fact["fed"], "it was ended though its updates went on"
    assert fact["up_s"] is not None
    assert "Watchdog timeout" in fact["journal"]
    assert fact["lost"] == 0


def test_tokens_come_from_a_file_of_root(facts: Facts) -> None:
    """Without the file the service starts as well; with it, and named in the configuration, a token is asked for."""
    assert not of(facts, "start")["credentials"]
    fact = of(facts, "tokens")
    assert_quiet(fact["answer"])
    assert fact["mode"] in ("0o400", "0o440"), "how systemd gives it to the service depends on its version"
    assert (fact["without"], fact["with"]) == (401, 200)
    assert_quiet(fact["back"])


def test_its_address_may_come_late(facts: Facts) -> None:
    """The same process answers there as soon as the host has it."""
    fact = of(facts, "late_address")
    assert_quiet(fact["answer"])
    assert fact["journal"].count("address_not_here") == 1
    assert "[api] listen: this host does not have the address 203.0.113.7 yet" in fact["journal"]
    assert fact["status"] == 200
    assert fact["same_pid"]
    assert_quiet(fact["back"])


def test_stop_leaves_one_sound_file(facts: Facts) -> None:
    fact = of(facts, "stop")
    assert_quiet(fact["answer"])
    assert fact["took_s"] < 30.0
    assert fact["check"] == [["ok"]]
    assert fact["confirmed"] > 5
    assert fact["lost"] == fact["lost_after_start"] == 0
    assert not fact["files"].get("scheduler.db-wal"), "the log was not copied into the database"
    assert (fact["Result"], fact["ExecMainStatus"]) == ("success", "0")
    assert "stopping" in fact["journal"]
    assert_quiet(fact["start"])
