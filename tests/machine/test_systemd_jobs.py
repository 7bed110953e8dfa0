"""A scheduler's jobs as units, run by the hardened agent; each test judges facts of ``guest/systemd_jobs.py``."""

import pytest
from guest_host import Facts, assert_came, assert_quiet, lives, of

LIMIT_S = 180
NOTHING = {"units": [], "cgroups": []}
SLICE = "cpumond.slice/cpumond-jobs.slice"
QUOTA_US = 100_000
"""Of the sleeper, the job that lives from step to step: it ordered one core."""

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


facts = lives("systemd_jobs.py", LIMIT_S, "scheduler")


def only_job(over: Facts) -> Facts:
    assert over["over_s"] is not None, over
    (job,) = over["jobs"]
    found: Facts = job
    return found


def assert_same_job(facts: Facts, fact: Facts) -> None:
    """The sleeper runs on as it was: the same process in the same unit, and no other job was started for it."""
    before = of(facts, "shrinks")
    assert (fact["unit"]["ActiveState"], fact["unit"]["SubState"]) == ("active", "running")
    assert fact["alive"]
    assert fact["unit"]["MainPID"] == before["unit"]["MainPID"]
    assert int(fact["unit"]["MainPID"]) in fact["processes"]
    assert (fact["jobs"], fact["job"]["state"], fact["job"]["id"]) == (1, "running", before["job"]["id"])


def test_files_are_installed(facts: Facts) -> None:
    fact = of(facts, "install")
    assert all(answer["code"] == 0 for answer in fact["answers"]), fact["answers"]
    assert_quiet(fact["verify"])
    assert fact["check"]["code"] == 0, fact["check"]
    assert_quiet(fact["scheduler"])
    assert fact["listens_s"] is not None


def test_the_host_is_a_node(facts: Facts) -> None:
    """The service is ready, and offers slots: the executor works in its sandbox."""
    fact = of(facts, "start")
    assert_quiet(fact["answer"])
    assert (fact["ActiveState"], fact["User"]) == ("active", "root")
    assert fact["online_s"] is not None
    assert fact["node"]["capacity"]["user_slots"] > 0


def test_limit_of_an_idle_job_goes_down(facts: Facts) -> None:
    """In the period that its operation wishes, 100 ms, also right after its start; the scheduler knows."""
    fact = of(facts, "shrinks")
    assert fact["unit_name"] == f"cpumond-job-{fact['job']['id']}.service"
    assert fact["lowered_s"] is not None
    assert fact["lowered_s"] < 10.0
    assert fact["known_s"] is not None
    assert 0.1 * QUOTA_US <= fact["quota_us"] <= 0.5 * QUOTA_US
    assert fact["period_us"] == 100_000
    # The agent writes the kernel's file, and has systemd want the same.
    assert fact["agreed_s"] is not None
    assert fact["unit"]["MemoryMax"] == str(64 << 20)


def test_job_has_no_rights(facts: Facts) -> None:
    status = of(facts, "shrinks")["status"]
    assert set(status["Uid"]) == {"65534"}
    assert {int(status[name][0], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}


def test_agent_keeps_its_sandbox(facts: Facts) -> None:
    """Root, with the three capabilities of service and drop-in, and nowhere to write but its own places."""
    fact = of(facts, "sandbox")
    chown, dac_override, fowner = 1 << 0, 1 << 1, 1 << 3
    status = fact["status"]
    assert set(status["Uid"]) == {"0"}
    assert int(status["CapEff"][0], 16) == int(status["CapBnd"][0], 16) == chown | dac_override | fowner
    assert int(status["CapAmb"][0], 16) == dac_override
    assert (status["NoNewPrivs"], status["Seccomp"]) == (["1"], ["2"])
    assert fact["shadow"] == ""
    assert fact["run"] == ["cpumond", "dbus", "log", "systemd"]
    writable = {path for path in fact["writable"] if not path.startswith(("/proc", "/dev"))}
    assert writable == {
        "/run/cpumond", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/unified", "/tmp",
        "/var/lib/cpumond", "/var/lib/cpumond-jobs", "/var/tmp",
    }  # fmt: skip
    assert set(fact["modes"].values()) == {"0o711"}


def test_killed_agent_takes_its_job_over(facts: Facts) -> None:
    """The unit goes on with its full quota; systemd starts the agent again, and that lowers it again."""
    fact = of(facts, "kill")
    assert_quiet(fact["answer"])
    assert fact["original_s"] is not None
    assert fact["meanwhile"] == {**fact["meanwhile"], "ActiveState": "active", "SubState": "running"}
    assert fact["up_s"] is not None
    assert fact["restarts"] == "1"
    assert "adopted=1 ended=0" in fact["journal"]
    assert_came(fact, "lowered_again_s", "node_s")
    assert_same_job(facts, fact)


def test_stopped_agent_leaves_jobs_with_their_full_quota(facts: Facts) -> None:
    fact = of(facts, "stop")
    assert_quiet(fact["answer"])
    assert fact["took_s"] < 30.0
    assert fact["stopped"] == {"ActiveState": "inactive", "Result": "success"}
    assert fact["original_us"] == QUOTA_US
    assert fact["meanwhile"]["SubState"] == "running"
    assert_quiet(fact["start"])
    assert_came(fact, "lowered_again_s", "node_s")
    assert_same_job(facts, fact)


def test_job_that_ended_without_the_agent(facts: Facts) -> None:
    """Its unit keeps the exit code, and the journal its log, until the next agent comes."""
    fact = of(facts, "stop")
    assert fact["ended_s"] is not None
    assert (fact["away"]["state"], only_job(fact["away"])["exit_code"]) == ("completed", 0)
    assert fact["away"]["logs"] == [{"stdout": "done\n", "stderr": ""}]


def test_abort_leaves_nothing(facts: Facts) -> None:
    """But the log. The job was told to end before it had to."""
    fact = of(facts, "abort")
    assert fact["gone_s"] is not None
    assert fact["gone_s"] < 20.0
    assert fact["left"] == NOTHING
    assert not fact["alive"]
    assert fact["over"]["state"] == "aborted"
    job = only_job(fact["over"])
    assert job["state"] == "aborted"
    assert job["exit_code"] == 5
    assert fact["over"]["logs"][0]["stdout"] == "begun\ntold\n"
    assert fact["node_s"] is not None
    assert fact["sandboxes"] == []
    assert fact["status"]["problems"] == []
    assert not any(fact["status"]["executor"]["states"].values())
    assert_quiet(fact["last_stop"])
    assert fact["Result"] == "success"
