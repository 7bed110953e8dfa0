"""``cpumond doctor`` on hosts with systemd: units, their rights, cgroups of others, quotas above, pressure."""

import os
from pathlib import Path

import msgspec
import pytest

from cpumond.agent.config import AgentConfig, ExecutorOptions
from cpumond.cli.doctor import command as doctor
from cpumond.cli.doctor import host as doctor_host
from cpumond.cli.doctor import units as doctor_units
from cpumond.cli.doctor.checks import Finding
from cpumond.cli.doctor.host import AgentSeen, BusSeen
from cpumond.host.cgroup.mounts import Hierarchies
from cpumond.monitor.model import MonitorSettings
from cpumond.testing import make_tree, v2_cgroup

GOOD = BusSeen("cpumond", False, True, True, True, ("/etc/polkit-1/rules.d/50-cpumond.rules",))
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


def unified(root: Path | str) -> Hierarchies:
    return Hierarchies(2, str(root), str(root), None, str(root))


def seen(**changes: object) -> BusSeen:
    return msgspec.structs.replace(GOOD, **changes)


@pytest.mark.parametrize(("bus", "level", "said"), [
    (GOOD, "ok", "/etc/polkit-1/rules.d/50-cpumond.rules lets cpumond set their limits"),
    (seen(account="root", is_root=True, has_polkit=False, rules=()), "ok", "the agent runs as root"),
    (seen(has_library=False), "warn", "dbus-fast is not installed"),
    (seen(has_bus=False), "warn", "there is no system bus"),
    (seen(has_polkit=False), "warn", "there is no polkit, so systemd lets only root set their limits, not cpumond"),
    (seen(polkit_problem="polkit.service is masked"), "warn", "polkit.service is masked, so systemd lets only root"),
    (seen(is_root=True, polkit_problem="polkit.service is masked"), "ok", "the agent runs as root"),
    (seen(rules=()), "warn", "no polkit rule lets cpumond set their limits"),
    (seen(rules=(), hidden_rules=("/etc/polkit-1/rules.d",)), "warn", "is hidden in /etc/polkit-1/rules.d"),
])  # fmt: skip
def test_whether_systemd_will_let_the_agent_set_limits_of_units(bus, level, said):
    finding = doctor_units.check_unit_rights(["batch.slice/a.service", "batch.slice/b.service", "jobs/x"], bus)
    assert finding.level == level
    assert finding.text.startswith("2 jobs of systemd's units, for example a.service: ")
    assert said in finding.text
    assert bool(finding.advice) == (level == "warn")


def test_rights_do_not_matter_without_units():
    finding = doctor_units.check_unit_rights(["jobs/x", "a.slice/b.service/job"], seen(has_library=False))
    text = "no job is a service or scope of systemd itself: limits are only written to files"
    assert (finding.level, finding.text) == ("ok", text)


def test_a_slice_is_no_unit_that_the_rule_is_about():
    """``managed_roots`` names one, which stands for the jobs where none is there."""
    alone = doctor_units.check_unit_rights(["batch.slice"], GOOD)
    assert (alone.level, "no job is a service or scope" in alone.text) == ("ok", True)
    mixed = doctor_units.check_unit_rights(["batch.slice", "batch.slice/a.scope"], GOOD)
    assert mixed.text.startswith("1 job of systemd's units, for example a.scope: ")


def test_units_that_are_still_to_come_need_the_rights_already():
    finding = doctor_units.check_unit_rights(["batch.slice"], seen(has_polkit=False), are_expected=True)
    assert finding.level == "warn"
    assert finding.text.startswith("no unit is a job now: there is no polkit, so systemd lets only root")


@pytest.mark.parametrize(("loaded", "active", "answer", "problem"), [
    ("loaded", "active", "echo 's \"js\"'", ""),
    ("loaded", "inactive", "echo 'must not be asked' >&2; exit 1", ""),
    ("masked", "inactive", "exit 1", "polkit.service is masked"),
    ("not-found", "inactive", "exit 1", "there is no polkit.service"),
    ("loaded", "failed", "exit 1", "polkit.service has failed"),
    ("loaded", "active", "echo 'Call failed: Connection timed out' >&2; exit 1",
     "polkit.service does not answer (Call failed: Connection timed out)"),
    ("loaded", "active", "exit 1", "polkit.service does not answer"),
    ("loaded", "active", "echo 's \"local\"'", 'this polkit ("local") reads no rules'),
])  # fmt: skip
def test_what_is_wrong_with_polkit(tmp_path, monkeypatch, loaded, active, answer, problem):
    """Programs of systemd that answer as they do on such hosts; it is seen with the real ones in the machine."""
    systemctl = f'case "$*" in *LoadState*) echo {loaded};; *ActiveState*) echo {active};; esac'
    for name, text in (("systemctl", systemctl), ("busctl", answer)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    real = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/run/systemd/system" or real(path))
    assert doctor_host.find_polkit_problem() == problem


def test_the_shipped_rule_is_found_under_any_name(tmp_path):
    shipped = (Path(__file__).parents[4] / "systemd" / "cpumond.rules").read_text()
    (tmp_path / "50-ours.rules").write_text(shipped)
    (tmp_path / "cpumond.rules.bak").write_text(shipped)
    (tmp_path / "10-udisks.rules").write_text("polkit.addRule(function() {});")
    places = [str(tmp_path), str(tmp_path / "missing")]
    assert doctor_host.find_rules("cpumond", places) == ((str(tmp_path / "50-ours.rules"),), ())
    assert doctor_host.find_rules("other", places) == ((), ())


def test_rules_that_may_not_be_looked_at(tmp_path, no_rights):
    tmp_path.chmod(0)
    with no_rights():
        assert doctor_host.find_rules("cpumond", [str(tmp_path)]) == ((), (str(tmp_path),))
    tmp_path.chmod(0o700)


def test_the_account_is_that_of_the_running_agent():
    account, is_root = doctor_host.read_account(AgentSeen(True, os.getpid()))
    assert account
    assert is_root == (os.geteuid() == 0)
    assert doctor_host.see_bus(AgentSeen(True, os.getpid())).account == account


def owners(
    paths: list[str], version: int = 2, delegated: tuple[str, ...] = (), own: tuple[str, ...] = ()
) -> list[Finding]:
    return doctor_units.check_owners(paths, version, lambda path: path in delegated, own)


def test_units_themselves_are_nobody_else_s():
    assert [f.level for f in owners(["batch.slice/a.service", "batch.slice/run-1.scope", "batch.slice"])] == ["ok"]


def test_what_lies_below_a_unit_needs_delegation():
    (finding,) = owners(["a.slice/b.service/job", "a.slice/b.service/x/y", "c.scope/z"], delegated=("c.scope",))
    assert finding.level == "warn"
    assert finding.text == "2 cgroups below units without delegation, for example 'a.slice/b.service/job'"
    assert "Delegate=yes for b.service" in finding.advice
    assert owners(["a.slice/b.service/job"], delegated=("a.slice/b.service",))[0].level == "ok"
    assert owners(["a.slice/b.service/x/y"], delegated=("a.slice/b.service/x",))[0].level == "ok"


def test_hand_made_cgroups_lose_the_controller_on_version_2_only():
    (finding,) = owners(["jobs/a", "jobs/b"])
    assert finding.level == "warn"
    assert finding.text.startswith("2 cgroups outside of systemd's units, for example 'jobs/a': at daemon-reload")
    assert [f.level for f in owners(["jobs/a"], version=1)] == ["ok"]
    assert owners([]) == []


@pytest.mark.parametrize("own_root", ["cpumond", "cpumond.slice", "system.slice/cpumond.service/jobs"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_executor_s_own_root_is_no_concern(own_root, version):
    assert owners([own_root, f"{own_root}/job-1", "idle/job-2"], version, own=(own_root, "idle")) == []
    assert owners([own_root + "-2"], 2, own=(own_root, "idle")) != []


def test_doctor_leaves_the_executor_s_root_out(tmp_path, monkeypatch):
    # The directory that says "systemd runs here" is the only thing of the host that has to be told otherwise.
    real = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/run/systemd/system" or real(path))
    executor = ExecutorOptions(kind="systemd", cgroup_root="cpumond/jobs")
    config = AgentConfig(managed_roots=["cpumond/jobs"], executor=executor)
    found = doctor._examine_systemd(config, unified(tmp_path), [], AgentSeen(False))
    assert [finding.check for finding in found] == ["systemd", "unit limits"]
    config = AgentConfig(managed_roots=["cpumond/jobs"])
    found = doctor._examine_systemd(config, unified(tmp_path), [], AgentSeen(False))
    assert [finding.check for finding in found] == ["systemd", "unit limits", "delegation"]


def test_cgroups_of_other_managers_in_managed_roots(tmp_path):
    tree = {
        "kubepods.slice": {"kubepods-burstable.slice": {"pod1": {}}},
        "system.slice": {
            "docker-0a1b.scope": {}, "docker-0a1c.scope": {}, "docker.service": {},
            "node_slurmstepd.scope": {"job_1": {}},
        },
        "machine.slice": {"libpod-ab.scope": {"container": {}}},
        "jobs": {"job-1": {}},
    }  # fmt: skip
    root = make_tree(tmp_path, tree)
    assert doctor_units.check_foreign_managers(["jobs", "missing"], root) == []
    found = doctor_units.check_foreign_managers(["system.slice"], root)
    assert [f.text for f in found] == [
        "managed_roots has 1 cgroup of Slurm, for example 'system.slice/node_slurmstepd.scope'",
        "managed_roots has 2 cgroups of docker, for example 'system.slice/docker-0a1b.scope'",
    ]
    assert all(f.level == "warn" and f.advice for f in found)
    whole = doctor_units.check_foreign_managers([""], root)
    assert {f.text.split(" of ")[1].split(",")[0] for f in whole} == {"Slurm", "docker", "kubelet", "podman"}
    (inside,) = doctor_units.check_foreign_managers(["kubepods.slice/kubepods-burstable.slice"], root)
    assert "of kubelet, for example 'kubepods.slice/kubepods-burstable.slice'" in inside.text


def test_quotas_above_the_jobs(tmp_path):
    inner = {"x": v2_cgroup(), "y": v2_cgroup(quota="300000 100000")}
    root = make_tree(tmp_path, {"a": {**v2_cgroup(quota="200000 100000"), **inner}})
    (finding,) = doctor_units.check_caps(unified(root), {"a/x": None})
    assert (finding.level, finding.text) == ("ok", "quotas above the jobs: a 2 cores")
    (finding,) = doctor_units.check_caps(unified(root), {"a/x": 4.0, "a/y": None, "gone": 1.0})
    assert finding.level == "warn"
    said = "a has 2 cores, less than 2 jobs below it requested, for example 'a/x': they never get more"
    assert finding.text == said
    assert doctor_units.check_caps(unified(root), {"a": 8.0})[0].text == "quotas above the jobs: none"
    assert doctor_units.check_caps(unified(root), {}) == []


def test_a_unit_without_a_limit_file_may_have_a_quota_above(tmp_path):
    inner = {**v2_cgroup(quota="50000 100000"), "a.service": {"cpu.stat": "usage_usec 0\n"}}
    root = make_tree(tmp_path, {"b.slice": inner})
    (finding,) = doctor_units.check_caps(unified(root), {"b.slice/a.service": 2.0})
    assert finding.text.startswith("b.slice has 0.5 cores, less than 1 job below it requested")


def test_the_pressure_of_jobs(tmp_path):
    root = make_tree(tmp_path, {"a": v2_cgroup(**{"cpu.pressure": PRESSURE}), "b": v2_cgroup()})
    quota = [MonitorSettings(pressure_restore_ratio=0.1)]

    def check(jobs: list[str], settings: list[MonitorSettings], root: str | None = str(root)) -> Finding:
        (finding,) = doctor_units.check_job_pressure(root, jobs, settings)
        return finding

    off = check(["a"], [])
    assert (off.level, off.text) == ("ok", "available for 1 of 1 job (pressure_restore_ratio is off)")
    assert check(["a"], quota).level == "ok"
    missing = check(["a", "b"], quota)
    assert (missing.level, missing.text.partition(": ")[0]) == ("warn", "missing for 1 of 2 jobs")
    assert "cgroup.pressure is 0 there" in missing.text
    assert "throttle_restore_ratio" in missing.advice
    weight = MonitorSettings(limit_rule="peak", actuator="weight")
    assert check(["b"], [*quota, weight]).advice.startswith("nothing shows that it waits for others")
    nowhere = check(["a"], [], None)
    assert (nowhere.level, "cgroup2 is not mounted" in nowhere.text) == ("ok", True)
    assert doctor_units.check_job_pressure(None, [], quota) == []
