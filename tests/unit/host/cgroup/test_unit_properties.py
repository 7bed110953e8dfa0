"""Units of systemd: which cgroup is one, and a limit in systemd's words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpumond.host.cgroup.settings import CpuSettings, same_quota
from cpumond.host.cgroup.units import unit_of
from cpumond.host.systemd.properties import (
    NO_LIMIT,
    QUOTA,
    align_weight,
    is_booted,
    is_same_value,
    list_properties,
    object_path,
    round_up,
    shares_of,
    weight_of,
)


@pytest.mark.parametrize(("path", "unit"), [
    ("batch.slice/work.service", "work.service"),
    ("system.slice/docker-3f9a.scope", "docker-3f9a.scope"),
    ("cpumond.slice/cpumond-jobs.slice/cpumond-job-1.service", "cpumond-job-1.service"),
    ("batch.slice", "batch.slice"),
    ("init.scope", "init.scope"),
    ("system.slice/_cpu.service", "cpu.service"),
    ("system.slice/__escaped.service", "_escaped.service"),
    ("system.slice/work.mount", "work.mount"),
    ("", ""),
    ("jobs/1", ""),
    ("jobs/work.service", ""),
    ("machine.slice/libpod-1.scope/container", ""),
    ("system.slice/slurmstepd.scope/job_1/step_0", ""),
    ("user.slice/user-1000.slice/user@1000.service/app.slice/mine.service", ""),
    ("batch.slice/.service", ""),
    ("batch.slice/work.timer", ""),
])  # fmt: skip
def test_which_cgroup_is_a_unit(path: str, unit: str) -> None:
    assert unit_of(path) == unit


@pytest.mark.parametrize(("unit", "name"), [
    ("work.service", "work_2eservice"),
    ("a-b_c@1\\x2d.scope", "a_2db_5fc_401_5cx2d_2escope"),
    ("3f9a.scope", "_33f9a_2escope"),
    ("é.service", "_c3_a9_2eservice"),
    ("", "_"),
])  # fmt: skip
def test_where_a_unit_is_on_the_bus(unit: str, name: str) -> None:
    assert object_path(unit) == f"/org/freedesktop/systemd1/unit/{name}"


def test_systemd_is_known_by_its_marks(tmp_path) -> None:
    marks = (str(tmp_path / "a"), str(tmp_path / "b"))
    assert not is_booted(marks)
    (tmp_path / "b").touch()
    assert is_booted(marks)


@pytest.mark.parametrize(
    ("cores", "rounded"),
    [(0.291, 0.3), (0.29, 0.29), (0.07, 0.07), (1.0, 1.0), (1.0001, 1.01), (0.001, 0.01), (0, 0), (math.inf, math.inf)],
)
def test_limits_of_units_are_whole_percents_rounded_up(cores: float, rounded: float) -> None:
    assert round_up(cores) == pytest.approx(rounded, abs=1e-9)


@given(st.floats(min_value=0.0, max_value=1024.0))
def test_rounding_gives_less_than_a_percent_more(cores: float) -> None:
    rounded = round_up(cores)
    assert cores - 1e-6 <= rounded < cores + 0.01 + 1e-6
    assert round_up(rounded) == rounded


@given(st.integers(min_value=1, max_value=102_400), st.sampled_from([50_000, 100_000, 250_000, 1_000_000]))
def test_what_a_drop_in_keeps_is_the_quota_itself(percent: int, period_us: int) -> None:
    """Whole percents, rounded down: nothing is lost of what is set, so a reload changes nothing."""
    quota_us = percent * period_us // 100
    [(name, value), *_] = list_properties(CpuSettings(quota_us, period_us), ("quota",), 2)
    assert name == "CPUQuotaPerSecUSec"
    assert value // 10_000 == percent
    after = CpuSettings(value // 10_000 * period_us // 100, period_us)
    assert same_quota(CpuSettings(quota_us, period_us), after)


@pytest.mark.parametrize(("settings", "actuators", "version", "properties"), [
    (CpuSettings(150_000, 100_000), ("quota",), 2, (("CPUQuotaPerSecUSec", 1_500_000),)),
    (CpuSettings(33_500, 100_000), ("quota",), 2, (("CPUQuotaPerSecUSec", 340_000),)),
    (CpuSettings(None, 100_000), ("quota",), 2, (("CPUQuotaPerSecUSec", NO_LIMIT),)),
    (CpuSettings(None, 50_000), ("quota",), 2, (("CPUQuotaPerSecUSec", NO_LIMIT),)),
    (CpuSettings(25_000, 50_000), ("quota",), 1, (("CPUQuotaPerSecUSec", 500_000), ("CPUQuotaPeriodUSec", 50_000))),
    (CpuSettings(150_000, 100_000, None, 50), ("weight",), 2, (("CPUWeight", 50),)),
    (CpuSettings(150_000, 100_000, None, 512), ("weight",), 1, (("CPUWeight", 50),)),
    (CpuSettings(150_000, 100_000, None, None), ("weight",), 1, ()),
    (CpuSettings(150_000, 100_000, 7, 1024), ("quota", "weight"), 1,
     (("CPUQuotaPerSecUSec", 1_500_000), ("CPUWeight", 100))),
])  # fmt: skip
def test_a_limit_in_systemds_words(settings, actuators, version, properties) -> None:
    assert list_properties(settings, actuators, version) == properties


@given(st.integers(min_value=2, max_value=262_144))
def test_shares_that_are_aligned_are_what_systemd_writes(shares: int) -> None:
    aligned = align_weight(shares)
    assert shares_of(weight_of(aligned)) == aligned
    assert align_weight(aligned) == aligned


def test_the_default_weight_is_the_default_share() -> None:
    assert (weight_of(1024), shares_of(100)) == (100, 1024)
    assert (weight_of(2), weight_of(262_144)) == (1, 10_000)


@pytest.mark.parametrize(("name", "a", "b", "same"), [
    (QUOTA, 1_230_000, 1_234_567, True),
    (QUOTA, 1_230_000, 1_240_000, False),
    (QUOTA, 1_230_000, NO_LIMIT, False),
    (QUOTA, NO_LIMIT, NO_LIMIT, True),
    ("CPUWeight", 100, 101, False),
])  # fmt: skip
def test_a_quota_is_the_same_within_systemds_rounding(name: str, a: int, b: int, same: bool) -> None:
    assert is_same_value(name, a, b) is is_same_value(name, b, a) is same
