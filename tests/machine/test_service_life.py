"""The service in a real systemd; each test judges facts of one boot with ``guest/service_life.py``, two minutes."""

import re

import pytest
from guest_host import Facts, assert_came, assert_quiet, lives, of

LIMIT_S = 360
DEATHS = 10
pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]

ORIGINAL = {
    "cpu.cfs_period_us": "100000\n",
    "cpu.cfs_quota_us": "100000\n",
    "cpu.cfs_burst_us": "40000\n",
    "cpu.shares": "700\n",
}


facts = lives("service_life.py", LIMIT_S)


def test_files_are_installed(facts: Facts) -> None:
    fact = of(facts, "install")
    assert fact["sysusers"]["code"] == fact["tmpfiles"]["code"] == 0, fact
    assert_quiet(fact["reload"], fact["verify"])
    assert fact["settings"] == ORIGINAL


def test_fresh_install_writes_nothing_and_says_so(facts: Facts) -> None:
    """No CPU setting of any cgroup is written to, from start to end, also with a job whose limit it would lower."""
    fact = of(facts, "fresh")
    assert fact["answer"]["code"] == 0, fact["answer"]
    assert (fact["ActiveState"], fact["SubState"], fact["enabled"]) == ("active", "running", "enabled")
    assert (fact["Type"], fact["User"]) == ("notify", "cpumond")
    assert fact["ticks_s"] is not None
    assert_quiet(fact["restart"], fact["reload"])
    assert fact["decided_s"] is not None
    assert fact["changed"] == {}
    assert fact["files"]["count"] > 20
    assert fact["files"]["written"] == []
    assert fact["files"]["changed"] == {}
    assert fact["control"] == ["/sys/fs/cgroup/cpu/jobs/one/cpu.shares"], "a write would not have been seen"
    sentence = "shadow mode: nothing is written; no jobs: no [[source]] is configured"
    assert fact["StatusText"].startswith(sentence)
    assert f'Status: "{sentence}' in fact["status"]
    assert re.search(rf"^started .*{re.escape(sentence)}", fact["journal"], re.MULTILINE)


def test_service_starts_with_settings_that_write(facts: Facts) -> None:
    fact = of(facts, "start")
    assert_quiet(fact["reload"], fact["answer"])
    assert fact["ActiveState"] == "active"


def test_limit_goes_down(facts: Facts) -> None:
    fact = of(facts, "lower")
    assert fact["after_s"] is not None
    assert 10_000 <= fact["quota_us"] < 100_000


def test_agent_answers(facts: Facts) -> None:
    """Metrics over TCP, and the command line over the control socket."""
    fact = of(facts, "lower")
    assert re.search(r"^cpumond_\w+", fact["metrics"], re.MULTILINE)
    assert fact["status"]["code"] == 0, fact["status"]
    assert "one" in fact["status"]["output"]


def test_agent_has_one_capability(facts: Facts) -> None:
    """CAP_DAC_OVERRIDE is bit 1; no other user's secrets, sockets or configuration are writable or readable."""
    fact = of(facts, "sandbox")
    assert "0" not in fact["Uid"]
    assert fact["CapEff"] == fact["CapBnd"] == fact["CapAmb"] == ["0000000000000002"]
    assert (fact["NoNewPrivs"], fact["Seccomp"]) == (["1"], ["2"])
    assert set(fact["run"]) <= {"cpumond", "dbus", "systemd"}
    assert fact["config"], "what it may read cannot be looked at"
    secrets = fact["secrets"]
    assert [path for path, (on_the_host, _) in secrets.items() if not on_the_host] == []
    assert [path for path, (_, for_the_agent) in secrets.items() if for_the_agent] == []
    assert {"/", "/etc/cpumond", "/sys", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/systemd"} <= set(fact["read_only"])
    assert not {"/sys/fs/cgroup/cpu", "/run/cpumond", "/var/lib/cpumond"} & set(fact["read_only"])


def test_doctor_knows_whether_polkit_works(facts: Facts) -> None:
    """One that runs is asked, one that sleeps is not woken up."""
    fact = of(facts, "polkit")
    assert_quiet(fact["start"])
    about = r"1 job of systemd's units, for example run-\w+\.service: .*cpumond\.rules lets cpumond set their limits"
    for [finding] in (fact["idle"], fact["running"]):
        assert finding["level"] == "ok"
        assert re.match(about, finding["text"])
    assert fact["idle_state"] == "inactive"


def test_reload_brings_new_settings(facts: Facts) -> None:
    """In the same process; a wrong file is refused with its reason and the agent goes on with those it has."""
    fact = of(facts, "reload")
    for command in ("restart", "answer", "last"):
        assert_quiet(fact[command])
    assert fact["wrong"]["code"] != 0, "systemctl reload calls a refused file good"
    assert_came(fact, "high_s", "floor_s", "said_s", "ticks_s")
    assert fact["kept_us"] == 30_000, "the wrong file took the settings away"
    assert fact["left_s"] is not None, "the floor is not that of the settings"
    assert fact["status_s"] is not None, "systemctl status does not say that the reload was refused"
    assert fact["forgotten_s"] is not None
    assert fact["same_pid"]
    assert fact["ActiveState"] == "active"


def find_in_order(lines: list[str], *patterns: str) -> list[str]:
    """The first line that fits each pattern, each after the one before; shorter where that ends."""
    found = []
    rest = iter(lines)
    for pattern in patterns:
        line = next((line for line in rest if re.search(pattern, line)), None)
        if line is None:
            break
        found.append(line)
    return found


def test_manager_hears_of_a_reload(facts: Facts) -> None:
    """RELOADING=1 puts the unit into ActiveState=reloading, READY=1 takes it out: nobody told systemd otherwise."""
    fact = of(facts, "signalled")
    assert fact["back_s"] is not None, fact["manager"]
    order = (
        r"Got notification message from PID \d+ \(RELOADING=1, MONOTONIC_USEC=\d+\)",
        r"Changed running -> reload$",
        r"Got notification message from PID \d+ \(READY=1, STATUS=.*\)",
        r"Changed reload -> running$",
    )
    assert len(find_in_order(fact["manager"], *order)) == len(order), fact["manager"]


def test_another_systemd_still_hears_the_agent(facts: Facts) -> None:
    """``daemon-reload`` and ``daemon-reexec``: limits stay, and the watchdog is fed."""
    fact = of(facts, "reexec")
    assert_quiet(*fact["answers"])
    assert fact["lowered_s"] is not None
    assert fact["after"] == fact["before"] != ORIGINAL
    assert fact["lived_s"] is not None
    assert fact["same_pid"]
    assert fact["ActiveState"] == "active"


@pytest.mark.parametrize(("step", "restarts", "within_s"), [("kill", "1", 2.0), ("hang", "1", 10.0 + 5.0 + 2.0)])
def test_lost_agent_leaves_no_lowered_limit(facts: Facts, step: str, restarts: str, within_s: float) -> None:
    """Killed at once, or by the watchdog: the original settings come back byte for byte, then the agent."""
    fact = of(facts, step)
    assert_came(fact, "lowered_s", "original_s")
    # A host that is busy with other work is slow to start a command.
    assert fact["original_s"] < within_s + 10 * fact["command_s"]
    assert fact["settings"] == ORIGINAL
    assert fact["up_s"] is not None
    assert fact["restarts"] == restarts
    assert fact["lowered_again_s"] is not None


def test_watchdog_ended_the_hanging_agent(facts: Facts) -> None:
    """In the time that the unit gives it as it is shipped."""
    fact = of(facts, "hang")
    assert_quiet(*fact["ready"])
    assert (fact["WatchdogUSec"], fact["TimeoutAbortUSec"]) == ("10s", "5s")
    assert "Watchdog timeout" in fact["journal"]


def test_ends_of_the_agent_are_counted_by_what_systemd_called_them(facts: Facts) -> None:
    """Over restarts, by the command that puts the limits back; so that Prometheus sees what it could not scrape."""
    counts = dict(line.removeprefix("cpumond_service_ends_total").split() for line in of(facts, "hang")["ends"])
    assert {result: count for result, count in counts.items() if float(count)} == {
        '{result="success"}': "4.0",
        '{result="signal"}': "1.0",
        '{result="watchdog"}': "1.0",
    }


def test_an_error_that_stays_is_tried_ten_times(facts: Facts) -> None:
    """A port that another program has: the agent stays off then, and the journal says why."""
    fact = of(facts, "busy_port")
    assert_quiet(*fact["ready"])
    assert fact["answer"]["code"] != 0
    assert fact["off_s"] is not None, fact["journal"]
    assert fact["restarts"] == str(DEATHS)
    assert fact["journal"].count("cannot listen on 127.0.0.1:9799: Address already in use") == DEATHS
    assert "Start request repeated too quickly" in fact["journal"]


def test_stop_restores_and_leaves_nothing(facts: Facts) -> None:
    fact = of(facts, "stop")
    assert fact["lowered_s"] is not None
    assert set(fact["quotas"]) == {100_000}
    assert len(fact["quotas"]) > 100
    assert_quiet(fact["answer"])
    assert fact["took_s"] < 30.0
    assert fact["settings"] == ORIGINAL
    assert fact["Result"] == "success"
    assert fact["processes"] == []
    assert "control.sock" not in fact["run"]
    assert not fact["cgroup"]


def test_agent_restores_before_its_stop_ends(facts: Facts) -> None:
    """ActiveState=deactivating with SubState=stop-sigterm is the agent's own time: nothing is left to do after it."""
    fact = of(facts, "stop")
    order = (
        r"Changed running -> stop-sigterm$",
        r"Got notification message from PID \d+ \(STOPPING=1\)",
        r"Got notification message from PID \d+ \(EXTEND_TIMEOUT_USEC=\d+, STATUS=restoring limits\)",
        r"Changed stop-sigterm -> stop-post$",
        r"^nothing to restore in /var/lib/cpumond/originals.state$",
        r"Changed \S+ -> dead$",
    )
    assert len(find_in_order(fact["manager"], *order)) == len(order), fact["manager"]


def test_restore_after_stop_changes_nothing(facts: Facts) -> None:
    fact = of(facts, "stop")
    assert fact["restore"]["code"] == 0, fact["restore"]
    assert "nothing to restore" in fact["restore"]["output"]
    assert fact["settings_after_restore"] == ORIGINAL


def test_journal_has_fields_of_a_change(facts: Facts) -> None:
    """A changed limit is one entry, to be searched by its fields: ``journalctl CPUMOND_JOB_ID=one``."""
    entries = of(facts, "journal")["entries"]
    changes = [entry for entry in entries if entry.get("CPUMOND_EVENT") == "limit_changed"]
    assert changes, sorted({str(entry.get("CPUMOND_EVENT")) for entry in entries})
    first = changes[0]
    assert (first["CPUMOND_JOB_ID"], first["CPUMOND_REASON"]) == ("one", "shrink")
    assert 0.0 < float(first["CPUMOND_NEW_CORES"]) < float(first["CPUMOND_OLD_CORES"]) == 1.0
    assert (first["PRIORITY"], first["SYSLOG_IDENTIFIER"]) == ("6", "cpumond")


def test_wrong_configuration_is_tried_once(facts: Facts) -> None:
    """Exit code 78, no restart; and the limit that an agent before it left low is put back."""
    fact = of(facts, "wrong_config")
    assert fact["left"]["lowered_s"] is not None
    assert fact["left"]["left_us"] < 100_000, "nothing was left to put back"
    assert [(finding["level"], finding["text"]) for finding in fact["left"]["doctor"]] == [
        ("fail", "a dead agent left the limits of 1 cgroup, for example 'jobs/one'")
    ]
    assert fact["answer"]["code"] != 0
    assert fact["settled_s"] is not None
    assert (fact["ActiveState"], fact["ExecMainStatus"]) == ("failed", "78")
    assert fact["restarts"] == "0"
    assert fact["settings"] == ORIGINAL
