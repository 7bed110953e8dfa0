"""What the laws are tried on: settings of the monitor and traces of jobs, in thousandths, which are short in a failing
example and let a scaling by a power of two be exact."""

from dataclasses import dataclass

import msgspec
from hypothesis import strategies as st

from cpumond.monitor.model import MonitorSettings
from cpumond.monitor.policy import VOTE_MODES
from cpumond.monitor.replay import TraceRow


def thousandths(low: float, high: float) -> st.SearchStrategy[float]:
    return st.integers(round(low * 1000), round(high * 1000)).map(lambda n: n / 1000)


RATIOS = st.sampled_from([0.0, 1.0]) | thousandths(0, 1)
CPU_LIMITS = st.sampled_from([10.0, 10.0, 64.0, 1.0]) | thousandths(0.001, 200)


@st.composite
def document_settings(draw: st.DrawFn) -> MonitorSettings:
    """Settings that semantics.md 1.3 and 1.4 speak of; those left at their defaults are common."""
    lower, upper = sorted(draw(st.just((0.6, 0.9)) | st.tuples(RATIOS, RATIOS)))
    window = draw(st.just(5) | st.integers(2, 9))
    return MonitorSettings(
        vote_mode=draw(st.sampled_from(sorted(VOTE_MODES))),
        smoothing_seed=draw(st.sampled_from(["limit", "first_value"])),
        smoothing_factor=draw(st.sampled_from([0.1, 0.5]) | RATIOS),
        relative_lower_bound=lower,
        relative_upper_bound=upper,
        increase_coefficient=draw(st.just(1.45) | thousandths(1, 2)),
        decrease_coefficient=draw(st.just(0.97) | RATIOS),
        vote_window_size=window,
        vote_decision_threshold=draw(st.integers(1, window - 1)),
        min_cpu_limit=draw(st.sampled_from([1.0, 1.0, 0.0]) | thousandths(0, 20)),
        start_delay_s=draw(st.sampled_from([0.0, 0.0, 3.0]) | thousandths(0, 20)),
        throttle_restore_ratio=draw(st.sampled_from([0.09, 0.09, 0.25, 0.0]) | RATIOS),
    )


@st.composite
def any_settings(draw: st.DrawFn) -> MonitorSettings:
    """Settings of every kind, also of the options that neither of the two documents knows."""
    return msgspec.structs.replace(
        draw(document_settings()),
        min_limit_ratio=draw(st.just(0.0) | RATIOS),
        headroom_ratio=draw(st.just(0.0) | thousandths(0, 10)),
        direction=draw(st.sampled_from(["both", "both", "up-only", "down-only"])),
        actuator=draw(st.sampled_from(["quota", "quota", "weight", "guarantee"])),
        throttle_vote=draw(st.booleans()),
        pressure_restore_ratio=draw(st.sampled_from([0.0, 0.0, 0.5]) | RATIOS),
        restore_hold_s=draw(st.just(0.0) | thousandths(0, 50)),
        startup_boost_s=draw(st.just(0.0) | thousandths(0, 50)),
    )


@dataclass(frozen=True)
class Trace:
    """A job's CPU in cores and the rows recorded of it."""

    cpu_limit_cores: float
    rows: tuple[TraceRow, ...]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Stretches of steady usage, sometimes throttled or under pressure, with checks that come late."""
    cpu_limit_cores = draw(CPU_LIMITS)
    time_s = draw(st.just(0.0) | thousandths(-1000, 1000))
    rows = []
    stretch = st.tuples(
        st.sampled_from([10, 20, 30]) | st.integers(1, 30),
        st.sampled_from([0.0, 0.0, 0.5, 1.0]) | thousandths(0, 1.5),
        st.just(1.0) | thousandths(0.001, 30),
        st.sampled_from([0.0, 0.0, 0.0, 0.5]) | RATIOS,
        st.sampled_from([0.0, 0.0, 0.0, 1.0]) | RATIOS,
    )
    for checks, level, interval_s, throttled_ratio, pressure_ratio in draw(st.lists(stretch, min_size=1, max_size=5)):
        for _ in range(checks):
            rows.append(TraceRow(time_s, level * cpu_limit_cores, throttled_ratio, pressure_ratio))
            time_s += interval_s
    return Trace(cpu_limit_cores, tuple(rows))
