"""Laws of the writes over a small model of the kernel: every step is legal where both ends are."""

import math

import msgspec
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from cpumond.host.cgroup.settings import (
    V1_SHARES,
    AncestorCap,
    CpuSettings,
    WriteStep,
    choose_restore,
    compute_quota_target,
    compute_weight_target,
    plan_steps,
)

many = examples(200)

PERIODS = st.sampled_from([100_000, 100_000, 1_000, 1_000_000, 33_333]) | st.integers(1_000, 1_000_000)
QUOTAS = st.none() | st.integers(1_000, 2_000_000) | st.sampled_from([1_000, 1_001, 100_000])
CORES = st.sampled_from([0.0, 1e-6, 0.001, 0.5, 1.0, 64.0]) | st.floats(0.0, 130.0)


class Kernel:
    """The rules of ``tg_set_cfs_bandwidth`` for one cgroup under a parent with a quota (None = none), on v1 or v2."""

    def __init__(self, now: CpuSettings, parent: CpuSettings, child_below_parent: bool = True) -> None:
        self.now = now
        self.parent = parent
        self.child_below_parent = child_below_parent
        self.check()

    def check(self) -> None:
        now, parent = self.now, self.parent
        assert 1_000 <= now.period_us <= 1_000_000, "EINVAL: period"
        if now.quota_us is None:
            return
        assert now.quota_us >= 1_000, "EINVAL: quota"
        assert (now.burst_us or 0) <= now.quota_us, "EINVAL: burst above quota"
        if self.child_below_parent and parent.quota_us is not None:
            ratio, above = ((x.quota_us << 20) // x.period_us for x in (now, parent) if x.quota_us is not None)
            assert ratio <= above, "EINVAL: child above parent"

    def write(self, step: WriteStep) -> None:
        field = {"quota": "quota_us", "period": "period_us", "burst": "burst_us", "weight": "weight"}[step.name]
        self.now = msgspec.structs.replace(self.now, **{field: step.value})
        self.check()


def is_legal(now: CpuSettings, parent: CpuSettings) -> bool:
    try:
        Kernel(now, parent)
    except AssertionError:
        return False
    return True


def fit(settings: CpuSettings, parent: CpuSettings, like: CpuSettings | None = None) -> CpuSettings:
    """``settings`` as the kernel may hold them under ``parent``, with a burst and a weight where ``like`` has them."""
    if not is_legal(settings, parent):
        settings = msgspec.structs.replace(settings, quota_us=parent.quota_us, period_us=parent.period_us)
    burst_us, weight = settings.burst_us, settings.weight
    if like is not None:
        burst_us = None if like.burst_us is None else burst_us or 0
        weight = None if like.weight is None else weight or V1_SHARES[0]
    if burst_us is not None and settings.quota_us is not None:
        burst_us = min(burst_us, settings.quota_us)
    return msgspec.structs.replace(settings, burst_us=burst_us, weight=weight)


def run(before: CpuSettings, after: CpuSettings, parent: CpuSettings) -> CpuSettings:
    kernel = Kernel(before, parent)
    for step in plan_steps(before, after):
        kernel.write(step)
    return kernel.now


@st.composite
def found_settings(draw: st.DrawFn) -> CpuSettings:
    """Settings that the kernel may hold, with any burst that fits."""
    quota_us, period_us = draw(QUOTAS), draw(PERIODS)
    burst_us = draw(st.none() | st.integers(0, quota_us if quota_us is not None else 1_000_000))
    return CpuSettings(quota_us, period_us, burst_us, draw(st.none() | st.integers(*V1_SHARES)))


@st.composite
def parents(draw: st.DrawFn) -> CpuSettings:
    """Settings of the cgroup above."""
    return CpuSettings(draw(QUOTAS), draw(PERIODS))


def cap_of(parent: CpuSettings) -> AncestorCap:
    return AncestorCap(parent.cores, "above")


@many
@given(found_settings(), found_settings(), parents())
@example(CpuSettings(None, 1_000), CpuSettings(1_000, 2_000), CpuSettings(600, 1_000))
@example(CpuSettings(1_000, 2_000), CpuSettings(None, 1_000), CpuSettings(60_000, 100_000))
@example(CpuSettings(200_000, 100_000, 90_000), CpuSettings(1_000, 250_000, 1_000), CpuSettings(None, 100_000))
def test_every_step_between_two_legal_settings_is_legal(before, after, parent):
    before = fit(before, parent)
    after = fit(after, parent, before)
    assert run(before, after, parent) == after


@many
@given(found_settings(), found_settings())
def test_only_what_differs_is_written_and_each_setting_once(before, after):
    names = [step.name for step in plan_steps(before, after)]
    assert len(names) == len(set(names))
    for name, a, b in (("quota", before.quota_us, after.quota_us), ("period", before.period_us, after.period_us)):
        assert (name in names) == (a != b)
    if before.weight == after.weight:
        assert "weight" not in names


@many
@given(CORES, found_settings(), parents(), st.none() | st.floats(0.0, 1.0))
def test_a_target_is_legal_and_never_above_what_was_found_or_allowed(cores, original, parent, burst_ratio):
    original = fit(original, parent)
    target = compute_quota_target(cores, original, cap_of(parent), burst_ratio)
    assert is_legal(target.settings, parent)
    given_cores = target.settings.cores
    assert given_cores <= original.cores + 0.5 / target.settings.period_us
    assert given_cores <= parent.cores + 1e-9
    assert abs(given_cores - target.cores) <= 1.0 / target.settings.period_us + 1e-9
    least = max(cores, 0.001)
    assert target.cores <= max(least, min(cores, original.cores, parent.cores)) + 0.5 / target.settings.period_us + 1e-9
    assert target.settings.period_us >= original.period_us
    assert target.settings.weight == original.weight
    if burst_ratio is None and original.burst_us is not None:
        assert target.settings.burst_us <= original.burst_us
    if 0.001 <= cores <= min(original.cores, parent.cores):
        assert abs(target.settings.cores - cores) <= 1.0 / target.settings.period_us, "given to the microsecond"


@many
@given(st.lists(CORES, min_size=1, max_size=6), found_settings(), parents())
@example([0.5, 2.0], CpuSettings(None, 1_000, 500_000), CpuSettings(60_000, 100_000))
def test_a_life_of_changes_and_the_way_back_are_legal_at_every_step(limits, original, parent):
    now = original = fit(original, parent)
    for cores in limits:
        target = compute_quota_target(cores, original, cap_of(parent))
        now = run(now, target.settings, parent)
        assert now == target.settings
    assert run(now, choose_restore(now, original, ("quota",)), parent) == original


@many
@given(found_settings(), parents(), found_settings())
def test_what_somebody_else_left_is_put_back_legally_too(original, parent, foreign):
    original = fit(original, parent)
    foreign = fit(foreign, parent, original)
    restored = choose_restore(foreign, original, ("quota", "weight"))
    after = run(foreign, restored, parent)
    assert after == restored
    assert after.cores >= original.cores - 1e-9


@many
@given(CORES, st.floats(0.001, 130.0), found_settings())
def test_a_weight_stays_within_the_kernels_bounds_and_below_the_found_one(cores, hard, original):
    target = compute_weight_target(min(cores, hard), hard, original, V1_SHARES)
    if original.weight is None:
        assert target.settings == original
        return
    assert V1_SHARES[0] <= target.settings.weight <= original.weight
    assert msgspec.structs.replace(target.settings, weight=original.weight) == original


@many
@given(st.floats(0.0, 64.0), st.floats(0.0, 64.0), found_settings())
def test_more_cores_never_give_a_smaller_quota(a, b, original):
    low, high = sorted((a, b))
    free = AncestorCap(math.inf)
    lower = compute_quota_target(low, original, free).settings
    higher = compute_quota_target(high, original, free).settings
    assert lower.cores <= higher.cores + 1.0 / higher.period_us
