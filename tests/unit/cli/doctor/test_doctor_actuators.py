"""What ``cpumond doctor`` says about what moves, and about what the kernel makes of it."""

import pytest

from cpumond.agent.discovery import FoundJob
from cpumond.cli.doctor import actuators
from cpumond.host.cgroup.idle import IdleClass
from cpumond.monitor.model import MonitorSettings

QUOTA, GUARANTEE = MonitorSettings(), MonitorSettings(actuator="guarantee", min_cpu_limit=0.1)


def test_what_moves_is_said_and_beside_a_quota_what_it_costs():
    free = actuators.check_actuators([GUARANTEE, GUARANTEE])
    assert (free.level, free.text) == (
        "ok", "2 jobs by guarantee: nothing is written to their containers; guarantees move and are reported",
    )  # fmt: skip
    cut = actuators.check_actuators([GUARANTEE, QUOTA])
    assert "1 job by quota: their CPU quotas move: usage is capped there, which makes servers slower" in cut.text
    assert 'actuator = "guarantee"' in cut.advice


def test_jobs_whose_floor_is_all_that_they_ordered_are_counted():
    jobs = [FoundJob(name, "", name, cores) for name, cores in (("a", 1.0), ("b", 4.0), ("c", None))]
    orders = {"c": 0.5}
    found = actuators.check_floors([(job, QUOTA) for job in jobs], orders.__getitem__)
    assert found.level == "warn"
    assert found.text == (
        "nothing can be reclaimed from 2 of 3 jobs, for example 'a': it requested 1 core, and its floor is as "
        "high (min_cpu_limit = 1)"
    )
    assert actuators.check_floors([(job, GUARANTEE) for job in jobs], orders.__getitem__).level == "ok"


@pytest.mark.parametrize(("found", "level", "words"), [
    (IdleClass("idle"), "ok", "run when nothing else wants the CPU"),
    (IdleClass("lowest weight", "this kernel has no cpu.idle"), "warn", "lowest weight: this kernel has no"),
    (IdleClass("", "no cgroup can be made at the root"), "warn", "no cgroup can be made at the root"),
], ids=["idle", "weight", "none"])  # fmt: skip
def test_how_jobs_on_reclaimed_cpu_stand_behind_others(found, level, words):
    finding = actuators.check_idle_class(found)
    assert (finding.level, words in finding.text) == (level, True)


def test_another_scheduler_of_the_kernel_is_named():
    assert [actuators.check_cpu_scheduler(*each).level for each in (("", ""), ("disabled", ""))] == ["ok", "ok"]
    loaded = actuators.check_cpu_scheduler("enabled", "lavd")
    assert (loaded.level, "scheduler lavd is loaded" in loaded.text) == ("warn", True)


def test_how_long_version_1_is_supported_is_said():
    assert "up to 1.0" in actuators.check_version(1).text
    assert actuators.check_version(2).text == "2"
