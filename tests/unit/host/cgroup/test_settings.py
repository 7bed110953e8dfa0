"""CPU settings: what a limit in cores becomes, in which order it is written, what is put back, what was foreign."""

from __future__ import annotations

import math

import pytest

from cpumond.host.cgroup.settings import (
    V1_SHARES,
    V2_WEIGHT,
    AncestorCap,
    CpuSettings,
    Step,
    Written,
    adopt_limit,
    choose_restore,
    classify_change,
    compute_quota_target,
    compute_weight_target,
    is_raised_above,
    least_cap,
    plan_steps,
    same_quota,
)

FREE = AncestorCap(math.inf)
NONE = CpuSettings(None, 100_000)
TWO = CpuSettings(200_000, 100_000, 0, 1024)


# ---- limits


def test_the_same_cores_in_another_period_are_no_order():
    original, written = (
        CpuSettings(400_000, 100_000),
        Written(CpuSettings(400_000, 100_000), CpuSettings(50_000, 100_000)),
    )
    assert choose_restore(CpuSettings(25_000, 50_000), original, ("quota",), written) == original
    ordered = CpuSettings(30_000, 50_000)
    assert choose_restore(ordered, original, ("quota",), written) == ordered


def test_a_limit_is_a_quota_of_the_period_that_was_found():
    target = compute_quota_target(1.5, TWO, FREE)
    assert target.settings == CpuSettings(150_000, 100_000, 0, 1024)
    assert (target.cores, target.notes) == (1.5, ())
    assert compute_quota_target(1.5, CpuSettings(None, 33_333), FREE).settings.quota_us == 50_000


def test_a_limit_is_never_above_the_quota_that_was_found():
    target = compute_quota_target(3.0, TWO, FREE)
    assert (target.settings, target.cores) == (TWO, 2.0)
    assert "quota that was found, 2 cores" in target.notes[0]


def test_a_limit_is_never_above_a_quota_above_it():
    target = compute_quota_target(3.0, NONE, AncestorCap(1.25, "slice"))
    assert (target.settings.quota_us, target.cores) == (125_000, 1.25)
    assert "1.25 cores, the quota of slice" in target.notes[0]


def test_a_limit_held_to_the_quota_above_is_rounded_down():
    cap = AncestorCap(33_333 / 100_000, "slice")
    target = compute_quota_target(1.0, CpuSettings(None, 33_333), cap)
    # 11111 of 33333 us are more than 33333 of 100000.
    assert target.settings.quota_us == 11_110


def test_a_quota_below_one_millisecond_lengthens_the_period():
    target = compute_quota_target(0.004, TWO, FREE)
    assert target.settings.quota_us == 1_000
    assert target.settings.period_us == 250_000
    assert target.cores == pytest.approx(0.004)
    assert "period lengthened to 250000 us" in target.notes[0]


@pytest.mark.parametrize("cores", [0.0, 0.0001, 0.0009])
def test_below_one_millisecond_a_second_the_limit_is_raised(cores):
    target = compute_quota_target(cores, TWO, FREE)
    assert (target.settings.quota_us, target.settings.period_us, target.cores) == (1_000, 1_000_000, 0.001)
    assert "raised to 0.001 cores" in target.notes[0]


def test_the_burst_that_was_found_is_kept_as_far_as_it_fits():
    found = CpuSettings(200_000, 100_000, 80_000)
    assert compute_quota_target(1.0, found, FREE).settings.burst_us == 80_000
    assert compute_quota_target(0.5, found, FREE).settings.burst_us == 50_000
    assert compute_quota_target(0.5, CpuSettings(200_000, 100_000), FREE).settings.burst_us is None


def test_a_burst_that_is_asked_for():
    assert compute_quota_target(1.0, TWO, FREE, 0.5).settings.burst_us == 50_000
    assert compute_quota_target(1.0, TWO, FREE, 1.0).settings.burst_us == 100_000
    assert compute_quota_target(1.0, TWO, FREE, 0.0).settings.burst_us == 0
    assert compute_quota_target(1.0, CpuSettings(200_000, 100_000), FREE, 0.5).settings.burst_us is None


def test_a_weight_is_the_one_that_was_found_scaled():
    target = compute_weight_target(1.0, 4.0, TWO, V1_SHARES)
    assert (target.settings, target.cores) == (CpuSettings(200_000, 100_000, 0, 256), 1.0)
    assert compute_weight_target(4.0, 4.0, TWO, V1_SHARES).settings == TWO
    assert compute_weight_target(0.0001, 4.0, TWO, V1_SHARES).settings.weight == 2
    assert compute_weight_target(0.0001, 4.0, CpuSettings(None, 100_000, 0, 1), V2_WEIGHT).settings.weight == 1


def test_a_cgroup_without_a_weight_stays_as_it_is():
    target = compute_weight_target(1.0, 4.0, NONE, V1_SHARES)
    assert (target.settings, target.notes) == (NONE, ("the cgroup has no weight",))
    assert compute_weight_target(0.0, 0.0, TWO, V1_SHARES).settings == TWO


# ---- order


def steps(before: CpuSettings, after: CpuSettings) -> list[tuple[str, int | None]]:
    return [(step.name, step.value) for step in plan_steps(before, after)]


def test_nothing_to_write():
    assert plan_steps(TWO, TWO) == ()


def test_down_is_burst_then_quota():
    assert steps(CpuSettings(200_000, 100_000, 90_000), CpuSettings(50_000, 100_000, 50_000)) == [
        ("burst", 50_000),
        ("quota", 50_000),
    ]


def test_up_is_quota_then_burst():
    assert steps(CpuSettings(50_000, 100_000, 50_000), CpuSettings(None, 100_000, 90_000)) == [
        ("quota", None),
        ("burst", 90_000),
    ]


def test_of_quota_and_period_the_one_goes_first_that_gives_less_in_between():
    assert steps(CpuSettings(200_000, 100_000), CpuSettings(1_000, 250_000)) == [
        ("quota", 1_000),
        ("period", 250_000),
    ]
    assert steps(CpuSettings(1_000, 250_000), CpuSettings(200_000, 100_000)) == [
        ("period", 100_000),
        ("quota", 200_000),
    ]


def test_no_quota_stands_beside_any_period():
    assert steps(CpuSettings(None, 1_000), CpuSettings(1_000, 2_000)) == [("period", 2_000), ("quota", 1_000)]
    assert steps(CpuSettings(1_000, 2_000), CpuSettings(None, 1_000)) == [("quota", None), ("period", 1_000)]
    assert steps(CpuSettings(None, 1_000), CpuSettings(None, 2_000)) == [("period", 2_000)]


def test_a_weight_is_written_last_and_only_where_there_is_one():
    assert steps(TWO, CpuSettings(100_000, 100_000, 0, 512)) == [("quota", 100_000), ("weight", 512)]
    assert steps(TWO, CpuSettings(200_000, 100_000, 0, None)) == []
    assert plan_steps(NONE, CpuSettings(None, 100_000, None, 5)) == (Step("weight", 5),)


def test_a_burst_that_one_side_does_not_have_is_not_written():
    assert steps(CpuSettings(200_000, 100_000, None), CpuSettings(100_000, 100_000, 10)) == [("quota", 100_000)]


# ---- others


def test_the_least_cap():
    assert least_cap([]) == FREE
    assert least_cap([AncestorCap(2.0, "a"), AncestorCap(1.0, "b"), FREE]) == AncestorCap(1.0, "b")


def test_the_same_quota_up_to_systemds_rounding():
    assert same_quota(TWO, CpuSettings(400_000, 200_000))
    assert same_quota(TWO, CpuSettings(200_900, 100_000))
    assert not same_quota(TWO, CpuSettings(201_100, 100_000))
    assert same_quota(NONE, CpuSettings(None, 50_000))
    assert not same_quota(NONE, TWO)


@pytest.mark.parametrize(
    ("found", "actuator", "expected"),
    [
        (TWO, "quota", "same"),
        (CpuSettings(300_000, 100_000), "quota", "raise"),
        (CpuSettings(None, 100_000), "quota", "raise"),
        (CpuSettings(100_000, 100_000), "quota", "lower"),
        (CpuSettings(200_000, 100_000, 0, 5), "quota", "same"),
        (CpuSettings(None, 100_000, 0, 1024), "weight", "same"),
        (CpuSettings(200_000, 100_000, 0, 2048), "weight", "raise"),
        (CpuSettings(200_000, 100_000, 0, 2), "weight", "lower"),
    ],
)
def test_what_somebody_else_did(found, actuator, expected):
    assert classify_change(TWO, found, actuator) == expected


def test_only_what_was_moved_is_put_back():
    original = CpuSettings(200_000, 100_000, 50_000, 1024)
    now = CpuSettings(50_000, 200_000, 0, 77)
    assert choose_restore(now, original, ("quota",)) == CpuSettings(200_000, 100_000, 50_000, 77)
    assert choose_restore(now, original, ("weight",)) == CpuSettings(50_000, 200_000, 0, 1024)
    assert choose_restore(now, original, ("quota", "weight")) == original
    assert choose_restore(now, original, ()) == now


def test_what_somebody_raised_above_what_was_found_stays():
    original = CpuSettings(200_000, 100_000, 50_000, 1024)
    assert choose_restore(CpuSettings(400_000, 100_000, 10), original, ("quota",)) == CpuSettings(
        400_000, 100_000, 50_000
    )
    assert choose_restore(CpuSettings(None, 100_000, 10), original, ("quota",)).quota_us is None
    assert choose_restore(CpuSettings(50_000, 100_000, 0, 2048), original, ("weight",)).weight == 2048


def test_a_raise_within_systemds_rounding_is_no_raise():
    assert choose_restore(CpuSettings(200_500, 100_000, 0), TWO, ("quota",)).quota_us == 200_000


def test_a_burst_is_put_back_as_far_as_it_fits_under_a_quota_of_somebody_else():
    original = CpuSettings(100_000, 50_000, 90_000)
    raised = CpuSettings(25_000, 5_000, 0)
    assert choose_restore(raised, original, ("quota",)) == CpuSettings(25_000, 5_000, 25_000)


def test_what_is_put_back_after_somebody_raised_it_is_theirs_with_the_burst_that_was_found():
    original = CpuSettings(200_000, 100_000, 50_000, 1024)
    found = CpuSettings(400_000, 50_000, 10, 2048)
    assert is_raised_above(found, original, "quota")
    assert is_raised_above(found, original, "weight")
    assert not is_raised_above(original, original, "quota")
    assert not is_raised_above(original, original, "weight")
    assert adopt_limit(original, found, "quota") == CpuSettings(400_000, 50_000, 50_000, 1024)
    assert adopt_limit(original, found, "weight") == CpuSettings(200_000, 100_000, 50_000, 2048)
