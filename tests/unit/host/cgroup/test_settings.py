"""CPU settings: what a limit in cores becomes, in which order it is written, what is put back, what was foreign."""

import math

import pytest

from cpumond.host.cgroup.settings import (
    V1_SHARES,
    V2_WEIGHT,
    AncestorCap,
    CpuSettings,
    WriteStep,
    Written,
    adopt_limit,
    choose_restore,
    classify_change,
    compute_quota_target,
    compute_start_weight,
    compute_weight_target,
    is_raised_above,
    least_cap,
    plan_steps,
    same_quota,
)

FREE = AncestorCap(math.inf)
NONE = CpuSettings(None, 100_000)
TWO = CpuSettings(200_000, 100_000, 0, 1024)
ODD_PERIOD = CpuSettings(None, 33_333)


def test_the_same_cores_in_another_period_are_no_order():
    original = CpuSettings(400_000, 100_000)
    written = Written(original, CpuSettings(50_000, 100_000))
    assert choose_restore(CpuSettings(25_000, 50_000), original, ("quota",), written) == original
    ordered = CpuSettings(30_000, 50_000)
    assert choose_restore(ordered, original, ("quota",), written) == ordered


@pytest.mark.parametrize(("cores", "found", "above", "quota", "given", "words"), [
    (1.5, TWO, FREE, (150_000, 100_000), 1.5, ""),
    (1.5, ODD_PERIOD, FREE, (50_000, 33_333), 1.5, ""),
    (3.0, TWO, FREE, (200_000, 100_000), 2.0, "original quota, 2 cores"),
    (3.0, NONE, AncestorCap(1.25, "slice"), (125_000, 100_000), 1.25, "1.25 cores, the quota of slice"),
    # 11111 of 33333 us are more than 33333 of 100000.
    (1.0, ODD_PERIOD, AncestorCap(0.33333, "slice"), (11_110, 33_333), 0.33333, "the quota of slice"),
    (0.004, TWO, FREE, (1_000, 250_000), 0.004, "period lengthened to 250000 us"),
    *((cores, TWO, FREE, (1_000, 1_000_000), 0.001, "raised to 0.001 cores") for cores in (0.0, 0.0001, 0.0009)),
])  # fmt: skip
def test_a_limit_as_a_quota(cores, found, above, quota, given, words):
    target = compute_quota_target(cores, found, above)
    assert target.settings == CpuSettings(*quota, found.burst_us, found.weight)
    assert target.cores == pytest.approx(given)
    assert len(target.notes) == bool(words)
    assert words in "".join(target.notes)


@pytest.mark.parametrize(("found_us", "ratio", "burst_us"), [
    (80_000, None, 50_000), (20_000, None, 20_000), (None, None, None), (0, 0.5, 25_000), (0, 1.0, 50_000),
    (0, 0.0, 0), (None, 0.5, None),
])  # fmt: skip
def test_the_burst_found_is_kept_as_far_as_it_fits_or_is_asked_for(found_us, ratio, burst_us):
    assert compute_quota_target(0.5, CpuSettings(200_000, 100_000, found_us), FREE, ratio).settings.burst_us == burst_us


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


@pytest.mark.parametrize(("cores", "shares", "weight"), [
    (1.0, 1024, 100), (0.5, 512, 50), (2.5, 2560, 250), (0.07, 72, 7), (0.0, 2, 1), (0.001, 2, 1),
    (500.0, 262_144, 10_000),
])  # fmt: skip
def test_a_job_starts_with_the_kernels_default_for_each_core(cores, shares, weight):
    assert (compute_start_weight(cores, 1), compute_start_weight(cores, 2)) == (shares, weight)


@pytest.mark.parametrize(("before", "after", "steps"), [
    (CpuSettings(200_000, 100_000), CpuSettings(1_000, 250_000),
     (WriteStep("quota", 1_000), WriteStep("period", 250_000))),
    (CpuSettings(1_000, 250_000), CpuSettings(200_000, 100_000),
     (WriteStep("period", 100_000), WriteStep("quota", 200_000))),
    (CpuSettings(None, 1_000), CpuSettings(1_000, 2_000), (WriteStep("period", 2_000), WriteStep("quota", 1_000))),
    (TWO, CpuSettings(100_000, 100_000, 0, 512), (WriteStep("quota", 100_000), WriteStep("weight", 512))),
    (TWO, CpuSettings(200_000, 100_000, 0, None), ()),
    (CpuSettings(200_000, 100_000), CpuSettings(100_000, 100_000, 10), (WriteStep("quota", 100_000),)),
], ids=[
    "down", "up", "from no quota", "a weight last", "no weight", "a burst that one side does not have",
])  # fmt: skip
def test_the_order_of_writes(before, after, steps):
    """Of quota and period the one goes first that gives less in between."""
    assert plan_steps(before, after) == steps


def test_the_least_cap():
    assert least_cap([]) == FREE
    assert least_cap([AncestorCap(2.0, "a"), AncestorCap(1.0, "b"), FREE]) == AncestorCap(1.0, "b")


def test_the_same_quota_up_to_systemds_rounding():
    assert same_quota(TWO, CpuSettings(400_000, 200_000))
    assert same_quota(TWO, CpuSettings(200_900, 100_000))
    assert not same_quota(TWO, CpuSettings(201_100, 100_000))
    assert same_quota(NONE, CpuSettings(None, 50_000))
    assert not same_quota(NONE, TWO)


@pytest.mark.parametrize(("found", "actuator", "expected"), [
    (TWO, "quota", "same"),
    (CpuSettings(300_000, 100_000), "quota", "raise"),
    (CpuSettings(None, 100_000), "quota", "raise"),
    (CpuSettings(100_000, 100_000), "quota", "lower"),
    (CpuSettings(200_000, 100_000, 0, 5), "quota", "same"),
    (CpuSettings(None, 100_000, 0, 1024), "weight", "same"),
    (CpuSettings(200_000, 100_000, 0, 2048), "weight", "raise"),
    (CpuSettings(200_000, 100_000, 0, 2), "weight", "lower"),
])  # fmt: skip
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
    restored = choose_restore(CpuSettings(400_000, 100_000, 10), original, ("quota",))
    assert restored == CpuSettings(400_000, 100_000, 50_000)
    assert choose_restore(CpuSettings(None, 100_000, 10), original, ("quota",)).quota_us is None
    assert choose_restore(CpuSettings(50_000, 100_000, 0, 2048), original, ("weight",)).weight == 2048


def test_a_raise_within_systemds_rounding_is_no_raise():
    assert choose_restore(CpuSettings(200_500, 100_000, 0), TWO, ("quota",)).quota_us == 200_000


def test_a_burst_is_restored_as_far_as_it_fits_under_a_foreign_quota():
    original = CpuSettings(100_000, 50_000, 90_000)
    raised = CpuSettings(25_000, 5_000, 0)
    assert choose_restore(raised, original, ("quota",)) == CpuSettings(25_000, 5_000, 25_000)


def test_a_restore_after_a_foreign_raise_keeps_it_and_the_found_burst():
    original = CpuSettings(200_000, 100_000, 50_000, 1024)
    found = CpuSettings(400_000, 50_000, 10, 2048)
    assert is_raised_above(found, original, "quota")
    assert is_raised_above(found, original, "weight")
    assert not is_raised_above(original, original, "quota")
    assert not is_raised_above(original, original, "weight")
    assert adopt_limit(original, found, "quota") == CpuSettings(400_000, 50_000, 50_000, 1024)
    assert adopt_limit(original, found, "weight") == CpuSettings(200_000, 100_000, 50_000, 2048)
