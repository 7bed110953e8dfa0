"""Rule ``peak`` (limit_rules.md 2): the highest use of late and a reserve, and what a period held back does."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from cpumond.core.levels import Actuator
from cpumond.monitor import peak, rules
from cpumond.monitor.model import CpuReading, Decision, JobState, MonitorSettings, start_state
from cpumond.monitor.policy import rebase, restart_at

HARD = 16.0
S = MonitorSettings(limit_rule="peak")


class Driver:
    """A job whose use and throttled periods are given, checked by the rule; 10 periods a second."""

    def __init__(self, s: MonitorSettings = S, state: JobState | None = None) -> None:
        self.s = s
        self.state = start_state(HARD, 0.0) if state is None else state
        self.reading = CpuReading(0.0, 0.0)
        self.check()

    def go(self, cores: float, seconds: float, throttled: int = 0, **others: Any) -> None:
        now = self.reading
        self.reading = msgspec.structs.replace(
            now,
            at_s=now.at_s + seconds,
            total_cpu_s=now.total_cpu_s + cores * seconds,
            nr_periods=now.nr_periods + round(10 * seconds),
            nr_throttled=now.nr_throttled + throttled,
            throttled_s=now.throttled_s + 0.1 * throttled,
            **others,
        )

    def check(self) -> Decision:
        self.state, decision = rules.check(self.state, self.reading, self.reading.at_s, self.s)
        return decision

    def look(self) -> Decision | None:
        found = rules.look(self.state, self.reading, self.s)
        if found is None:
            return None
        self.state, decision = found
        return decision

    def step(self, cores: float, throttled: int = 0, seconds: float = 1.0, **others: Any) -> Decision:
        self.go(cores, seconds, throttled, **others)
        return self.check()

    def lower(self, cores: float = 2.0, seconds: int = 400) -> Driver:
        """To the steady state of a use that never changes."""
        for _ in range(seconds):
            self.step(cores)
        assert self.state.limit_cores < HARD
        return self


def test_startup_boost_may_be_longer_not_shorter_than_the_first_seconds():
    for boost_s, first in ((3.0, 11), (30.0, 31)):
        job = Driver(msgspec.structs.replace(S, startup_boost_s=boost_s))
        kinds = [job.step(0.0).kind for _ in range(40)]
        assert kinds.index("shrink") + 1 == first


def test_a_use_below_the_peak_leaves_the_moment_of_the_peak():
    job = Driver().lower(2.0)
    at_s = job.state.peak_at_s
    job.step(1.5)
    assert job.state.peak_at_s == at_s


def test_the_length_of_a_period_is_that_of_the_cgroup():
    job = Driver(state=msgspec.structs.replace(start_state(HARD, 0.0), cfs_period_s=0.02)).lower(2.0)
    caution = job.state.caution
    job.step(2.0, throttled=3)
    assert job.state.caution == pytest.approx(caution + 3 * 0.02 - 0.004)


def test_a_look_before_the_first_check_or_at_another_cgroup_says_nothing():
    fresh = start_state(HARD, 0.0, limit_cores=4.0)
    throttled = CpuReading(1.0, 1.0, nr_throttled=5)
    assert rules.look(fresh, throttled, S) is None
    whole = Driver()
    whole.go(HARD, 0.2, throttled=2)
    assert whole.look() is None
    replaced = Driver().lower(2.0)
    replaced.go(2.0, 0.2, throttled=2, identity=7)
    assert replaced.look() is None


def test_restore_hold_keeps_all_for_a_time_after_a_check_or_a_look():
    for by_look in (False, True):
        job = Driver(msgspec.structs.replace(S, restore_hold_s=30.0)).lower(2.0)
        job.go(2.0, 1.0, throttled=1)
        assert (job.look() if by_look else job.check()) is not None
        restored_s = job.reading.at_s
        while job.step(0.0).kind == "hold":
            assert job.state.limit_cores == HARD
        assert job.reading.at_s == pytest.approx(restored_s + 30.0, abs=1e-6)


def test_direction_holds_the_other_way_back_but_never_a_restore():
    up = Driver(msgspec.structs.replace(S, direction="up-only"), start_state(HARD, 0.0, limit_cores=4.0))
    kinds = {up.step(1.0).kind for _ in range(100)}
    assert kinds == {"hold"}
    assert up.step(4.5).kind == "grow"
    down = Driver(msgspec.structs.replace(S, direction="down-only")).lower(2.0)
    assert down.step(8.0).kind == "hold"
    assert down.step(2.0, throttled=1).kind == "restore"


def without_ceiling(actuator: Actuator) -> MonitorSettings:
    return msgspec.structs.replace(S, actuator=actuator, use_restore_ratio=None)


@pytest.mark.parametrize("actuator", ["weight", "guarantee"])
def test_without_a_ceiling_use_above_the_limit_is_the_sign_to_restore(actuator: Actuator):
    s = without_ceiling(actuator)
    job = Driver(s, msgspec.structs.replace(start_state(HARD, 0.0), cfs_period_s=0.05)).lower(2.0)
    limit, caution = job.state.limit_cores, job.state.caution
    assert job.step(2.0, throttled=10).kind == "hold"
    assert job.step(limit * 1.01).kind == "restore"
    assert job.state.caution == pytest.approx(max(caution - 0.004, 0.0) + 0.05 - 0.004)
    assert job.state.late_cpu_s == 0.0


@pytest.mark.parametrize("actuator", ["weight", "guarantee"])
def test_a_look_without_a_ceiling_compares_the_use_since_the_look_before(actuator: Actuator):
    s = without_ceiling(actuator)
    job = Driver(s).lower(2.0)
    for _ in range(3):
        job.go(0.2, 0.2)
        decision = job.look()
        assert decision is not None
        assert (decision.kind, decision.changes, decision.usage_cores) == ("hold", False, pytest.approx(0.2))
    job.go(2.5, 0.2)  # the mean since the check is far below the limit
    seen = job.state.seen
    assert seen is not None
    same = msgspec.structs.replace(seen, total_cpu_s=seen.total_cpu_s + 1.0)
    assert rules.look(job.state, same, s) is None  # no time passed
    decision = job.look()
    assert decision is not None
    assert decision.kind == "restore"


def test_pressure_restores_with_either_actuator():
    for actuator in ("quota", "weight"):
        s = msgspec.structs.replace(S, actuator=actuator, pressure_restore_ratio=0.4)
        job = Driver(s)
        job.reading = msgspec.structs.replace(job.reading, pressure_s=0.0)
        job.lower(2.0)
        assert job.step(2.0, pressure_s=0.4).kind == "hold"
        caution = job.state.caution
        assert job.step(2.0, pressure_s=0.9).kind == "restore"
        # Waiting for others is not charged to the budget where a quota is not what it waits for.
        paid_s = 0.1 if actuator == "weight" else 0.0
        assert job.state.caution == pytest.approx(caution + paid_s - 0.004)


def test_a_look_under_a_weight_sees_that_a_job_waits():
    s = MonitorSettings(limit_rule="peak", actuator="weight")
    job = Driver(s)
    job.reading = msgspec.structs.replace(job.reading, pressure_s=0.0)
    job.lower(2.0)
    job.go(1.0, 0.2, pressure_s=0.01)
    assert job.look().kind == "hold"
    caution = job.state.caution
    job.go(1.0, 0.2, pressure_s=0.06)
    assert job.look().kind == "restore"
    assert job.state.caution == pytest.approx(caution + 0.1)


def test_throttling_in_an_uncounted_time_is_restored_and_counts():
    for by_look in (True, False):
        job = Driver().lower(2.0)
        caution = job.state.caution
        job.state = rebase(job.state, None)
        job.go(2.0, 5.0, throttled=30)
        assert job.check().kind == "base"
        job.go(2.0, 0.2)
        decision = job.look() if by_look else job.check()
        assert decision.kind == "restore"
        assert job.state.held.held_s == pytest.approx(3.0)
        assert job.state.caution == pytest.approx(caution + 3.0, abs=0.01)


def test_what_was_throttled_before_a_fresh_window_is_not_paid():
    job = Driver().lower(2.0)
    job.state = restart_at(job.state, 2.0, job.reading.at_s)
    job.go(2.0, 1.0, throttled=10)
    assert job.check().kind == "base"
    assert job.step(1.0).kind != "restore"
    assert job.state.held.count == 0


def test_a_limit_that_is_not_written_counts_use_above_it_until_the_look():
    job = Driver().lower(2.0)
    job.state = msgspec.structs.replace(job.state, is_written=False)
    caution = job.state.caution
    assert job.step(2.0, throttled=10).kind == "hold"  # at what it ordered: there is no other limit
    assert job.step(5.0).kind == "restore"
    assert job.state.held.held_s == pytest.approx(0.2)
    assert job.state.caution == pytest.approx(max(caution - 0.004, 0.0) + 0.2 - 0.004)


def test_a_cut_without_effect_is_tried_again_in_a_minute_or_after_a_raise():
    job = Driver(msgspec.structs.replace(S, min_cpu_limit=0.0)).lower(2.0)
    job.state = peak.put_off_cut(job.state, job.reading.at_s)
    kinds = [job.step(0.0).kind for _ in range(60)]
    assert kinds == [*["hold"] * 59, "shrink"]
    job.state = peak.put_off_cut(job.state, job.reading.at_s)
    assert job.step(12.0).kind == "grow"
    while (decision := job.step(0.0)).kind == "hold":
        assert job.reading.at_s < 1000.0
    assert decision.kind == "shrink"
    assert job.state.no_cut_until_s == -math.inf


def test_an_adopted_limit_that_fits_stays_and_fades_from_there():
    state = start_state(HARD, 0.0, limit_cores=4.0)
    assert peak.find_peak(state, S) == pytest.approx(4.0 / 1.05)
    job = Driver(state=state)
    assert job.step(3.0).kind == "hold"
    assert job.state.peak_cores == pytest.approx(4.0 / 1.05 * 0.5 ** (1 / peak.find_half_life_s(job.state, S)))
    job.lower(1.0)
    assert job.state.limit_cores < 4.0


def test_another_cgroup_is_a_new_baseline_and_keeps_the_caution():
    job = Driver().lower(2.0)
    job.step(2.0, throttled=10)
    job.lower(2.0, seconds=1200)
    limit, caution = job.state.limit_cores, job.state.caution
    decision = job.step(1.0, throttled=50, identity=7)
    assert (decision.kind, decision.changes, job.state.limit_cores) == ("base", False, limit)
    assert (job.state.peak_cores, job.state.caution) == (None, caution)
    assert job.step(limit / 1.05).kind == "hold"


def test_a_counter_of_throttled_periods_that_fell_is_no_sign():
    job = Driver().lower(2.0)
    job.step(2.0, throttled=4)
    job.lower(2.0, seconds=600)
    assert job.step(2.0, throttled=-4).kind == "hold"
    assert job.state.held.count == 1


def test_a_fresh_window_keeps_what_was_learned_but_not_the_peak():
    job = Driver().lower(2.0)
    job.step(2.0, throttled=10)
    anew = restart_at(job.state, 5.0, job.reading.at_s)
    assert (anew.caution, anew.held, anew.watched_s) == (job.state.caution, job.state.held, job.state.watched_s)
    assert (anew.limit_cores, anew.peak_cores) == (5.0, None)
    assert peak.find_peak(anew, S) == pytest.approx(5.0 / 1.05)


def test_the_aggregates_are_those_of_every_rule():
    job = Driver().lower(2.0)
    before, limit = job.state, job.state.limit_cores
    job.step(2.0, throttled=1)
    after = job.state
    assert after.late_cpu_s - before.late_cpu_s == pytest.approx(0.1)
    assert after.max_cpu_s - before.max_cpu_s == pytest.approx(HARD)
    assert after.preemptible_cpu_s == before.preemptible_cpu_s  # all was given back at this check
    job.lower(2.0)
    assert job.state.limit_cores == pytest.approx(limit, rel=0.1)
    assert math.isfinite(job.state.smoothed_cpu_s)
